"""`oncurve compare`: one recipe under several algorithms, from one start, on the same prompts, with the same budget.

A comparison is a folder: `request.json` (what was asked), `start/` (the run of the stages before, once for all), `runs/` (one
for each algorithm and seed), `results.json`, `table.md` and the plots. Asked again it goes on where it was: finished runs stay,
an unfinished one is resumed. Each run is a process of its own, so that its peak memory is its own.

The first algorithm takes the recipe's steps; what it sampled (or how long it took) is the budget of the others, seed by seed.
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
from oncurve.runs.folder import STATE, RunFolder

Budget = Literal["tokens", "time"]
Runner = Callable[[Path, Path], None]
"""(recipe file, run folder): trains the recipe there, or goes on with what is there."""


@dataclass(frozen=True, slots=True)
class ComparisonRequest:
    """What was asked. The recipe is kept as text, fully written out, so that a changed file is noticed."""

    recipe: str
    algorithms: tuple[str, ...]
    seeds: tuple[int, ...]
    budget: Budget
    sets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Point:
    """Held-out accuracy after so many samples, tokens and seconds of training; None where no rule says what is right, and then
    the held-out reward is the measure."""

    step: int
    samples: int
    tokens: float
    seconds: float
    accuracy: float | None
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class ArmResult:
    """What one run gave. ``rewards`` is the mean reward of each step, ``cpu_seconds`` what its process computed."""

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
        """NaN where there is none."""
        last = self.curve[-1].accuracy if self.curve else None
        return float("nan") if last is None else last

    @property
    def heldout_reward(self) -> float:
        last = self.curve[-1].reward if self.curve else None
        return float("nan") if last is None else last

    @property
    def reward_per_1k(self) -> float:
        """How far the mean reward rose from the first tenth of the steps to the last, for every thousand samples."""
        tenth = max(1, len(self.rewards) // 10)
        rise = float(np.mean(self.rewards[-tenth:]) - np.mean(self.rewards[:tenth])) if self.rewards else 0.0
        return 1000 * rise / max(self.samples, 1)


class Comparison:
    """A comparison in its folder. ``tell`` hears of each run as it begins and ends."""

    def __init__(self, folder: Path, request: ComparisonRequest, run: Runner | None = None) -> None:
        self.folder, self.request = folder, request
        self.run = run or run_in_process
        self.tell: Callable[[str], None] = lambda line: None
        self.recipe = parse_recipe(tomllib.loads(request.recipe))
        for algorithm in request.algorithms:  # every one is refused before any is run
            with_algorithm(self.recipe, algorithm, self._sets(algorithm))

    @classmethod
    def ask(cls, folder: Path, request: ComparisonRequest, run: Runner | None = None) -> Comparison:
        """A new comparison, or the one that lies there if it was asked the same."""
        made = cls(folder, request, run)
        file = folder / "request.json"
        if file.is_file():
            _refuse_another(folder, json.loads(file.read_text()), json.loads(json.dumps(asdict(request))))
        elif folder.exists() and any(folder.iterdir()):
            raise RunError(
                str(folder), "not empty", because="a comparison has a folder of its own", fix="name another by --out"
            )
        write_file_atomically(file, json.dumps(asdict(request), indent=2).encode())
        return made

    def go(self) -> list[ArmResult]:
        """Runs what is not yet run, and gives the outcome of all, algorithm by algorithm."""
        start = self._start()
        outcomes: dict[tuple[str, int], ArmResult] = {}
        first = self.request.algorithms[0]
        places = [(a, s) for a in self.request.algorithms for s in self.request.seeds]
        for number, (algorithm, seed) in enumerate(places, start=1):
            spent = outcomes.get((first, seed)) if algorithm != first else None
            recipe = self._arm(algorithm, seed, start, spent)
            self.tell(f"{algorithm}, seed {seed} ({number} of {len(places)})")
            outcomes[algorithm, seed] = self._finished(f"{algorithm}-{seed}", recipe)
        return list(outcomes.values())

    def _start(self) -> Path | None:
        """The model that every run begins with: that of the stages before, trained once; None where there are none."""
        base = base_stage(self.recipe)
        before = self.recipe.stages[: self.recipe.stages.index(base)]
        if not before:
            return None
        self.tell(f"the start that all share: {', '.join(s.label for s in before)}")
        recipe = self.recipe.model_copy(update={"stages": before})
        self._train(self.folder / "start", recipe)
        return RunFolder(self.folder / "start").model

    def _arm(self, algorithm: str, seed: int, start: Path | None, spent: ArmResult | None) -> Recipe:
        recipe = with_algorithm(self.recipe, algorithm, self._sets(algorithm))
        by_tokens = self.request.budget == "tokens"
        tokens = None if spent is None or not by_tokens else round(spent.tokens)
        seconds = None if spent is None or by_tokens else spent.seconds
        recipe = with_budget(recipe, tokens=tokens, seconds=seconds)
        # The start has become whole, with the adapter that it began from.
        began = {} if start is None else {"source": str(start.resolve()), "adapter": None}
        model = recipe.model.model_copy(update=began)
        return recipe.model_copy(update={"name": algorithm, "seed": seed, "stages": recipe.stages[-1:], "model": model})

    def _sets(self, algorithm: str) -> list[str]:
        """The changes that are this algorithm's: those that begin with its name."""
        return [line for line in self.request.sets if line.split(".", 1)[0] == algorithm]

    def _train(self, folder: Path, recipe: Recipe) -> None:
        if is_finished(folder):
            return
        if folder.exists() and not (folder / STATE).exists():
            shutil.rmtree(folder)  # a run that was killed before it knew its own name
        file = self.folder / "recipes" / f"{folder.name}.toml"
        write_file_atomically(file, dump_recipe(recipe).encode())
        self.run(file, folder)

    def _finished(self, name: str, recipe: Recipe) -> ArmResult:
        folder = self.folder / "runs" / name
        self._train(folder, recipe)
        stage = recipe.stages[-1]
        assert isinstance(stage, RolloutStage)
        return outcome_of(RunFolder(folder), stage, recipe.name, recipe.seed, self._start_accuracy())

    def _start_accuracy(self) -> float | None:
        """What the shared start was measured at; None where every run starts from the model that the recipe names."""
        if not (self.folder / "start" / STATE).exists():
            return None
        with RunReader.open(self.folder / "start") as store:
            evals = store.evals()
        return evals[-1].accuracy if evals else None


