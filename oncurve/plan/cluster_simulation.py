"""Discrete-event simulation of many GPUs: synchronous steps compared with asynchronous ones of bounded staleness.

Its input is the times of one GPU (a plan's, corrected by a run's measurements) and completion lengths (a run's, or an assumed
distribution). The number of prompts per GPU is fixed, so a step grows with the number of GPUs.

Synchronous: every GPU samples its prompts, all wait for the last completion, all update together. Asynchronous: GPUs are
divided into samplers and learners. A sampler refills its slots as long as no more groups were started than (v + k + 1) steps
need, where v is the last published version of the weights and k the maximum staleness (the rule of AReaL, Fu et al. 2025). The
learner takes the oldest groups first, and waits for a group that would otherwise become too stale. New weights are pushed to
samplers in the middle of completions, which continue with them. A group's staleness is the number of versions between the
weights that started it and those that its update changes; it never exceeds k.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import mean

from oncurve.plan.job import Job
from oncurve.plan.memory import slots_in_flight
from oncurve.plan.step_time import Rates, decode_seconds, decode_steps, sample_seconds, seconds_of

GPUS_PER_NODE = 8
NETWORK = 50e9
"""Bytes per second from one GPU to other machines: 400 Gbit/s each."""
JITTER = 0.02
"""Standard deviation of the relative speed of equal GPUs: clocks and temperatures differ."""
SPLITS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Fractions of learner GPUs that are tried for the asynchronous run."""
MAX_COMPLETIONS = 60_000
"""Approximate maximum number of completions in one simulated run."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One GPU's times in seconds, and the bytes sent between GPUs."""

    prefill: float
    """Per prompt."""
    decode: float
    """Fixed part of a decode step."""
    decode_row: float
    """Part of a decode step per completion."""
    update: float
    """Per token of the learner's pass, optimiser included."""
    fixed: float
    """Fixed cost of a step."""
    gradient_bytes: float
    weight_bytes: float
    link: float
    slots: int

    def reduce(self, gpus: int) -> float:
        """A ring all-reduce over all GPUs: 2·(n − 1)/n of the gradients' bytes over the slowest link."""
        return 0.0 if gpus == 1 else 2 * (gpus - 1) / gpus * self.gradient_bytes / self._bandwidth(gpus)

    def push(self, gpus: int) -> float:
        """A pipelined broadcast of new weights to the samplers."""
        return self.weight_bytes / self._bandwidth(gpus)

    def _bandwidth(self, gpus: int) -> float:
        return self.link if gpus <= GPUS_PER_NODE else min(self.link, NETWORK)


def timing_of(job: Job, *, sample_ratio: float = 1.0, update_ratio: float = 1.0) -> Timing:
    """A plan's times of one GPU, multiplied by measured ratios."""
    rates, slots = Rates(job.gpu, job.precision), slots_in_flight(job)
    full, single = decode_seconds(job, rates), decode_seconds(replace(job, slots=1), rates)
    per_completion = max(0.0, (full - single) / max(slots - 1, 1))
    planned = seconds_of(job).phases
    learning = sum(seconds for name, seconds in planned.items() if name in ("reference", "update", "critic", "optimiser"))
    prefill = sample_seconds(job, rates) - decode_steps(job) * full
    return Timing(
        prefill=sample_ratio * prefill / job.rank_prompts,
        decode=sample_ratio * max(single - per_completion, 0.0),
        decode_row=sample_ratio * per_completion,
        update=update_ratio * learning / job.step_tokens,
        fixed=planned.get("rest", 0.0) + planned.get("score", 0.0),
        gradient_bytes=4.0 * job.trained,
        weight_bytes=float(job.dtype_bytes * (job.trained if job.lora_rank else job.shape.parameters)),
        link=job.gpu.link * rates.of.network,
        slots=slots,
    )


