"""SIGKILL over runs with tools, a stateful environment and agent processes.

If environments and agents behave the same each time, the resumed run ends in the bits of one that was never killed. If they do
not, it equals a replay of its own record: everything again from the start, without a call of an environment or an agent.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.database.reader import RunReader
from oncurve.training.start import begin, resume
from tests.agent_programs.taught import taught_policy
from tests.faults.test_kills import killed
from tests.training.test_agents import AGENT
from tests.training.test_trainer import fingerprint

OF_THE_LEARNER = [
    ("scoring", 1), ("backward", 1), ("before a commit", 1), ("after a commit", 1), ("amid a checkpoint's file", 1),
    ("between writing and renaming", 1), ("measuring", 1), ("writing the model", 1),
]  # fmt: skip
OF_ENVIRONMENTS = [
    ("sampling", 1), ("storing an answer", 9), ("in a tool", 2), ("after storing an answer", 20), ("ending an episode", 5),
    *OF_THE_LEARNER,
]  # fmt: skip
OF_AGENTS = [
    ("starting an agent", 3), ("recording a turn", 4), ("after recording a turn", 11), ("ending a rollout", 3),
    ("after storing an answer", 5), *OF_THE_LEARNER,
]  # fmt: skip
"""(moment, its call in that process)."""
ADDER = '''
import os
from pathlib import Path

class Adder:
    """Its results and rewards are a function of the seed."""

    def reset(self, seed: int, **columns):
        with Path(__file__).with_name("began.log").open("a") as log:
            log.write(".")
        self.seed, self.sum = seed, 0

    def add(self, a: int, b: int) -> str:
        """
        Adds.

        Args:
            a: One number.
            b: The other.
        """
        self.sum += a + b
        return self._result()

    def _result(self):
        return str(self.sum)

    def get_reward(self) -> float:
        return self.sum + self.seed % 5 / 4


class Impure(Adder):
    """Other results each time."""

    def reset(self, **columns):
        super().reset(int.from_bytes(os.urandom(2)))

    def _result(self):
        return str(self.seed % 10)
'''
LOGGED = """

def logged(row):
    count(__file__ + ".log")
    return run(row)
"""
STAGE = {
    "type": "grpo", "steps": 2, "prompts_per_step": 2, "group_size": 4, "optimiser": {"learning_rate": 1e-3}, "save_every": 1,
    "eval_every": 2,
}  # fmt: skip


def recipe(folder: Path, tokens: int, **parts: Any) -> Recipe:
    (folder / "adder.py").write_text(ADDER)
    (folder / "my_agent.py").write_text(AGENT + LOGGED)
    for name, prompt, count in (("rows", "1+2?", 4), ("heldout", "1+2? ", 2)):
        rows = [{"prompt": prompt, "question": f"{i}+{i}="} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"path": f"{folder}/rows.jsonl", "heldout_path": f"{folder}/heldout.jsonl", "heldout": 2, **parts.pop("task")}
    stage = {**STAGE, "sampling": {"max_new_tokens": tokens}}
    return parse_recipe({"name": "acting", "threads": 1, "task": task, "stages": [stage], **parts})


def with_environment(folder: Path, name: str) -> Recipe:
    """For a model that has learned to call the tool, and to answer with its result."""
    taught_policy().save(folder / "model")
    task = {"type": "file", "chat": True, "environment": f"{folder}/adder.py:{name}"}
    return recipe(folder, 80, model={"source": str(folder / "model")}, task=task, rewards=[{"type": "environment"}])


def began(file: Path) -> int:
    """How many episodes or agents have begun."""
    return file.stat().st_size


@pytest.mark.slow
def test_kills_among_the_answers_of_an_environment_change_no_bit(tmp_path: Path) -> None:
    built = with_environment(tmp_path, "Adder")
    run, whole = killed(tmp_path / "killed", built, OF_ENVIRONMENTS), begin(built, out=tmp_path / "whole")
    assert fingerprint(run) == fingerprint(whole)
    with RunReader.open(run.path) as store:
        groups = [group for step in (1, 2) for group in store.step("grpo", step).groups]
    calls = [call for group in groups for c in group.group.completions for call in (c.episode.calls if c.episode else ())]
    assert sum(call.failure is None for call in calls) > 3, "tools were called"
    assert began(tmp_path / "began.log") > 2 * 2 * (8 + 2), "some began again in the run that was killed"


@pytest.mark.slow
def test_kills_among_agents_change_no_bit(tmp_path: Path) -> None:
    tiny = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "mlp_width": 48, "context": 128}
    task = {"type": "agent", "function": f"{tmp_path}/my_agent.py:logged", "timeout_s": 60}
    built = recipe(tmp_path, 40, model={"tiny": tiny}, task=task)
    run = killed(tmp_path / "killed", built, OF_AGENTS)
    again = 8 * (len(OF_AGENTS) - len(OF_THE_LEARNER)) + 2 * len(OF_THE_LEARNER)
    assert 0 < began(tmp_path / "my_agent.py.log") - 2 * (8 + 2) <= again, "only those that had not ended run again"
    assert fingerprint(run) == fingerprint(begin(built, out=tmp_path / "whole"))


@pytest.mark.slow
def test_a_killed_run_over_an_impure_environment_equals_a_replay_of_its_own_record(tmp_path: Path) -> None:
    run = killed(tmp_path / "killed", with_environment(tmp_path, "Impure"), OF_ENVIRONMENTS)
    expected, before = fingerprint(run), began(tmp_path / "began.log")
    assert before > 2 * (8 + 2), "some began again"
    for checkpoint in run.checkpoints.iterdir():
        shutil.rmtree(checkpoint)
    run.set_status("interrupted")
    resume(run)
    assert fingerprint(run) == expected
    assert began(tmp_path / "began.log") == before


def test_the_page_says_how_many() -> None:
    assert len(OF_ENVIRONMENTS) == len(OF_AGENTS) == 13
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert "| tools | 13 |" in page
    assert "| tools that answer differently each time | 13 |" in page
    assert "| agents | 13 |" in page
