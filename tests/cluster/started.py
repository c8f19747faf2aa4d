"""Runs on a cluster, started by the command in a separate process as a user would. Their actors can be killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from oncurve.distributed.rank_status import RankStatus, read_statuses
from oncurve.recipe.load import dump_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.start import begin
from oncurve.workers.processes import is_alive
from tests.faults.sameness import everything

ROOT = Path(__file__).parents[2]
PATIENCE_S = 400.0


def oncurve(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "oncurve", *arguments]
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": "200"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


class Started:
    """A run whose driver is a separate process."""

    def __init__(self, path: Path, process: subprocess.Popen[str]) -> None:
        self.run, self.process = RunFolder(path), process

    @classmethod
    def begin(cls, path: Path, recipe: Recipe, address: str) -> Started:
        file = path.with_suffix(".toml")
        file.write_text(dump_recipe(recipe))
        return cls(path, oncurve("train", str(file), "--out", str(path), "--ray", address))

    def resume(self, address: str) -> Started:
        return Started(self.run.path, oncurve("train", str(self.run.path), "--resume", "--ray", address))

    def wait_for(self, what: str, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not there():
            assert self.process.poll() is None, f"it ended before {what}: {self.process.communicate()[0]}"
            assert time.monotonic() < deadline, f"no {what}"
            time.sleep(0.02)

    def until(self, step: int) -> None:
        self.wait_for(f"step {step}", lambda: last_step(self.run) >= step)

    def status(self, actor: str) -> RankStatus:
        statuses: list[RankStatus] = []

        def there() -> bool:
            statuses[:] = [p for p in read_statuses(self.run.path) if p.name == actor and p.pid]
            return bool(statuses)

        self.wait_for(actor, there)
        return statuses[0]

    def kill(self, actor: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal to an actor's process, and returns its pid."""
        pid = self.status(actor).pid
        os.kill(pid, number)
        return pid

    def end(self, code: int = 0) -> str:
        """Waits for the driver and all actors to end; checks the exit code and returns the output."""
        try:
            output, _ = self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it hangs: {self.process.communicate()[0]}; {read_statuses(self.run.path)}") from None
        assert self.process.returncode == code, output
        deadline = time.monotonic() + PATIENCE_S
        while left := [p.name for p in read_statuses(self.run.path) if p.pid and is_alive(p.pid)]:
            assert time.monotonic() < deadline, f"still running after the run: {left}"
            time.sleep(0.1)
        return output

    def events(self) -> list[str]:
        with RunReader.open(self.run.path) as store:
            return [event.message for event in store.events("cluster")]


def last_step(run: RunFolder) -> int:
    try:
        with closing(sqlite3.connect(f"file:{run.database}?mode=ro", uri=True)) as store:
            step = store.execute("SELECT max(step) FROM steps WHERE stage = 'grpo'").fetchone()[0]
        return int(step or 0)
    except sqlite3.Error:
        return 0


def each_group_once(run: RunFolder, steps: int, prompts: int) -> None:
    """Every (step, position) has exactly one group, and every group has all of its completions."""
    with closing(sqlite3.connect(f"file:{run.database}?mode=ro", uri=True)) as store:
        positions = store.execute("SELECT step, position FROM groups WHERE kind = 'train' ORDER BY step, position").fetchall()
        assert positions == [(step, position) for step in range(1, steps + 1) for position in range(prompts)]
        sizes = store.execute(
            "SELECT count(*) FROM completions JOIN groups ON groups.id = group_id WHERE kind = 'train' GROUP BY group_id"
        ).fetchall()
        assert len(set(sizes)) == 1


def in_one_process(recipe: Recipe, path: Path) -> dict[str, str]:
    """What the recipe leaves in one process, without a cluster's samplers and reward workers."""
    scale = recipe.scale.model_copy(update={"samplers": 0, "reward_workers": 0})
    return _compared(everything(begin(recipe.model_copy(update={"scale": scale}), out=path)))


def same_as(plain: dict[str, str], run: RunFolder) -> None:
    """Everything that the run left (tokens, rewards, weights, checkpoints) has the bits of a single-process run."""
    assert _compared(everything(run)) == plain


def _compared(digests: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in digests.items() if not name.startswith(("actors/", "recipe.toml"))}


def same_as_in_one_process(run: RunFolder, recipe: Recipe, path: Path) -> None:
    same_as(in_one_process(recipe, path), run)
