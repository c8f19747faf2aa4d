"""Complete runs on several ranks, as processes that tests can kill."""

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

GONE_S = 120.0
"""For all ranks to end after one is killed or refused: it takes seconds, and less than `scale.timeout_s`, so that nobody waited
for a collective that can't end."""


def slow(completion: str) -> float:
    """A slow reward, so that a kill arrives in the intended step."""
    time.sleep(0.02)
    return float(sum(c.isdigit() for c in completion))


def run_recipe(ranks: int, *sets: str) -> Recipe:
    """Twelve grpo steps of the small model, with checkpoints."""
    reward = f'rewards=[{{type = "python", name = "slow", function = "{Path(__file__)}:slow"}}]'
    usual = [reward, "grpo.prompts_per_step=5", "grpo.steps=12", "grpo.save_every=3", "task.heldout=5", "scale.timeout_s=300.0"]
    return small(f"scale.ranks={ranks}", "threads=1", *usual, *sets)


def every_stage(ranks: int, folder: Path, *sets: str) -> Recipe:
    """A stage of each distributed type, in sequence: each starts from what the former one left."""
    pairs = folder / "pairs.jsonl"
    rows = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}" * (1 + i % 3), "rejected": "=" * (1 + i % 2)} for i in range(9)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = run_recipe(ranks).model_dump(mode="json", exclude_none=True)
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

    def print_error(error: OncurveError) -> None:
        print(f"rank {environ.get('RANK', '0')} printed: {error}", file=sys.stderr)

    world = SINGLE_PROCESS
    try:
        world = join(recipe, print_error)
        done = resume(RunFolder(path), sets=sets, world=world) if again else begin(recipe, out=path, world=world)
        assert done.path.resolve() == path.resolve()
    except BaseException as error:
        world.close(error)
        if isinstance(error, OncurveError):
            print_error(error) if environ.get("RANK", "0") == "0" else report_to_rank_zero(error)
            sys.exit(error.exit_code)
        raise
    world.close()


class Started:
    """A run's ranks. ``log_text`` is what they have written to standard error."""

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
    def log_text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait(self, seconds: float = 600) -> list[int | None]:
        """Waits for all ranks and returns their exit codes. A rank that does not end in time is killed, and has None."""
        deadline = time.monotonic() + seconds
        for child in self.processes:
            child.join(max(0.0, deadline - time.monotonic()))
        codes = [child.exitcode for child in self.processes]
        for child in self.processes:
            child.kill()
            child.join()
        return codes


def until(condition: Callable[[], object], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.02)


def last_step(path: Path, stage: str = "grpo") -> int:
    try:
        with RunReader.open(path) as store:
            steps = store.steps(stage)
            return steps[-1].step if steps else 0
    except OncurveError:
        return 0


def final_weights(path: Path, model: str = "model") -> dict[str, np.ndarray]:
    return dict(load_file(path / model / "model.safetensors"))


def same_bits(one: Path, other: Path) -> bool:
    a, b = final_weights(one), final_weights(other)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def distance(one: Path, other: Path, model: str = "model") -> float:
    a, b = final_weights(one, model), final_weights(other, model)
    return max(float(np.linalg.norm(a[n] - b[n]) / np.linalg.norm(b[n])) for n in a)
