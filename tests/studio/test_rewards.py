"""Trials of rewards in a separate process, and the audit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oncurve.errors import RewardError
from oncurve.recipe.load import dump_recipe, parse_recipe
from oncurve.records import Aspect
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
from oncurve.studio.rewards import Trial, accuracy_aspects, rewards_of, run_trial, spread_steps
from tests.studio.samples import TEXTS as SAMPLED
from tests.studio.samples import make_run, step_report
from tests.studio.serving import Served, served

TEXTS = ["<think>a</think><answer>46</answer>", "46"]
RIGHT = SAMPLED["right"]
BODY = {"rewards": [], "prompt": "12+34=", "columns": {"answer": "46"}, "completions": TEXTS}


def test_the_rewards_of_a_run(studio: Served) -> None:
    data = studio.ask("/api/trial?run=sums-1", body=BODY).json["completions"]
    assert [one["total"] for one in data] == pytest.approx([1.1, 0.0])
    assert data[1]["aspects"][0]["reason"] == "no answer found"


def test_rewards_written_on_the_page(studio: Served) -> None:
    rewards = [{"type": "answer", "take": "number"}]
    data = studio.ask("/api/trial", body={**BODY, "rewards": rewards}).json["completions"]
    assert [one["total"] for one in data] == [1.0, 1.0]
    wrong = studio.ask("/api/trial", body={**BODY, "rewards": [{"type": "anser"}]}).json["error"]
    assert "did you mean 'answer'" in wrong["what"]


def test_a_reward_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef f(completions, **_):\n    time.sleep(60)\n")
    trial = Trial(rewards=[{"type": "python", "function": f"{tmp_path}/slow.py:f"}], prompt="", columns={}, completions=["a"])
    with pytest.raises(RewardError, match="timed out"):
        run_trial(trial, limit_s=3)


def test_a_reward_that_ends_the_process_is_reported(tmp_path: Path) -> None:
    (tmp_path / "gone.py").write_text("import os\ndef f(completions, **_):\n    os._exit(3)\n")
    trial = Trial(rewards=[{"type": "python", "function": f"{tmp_path}/gone.py:f"}], prompt="", columns={}, completions=["a"])
    with pytest.raises(RewardError, match="ended early"):
        run_trial(trial)


def test_the_rewards_reasons(studio: Served) -> None:
    data = studio.ask("/api/runs/sums-1/rewards").json
    answer = next(one for one in data["said"] if one["name"] == "answer")
    assert answer["failures"] == 4
    assert answer["reasons"][0]["said"] == "ValueError: no number here"
    assert answer["reasons"][0]["example"]["step"] == 4


def test_alike_reasons_are_one_and_failures_come_first(tmp_path: Path) -> None:
    """Of five completions two have other numbers in quotes and the same sentence; one reward failed."""
    said = [(1.0, "'3' is right"), (0.0, "'4' is not '3'"), (0.0, "'5' is not '3'"), (0.25, "no answer found")]
    report = step_report(1)
    group = report.groups[0]
    aspects = [Aspect("answer", value, 1.0, reason=reason) for value, reason in said]
    scored = [replace(one, aspects=(aspect,)) for one, aspect in zip(group.scored.scored, aspects, strict=True)]
    run = make_run(tmp_path, "run", steps=0)
    with RunWriter.open(run.path) as store:
        graded = replace(group, scored=replace(group.scored, scored=tuple(scored)))
        store.record_step(replace(report, groups=(graded,), stats=()))
        failed = [replace(scored[0], aspects=(Aspect("answer", None, 1.0, failure="ValueError: no"),)), *scored[1:]]
        graded = replace(group, scored=replace(group.scored, scored=tuple(failed)))
        store.record_step(replace(report, step=2, groups=(graded,), stats=()))
    with served(tmp_path) as here:
        answer = here.ask("/api/runs/run/rewards").json["said"][0]
    found = [(reason["said"], reason["times"], reason["value"]) for reason in answer["reasons"]]
    # The evaluation that every sample run has adds one right and one wrong answer.
    assert found[0] == ("ValueError: no", 1, None)
    assert found[1] == ("'…' is not '…'", 5, 0.0)
    assert ("no answer found", 2, 0.25) in found
    assert ("'3' is right", 2, 1.0) in found
    # Twenty parts from 0 to 1: 0 in the first, 0.25 in the sixth, 1 in the last.
    assert [(index, count) for index, count in enumerate(answer["bins"]) if count] == [(0, 5), (5, 2), (19, 2)]


def test_the_audit_of_a_run(tmp_path: Path) -> None:
    """At each of eight steps another prompt is answered with the same text, and rewarded."""
    run = make_run(tmp_path, "long", steps=0)
    with RunWriter.open(run.path) as store:
        for step in range(1, 9):
            store.record_step(step_report(step, first=100 + step))
    make_run(tmp_path, "young", steps=0)
    with served(tmp_path) as signals:
        data = signals.ask("/api/runs/long/audit").json
        young = signals.ask("/api/runs/young/audit").json
    assert (data["stage"], data["steps"]) == ("grpo", 8)
    signal = next(signal for signal in data["signals"] if signal["name"] == "one string for many prompts")
    assert "different prompts" in signal["what"]
    assert signal["examples"][0]["text"] == RIGHT
    assert young["signals"] == []


def test_steps_are_spread_evenly() -> None:
    assert spread_steps(5, 24) == [1, 2, 3, 4, 5]
    assert spread_steps(101, 5) == [1, 26, 51, 76, 101]


def test_the_rewards_of_a_recipe_are_all_that_training_grades_by() -> None:
    """The stage's `overlong` and the accuracy reward of weight 0; not the rewards of a later rejection_sample stage."""
    recipe = parse_recipe(
        {
            "task": {"type": "arithmetic"},
            "rewards": [{"type": "format"}],
            "stages": [
                {"type": "grpo", "overlong": {"buffer": 4, "weight": 0.5}},
                {"type": "rejection_sample", "rewards": [{"type": "length"}], "at_least": 0.0},
            ],
        }
    )
    graded = [(reward["name"] if "name" in reward else reward["type"], reward["weight"]) for reward in rewards_of(recipe)]
    assert graded == [("format", 1.0), ("answer", 0.0), ("overlong", 0.5)]


@pytest.mark.parametrize(
    ("rewards", "task", "aspects"),
    [
        ([{"type": "format"}, {"type": "math"}], {"type": "arithmetic"}, ("math",)),
        ([{"type": "math"}, {"type": "answer"}], {"type": "arithmetic"}, ("answer",)),
        ([{"type": "format"}], {"type": "arithmetic"}, ("answer",)),
        (
            [
                {"type": "math", "task": "a"},
                {"type": "length", "task": "b"},
                {"type": "math", "name": "b", "weight": 0, "task": "b"},
            ],
            {"type": "mix", "mix": [{"type": "arithmetic", "name": "a"}, {"type": "arithmetic", "name": "b"}]},
            ("math", "b"),
        ),
    ],
)
def test_the_aspects_that_define_accuracy(
    tmp_path: Path, rewards: list[dict[str, object]], task: dict[str, object], aspects: tuple[str, ...]
) -> None:
    """Only a verifiable reward: of weight above 0 if there is one, otherwise one that is only watched."""
    run = RunFolder.create_at(tmp_path / "run")
    run.write_recipe(dump_recipe(parse_recipe({"task": task, "rewards": rewards, "stages": [{"type": "grpo"}]})))
    assert accuracy_aspects(run) == aspects
