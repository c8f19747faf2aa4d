"""What a stage may spend in all, where a recipe limits it: tokens sampled, or seconds of training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oncurve.recipe.sampled import Sampled


class Budget:
    """Counts over the whole stage, also over a stop and a resume: a checkpoint holds what was spent."""

    def __init__(self, stage: Sampled) -> None:
        self.stage, self.tokens, self.seconds = stage, 0.0, 0.0

    @property
    def is_set(self) -> bool:
        return self.stage.tokens is not None or self.stage.seconds is not None

    @property
    def is_spent(self) -> bool:
        over_tokens = self.stage.tokens is not None and self.tokens >= self.stage.tokens
        return over_tokens or (self.stage.seconds is not None and self.seconds >= self.stage.seconds)

    def spend(self, tokens: float, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    def state(self) -> dict[str, Tensor]:
        return {"spent": torch.tensor([self.tokens, self.seconds], dtype=torch.float64)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.tokens, self.seconds = state["spent"].tolist()
