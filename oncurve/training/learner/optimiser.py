"""AdamW with float32 master weights, warm-up, schedules, clipping, and no update from a batch that the guard refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.models.gradient_buffers import GradAccumulator
from oncurve.recipe.schema.sections import Optimiser as Settings
from oncurve.runs.step_notes import note
from oncurve.training.learner.adam8bit import Adam8bit
from oncurve.training.learner.update_guard import UpdateGuard


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimiser update did. ``skipped``: the guard found a NaN or a spike, and no weight moved."""

    grad_norm: float
    learning_rate: float
    skipped: bool

    @property
    def metrics(self) -> dict[str, float]:
        return {"grad_norm": self.grad_norm, "learning_rate": self.learning_rate, "skipped_updates": float(self.skipped)}


def learning_rate_at(settings: Settings, update: int, updates: int) -> float:
    """The learning rate of update number ``update`` (from 0) of ``updates``: linear warm-up, then the schedule."""
    if update < settings.warmup_steps:
        return settings.learning_rate * (update + 1) / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.learning_rate
    done = (update - settings.warmup_steps) / max(updates - settings.warmup_steps, 1)
    left = 1 - done if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return settings.learning_rate * (settings.final_share + (1 - settings.final_share) * max(left, 0.0))


class Optimiser:
    """AdamW over a model's parameters; where they are not float32, over float32 masters that are rounded back."""

    def __init__(self, model: nn.Module, settings: Settings, updates: int, world: World = SINGLE_PROCESS) -> None:
        self.settings, self.updates, self.world, self.done = settings, updates, world, 0
        self.guard = UpdateGuard(settings.guard)
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [self._master(p) for p in self.weights]
        held = [(w, m) for w, m in zip(self.weights, self.masters, strict=True) if m.numel()]
        matrices = [m for w, m in held if w.dim() >= 2]
        others = [m for w, m in held if w.dim() < 2]
        groups = [{"params": ps, "weight_decay": d} for ps, d in ((matrices, settings.weight_decay), (others, 0.0))]
        self.adam: torch.optim.Optimizer = (
            Adam8bit(groups, lr=0.0, betas=settings.betas, eps=settings.eps)
            if settings.moments == "int8"
            else torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
        )
        # On a CPU in float32 autograd's own sums are as good, and there is nothing to be had by others.
        plain = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in self.weights)
        self.accumulator = None if plain else GradAccumulator(self.weights)

    def _master(self, weight: nn.Parameter) -> nn.Parameter:
        """The weight itself where it is float32 and where the optimiser works; else a float32 copy there."""
        home = torch.device("cpu") if self.settings.on_cpu else weight.device
        if weight.dtype == torch.float32 and weight.device == home:
            return weight
        return nn.Parameter(weight.detach().to(home, torch.float32, copy=True))

    @property
    def unallocated_bytes(self) -> int:
        """Memory of the weights' device that the first update will still take: moments, and sums of gradients."""
        size, each = sum(p.numel() for p in self.weights), 2 if self.settings.moments == "int8" else 8
        moments = 0 if self.adam.state or self.settings.on_cpu else each * size
        return moments + (0 if self.accumulator is None or self.accumulator.allocated else 4 * size)

    def zero_grad(self) -> None:
        if self.accumulator is not None:
            self.accumulator.zero()
        for weight in self.weights:
            weight.grad = None

    def add_autograd_grads(self) -> None:
        """After a pack's backward pass: what autograd found goes into the float32 sums, where there are any."""
        if self.accumulator is not None:
            self.accumulator.add_autograd_grads()

    @torch.no_grad()
    def step(self, watched: Callable[[], Mapping[str, float]] = dict) -> Update:
        """Clip, update, advance the schedule. Where the guard refuses the gradient, or what the caller has it watch (loss, kl,
        reward), no weight moves; the schedule still advances. ``watched`` is asked last: a GPU is at work on the gradient, and
        what the host does before it waits for that takes no time."""
        self._load_gradients()
        rate = learning_rate_at(self.settings, self.done, self.updates)
        self.done += 1
        norm = self._clip(self.settings.max_grad_norm or math.inf)
        why = self.guard.rejection_reason({"grad_norm": norm, **watched()})
        if why is not None:
            note("bad", f"update left out: {why}")
            return Update(norm, rate, skipped=True)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self._store_weights()
        return Update(norm, rate, skipped=False)

    def _clip(self, limit: float) -> float:
        """Scales the gradients down to a norm of ``limit`` where it is more; the norm before."""
        return float(nn.utils.clip_grad_norm_(self.masters, limit))

    def _store_weights(self) -> None:
        """The masters, rounded, become the weights."""
        rounded = [(weight, master) for weight, master in zip(self.weights, self.masters, strict=True) if master is not weight]
        if rounded:
            torch._foreach_copy_([weight for weight, _ in rounded], [master for _, master in rounded])

    def _load_gradients(self) -> None:
        """The sums, where there are any, become the masters' gradients; those of all ranks are added up."""
        if self.accumulator is not None:
            self.accumulator.add_autograd_grads()
            for weight, master in zip(self.weights, self.masters, strict=True):
                master.grad = self.accumulator.buffer_for(weight).to(master.device)
            self.accumulator.spent = True
        self.world.all_reduce_gradients(self.masters)

    def state(self) -> dict[str, Tensor]:
        """Moments, step counts and masters by parameter name, for a checkpoint."""
        out = {"updates_done": torch.tensor(self.done), **self.guard.state()}
        for name, weight, master in zip(self.names, self.weights, self.masters, strict=True):
            if master is not weight:
                out[f"{name}/master"] = master.detach()
            for key, value in self.adam.state[master].items():
                out[f"{name}/{key}"] = value
        return out

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.done = int(state["updates_done"])
        self.guard.load_state(state)
        for name, weight, master in zip(self.names, self.weights, self.masters, strict=True):
            if master is not weight:
                master.copy_(state[f"{name}/master"])
            prefix = f"{name}/"
            own = [key for key in state if key.startswith(prefix) and not key.endswith("/master")]
            found = {key.removeprefix(prefix): state[key] for key in own}
            if found:
                # AdamW's kernel reads its step count beside the weights; ours asks for it on the host.
                here = [k for k, v in found.items() if v.dim() or not isinstance(self.adam, Adam8bit)]
                self.adam.state[master] = {k: (v.to(master.device) if k in here else v).clone() for k, v in found.items()}
