"""Comparisons: each algorithm's recipe, equal budgets, continuing after a stop, the table and the plots."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from oncurve.errors import RecipeError, RunError
from oncurve.models.policy import Policy
from oncurve.operations.compare import ArmResult, Comparison, ComparisonRequest, ComparisonStopped, Point, request_of
from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema.stages import Grpo, Ppo, RolloutStage, Trpo
from oncurve.recipe.variants import ALGORITHMS, PassCounts, learning_passes, with_algorithm, with_budget
from oncurve.runs.folder import STATE, RunFolder
from oncurve.terminal.comparison import as_markdown, comparison_data, draw, render_comparison, rows_of
from oncurve.training.stages.grpo import RolloutLoop
from oncurve.training.stages.table import STAGES
from oncurve.training.start import begin, resume
from tests.training.builders import digits, loop_for, recipe
from tests.training.stages.test_ppo import loop_for as ppo_loop_for


def here(file: Path, folder: Path) -> None:
    """A run in this process: the same as in a separate one, in less time."""
    if (folder / STATE).exists():
        resume(RunFolder(folder))
    else:
        begin(load_recipe(file), out=folder)


def request(algorithms: str = "grpo,ppo", seeds: int = 1, budget: str = "tokens", *sets: str) -> ComparisonRequest:
    return request_of(recipe("grpo.steps=3", "grpo.eval_every=1"), algorithms, seeds, budget, sets)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_made_from_one_recipe(name: str) -> None:
    """Sampling and earlier stages stay; the stage has the algorithm's name."""
    variant = with_algorithm(recipe("grpo.clip={low=0.1, high=0.1}", "grpo.updates_per_step=2"), name)
    stage = variant.stages[-1]
    assert isinstance(stage, RolloutStage)
    assert (stage.label, stage.steps, stage.group_size, stage.sampling.max_new_tokens) == (name, 4, 4, 8)
    assert [s.type for s in variant.stages[:-1]] == ["sft"]
    assert type(stage) in STAGES


def test_what_is_an_algorithms_own_does_not_go_over() -> None:
    base = recipe("grpo.objective=dr_grpo", "grpo.length_budget=10", "grpo.advantage.scale=batch", "grpo.updates_per_step=2")
    rloo, plain, centred = (with_algorithm(base, name).stages[-1] for name in ("rloo", "reinforce", "reinforce_baseline"))
    assert isinstance(rloo, Grpo)
    assert (rloo.objective, rloo.advantage.scale, rloo.length_budget, rloo.updates_per_step) == ("rloo", None, None, 2)
    assert isinstance(plain, Grpo)
    assert isinstance(centred, Grpo)
    assert (plain.updates_per_step, plain.advantage.baseline, centred.advantage.baseline) == (1, None, "mean")
    ppo, trpo = (with_algorithm(base, name).stages[-1] for name in ("ppo", "trpo"))
    assert isinstance(ppo, Ppo)
    assert ppo.updates_per_step == 2
    assert isinstance(trpo, Trpo)
    assert trpo.advantage.scale == "batch"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gppo", "did you mean 'ppo'|did you mean 'gspo'|did you mean 'grpo'"),
        ("dpo", "not comparable"),
        ("sft", "not comparable"),
    ],
)
def test_algorithms_that_can_not_be_served_are_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words) as raised:
        with_algorithm(recipe(), name)
    assert raised.value.where == f"--algorithms {name}"


def test_a_recipe_that_an_algorithm_can_not_serve_is_refused_by_the_algorithms_name(tmp_path: Path) -> None:
    """Only reinforce works with groups of one; nothing runs before all algorithms are checked."""
    lone = recipe("grpo.group_size=1", "grpo.objective=reinforce")
    with pytest.raises(RecipeError) as raised:
        Comparison(tmp_path / "c", request_of(lone, "reinforce,rloo", 1, "tokens", []), here)
    assert raised.value.where == "--algorithms rloo"
    assert "group_size" in str(raised.value.what)
    with pytest.raises(RecipeError, match="no stage that samples"):
        Comparison(tmp_path / "c", request_of(load_recipe("imitation-only"), "grpo", 1, "tokens", []), here)


def test_rates_are_constant_and_budgets_take_the_place_of_steps() -> None:
    variant = with_budget(recipe("grpo.optimiser.schedule=linear"), tokens=500)
    stage = variant.stages[-1]
    assert isinstance(stage, Grpo)
    assert (stage.optimiser.schedule, stage.tokens, stage.steps) == ("constant", 500, 200)


