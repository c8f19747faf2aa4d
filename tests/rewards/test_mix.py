"""Whatever a reward does, each completion gets an aspect, and a failure is never a number."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.errors import RewardError
from oncurve.records import Group, Prompt
from oncurve.rewards.base import Score, score_each
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.models.judge import JudgeOptions, JudgeReward
from oncurve.rewards.python_function import FunctionReward
from oncurve.rewards.verifiers.answer import AnswerOptions, AnswerReward
from oncurve.rewards.verifiers.code import CodeReward
from oncurve.rewards.verifiers.math import MathOptions, MathReward
from oncurve.rewards.verifiers.puzzles import CountdownReward, GuessReward
from tests.rewards.builders import group


@dataclass
class FixedReward:
    """A reward that returns a fixed result."""

    answer: Any
    name: str = "says"
    weight: float = 1.0

    def score(self, group: Group) -> Any:
        return self.answer(group) if callable(self.answer) else self.answer


def raises(error: BaseException) -> Callable[[object], Score]:
    def function(_: object) -> Score:
        raise error

    return function


def only_aspects(answer: Any, *texts: str) -> list[tuple[float | None, str | None]]:
    (scored,) = RewardMix([FixedReward(answer)]).score([group(*texts)])
    return [(one.aspects[0].value, one.aspects[0].failure) for one in scored.scored]


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (Score(0.5), 0.5),
        (2, 2.0),
        (True, 1.0),
        (False, 0.0),
        (None, None),
        (Score(None), None),
        (Score(True), 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.int64(3), 3.0),
        (torch.tensor(0.25), 0.25),
    ],
)
def test_what_counts_as_a_score(result: object, value: float | None) -> None:
    assert only_aspects([result], "a") == [(value, None)]


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        (float("nan"), "returned nan"),
        (Score(float("inf")), "returned inf"),
        (float("-inf"), "returned -inf"),
        pytest.param(10**400, "returned a number too large for a float", id="huge"),
        (np.float64("nan"), "returned nan"),
        ("1.0", "returned str instead of a number"),
        ([1.0], "returned list instead of a number"),
        (1j, "returned complex instead of a number"),
        (torch.tensor([1.0, 2.0]), "returned Tensor instead of a number"),
        (ValueError("bad"), "ValueError: bad"),
        (Score(0.0, steps=((9, 1.0),)), "a step ends at token 9, and the completion has 1"),
        (Score(0.0, steps=((0, float("nan")),)), "returned nan for a step"),
    ],
)
def test_what_does_not(result: object, failure: str) -> None:
    assert only_aspects([0.5, result], "a", "b") == [(0.5, None), (None, failure)]


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ([1.0], "ValueError: returned 1 scores for 2 completions"),
        ([1.0, 2.0, 3.0], "ValueError: returned 3 scores for 2 completions"),
        (None, "TypeError: returned NoneType instead of 2 scores"),
        (0.5, "TypeError: returned float instead of 2 scores"),
        ("ab", "TypeError: returned str instead of 2 scores"),
        (raises(KeyError("answer")), "KeyError: 'answer'"),
        (raises(SystemExit(3)), "SystemExit: 3"),
        (raises(BaseException("panic of a Rust library")), "BaseException: panic of a Rust library"),
        (raises(RecursionError("deep")), "RecursionError: deep"),
        (lambda _: (1 / 0 for _ in range(2)), "ZeroDivisionError: division by zero"),
    ],
)
def test_an_error_of_the_group_fails_every_completion(answer: Any, failure: str) -> None:
    assert only_aspects(answer, "a", "b") == [(None, failure)] * 2


def test_arrays_and_tensors_are_lists_of_scores() -> None:
    assert (
        only_aspects(np.array([0.5, 1.0]), "a", "b")
        == only_aspects(torch.tensor([0.5, 1.0]), "a", "b")
        == [(0.5, None), (1.0, None)]
    )


def test_ctrl_c_goes_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        only_aspects(raises(KeyboardInterrupt()), "a")


def test_only_the_completion_that_raised_fails() -> None:
    (scored,) = RewardMix([FixedReward(lambda g: score_each(g, lambda c: Score(1 / len(c.text))))]).score(
        [group("a", "", "bb")]
    )
    assert [one.total for one in scored.scored] == [1.0, None, 0.5]
    assert scored.scored[1].failure == "says: ZeroDivisionError: division by zero"


def test_long_failures_are_shortened() -> None:
    ((_, failure),) = only_aspects([ValueError("x" * 10_000)], "a")
    assert failure is not None
    assert len(failure) == 300


def test_the_total_is_the_weighted_sum() -> None:
    rewards = [
        FixedReward([1.0, 0.5], "one", 2.0),
        FixedReward([None, 1.0], "two", 0.5),
        FixedReward([9.0, float("nan")], "watched", 0.0),
    ]
    (scored,) = RewardMix(rewards).score([group("a", "b")])
    assert scored.totals == (2.0, 1.5)
    assert [aspect.name for aspect in scored.scored[0].aspects] == ["one", "two", "watched"]
    assert scored.scored[1].aspects[2].failure == "returned nan"


def test_if_no_reward_applies() -> None:
    (scored,) = RewardMix([FixedReward([None]), FixedReward([1.0], "watched", 0.0)]).score([group("a")])
    assert scored.totals == (None,)
    assert scored.scored[0].failure == "no reward applies"


def test_reasons_and_steps_are_kept() -> None:
    (scored,) = RewardMix([FixedReward([Score(1.0, "well done", ((1, 0.5),))])]).score([group("ab")])
    assert (scored.scored[0].aspects[0].reason, scored.scored[0].aspects[0].steps) == ("well done", ((1, 0.5),))


def test_two_rewards_of_one_name() -> None:
    with pytest.raises(RewardError, match="two rewards have this name"):
        RewardMix([FixedReward([1.0]), FixedReward([1.0])])


@pytest.mark.parametrize(
    ("rewards", "decider", "solved"),
    [
        ([FixedReward([1.0], "format"), FixedReward([0.0], "answer")], "answer", False),
        ([FixedReward([0.0], "format"), FixedReward([1.0], "answer", 0.0)], "answer", True),
        (
            [FixedReward([1.0], "watched", 0.0), FixedReward([0.99], "countdown"), FixedReward([1.0], "format")],
            "countdown",
            False,
        ),
        ([FixedReward([-1.0], "overlong", -1.0), FixedReward([2.0], "quality")], "quality", True),
        ([FixedReward([float("nan")], "answer")], "answer", False),
        ([FixedReward([None], "answer")], "answer", False),
        ([FixedReward([1.0], "watched", 0.0)], None, False),
        ([], None, False),
    ],
)
def test_which_reward_defines_accuracy(rewards: list[FixedReward], decider: str | None, solved: bool) -> None:
    mix = RewardMix(rewards)
    (scored,) = mix.score([group("a")])
    assert mix.accuracy_reward == decider
    assert mix.is_correct(scored.scored[0]) is solved


def test_only_the_named_rewards_define_accuracy() -> None:
    rewards = [FixedReward([5.0], "model"), FixedReward([1.0], "countdown", 0.5)]
    assert RewardMix(rewards).accuracy_reward == "model"
    assert RewardMix(rewards, accuracy_names=["countdown"]).accuracy_reward == "countdown"
    assert RewardMix(rewards, accuracy_names=[]).accuracy_reward is None
    (scored,) = RewardMix(rewards).score([group("a")])
    assert not RewardMix(rewards, accuracy_names=[]).is_correct(scored.scored[0])


@settings(deadline=None)
@given(st.lists(st.one_of(st.floats(), st.none(), st.booleans(), st.text(), st.integers()), max_size=6))
def test_every_completion_gets_a_finite_number_none_or_a_failure(results: list[object]) -> None:
    for value, failure in only_aspects(results, *("a" for _ in results)):
        assert value is None or np.isfinite(value)
        assert not (value is not None and failure is not None)


@dataclass
class Meets:
    """A reward that returns only once as many groups as the barrier's parties are scored at the same time."""

    party: threading.Barrier
    name: str = "meets"
    weight: float = 1.0
    is_async: bool = True

    def score(self, group: Group) -> Any:
        self.party.wait(timeout=300)
        return [float(completion.text) for completion in group.completions]


