"""A reward that changes the current directory, also to one that then disappears: the run and its paths are unharmed."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from oncurve.cli.app import main
from oncurve.recipe.load import dump_recipe
from oncurve.runs.folder import RunFolder
from tests.faults.cases import GRPO, PAIRS, SFT, recipe

REWARD = """
import os, tempfile
def far(completion):
    os.chdir("/")
    return float(len(completion))
def gone(completion):
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    return float(len(completion))
"""


@pytest.mark.parametrize("function", ["far", "gone"])
def test_a_reward_that_changes_the_directory_changes_nothing(
    function: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    shutil.copy(PAIRS, tmp_path / "pairs.jsonl")
    reward = {"type": "python", "name": "moving", "function": f"reward.py:{function}"}
    grpo = {**GRPO, "steps": 2, "save_every": 1, "eval_every": 1}
    dpo = {**SFT, "type": "dpo", "pairs": "pairs.jsonl", "steps": 1}
    (tmp_path / "r.toml").write_text(dump_recipe(recipe(grpo, dpo, rewards=[reward])))
    with contextlib.chdir(tmp_path):
        assert main(["train", "r.toml"]) == 0
        assert os.getcwd() == str(tmp_path)
    run = RunFolder(tmp_path / "runs" / "small-1")
    assert run.state().status == "finished"
    assert (run.model / "model.safetensors").is_file()
    assert "oncurve show runs/small-1" in capsys.readouterr().out
