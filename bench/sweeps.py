"""The measurements of docs/compare.md: five algorithms, group sizes, normalisation, updates per step.

    python bench/sweeps.py OUT                # everything, two processes side by side; about 20 minutes on two idle cores
    python bench/sweeps.py OUT --only scale   # one part: compare, baseline, group_size, scale or updates
    python bench/sweeps.py OUT --page         # write the results in OUT to docs/compare.md, docs/images and bench/results

If it is stopped, the same command resumes it. All runs start from one sft stage. `compare` is `oncurve compare` itself. Its
grpo runs are also the middle of every sweep (G = 8, divided by the group's std, one update), and every other run of a sweep
gets the same number of sampled tokens as the grpo run with its seed. Each run is a separate process with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oncurve.operations.compare import ArmResult, Point, is_finished, read_result, run_in_process
from oncurve.recipe.load import dump_recipe, load_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import RolloutStage
from oncurve.recipe.variants import with_algorithm, with_budget
from oncurve.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "recipes/compare.toml"
ALGORITHMS = "grpo,ppo,rloo,reinforce,trpo"
CURVATURE = "trpo.cg_iterations=5"
"""Half of the usual products with the Fisher matrix: a run of trpo would else take as long as all others together."""
SEEDS = 3
SIZES = (2, 4, 8, 16, 64)
SAMPLES = 128
"""Completions of a step in every run: with a larger group there are fewer prompts."""
SWEEPS: dict[str, dict[str, list[str]]] = {
    "group_size": {
        f"G = {g}, {SAMPLES // g} prompts": [f"grpo.group_size={g}", f"grpo.prompts_per_step={SAMPLES // g}"] for g in SIZES
    },
    "scale": {f"`{name}`": [f"grpo.advantage.scale={name}"] for name in ("group", "batch", "none")},
    "updates": {f"μ = {n}": [f"grpo.updates_per_step={n}"] for n in (1, 2, 4)},
}
MIDDLE = {"group_size": "G = 8, 16 prompts", "scale": "`group`", "updates": "μ = 1"}
"""The variant of each sweep that the comparison has run already."""


@dataclass(frozen=True)
class SweepRequest:
    """Where it goes, of which recipe, with how many seeds."""

    out: Path
    recipe: str
    seeds: int


def compare(request: SweepRequest) -> None:
    """Run the command as a user would."""
    options = [
        "--algorithms",
        ALGORITHMS,
        "--seeds",
        str(request.seeds),
        "--set",
        CURVATURE,
        "--out",
        str(request.out / "compare"),
    ]
    subprocess.run([sys.executable, "-m", "oncurve", "compare", request.recipe, *options], cwd=ROOT, check=True)


def sweep(request: SweepRequest, name: str) -> None:
    """Train every variant with every seed from the shared start, with the token budget of the middle run."""
    results: dict[str, list[ArmResult]] = {label: [] for label in SWEEPS[name]}
    for seed in range(request.seeds):
        middle = _middle(request, seed)
        for label, sets in SWEEPS[name].items():
            if label == MIDDLE[name]:
                results[label].append(middle)
                continue
            recipe = variant(request, label, sets, seed, round(middle.tokens))
            folder = request.out / name / f"{_plain(label)}-{seed}"
            _train(folder, recipe)
            results[label].append(_outcome(folder, recipe, label, middle))
            print(f"{name}: {label}, seed {seed}: {100 * results[label][-1].accuracy:.1f} %", flush=True)
            _write(
                request.out / f"{name}.json", {key: [outcome_data(o) for o in runs] for key, runs in results.items() if runs}
            )


def variant(request: SweepRequest, label: str, sets: Sequence[str], seed: int, tokens: int) -> Recipe:
    """The recipe's last stage from the shared start, with one change, until it has sampled the given number of tokens."""
    recipe = with_budget(with_algorithm(load_recipe(str(ROOT / request.recipe), list(sets)), "grpo"), tokens=tokens)
    model = recipe.model.model_copy(update={"source": str(_start(request).resolve())})
    return recipe.model_copy(update={"name": _plain(label), "seed": seed, "stages": recipe.stages[-1:], "model": model})


