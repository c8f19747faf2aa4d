"""Held-out accuracy by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from oncurve.distributed.world import World
from oncurve.engines.native.engine import NativeEngine
from oncurve.recipe.schema.sections import Engine, Evaluation
from oncurve.records import Aspect, Completion, Group, Prompt, ScoredCompletion, ScoredGroup
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.training.evaluate import evaluate, summarise
from tests.training.builders import policy

MIX = RewardMix([FunctionReward(len, "answer")])


def group(level: str | None, *values: float | None, cut: bool = False) -> ScoredGroup:
    empty = np.zeros(2, np.float32)
    row = Completion(np.zeros(2, np.int64), "", "length" if cut else "end", empty, empty, empty, np.ones(2, bool))
    failed = "it broke"
    scored = tuple(ScoredCompletion(row, (Aspect("answer", v, failure=None if v is not None else failed),)) for v in values)
    columns = {} if level is None else {"difficulty": level}
    return ScoredGroup(Group(Prompt(id="p", text="1", columns=columns), np.zeros(1, np.int64), (row,) * len(values)), scored)


def test_accuracy_by_hand() -> None:
    """Five of eight are solved: 1 and more count, 0.5 and a failure do not; the mean reward ignores the failure."""
    groups = [group("easy", 1.0, 2.0), group("hard", 0.0, 1.0, cut=True), group("hard", 0.5, None), group(None, 1.0, 1.0)]
    report = summarise(groups, MIX, "grpo", 7)
    assert report.accuracy == 5 / 8
    assert report.asked == 4
    assert report.by_difficulty == {"easy": (2, 2), "hard": (1, 4)}
    several = {"pass_at/1": 5 / 8, "pass_at/2": 3 / 4}
    assert report.metrics == {"reward": 6.5 / 7, "length_mean": 2.0, "cut_share": 0.25, **several}


def test_without_a_verifiable_reward_there_is_no_accuracy_and_no_pass_at_k() -> None:
    """No score, however high, defines a correct answer."""
    groups = [group("easy", 3.0, 2.0), group(None, -1.0, None)]
    report = summarise(groups, RewardMix(MIX.rewards, accuracy_names=()), "grpo", 7)
    assert report.accuracy == 1 / 2, "what is named `answer` decides, whatever it is"
    named = RewardMix([FunctionReward(len, "model")], accuracy_names=())
    report = summarise(groups, named, "grpo", 7)
    assert report.accuracy is None
    assert report.by_difficulty == {}
    assert report.reward == 4 / 3
    assert report.metrics == {"reward": 4 / 3, "length_mean": 2.0, "cut_share": 0.0}
    nothing = summarise([group(None, None)], named, "grpo", 7)
    assert nothing.reward is None


class Beside(World):
    """A rank that samples the same prompts as its neighbour, which computes the rewards."""

    rank, size, tp_size, samples_in_lockstep = 1, 2, 2, True

    def __init__(self, scored: Sequence[ScoredGroup]) -> None:
        self.scored = scored

    def all_gather_results(self, own: Callable[[], Sequence[Any]]) -> list[Any]:
        return list(self.scored)


def test_of_ranks_that_sample_the_same_one_asks_for_rewards() -> None:
    """Asynchronous rewards start as groups complete: a second rank must not request, and pay for, them again."""
    requests: list[str] = []

    async def judged(completion: str) -> float:
        requests.append(completion)
        return 1.0

    engine, mix = NativeEngine(policy(), Engine(slots=8)), RewardMix([FunctionReward(judged, "answer")])
    settings: dict[str, Any] = {"max_new_tokens": 6, "seed": 0, "stage": "grpo", "step": 1}
    prompts = [Prompt(id=f"p{i}", text=f"{i}+1=") for i in range(3)]
    first = evaluate(engine, mix, prompts, Evaluation(), **settings)
    assert len(requests) == 3
    assert evaluate(engine, mix, prompts, Evaluation(), world=Beside(first.groups), **settings).accuracy == first.accuracy
    assert not mix._started
    assert len(requests) == 3


def test_greedy_measurements_are_the_same_each_time_and_samples_are_not_those_of_training() -> None:
    prompts = [Prompt(id=f"p{i}", text=f"{i}+1=") for i in range(3)]
    engine = NativeEngine(policy(), Engine(slots=8))

    def measured(settings: Evaluation, step: int) -> list[list[int]]:
        report = evaluate(engine, MIX, prompts, settings, max_new_tokens=6, seed=0, stage="grpo", step=step)
        return [c.completion.token_ids.tolist() for g in report.groups for c in g.scored]

    assert measured(Evaluation(), 1) == measured(Evaluation(), 2)
    drawn = Evaluation(temperature=1.0, samples=2)
    assert len(measured(drawn, 1)) == 6
    assert measured(drawn, 1) == measured(drawn, 1)
    assert measured(drawn, 1) != measured(drawn, 2)
    assert max(map(len, measured(Evaluation(max_new_tokens=3), 1))) <= 3
