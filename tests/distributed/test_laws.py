"""A step on several ranks has the gradient, prompts, random numbers and metrics of a single process."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from functools import cache

import numpy as np
import pytest

from oncurve.distributed.process_group import balanced_partition
from oncurve.distributed.world import World
from oncurve.runs.metrics import is_repeatable
from tests.distributed.cases import (
    CASES,
    StepOutcome,
    call_collectives,
    fail_on_one_rank,
    relative_distance,
    run_sft,
    step,
    steps,
    steps_layer_by_layer,
)
from tests.distributed.processes import in_ranks
from tests.distributed.stage_cases import STAGES, stage_steps
from tests.training.builders import recipe as small

FOUR = pytest.param(4, marks=pytest.mark.slow)


@cache
def outcomes(size: int) -> list[dict[str, StepOutcome]]:
    """The outcomes of every case on each of this many ranks."""
    return in_ranks(size, all_steps, list(CASES), list(STAGES))


def all_steps(world: World, of_grpo: list[str], of_stages: list[str]) -> dict[str, StepOutcome]:
    return steps(world, of_grpo) | stage_steps(world, of_stages)


@pytest.mark.parametrize("size", [2, FOUR])
@pytest.mark.parametrize("name", [*CASES, *STAGES])
def test_a_step_on_any_number_of_ranks_equals_that_of_one(name: str, size: int) -> None:
    one = outcomes(1)[0][name]
    for outcome in (of_rank[name] for of_rank in outcomes(size)):
        assert outcome.tokens == one.tokens
        assert relative_distance(outcome.advantages, one.advantages) < 1e-5
        assert relative_distance(outcome.gradient, one.gradient) < 1e-5
        assert relative_distance(outcome.weights, one.weights) < 1e-5
        repeatable = {metric: value for metric, value in one.metrics.items() if is_repeatable(metric.removeprefix("round/"))}
        assert {metric for metric in outcome.metrics if is_repeatable(metric.removeprefix("round/"))} == repeatable.keys()
        for metric, value in repeatable.items():
            assert math.isclose(outcome.metrics[metric], value, rel_tol=1e-4, abs_tol=1e-5), metric
        assert outcome.stats == one.stats
        assert outcome.written == one.written


SHARDED = [
    "grpo",
    "gspo",
    "kl in the reward",
    "mini-batches",
    "truncated",
    "truncated in mini-batches",
    "penalties of silent groups",
    "process rewards",
    "empty ranks",
    "nothing to learn",
    "small packs",
    "clipped",
]
STAGES_SHARDED = {
    "optimiser": [
        "dpo",
        "reward model",
        "ppo",
        "ppo in a shared trunk",
        "ppo of fewer prompts than ranks, warming up",
        "trpo",
        "iterative grpo",
        "distil",
    ],
    "full": [
        "dpo",
        "ipo",
        "dpo of fewer pairs than ranks",
        "rejection sampling",
        "distil",
        "distil by advantages",
        "distil from the policy itself",
        "distil of fewer prompts than ranks",
    ],
}


@pytest.mark.parametrize("shard", ["optimiser", "full"])
@pytest.mark.parametrize("size", [2, FOUR])
def test_a_sharded_step_equals_an_unsharded_one(shard: str, size: int) -> None:
    """With the optimiser, or also the weights, sharded."""
    sets = [f"scale.ranks={size}", f"scale.shard={shard}", "grpo.prompts_per_step=8", "scale.timeout_s=300.0"]
    ranks = in_ranks(size, all_steps, SHARDED, STAGES_SHARDED[shard], recipe=small(*sets))
    for name in [*SHARDED, *STAGES_SHARDED[shard]]:
        one = outcomes(1)[0][name]
        for of_rank in ranks:
            outcome = of_rank[name]
            assert outcome.tokens == one.tokens
            assert relative_distance(outcome.gradient, one.gradient) < 1e-5, name
            assert relative_distance(outcome.weights, one.weights) < 1e-5, name
            assert np.array_equal(outcome.weights, ranks[0][name].weights), name


@pytest.mark.parametrize("size", [2, 3])
def test_sampling_with_sharded_weights_gives_the_same_tokens(size: int) -> None:
    """Layer by layer, in lockstep with ranks that have fewer prompts, other rounds or none at all."""
    names = ["grpo", "resampled", "empty ranks", "fewer prompts than ranks"]
    sets = [f"scale.ranks={size}", "scale.shard=full", "scale.gather=false", "grpo.prompts_per_step=6", "scale.timeout_s=300.0"]
    for of_rank in in_ranks(size, steps_layer_by_layer, names, recipe=small(*sets)):
        for name in names:
            one = outcomes(1)[0][name]
            assert of_rank[name].tokens == one.tokens
            assert relative_distance(of_rank[name].gradient, one.gradient) < 1e-5, name
            assert relative_distance(of_rank[name].weights, one.weights) < 1e-5, name


@pytest.mark.parametrize("size", [2, FOUR])
def test_all_ranks_end_in_the_same_bits(size: int) -> None:
    """No weights are exchanged: each rank updates its own by a gradient with the same bits."""
    for name in [*CASES, *STAGES]:
        first, *others = [of_rank[name].weights for of_rank in outcomes(size)]
        assert all(np.array_equal(first, other) for other in others), name


def test_the_cases_cover_what_they_claim() -> None:
    """Some cases have no learning signal, some leave ranks without a group, some have failures."""
    one = outcomes(1)[0]
    assert one["nothing to learn"].stats == 0
    assert 0 < one["empty ranks"].metrics["no_signal_share"] < 1
    assert one["empty ranks"].stats < 4 * 4
    assert one["resampled"].metrics["groups_resampled"] > 0
    assert 0 < one["failures"].metrics["failure_share"] < 1
    assert len(one["fewer prompts than ranks"].tokens) == 1
    without_gradient = {"nothing to learn", "rejection sampling", "rejection sampling of fewer prompts than ranks"}
    assert all(float(np.abs(outcome.gradient).sum()) > 0 for name, outcome in one.items() if name not in without_gradient)
    assert one["rejection sampling"].written.count("completion") > 5
    assert one["iterative grpo"].metrics["round/comparisons"] > 5


@pytest.mark.parametrize("shard", ["none", "full"])
def test_sft_on_ranks(shard: str) -> None:
    ((weights, losses),) = in_ranks(1, run_sft)
    run = small("scale.ranks=2", f"scale.shard={shard}", "grpo.prompts_per_step=8", "scale.timeout_s=300.0")
    for of_rank, losses_of_rank in in_ranks(2, run_sft, recipe=run):
        assert relative_distance(of_rank, weights) < 1e-5
        assert losses_of_rank == pytest.approx(losses, rel=1e-6)


def test_every_collective() -> None:
    outcomes = in_ranks(3, call_collectives)
    assert [of["local_prompts"] for of in outcomes] == [[0, 3, 6], [1, 4], [2, 5]]
    assert sorted(index for of in outcomes for index in of["local_indices"]) == list(range(6))
    for of in outcomes:
        assert of["all_gather_results"] == [0, 10, 20, 30, 40, 50, 60]
        assert of["all_reduce_sum"] == {"all": 3.0, "of 0": 0.0, "of 1": 1.0, "of 2": 2.0}
        assert of["all_reduce_max"] == {"all": 1.0, "of 0": 0.0, "of 1": 1.0, "of 2": 2.0}
        assert of["all_gather_dict"] == {0: "x", 1: "x", 2: "x"}
        assert of["broadcast_"] == [0.0, 0.0, 0.0]


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    first, *others = in_ranks(3, fail_on_one_rank)
    assert first.startswith("reward 'r': gone\n  because its endpoint does not answer")
    assert first.endswith("True")
    assert others == [first, first]


@pytest.mark.parametrize("shard", ["none", "optimiser", "full"])
def test_bfloat16_weights_with_float32_masters(shard: str) -> None:
    """The gradient is rounded to about three digits, however the masters are sharded."""
    (one,) = in_ranks(1, step, "grpo", "bfloat16", shard == "full")
    run = small("scale.ranks=2", f"scale.shard={shard}", "grpo.prompts_per_step=8", "scale.timeout_s=300.0")
    for outcome in in_ranks(2, step, "grpo", "bfloat16", recipe=run):
        assert outcome.tokens == one.tokens
        assert relative_distance(outcome.gradient, one.gradient) < 2e-2
        assert relative_distance(outcome.weights, one.weights) < 4e-3


def test_a_single_process_imports_nothing_distributed() -> None:
    """It neither imports our process group nor initialises torch.distributed."""
    code = (
        "import sys, oncurve, torch.distributed as dist\n"
        "oncurve.train(model='tiny', prompts=['1+1=', '2+2='], rewards=[lambda completion: float(len(completion))], "
        "group_size=2, steps=1, prompts_per_step=2, sampling={'max_new_tokens': 4}, quiet=True)\n"
        "ours = {'oncurve.distributed.process_group', 'oncurve.distributed.heartbeat', 'oncurve.models.parallel.fsdp'}\n"
        "print(sorted(ours & set(sys.modules)), "
        "dist.is_initialized())"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "[] False", done.stderr


def test_balanced_partition() -> None:
    assert balanced_partition([9, 1, 8, 2, 5, 5], 2) == [[0, 1, 5], [2, 3, 4]]
    assert balanced_partition([3], 3) == [[0], [], []]
    assert balanced_partition([], 2) == [[], []]
    costs = [int(c) for c in np.random.default_rng(0).integers(1, 4000, 64)]
    loads = [sum(costs[i] for i in of) for of in balanced_partition(costs, 8)]
    assert max(loads) < 1.05 * sum(costs) / 8
