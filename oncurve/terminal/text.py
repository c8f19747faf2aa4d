"""Numbers as people read them. What is not known is a dash.

A curve in one line of text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeGuard

DASH = "–"


def or_dash(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def percent(share: float | None, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %" if or_dash(share) else DASH


def number(value: float | None) -> str:
    """Three significant digits, never an exponent where plain digits will do: 0.0123, 0.83, 23.4, 1,234."""
    if not or_dash(value):
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
    """A reward: two decimals, so that a column of them lines up; more digits only where those would say nothing."""
    if not or_dash(value):
        return DASH
    return number(value).replace("-", "−") if 0 < abs(value) < 0.01 or abs(value) >= 1000 else f"{value:.2f}".replace("-", "−")


def signed(value: float | None) -> str:
    return f"{value:+.2f}".replace("-", "−") if or_dash(value) else DASH


def duration(seconds: float | None) -> str:
    """0:07, 12:34, 1:02:03, 3 d 4 h."""
    if not or_dash(seconds):
        return DASH
    whole = max(0, round(seconds))
    days, hours, minutes = whole // 86400, whole // 3600, whole // 60
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours}:{minutes % 60:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def size(parameters: int) -> str:
    """842k, 1.7M, 7.6B."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{name}"
    return str(parameters)


def model_size(parameters: int) -> str:
    """842k parameters; a run whose stages use no model has none."""
    return f"{size(parameters)} parameters" if parameters else "no model of its own"


def clean(text: str) -> str:
    """Without what a terminal would obey: a model may write escape codes as well as anything else."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def one_line(text: str) -> str:
    """Text for a table's cell: line breaks shown as marks."""
    return clean(text.replace("\r\n", "⏎").replace("\n", "⏎").replace("\t", " "))


def shorten(text: str, width: int) -> str:
    """Start and end of a text that is too long: a completion's answer stands at its end."""
    line = one_line(text)
    if len(line) <= width:
        return line
    if width < 8:
        return line[: max(width - 1, 0)] + "…"
    head = (width - 1) // 2
    return f"{line[:head]}…{line[len(line) - (width - 1 - head) :]}"


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int, low: float | None = None, high: float | None = None) -> str:
    """The curve in at most ``width`` characters, each the mean of an equal share of the values; a share of NaN is a blank.

    ``low`` and ``high`` are the values of the lowest and the highest bar; unset: the smallest and the largest mean.
    """
    means = _shares(values, width)
    or_dash = [m for m in means if math.isfinite(m)]
    if not or_dash:
        return " " * len(means)
    bottom = min(or_dash) if low is None else low
    top = max(or_dash) if high is None else high
    return "".join(_bar(m, bottom, top) for m in means)


def _bar(value: float, bottom: float, top: float) -> str:
    if not math.isfinite(value):
        return " "
    # Halved first: the distance between two floats may itself be too large for one.
    height = (value / 2 - bottom / 2) / (top / 2 - bottom / 2) if top / 2 > bottom / 2 else 0.0
    return BARS[min(max(int(height * len(BARS)), 0), len(BARS) - 1)]


def _shares(values: Sequence[float], width: int) -> list[float]:
    count = min(len(values), max(width, 0))
    bounds = [len(values) * i // count for i in range(count + 1)] if count else [0]
    return [_mean(values[a:b]) for a, b in pairwise(bounds)]


def _mean(values: Sequence[float]) -> float:
    or_dash = [v for v in values if math.isfinite(v)]
    return sum(or_dash) / len(or_dash) if or_dash else math.nan
