"""Where a step's time goes: seconds by phase, and how much of the device an update uses.

Work on a GPU is only queued, so the phases of an update are timed by events on the device, read once at the end. The rest of
the update's time is *idle*: the device waits for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from statistics import median

import torch

from oncurve.models.packing import Pack
from oncurve.models.policy import Policy


class PhaseClock:
    """Seconds by phase, summed over all times that a phase is entered. ``on_enter`` is called at the start of each."""

    def __init__(self, on_enter: Callable[[str], None] | None = None) -> None:
        self.on_enter = on_enter
        self.seconds: dict[str, float] = {}
        self._cpu_before = time.process_time()

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the process since the clock was created: on a shared machine a fairer measure than wall time."""
        return time.process_time() - self._cpu_before

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        if self.on_enter is not None:
            self.on_enter(phase)
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


class DevicePhases:
    """Seconds of device time by phase, summed over all times that a phase is entered."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._started = time.perf_counter()
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str, *, host: bool = False) -> Iterator[None]:
        """``host``: the phase is work of the CPU, and is timed by the host's clock on any device."""
        if host or self.device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        yield
        after.record()
        self._events.append((phase, before, after))

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, with the rest as ``idle``. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        total = time.perf_counter() - self._started
        for phase, before, after in self._events:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + before.elapsed_time(after) / 1e3
        self._events.clear()
        return self._seconds | {"idle": max(0.0, total - sum(self._seconds.values()))}


def model_flops(policy: Policy, packs: Iterable[Pack], *, forward: int, backward: int) -> float:
    """FLOPs of the model's formulas for a number of forward and backward passes; recomputed activations do not count.

    A token costs 2 FLOPs for each weight that it is multiplied with, the same again for the gradient of its input, and again
    for the gradient of the weight if it is trained. Attention costs 4·d FLOPs for each query head and key, and twice that in
    the backward pass.
    """
    config = policy.model.config.get_text_config()
    head = policy.head.weight_VD
    layers = [p for p in policy.backbone.parameters() if p.dim() == 2 and p is not policy.model.get_input_embeddings().weight]
    forward_flops = 2.0 * sum(p.numel() for p in layers)
    backward_flops = forward_flops + 2.0 * sum(p.numel() for p in layers if p.requires_grad)
    per_key = 4.0 * config.num_attention_heads * policy.head_size * config.num_hidden_layers
    total = 0.0
    for pack in packs:
        predicted = sum(pack.lengths)
        total += pack.tokens * (forward * forward_flops + backward * backward_flops)
        total += 2.0 * predicted * head.numel() * (forward + backward * (1 + head.requires_grad))
        total += per_key * pack.scores * (forward + 2 * backward)
    return total


def utilisation(
    policy: Policy, packs: Iterable[Pack], seconds: float, *, forward: int = 1, backward: int = 1
) -> dict[str, float]:
    """Metrics of an update that took ``seconds``: model FLOPs per second, and their fraction of the device's matmul rate."""
    rate = model_flops(policy, packs, forward=forward, backward=backward) / max(seconds, 1e-9)
    return {"update_tflops": rate / 1e12, "mfu": rate / matmul_rate(policy.device, policy.model.dtype)}


@cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a large matmul of random matrices on this device: the reference for `mfu`."""
    size, repeats = (8192, 5) if device.type == "cuda" else (256, 5)
    a, b = (torch.randn(size, size, dtype=dtype, device=device, generator=_generator(device, i)) for i in range(2))
    times = []
    for _ in range(repeats + 1):
        clock = DevicePhases(device)
        with clock("product"):
            a @ b
        times.append(clock.seconds()["product"])
    return 2.0 * size**3 / median(times[1:])


def _generator(device: torch.device, seed: int) -> torch.Generator:
    """A separate generator: a measurement must not change a run's random numbers."""
    return torch.Generator(device).manual_seed(seed)