def _refuse_another(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for key, was in before.items():
        if now.get(key) != was:
            told = ", ".join(map(str, was)) if isinstance(was, list) else was
            raise RunError(
                str(folder),
                "a comparison of another recipe" if key == "recipe" else f"a comparison with other {key}: {told}",
                because="it goes on where it was only if it is asked the same",
                fix="ask the same, or name another folder by --out",
            )


def is_finished(folder: Path) -> bool:
    return (folder / STATE).exists() and RunFolder(folder).state().current_status == "finished"


def run_in_process(recipe: Path, folder: Path) -> None:
    """`oncurve train` in a process of its own; what it prints goes into a file beside the recipe."""
    going_on = (folder / STATE).exists()
    how = ["--resume", str(folder)] if going_on else [str(recipe), "--out", str(folder)]
    log = recipe.with_suffix(".log")
    with log.open("ab") as file:
        child = subprocess.Popen([sys.executable, "-m", "oncurve", "train", *how], stdout=file, stderr=subprocess.STDOUT)
        try:
            code = child.wait()
        except KeyboardInterrupt:
            code = child.wait()  # it got the signal too: it finishes its step and saves
            raise ComparisonStopped(folder) from None
    if code in (130, 143):
        raise ComparisonStopped(folder)
    if code:
        lines = log.read_text(errors="replace").strip().splitlines()[-6:]
        raise RunError(f"run {folder.name}", f"failed with code {code}", because="\n    ".join(lines), fix=f"see {log}")


class ComparisonStopped(RunError):
    """The user stopped a comparison amid a run."""

    exit_code = 130

    def __init__(self, folder: Path) -> None:
        fix = "ask the same again: it goes on where it was"
        super().__init__(f"run {folder.name}", "stopped by you", because="the step was finished and saved", fix=fix)


def outcome_of(run: RunFolder, stage: RolloutStage, algorithm: str, seed: int, before: float | None) -> ArmResult:
    """Read from the run's folder alone: its database, and the sizes of what its last checkpoint holds. ``before`` is the
    accuracy that it started from, where that is known."""
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
    held, trained = sizes(run)
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


def sizes(run: RunFolder) -> tuple[int, int]:
    """(parameters held, parameters trained): of the policy, the reference and the critic in the last checkpoint.

    Trained are those that have moments; where nothing has (trpo keeps none), the policy's.
    """
    path = list_checkpoints(run.checkpoints)[-1].path
    held = sum(_count(path / f"{part}.safetensors") for part in ("model", "reference", "critic"))
    moments = sum(_count(path / f"{part}.safetensors", "/exp_avg") for part in ("optimiser", "critic_optimiser"))
    return held, moments or _count(path / "model.safetensors")


def _count(file: Path, ending: str = "") -> int:
    """Numbers in a safetensors file, by its header: no tensor is read."""
    if not file.is_file():
        return 0
    with file.open("rb") as data:
        header: dict[str, Any] = json.loads(data.read(int.from_bytes(data.read(8), "little")))
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__" and name.endswith(ending)]
    return int(sum(np.prod(shape) if shape else 1 for shape in shapes))


def request_of(recipe: Recipe, algorithms: str, seeds: int, budget: str, sets: Sequence[str]) -> ComparisonRequest:
    """The words of the command line, checked."""
    names = tuple(dict.fromkeys(name.strip() for name in algorithms.split(",") if name.strip()))
    if not names:
        raise RecipeError("--algorithms", "none", because="there is nothing to compare", fix="name some: grpo,ppo,rloo")
    if budget not in ("tokens", "time"):
        raise RecipeError(
            "--budget", budget, because="runs are compared at equal tokens or equal time", fix="use tokens or time"
        )
    numbers = tuple(range(recipe.seed, recipe.seed + seeds))
    return ComparisonRequest(dump_recipe(recipe), names, numbers, budget, tuple(sets))  # type: ignore[arg-type]
