"""The simulation of many GPUs: small cases by hand, and properties."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.plan import cluster_simulation
from oncurve.plan.cluster_simulation import (
    Asynchronous,
    Lengths,
    Timing,
    Work,
    async_break_even,
    compare_sizes,
    synchronous,
    timing_of,
)
from oncurve.plan.step_time import seconds_of
from tests.plan.jobs import job

TIMING = Timing(
    prefill=0.5, decode=0.1, decode_row=0.01, update=0.001, fixed=0.25, gradient_bytes=8e9, weight_bytes=4e9, link=1e9, slots=2
)
EQUAL = Lengths(100, 100.0)
TAILED = Lengths(4000, 800.0)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of equal speed."""
    monkeypatch.setattr(cluster_simulation, "JITTER", 0.0)


def work(gpus: int, lengths: Lengths = EQUAL, **changes: int) -> Work:
    plain = {"prompts_per_gpu": 1, "group_size": 2, "prompt_tokens": 50, "steps": 4}
    return Work(gpus, lengths=lengths, **{**plain, **changes})


@pytest.mark.usefixtures("exact")
def test_one_gpu_by_hand() -> None:
    """A prefill of 0.5, 100 decode steps of 0.1 + 2 · 0.01, (2 · 100 + 50) tokens at 0.001, and 0.25; no waiting."""
    out = synchronous(work(1), TIMING)
    assert out.step_seconds == pytest.approx(0.5 + 100 * 0.12 + 250 * 0.001 + 0.25)
    assert out.samples_per_second == pytest.approx(2 / 13.0)
    assert out.idle == 0


@pytest.mark.usefixtures("exact")
def test_two_gpus_by_hand() -> None:
    """The same, and a ring of two: 2 · 1/2 of 8 GB at 1 GB/s takes 8 s, in which both wait."""
    out = synchronous(work(2), TIMING)
    assert out.step_seconds == pytest.approx(13.0 + 8.0)
    assert out.idle == pytest.approx(8 / 21)


@pytest.mark.usefixtures("exact")
def test_slots_are_refilled() -> None:
    """Lengths 10, 20, 30 in two slots: both run 10 steps, the third takes the first's slot, both run 10 more, one 20."""
    seconds = cluster_simulation._sampling([10, 20, 30], work(1), TIMING)
    assert seconds == pytest.approx(0.5 + 20 * 0.12 + 20 * 0.11)


@pytest.mark.usefixtures("exact")
def test_asynchronous_by_hand() -> None:
    """One sampler samples a step of two groups in 0.5 + 100·0.12 each, one after the other. The learner needs
    2 · 250 · 0.001 + 0.25 at the same time, and the push takes 4 s of the sampler's time."""
    out = Asynchronous(work(2, steps=8), TIMING, learners=1, staleness=1).run()
    assert out.step_seconds == pytest.approx(2 * 12.5 + 4.0, rel=0.01)
    assert out.staleness_max <= 1


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 12), st.integers(0, 4), st.integers(0, 1000), st.integers(1, 4))
def test_staleness_never_exceeds_its_bound(gpus: int, bound: int, seed: int, prompts: int) -> None:
    step = work(gpus, TAILED, prompts_per_gpu=prompts, steps=6)
    out = Asynchronous(step, TIMING, learners=max(1, gpus // 3), staleness=bound, seed=seed).run()
    assert 0 <= out.staleness_mean <= out.staleness_max <= bound
    assert 0 <= out.idle < 1


def test_a_longer_tail_only_costs() -> None:
    """With the same mean and more spread, all wait longer for the last completion."""
    even, spread = (synchronous(work(16, x, prompts_per_gpu=4, steps=20), TIMING) for x in (Lengths(800, 800.0), TAILED))
    assert spread.samples_per_second < 0.8 * even.samples_per_second
    assert spread.idle > even.idle + 0.1


def test_more_staleness_is_not_slower() -> None:
    step = work(8, TAILED, prompts_per_gpu=4, group_size=4, steps=10)
    speeds = [Asynchronous(step, TIMING, 2, k, seed=1).run().samples_per_second for k in (0, 1, 4)]
    assert speeds[0] < 0.95 * speeds[1]
    assert speeds[2] > 0.95 * speeds[1]


def test_the_same_seed_gives_the_same_run() -> None:
    step = work(4, TAILED)
    assert synchronous(step, TIMING, 3) == synchronous(step, TIMING, 3)
    one, other = (Asynchronous(step, TIMING, 1, 2, seed=3).run() for _ in range(2))
    assert one == other


def test_lengths_have_the_given_mean() -> None:
    rng = random.Random(0)
    lengths = [TAILED.draw(rng) for _ in range(20_000)]
    assert sum(lengths) / len(lengths) == pytest.approx(800, rel=0.03)
    assert max(lengths) == 4000
    assert {Lengths(9, 5.0, (3, 7)).draw(rng) for _ in range(50)} == {3, 7}


def test_one_gpus_times_come_from_its_plan() -> None:
    large = job("Qwen/Qwen3-0.6B", "H200", prompts=16, prompt_tokens=128, new_tokens=256, mean_tokens=256.0)
    timing, planned = timing_of(large), seconds_of(large).phases
    assert timing.slots == 128
    sampled = 16 * timing.prefill + 256 * (timing.decode + 128 * timing.decode_row)
    assert sampled == pytest.approx(planned["sample"], rel=1e-6)
    assert timing.update * large.step_tokens == pytest.approx(planned["update"] + planned["optimiser"], rel=1e-6)
    measured = timing_of(large, sample_ratio=2.0, update_ratio=0.5)
    assert measured.decode == 2 * timing.decode
    assert measured.update == 0.5 * timing.update


def test_sizes_side_by_side() -> None:
    large = job("Qwen/Qwen3-0.6B", "H200", prompts=4, group_size=4, prompt_tokens=128, new_tokens=2048, mean_tokens=400.0)
    sizes = compare_sizes(large, timing_of(large), Lengths(2048, 400.0), (1, 8, 32), staleness=2)
    assert [size.gpus for size in sizes] == [1, 8, 32]
    assert sizes[0].apart is None
    assert sizes[2].together.idle > sizes[1].together.idle  # more GPUs wait longer for the last completion
    for size in sizes[1:]:
        assert size.apart is not None
        assert 1 <= size.apart.learners < size.gpus


def test_the_size_from_which_asynchronous_is_faster() -> None:
    base = synchronous(work(1), TIMING)
    faster, slower = (replace(base, samples_per_second=base.samples_per_second * x) for x in (1.2, 0.9))
    sizes = [
        cluster_simulation.Size(1, base, None),
        cluster_simulation.Size(8, base, slower),
        cluster_simulation.Size(64, base, faster),
    ]
    assert async_break_even(sizes) == 64
    assert async_break_even(sizes[:2]) is None
    assert async_break_even([*sizes, cluster_simulation.Size(512, base, slower)]) is None
