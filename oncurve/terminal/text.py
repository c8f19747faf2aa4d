"""Formats numbers, durations, texts and curves for a terminal. A missing or non-finite number is a dash."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import TypeGuard

from oncurve.errors import printable

DASH = "–"


def is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def percent(share: float | None, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %" if is_finite(share) else DASH


def number(value: float | None) -> str:
    """Three significant digits, with an exponent only below 0.001: 0.0123, 0.830, 23.4, 1,234, 3.0e-07."""
    if not is_finite(value):
        return DASH
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{min(max(2 - math.floor(math.log10(size)), 0), 5)}f}"


def score(value: float | None) -> str:
    """A reward: two decimals, so that a column lines up; other digits only below 0.01 or from 1,000 on."""
    if not is_finite(value):
        return DASH
    return number(value).replace("-", "−") if 0 < abs(value) < 0.01 or abs(value) >= 1000 else f"{value:.2f}".replace("-", "−")


def signed(value: float | None) -> str:
    return f"{value:+.2f}".replace("-", "−") if is_finite(value) else DASH


def duration(seconds: float | None) -> str:
    """0:07, 12:34, 1:02:03, 3 d 4 h."""
    if not is_finite(seconds):
        return DASH
    total = max(0, round(seconds))
    days, hours, minutes = total // 86400, total // 3600, total // 60
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours}:{minutes % 60:02d}:{total % 60:02d}" if hours else f"{minutes}:{total % 60:02d}"


def size(parameters: int) -> str:
    """842k, 1.7M, 7.6B."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{name}"
    return str(parameters)


def model_size(parameters: int) -> str:
    """Such as `842k parameters`; `no model` if it is 0, as in a run whose stages use no model."""
    return f"{size(parameters)} parameters" if parameters else "no model"


def one_line(text: str) -> str:
    """Text for a table cell, with line breaks as ⏎."""
    return printable(text.replace("\r\n", "⏎").replace("\n", "⏎").replace("\t", " "))


def shorten(text: str, width: int) -> str:
    """Cuts the middle out of a text that is too long: a completion's answer is at its end."""
    line = one_line(text)
    if len(line) <= width:
        return line
    if width < 8:
        return line[: max(width - 1, 0)] + "…"
    head = (width - 1) // 2
    return f"{line[:head]}…{line[len(line) - (width - 1 - head) :]}"


def shorten_all(texts: Sequence[str], width: int) -> list[str]:
    """Shortens texts so that they can be told apart: what all of them begin and end with is left out first.

    Example: of "What is the capital of France? Be brief." and the same with Peru, 12 characters are "…France?…" and "…Peru?…"
    """
    lines = [one_line(text) for text in texts]
    if len(set(lines)) < 2 or all(len(line) <= width for line in lines):
        return [shorten(line, width) for line in lines]
    shortest = min(map(len, lines))
    start = _same_letters(lines)
    end = min(_same_letters([line[::-1] for line in lines]), shortest - start)
    start = lines[0].rfind(" ", 0, start) + 1  # at the beginning of a word
    tail = lines[0][len(lines[0]) - end :] if end else ""
    end = len(tail) - tail.find(" ") if " " in tail else 0
    return [shorten(f"{'…' * (start > 0)}{line[start : len(line) - end]}{'…' * (end > 0)}", width) for line in lines]


def _same_letters(lines: Sequence[str]) -> int:
    """How many characters all lines begin with."""
    return sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, zip(*lines, strict=False)))


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int, low: float | None = None, high: float | None = None) -> str:
    """The curve in at most ``width`` characters, each the mean of an equal span of the values; a span of NaN is a blank.

    ``low`` and ``high`` are the values of the lowest and the highest bar; by default the smallest and the largest mean.
    """
    means = _span_means(values, width)
    finite = [m for m in means if math.isfinite(m)]
    if not finite:
        return " " * len(means)
    bottom = min(finite) if low is None else low
    top = max(finite) if high is None else high
    return "".join(_bar(m, bottom, top) for m in means)


def _bar(value: float, bottom: float, top: float) -> str:
    if not math.isfinite(value):
        return " "
    # Halved first: the difference of two floats may overflow.
    height = (value / 2 - bottom / 2) / (top / 2 - bottom / 2) if top / 2 > bottom / 2 else 0.0
    return BARS[min(max(int(height * len(BARS)), 0), len(BARS) - 1)]


def _span_means(values: Sequence[float], width: int) -> list[float]:
    count = min(len(values), max(width, 0))
    bounds = [len(values) * i // count for i in range(count + 1)] if count else [0]
    return [_mean(values[a:b]) for a, b in pairwise(bounds)]


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan
