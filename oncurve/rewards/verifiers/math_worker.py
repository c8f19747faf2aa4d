r"""Compares two answers with `math-verify`, in a worker process (`python -m oncurve.rewards.verifiers.math_worker`).

math-verify's own time limits are switched off: they use SIGALRM, fail outside of the main thread, and clear an alarm that was
set. The worker's time limit replaces them (`oncurve/workers/child.py`). Numbers that are too large to evaluate, such as
`9^{9^{9}}`, equal only their own spelling.
"""

from __future__ import annotations

import logging
import math
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from oncurve.workers.child import serve

MAX_EXPONENT = 10_000.0
"""Larger exponents and factorials are not evaluated: sympy would compute every digit."""

MAX_EXPANSION = 50.0
"""Larger powers of a sum with variables are not expanded to be compared."""
MAX_RELATIVE_ERROR = 1e-3
"""math-verify rounds to six decimals, which makes all numbers near 0 equal: they must agree relative to their size too."""

_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))
_TEXT_ONLY = re.compile(r"^\\(?:text|mathrm|textbf)\{([^{}]*)\}$")
_CURRENCY = re.compile(r"\\?\$(?=\s*-?[0-9.])")
_ROOT = re.compile(r"(?<![\\a-z])sqrt\(([^()]*)\)|√\(([^()]*)\)|√([0-9]+)")
_SCIENTIFIC = re.compile(r"([-+]?[0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,3})")
_MIXED = re.compile(r"(?<![0-9.])([0-9]+) ([0-9]+)/([0-9]+)")
_NUMBER = re.compile(r"[0-9]+(?:[.,][0-9]+)*(?:\s*/\s*[0-9]+)?")
_SPACED_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:(?:\\[,;! ]|[ \u00a0\u2009\u202f])[0-9]{3})+(?!\s*[0-9/])")
_SCALED = re.compile(r"([0-9][0-9,]*(?:\.[0-9]+)?)\s*(?:\\text\{\s*)?(hundred|thousand|million|billion|trillion)\b\}?", re.I)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SYMBOL_TABLE = str.maketrans({
    "−": "-", "–": "-", "∞": r"\infty ", "·": r"\cdot ", "²": "^2", "³": "^3", "≈": "", "∅": r"\emptyset",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
})  # fmt: skip
_BARE_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "arcsin", "arccos", "arctan", "pi", "or", "and")
)


_EQUATION = re.compile(r"([^=<>≤≥]+)=[^=]")
_NAME = r"\\?[A-Za-z]+(?:_(?:\w+|\{[^{}]*\}))?"
_ARGUMENTS = r"\s*\((?:[A-Za-z, ]*|[-0-9./, ]*)\)"
_VARIABLE = re.compile(
    rf"{_NAME}'*(?:{_ARGUMENTS})?|{_NAME}\^\{{-1\}}{_ARGUMENTS}|[A-Za-z ]+|\({_NAME}(?:,\s*{_NAME})+\)"
    r"|\\(?:angle|overline|vec|text|mathrm|mathbf)\s*(?:[A-Za-z]+|\{[^{}]*\})|\\frac\{d[a-z]?\}\{d[a-z]\}|\|[A-Z]{2}\|"
)
"""What an equation may give a value to: `x`, `a_{10}`, `f(2)`, `f'(x)`, `f^{-1}(x)`, `(x, y)`, `\\angle ABC`, `|AB|`."""
_UNITS = {
    spelling: unit
    for unit, spellings in {
        "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "dm": "dm decimeter decimetre",
        "m": "m meter metre", "km": "km kilometer kilometre", "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard",
        "mi": "mi mile", "mg": "mg milligram", "g": "g gram", "kg": "kg kilogram", "lb": "lb pound", "oz": "oz ounce",
        "ml": "ml mL milliliter millilitre", "l": "l L liter litre", "s": "s sec second", "min": "min minute",
        "h": "h hr hour", "day": "day", "week": "week", "year": "year", "cent": "cent ¢", "dollar": "dollar", "euro": "euro €",
        "am": "am a.m", "pm": "pm p.m",
        "degree": "degree ° ^\\circ ^{\\circ}", "radian": "rad radian", "mi/h": "mph", "km/h": "kph kmh",
    }.items()
    for spelling in spellings.split()
}  # fmt: skip


