"""Many GPUs, by a discrete-event model: synchronous steps against asynchronous ones of bounded staleness.

It is fed with the times of one GPU (a plan's, corrected by what a run has measured) and with lengths (a run's, or an assumed
distribution). Each GPU brings its share of prompts, so a step grows with the number of GPUs.

Synchronous: every GPU samples its prompts, all wait for the last completion, all update together. Asynchronous: GPUs are
divided into samplers and learners. A sampler refills its slots as long as no more groups were begun than (v + k + 1) steps
need, v being the last published version of the weights and k the most staleness allowed (the rule of AReaL, Fu et al. 2025).
The learner takes the oldest groups first, and waits for one that would otherwise grow too old. New weights are pushed to
samplers that are under way: a completion goes on with them. A group's staleness is the number of versions between the weights
that began it and those that its update moves; it never exceeds k.
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

NODE = 8
"""GPUs that share a machine and its fast links."""
NETWORK = 50e9
"""Bytes per second of one GPU to other machines: 400 Gbit/s each."""
JITTER = 0.02
"""Spread of the speed of like GPUs, as a share: clocks and temperatures differ."""
SPLITS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of the GPUs that learn, tried for the asynchronous run."""
MOST_COMPLETIONS = 60_000
"""Completions of one simulated run, at most about."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One GPU's times in seconds, and what is sent between several."""

    prefill: float
    """A prompt."""
    decode: float
    """A token step, whatever is decoded."""
    decode_row: float
    """The same, for each completion in it."""
    update: float
    """A token of the learner's pass, optimiser included."""
    fixed: float
    """What every step costs on its own."""
    gradient_bytes: float
    weight_bytes: float
    link: float
    slots: int

    def reduce(self, gpus: int) -> float:
        """A ring over all GPUs: 2·(n − 1)/n of the gradients' bytes over the slowest link."""
        return 0.0 if gpus == 1 else 2 * (gpus - 1) / gpus * self.gradient_bytes / self._bandwidth(gpus)

    def push(self, gpus: int) -> float:
        """New weights to the samplers, each handing on what it gets."""
        return self.weight_bytes / self._bandwidth(gpus)

    def _bandwidth(self, gpus: int) -> float:
        return self.link if gpus <= NODE else min(self.link, NETWORK)


def timing_of(job: Job, *, sample_ratio: float = 1.0, update_ratio: float = 1.0) -> Timing:
    """A plan's times for each GPU; the ratios correct them by what was measured."""
    rates, slots = Rates(job.gpu, job.precision), slots_in_flight(job)
    most, least = decode_seconds(job, rates), decode_seconds(replace(job, slots=1), rates)
    row = max(0.0, (most - least) / max(slots - 1, 1))
    took = seconds_of(job).phases
    learning = sum(seconds for name, seconds in took.items() if name in ("reference", "update", "critic", "optimiser"))
    prefill = sample_seconds(job, rates) - decode_steps(job) * most
    return Timing(
        prefill=sample_ratio * prefill / job.rank_prompts,
        decode=sample_ratio * max(least - row, 0.0),
        decode_row=sample_ratio * row,
        update=update_ratio * learning / job.step_tokens,
        fixed=took.get("rest", 0.0) + took.get("score", 0.0),
        gradient_bytes=4.0 * job.trained,
        weight_bytes=float(job.dtype_bytes * (job.trained if job.lora_rank else job.shape.parameters)),
        link=job.gpu.link * rates.of.network,
        slots=slots,
    )


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of completions: drawn from measured ones, or exponential, cut at the limit, with the mean that was asked for."""

    limit: int
    mean: float
    measured: tuple[int, ...] = ()

    def draw(self, dice: random.Random) -> int:
        if self.measured:
            return dice.choice(self.measured)
        if self.mean >= self.limit:
            return self.limit
        return max(1, min(self.limit, round(dice.expovariate(1 / _scale(self.mean, self.limit)))))


@cache
def _scale(mean_length: float, limit: int) -> float:
    """λ of which min(X, limit) has the asked mean: λ·(1 − e^(−limit/λ)), by bisection."""
    low, high = mean_length, 1000.0 * limit
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle * -math.expm1(-limit / middle) < mean_length else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Work:
    """What a step of the cluster is."""

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
    """What a simulated run came to. ``idle``: share of all GPUs' time spent waiting for others."""

    step_seconds: float
    samples_per_second: float
    idle: float
    staleness_mean: float = 0.0
    staleness_max: int = 0
    learners: int = 0