def test_a_comparison_from_one_start_with_one_budget(tmp_path: Path) -> None:
    """Two algorithms, two seeds: the same start and prompts; the second stops in the step that reaches the first's tokens."""
    config = request("grpo,ppo", 2, "tokens", "ppo.critic.learning_rate=1e-3")
    outcomes = Comparison.open(tmp_path / "c", config, here).run_all()
    assert [(o.algorithm, o.seed) for o in outcomes] == [("grpo", 0), ("grpo", 1), ("ppo", 0), ("ppo", 1)]
    for grpo, ppo in zip(outcomes[:2], outcomes[2:], strict=True):
        assert grpo.steps == 3
        assert ppo.tokens >= grpo.tokens
        assert ppo.tokens - grpo.tokens < 3 * 4 * 8, "by less than a step"
        assert ppo.held > 1.9 * grpo.held
        assert ppo.trained > 1.9 * grpo.trained
    assert {o.curve[0] for o in outcomes} == {Point(0, 0, 0.0, 0.0, outcomes[0].curve[0].accuracy)}, "one start"
    assert [p.samples for p in outcomes[0].curve] == [0, 12, 24, 36]
    starts = {load_recipe(tmp_path / "c" / "runs" / f"{n}" / "recipe.toml").model.source for n in ("grpo-0", "ppo-1")}
    assert starts == {str((tmp_path / "c" / "start" / "model").resolve())}
    first = [RunFolder(tmp_path / "c" / "runs" / name) for name in ("grpo-0", "ppo-0")]
    prompts = [
        [g.graded.group.prompt.id for g in _groups(run, label)] for run, label in zip(first, ("grpo", "ppo"), strict=True)
    ]
    assert prompts[0] == prompts[1]
    stage = load_recipe(first[1].recipe).stages[-1]
    assert isinstance(stage, Ppo)
    assert stage.critic.learning_rate == 1e-3


def _groups(run: RunFolder, label: str) -> list[Any]:
    from oncurve.runs.database.reader import RunReader

    with RunReader.open(run.path) as store:
        return [store.group(label, 1, i) for i in range(len(store.groups(label, 1)))]


def test_runs_from_a_shared_start_train_their_own_adapter(tmp_path: Path) -> None:
    """The start's model is complete: the adapter that its stages started from is merged into it."""
    config = recipe("model.lora.rank=2", "model.adapter=before/adapter")
    comparison = Comparison(tmp_path, request_of(config, "grpo,ppo", 1, "tokens", ()))
    model = comparison._arm_recipe("ppo", 0, tmp_path / "start" / "model", None).model
    assert (model.source, model.adapter) == (str(tmp_path / "start" / "model"), None)
    assert model.lora == config.model.lora
    assert comparison._arm_recipe("ppo", 0, None, None).model == config.model


def test_a_budget_of_time_stops_by_the_clock(tmp_path: Path) -> None:
    outcomes = Comparison.open(tmp_path / "c", request("grpo,reinforce", 1, "time"), here).run_all()
    assert outcomes[1].seconds >= outcomes[0].seconds
    assert len(outcomes[1].rewards) == outcomes[1].steps


def test_an_interrupted_comparison_continues(tmp_path: Path) -> None:
    """Stopped before its third run; the same command runs only that one, and the result is that of one never stopped."""
    done: list[str] = []

    def stopping(limit: int) -> Callable[[Path, Path], None]:
        def run(file: Path, folder: Path) -> None:
            if len(done) == limit:
                raise ComparisonStopped(folder)
            done.append(folder.name)
            here(file, folder)

        return run

    with pytest.raises(ComparisonStopped, match="repeat the command"):
        Comparison.open(tmp_path / "c", request("grpo,rloo"), stopping(2)).run_all()
    assert done == ["start", "grpo-0"]
    (tmp_path / "c" / "runs" / "rloo-0").mkdir()  # a kill in the run's first moment leaves this
    again = Comparison.open(tmp_path / "c", request("grpo,rloo"), stopping(9)).run_all()
    assert done == ["start", "grpo-0", "rloo-0"]
    full = Comparison.open(tmp_path / "whole", request("grpo,rloo"), here).run_all()
    assert [o.rewards for o in again] == [o.rewards for o in full]
    assert [o.accuracy for o in again] == [o.accuracy for o in full]


def test_another_question_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    Comparison.open(tmp_path / "c", request(), here)
    Comparison.open(tmp_path / "c", request(), here)
    with pytest.raises(RunError, match="other algorithms: grpo, ppo"):
        Comparison.open(tmp_path / "c", request("grpo,rloo"), here)
    other = request_of(recipe("grpo.steps=9"), "grpo,ppo", 1, "tokens", [])
    with pytest.raises(RunError, match="another recipe"):
        Comparison.open(tmp_path / "c", other, here)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(RunError, match="not empty"):
        Comparison.open(tmp_path / "full", request(), here)


@pytest.mark.parametrize(("algorithms", "budget", "where"), [("", "tokens", "--algorithms"), ("grpo", "money", "--budget")])
def test_words_that_mean_nothing_are_refused(algorithms: str, budget: str, where: str) -> None:
    with pytest.raises(RecipeError) as raised:
        request(algorithms, 1, budget)
    assert raised.value.where == where