def _unit_pattern(index: int) -> str:
    words = "|".join(sorted(map(re.escape, _UNITS), key=len, reverse=True))
    kind, power = rf"(?:(?P<kind{index}>square|sq|cubic|cu)\.?\s+)?", rf"(?:\s*\^?\{{?(?P<power{index}>[23²³])\}}?)?"
    return rf"{kind}(?P<word{index}>(?i:{words}))s?{power}"


_UNIT = rf"{_unit_pattern(1)}(?:\s*(?:/|\bper\b)\s*{_unit_pattern(2)})?"
_QUANTITY = re.compile(rf"(?P<value>.*(?:[0-9)}}\]]|\\pi|π))\s*{_UNIT}")
_MONEY = re.compile(r"\\?\$\s*(?P<value>-?[0-9][0-9.,]*)")
_POWERS = {"square": "^2", "sq": "^2", "2": "^2", "²": "^2", "cubic": "^3", "cu": "^3", "3": "^3", "³": "^3", None: ""}


def split_unit(text: str) -> tuple[str, str | None]:
    r"""A quantity's value and its unit in canonical spelling (`m^2`, `km/h`). For any other text, the text itself and no unit.

    `3 m` is a quantity, and so are `\frac{1}{2}\text{ cm}^2`, `60 miles per hour`, `45^\circ` and `\$5`.
    """
    text = inner(text)
    money = _MONEY.fullmatch(text)
    if money is not None:
        return money["value"], "dollar"
    plain = re.sub(r"\\(?:text|mathrm|textrm|textbf)\s*\{([^{}]*)\}", r" \1", text)
    match = _QUANTITY.fullmatch(re.sub(r"\\[,;! ]|~", " ", plain).strip())
    if match is None:
        return text, None
    parts = [(match[f"word{i}"], match[f"kind{i}"] or match[f"power{i}"]) for i in (1, 2) if match[f"word{i}"]]
    return match["value"].strip(), "/".join(_unit_name(word) + _POWERS[power] for word, power in parts)


def _unit_name(word: str) -> str:
    return _UNITS.get(word) or _UNITS[next(known for known in _UNITS if known.lower() == word.lower())]


def is_other_equation(text: str) -> bool:
    """Whether a text is an equation that does not give a value to a variable: `x^2-5=0`, `2x=10`; not `x=5` or `2+3=5`."""
    match = _EQUATION.search(inner(text))
    if match is None:
        return False
    left = match[1].replace(r"\left", "").replace(r"\right", "").strip()
    return re.search(r"[A-Za-z]", left) is not None and _VARIABLE.fullmatch(left) is None


def inner(text: str) -> str:
    """An answer without its delimiters: dollar signs, LaTeX brackets, asterisks of bold text, a final full stop."""
    text = _TEXT_ONLY.sub(r"\1", text.strip().rstrip(".").strip())
    for begin, end in _DELIMITERS:
        if text.startswith(begin) and text.endswith(end) and len(text) > len(begin) + len(end):
            middle = text[len(begin) : -len(end)]
            if begin not in middle:
                return middle.strip()
    return text


def as_latex(text: str) -> str | None:
    r"""An answer as one formula between dollar signs; None if it is not one answer.

    `1 2 3` is three numbers and `18 and then 20` two: neither is one answer. `18 dollars` is 18.
    """
    text = _CURRENCY.sub("", inner(text).translate(_SYMBOL_TABLE))
    text = _SPACED_THOUSANDS.sub(lambda m: re.sub(r"[^0-9]", "", m[0]), text)
    text = _SCALED.sub(lambda m: f"{Decimal(m[1].replace(',', '')).scaleb(_SCALES[m[2].lower()]):f}", text)
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2] or m[3]}}}", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])|π", r"\\pi", text).replace(r"\varnothing", r"\emptyset")
    text = re.sub(r"(?<![\\A-Za-z])infinity(?![A-Za-z])", r"\\infty", text)
    if "\\" not in text and not _is_one_answer(text):
        return None
    if "\\" not in text and _has_words(text):
        number = _NUMBER.search(text)
        return None if number is None else f"${_signed(text, number)}$"
    percent = re.sub(r"(?<!\\)%", r"\\%", text)
    return f"${percent}$" if text else None


