"""Update guard: skips updates with NaN or spikes, so that one bad batch does not end a run.

A value is a spike if |value − median| > spike · max(MAD, |median| / 10, floor), over the last ``window`` updates that were
made. MAD is the median absolute deviation times 1.4826: the standard deviation, if the values are normally distributed. A spike
moves means but not medians. The floor is the smallest change that matters: mean rewards that rise from 0 to 1 in one step are
what training is for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor

from oncurve.recipe.schema.sections import Guard as GuardSettings

FLOORS = {"grad_norm": 0.01, "loss": 0.1, "kl": 0.01, "reward": 1.0}
"""The values that are checked, with the floor of each."""
MAD_TO_STD = 1.4826
MIN_HISTORY = 8
"""With fewer updates to compare with, only NaN and infinity are rejected."""


class UpdateGuard:
    """Checks each update before it is made. Its history is part of a checkpoint."""

    def __init__(self, settings: GuardSettings) -> None:
        self.settings = settings
        self.history: dict[str, deque[float]] = {name: deque(maxlen=settings.window) for name in FLOORS}

    def rejection_reason(self, values: Mapping[str, float]) -> str | None:
        """Why an update with these values must be skipped; None if it may be made: then they enter the history."""
        for name, value in values.items():
            reason = self._spike_reason(name, value)
            if reason is not None:
                return reason
        for name, value in values.items():
            self.history[name].append(value)
        return None

    def _spike_reason(self, name: str, value: float) -> str | None:
        if not math.isfinite(value):
            return f"{name} is {value}"
        history = self.history[name]
        if not self.settings.spike or len(history) < MIN_HISTORY:
            return None
        middle = median(history)
        spread = max(MAD_TO_STD * median(abs(v - middle) for v in history), abs(middle) / 10, FLOORS[name])
        if abs(value - middle) <= self.settings.spike * spread:
            return None
        return f"{name} is {value:.4g}, and was {middle:.4g} ± {spread:.2g} over the last {len(history)} updates"

    def state(self) -> dict[str, Tensor]:
        return {f"guard/{name}": torch.tensor(list(values), dtype=torch.float64) for name, values in self.history.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, values in self.history.items():
            values.clear()
            values.extend(state[f"guard/{name}"].tolist() if f"guard/{name}" in state else [])