def outcome(algorithm: str, seed: int, accuracy: float, rewards: tuple[float, ...] = (0.0, 0.5), **changes: Any) -> ArmResult:
    curve = tuple(Point(n, 100 * n, 900.0 * n, 2.0 * n, accuracy * n / 2) for n in (1, 2))
    fields = {"steps": 2, "samples": 200, "tokens": 1800.0, "seconds": 4.0, "cpu_seconds": 3.5, "memory_mib": 512.0}
    fields |= {"held": 791_000, "trained": 791_000, "forward": 2.0, "backward": 2.0}
    return ArmResult(**{"algorithm": algorithm, "seed": seed, "rewards": rewards, "curve": curve, **fields, **changes})


def test_the_table_by_hand() -> None:
    """Accuracies 0.8 and 0.9: 85.0 ± 7.1 %. A rise of 0.5 over 200 samples is 2.5 per thousand."""
    (row,) = rows_of([outcome("grpo", 0, 0.8), outcome("grpo", 1, 0.9)])
    assert row == (
        "grpo",
        "85.0 ± 7.1 %",
        "2.500 ± 0.000",
        "200",
        "1,800",
        "4.0 ± 0.0",
        "3.5 ± 0.0",
        "512",
        "791k",
        "791k",
        "2/2",
    )
    assert outcome("grpo", 0, 0.8, tuple(np.linspace(0, 1, 20))).reward_per_1k == pytest.approx(5 * 18 / 19)


def test_without_a_verifiable_reward_algorithms_are_compared_by_their_held_out_reward(tmp_path: Path) -> None:
    free = [
        outcome("grpo", seed, 0.0, curve=tuple(Point(n, 100 * n, 900.0 * n, 2.0 * n, None, n * reward) for n in (0, 1, 2)))
        for seed, reward in ((0, -0.5), (1, -0.25))
    ]
    (row,) = rows_of(free)
    assert row[1] == "reward -0.75 ± 0.35"
    data = json.loads(json.dumps(comparison_data(free), allow_nan=False))
    assert [(one["accuracy"], one["heldout_reward"]) for one in data] == [(None, -1.0), (None, -0.5)]
    (plot,) = [file for file in draw(free, tmp_path) if file.name == "by-samples.svg"]
    assert "held-out reward" in plot.read_text()
    assert "accuracy" not in plot.read_text()


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_a_terminal(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render_comparison([outcome("grpo", 0, 0.8), outcome("ppo", 0, 0.9)]))
    text = console.export_text()
    assert all(len(line) <= width for line in text.splitlines())
    for words in ("80.0 %", "ppo", "reward/1k samples", "4.0", "1,800", "791k", "2/2"):
        assert words in text


def test_plots_are_the_same_bytes_each_time_and_the_data_is_json(tmp_path: Path) -> None:
    outcomes = [outcome("grpo", 0, 0.8), outcome("grpo", 1, 0.9), outcome("ppo", 0, 0.7, held=1_580_000)]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    files = draw(outcomes, tmp_path / "one")
    draw(outcomes, tmp_path / "two")
    assert sorted(f.name for f in files) == sorted(
        f"{n}.{k}" for n in ("by-samples", "by-seconds", "memory") for k in ("svg", "png")
    )
    for file in files:
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
    assert json.loads(json.dumps(comparison_data(outcomes)))[0]["accuracy"] == 0.8
    assert as_markdown(outcomes).startswith("| algorithm | held-out |")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, PassCounts(1, 1)),
        ({"updates_per_step": 2}, PassCounts(2, 2)),
        ({"minibatches": 2}, PassCounts(2, 1)),
        ({"kl": {"beta": 0.1}}, PassCounts(2, 1)),
        ({"kl": {"beta": 0.1, "where": "reward"}}, PassCounts(4, 1)),
    ],
)
def test_passes_are_those_that_are_made(options: dict[str, Any], expected: PassCounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in a real step, in units of the step's tokens: a mini-batch of half of them is half a pass."""
    loop = loop_for(options | {"no_signal": "keep"}, digits)
    assert learning_passes(loop.stage) == expected
    assert _counted(loop, monkeypatch) == pytest.approx((expected.forward, expected.backward))
    critic = ppo_loop_for(options)
    counted = learning_passes(critic.ppo)
    assert counted.backward == 2 * expected.backward
    assert _counted(critic, monkeypatch) == pytest.approx((counted.forward, counted.backward))


def _counted(loop: RolloutLoop, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """(forward, backward) passes of a step, counted by the rows that its policies (reference and critic too) forward."""
    observed = {"forward": 0, "backward": 0}

    def watch(kind: type, name: str) -> None:
        plain = getattr(kind, name)

        def counted(self: Any, pack: Any, *arguments: Any) -> Any:
            result = plain(self, pack, *arguments)
            value = result[0] if isinstance(result, tuple) else result
            observed["forward"] += pack.rows
            observed["backward"] += pack.rows if value.requires_grad else 0
            return result

        monkeypatch.setattr(kind, name, counted)

    watch(Policy, "pack_hidden")
    loop.step(1)
    monkeypatch.undo()
    rows = loop.stage.prompts_per_step * loop.stage.group_size
    return observed["forward"] / rows, observed["backward"] / rows
