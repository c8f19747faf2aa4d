"""A curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int, low: float | None = None, high: float | None = None) -> str:
    """The curve in at most ``width`` characters, each the mean of an equal share of the values; a share of NaN is a blank.

    ``low`` and ``high`` are the values of the lowest and the highest bar; unset: the smallest and the largest mean.
    """
    means = _shares(values, width)
    known = [m for m in means if math.isfinite(m)]
    if not known:
        return " " * len(means)
    bottom = min(known) if low is None else low
    top = max(known) if high is None else high
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
    known = [v for v in values if math.isfinite(v)]
    return sum(known) / len(known) if known else math.nan
