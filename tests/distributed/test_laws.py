"""Laws of ranks: the gradient of a step, its prompts, its random numbers and its figures are those of one process."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from oncurve.distributed.process_group import balanced_partition
from oncurve.distributed.world import World
from tests.distributed.cases import CASES, Taken, away, disagree, exchange, imitate, step, steps, steps_layer_by_layer
from tests.distributed.processes import in_ranks
from tests.distributed.stage_cases import STAGES, stage_steps
from tests.training.builders import recipe as small

Found = dict[int, list[dict[str, Taken]]]


@pytest.fixture(scope="module")
def found() -> Found:
    """Every case on 1, 2 and 4 ranks: what each rank has of it."""
    return {size: in_ranks(size, all_steps, list(CASES), list(STAGES)) for size in (1, 2, 4)}


def all_steps(world: World, of_grpo: list[str], of_stages: list[str]) -> dict[str, Taken]:
    return steps(world, of_grpo) | stage_steps(world, of_stages)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", [*CASES, *STAGES])
def test_a_step_on_any_number_of_ranks_is_that_of_one(found: Found, name: str, size: int) -> None:
    one = found[1][0][name]
    for taken in (of_rank[name] for of_rank in found[size]):
        assert taken.tokens == one.tokens
        assert away(taken.advantages, one.advantages) < 1e-5
        assert away(taken.gradient, one.gradient) < 1e-5
        assert away(taken.weights, one.weights) < 1e-5
        assert taken.metrics.keys() == one.metrics.keys()
        for metric, value in one.metrics.items():
            assert math.isclose(taken.metrics[metric], value, rel_tol=1e-4, abs_tol=1e-5), metric
        assert taken.stats == one.stats
        assert taken.written == one.written


SHARDED = [
    "grpo",
    "gspo",
    "kl in the reward",
    "mini-batches",
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
    ],
    "full": ["dpo", "ipo", "dpo of fewer pairs than ranks", "rejection sampling"],
}


@pytest.mark.parametrize("shard", ["optimiser", "full"])
@pytest.mark.parametrize("size", [2, 4])
def test_shared_out_or_not_a_step_is_the_same(found: Found, shard: str, size: int) -> None:
    """Ranks that hold pieces of the optimiser, or of the weights too, move as one that holds all."""
    asked = [f"scale.ranks={size}", f"scale.shard={shard}", "grpo.prompts_per_step=8", "scale.timeout_s=60.0"]
    ranks = in_ranks(size, all_steps, SHARDED, STAGES_SHARDED[shard], recipe=small(*asked))
    for name in [*SHARDED, *STAGES_SHARDED[shard]]:
        one = found[1][0][name]
        for of_rank in ranks:
            taken = of_rank[name]
            assert taken.tokens == one.tokens
            assert away(taken.gradient, one.gradient) < 1e-5, name
            assert away(taken.weights, one.weights) < 1e-5, name
            assert np.array_equal(taken.weights, ranks[0][name].weights), name


@pytest.mark.parametrize("size", [2, 3])
def test_weights_that_no_rank_ever_holds_sample_the_same(found: Found, size: int) -> None:
    """Layer by layer, in step with ranks that have fewer prompts, other rounds or none at all."""
    names = ["grpo", "resampled", "empty ranks", "fewer prompts than ranks"]
    asked = [f"scale.ranks={size}", "scale.shard=full", "scale.gather=false", "grpo.prompts_per_step=6", "scale.timeout_s=60.0"]
    for of_rank in in_ranks(size, steps_layer_by_layer, names, recipe=small(*asked)):
        for name in names:
            one = found[1][0][name]
            assert of_rank[name].tokens == one.tokens
            assert away(of_rank[name].gradient, one.gradient) < 1e-5, name
            assert away(of_rank[name].weights, one.weights) < 1e-5, name


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_end_in_the_same_bits(found: Found, size: int) -> None:
    """They share no weights: each moves its own, by a gradient that is the same bits on all."""
    for name in [*CASES, *STAGES]:
        first, *others = [of_rank[name].weights for of_rank in found[size]]
        assert all(np.array_equal(first, other) for other in others), name


def test_the_cases_are_what_they_say(found: Found) -> None:
    """Else they would prove nothing: some have something to learn from, some don't, some leave ranks without a group."""
    one = found[1][0]
    assert one["nothing to learn"].stats == 0
    assert 0 < one["empty ranks"].metrics["no_signal_share"] < 1
    assert one["empty ranks"].stats < 4 * 4
    assert one["resampled"].metrics["groups_resampled"] > 0
    assert 0 < one["failures"].metrics["failure_share"] < 1
    assert len(one["fewer prompts than ranks"].tokens) == 1
    silent = {"nothing to learn", "rejection sampling", "rejection sampling of fewer prompts than ranks"}
    assert all(float(np.abs(taken.gradient).sum()) > 0 for name, taken in one.items() if name not in silent)
    assert one["rejection sampling"].written.count("completion") > 5
    assert one["iterative grpo"].metrics["round/comparisons"] > 5


