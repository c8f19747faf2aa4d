"""`oncurve compare`: one recipe with several algorithms, from the same start, on the same prompts, with the same budget.

A comparison is a folder: `request.json` (what is compared), `start/` (the run of the earlier stages, which all share), `runs/`
(one for each algorithm and seed), `results.json`, `table.md` and the plots. Repeating the command continues it: finished runs
are kept, and an unfinished one is resumed. Each run is a separate process, so that peak memory is measured for each.

The first algorithm runs for the recipe's number of steps. For each seed, the tokens that it sampled, or the time that it took,
are the budget of the other algorithms.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from oncurve.errors import RecipeError, RunError
from oncurve.recipe.load import dump_recipe, parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import RolloutStage
from oncurve.recipe.variants import base_stage, learning_passes, with_algorithm, with_budget
from oncurve.runs.atomic_files import write_file_atomically
from oncurve.runs.checkpoints.listing import list_checkpoints
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import COMPARISON_REQUEST, STATE, RunFolder

Budget = Literal["tokens", "time"]
Runner = Callable[[Path, Path], None]
"""(recipe file, run folder): trains the recipe in the folder, or resumes the run that is there."""


@dataclass(frozen=True, slots=True)
class ComparisonRequest:
    """What is compared. The recipe is stored as text with all keys, so that a changed file is noticed."""

    recipe: str
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    budget: Budget
    sets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Point:
    """Held-out accuracy after a number of samples, tokens and seconds of training; None if there is no verifiable reward: then
    the held-out reward is the measure."""

    step: int
    samples: int
    tokens: float
    seconds: float
    accuracy: float | None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class ArmResult:
    """The result of one run. ``rewards`` is the mean reward of each step, ``cpu_seconds`` the CPU time of its process."""

    algorithm: str
    seed: int
    steps: int
    samples: int
    tokens: float
    seconds: float
    cpu_seconds: float
    memory_mib: float
    held: int
    trained: int
    forward: float
    backward: float
    rewards: tuple[float, ...]
    curve: tuple[Point, ...]

    @property
    def accuracy(self) -> float:
        """The last held-out accuracy; NaN if there is none."""
        last = self.curve[-1].accuracy if self.curve else None
        return float("nan") if last is None else last

    @property
    def heldout_reward(self) -> float:
        last = self.curve[-1].reward if self.curve else None
        return float("nan") if last is None else last

    @property
    def reward_per_1k(self) -> float:
        """The rise of the mean reward from the first tenth of the steps to the last, per thousand samples."""
        tenth = max(1, len(self.rewards) // 10)
        rise = float(np.mean(self.rewards[-tenth:]) - np.mean(self.rewards[:tenth])) if self.rewards else 0.0
        return 1000 * rise / max(self.samples, 1)


class Comparison:
    """A comparison in its folder. ``on_progress`` gets a line for each run that starts."""

    def __init__(self, folder: Path, request: ComparisonRequest, run: Runner | None = None) -> None:
        self.folder, self.request = folder, request
        self.run = run or run_in_process
        self.on_progress: Callable[[str], None] = lambda line: None
        self.recipe = parse_recipe(tomllib.loads(request.recipe))
        for algorithm in request.algorithms:  # all are checked before any is run
            with_algorithm(self.recipe, algorithm, self._sets(algorithm))

    @classmethod
    def open(cls, folder: Path, request: ComparisonRequest, run: Runner | None = None) -> Comparison:
        """A new comparison, or the one in the folder if it was started with the same options."""
        comparison = cls(folder, request, run)
        file = folder / COMPARISON_REQUEST
        if file.is_file():
            _check_same_request(folder, json.loads(file.read_text()), json.loads(json.dumps(asdict(request))))
        elif folder.exists() and any(folder.iterdir()):
            raise RunError(str(folder), "not empty", because="a comparison needs its own folder", fix="name another with --out")
        write_file_atomically(file, json.dumps(asdict(request), indent=2).encode())
        return comparison

    def run_all(self) -> list[ArmResult]:
        """Runs what has not been run yet. Returns the results of all runs, algorithm by algorithm."""
        start = self._train_start()
        results: dict[tuple[str, int], ArmResult] = {}
        first = self.request.algorithms[0]
        arms = [(a, s) for a in self.request.algorithms for s in self.request.seeds]
        for number, (algorithm, seed) in enumerate(arms, start=1):
            budget = results.get((first, seed)) if algorithm != first else None
            recipe = self._arm_recipe(algorithm, seed, start, budget)
            self.on_progress(f"{algorithm}, seed {seed} ({number} of {len(arms)})")
            results[algorithm, seed] = self._train_arm(f"{algorithm}-{seed}", recipe)
        return list(results.values())

    def _train_start(self) -> Path | None:
        """The model that every run starts from: that of the earlier stages, trained once; None if there are none."""
        base = base_stage(self.recipe)
        before = self.recipe.stages[: self.recipe.stages.index(base)]
        if not before:
            return None
        self.on_progress(f"the shared start: {', '.join(s.label for s in before)}")
        recipe = self.recipe.model_copy(update={"stages": before})
        self._train(self.folder / "start", recipe)
        return RunFolder(self.folder / "start").model

    def _arm_recipe(self, algorithm: str, seed: int, start: Path | None, budget: ArmResult | None) -> Recipe:
        """The recipe of one algorithm and seed, with the tokens or seconds of ``budget`` as its limit."""
        recipe = with_algorithm(self.recipe, algorithm, self._sets(algorithm))
        by_tokens = self.request.budget == "tokens"
        tokens = None if budget is None or not by_tokens else round(budget.tokens)
        seconds = None if budget is None or by_tokens else budget.seconds
        recipe = with_budget(recipe, tokens=tokens, seconds=seconds)
        # The start's model includes the adapter that it was trained from.
        source = {} if start is None else {"source": str(start.resolve()), "adapter": None}
        model = recipe.model.model_copy(update=source)
        return recipe.model_copy(update={"name": algorithm, "seed": seed, "stages": recipe.stages[-1:], "model": model})

    def _sets(self, algorithm: str) -> list[str]:
        """The overrides of this algorithm: those that start with its name."""
        return [line for line in self.request.sets if line.split(".", 1)[0] == algorithm]

    def _train(self, folder: Path, recipe: Recipe) -> None:
        if is_finished(folder):
            return
        if folder.exists() and not (folder / STATE).exists():
            shutil.rmtree(folder)  # a run that was killed before it had written its state
        file = self.folder / "recipes" / f"{folder.name}.toml"
        write_file_atomically(file, dump_recipe(recipe).encode())
        self.run(file, folder)

    def _train_arm(self, name: str, recipe: Recipe) -> ArmResult:
        folder = self.folder / "runs" / name
        self._train(folder, recipe)
        stage = recipe.rollout_stages[-1]
        return read_result(RunFolder(folder), stage, recipe.name, recipe.seed, self._start_accuracy())

    def _start_accuracy(self) -> float | None:
        """The shared start's accuracy; None if every run starts from the recipe's model."""
        if not (self.folder / "start" / STATE).exists():
            return None
        with RunReader.open(self.folder / "start") as store:
            evals = store.evals()
        return evals[-1].accuracy if evals else None


def _check_same_request(folder: Path, stored: dict[str, Any], request: dict[str, Any]) -> None:
    for key, value in stored.items():
        if request.get(key) != value:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            raise RunError(
                str(folder),
                "a comparison of another recipe" if key == "recipe" else f"a comparison with other {key}: {shown}",
                because="a comparison can be continued only with the same options",
                fix="use the same options, or name another folder with --out",
            )


def is_finished(folder: Path) -> bool:
    return (folder / STATE).exists() and RunFolder(folder).state().current_status == "finished"


def run_in_process(recipe: Path, folder: Path) -> None:
    """`oncurve train` in a separate process; its output goes to a file next to the recipe."""
    arguments = ["--resume", str(folder)] if (folder / STATE).exists() else [str(recipe), "--out", str(folder)]
    log = recipe.with_suffix(".log")
    with log.open("ab") as file:
        child = subprocess.Popen([sys.executable, "-m", "oncurve", "train", *arguments], stdout=file, stderr=subprocess.STDOUT)
        try:
            code = child.wait()
        except KeyboardInterrupt:
            code = child.wait()  # it got the signal too, and finishes and saves its step
            raise ComparisonStopped(folder) from None
    if code in (130, 143):
        raise ComparisonStopped(folder)
    if code:
        lines = log.read_text(errors="replace").strip().splitlines()[-6:]
        raise RunError(f"run {folder.name}", f"failed with exit code {code}", because="\n    ".join(lines), fix=f"see {log}")


class ComparisonStopped(RunError):
    """The user stopped a comparison during a run."""

    exit_code = 130

    def __init__(self, folder: Path) -> None:
        fix = "repeat the command: it continues from there"
        super().__init__(f"run {folder.name}", "stopped by you", because="the step was finished and saved", fix=fix)


def read_result(run: RunFolder, stage: RolloutStage, algorithm: str, seed: int, before: float | None) -> ArmResult:
    """The result of a finished run, from its database and the tensor sizes of its last checkpoint. ``before`` is the accuracy
    of its start, if known."""
    with RunReader.open(run.path) as store:

        def column(name: str) -> list[float]:
            return [value for _, value in store.metric(name, stage.label)]

        tokens, cpu, rewards, tries = (column(n) for n in ("tokens", "cpu_seconds", "reward", "line_search_tries"))
        phases = [column(f"seconds/{phase}") for phase in ("sample", "score", "grade", "update")]
        seconds = [sum(of_step) for of_step in zip(*phases, strict=True)]
        memory = column("memory_mib")
        evals = store.evals(stage.label)
    per_step = stage.prompts_per_step * stage.group_size
    curve = tuple(
        Point(e.step, e.step * per_step, sum(tokens[: e.step]), sum(seconds[: e.step]), e.accuracy, e.reward) for e in evals
    )
    if before is not None:
        curve = (Point(0, 0, 0.0, 0.0, before), *curve)
    passes = learning_passes(stage, float(np.mean(tries)) if tries else 1.0)
    held, trained = count_parameters(run)
    return ArmResult(
        algorithm=algorithm,
        seed=seed,
        steps=len(rewards),
        samples=len(rewards) * per_step,
        tokens=sum(tokens),
        seconds=sum(seconds),
        cpu_seconds=sum(cpu),
        memory_mib=max(memory, default=float("nan")),
        held=held,
        trained=trained,
        forward=passes.forward,
        backward=passes.backward,
        rewards=tuple(rewards),
        curve=curve,
    )


def count_parameters(run: RunFolder) -> tuple[int, int]:
    """(parameters held, parameters trained): of the policy, the reference and the critic in the last checkpoint.

    Those with moments are trained; if there are no moments (trpo), the policy's are.
    """
    path = list_checkpoints(run.checkpoints)[-1].path
    held = sum(_count_elements(path / f"{part}.safetensors") for part in ("model", "reference", "critic"))
    moments = sum(_count_elements(path / f"{part}.safetensors", "/exp_avg") for part in ("optimiser", "critic_optimiser"))
    return held, moments or _count_elements(path / "model.safetensors")


def _count_elements(file: Path, ending: str = "") -> int:
    """Elements of the tensors of a safetensors file, by its header: no tensor is read."""
    if not file.is_file():
        return 0
    with file.open("rb") as data:
        header: dict[str, Any] = json.loads(data.read(int.from_bytes(data.read(8), "little")))
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__" and name.endswith(ending)]
    return int(sum(np.prod(shape) if shape else 1 for shape in shapes))


def request_of(recipe: Recipe, algorithms: str, seeds: int, budget: str, sets: Sequence[str]) -> ComparisonRequest:
    """The options of the command line, checked."""
    names = tuple(dict.fromkeys(name.strip() for name in algorithms.split(",") if name.strip()))
    if not names:
        raise RecipeError("--algorithms", "none", because="there is nothing to compare", fix="name some: grpo,ppo,rloo")
    if budget not in ("tokens", "time"):
        raise RecipeError(
            "--budget", budget, because="runs are compared at equal tokens or equal time", fix="use tokens or time"
        )
    numbers = tuple(range(recipe.seed, recipe.seed + seeds))
    return ComparisonRequest(dump_recipe(recipe), names, numbers, budget, tuple(sets))  # type: ignore[arg-type]