def _is_one_answer(text: str) -> bool:
    numbers = _NUMBER.findall(text)
    has_adjacent_numbers = re.search(r"[0-9]\s+[0-9]", text) is not None
    return not has_adjacent_numbers and (len(numbers) <= 1 or not _has_words(text))


def _has_words(text: str) -> bool:
    return any(word.lower() not in _FUNCTIONS for word in _WORDS.findall(text))


def _signed(text: str, number: re.Match[str]) -> str:
    return ("-" if text[: number.start()].rstrip().endswith("-") else "") + number.group()


@lru_cache(maxsize=4096)
def parse_math(latex: str) -> tuple[Any, ...]:
    """math-verify's parse of a formula: the expression and its spelling, or an empty tuple."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    return tuple(parse(latex, (LatexExtractionConfig(), ExprExtractionConfig()), parsing_timeout=None))


def is_too_large(expression: Any) -> bool:
    """Whether an expression contains a number that is too large to evaluate."""
    from sympy import Basic, preorder_traversal

    return isinstance(expression, Basic) and any(_is_node_too_large(node) for node in preorder_traversal(expression))


def _is_node_too_large(node: Any) -> bool:
    kind = type(node).__name__
    if kind == "Pow" and node.args[0].free_symbols and abs(_magnitude(node.args[1])) > MAX_EXPANSION:
        return True
    if kind == "Pow":
        return abs(_magnitude(node.args[1])) > MAX_EXPONENT and abs(_magnitude(node.args[0])) != 1
    if kind in ("factorial", "factorial2", "binomial", "Sum", "Product"):
        return any(abs(_magnitude(part)) > MAX_EXPONENT for part in node.args if part.is_number)
    return False


def _magnitude(node: Any) -> float:
    """A number's approximate size without evaluating it; 0 if it is no number, infinity on overflow."""
    try:
        if type(node).__name__ == "Pow" and node.is_number:
            return float(_magnitude(node.args[0]) ** _magnitude(node.args[1]))
        if node.args and node.is_number:
            return max((abs(_magnitude(part)) for part in node.args), default=0.0)
        return float(node) if node.is_number else 0.0
    except (OverflowError, ZeroDivisionError, TypeError, ValueError):
        return math.inf


def math_equal(job: dict[str, str]) -> bool:
    """Whether answer and gold are mathematically equal."""
    from math_verify import verify

    (gold_value, gold_unit), (answer_value, answer_unit) = split_unit(job["gold"]), split_unit(job["answer"])
    if gold_unit is not None and answer_unit is not None:
        if gold_unit != answer_unit:
            return False
        return math_equal({"gold": gold_value, "answer": answer_value})
    if answer_unit is not None and not _BARE_LETTER.search(job["gold"]):
        return math_equal({"gold": job["gold"], "answer": answer_value})
    if gold_unit is not None and len(gold_unit.partition("^")[0]) > 1:  # one letter may be a variable
        return math_equal({"gold": gold_value, "answer": job["answer"]})
    gold, answer = as_latex(job["gold"]), as_latex(job["answer"])
    if gold is None or answer is None:
        return False
    if is_other_equation(job["answer"]) and "=" not in job["gold"]:
        return False
    gold_parse, answer_parse = parse_math(gold), parse_math(answer)
    if not gold_parse or not answer_parse or is_too_large(gold_parse[0]) or is_too_large(answer_parse[0]):
        return False
    if not are_close(gold_parse[0], answer_parse[0]):
        return False
    return bool(verify(list(gold_parse), list(answer_parse), timeout_seconds=None))


def are_close(gold: Any, answer: Any) -> bool:
    """False for two numbers whose difference is more than a thousandth of the larger one; true for everything else."""
    from sympy import Basic

    if not (isinstance(gold, Basic) and isinstance(answer, Basic) and gold.is_number and answer.is_number):
        return True
    try:
        first, second = complex(gold), complex(answer)
    except (TypeError, ValueError, OverflowError):
        return True
    size = max(abs(first), abs(second))
    return not math.isfinite(size) or abs(first - second) <= MAX_RELATIVE_ERROR * size


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    import math_verify  # noqa: F401

    serve(math_equal)
