"""AdamW with float32 master weights, warm-up, schedules and gradient clipping. Updates that the guard rejects are skipped.

Update guard: skips updates with NaN or spikes, so that one bad batch does not end a run.

A value is a spike if |value − median| > spike · max(MAD, |median| / 10, floor), over the last ``window`` updates that were
made. MAD is the median absolute deviation times 1.4826: the standard deviation, if the values are normally distributed. A spike
moves means but not medians. The floor keeps small changes from counting as spikes: a mean reward that rises from 0 to 1 in one
step is a success.

Loss scaling: float16 has no numbers below 6e-8, and gradients of activations are often smaller. If a model has float16 weights,
the loss is multiplied by a large scale before the backward pass, and gradients are divided by it in float32.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.models.gradient_buffers import GradAccumulator
from oncurve.recipe.schema.sections import Guard as GuardSettings
from oncurve.recipe.schema.sections import Optimiser as Settings
from oncurve.runs.step_notes import mark_update, note
from oncurve.training.learner.adam8bit import Adam8bit

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
        """Why an update with these values must be skipped; None if it may be made; the values then enter the history."""
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


class LossScaler:
    """The scale of the loss in float16, by the rule of `torch.amp.GradScaler` (Micikevicius et al. 2017, section 3.2): if a
    gradient overflows, the update is skipped and the scale is halved; after `GROWTH_INTERVAL` updates in a row without an
    overflow it is doubled. Its state is part of a checkpoint."""

    FIRST, GROWTH, BACKOFF, GROWTH_INTERVAL = 65536.0, 2.0, 0.5, 2000

    def __init__(self) -> None:
        self.scale, self.good_updates = self.FIRST, 0

    def update(self, overflowed: bool) -> None:
        """After an update: the scale of the next."""
        if overflowed:
            self.scale, self.good_updates = self.scale * self.BACKOFF, 0
            return
        self.good_updates += 1
        if self.good_updates == self.GROWTH_INTERVAL:
            self.scale, self.good_updates = self.scale * self.GROWTH, 0

    def state(self) -> dict[str, Tensor]:
        return {"loss_scale": torch.tensor([self.scale, self.good_updates], dtype=torch.float64)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        if "loss_scale" in state:  # missing if a fork changes the precision
            self.scale, self.good_updates = float(state["loss_scale"][0]), int(state["loss_scale"][1])


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimiser update did. ``skipped``: the gradient overflowed or the guard found NaN or a spike, and no weight
    changed. ``loss_scale`` is that of the update, in float16."""

    grad_norm: float
    learning_rate: float
    skipped: bool
    loss_scale: float | None = None

    @property
    def metrics(self) -> dict[str, float]:
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale}
        return {
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "skipped_updates": float(self.skipped),
            **scale,
        }


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
    """AdamW over a model's parameters; if they are not float32, over float32 master weights that are rounded to them."""

    def __init__(self, model: nn.Module, settings: Settings, updates: int, world: World = SINGLE_PROCESS) -> None:
        self.settings, self.updates, self.world, self.done = settings, updates, world, 0
        self.guard = UpdateGuard(settings.guard)
        self.scaler = LossScaler() if any(p.dtype == torch.float16 for p in model.parameters()) else None
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [self._master(p) for p in self.weights]
        pairs = [(w, m) for w, m in zip(self.weights, self.masters, strict=True) if m.numel()]
        matrices = [m for w, m in pairs if w.dim() >= 2]
        others = [m for w, m in pairs if w.dim() < 2]
        groups = [{"params": ps, "weight_decay": d} for ps, d in ((matrices, settings.weight_decay), (others, 0.0))]
        self.adam: torch.optim.Optimizer = (
            Adam8bit(groups, lr=0.0, betas=settings.betas, eps=settings.eps)
            if settings.moments == "int8"
            else torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
        )
        # On a CPU in float32 autograd's own sums are as exact and as fast.
        autograd_sums = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in self.weights)
        self.accumulator = None if autograd_sums else GradAccumulator(self.weights)

    def _master(self, weight: nn.Parameter) -> nn.Parameter:
        """The weight itself if it is float32 and on the optimiser's device; else a float32 copy on that device."""
        home = torch.device("cpu") if self.settings.on_cpu else weight.device
        if weight.dtype == torch.float32 and weight.device == home:
            return weight
        return nn.Parameter(weight.detach().to(home, torch.float32, copy=True))

    @property
    def unallocated_bytes(self) -> int:
        """Bytes that the first update will allocate on the weights' device: moments and gradient accumulators."""
        size, each = sum(p.numel() for p in self.weights), 2 if self.settings.moments == "int8" else 8
        moments = 0 if self.adam.state or self.settings.on_cpu else each * size
        return moments + (0 if self.accumulator is None or self.accumulator.is_allocated else 4 * size)

    def zero_grad(self) -> None:
        if self.accumulator is not None:
            self.accumulator.zero()
        for weight in self.weights:
            weight.grad = None

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss whose gradient a backward pass computes: in float16 a multiple of it."""
        return loss if self.scaler is None else loss * self.scaler.scale

    def add_autograd_grads(self) -> None:
        """After a pack's backward pass: moves autograd's gradients into the float32 accumulators, if there are any."""
        if self.accumulator is not None:
            self.accumulator.add_autograd_grads()

    @torch.no_grad()
    def step(self, guarded: Callable[[], Mapping[str, float]] = dict) -> Update:
        """Clip, update, advance the schedule.

        If the guard rejects the gradient norm or one of the ``guarded`` values (loss, kl, reward), no weight changes, but the
        schedule advances. ``guarded`` is called last, because it copies values from the device: by then all work on the
        gradient is queued.
        """
        mark_update()
        self._load_gradients()
        scale = self._unscale()
        rate = learning_rate_at(self.settings, self.done, self.updates)
        self.done += 1
        norm = self._clip(self.settings.max_grad_norm or math.inf)
        values = {"grad_norm": norm, **guarded()}
        if self.scaler is not None:
            overflowed = not math.isfinite(norm)
            self.scaler.update(overflowed)
            if overflowed:
                note("bad", f"update skipped: the gradient overflowed in float16; the loss scale is now {self.scaler.scale:g}")
                return Update(norm, rate, skipped=True, loss_scale=scale)
        reason = self.guard.rejection_reason(values)
        if reason is not None:
            note("bad", f"update skipped: {reason}")
            return Update(norm, rate, skipped=True, loss_scale=scale)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self._store_weights()
        return Update(norm, rate, skipped=False, loss_scale=scale)

    def _unscale(self) -> float | None:
        """Divides the master weights' gradients by the loss scale. Returns it, or None if the loss is not scaled."""
        if self.scaler is None:
            return None
        torch._foreach_mul_([m.grad for m in self.masters if m.grad is not None], 1 / self.scaler.scale)
        return self.scaler.scale

    def _clip(self, limit: float) -> float:
        """Scales the gradients to a norm of at most ``limit``. Returns the norm before."""
        return float(nn.utils.clip_grad_norm_(self.masters, limit))

    def _store_weights(self) -> None:
        """Copies the master weights into the model's weights, which rounds them."""
        rounded = [(weight, master) for weight, master in zip(self.weights, self.masters, strict=True) if master is not weight]
        if rounded:
            torch._foreach_copy_([weight for weight, _ in rounded], [master for _, master in rounded])

    def _load_gradients(self) -> None:
        """The accumulated gradients, or autograd's, become the master weights' gradients, summed over ranks."""
        if self.accumulator is not None:
            self.accumulator.add_autograd_grads()
            for weight, master in zip(self.weights, self.masters, strict=True):
                master.grad = self.accumulator.buffer_for(weight).to(master.device)
            self.accumulator.consumed = True
        self.world.all_reduce_gradients(self.masters)

    def state(self) -> dict[str, Tensor]:
        """Moments, step counts and master weights by parameter name, for a checkpoint."""
        out = {"updates_done": torch.tensor(self.done), **self.guard.state(), **self._scaler_state()}
        for name, weight, master in zip(self.names, self.weights, self.masters, strict=True):
            if master is not weight:
                out[f"{name}/master"] = master.detach()
            for key, value in self.adam.state[master].items():
                out[f"{name}/{key}"] = value
        return out

    def _scaler_state(self) -> dict[str, Tensor]:
        return {} if self.scaler is None else self.scaler.state()

    def _load_counts(self, state: Mapping[str, Tensor]) -> None:
        """What does not belong to a parameter."""
        self.done = int(state["updates_done"])
        self.guard.load_state(state)
        if self.scaler is not None:
            self.scaler.load_state(state)

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._load_counts(state)
        for name, weight, master in zip(self.names, self.weights, self.masters, strict=True):
            if master is not weight:
                master.copy_(state[f"{name}/master"])
            prefix = f"{name}/"
            keys = [key for key in state if key.startswith(prefix) and not key.endswith("/master")]
            moments = {key.removeprefix(prefix): state[key] for key in keys}
            if moments:
                self.adam.state[master] = {
                    k: v.to(master.device if v.dim() else self._step_device(master.device), copy=True)
                    for k, v in moments.items()
                }

    def _step_device(self, device: torch.device) -> torch.device:
        """Where the step counts of weights on this device are: torch's AdamW reads them there, Adam8bit on the host."""
        return torch.device("cpu") if isinstance(self.adam, Adam8bit) else device
