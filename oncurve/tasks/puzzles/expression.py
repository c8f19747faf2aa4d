"""Sums as a model writes them: `(5+7)*2`. A small parser of our own, so that no text of a model is ever executed.

    sum     = product  { ("+" | "-") product }
    product = operand  { ("*" | "/") operand }
    operand = number | "(" sum ")"

There is no power, no sign and no function. Length, depth and number size are bounded, and values are exact fractions, so that
the worst text costs microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 200
MAX_DEPTH = 20
MAX_DIGITS = 9

_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})

OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


class ExpressionError(ValueError):
    """A text that is not an expression; the message says why, for the reward's reason."""


@dataclass(frozen=True, slots=True)
class Expression:
    """What an expression is worth, and the numbers written in it, from left to right."""

    value: Fraction
    numbers: tuple[int, ...]


def parse(text: str) -> Expression:
    """Reads an expression. `×`, `·`, `÷` and `−` count as `*`, `*`, `/` and `-`; white space is free."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters")
    reader = _Reader(_tokens(text))
    value = reader.read_sum(0)
    if reader.next is not None:
        raise ExpressionError(f"'{reader.next}' is not expected here")
    return Expression(value, tuple(reader.numbers))


def _tokens(text: str) -> list[str]:
    tokens, place = [], 0
    text = text.translate(_SPELLINGS)
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is not None:
            tokens.append(match.group())
        elif not text[place].isspace():
            raise ExpressionError(f"{text[place]!r} is not part of an expression")
        place = match.end() if match is not None else place + 1
    return tokens


class _Reader:
    """Recursive descent over the tokens; `next` is the one to be read."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._place = tokens, 0
        self.numbers: list[int] = []

    @property
    def next(self) -> str | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _take(self) -> str:
        token = self.next
        if token is None:
            raise ExpressionError("it ends too early")
        self._place += 1
        return token

    def read_sum(self, depth: int) -> Fraction:
        return self._read_chain("+-", self._read_product, depth)

    def _read_product(self, depth: int) -> Fraction:
        return self._read_chain("*/", self._read_operand, depth)

    def _read_chain(self, signs: str, read: Callable[[int], Fraction], depth: int) -> Fraction:
        value = read(depth)
        while self.next is not None and self.next in signs:
            sign, operand = self._take(), read(depth)
            if sign == "/" and operand == 0:
                raise ExpressionError("it divides by 0")
            value = OPERATIONS[sign](value, operand)
        return value

    def _read_operand(self, depth: int) -> Fraction:
        token = self._take()
        if token == "(":
            return self._read_bracket(depth + 1)
        if not token.isdigit():
            raise ExpressionError(f"'{token}' is not expected here")
        if len(token) > MAX_DIGITS:
            raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
        self.numbers.append(int(token))
        return Fraction(self.numbers[-1])

    def _read_bracket(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"brackets deeper than {MAX_DEPTH}")
        value = self.read_sum(depth)
        if self._take() != ")":
            raise ExpressionError("a bracket is not closed")
        return value
