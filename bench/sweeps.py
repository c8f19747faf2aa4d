"""The sweeps of docs/compare.md: what group size does to the baseline, and to learning; normalisation; updates per step.

    python bench/sweeps.py start OUT                  # once: the sft stage that all share
    python bench/sweeps.py baseline OUT               # bias and variance of the baseline, without training
    python bench/sweeps.py learn OUT NAME [SEEDS]     # NAME: one of group_size, scale, updates

Each writes OUT/NAME.json and prints a Markdown table. Runs that are finished are not run again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oncurve.recipe.load import load_recipe
from oncurve.recipe.sampled import Sampled
from oncurve.recipe.schema import Recipe
from oncurve.runs.folder import STATE, RunFolder
from oncurve.train.compare import Outcome, outcome_of

RECIPE = "recipes/backwards.toml"
SIZES = (2, 4, 8, 16, 64)
SAMPLES = 128
"""Completions of a step in every run: with a larger group there are fewer prompts."""
SWEEPS: dict[str, dict[str, list[str]]] = {
    "group_size": {f"G = {g}": [f"grpo.group_size={g}", f"grpo.prompts_per_step={SAMPLES // g}"] for g in SIZES},
    "scale": {name: [f"grpo.advantage.scale={name}"] for name in ("group", "batch", "none")},
    "updates": {f"μ = {n}": [f"grpo.updates_per_step={n}"] for n in (1, 2, 4)},
}


def start(out: Path) -> None:
    """The stages before the last, once."""
    from oncurve.train.start import begin

    recipe = load_recipe(RECIPE)
    if not (out / "start" / "model").is_dir():
        begin(recipe.model_copy(update={"stages": recipe.stages[:-1]}), out=out / "start")


def from_start(out: Path, sets: Sequence[str]) -> Recipe:
    recipe = load_recipe(RECIPE, list(sets))
    model = recipe.model.model_copy(update={"source": str((out / "start" / "model").resolve())})
    return recipe.model_copy(update={"stages": recipe.stages[-1:], "model": model})


def learn(out: Path, name: str, seeds: int) -> None:
    """Every variant of a sweep with every seed, from the shared start."""
    found: dict[str, list[Outcome]] = {}
    for seed in range(seeds):
        for label, sets in SWEEPS[name].items():
            recipe = from_start(out, [f"seed={seed}", *sets])
            folder = out / name / f"{label.replace(' ', '')}-{seed}"
            found.setdefault(label, []).append(_outcome(recipe, folder, label))
            _write(out / f"{name}.json", {key: [_told(o) for o in runs] for key, runs in found.items()})
    print(table(found))


def _outcome(recipe: Recipe, folder: Path, label: str) -> Outcome:
    from oncurve.train.start import begin, resume

    if not (folder / STATE).exists():
        begin(recipe, out=folder)
    elif RunFolder(folder).state().shown != "finished":
        resume(RunFolder(folder))
    stage = recipe.stages[-1]
    assert isinstance(stage, Sampled)
    return outcome_of(RunFolder(folder), stage, label, recipe.seed)


def _told(outcome: Outcome) -> dict[str, Any]:
    return {
        "seed": outcome.seed,
        "accuracy": outcome.accuracy,
        "best": max(p.accuracy for p in outcome.curve),
        "reward_per_1k": outcome.reward_per_1k,
        "cpu_seconds": outcome.cpu_seconds,
        "seconds": outcome.seconds,
        "last_reward": float(np.mean(outcome.rewards[-10:])),
    }


def table(found: dict[str, list[Outcome]]) -> str:
    lines = ["| | held-out accuracy | reward, last 10 steps | CPU seconds |", "|---|---|---|---|"]
    for label, runs in found.items():
        rows = [_told(o) for o in runs]
        told = (_spread([100 * r["accuracy"] for r in rows], 1), _spread([r["last_reward"] for r in rows], 3))
        lines.append(f"| {label} | {told[0]} % | {told[1]} | {np.mean([r['cpu_seconds'] for r in rows]):.0f} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], digits: int) -> str:
    shown = f"{np.mean(values):.{digits}f}"
    return f"{shown} ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else shown


def baseline(out: Path, prompts: int = 32, samples: int = 512) -> None:
    """Rewards of many completions of each prompt, once; every group size is then a way to cut them up."""
    rewards_PS = _rewards(out, prompts, samples)
    rows = {f"G = {g}": measure(rewards_PS, g) for g in SIZES}
    _write(out / "baseline.json", rows)
    heads = list(next(iter(rows.values())))
    print("| |" + " | ".join(heads) + " |\n|" + "---|" * (len(heads) + 1))
    for label, row in rows.items():
        print(f"| {label} | " + " | ".join(f"{value:.4f}" for value in row.values()) + " |")


def measure(rewards_PS: np.ndarray, size: int) -> dict[str, float]:
    """Bias and variance of the group's mean as an estimate of the expected reward, and what becomes of the advantage.

    Half of a prompt's samples tell its expected reward, the other half are cut into groups: were they one, the bias would be 0
    by arithmetic. The error of that half, σ²/S, is taken off the variances. Slope: how much of a completion's own deviation
    r − E[r] its advantage keeps, by regression over all completions.
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


def _rewards(out: Path, prompts: int, samples: int) -> np.ndarray:
    """[prompts, samples] total rewards of the shared start, kept in a file."""
    file = out / "rewards.npy"
    if file.is_file():
        return np.asarray(np.load(file))
    import torch

    from oncurve.engines.native import Draws, NativeEngine
    from oncurve.models.load import load_policy
    from oncurve.tasks.order import prompts_for_step
    from oncurve.train.start import rewards_for, task_for

    recipe = from_start(out, ())
    stage = recipe.stages[-1]
    assert isinstance(stage, Sampled)
    torch.set_num_threads(1)
    engine = NativeEngine(load_policy(recipe.model, alphabet=None, seed=0), recipe.engine)
    asked = prompts_for_step(task_for(recipe, stage), 0, 0, prompts)
    groups = engine.sample(asked, samples, stage.sampling, Draws(0, 1))
    rewards = np.array([[s.total or 0.0 for s in g.scored] for g in rewards_for(recipe, stage).score(groups)])
    np.save(file, rewards)
    return rewards


def _write(file: Path, data: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data, indent=2, ensure_ascii=False), encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    verb, out, *rest = arguments
    if verb == "start":
        start(Path(out))
    elif verb == "baseline":
        baseline(Path(out))
    else:
        learn(Path(out), rest[0], int(rest[1]) if len(rest) > 1 else 2)


if __name__ == "__main__":
    main(sys.argv[1:])