@dataclass(frozen=True, slots=True)
class Lengths:
    """Completion lengths: sampled from measured ones, or exponential, truncated at the limit, with the given mean."""

    limit: int
    mean: float
    measured: tuple[int, ...] = ()

    def draw(self, rng: random.Random) -> int:
        if self.measured:
            return rng.choice(self.measured)
        if self.mean >= self.limit:
            return self.limit
        return max(1, min(self.limit, round(rng.expovariate(1 / _scale(self.mean, self.limit)))))


@cache
def _scale(mean_length: float, limit: int) -> float:
    """The mean λ of an exponential X for which min(X, limit) has the given mean, λ·(1 − e^(−limit/λ)); found by bisection."""
    low, high = mean_length, 1000.0 * limit
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle * -math.expm1(-limit / middle) < mean_length else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Work:
    """The size of a step of the cluster."""

    gpus: int
    prompts_per_gpu: int
    group_size: int
    prompt_tokens: int
    lengths: Lengths
    steps: int

    @property
    def groups(self) -> int:
        return self.gpus * self.prompts_per_gpu


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulated run. ``idle``: fraction of all GPUs' time spent waiting. Fields are JSON keys."""

    step_seconds: float
    samples_per_second: float
    idle: float
    staleness_mean: float = 0.0
    staleness_max: int = 0
    learners: int = 0


def synchronous(work: Work, timing: Timing, seed: int = 0) -> SimulationResult:
    """All GPUs sample, wait for the last completion, and update."""
    rng = random.Random(seed)
    speeds = _speeds(work.gpus, rng)
    elapsed, waited = 0.0, 0.0
    for _ in range(work.steps):
        per_gpu = [[work.lengths.draw(rng) for _ in range(work.prompts_per_gpu * work.group_size)] for _ in range(work.gpus)]
        sampling = [v * _sampling(lengths, work, timing) for v, lengths in zip(speeds, per_gpu, strict=True)]
        sampled = max(sampling)
        tokens = sum(map(sum, per_gpu)) + work.groups * work.prompt_tokens
        learned = max(speeds) * timing.update * tokens / work.gpus  # balanced by tokens: the slowest GPU determines the time
        waited += sum(sampled - t for t in sampling) + sum(learned * (1 - v / max(speeds)) for v in speeds)
        rest = timing.reduce(work.gpus) + timing.fixed
        waited += work.gpus * timing.reduce(work.gpus)
        elapsed += sampled + learned + rest
    step = elapsed / work.steps
    return SimulationResult(step, work.groups * work.group_size / step, waited / (elapsed * work.gpus))


def _sampling(lengths: Sequence[int], work: Work, timing: Timing) -> float:
    """Seconds of one GPU for its completions: slots are refilled from the queue until it is empty."""
    waiting = deque(lengths)
    running = [waiting.popleft() for _ in range(min(timing.slots, len(waiting)))]
    heapq.heapify(running)
    seconds, step = work.prompts_per_gpu * timing.prefill, 0
    while running:
        end = heapq.heappop(running)
        seconds += (end - step) * (timing.decode + timing.decode_row * (len(running) + 1))
        step = end
        if waiting:
            heapq.heappush(running, step + waiting.popleft())
    return seconds


def _speeds(gpus: int, rng: random.Random) -> list[float]:
    """The relative time that each GPU takes."""
    return [max(0.9, rng.gauss(1.0, JITTER)) for _ in range(gpus)]


@dataclass
class _Group:
    """A group being sampled: the version that started it, its unfinished completions, its tokens."""

    version: int
    unfinished: int
    tokens: int = 0


@dataclass
class _Sampler:
    """One sampling GPU. ``ticks`` counts decode steps; each completion in ``running`` has the tick at which it ends."""

    slowness: float
    ticks: float = 0.0
    since: float = 0.0
    running: list[tuple[float, int, _Group]] = field(default_factory=list)
    busy: float = 0.0
    stamp: int = 0
    queue: deque[tuple[int, _Group]] = field(default_factory=deque)

    def pace(self, timing: Timing) -> float:
        return self.slowness * (timing.decode + timing.decode_row * len(self.running))

    def advance(self, now: float, timing: Timing) -> None:
        """Counts the decode steps up to now. Before ``since``, the end of a prefill or of a weight push, nothing decodes."""
        if self.running and now > self.since:
            self.ticks += (now - self.since) / self.pace(timing)
            self.busy += now - self.since
        self.since = max(self.since, now)


