"""A run without a verifiable reward: evaluated by its mean reward, before and after, in every command."""

from __future__ import annotations

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oncurve.cli.app import app
from oncurve.errors import RecipeError, RewardError
from oncurve.operations.run_model import LoadedModel, evaluate_model, load_model
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import EvalReport
from oncurve.runs.checkpoints.listing import best_step
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.listeners import Listener
from oncurve.training.start import begin, resume, rewards_for
from oncurve.training.trainer import TimeUp
from tests.training.builders import RECIPE


def recipe(folder: Path, **task: Any) -> Recipe:
    """A reward model of preferences, then grpo with it, on prompts without answers; evaluated every two steps."""
    pairs, config = folder / "pairs.jsonl", folder / "asked.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"{i}+1=", "chosen": "12", "rejected": "="}) + "\n" for i in range(8)))
    config.write_text("".join(json.dumps({"prompt": f"{i}+{j}="}) + "\n" for i in range(5) for j in range(4)))
    data = tomllib.loads(RECIPE)
    model = {"type": "reward_model", "data": str(pairs), "steps": 2, "batch_size": 4, "heldout_share": 0.5}
    judged = {"rewards": [{"type": "model", "model": "stage:reward_model"}], "eval_every": 2, "save_every": 2}
    data["stages"] = [model, {**data["stages"][1], **judged, "keep_best": "heldout_accuracy"}]
    data |= {"rewards": [], "task": {"type": "file", "path": str(config), "heldout": 3, **task}}
    return parse_recipe(data)


class Measured(Listener):
    def __init__(self) -> None:
        self.shares: list[tuple[str, int, float]] = []

    def on_measuring(self, stage: str, step: int, share: float) -> None:
        self.shares.append((stage, step, share))


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Measured]:
    events = Measured()
    folder = tmp_path_factory.mktemp("free")
    return begin(recipe(folder), out=folder / "runs" / "talk", listeners=[events]), events


def test_it_is_measured_by_its_reward_before_and_after(finished_run: tuple[RunFolder, Measured]) -> None:
    with RunReader.open(finished_run[0].path) as store:
        evals = store.evals()
        assert [(e.stage, e.step, e.accuracy, e.asked) for e in evals] == [("grpo", step, None, 3) for step in (0, 2, 4)]
        for report in evals:
            totals = [s.total for g in store.eval_groups("grpo", report.step) for s in g.scored]
            assert report.reward == pytest.approx(sum(totals) / len(totals))  # type: ignore[arg-type]
        assert "accuracy" not in store.metrics_of("grpo", 4)
        column = store._query("SELECT accuracy FROM evals")
        assert [row["accuracy"] for row in column] == [None, None, None]


def test_both_kinds_of_measurement_report_their_progress(finished_run: tuple[RunFolder, Measured]) -> None:
    """Also that of a reward model, which is part of its step."""
    settings: dict[tuple[str, int], list[float]] = {}
    for stage, step, share in finished_run[1].shares:
        settings.setdefault((stage, step), []).append(share)
    assert list(settings) == [("reward_model", 2), ("grpo", 0), ("grpo", 2), ("grpo", 4)]
    for shares in settings.values():
        assert shares == sorted(shares)
        assert shares[0] == 0.0
    assert settings["grpo", 0][-1] == 1.0


class StopsBeforeTheFirstStep(Listener):
    def on_eval(self, report: EvalReport) -> None:
        raise KeyboardInterrupt


def test_interrupted_anywhere_it_ends_in_the_same_bits(finished_run: tuple[RunFolder, Measured], tmp_path: Path) -> None:
    """Between the evaluation before the first step, which is recorded by then, and that step; then after every step."""
    with pytest.raises(KeyboardInterrupt):
        begin(recipe(tmp_path), out=tmp_path / "run", listeners=[StopsBeforeTheFirstStep()])
    run = RunFolder(tmp_path / "run")
    with RunReader.open(run.path) as store:
        assert [e.step for e in store.evals()] == [0]
    for _ in range(8):
        if run.state().status == "finished":
            break
        with contextlib.suppress(TimeUp):
            resume(run, minutes=0.0)
    with RunReader.open(run.path) as sliced, RunReader.open(finished_run[0].path) as at_once:
        assert sliced.fingerprint() == at_once.fingerprint()


