"""Numbers that come apart: an update with a NaN or a spike is left out, so that one bad batch does not end a run.

A value is a spike where |value − median| > spike · max(MAD, |median| / 10, floor), over the last ``window`` updates that were
taken; MAD is the median absolute deviation times 1.4826, which is the standard deviation of a normal distribution. Medians do
not move for a spike as means do. Floors say what size of a change matters at all: mean rewards that rise from 0 to 1 in one
step are what training is for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor

from oncurve.recipe.schema.sections import Guard as Settings

FLOORS = {"grad_norm": 0.01, "loss": 0.1, "kl": 0.01, "reward": 1.0}
"""What is watched, and the smallest deviation that is taken seriously."""
TO_STD = 1.4826
FEWEST = 8
"""With fewer updates to compare with, nothing but NaN is a spike."""


class UpdateGuard:
    """Judges each update before it is taken. Its memory is part of a checkpoint."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.recent: dict[str, deque[float]] = {name: deque(maxlen=settings.window) for name in FLOORS}

    def rejection_reason(self, values: Mapping[str, float]) -> str | None:
        """Why an update with these values must not be taken; None where it may, and then they are remembered."""
        for name, value in values.items():
            why = self._why_bad(name, value)
            if why is not None:
                return why
        for name, value in values.items():
            self.recent[name].append(value)
        return None

    def _why_bad(self, name: str, value: float) -> str | None:
        if not math.isfinite(value):
            return f"{name} is {value}"
        before = self.recent[name]
        if not self.settings.spike or len(before) < FEWEST:
            return None
        middle = median(before)
        spread = max(TO_STD * median(abs(v - middle) for v in before), abs(middle) / 10, FLOORS[name])
        if abs(value - middle) <= self.settings.spike * spread:
            return None
        return f"{name} is {value:.4g}, and was {middle:.4g} ± {spread:.2g} over the last {len(before)} updates"

    def state(self) -> dict[str, Tensor]:
        return {f"guard/{name}": torch.tensor(list(values), dtype=torch.float64) for name, values in self.recent.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, values in self.recent.items():
            values.clear()
            values.extend(state[f"guard/{name}"].tolist() if f"guard/{name}" in state else [])
