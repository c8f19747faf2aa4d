"""A parser for arithmetic that a model writes, such as `(5+7)*2`, so that no text of a model is executed.

    sum     = product  { ("+" | "-") product }
    product = operand  { ("*" | "/") operand }
    operand = number | "(" sum ")"

There are no powers, signs or functions. Length, depth and digits are limited and values are exact fractions, so the worst text
takes microseconds.
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
    """A text that is not an expression. The message becomes the reward's reason."""


@dataclass(frozen=True, slots=True)
class Expression:
    """The value of an expression, and the numbers in it from left to right.

    Example: ``parse("(5+7)*2")`` is ``Expression(Fraction(24), (5, 7, 2))``
    """

    value: Fraction
    numbers: tuple[int, ...]


def parse(text: str) -> Expression:
    """Parses an expression. `×`, `·`, `÷` and `−` count as `*`, `*`, `/` and `-`; white space is ignored."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"longer than {MAX_LENGTH} characters")
    parser = _Parser(_tokens(text))
    value = parser.parse_sum(0)
    if parser.next is not None:
        raise ExpressionError(f"'{parser.next}' is not expected here")
    return Expression(value, tuple(parser.numbers))


def _tokens(text: str) -> list[str]:
    tokens, index = [], 0
    text = text.translate(_SPELLINGS)
    while index < len(text):
        match = _TOKEN.match(text, index)
        if match is not None:
            tokens.append(match.group())
        elif not text[index].isspace():
            raise ExpressionError(f"{text[index]!r} is not part of an expression")
        index = match.end() if match is not None else index + 1
    return tokens


class _Parser:
    """Recursive descent over the tokens; ``next`` is the one to be read."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._index = tokens, 0
        self.numbers: list[int] = []

    @property
    def next(self) -> str | None:
        return self._tokens[self._index] if self._index < len(self._tokens) else None

    def _take(self) -> str:
        token = self.next
        if token is None:
            raise ExpressionError("it ends too early")
        self._index += 1
        return token

    def parse_sum(self, depth: int) -> Fraction:
        return self._parse_chain("+-", self._parse_product, depth)

    def _parse_product(self, depth: int) -> Fraction:
        return self._parse_chain("*/", self._parse_operand, depth)

    def _parse_chain(self, signs: str, parse_part: Callable[[int], Fraction], depth: int) -> Fraction:
        value = parse_part(depth)
        while self.next is not None and self.next in signs:
            sign, operand = self._take(), parse_part(depth)
            if sign == "/" and operand == 0:
                raise ExpressionError("it divides by 0")
            value = OPERATIONS[sign](value, operand)
        return value

    def _parse_operand(self, depth: int) -> Fraction:
        token = self._take()
        if token == "(":
            return self._parse_bracket(depth + 1)
        if not token.isdigit():
            raise ExpressionError(f"'{token}' is not expected here")
        if len(token) > MAX_DIGITS:
            raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
        self.numbers.append(int(token))
        return Fraction(self.numbers[-1])

    def _parse_bracket(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"brackets are nested more than {MAX_DEPTH} deep")
        value = self.parse_sum(depth)
        if self._take() != ")":
            raise ExpressionError("a bracket is not closed")
        return value
