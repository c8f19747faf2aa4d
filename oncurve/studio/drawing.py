"""A curve as SVG, for files that must hold everything themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from oncurve.studio.curves import thinned

Points = Sequence[tuple[int, float]]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 170, 52, 16, 8, 24
MOST = 700


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers between two others: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * power for unit in (1, 2, 5, 10) if unit * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, math.floor(high / step + 1e-9) + 1)]


def chart(name: str, points: Points) -> str:
    """One curve with its axes; values that are not numbers are gaps."""
    known = [(step, value) for step, value in thinned(points, MOST) if math.isfinite(value)]
    if not known:
        return "<p class=soft>no value yet</p>"
    steps, values = [step for step, _ in known], [value for _, value in known]
    x0, x1 = float(steps[0]), float(max(steps[-1], steps[0] + 1))
    y0, y1 = min(values), max(values)
    if y1 - y0 < 1e-12 * max(1.0, abs(y1)):
        y0, y1 = y0 - 0.5, y1 + 0.5

    def x(step: float) -> float:
        return LEFT + (step - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">']
    for tick in ticks(y0, y1):
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for tick in ticks(x0, x1, 5):
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{tick:g}</text>')
    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in known)
    parts.append(f'<polyline class="line" points="{line}"/>')
    parts.append(f'<circle class="dot" cx="{x(steps[-1]):.1f}" cy="{y(values[-1]):.1f}" r="2.6"/></svg>')
    return "".join(parts)
