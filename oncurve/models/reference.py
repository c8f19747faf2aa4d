"""The reference: the frozen anchor of the KL term, a copy of the policy as it was, refreshed when a recipe asks for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oncurve.models.packing import Pack
from oncurve.models.policy import Policy


class Reference:
    """A frozen copy of a policy's weights."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy.copy()
        self._policy.model.requires_grad_(False)

    @torch.no_grad()
    def logps(self, pack: Pack, temperature: float) -> Tensor:
        """The reference's log-prob of each predicted token of a pack, [M]."""
        return self._policy.pack_logps(pack, temperature)[0]

    @torch.no_grad()
    def refresh(self, policy: Policy) -> None:
        """Iterative GRPO: the reference becomes the policy."""
        for mine, theirs in zip(self._policy.model.parameters(), policy.model.parameters(), strict=True):
            mine.copy_(theirs)

    def state(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._policy.model.named_parameters()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, p in self._policy.model.named_parameters():
            p.copy_(state[name])
