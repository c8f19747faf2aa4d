r"""Compares two answers with `math-verify`, inside a worker process (`python -m oncurve.rewards.verifiers.math_worker`).

Its own time limits are switched off: they use SIGALRM, fail off the main thread, and clear an alarm that was set. The worker's
limit stands in for them (`worker_loop`). Numbers that would take longer to write down than to judge, such as `9^{9^{9}}`, are
not evaluated: they equal nothing but their own spelling.
"""

from __future__ import annotations

import logging
import math
import re
from functools import lru_cache
from typing import Any

from oncurve.workers.child import serve

LARGEST = 10_000.0
"""Exponents and factorials beyond this are left alone: sympy would write out every digit."""

_AROUND = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_CURRENCY = re.compile(r"\\?\$(?=\s*-?[0-9.])")
_ROOT = re.compile(r"(?<![\\a-z])sqrt\(([^()]*)\)|√\(([^()]*)\)|√([0-9]+)")
_SCIENTIFIC = re.compile(r"([-+]?[0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,3})")
_MIXED = re.compile(r"(?<![0-9.])([0-9]+) ([0-9]+)/([0-9]+)")
_NUMBER = re.compile(r"[0-9]+(?:[.,][0-9]+)*")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "arcsin", "arccos", "arctan", "pi", "or", "and")
)


def inner(text: str) -> str:
    """An answer without what is around it: dollar signs, brackets of LaTeX, a final full stop."""
    text = text.strip().rstrip(".").strip()
    for begin, end in _AROUND:
        if text.startswith(begin) and text.endswith(end) and len(text) > len(begin) + len(end):
            middle = text[len(begin) : -len(end)]
            if begin not in middle:
                return middle.strip()
    return text


def as_latex(text: str) -> str | None:
    r"""An answer as one formula between dollar signs; None where it is none.

    `1 2 3` is three numbers, and `18 and then 20` two: neither is an answer. `18 dollars` is 18.
    """
    text = _CURRENCY.sub("", inner(text).replace("−", "-"))
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2] or m[3]}}}", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])|π", r"\\pi", text)
    if "\\" not in text and not _one_thing(text):
        return None
    if "\\" not in text and _words(text):
        number = _NUMBER.search(text)
        return None if number is None else f"${_signed(text, number)}$"
    percent = re.sub(r"(?<!\\)%", r"\\%", text)
    return f"${percent}$" if text else None


def _one_thing(text: str) -> bool:
    numbers = _NUMBER.findall(text)
    beside = re.search(r"[0-9]\s+[0-9]", text) is not None
    return not beside and (len(numbers) <= 1 or not _words(text))


def _words(text: str) -> bool:
    return any(word.lower() not in _FUNCTIONS for word in _WORDS.findall(text))


def _signed(text: str, number: re.Match[str]) -> str:
    return ("-" if text[: number.start()].rstrip().endswith("-") else "") + number.group()


@lru_cache(maxsize=4096)
def parse_math(latex: str) -> tuple[Any, ...]:
    """What math-verify reads in a formula: the expression and its spelling, or nothing."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    return tuple(parse(latex, (LatexExtractionConfig(), ExprExtractionConfig()), parsing_timeout=None))


def is_too_large(expression: Any) -> bool:
    """Whether an expression holds a number too large to be worked out."""
    from sympy import Basic, preorder_traversal

    return isinstance(expression, Basic) and any(_too_large(node) for node in preorder_traversal(expression))


def _too_large(node: Any) -> bool:
    kind = type(node).__name__
    if kind == "Pow":
        return abs(_size(node.args[1])) > LARGEST and abs(_size(node.args[0])) != 1
    if kind in ("factorial", "factorial2", "binomial", "Sum", "Product"):
        return any(abs(_size(part)) > LARGEST for part in node.args if part.is_number)
    return False


def _size(node: Any) -> float:
    """About how large a number is, without working it out; 0 where it is not a number, infinite where it overflows."""
    try:
        if type(node).__name__ == "Pow" and node.is_number:
            return float(_size(node.args[0]) ** _size(node.args[1]))
        if node.args and node.is_number:
            return max((abs(_size(part)) for part in node.args), default=0.0)
        return float(node) if node.is_number else 0.0
    except (OverflowError, ZeroDivisionError, TypeError, ValueError):
        return math.inf


def math_equal(job: dict[str, str]) -> bool:
    """Whether the answer says what the gold says."""
    from math_verify import verify

    gold, answer = as_latex(job["gold"]), as_latex(job["answer"])
    if gold is None or answer is None:
        return False
    wanted, given = parse_math(gold), parse_math(answer)
    if not wanted or not given or is_too_large(wanted[0]) or is_too_large(given[0]):
        return False
    return bool(verify(list(wanted), list(given), timeout_seconds=None))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    import math_verify  # noqa: F401

    serve(math_equal)
