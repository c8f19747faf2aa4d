"""Whole runs on several ranks, as processes that can be killed for good."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from torch._C._distributed_c10d import TCPStore

from oncurve.distributed.rendezvous import join, report_to_rank_zero
from oncurve.distributed.world import SINGLE_PROCESS
from oncurve.errors import OncurveError
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.start import begin, resume
from tests.distributed.processes import SERVER, environment
from tests.training.builders import recipe as small

GONE_S = 10.0
"""When a rank is killed or refused, all must be gone by then. Beside three other programs on two cores it took 3.4 s."""


def slow(completion: str) -> float:
    """A reward that takes its time, so that a kill meets the step that it is meant for."""
    time.sleep(0.02)
    return float(sum(c.isdigit() for c in completion))


def asked(ranks: int, *sets: str) -> Recipe:
    """Twelve steps with checkpoints, on the small model."""
    reward = f'rewards=[{{type = "python", name = "slow", function = "{Path(__file__)}:slow"}}]'
    usual = [reward, "grpo.prompts_per_step=5", "grpo.steps=12", "grpo.save_every=3", "task.heldout=5", "scale.timeout_s=60.0"]
    return small(f"scale.ranks={ranks}", "threads=1", *usual, *sets)


def every_stage(ranks: int, folder: Path, *sets: str) -> Recipe:
    """A stage of each type that ranks share, one after the other: what one leaves behind is what the next begins from."""
    pairs = folder / "pairs.jsonl"
    rows = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}" * (1 + i % 3), "rejected": "=" * (1 + i % 2)} for i in range(9)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = asked(ranks).model_dump(mode="json", exclude_none=True)
    sft, grpo = data["stages"]
    learned = {"type": "model", "model": "stage:reward_model"}
    labeller = {"type": "python", "function": f"{Path(__file__)}:slow"}
    rounds = {"every": 2, "updates": 2, "batch_size": 5, "labeller": labeller}
    usual = {"prompts_per_step": 5, "group_size": 4, "sampling": {"max_new_tokens": 8}, "save_every": 1}
    data["stages"] = [
        sft,
        {"type": "reward_model", "data": str(pairs), "steps": 2, "batch_size": 5, "eval_every": 1},
        {"type": "rejection_sample", "steps": 2, "at_least": 1.0, **usual},
        {**sft, "name": "imitate", "data": "stage:rejection_sample"},
        {**grpo, "steps": 3, "save_every": 1, "rewards": [learned], "kl": {"beta": 0.1}, "iterate": rounds},
        {"type": "dpo", "pairs": str(pairs), "steps": 8, "batch_size": 5, "save_every": 1},
        {"type": "ppo", "steps": 5, "optimiser": {"learning_rate": 1e-3}, **usual},
        {"type": "trpo", "steps": 2, "max_kl": 1e-3, "fisher_share": 0.5, **usual},
    ]
    return parse_recipe(data, sets)


def _train(recipe: Recipe, path: Path, again: bool, sets: list[str], environ: dict[str, str], log: Path) -> None:
    import os

    os.environ.update(environ)
    sys.stderr = log.open("a", buffering=1)

    def speak(error: OncurveError) -> None:
        print(f"{environ.get('RANK', '0')} said: {error}", file=sys.stderr)

    world = SINGLE_PROCESS
    try:
        world = join(recipe, speak)
        done = resume(RunFolder(path), sets=sets, world=world) if again else begin(recipe, out=path, world=world)
        assert done.path.resolve() == path.resolve()
    except BaseException as error:
        world.close(error)
        if isinstance(error, OncurveError):
            speak(error) if environ.get("RANK", "0") == "0" else report_to_rank_zero(error)
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


def last_step(path: Path, stage: str = "grpo") -> int:
    try:
        with RunReader.open(path) as store:
            found = store.steps(stage)
            return found[-1].step if found else 0
    except OncurveError:
        return 0


def final(path: Path, model: str = "model") -> dict[str, np.ndarray]:
    return dict(load_file(path / model / "model.safetensors"))


def same_bits(one: Path, other: Path) -> bool:
    a, b = final(one), final(other)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def distance(one: Path, other: Path, model: str = "model") -> float:
    a, b = final(one, model), final(other, model)
    return max(float(np.linalg.norm(a[n] - b[n]) / np.linalg.norm(b[n])) for n in a)