def synchronous(work: Work, timing: Timing, seed: int = 0) -> SimulationResult:
    """All sample, all wait for the last one, all update."""
    dice = random.Random(seed)
    speeds = _speeds(work.gpus, dice)
    spent, waited = 0.0, 0.0
    for _ in range(work.steps):
        per_gpu = [[work.lengths.draw(dice) for _ in range(work.prompts_per_gpu * work.group_size)] for _ in range(work.gpus)]
        took = [v * _sampling(lengths, work, timing) for v, lengths in zip(speeds, per_gpu, strict=True)]
        sampled = max(took)
        tokens = sum(map(sum, per_gpu)) + work.groups * work.prompt_tokens
        learned = max(speeds) * timing.update * tokens / work.gpus  # balanced by tokens: the slowest GPU sets the pace
        waited += sum(sampled - t for t in took) + sum(learned * (1 - v / max(speeds)) for v in speeds)
        rest = timing.reduce(work.gpus) + timing.fixed
        waited += work.gpus * timing.reduce(work.gpus)
        spent += sampled + learned + rest
    each = spent / work.steps
    return SimulationResult(each, work.groups * work.group_size / each, waited / (spent * work.gpus))


def _sampling(lengths: Sequence[int], work: Work, timing: Timing) -> float:
    """Seconds of one GPU for its completions: slots are refilled from the queue, and the last ones run out alone."""
    waiting = deque(lengths)
    running = [waiting.popleft() for _ in range(min(timing.slots, len(waiting)))]
    heapq.heapify(running)
    seconds, at = work.prompts_per_gpu * timing.prefill, 0
    while running:
        ends = heapq.heappop(running)
        seconds += (ends - at) * (timing.decode + timing.decode_row * (len(running) + 1))
        at = ends
        if waiting:
            heapq.heappush(running, at + waiting.popleft())
    return seconds


def _speeds(gpus: int, dice: random.Random) -> list[float]:
    """How much longer than usual each GPU takes."""
    return [max(0.9, dice.gauss(1.0, JITTER)) for _ in range(gpus)]


@dataclass
class _Group:
    """A group under way: the version that began it, completions left, tokens written."""

    begun: int
    left: int
    tokens: int = 0


@dataclass
class _Sampler:
    """One sampling GPU. ``ticks`` counts token steps; a row ends at its own tick."""

    slow: float
    ticks: float = 0.0
    since: float = 0.0
    rows: list[tuple[float, int, _Group]] = field(default_factory=list)
    busy: float = 0.0
    stamp: int = 0
    queue: deque[tuple[int, _Group]] = field(default_factory=deque)

    def pace(self, timing: Timing) -> float:
        return self.slow * (timing.decode + timing.decode_row * len(self.rows))

    def advance(self, now: float, timing: Timing) -> None:
        """Bring the ticks up to now; time before ``since`` (a prefill, a push) is spent without decoding."""
        if self.rows and now > self.since:
            self.ticks += (now - self.since) / self.pace(timing)
            self.busy += now - self.since
        self.since = max(self.since, now)


