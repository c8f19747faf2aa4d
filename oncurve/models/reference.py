"""The reference policy of the KL term: a frozen snapshot of the policy, refreshed if the recipe asks for it.

For a fully trained policy it is a copy of all weights or, to save GPU memory, weights on the CPU that are swapped into the
policy for a forward pass. With LoRA there is no second model: the reference is the same model with the adapter disabled or, if
the adapter was already trained when the stage began, with a snapshot of its weights swapped in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from oncurve.models import lora
from oncurve.models.packing import Pack
from oncurve.models.parallel.dtensor import copy_from_full, is_dtensor
from oncurve.models.policy import Policy

OFF, MEAN = "adapter_off", "/mean"


class Reference:
    """The policy as it was when this was created or last refreshed, or a mean over the policies since then."""

    def __init__(self, policy: Policy, on_cpu: bool = False) -> None:
        self._snapshot: _FrozenCopy | _AdapterSnapshot | _SwappedWeights
        if lora.is_attached(policy.model):
            self._snapshot = _AdapterSnapshot(policy)
        elif is_dtensor(next(policy.model.parameters())):
            self._snapshot = _SwappedWeights(policy, _clone)
        else:
            self._snapshot = _SwappedWeights(policy, _clone_to_cpu) if on_cpu else _FrozenCopy(policy)
        self._loaded: Policy | None = None
        self._means: dict[str, Tensor] = {}
        """Float32 means of 16-bit weights, if the policy is mixed in."""

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Load the reference once for several packs. The policy must not be used within this context."""
        with self._snapshot.reference_policy() as policy:
            self._loaded = policy
            try:
                yield
            finally:
                self._loaded = None

    @torch.no_grad()
    def logps(self, pack: Pack, temperature: float) -> Tensor:
        """The reference's log-prob of each predicted token of a pack, [M]."""
        if self._loaded is not None:
            return self._loaded.pack_logps(pack, temperature)[0]
        with self._snapshot.reference_policy() as policy:
            return policy.pack_logps(pack, temperature)[0]

    @torch.no_grad()
    def refresh(self, policy: Policy, mix: float = 1.0) -> None:
        """Take a new snapshot of the policy (iterative GRPO), or mix this fraction of it into the reference's weights.

        Means of 16-bit weights are kept in float32: a small fraction would be lost in rounding.
        """
        if mix == 1:
            self._means = {}
            self._snapshot.refresh(policy)
            return
        adapted = lora.is_attached(policy.model)
        current = lora.adapter_parameters(policy.model) if adapted else dict(policy.model.named_parameters())
        for name, weight in self._snapshot.weights().items():
            mean = weight if weight.dtype == torch.float32 else self._means.setdefault(name, weight.float())
            mean.lerp_(current[name].to(mean.device, torch.float32), mix)
            if mean is not weight:
                weight.copy_(mean)

    def state(self) -> dict[str, Tensor]:
        return self._snapshot.state() | {name + MEAN: mean for name, mean in self._means.items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._snapshot.load_state({name: tensor for name, tensor in state.items() if not name.endswith(MEAN)})
        self._means = {}
        if any(name.endswith(MEAN) for name in state):
            for name, weight in self._snapshot.weights().items():
                if name + MEAN in state:  # float32 weights are their own mean
                    self._means[name] = weight.float()
                    copy_from_full(self._means[name], state[name + MEAN])


class _FrozenCopy:
    """A second model with a frozen copy of all weights."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy.copy()
        self._policy.model.requires_grad_(False)

    @contextmanager
    def reference_policy(self) -> Iterator[Policy]:
        yield self._policy

    @torch.no_grad()
    def refresh(self, policy: Policy) -> None:
        for copied, current in zip(self._policy.model.parameters(), policy.model.parameters(), strict=True):
            copied.copy_(current)

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._policy.model.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        return self.weights()

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, p in self._policy.model.named_parameters():
            p.copy_(state[name])


class _SwappedWeights:
    """Weights in CPU memory (or this rank's shards) that replace the policy's for a pass. Those are restored bit for bit."""

    def __init__(self, policy: Policy, clone: Callable[[Tensor], Tensor]) -> None:
        self._policy, self._clone = policy, clone
        self._weights = {name: clone(p) for name, p in policy.model.named_parameters()}

    @contextmanager
    def reference_policy(self) -> Iterator[Policy]:
        with _swap_weights(dict(self._policy.model.named_parameters()), self._weights, self._clone):
            yield self._policy

    def refresh(self, policy: Policy) -> None:
        self._weights = {name: self._clone(p) for name, p in policy.model.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        return dict(self._weights)

    def state(self) -> dict[str, Tensor]:
        return self.weights()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            copy_from_full(weight, state[name])


class _AdapterSnapshot:
    """The policy's own model with the adapter disabled (no snapshot), or with a snapshot of the adapter's weights."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._weights: dict[str, Tensor] | None = None if lora.is_zero(policy.model) else _clone_adapter(policy)

    @contextmanager
    def reference_policy(self) -> Iterator[Policy]:
        if self._weights is None:
            with lora.adapter_disabled(self._policy.model):
                yield self._policy
            return
        with _swap_weights(lora.adapter_parameters(self._policy.model), self._weights, _clone):
            yield self._policy

    def refresh(self, policy: Policy) -> None:
        self._weights = _clone_adapter(policy)

    def weights(self) -> dict[str, Tensor]:
        """The snapshot, to be changed in place. A disabled adapter equals one with B = 0 and any A."""
        if self._weights is None:
            self._weights = _clone_adapter(self._policy)
            for name, weight in self._weights.items():
                if "lora_B" in name:
                    weight.zero_()
        return self._weights

    def state(self) -> dict[str, Tensor]:
        return {OFF: torch.tensor(self._weights is None), **(self._weights or {})}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        device = self._policy.device
        weights = {name: tensor.to(device) for name, tensor in state.items() if name != OFF}
        self._weights = None if bool(state[OFF]) else weights


@contextmanager
def _swap_weights(
    live: Mapping[str, Tensor], replacement: Mapping[str, Tensor], clone: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Replace the live weights within this context, and restore them from clones."""
    original = {name: clone(p) for name, p in live.items()}
    _copy_weights(live, replacement)
    try:
        yield
    finally:
        _copy_weights(live, original)


@torch.no_grad()
def _copy_weights(live: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, p in live.items():
        p.copy_(weights[name], non_blocking=True)  # asynchronous if the source is in pinned memory


def _clone_to_cpu(weight: Tensor) -> Tensor:
    """A copy in CPU memory. For a GPU tensor it is in pinned memory, which is faster to copy back."""
    out = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.device.type == "cuda")
    return out.copy_(weight.detach())


def _clone(weight: Tensor) -> Tensor:
    return weight.detach().clone()


def _clone_adapter(policy: Policy) -> dict[str, Tensor]:
    return {name: _clone(p) for name, p in lora.adapter_parameters(policy.model).items()}