@pytest.mark.parametrize("shard", ["none", "full"])
def test_sft_on_ranks(shard: str) -> None:
    ((weights, losses),) = in_ranks(1, imitate)
    asked = small("scale.ranks=2", f"scale.shard={shard}", "grpo.prompts_per_step=8", "scale.timeout_s=60.0")
    for of_rank, told in in_ranks(2, imitate, recipe=asked):
        assert away(of_rank, weights) < 1e-5
        assert told == pytest.approx(losses, rel=1e-6)


def test_every_exchange_means_what_it_says() -> None:
    found = in_ranks(3, exchange)
    assert [of["share"] for of in found] == [[0, 3, 6], [1, 4], [2, 5]]
    assert sorted(place for of in found for place in of["mine"]) == list(range(6))
    for of in found:
        assert of["gathered"] == [0, 10, 20, 30, 40, 50, 60]
        assert of["summed"] == {"all": 3.0, "of 0": 0.0, "of 1": 1.0, "of 2": 2.0}
        assert of["largest"] == {"all": 1.0, "of 0": 0.0, "of 1": 1.0, "of 2": 2.0}
        assert of["together"] == {0: "x", 1: "x", 2: "x"}
        assert of["spread"] == [0.0, 0.0, 0.0]


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    first, *others = in_ranks(3, disagree)
    assert first.startswith("reward 'r': gone\n  because its endpoint does not answer")
    assert first.endswith("True")
    assert others == [first, first]


@pytest.mark.parametrize("shard", ["none", "optimiser", "full"])
def test_weights_in_bfloat16_follow_masters_in_float32(shard: str) -> None:
    """The gradient is rounded to three digits on the way, wherever the masters lie."""
    (one,) = in_ranks(1, step, "grpo", "bfloat16", shard == "full")
    asked = small("scale.ranks=2", f"scale.shard={shard}", "grpo.prompts_per_step=8", "scale.timeout_s=60.0")
    for taken in in_ranks(2, step, "grpo", "bfloat16", recipe=asked):
        assert taken.tokens == one.tokens
        assert away(taken.gradient, one.gradient) < 2e-2
        assert away(taken.weights, one.weights) < 4e-3


def test_one_rank_loads_nothing_of_all_this() -> None:
    """A run of one process neither imports the ranks' world nor starts torch.distributed."""
    code = (
        "import sys, oncurve, torch.distributed as dist\n"
        "oncurve.train(model='tiny', prompts=['1+1=', '2+2='], rewards=[lambda completion: float(len(completion))], "
        "group_size=2, steps=1, prompts_per_step=2, sampling={'max_new_tokens': 4}, quiet=True)\n"
        "ours = {'oncurve.distributed.process_group', 'oncurve.distributed.heartbeat', 'oncurve.models.parallel.fsdp'}\n"
        "print(sorted(ours & set(sys.modules)), "
        "dist.is_initialized())"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[] False", done.stderr


def test_balance() -> None:
    assert balanced_partition([9, 1, 8, 2, 5, 5], 2) == [[0, 1, 5], [2, 3, 4]]
    assert balanced_partition([3], 3) == [[0], [], []]
    assert balanced_partition([], 2) == [[], []]
    costs = [int(c) for c in np.random.default_rng(0).integers(1, 4000, 64)]
    loads = [sum(costs[i] for i in of) for of in balanced_partition(costs, 8)]
    assert max(loads) < 1.05 * sum(costs) / 8
