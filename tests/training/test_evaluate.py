"""Held-out accuracy by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oncurve.agents.tool_environment import ToolEnvironment
from oncurve.distributed.world import World
from oncurve.engines.native.engine import NativeEngine
from oncurve.recipe.schema.sections import Engine, Evaluation, Sampling
from oncurve.records import Aspect, Completion, EvalReport, Group, Prompt, ScoredCompletion, ScoredGroup
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.training.evaluate import answer_sampling, evaluate, summarise
from oncurve.training.listeners import Listener
from oncurve.training.start import begin
from tests.training.builders import policy, recipe

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
    settings: dict[str, Any] = {"sampling": Sampling(temperature=0.0, max_new_tokens=6), "seed": 0, "stage": "grpo", "step": 1}
    prompts = [Prompt(id=f"p{i}", text=f"{i}+1=") for i in range(3)]
    first = evaluate(engine, mix, prompts, **settings)
    assert len(requests) == 3
    assert evaluate(engine, mix, prompts, world=Beside(first.groups), **settings).accuracy == first.accuracy
    assert not mix._started
    assert len(requests) == 3


def test_greedy_measurements_are_the_same_each_time_and_samples_are_not_those_of_training() -> None:
    prompts = [Prompt(id=f"p{i}", text=f"{i}+1=") for i in range(3)]
    engine = NativeEngine(policy(), Engine(slots=8))

    def measured(settings: Evaluation, step: int) -> list[list[int]]:
        measured_by = recipe("grpo.sampling.max_new_tokens=6").model_copy(update={"evaluation": settings})
        sampling = answer_sampling(measured_by, measured_by.stages[-1], engine.policy, prompts)
        report = evaluate(engine, MIX, prompts, sampling=sampling, samples=settings.samples, seed=0, stage="grpo", step=step)
        return [c.completion.token_ids.tolist() for g in report.groups for c in g.scored]

    assert measured(Evaluation(), 1) == measured(Evaluation(), 2)
    sampled = Evaluation(temperature=1.0, samples=2)
    assert len(measured(sampled, 1)) == 6
    assert measured(sampled, 1) == measured(sampled, 1)
    assert measured(sampled, 1) != measured(sampled, 2)
    assert max(map(len, measured(Evaluation(max_new_tokens=3), 1))) <= 3


class Evals(Listener):
    """Keeps the reports of all evaluations."""

    def __init__(self) -> None:
        self.reports: list[EvalReport] = []

    def on_eval(self, report: EvalReport) -> None:
        self.reports.append(report)


def test_held_out_answers_end_as_completions_do_in_training(tmp_path: Path) -> None:
    """A stop string and `min_new_tokens` are part of the policy that is trained, so they are part of what is measured."""
    sets = ['grpo.sampling.stop=["="]', "grpo.sampling.min_new_tokens=5", "grpo.sampling.max_new_tokens=20"]
    evals = Evals()
    begin(recipe(*sets, "evaluation.temperature=1.0", "evaluation.samples=4"), runs_dir=tmp_path, listeners=[evals])
    answers = [s.completion for report in evals.reports for g in report.groups for s in g.scored]
    assert {c.stop for c in answers} == {"stop_string", "end", "length"}, "a random model's answers end in every way"
    assert all((c.stop == "stop_string") == ("=" in c.text) for c in answers)
    assert all(c.stop == "stop_string" or len(c.token_ids) >= 5 for c in answers)


def test_a_stage_that_does_not_sample_is_measured_as_the_last_one_that_does() -> None:
    sets = ['grpo.sampling.stop=["="]', "grpo.sampling.min_new_tokens=5", "grpo.sampling.max_new_tokens=20"]
    whole, prompts = recipe(*sets), [Prompt(id="p", text="1+1=")]
    sampling = Sampling(temperature=0.0, max_new_tokens=20, min_new_tokens=5, stop=("=",))
    assert whole.stages[0].type == "sft"
    assert [answer_sampling(whole, stage, policy(), prompts) for stage in whole.stages] == [sampling, sampling]
    short = recipe(*sets, "evaluation.max_new_tokens=3")
    assert answer_sampling(short, short.stages[1], policy(), prompts).min_new_tokens == 3
    offline = whole.model_copy(update={"stages": whole.stages[:1]})
    assert answer_sampling(offline, offline.stages[0], policy(), prompts) == Sampling(temperature=0.0, max_new_tokens=124)

    class Adds:
        def reset(self) -> str:
            return "a text for the end of the prompt"

    acting = [Prompt(id="p", text="1+1=", environment=ToolEnvironment([], Adds))]
    assert answer_sampling(offline, offline.stages[0], policy(), acting).max_new_tokens == 62, "room for what `reset` adds"
