"""Our own checks for common families of reasoning-gym. No part of an answer is executed, and there is no partial credit.

They are stricter than the package's scorers, which accept numbers that are 1 off, texts that contain the right answer, and in
four families one answer to every problem (`6*4*1*1` in puzzle24, `nan` in complex_arithmetic, `0` in coin_flip, any text in
game_of_life_halting).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from oncurve.rewards.verifiers.answer import answers_equal
from oncurve.tasks.puzzles.expression import ExpressionError, parse

Columns = Mapping[str, Any]
_FRACTION = re.compile(r"\$?\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}\$?|\$?(-?[0-9]+)\s*/\s*([0-9]+)\$?")


def equal(answer: str, columns: Columns) -> bool:
    """The same number, or the same text."""
    return answers_equal(answer, str(columns["answer"]))


def equal_without_case(answer: str, columns: Columns) -> bool:
    return answers_equal(answer.lower(), str(columns["answer"]).lower())


def expression(answer: str, columns: Columns) -> bool:
    """Countdown: uses every number once and makes the target."""
    try:
        parsed = parse(answer)
    except ExpressionError:
        return False
    return Counter(parsed.numbers) == Counter(int(n) for n in columns["numbers"]) and parsed.value == int(columns["target"])


def items(text: str) -> list[str]:
    """The items of a list in any notation: with brackets, quotes, commas or spaces."""
    bare = re.sub(r"[\[\]()'\"]", " ", text)
    return [part.strip() for part in (bare.split(",") if "," in bare else bare.split())]


def equal_lists(answer: str, columns: Columns) -> bool:
    """The same items in the same order, as numbers or texts."""
    answer_items, gold_items = items(answer), items(str(columns["answer"]))
    return len(answer_items) == len(gold_items) and all(map(answers_equal, answer_items, gold_items))


def factors(answer: str, columns: Columns) -> bool:
    """The same factors in any order."""
    parts = re.split(r"\s*(?:×|\*|x|\\times|\\cdot)\s*", answer.strip().strip("$"))
    return all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts) and Counter(map(int, parts)) == Counter(
        int(factor) for factor in columns["factors"]
    )


def lowest_terms(answer: str, columns: Columns) -> bool:
    """The fraction in lowest terms; an equal one with other terms is wrong."""
    match = _FRACTION.fullmatch(answer.strip())
    if match is None:
        return False
    top, bottom = [group for group in match.groups() if group is not None]
    return (top, bottom) == (str(columns["simplified_numerator"]), str(columns["simplified_denominator"]))


def palindrome(answer: str, columns: Columns) -> bool:
    """A palindrome of exactly the given letters."""
    word = answer.strip().lower()
    return word == word[::-1] and Counter(word) == Counter(columns["letters"])


def twenty_four(answer: str, columns: Columns) -> bool:
    """An expression of exactly the four given numbers that makes 24."""
    return expression(answer, {"numbers": columns["numbers"], "target": 24})


def probability(answer: str, columns: Columns) -> bool:
    """The probability as a decimal or a fraction, off by at most 0.0001 and by at most a twentieth of it."""
    value, gold = (_as_fraction(text) for text in (answer, str(columns["answer"])))
    if value is None or gold is None:
        return False
    return abs(value - gold) <= min(Fraction(1, 10_000), gold / 20)


def _as_fraction(text: str) -> Fraction | None:
    match = re.fullmatch(r"\s*([0-9]{0,30})(\.[0-9]{1,30})?\s*(?:/\s*([0-9]{1,30}))?\s*", text)
    if match is None or not (match[1] or match[2]) or (match[3] is not None and int(match[3]) == 0):
        return None
    return Fraction((match[1] or "0") + (match[2] or "")) / int(match[3] or 1)


_COMPLEX = re.compile(r"(?P<real>[-+]?[0-9.]+)(?P<second>[-+][0-9.]*i)?|(?P<only>[-+]?[0-9.]*i)")


def complex_number(answer: str, columns: Columns) -> bool:
    """The same real and imaginary part, to a hundredth: `3.0 - 2.0i`, `3-2i`, `4i`."""
    value, gold = (_as_complex(text) for text in (answer, str(columns["answer"])))
    return value is not None and gold is not None and abs(value - gold) < 0.01


def _as_complex(text: str) -> complex | None:
    match = _COMPLEX.fullmatch(re.sub(r"\s", "", text).replace("−", "-").replace("j", "i"))
    if match is None:
        return None
    imaginary = (match["second"] or match["only"] or "0i").rstrip("i")
    try:
        return complex(float(match["real"] or 0), float(f"{imaginary}1" if imaginary in ("", "+", "-") else imaginary))
    except ValueError:
        return None


def hexadecimal(answer: str, columns: Columns) -> bool:
    """The same integer, with or without 0x."""
    number, gold = (re.fullmatch(r"(-?)(?:0x)?([0-9a-f]{1,40})", text.strip().lower()) for text in (answer, columns["answer"]))
    if number is None or gold is None:
        return False
    return number[1] == gold[1] and int(number[2], 16) == int(gold[2], 16)


CHECKS: dict[str, Callable[[str, Columns], bool]] = {
    "bitwise_arithmetic": hexadecimal,
    "calendar_arithmetic": equal_without_case,
    "chain_sum": equal,
    "coin_flip": probability,
    "complex_arithmetic": complex_number,
    "countdown": expression,
    "decimal_chain_sum": equal,
    "dice": equal,
    "fraction_simplification": lowest_terms,
    "game_of_life_halting": equal_without_case,
    "gsm_symbolic": equal,
    "letter_jumble": equal_without_case,
    "needle_haystack": equal_without_case,
    "number_sorting": equal_lists,
    "palindrome_generation": palindrome,
    "prime_factorization": factors,
    "products": equal,
    "puzzle24": twenty_four,
    "spell_backward": equal_without_case,
    "spiral_matrix": equal_lists,
    "string_insertion": equal,
    "word_sorting": equal_lists,
}
"""By family. One that is not listed and has no scorer of its own (gcd, lcm, leg_counting, basic_arithmetic …) uses `equal`."""
