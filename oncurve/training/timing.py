"""Where a step's time goes.

Where an update's time goes, and how much of the device it used.

On a GPU work is only queued, so phases are timed by events on the device itself, read once at the end. What is left of the
update's time is *idle*: the device waited for the host.
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
    """Seconds by phase. Phases may be entered again; they add up. ``enter`` is told of each as it begins."""

    def __init__(self, enter: Callable[[str], None] | None = None) -> None:
        self.enter = enter
        self.seconds: dict[str, float] = {}
        self._cpu_before = time.process_time()

    @property
    def cpu_seconds(self) -> float:
        """What the process itself has computed since: on a machine shared with others, a fairer measure than the wall's."""
        return time.process_time() - self._cpu_before

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        if self.enter is not None:
            self.enter(phase)
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


class DevicePhases:
    """Seconds by phase of what a device does. Phases may be entered again; they add up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._began = time.perf_counter()
        self._marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str, *, host: bool = False) -> Iterator[None]:
        """``host``: work of the CPU, timed by its own clock on any device."""
        if host or self.device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        yield
        after.record()
        self._marks.append((phase, before, after))

    def seconds(self) -> dict[str, float]:
        """By phase, with the rest as ``idle``. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        whole = time.perf_counter() - self._began
        for phase, before, after in self._marks:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + before.elapsed_time(after) / 1e3
        self._marks.clear()
        return self._seconds | {"idle": max(0.0, whole - sum(self._seconds.values()))}


def model_flops(policy: Policy, packs: Iterable[Pack], *, forward: int, backward: int) -> float:
    """FLOPs that the formulas ask for, over so many forward and backward passes; what is computed again does not count.

    A token costs 2 FLOPs for each weight that it is multiplied with, as much again for the gradient of its input, and again for
    that of the weight where it is trained; attention costs 4·d FLOPs for each query head and key, and twice that backward.
    """
    config = policy.model.config.get_text_config()
    head = policy.head.weight_VD
    layers = [p for p in policy.backbone.parameters() if p.dim() == 2 and p is not policy.model.get_input_embeddings().weight]
    there = 2.0 * sum(p.numel() for p in layers)
    back = there + 2.0 * sum(p.numel() for p in layers if p.requires_grad)
    per_key = 4.0 * config.num_attention_heads * policy.head_size * config.num_hidden_layers
    total = 0.0
    for pack in packs:
        predicted = sum(pack.lengths)
        total += pack.tokens * (forward * there + backward * back)
        total += 2.0 * predicted * head.numel() * (forward + backward * (1 + head.requires_grad))
        total += per_key * pack.scores * (forward + 2 * backward)
    return total


def utilisation(
    policy: Policy, packs: Iterable[Pack], seconds: float, *, forward: int = 1, backward: int = 1
) -> dict[str, float]:
    """Metrics of an update that took so long: its model FLOPs per second, and their share of the device's matrix rate."""
    rate = model_flops(policy, packs, forward=forward, backward=backward) / max(seconds, 1e-9)
    return {"update_tflops": rate / 1e12, "mfu": rate / matrix_rate(policy.device, policy.model.dtype)}


@cache
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a large product of random matrices here: what a model's share is measured against."""
    size, tries = (8192, 5) if device.type == "cuda" else (256, 5)
    a, b = (torch.randn(size, size, dtype=dtype, device=device, generator=_dice(device, i)) for i in range(2))
    times = []
    for _ in range(tries + 1):
        clock = DevicePhases(device)
        with clock("product"):
            a @ b
        times.append(clock.seconds()["product"])
    return 2.0 * size**3 / median(times[1:])


def _dice(device: torch.device, seed: int) -> torch.Generator:
    """A generator of its own: a run's random numbers must not depend on what is measured."""
    return torch.Generator(device).manual_seed(seed)
