"""Our own checks for common families of reasoning-gym. No part of an answer is executed, and there is no partial credit.

They are stricter than the package's scorers, which accept numbers that are 1 off, and texts that contain the right answer.
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
    "countdown": expression,
    "decimal_chain_sum": equal,
    "dice": equal,
    "fraction_simplification": lowest_terms,
    "gsm_symbolic": equal,
    "letter_jumble": equal_without_case,
    "needle_haystack": equal_without_case,
    "number_sorting": equal_lists,
    "palindrome_generation": palindrome,
    "prime_factorization": factors,
    "products": equal,
    "spell_backward": equal_without_case,
    "spiral_matrix": equal_lists,
    "string_insertion": equal,
    "word_sorting": equal_lists,
}
"""By family. One that is not listed and has no scorer of its own (gcd, lcm, leg_counting, basic_arithmetic …) uses `equal`."""
