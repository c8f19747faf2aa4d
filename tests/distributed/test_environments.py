"""Runs on several ranks with environments whose classes can't be pickled: ranks send prompts to each other."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from oncurve.recipe.load import dump_recipe, parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.database.reader import RunReader
from oncurve.tasks.environments import PureEnvironment, load_environment
from tests.distributed.runs import Started

OWN = """
from threading import Lock

lock = Lock()


class Shop:
    def __init__(self, price: int = 1):
        self.price = price

    def reset(self, **columns):
        with lock:
            return f" at {self.price}"

    def buy(self) -> str:
        'Buys.'
        return str(self.price)

    def get_reward(self) -> float:
        return self.price


class Echo:
    calls = ("1", "2")

    def __init__(self, times: int = 1):
        self.times = times

    def reply(self, prompt, turns, dice):
        return "!" * self.times if len(turns) < 4 else None


async def letters(completion: str) -> float:
    return completion.count("a")
"""
STEPS = 2
ROOT = Path(__file__).parents[2]
GYM = {"environment": "gymnasium:FrozenLake-v1"}
CASES: dict[str, dict[str, Any]] = {
    "a class of ours with options": {"environment": "own.py:Shop", "environment_options": {"price": 3}},
    "a pure one with options": {"environment": "own.py:Echo", "environment_options": {"times": 3}},
    "a class of ours": {"environment": "own.py:Shop"},
    "gymnasium": GYM,
    "gymnasium with options": {**GYM, "environment_options": {"is_slippery": False}},
}


def recipe_of(folder: Path, task: Mapping[str, Any], **scale: Any) -> Recipe:
    """Groups are extended, perhaps on another rank than the one that began them. The reward is in the environment's file."""
    (folder / "own.py").write_text(OWN)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"row {i}", "seed": i}) + "\n" for i in range(6)))
    own = {key: value.replace("own.py", f"{folder}/own.py") if key == "environment" else value for key, value in task.items()}
    rows = {"type": "file", "path": str(folder / "rows.jsonl"), "chat": True, "heldout": 2, "heldout_share": 0.4}
    stage = {"type": "grpo", "steps": STEPS, "prompts_per_step": 4, "group_size": 4, "eval_every": 1}
    return parse_recipe(
        {
            "name": "several",
            "threads": 1,
            "model": {"tiny": {"layers": 1, "width": 32, "heads": 2, "mlp_width": 48, "context": 2048, "chat": True}},
            "task": {**rows, **own},
            "rewards": [{"type": "python", "function": f"{folder}/own.py:letters"}],
            "scale": {"timeout_s": 300.0, **scale},
            "stages": [{**stage, "curriculum": {"first_samples": 2}, "sampling": {"max_new_tokens": 24}}],
        }
    )


def texts(run: Path) -> list[list[tuple[str, list[str]]]]:
    with RunReader.open(run) as store:
        steps = [store.step("grpo", n).groups for n in range(1, STEPS + 1)]
    return [[(g.group.prompt.shown, [c.text for c in g.group.completions]) for g in groups] for groups in steps]


QUICK = ("a class of ours with options", "gymnasium")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_two_ranks_with_an_environment_sample_what_one_does(name: str, tmp_path: Path) -> None:
    recipes = {ranks: recipe_of(tmp_path, CASES[name], ranks=ranks) for ranks in (1, 2)}
    started = {ranks: Started(recipe, tmp_path / str(ranks)) for ranks, recipe in recipes.items()}
    for ranks, run in started.items():
        assert run.wait() == [0] * ranks, run.log_text
    assert texts(tmp_path / "2") == texts(tmp_path / "1")


SCRIPT = """
import sys

import oncurve


def main() -> None:
    class Shop:
        def __init__(self, price: int) -> None:
            self.price = price

        def reset(self, **columns: object) -> str:
            return f" at {self.price}"

        def get_reward(self) -> float:
            return self.price

    def buy() -> str:
        "Buys."
        return "tea"

    recipe = oncurve.load_recipe("recipe.toml")
    prompts = [{"prompt": [{"role": "user", "content": f"row {i}"}]} for i in range(6)]
    factory = lambda: Shop(3)
    oncurve.train(recipe, prompts=prompts, tools=[buy], environment_factory=factory, quiet=True, out=sys.argv[1])


main()
"""


@pytest.mark.slow
def test_two_ranks_with_an_environment_that_a_function_of_a_script_defines(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "recipe.toml").write_text(dump_recipe(recipe_of(tmp_path, {})))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for ranks in (1, 2):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "script.py", f"run-{ranks}"]
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environ, capture_output=True, timeout=600)
        assert done.returncode == 0, done.stderr.decode()
    assert texts(tmp_path / "run-2") == texts(tmp_path / "run-1")


DATED = """
import os
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent


class Dated:
    def reset(self, **columns):
        text = (HERE / "today").read_text()
        with (HERE / "begun").open("a") as begun:
            begun.write("x")
        return text

    def look(self) -> str:
        "Looks."
        return ""


def letters(completion: str) -> float:
    while len((HERE / "begun").read_text()) < 8:  # the first two completions of four groups, on all ranks
        time.sleep(0.01)
    with suppress(FileNotFoundError):  # it has happened
        os.replace(HERE / "tomorrow", HERE / "today")
    return completion.count("a")
"""


def test_groups_that_are_extended_on_another_day_start_again_on_all_ranks(tmp_path: Path) -> None:
    """The day changes when the first completions are scored, so no rank can know it before it extends a group."""
    recipes = {ranks: recipe_of(tmp_path, {"environment": "own.py:Dated"}, ranks=ranks) for ranks in (1, 2)}
    (tmp_path / "own.py").write_text(DATED)
    for ranks, recipe in recipes.items():
        (tmp_path / "begun").unlink(missing_ok=True)
        (tmp_path / "today").write_text(" on Monday")
        (tmp_path / "tomorrow").write_text(" on Tuesday")
        run = Started(recipe, tmp_path / str(ranks))
        assert run.wait() == [0] * ranks, run.log_text
        with RunReader.open(tmp_path / str(ranks)) as store:
            (event,) = store.events("episodes")
        assert "finished episodes start again" in event.message
    assert texts(tmp_path / "2") == texts(tmp_path / "1")
    assert all(prompt.endswith("on Tuesday") for groups in texts(tmp_path / "1") for prompt, _ in groups)


def test_an_environment_of_the_users_is_copied_as_usual(tmp_path: Path) -> None:
    """A reply may be computed by a copy that plays all turns again: it must not be the shared object."""
    (tmp_path / "own.py").write_text(OWN)
    shared = load_environment(f"{tmp_path}/own.py:Echo", "task.environment")
    assert isinstance(shared, PureEnvironment)
    own: Any = shared.environment
    again = copy.deepcopy(own)
    again.times = 7
    assert own.times == 1
    assert copy.copy(own) is not own
    assert copy.deepcopy(shared) is shared, "only what is sent between processes is found by its key"


def test_environments_end_with_their_prompts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    shop = load_environment(f"{tmp_path}/own.py:Shop", "task.environment")
    gone = weakref.ref(shop)
    del shop
    gc.collect()
    assert gone() is None
