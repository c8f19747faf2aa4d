"""Where a step's time goes: seconds by phase, how much of the device an update uses, and a profile of single steps.

Work on a GPU is only queued, so the phases of an update are timed by events on the device, read once at the end. The rest of
the update's time is *idle*: the device waits for the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from oncurve.models.packing import Pack
from oncurve.models.policy import Policy
from oncurve.plan.model_shape import expert_counts
from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import StepReport
from oncurve.training.listeners import Listener


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

    A token costs 2 FLOPs for each weight that it is multiplied with (of experts, those that it takes), the same again for the
    gradient of its input, and again for the gradient of the weight if it is trained. Attention costs 4·d FLOPs for each query
    head and key, and twice that in the backward pass.
    """
    config = policy.model.config.get_text_config()
    head = policy.head.weight_VD
    experts, active = expert_counts(config.to_dict())
    layers = [p for p in policy.backbone.parameters() if p.dim() > 1 and p is not policy.model.get_input_embeddings().weight]

    def multiplied(p: Tensor) -> float:
        return p.numel() * active / experts if p.dim() == 3 and p.shape[0] == experts else p.numel()

    forward_flops = 2.0 * sum(map(multiplied, layers))
    backward_flops = forward_flops + 2.0 * sum(multiplied(p) for p in layers if p.requires_grad)
    heads, _, head_size = policy.attention_sizes
    per_key = 4.0 * heads * head_size * config.num_hidden_layers
    total = 0.0
    for pack in packs:
        predicted = sum(pack.lengths)
        total += pack.tokens * (forward * forward_flops + backward * backward_flops)
        total += 2.0 * predicted * head.numel() * (forward + backward * (1 + head.requires_grad))
        total += per_key * pack.scores * (forward + 2 * backward)
    return total


def utilisation(
    policy: Policy, packs: Iterable[Pack], seconds: float, *, forward: int = 1, backward: int = 1, other: float = 0.0
) -> dict[str, float]:
    """Metrics of an update that took ``seconds``: model FLOPs per second, and their fraction of the device's matmul rate.
    ``other`` FLOPs are those of other models and packs."""
    rate = (model_flops(policy, packs, forward=forward, backward=backward) + other) / max(seconds, 1e-9)
    return {"update_tflops": rate / 1e12, "mfu": rate / matmul_rate(policy.device, policy.model.dtype)}


@cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a large matmul of random matrices on this device: the reference for `mfu`.

    It is the fastest of several: on a busy CPU others are interrupted, and a rate that is too low would make `mfu` exceed 1.
    """
    size, repeats = (8192, 5) if device.type == "cuda" else (256, 50)
    a, b = (torch.randn(size, size, dtype=dtype, device=device, generator=_generator(device, i)) for i in range(2))
    times = []
    for _ in range(repeats + 1):
        clock = DevicePhases(device)
        with clock("product"):
            a @ b
        times.append(clock.seconds()["product"])
    return 2.0 * size**3 / min(times[1:])


def _generator(device: torch.device, seed: int) -> torch.Generator:
    """A separate generator: a measurement must not change a run's random numbers."""
    return torch.Generator(device).manual_seed(seed)


SHOWN_OPERATORS = 12


class StepProfiler(Listener):
    """Profiles ``steps`` steps of a run's last stage, after the first one, which also loads and compiles.

    Writes `profile/trace.json.gz` to the run's folder, for chrome://tracing or Perfetto, and `profile/table.txt`: seconds by
    phase as the run records them, and torch's operators by their own time. Profiled steps are slower than others.
    """

    def __init__(self, steps: int) -> None:
        self.steps, self.table = steps, ""
        self._reports: list[StepReport] = []
        self._profile: profile | None = None
        self._is_last_stage = False

    def on_run_start(self, recipe: Recipe, folder: Path, parameters: int, resumed_from: tuple[str, int] | None) -> None:
        self._folder, self._last_stage = folder / "profile", recipe.stages[-1].label

    def on_stage_start(self, stage: str, type: str, position: int, steps: int, done: int) -> None:
        self._is_last_stage = stage == self._last_stage

    def on_step(self, report: StepReport) -> None:
        if self._profile is not None:
            self._reports.append(report)
            if len(self._reports) == self.steps:
                self._finish()
        elif self._is_last_stage and not self._reports:
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
            self._profile.start()

    def on_stage_end(self, stage: str) -> None:
        self._finish()

    def on_run_end(self, status: str) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        if self._reports:
            self._folder.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(self._folder / "trace.json.gz"))
            averages = self._profile.key_averages()
            order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
            operators = averages.table(sort_by=order, row_limit=SHOWN_OPERATORS, max_name_column_width=48)
            self.table = f"{phase_table(self._reports)}\n\n{operators}"
            (self._folder / "table.txt").write_text(self.table, encoding="utf-8")
        self._profile = None


def phase_table(reports: Sequence[StepReport]) -> str:
    """Mean seconds of a step by phase, and their fraction of the step. A phase such as `update/forward` is part of `update`."""
    total = fmean(report.total_seconds for report in reports)
    phases = dict.fromkeys(phase for report in reports for phase in report.seconds)
    seconds = {phase: fmean(report.seconds.get(phase, 0.0) for report in reports) for phase in sorted(phases)}
    lines = [f"{phase:24s} {value:10.4f} s {100 * value / max(total, 1e-12):6.1f} %" for phase, value in seconds.items()]
    head = f"{len(reports)} steps of {reports[0].stage}, from step {reports[0].step}: mean seconds of a step by phase"
    return "\n".join([head, *lines, f"{'step':24s} {total:10.4f} s"])
