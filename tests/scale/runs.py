"""Whole runs on several ranks, as processes that can be killed for good."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from torch._C._distributed_c10d import TCPStore

from oncurve.errors import OncurveError
from oncurve.recipe.schema import Recipe
from oncurve.runs.folder import RunFolder
from oncurve.runs.store import Store
from oncurve.scale.join import join, tell_first
from oncurve.scale.world import ALONE
from oncurve.train.start import begin, resume
from tests.scale.processes import SERVER, environment
from tests.train.builders import recipe as small


def slow(completion: str) -> float:
    """A reward that takes its time, so that a kill meets the step that it is meant for."""
    time.sleep(0.02)
    return float(sum(c.isdigit() for c in completion))


def asked(ranks: int, *sets: str) -> Recipe:
    """Twelve steps with checkpoints, on the small model."""
    reward = f'rewards=[{{type = "python", name = "slow", function = "{Path(__file__)}:slow"}}]'
    usual = [reward, "grpo.prompts_per_step=5", "grpo.steps=12", "grpo.save_every=3", "task.heldout=5", "scale.timeout_s=60.0"]
    return small(f"scale.ranks={ranks}", "threads=1", *usual, *sets)


def _train(recipe: Recipe, path: Path, again: bool, sets: list[str], environ: dict[str, str], log: Path) -> None:
    import os

    os.environ.update(environ)
    sys.stderr = log.open("a", buffering=1)

    def speak(error: OncurveError) -> None:
        print(f"{environ.get('RANK', '0')} said: {error}", file=sys.stderr)

    world = ALONE
    try:
        world = join(recipe, speak)
        done = resume(RunFolder(path), sets=sets, world=world) if again else begin(recipe, out=path, world=world)
        assert done.path.resolve() == path.resolve()
    except BaseException as error:
        world.close(error)
        if isinstance(error, OncurveError):
            speak(error) if environ.get("RANK", "0") == "0" else tell_first(error)
            sys.exit(error.exit_code)
        raise
    world.close()


class Started:
    """A run's ranks. ``said`` is all that they have written."""

    def __init__(self, recipe: Recipe, path: Path, *, again: bool = False, sets: list[str] | None = None) -> None:
        ranks = recipe.scale.ranks
        self.log = path.with_name(f"{path.name}-{time.monotonic_ns()}.log")
        self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if ranks > 1 else None
        self.processes: list[ForkServerProcess] = []
        for rank in range(ranks):
            environ = environment(rank, ranks, self.store.port) if self.store is not None else {}
            child = SERVER.Process(target=_train, args=(recipe, path, again, sets or [], environ, self.log))
            child.start()
            self.processes.append(child)

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait(self, seconds: float = 120) -> list[int | None]:
        """Exit codes of all, once they have ended; what has not by then is killed, and has none."""
        deadline = time.monotonic() + seconds
        for child in self.processes:
            child.join(max(0.0, deadline - time.monotonic()))
        codes = [child.exitcode for child in self.processes]
        for child in self.processes:
            child.kill()
            child.join()
        return codes


def until(what: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def last_step(path: Path) -> int:
    try:
        with Store.open(path) as store:
            found = store.steps("grpo")
            return found[-1].step if found else 0
    except OncurveError:
        return 0


def final(path: Path) -> dict[str, np.ndarray]:
    return dict(load_file(path / "model" / "model.safetensors"))


def same_bits(one: Path, other: Path) -> bool:
    a, b = final(one), final(other)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def distance(one: Path, other: Path) -> float:
    a, b = final(one), final(other)
    return max(float(np.linalg.norm(a[n] - b[n]) / np.linalg.norm(b[n])) for n in a)