class Asynchronous:
    """The events: a row ends on a sampler, the learner is done."""

    def __init__(self, work: Work, timing: Timing, learners: int, staleness: int, seed: int = 0) -> None:
        self.work, self.timing, self.learners, self.bound = work, timing, learners, staleness
        self.dice = random.Random(seed)
        self.samplers = [_Sampler(v) for v in _speeds(work.gpus - learners, self.dice)]
        self.slow = max(_speeds(learners, self.dice))
        self.events: list[tuple[float, int, int, int]] = []
        self.count = 0
        self.version, self.begun, self.now = 0, 0, 0.0
        self.ready: list[tuple[int, int, _Group]] = []
        self.open: Counter[int] = Counter()
        self.learning: float | None = None
        self.learned = 0.0
        self.stale: list[int] = []
        self.ends: list[float] = []

    def run(self) -> SimulationResult:
        for place in range(len(self.samplers)):
            self._fill(place)
        while len(self.ends) < self.work.steps:
            self.now, _, place, stamp = heapq.heappop(self.events)
            if place < 0:
                self._published()
            elif stamp == self.samplers[place].stamp:
                self._row_ended(place)
            self._learn()
        return self._outcome()

    def _schedule(self, time: float, place: int, stamp: int = 0) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, place, stamp))

    def _fill(self, place: int) -> None:
        """Give free slots the rows of groups under way, then those of new groups as far as staleness allows."""
        sampler, timing = self.samplers[place], self.timing
        sampler.advance(self.now, timing)
        while len(sampler.rows) < timing.slots:
            if not sampler.queue and not self._begin_group(sampler):
                break
            length, group = sampler.queue.popleft()
            self.count += 1
            heapq.heappush(sampler.rows, (sampler.ticks + length, self.count, group))
        sampler.stamp += 1
        if sampler.rows:
            left = max(0.0, sampler.rows[0][0] - sampler.ticks)
            self._schedule(sampler.since + left * sampler.pace(timing), place, sampler.stamp)

    def _begin_group(self, sampler: _Sampler) -> bool:
        if self.begun >= (self.version + self.bound + 1) * self.work.groups:
            return False
        self.begun += 1
        lengths = [self.work.lengths.draw(self.dice) for _ in range(self.work.group_size)]
        group = _Group(self.version, len(lengths), sum(lengths))
        self.open[self.version] += 1
        sampler.queue.extend((length, group) for length in lengths)
        sampler.since += sampler.slow * self.timing.prefill
        sampler.busy += sampler.slow * self.timing.prefill
        return True

    def _row_ended(self, place: int) -> None:
        sampler = self.samplers[place]
        sampler.advance(self.now, self.timing)
        ended, _, group = heapq.heappop(sampler.rows)
        sampler.ticks = max(sampler.ticks, ended)
        group.left -= 1
        if not group.left:
            self.count += 1
            self.open[group.begun] -= 1
            heapq.heappush(self.ready, (group.begun, self.count, group))
        self._fill(place)

    def _learn(self) -> None:
        if self.learning is not None or len(self.ready) < self.work.groups or self._one_grows_old():
            return
        taken = [heapq.heappop(self.ready)[2] for _ in range(self.work.groups)]
        self.stale += [self.version - group.begun for group in taken]
        tokens = sum(group.tokens for group in taken) + len(taken) * self.work.prompt_tokens
        computed = self.slow * self.timing.update * tokens / self.learners
        self.learned += computed
        self.learning = computed + self.timing.reduce(self.learners) + self.timing.fixed
        self._schedule(self.now + self.learning, -1)

    def _one_grows_old(self) -> bool:
        """Whether a group under way would be too stale for the next update: then this one waits for it."""
        return any(count and begun <= self.version - self.bound for begun, count in self.open.items())

    def _published(self) -> None:
        """The update is done: samplers take the new weights and go on, and those that waited begin again."""
        self.learning = None
        self.version += 1
        self.ends.append(self.now)
        pushed = self.timing.push(self.work.gpus)
        for place, sampler in enumerate(self.samplers):
            sampler.advance(self.now, self.timing)
            sampler.since = max(sampler.since, self.now) + pushed
            self._fill(place)

    def _outcome(self) -> SimulationResult:
        warm = min(len(self.ends) - 1, self.bound + 1)
        each = (self.ends[-1] - self.ends[warm - 1]) / (len(self.ends) - warm) if warm else self.ends[-1] / len(self.ends)
        busy = sum(sampler.busy for sampler in self.samplers) + self.learned * self.learners
        idle = max(0.0, 1 - busy / (self.now * self.work.gpus))
        samples = self.work.groups * self.work.group_size
        return SimulationResult(each, samples / each, idle, mean(self.stale), max(self.stale), self.learners)


@dataclass(frozen=True, slots=True)
class Size:
    """A number of GPUs, run both ways; ``apart`` is None where one GPU can't be divided."""

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
    """Each size both ways, asynchronous with the best division of its GPUs."""
    return [_size(job, timing, lengths, gpus, staleness, seed) for gpus in sizes]


def _size(job: Job, timing: Timing, lengths: Lengths, gpus: int, staleness: int, seed: int) -> Size:
    rows = gpus * job.rank_prompts * job.group_size
    steps = max(3 + staleness, min(12, MOST_COMPLETIONS // rows))
    work = Work(gpus, job.rank_prompts, job.group_size, job.prompt_tokens, lengths, steps)
    learners = sorted({max(1, round(share * gpus)) for share in SPLITS} - {gpus}) if gpus > 1 else []
    runs = [Asynchronous(work, timing, count, staleness, seed).run() for count in _promising(learners, work, timing)]
    return Size(gpus, synchronous(work, timing, seed), max(runs, key=lambda r: r.samples_per_second, default=None))


def _promising(learners: Sequence[int], work: Work, timing: Timing) -> list[int]:
    """The two divisions that come nearest to sampling as fast as learning, by the plain averages: the others need no run."""
    tokens = work.group_size * work.lengths.mean + work.prompt_tokens
    pace = (timing.decode + timing.decode_row * timing.slots) / timing.slots
    sampling = work.groups * (timing.prefill + work.group_size * work.lengths.mean * pace)

    def longest(count: int) -> float:
        return max(sampling / (work.gpus - count), work.groups * tokens * timing.update / count + timing.reduce(count))

    return sorted(learners, key=longest)[:2]


def async_break_even(sizes: Sequence[Size], by: float = 1.05) -> int | None:
    """The fewest GPUs from which on the asynchronous run is worth its staleness; None where it never is."""
    paying = [size.gpus for size in sizes if size.gain >= by]
    return next((gpus for gpus in paying if all(s.gain >= by for s in sizes if s.gpus >= gpus)), None)