def test_async_rewards_score_groups_concurrently() -> None:
    mix = RewardMix([Meets(threading.Barrier(4))])
    scored = mix.score([group(str(n), str(n + 1)) for n in range(4)])
    assert [s.totals for s in scored] == [(float(n), float(n + 1)) for n in range(4)]


def test_groups_prefetched_one_by_one() -> None:
    """Three groups are scored concurrently before `score` is called; the results keep the order of its argument."""
    mix, groups = RewardMix([Meets(threading.Barrier(3))]), [group(str(n)) for n in range(3)]
    for one in reversed(groups):
        mix.prefetch(one)
    assert [s.totals for s in mix.score(groups)] == [(0.0,), (1.0,), (2.0,)]


def test_prefetched_groups_that_are_never_scored_are_dropped() -> None:
    """If sampling is interrupted, the next step gets only its own groups, even if they reuse an object's id."""
    mix = RewardMix([Meets(threading.Barrier(1))])
    for n in range(20):
        mix.prefetch(group(str(n)))
    assert [s.totals for s in mix.score([group("7"), group("8")])] == [(7.0,), (8.0,)]


def test_only_async_rewards_are_prefetched() -> None:
    """A synchronous reward would slow the sampler down, and need not be thread-safe."""
    seen: list[str] = []

    def here(sampled: Group) -> list[float]:
        seen.append(threading.current_thread().name)
        return [2.0]

    mix, one = RewardMix([FixedReward(here), Meets(threading.Barrier(1))]), group("3")
    mix.prefetch(one)
    assert seen == []
    assert [s.totals for s in mix.score([one])] == [(5.0,)]
    assert seen == [threading.main_thread().name]


