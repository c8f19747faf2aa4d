"""A run that resumes with other threads, workers, slots or packs: the same prompts, random numbers and gradient."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oncurve import trust
from oncurve.cli.app import main
from oncurve.errors import RecipeError, RunError
from oncurve.recipe.load import load_recipe
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.learner.optimiser import Optimiser, Update
from oncurve.training.start import begin, resume
from tests.faults.cases import GRPO, HURRIED, recipe
from tests.faults.test_exact import Die, DieAfter

RECIPE = recipe({**GRPO, "steps": 4, "save_every": 2, "eval_every": 0, "kl": {"beta": 0.05}}, rewards=[HURRIED])


@pytest.fixture
def cut(tmp_path: Path) -> RunFolder:
    """A run that crashed after step 3 of 4, with a checkpoint of step 2."""
    with pytest.raises(Die):
        begin(RECIPE, out=tmp_path / "cut", listeners=[DieAfter(3)])
    return RunFolder(tmp_path / "cut")


class Gradients:
    """Records the gradient of every update."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[torch.Tensor] = []
        real = Optimiser.step

        def step(optimiser: Optimiser, watched: Callable[[], Mapping[str, float]]) -> Update:
            self.seen.append(torch.cat([p.grad.flatten() for p in optimiser.weights if p.grad is not None]).clone())
            return real(optimiser, watched)

        monkeypatch.setattr(Optimiser, "step", step)


@pytest.mark.parametrize(
    "sets",
    [["threads=2"], ["grpo.tokens_per_pack=40"], ["engine.slots=4"], ["rewards.hurried.workers=3"], ["engine.check_every=2"]],
)
def test_the_first_gradient_after_a_move_is_the_same(
    sets: list[str], cut: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = begin(RECIPE, out=tmp_path / "whole")
    noted = Gradients(monkeypatch)
    resume_copy(cut, tmp_path / "stayed", [])
    stayed = noted.seen[0]
    noted.seen.clear()
    moved = resume_copy(cut, tmp_path / "moved", sets)
    torch.set_num_threads(1)
    assert float((noted.seen[0] - stayed).norm() / stayed.norm()) < 1e-5
    with RunReader.open(full.path) as a, RunReader.open(moved.path) as b:
        for step in (3, 4):
            assert [g.prompt_id for g in a.groups("grpo", step)] == [g.prompt_id for g in b.groups("grpo", step)]
        texts = [[c.text for g in store.step("grpo", 3).groups for c in g.group.completions] for store in (a, b)]
        assert texts[0] == texts[1], "the same random numbers, and no near tie on this machine"
    key, _, value = sets[0].partition("=")
    assert f"{key.split('.')[-1]} = {value}" in moved.recipe.read_text(), "what was moved is written down"


def resume_copy(run: RunFolder, to: Path, sets: list[str]) -> RunFolder:
    """A copy in another folder, resumed with changes."""
    shutil.copytree(run.path, to)
    trust.grant(RunFolder(to))
    return resume(RunFolder(to), sets=sets)


def test_what_a_run_is_can_not_be_moved(cut: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    before = cut.recipe.read_text()
    for change in ("grpo.group_size=8", "seed=1", "grpo.optimiser.learning_rate=0.1", "rewards.hurried.weight=2.0"):
        with pytest.raises(RecipeError, match="only keys that describe the machine may change"):
            resume(cut, sets=[change])
        assert main(["train", "--resume", str(cut.path), "--set", change]) == 2
        assert "oncurve fork" in capsys.readouterr().err
    assert cut.recipe.read_text() == before
    assert load_recipe(cut.recipe).seed == 0


def test_a_run_of_a_machine_that_is_gone_resumes_here(cut: RunFolder) -> None:
    """Its status is 'running' on another machine: no process is looked for here, and the lock is free."""
    cut.write_state(replace(cut.state(), status="running", host="gone." + socket.gethostname()))
    assert cut.state().current_status == "running"
    assert resume(cut).state().current_status == "finished"


def test_a_run_in_use_elsewhere_is_left_alone(cut: RunFolder) -> None:
    cut.write_state(replace(cut.state(), status="running"))
    with pytest.raises(RunError, match="still running"):
        resume(cut)


def test_train_on_an_interrupted_run_names_the_flag(cut: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    cut.write_state(replace(cut.state(), status="interrupted"))
    assert main(["train", str(cut.path)]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "a run (interrupted), not a recipe" in output
    assert f"oncurve train --resume {cut.path}" in output
