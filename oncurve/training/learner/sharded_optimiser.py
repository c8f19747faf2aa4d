"""The optimiser and the checkpoint where ranks share out what they hold: each has a piece of every master weight and moment.

With `shard = "optimiser"` weights are whole on every rank: gradients are added up so that each rank gets its piece, it updates
that, and pieces are gathered. With `shard = "full"` weights themselves are FSDP2's shards, and so are their gradients; a piece
is the shard. Adam goes number by number, so the result is that of one rank but for the rounding of sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oncurve.distributed.world import World
from oncurve.errors import RecipeError
from oncurve.models import lora
from oncurve.models.loading.load import choose_device
from oncurve.models.parallel.dtensor import is_dtensor, is_tensor_parallel, local_elements, local_range
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import Model
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Optimiser as Settings
from oncurve.runs.checkpoints.shards import INDEX, TensorShard, merged_index, write_shards
from oncurve.tensor_range import ElementRange
from oncurve.training.learner.adam8bit import BLOCK
from oncurve.training.learner.optimiser import Optimiser

PIECES = "pieces"
"""Where in the run's folder ranks write what a checkpoint then takes in."""


def build_optimiser(model: nn.Module, settings: Settings, updates: int, world: World) -> Optimiser:
    kind = Optimiser if world.shard == "none" else ShardedOptimiser
    return kind(model, settings, updates, world)


def load_policy_for_world(recipe: Recipe) -> Model:
    """Where a model is loaded: one that will be shared out may be too large for any GPU, and comes by way of the CPU."""
    return recipe.model.model_copy(update={"device": "cpu"}) if recipe.scale.shard == "full" else recipe.model


def shard_policy(policy: Policy, recipe: Recipe, world: World) -> Policy:
    """The policy as the ranks hold it: with `shard = "full"`, a part of every weight each."""
    if world.shard != "full":
        return policy
    if lora.is_attached(policy.model):
        raise RecipeError(
            "scale.shard",
            "full",
            because="an adapter is small: its base is frozen, and shards of it would be gathered for every pass",
            fix='use scale.shard = "optimiser"' + (" and scale.tensor = 1" if world.tp_size > 1 else ""),
        )
    from oncurve.models.parallel.fsdp import ShardedPolicy  # torch's FSDP2 takes its time to load

    device, scale = choose_device(recipe.model.device), recipe.scale
    return ShardedPolicy(policy, device, world.collective, offload=scale.offload, gather=scale.gather, tensor=world.tp_size)