def test_a_failure_in_a_prefetched_group_is_that_group_s_only() -> None:
    mix = RewardMix([Meets(threading.Barrier(1))])
    groups = [group("0.5"), group("no number")]
    for one in groups:
        mix.prefetch(one)
    assert [s.totals for s in mix.score(groups)] == [(0.5,), (None,)]


def test_log_lines() -> None:
    loud = FixedReward([1.0], "loud")
    loud.log_lines = ["loud: here"]  # type: ignore[attr-defined]
    assert RewardMix([loud, FixedReward([1.0])]).log_lines == ["loud: here"]


def test_a_reward_that_can_score_no_prompt_is_refused() -> None:
    """Before training, with the columns that there are."""
    prompts = [Prompt("a", "1+1=", columns={"label": "2", "n": 1}), Prompt("b", "1+2=", columns={"label": "3"})]

    def exact(completion: str, question: str) -> float:
        return 0.0

    def per_group(completions: list[str], solution: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    def fine(completion: str, prompt: str, label: str, bonus: float = 0.0, **columns: object) -> float:
        return 0.0

    for reward, missing in (
        (AnswerReward("answer", 1.0), "'answer'"),
        (MathReward("math", 1.0, MathOptions(column="gold")), "'gold'"),
        (FunctionReward(exact, "exact"), "'question'"),
        (FunctionReward(per_group, "per_group"), "'solution'"),
        (CountdownReward("countdown", 1.0), "'numbers'"),
        (GuessReward("guess", 1.0), "'secret'"),
        (CodeReward("code", 1.0), "'tests'"),
        (
            JudgeReward("judge", 1.0, JudgeOptions(model="m", base_url="http://127.0.0.1:9", template="{prompt} {reference}")),
            "'reference'",
        ),
    ):
        with pytest.raises(RewardError) as caught:
            RewardMix([reward]).check_columns(prompts)
        assert missing in str(caught.value)
        assert caught.value.because == "the prompts' columns are: label, n"
    RewardMix([FunctionReward(fine, "fine"), AnswerReward("answer", 1.0, AnswerOptions(column="n"))]).check_columns(prompts)
    RewardMix([FunctionReward(exact, "exact", arguments={"question": "?"})]).check_columns(prompts)
    RewardMix([AnswerReward("answer", 1.0)]).check_columns([])
