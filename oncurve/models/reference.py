"""The reference: the frozen anchor of the KL term, the policy as it was, refreshed when a recipe asks for it.

Of a fully trained policy it is a copy, or, to spare a GPU's memory, weights that wait on the CPU and take the policy's place
for their pass. Under LoRA no second model is held: it is the same model with the adapter off, or, where
the adapter already meant something when the stage began, with the adapter's weights of that moment put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from oncurve.models import lora
from oncurve.models.packing import Pack
from oncurve.models.parallel.dtensor import copy_from_full, is_shard
from oncurve.models.policy import Policy

OFF = "adapter_off"


class Reference:
    """The policy as it was when this was made, or last refreshed."""

    def __init__(self, policy: Policy, on_cpu: bool = False) -> None:
        self._held: _Copy | _Adapter | _Waiting
        if lora.is_on(policy.model):
            self._held = _Adapter(policy)
        elif is_shard(next(policy.model.parameters())):
            self._held = _Waiting(policy, _copy)
        else:
            self._held = _Waiting(policy, _on_host) if on_cpu else _Copy(policy)
        self._at_hand: Policy | None = None

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """For the passes of several packs: weights that are elsewhere are brought over once. The policy rests meanwhile."""
        with self._held.policy_as_it_was() as policy:
            self._at_hand = policy
            try:
                yield
            finally:
                self._at_hand = None

    @torch.no_grad()
    def logps(self, pack: Pack, temperature: float) -> Tensor:
        """The reference's log-prob of each predicted token of a pack, [M]."""
        if self._at_hand is not None:
            return self._at_hand.pack_logps(pack, temperature)[0]
        with self._held.policy_as_it_was() as policy:
            return policy.pack_logps(pack, temperature)[0]

    def refresh(self, policy: Policy) -> None:
        """Iterative GRPO: the reference becomes the policy."""
        self._held.refresh(policy)

    def state(self) -> dict[str, Tensor]:
        return self._held.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._held.load_state(state)


class _Copy:
    """A frozen copy of all weights."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy.copy()
        self._policy.model.requires_grad_(False)

    @contextmanager
    def policy_as_it_was(self) -> Iterator[Policy]:
        yield self._policy

    @torch.no_grad()
    def refresh(self, policy: Policy) -> None:
        for mine, theirs in zip(self._policy.model.parameters(), policy.model.parameters(), strict=True):
            mine.copy_(theirs)

    def state(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._policy.model.named_parameters()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, p in self._policy.model.named_parameters():
            p.copy_(state[name])


class _Waiting:
    """Weights in the CPU's memory, or, of weights that ranks share out, this rank's shards. For a pass they are exchanged with
    the policy's own, which come back bit for bit."""

    def __init__(self, policy: Policy, copy: Callable[[Tensor], Tensor]) -> None:
        self._policy, self._copy = policy, copy
        self._kept = {name: copy(p) for name, p in policy.model.named_parameters()}

    @contextmanager
    def policy_as_it_was(self) -> Iterator[Policy]:
        with _exchanged(dict(self._policy.model.named_parameters()), self._kept, self._copy):
            yield self._policy

    def refresh(self, policy: Policy) -> None:
        self._kept = {name: self._copy(p) for name, p in policy.model.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        return dict(self._kept)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, kept in self._kept.items():
            copy_from_full(kept, state[name])


@contextmanager
def _exchanged(live: Mapping[str, Tensor], kept: Mapping[str, Tensor], copy: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The kept weights in place of the live ones, which come back afterwards from the copies that ``copy`` makes."""
    now = {name: copy(p) for name, p in live.items()}
    _put(live, kept)
    try:
        yield
    finally:
        _put(live, now)


@torch.no_grad()
def _put(live: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, p in live.items():
        p.copy_(weights[name], non_blocking=True)  # waits for nothing where the weights lie in pinned memory


def _on_host(weight: Tensor) -> Tensor:
    """A copy in the CPU's memory; of a GPU's tensor in pinned memory, which the way back is faster from."""
    pinned = weight.device.type == "cuda"
    out = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=pinned)
    return out.copy_(weight.detach())


class _Adapter:
    """The live model, with the adapter off (``kept`` is None) or with the adapter weights that were kept."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._kept: dict[str, Tensor] | None = None if lora.is_zero(policy.model) else _copies(policy)

    @contextmanager
    def policy_as_it_was(self) -> Iterator[Policy]:
        if self._kept is None:
            with lora.adapter_disabled(self._policy.model):
                yield self._policy
            return
        with _exchanged(lora.adapter_parameters(self._policy.model), self._kept, _copy):
            yield self._policy

    def refresh(self, policy: Policy) -> None:
        self._kept = _copies(policy)

    def state(self) -> dict[str, Tensor]:
        return {OFF: torch.tensor(self._kept is None), **(self._kept or {})}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        device = self._policy.device
        kept = {name: tensor.to(device) for name, tensor in state.items() if name != OFF}
        self._kept = None if bool(state[OFF]) else kept


def _copy(weight: Tensor) -> Tensor:
    return weight.detach().clone()


def _copies(policy: Policy) -> dict[str, Tensor]:
    return {name: _copy(p) for name, p in lora.adapter_parameters(policy.model).items()}