def test_the_best_checkpoint_is_that_of_the_highest_reward(finished_run: tuple[RunFolder, Measured]) -> None:
    with RunReader.open(finished_run[0].path) as store:
        rewards = {e.step: e.reward or 0.0 for e in store.evals() if e.step}
        assert best_step(store, "grpo", "heldout_accuracy", rewards) == max(rewards, key=lambda step: (rewards[step], -step))
        assert best_step(store, "grpo", "heldout_accuracy", [2]) == 2


def test_commands_show_the_reward(finished_run: tuple[RunFolder, Measured]) -> None:
    run = finished_run[0]
    runs = ["--runs", str(run.path.parent)]
    with RunReader.open(run.path) as store:
        first, _, last = (f"{e.reward or 0.0:.2f}".replace("-", "−") for e in store.evals())

    def output_of(*words: str) -> str:
        result = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*words])
        assert result.exit_code == 0, result.output
        return result.output

    shown = " ".join(output_of("show", "talk", *runs).split())
    assert f"held-out reward before grpo after grpo mean {first} {last}" in shown
    assert "held-out accuracy" not in shown
    assert f"reward {last}" in output_of("runs", *runs)
    measured = " ".join(output_of("eval", "talk", *runs).split())
    assert f"mean {last}" in measured
    assert "no accuracy: no verifiable reward" in measured
    assert measured.count("accuracy") == 1
    data = json.loads(output_of("eval", "talk", "--samples", "2", "--temperature", "1", "--json", *runs))
    assert data["accuracy"] is data["interval"] is None
    low, high = data["reward_interval"]
    assert low <= data["reward"] <= high
    assert not [key for key in (*data, *data["metrics"]) if key.startswith(("pass", "maj"))]
    assert json.loads(output_of("show", "talk", "--json", *runs))["evals"][0]["reward"] is not None


def test_a_measurement_with_nothing_to_measure_by_is_refused(finished_run: tuple[RunFolder, Measured], tmp_path: Path) -> None:
    loaded = load_model(str(finished_run[0].path), tmp_path)
    free = recipe(tmp_path)
    with pytest.raises(RewardError, match="no answer could be graded") as raised:
        evaluate_model(LoadedModel(loaded.policy, "a model"), free)
    assert raised.value.where == "rewards.model"
    imitating = parse_recipe({**free.model_dump(exclude_none=True, mode="json"), "stages": [{"type": "sft"}]})
    with pytest.raises(RecipeError, match="has no default reward"):
        evaluate_model(loaded, imitating)


def test_a_verifiable_reward_of_the_task_or_the_recipe_is_watched_next_to_others(tmp_path: Path) -> None:
    """Also if the recipe names other rewards; a verifiable reward of the recipe takes precedence over the task's."""
    data = tomllib.loads(RECIPE)
    grpo = parse_recipe(data).stages[-1]
    assert [r.name for r in rewards_for(parse_recipe(data), grpo).rewards] == ["format", "answer"]
    data["rewards"] = [{"type": "format"}, {"type": "columns", "weight": 0.0}]
    mix = rewards_for(parse_recipe(data), grpo)
    assert [(r.name, r.weight) for r in mix.rewards] == [("format", 1.0), ("columns", 0.0), ("answer", 0.0)]
    assert type(mix.rewards[2]) is type(mix.rewards[1])
    data["rewards"] = [{"type": "countdown"}, {"type": "format"}]
    assert [r.name for r in rewards_for(parse_recipe(data), grpo).rewards] == ["countdown", "format"]


def test_the_answers_of_an_own_file_are_not_measured_unasked(tmp_path: Path) -> None:
    """A judged run is headed by its mean reward, although its file has a column that could be an answer."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(10)))
    data = tomllib.loads(RECIPE)
    data |= {"task": {"type": "file", "path": str(rows), "heldout": 2}, "rewards": [{"type": "repetition"}]}
    grpo = parse_recipe(data).stages[-1]
    mix = rewards_for(parse_recipe(data), grpo)
    assert ([r.name for r in mix.rewards], mix.accuracy_reward) == (["repetition"], None)
    data["rewards"] = [{"type": "repetition"}, {"type": "answer", "take": "any", "weight": 0.0}]
    mix = rewards_for(parse_recipe(data), grpo)
    assert ([r.name for r in mix.rewards], mix.accuracy_reward) == (["repetition", "answer"], "answer")
    data |= {"task": {"type": "arithmetic", "digits": 2}, "rewards": [{"type": "repetition"}]}
    assert rewards_for(parse_recipe(data), grpo).accuracy_reward == "answer", "a generated problem knows its answer"
