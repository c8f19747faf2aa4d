"""A recipe so small that a run takes half a second, and one finished run of it for all tests here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from oncurve.cli.app import main

RECIPE = """
name = "small"
threads = 1
model = { tiny = { layers = 1, width = 32, heads = 2, kv_heads = 1, head_size = 16, mlp_width = 64, context = 128 } }
task = { type = "arithmetic", digits = 2, heldout = 8 }
rewards = [{ type = "python", name = "short", function = "REWARD:short" }, { type = "format", weight = 0.1 }]

[[stages]]
type = "sft"
steps = 2
batch_size = 4

[[stages]]
type = "grpo"
steps = 2
prompts_per_step = 2
group_size = 4
save_every = 1
sampling = { max_new_tokens = 16 }
"""

REWARD = """
def short(completion):
    return float(len(completion) < 8)
"""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Oncurve = Callable[..., Result]


@pytest.fixture
def oncurve(capsys: pytest.CaptureFixture[str]) -> Oncurve:
    """The command line, in this process."""

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    return run


def write_recipe(folder: Path) -> Path:
    (folder / "reward.py").write_text(REWARD)
    recipe = folder / "small.toml"
    recipe.write_text(RECIPE.replace("REWARD", str(folder / "reward.py")))
    return recipe


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="session")
def runs(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run, small-1. Tests must not change it."""
    folder = tmp_path_factory.mktemp("work") / "runs"
    assert main(["train", str(recipe), "--runs", str(folder)]) == 0
    return folder