class Asynchronous:
    """The asynchronous run. Its events: a completion ends on a sampler, the learner finishes an update."""

    def __init__(self, work: Work, timing: Timing, learners: int, staleness: int, seed: int = 0) -> None:
        self.work, self.timing, self.learners, self.max_staleness = work, timing, learners, staleness
        self.rng = random.Random(seed)
        self.samplers = [_Sampler(v) for v in _speeds(work.gpus - learners, self.rng)]
        self.slowness = max(_speeds(learners, self.rng))
        self.events: list[tuple[float, int, int, int]] = []
        self.count = 0
        self.version, self.started_groups, self.now = 0, 0, 0.0
        self.ready: list[tuple[int, int, _Group]] = []
        self.unfinished: Counter[int] = Counter()
        self.learning: float | None = None
        self.learner_seconds = 0.0
        self.staleness: list[int] = []
        self.update_times: list[float] = []

    def run(self) -> SimulationResult:
        for index in range(len(self.samplers)):
            self._fill(index)
        while len(self.update_times) < self.work.steps:
            self.now, _, index, stamp = heapq.heappop(self.events)
            if index < 0:
                self._publish_weights()
            elif stamp == self.samplers[index].stamp:
                self._end_completion(index)
            self._learn()
        return self._result()

    def _schedule(self, time: float, index: int, stamp: int = 0) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, index, stamp))

    def _fill(self, index: int) -> None:
        """Fills free slots with completions of started groups, then of new groups as far as staleness allows."""
        sampler, timing = self.samplers[index], self.timing
        sampler.advance(self.now, timing)
        while len(sampler.running) < timing.slots:
            if not sampler.queue and not self._start_group(sampler):
                break
            length, group = sampler.queue.popleft()
            self.count += 1
            heapq.heappush(sampler.running, (sampler.ticks + length, self.count, group))
        sampler.stamp += 1
        if sampler.running:
            remaining = max(0.0, sampler.running[0][0] - sampler.ticks)
            self._schedule(sampler.since + remaining * sampler.pace(timing), index, sampler.stamp)

    def _start_group(self, sampler: _Sampler) -> bool:
        if self.started_groups >= (self.version + self.max_staleness + 1) * self.work.groups:
            return False
        self.started_groups += 1
        lengths = [self.work.lengths.draw(self.rng) for _ in range(self.work.group_size)]
        group = _Group(self.version, len(lengths), sum(lengths))
        self.unfinished[self.version] += 1
        sampler.queue.extend((length, group) for length in lengths)
        sampler.since += sampler.slowness * self.timing.prefill
        sampler.busy += sampler.slowness * self.timing.prefill
        return True

    def _end_completion(self, index: int) -> None:
        sampler = self.samplers[index]
        sampler.advance(self.now, self.timing)
        end, _, group = heapq.heappop(sampler.running)
        sampler.ticks = max(sampler.ticks, end)
        group.unfinished -= 1
        if not group.unfinished:
            self.count += 1
            self.unfinished[group.version] -= 1
            heapq.heappush(self.ready, (group.version, self.count, group))
        self._fill(index)

    def _learn(self) -> None:
        if self.learning is not None or len(self.ready) < self.work.groups or self._must_wait():
            return
        groups = [heapq.heappop(self.ready)[2] for _ in range(self.work.groups)]
        self.staleness += [self.version - group.version for group in groups]
        tokens = sum(group.tokens for group in groups) + len(groups) * self.work.prompt_tokens
        computed = self.slowness * self.timing.update * tokens / self.learners
        self.learner_seconds += computed
        self.learning = computed + self.timing.reduce(self.learners) + self.timing.fixed
        self._schedule(self.now + self.learning, -1)

    def _must_wait(self) -> bool:
        """Whether an unfinished group would be too stale for the next update, so that this update must wait for it."""
        return any(count and version <= self.version - self.max_staleness for version, count in self.unfinished.items())

    def _publish_weights(self) -> None:
        """The update is done: samplers load the new weights and continue, and those that waited start again."""
        self.learning = None
        self.version += 1
        self.update_times.append(self.now)
        pushed = self.timing.push(self.work.gpus)
        for index, sampler in enumerate(self.samplers):
            sampler.advance(self.now, self.timing)
            sampler.since = max(sampler.since, self.now) + pushed
            self._fill(index)

    def _result(self) -> SimulationResult:
        warm = min(len(self.update_times) - 1, self.max_staleness + 1)
        each = (
            (self.update_times[-1] - self.update_times[warm - 1]) / (len(self.update_times) - warm)
            if warm
            else self.update_times[-1] / len(self.update_times)
        )
        busy = sum(sampler.busy for sampler in self.samplers) + self.learner_seconds * self.learners
        idle = max(0.0, 1 - busy / (self.now * self.work.gpus))
        samples = self.work.groups * self.work.group_size
        return SimulationResult(each, samples / each, idle, mean(self.staleness), max(self.staleness), self.learners)