def _plain(label: str) -> str:
    return "".join(c for c in label.partition(",")[0].replace("μ", "updates") if c.isalnum())


def _train(folder: Path, recipe: Recipe) -> None:
    if is_finished(folder):
        return
    file = folder.with_suffix(".toml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump_recipe(recipe))
    run_in_process(file, folder)


def _outcome(folder: Path, recipe: Recipe, label: str, middle: ArmResult) -> ArmResult:
    stage = recipe.stages[-1]
    assert isinstance(stage, RolloutStage)
    return read_result(RunFolder(folder), stage, label, recipe.seed, middle.curve[0].accuracy)


def _start(request: SweepRequest) -> Path:
    """The model that all runs start from; waits until the comparison has created it."""
    _wait(request.out / "compare" / "start")
    return RunFolder(request.out / "compare" / "start").model


def _middle(request: SweepRequest, seed: int) -> ArmResult:
    """The comparison's grpo run with this seed; waits for it."""
    folder = request.out / "compare" / "runs" / f"grpo-{seed}"
    _wait(folder)
    recipe = load_recipe(str(RunFolder(folder).recipe))
    stage = recipe.stages[-1]
    assert isinstance(stage, RolloutStage)
    return read_result(RunFolder(folder), stage, "grpo", seed, _start_accuracy(request))


def _start_accuracy(request: SweepRequest) -> float:
    from oncurve.runs.database.reader import RunReader

    with RunReader.open(request.out / "compare" / "start") as store:
        accuracy = store.evals()[-1].accuracy
    assert accuracy is not None
    return accuracy


def _wait(folder: Path) -> None:
    while not is_finished(folder):
        time.sleep(0.5)


def outcome_data(outcome: ArmResult) -> dict[str, Any]:
    return asdict(outcome) | {"accuracy": outcome.accuracy, "last_reward": float(np.mean(outcome.rewards[-10:]))}


def baseline(request: SweepRequest, prompts: int = 32, samples: int = 512) -> None:
    """Sample many completions of each prompt once; every group size then splits the same rewards."""
    if not (request.out / "baseline.json").is_file():
        rewards_PS = _rewards(request, prompts, samples)
        _write(request.out / "baseline.json", {f"G = {g}": measure(rewards_PS, g) for g in SIZES})


def measure(rewards_PS: np.ndarray, size: int) -> dict[str, float]:
    """Bias and variance of the group's mean as an estimate of the expected reward, and their effect on the advantage.

    Half of a prompt's samples estimate its expected reward, and the other half are split into groups. With the same samples
    for both, the bias would be 0 by construction. The error of the first half, σ²/S, is subtracted from the variances. Slope:
    how much of a completion's own deviation r − E[r] its advantage keeps, by regression over all completions.
    """
    P, S = rewards_PS.shape[0], rewards_PS.shape[1] // 2
    true_P, variance_P = rewards_PS[:, :S].mean(1), rewards_PS.var(1, ddof=1)
    groups_PNG = rewards_PS[:, S : 2 * S - S % size].reshape(P, -1, size)
    mean_PN, std_PN = groups_PNG.mean(2), groups_PNG.std(2, ddof=1)
    others_PNG = (groups_PNG.sum(2, keepdims=True) - groups_PNG) / (size - 1)
    deviation = groups_PNG - true_P[:, None, None]
    error = float(variance_P.mean() / S)

    def slope(advantage: np.ndarray) -> float:
        return float((advantage * deviation).sum() / ((deviation**2).sum() - error * deviation.size))

    return {
        "bias": float((mean_PN - true_P[:, None]).mean()),
        "its standard error": float(np.sqrt(2 * variance_P.mean() / (P * S))),
        "variance": float(((mean_PN - true_P[:, None]) ** 2).mean()) - error,
        "σ²/G": float(variance_P.mean() / size),
        "variance, leave one out": float(((others_PNG - true_P[:, None, None]) ** 2).mean()) - error,
        "slope": slope(groups_PNG - mean_PN[..., None]),
        "(G − 1)/G": (size - 1) / size,
        "slope, leave one out": slope(groups_PNG - others_PNG),
        "groups without signal": float((std_PN < 1e-9).mean()),
    }


def _rewards(request: SweepRequest, prompts: int, samples: int) -> np.ndarray:
    """[prompts, samples] total rewards of the shared start."""
    import torch

    from oncurve.engines.base import SampleKey
    from oncurve.engines.native.engine import NativeEngine
    from oncurve.models.loading.load import load_policy
    from oncurve.tasks.prompt_order import prompts_for_step
    from oncurve.training.start import rewards_for, task_for

    recipe = variant(request, "baseline", (), 0, 1)
    stage = recipe.stages[-1]
    assert isinstance(stage, RolloutStage)
    torch.set_num_threads(1)
    engine = NativeEngine(load_policy(recipe.model, alphabet=None, seed=0), recipe.engine)
    prompted = prompts_for_step(task_for(recipe, stage), 0, 0, prompts)
    groups = engine.sample(prompted, samples, stage.sampling, SampleKey(0, 1))
    return np.array([[s.total or 0.0 for s in g.scored] for g in rewards_for(recipe, stage).score(groups)])


def _write(file: Path, data: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(".writing")
    aside.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
    aside.replace(file)


PARTS = ("compare", "baseline", *SWEEPS)


def everything(request: SweepRequest) -> None:
    """Run the comparison on one core and the sweeps on the other."""
    begun = time.perf_counter()
    own = [sys.executable, __file__, str(request.out), "--recipe", request.recipe, "--seeds", str(request.seeds)]
    first = subprocess.Popen([*own, "--only", "compare"])
    codes = [subprocess.run([*own, "--only", part], check=False).returncode for part in PARTS[1:]]
    if first.wait() or any(codes):
        raise SystemExit("a part failed, see above; the same command resumes")
    _write(request.out / "machine.json", machine(time.perf_counter() - begun))


def machine(seconds: float) -> dict[str, Any]:
    from importlib import metadata

    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    facts = {"system": platform.system(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    return {**facts, "python": platform.python_version(), **versions, "minutes": round(seconds / 60, 1)}


def outcomes_in(file: Path) -> dict[str, list[ArmResult]]:
    """The stored runs of a part, by algorithm or variant."""
    data = json.loads(file.read_text(encoding="utf-8"))
    rows = [(row["algorithm"], row) for row in data] if isinstance(data, list) else list(_flat(data))
    outcomes: dict[str, list[ArmResult]] = {}
    for label, row in rows:
        fields = {name: row[name] for name in ArmResult.__dataclass_fields__}
        fields |= {"algorithm": label, "curve": tuple(Point(**p) for p in row["curve"]), "rewards": tuple(row["rewards"])}
        outcomes.setdefault(label, []).append(ArmResult(**fields))
    return outcomes


def _flat(data: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((label, row) for label, rows in data.items() for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--page", action="store_true", help="write docs/compare.md from the existing results")
    parser.add_argument("--recipe", default=RECIPE, help="another recipe, to check that the script works")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    args = parser.parse_args()
    request = SweepRequest(args.out, args.recipe, args.seeds)
    if args.page:
        from sweeps_page import write_page

        write_page(request.out)
    elif args.only == "compare":
        compare(request)
    elif args.only == "baseline":
        baseline(request)
    elif args.only:
        sweep(request, args.only)
    else:
        everything(request)


if __name__ == "__main__":
    main()
