"""The optimiser of several ranks: each holds a shard of every master weight and moment.

With `shard = "optimiser"` every rank has complete weights: gradients are reduce-scattered, each rank updates its shard, and the
shards are all-gathered. With `shard = "full"` weights and gradients are FSDP2's shards, and so are master weights and moments.
Adam is elementwise, so the result is that of one rank, up to the rounding of sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oncurve.distributed.world import World
from oncurve.errors import RecipeError
from oncurve.models.parallel.dtensor import is_tensor_parallel, local_elements, local_range
from oncurve.recipe.schema.sections import Optimiser as OptimiserSettings
from oncurve.runs.checkpoints.shards import TensorShard
from oncurve.tensor_range import ElementRange
from oncurve.training.learner.adam8bit import BLOCK
from oncurve.training.learner.optimiser import Optimiser


def build_optimiser(model: nn.Module, settings: OptimiserSettings, updates: int, world: World) -> Optimiser:
    """The optimiser of a model's trainable parameters, for a schedule of ``updates`` updates."""
    kind = Optimiser if world.shard == "none" else ShardedOptimiser
    return kind(model, settings, updates, world)


class ShardedOptimiser(Optimiser):
    """AdamW over this rank's shards of a model's parameters."""

    def __init__(self, model: nn.Module, settings: OptimiserSettings, updates: int, world: World) -> None:
        if world.shard == "full" and settings.moments == "int8":
            raise RecipeError(
                "optimiser.moments",
                "int8",
                because='128 moments in a row share a scale, and with shard = "full" two ranks could each hold a part of them',
                fix='use moments = "float32", or scale.shard = "optimiser"',
            )
        super().__init__(model, settings, updates, world)
        if world.shard == "full":
            self.accumulator = None  # FSDP2 accumulates gradients in float32 itself

    def _local_range(self, weight: Tensor) -> ElementRange:
        """The elements of a weight that belong to this rank."""
        if self.world.shard == "full":
            return local_range(weight)
        elements = self.world.local_slice(weight.numel())
        return ElementRange(elements.start, elements.stop)

    def _local_shard(self, weight: Tensor) -> Tensor:
        """This rank's elements of a weight: a view of the weight's memory."""
        return local_elements(weight) if self.world.shard == "full" else self._local_range(weight).of(weight.detach().view(-1))

    def _master(self, weight: nn.Parameter) -> nn.Parameter:
        shard = self._local_shard(weight)
        home = torch.device("cpu") if self.settings.on_cpu else shard.device
        is_master = shard.dtype == torch.float32 and shard.device == home
        return nn.Parameter(shard if is_master else shard.to(home, torch.float32, copy=True))

    def _load_gradients(self) -> None:
        for master, gradient in zip(self.masters, self._reduce_gradients(), strict=True):
            master.grad = gradient.to(master.device)

    def _reduce_gradients(self) -> list[Tensor]:
        """This rank's shards of the gradients, summed over ranks."""
        if self.world.shard == "full":
            shards = [
                torch.zeros_like(self._local_shard(w)) if w.grad is None else local_elements(w.grad) for w in self.weights
            ]
            if self.world.tp_size > 1:
                from oncurve.models.parallel.tensor_parallel import all_reduce_replicated_grads

                all_reduce_replicated_grads(self.weights, shards)
            return shards
        if self.accumulator is not None:
            self.accumulator.add_autograd_grads()
            self.accumulator.consumed = True
            return self.world.reduce_scatter([self.accumulator.buffer_for(w) for w in self.weights])
        return self.world.reduce_scatter([torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights])

    def _clip(self, limit: float) -> float:
        gradients = [m.grad for w, m in zip(self.weights, self.masters, strict=True) if not is_replica(w, self.world)]
        squares = sum(float(gradient.double().square().sum()) for gradient in gradients if gradient is not None)
        norm = math.sqrt(sum(self.world.all_gather_dict({self.world.rank: squares}).values()))
        factor = min(1.0, limit / (norm + 1e-6)) if math.isfinite(limit) else 1.0
        if factor < 1.0:
            torch._foreach_mul_([m.grad for m in self.masters if m.grad is not None], factor)
        return norm

    def _store_weights(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            shard = self._local_shard(weight)
            if shard.data_ptr() != master.data_ptr():
                shard.copy_(master)
        if self.world.shard == "optimiser":
            self.world.all_gather_([w.detach() for w in self.weights])

    def state(self) -> dict[str, Any]:
        """The state of a single rank, in shards: master weights are included if a single rank would have them."""
        out: dict[str, Any] = {"updates_done": torch.tensor(self.done), **self.guard.state(), **self._scaler_state()}
        for name, weight, master in zip(self.names, self.weights, self.masters, strict=True):
            if is_replica(weight, self.world):
                continue
            elements = self._local_range(weight)
            if self._has_master(weight):
                out[f"{name}/master"] = TensorShard(master.detach(), elements, tuple(weight.shape))
            for key, value in self.adam.state[master].items() if master.numel() else ():
                out[f"{name}/{key}"] = _moment_shard(value, weight, elements)
        return out

    def _has_master(self, weight: Tensor) -> bool:
        """Whether a single rank would hold a float32 copy of the weight: it computes in 16 bits, or updates on the CPU."""
        compute = getattr(weight, "compute_dtype", weight.dtype)
        return compute != torch.float32 or self.settings.on_cpu

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._load_counts(state)
        keys = set(state)
        for name, weight, master in zip(self.names, self.weights, self.masters, strict=True):
            elements = self._local_range(weight)
            if f"{name}/master" in keys:
                master.copy_(elements.of(state[f"{name}/master"]))
            else:
                master.copy_(self._local_shard(weight))
            moments = [key for key in keys if key.startswith(f"{name}/") and not key.endswith("/master")]
            if moments and master.numel():
                self.adam.state[master] = {
                    key.removeprefix(f"{name}/"): self._local_moment(state[key], weight, elements, master.device)
                    for key in moments
                }

    def _local_moment(self, full: Tensor, weight: Tensor, elements: ElementRange, device: torch.device) -> Tensor:
        """This rank's shard of a moment from a checkpoint."""
        if full.dim() == 0:
            return full.to(self._step_device(device), copy=True)
        if full.shape == weight.shape:
            return elements.of(full).to(device, copy=True)
        return full[elements.start // BLOCK : -(-elements.stop // BLOCK)].to(device, copy=True)


def is_replica(weight: Tensor, world: World) -> bool:
    """Whether the first rank of the tensor-parallel group has the same elements of a weight: then that rank counts them."""
    return world.rank % world.tp_size > 0 and not is_tensor_parallel(weight)


def _moment_shard(value: Tensor, weight: Tensor, elements: ElementRange) -> TensorShard | Tensor:
    """A moment as a shard of what a single rank would hold. 8-bit moments are blocks with scales, step counts scalars."""
    if value.dim() == 0:
        return value
    if value.dim() == 1:
        return TensorShard(value, elements, tuple(weight.shape))
    blocks, width = -(-weight.numel() // BLOCK), value.shape[1]
    start = elements.start // BLOCK * width
    return TensorShard(value.view(-1), ElementRange(start, start + value.numel()), (blocks, width))