@dataclass(frozen=True, slots=True)
class Size:
    """The results for one number of GPUs: synchronous (``together``), asynchronous (``apart``, None for one GPU). JSON keys."""

    gpus: int
    together: SimulationResult
    apart: SimulationResult | None

    @property
    def gain(self) -> float:
        """How much faster the asynchronous run is; below 1 it is slower."""
        return 0.0 if self.apart is None else self.apart.samples_per_second / self.together.samples_per_second


def compare_sizes(
    job: Job, timing: Timing, lengths: Lengths, sizes: Iterable[int], staleness: int, seed: int = 0
) -> list[Size]:
    """Simulates each size synchronously and asynchronously, the latter with the best split into learners and samplers."""
    return [_size(job, timing, lengths, gpus, staleness, seed) for gpus in sizes]


def _size(job: Job, timing: Timing, lengths: Lengths, gpus: int, staleness: int, seed: int) -> Size:
    completions = gpus * job.rank_prompts * job.group_size
    steps = max(3 + staleness, min(12, MAX_COMPLETIONS // completions))
    work = Work(gpus, job.rank_prompts, job.group_size, job.prompt_tokens, lengths, steps)
    learners = sorted({max(1, round(share * gpus)) for share in SPLITS} - {gpus}) if gpus > 1 else []
    runs = [Asynchronous(work, timing, count, staleness, seed).run() for count in _promising(learners, work, timing)]
    return Size(gpus, synchronous(work, timing, seed), max(runs, key=lambda r: r.samples_per_second, default=None))


def _promising(learners: Sequence[int], work: Work, timing: Timing) -> list[int]:
    """The two numbers of learners with the shortest estimated step; only these are simulated.

    A step is estimated from average lengths: it takes as long as the slower of sampling and learning.
    """
    tokens = work.group_size * work.lengths.mean + work.prompt_tokens
    pace = (timing.decode + timing.decode_row * timing.slots) / timing.slots
    sampling = work.groups * (timing.prefill + work.group_size * work.lengths.mean * pace)

    def bottleneck(count: int) -> float:
        return max(sampling / (work.gpus - count), work.groups * tokens * timing.update / count + timing.reduce(count))

    return sorted(learners, key=bottleneck)[:2]


def async_break_even(sizes: Sequence[Size], by: float = 1.05) -> int | None:
    """The smallest size from which on the asynchronous run is faster by the factor ``by``; None if there is none."""
    faster = [size.gpus for size in sizes if size.gain >= by]
    return next((gpus for gpus in faster if all(s.gain >= by for s in sizes if s.gpus >= gpus)), None)
