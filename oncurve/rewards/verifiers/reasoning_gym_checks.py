"""Checks of our own for the common families of reasoning-gym: nothing of an answer is ever executed, and none is half right.

Where the package's scorer is lenient (a list of numbers that is 1 off, a text that holds the right answer among others) these
are not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
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
    """Countdown: every number once, and the target."""
    try:
        made = parse(answer)
    except ExpressionError:
        return False
    return Counter(made.numbers) == Counter(int(n) for n in columns["numbers"]) and made.value == int(columns["target"])


def items(text: str) -> list[str]:
    """The parts of a list, however it is written: brackets, quotes, commas or spaces."""
    bare = re.sub(r"[\[\]()'\"]", " ", text)
    return [part.strip() for part in (bare.split(",") if "," in bare else bare.split())]


def listed(answer: str, columns: Columns) -> bool:
    """The same parts in the same order, as numbers or texts."""
    given, wanted = items(answer), items(str(columns["answer"]))
    return len(given) == len(wanted) and all(map(answers_equal, given, wanted))


def factors(answer: str, columns: Columns) -> bool:
    """The same factors in any order."""
    parts = re.split(r"\s*(?:×|\*|x|\\times|\\cdot)\s*", answer.strip().strip("$"))
    return all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts) and Counter(map(int, parts)) == Counter(
        int(factor) for factor in columns["factors"]
    )


def lowest_terms(answer: str, columns: Columns) -> bool:
    """The very fraction, and not another one of its value."""
    found = _FRACTION.fullmatch(answer.strip())
    if found is None:
        return False
    top, bottom = [group for group in found.groups() if group is not None]
    return (top, bottom) == (str(columns["simplified_numerator"]), str(columns["simplified_denominator"]))


def palindrome(answer: str, columns: Columns) -> bool:
    """The same forwards and backwards, of exactly the given letters."""
    word = answer.strip().lower()
    return word == word[::-1] and Counter(word) == Counter(columns["letters"])


def hexadecimal(answer: str, columns: Columns) -> bool:
    """The same whole number, written with or without 0x."""
    given, wanted = (re.fullmatch(r"(-?)(?:0x)?([0-9a-f]{1,40})", text.strip().lower()) for text in (answer, columns["answer"]))
    if given is None or wanted is None:
        return False
    return given[1] == wanted[1] and int(given[2], 16) == int(wanted[2], 16)


CHECKS: dict[str, Callable[[str, Columns], bool]] = {
    "bitwise_arithmetic": hexadecimal,
    "calendar_arithmetic": equal_without_case,
    "chain_sum": equal,
    "countdown": expression,
    "decimal_chain_sum": equal,
    "dice": equal,
    "fraction_simplification": lowest_terms,
    "gsm_symbolic": equal,
    "letter_jumble": equal_without_case,
    "needle_haystack": equal_without_case,
    "number_sorting": listed,
    "palindrome_generation": palindrome,
    "prime_factorization": factors,
    "products": equal,
    "spell_backward": equal_without_case,
    "spiral_matrix": listed,
    "string_insertion": equal,
    "word_sorting": listed,
}
"""By family. A family that is not here and has no scorer of its own (gcd, lcm, leg_counting, basic_arithmetic …) is `equal`."""