class ShardedOptimiser(Optimiser):
    """AdamW over this rank's pieces of a model's parameters."""

    def __init__(self, model: nn.Module, settings: Settings, updates: int, world: World) -> None:
        if world.shard == "full" and settings.moments == "int8":
            raise RecipeError(
                "optimiser.moments",
                "int8",
                because='blocks of 128 moments share a scale, and shard = "full" cuts weights between rows',
                fix='use moments = "float32", or scale.shard = "optimiser"',
            )
        super().__init__(model, settings, updates, world)
        if world.shard == "full":
            self.accumulator = None  # FSDP2 adds gradients up in float32 itself

    def _range(self, weight: Tensor) -> ElementRange:
        """Which of a weight's numbers are this rank's."""
        if self.world.shard == "full":
            return local_range(weight)
        own = self.world.local_slice(weight.numel())
        return ElementRange(own.start, own.stop)

    def _own(self, weight: Tensor) -> Tensor:
        """This rank's numbers of a weight, in the weight's own memory."""
        return local_elements(weight) if self.world.shard == "full" else self._range(weight).of(weight.detach().view(-1))

    def _master(self, weight: nn.Parameter) -> nn.Parameter:
        own = self._own(weight)
        home = torch.device("cpu") if self.settings.on_cpu else own.device
        shared = own.dtype == torch.float32 and own.device == home
        return nn.Parameter(own if shared else own.to(home, torch.float32, copy=True))

    def _load_gradients(self) -> None:
        for master, gradient in zip(self.masters, self._gradients(), strict=True):
            master.grad = gradient.to(master.device)

    def _gradients(self) -> list[Tensor]:
        """This rank's pieces of the gradients' sums over ranks."""
        if self.world.shard == "full":
            found = [torch.zeros_like(self._own(w)) if w.grad is None else local_elements(w.grad) for w in self.weights]
            if self.world.tp_size > 1:
                from oncurve.models.parallel.tensor_parallel import all_reduce_replicated_grads

                all_reduce_replicated_grads(self.weights, found)
            return found
        if self.accumulator is not None:
            self.accumulator.add_autograd_grads()
            self.accumulator.consumed = True
            return self.world.reduce_scatter([self.accumulator.buffer_for(w) for w in self.weights])
        return self.world.reduce_scatter([torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights])

    def _clip(self, limit: float) -> float:
        own = [m.grad for w, m in zip(self.weights, self.masters, strict=True) if not is_spare(w, self.world)]
        squares = sum(float(gradient.double().square().sum()) for gradient in own if gradient is not None)
        norm = math.sqrt(sum(self.world.all_gather_dict({self.world.rank: squares}).values()))
        shrink = min(1.0, limit / (norm + 1e-6)) if math.isfinite(limit) else 1.0
        if shrink < 1.0:
            torch._foreach_mul_([m.grad for m in self.masters if m.grad is not None], shrink)
        return norm

    def _store_weights(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            own = self._own(weight)
            if own.data_ptr() != master.data_ptr():
                own.copy_(master)
        if self.world.shard == "optimiser":
            self.world.all_gather_([w.detach() for w in self.weights])

    def state(self) -> dict[str, Any]:
        """As of one rank, in pieces: masters stand there wherever a single rank would hold them apart from the weights."""
        out: dict[str, Any] = {"updates_done": torch.tensor(self.done), **self.guard.state()}
        for name, weight, master in zip(self.names, self.weights, self.masters, strict=True):
            if is_spare(weight, self.world):
                continue
            at = self._range(weight)
            if self.rounds(weight):
                out[f"{name}/master"] = TensorShard(master.detach(), at, tuple(weight.shape))
            for key, value in self.adam.state[master].items() if master.numel() else ():
                out[f"{name}/{key}"] = _piece_of(value, weight, at)
        return out

    def rounds(self, weight: Tensor) -> bool:
        """Whether the model computes in fewer digits than its masters have."""
        compute = getattr(weight, "compute_dtype", weight.dtype)
        return compute != torch.float32 or self.settings.on_cpu

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.done = int(state["updates_done"])
        self.guard.load_state(state)
        keys = set(state)
        for name, weight, master in zip(self.names, self.weights, self.masters, strict=True):
            at = self._range(weight)
            if f"{name}/master" in keys:
                master.copy_(at.of(state[f"{name}/master"]))
            else:
                master.copy_(self._own(weight))
            own = [key for key in keys if key.startswith(f"{name}/") and not key.endswith("/master")]
            if own and master.numel():
                self.adam.state[master] = {
                    key.removeprefix(f"{name}/"): _own_part(state[key], weight, at, master.device) for key in own
                }


def is_spare(weight: Tensor, world: World) -> bool:
    """Whether another rank of the tensor group has the same numbers of it, and answers for them."""
    return world.rank % world.tp_size > 0 and not is_tensor_parallel(weight)


def _piece_of(value: Tensor, weight: Tensor, at: ElementRange) -> TensorShard | Tensor:
    """A moment as a piece of what one rank would hold; of moments in 8 bits, blocks and their scales."""
    if value.dim() == 0:
        return value
    if value.dim() == 1:
        return TensorShard(value, at, tuple(weight.shape))
    blocks, each = -(-weight.numel() // BLOCK), value.shape[1]
    start = at.start // BLOCK * each
    return TensorShard(value.view(-1), ElementRange(start, start + value.numel()), (blocks, each))


def _own_part(whole: Tensor, weight: Tensor, at: ElementRange, device: torch.device) -> Tensor:
    if whole.dim() == 0:
        return whole.clone()
    if whole.shape == weight.shape:
        return at.of(whole).to(device, copy=True)
    return whole[at.start // BLOCK : -(-at.stop // BLOCK)].to(device, copy=True)


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """A checkpoint's content: whole tensors, and files with ranks' pieces of the others, with their index."""

    tensors: dict[str, dict[str, Tensor]]
    pieces: list[Path] = field(default_factory=list)
    documents: dict[str, Any] = field(default_factory=dict)


def checkpoint_state(world: World, folder: Path, state: Mapping[str, Mapping[str, Tensor | TensorShard]]) -> CheckpointState:
    """Every rank writes its pieces of the state to the folder, and hears of the others'."""
    whole: dict[str, dict[str, Tensor]] = {group: {} for group in state}
    own: dict[str, dict[str, TensorShard]] = {}
    for group, tensors in state.items():
        for name, tensor in tensors.items():
            if isinstance(tensor, TensorShard):
                own.setdefault(group, {})[name] = tensor
            elif not is_dtensor(tensor):
                whole[group][name] = tensor
            elif not is_spare(tensor, world):
                own.setdefault(group, {})[name] = TensorShard(local_elements(tensor), local_range(tensor), tuple(tensor.shape))
    if world.shard == "none":
        return CheckpointState(whole)
    index = world.all_gather_dict({world.rank: write_shards(folder, world.rank, own)})
    files = [folder / f"pieces-{rank:05d}.safetensors" for rank in range(world.size)]
    return CheckpointState(
        {g: t for g, t in whole.items() if t}, files, {INDEX: merged_index([index[r] for r in range(world.size)])}
    )
