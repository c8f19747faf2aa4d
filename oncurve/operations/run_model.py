"""A model to ask, measure or export: a run's latest weights, a folder in Hugging Face format, or a hub id."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from oncurve import trust
from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import RecipeError, RewardError, RunError
from oncurve.models.loading.load import choose_device, load_policy
from oncurve.models.policy import Policy
from oncurve.recipe.load import find_recipe, load_recipe, parse_recipe, read_toml
from oncurve.recipe.schema.model import Model
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Evaluation
from oncurve.recipe.schema.stages import RolloutStage
from oncurve.recipe.validate import is_from_python, reject_python_only
from oncurve.records import EvalReport
from oncurve.runs.atomic_files import write_folder_atomically
from oncurve.runs.checkpoints import files
from oncurve.runs.checkpoints.listing import list_checkpoints
from oncurve.runs.folder import RunFolder
from oncurve.tasks.registry import TASKS
from oncurve.training.evaluate import default_answer_limit, evaluate
from oncurve.training.start import rewards_for, task_for
from oncurve.training.trainer import load_weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A policy, what it is called, and the run that it came from, if it did."""

    policy: Policy
    name: str
    run: RunFolder | None = None


def load_model(target: str, runs_dir: Path, model: Model | None = None) -> LoadedModel:
    """``model`` says in what precision and on which device a plain model is loaded; a run's recipe says it for a run. Where
    nothing says it, bfloat16 on a GPU and float32 on a CPU.

    RUN@STAGE-STEP is a checkpoint of a run.
    """
    run = RunFolder.find(target, runs_dir)
    if run is not None:
        return LoadedModel(load_run(run), run.name, run)
    name, sign, place = target.rpartition("@")
    of = RunFolder.find(name, runs_dir) if sign else None
    if of is not None:
        return LoadedModel(load_run(of, place), target, of)
    if sign and Path(name).exists():
        raise RunError(
            name, "not a run", because=f"only a run has a checkpoint {place}", fix="`oncurve runs` lists the runs there are"
        )
    plain = model or Model(dtype="bfloat16" if choose_device("auto").type == "cuda" else "float32")
    if target == "tiny":
        raise RunError(
            target,
            "neither a run nor a model folder",
            because="the built-in model knows nothing before a run",
            fix="name a run",
        )
    return LoadedModel(load_policy(plain.at(target), alphabet=None, seed=0), target)


def load_run(run: RunFolder, place: str | None = None) -> Policy:
    """The run's final model, or where it has none yet the weights of its newest whole checkpoint; ``place`` names another."""
    trust.check(run, *trust.LOADING_PARTS)
    recipe = load_recipe(run.recipe)
    if not recipe.uses_policy:
        raise RunError(
            run.name,
            "has no model",
            because="its stages ask a model behind an endpoint, and what they learn are experiences",
            fix=f"ask that endpoint, with {run.path / 'experience'} before the question",
        )
    if place is None and (run.model / "config.json").is_file():
        return load_policy(recipe.model.at(str(run.model)), alphabet=None, seed=recipe.seed)
    found = _checkpoint(run, place) if place else files.newest_valid(run.checkpoints, lambda path, why: None)
    if found is None:
        raise RunError(
            run.name,
            "has no model yet",
            because="it has neither finished nor written a checkpoint",
            fix=f"go on with it: oncurve train --resume {run.path}",
        )
    known = not is_from_python(recipe)
    policy = load_policy(
        recipe.model, alphabet=task_for(recipe, recipe.stages[0]).alphabet if known else None, seed=recipe.seed
    )
    load_weights(policy, found.tensors["model"])
    return policy


def _checkpoint(run: RunFolder, place: str) -> files.Checkpoint:
    """The checkpoint that STAGE-STEP names."""
    there = list_checkpoints(run.checkpoints)
    for one in there:
        if place in (f"{one.stage}-{one.step}", one.path.name):
            return files.load(one.path)
    kept = ", ".join(f"{one.stage}-{one.step}" for one in there) or "none"
    raise RunError(f"{run.name}@{place}", "no such checkpoint", because=f"the run has {kept}", fix="name one of those")


def export(run: RunFolder, target: Path) -> None:
    """The run's model as a folder in Hugging Face format, there whole or not at all; a folder that exists is refused."""
    if target.exists():
        raise RunError(str(target), "already there", because="an export never writes over anything", fix="choose another name")
    if (run.model / "config.json").is_file():
        write_folder_atomically(target, lambda folder: shutil.copytree(run.model, folder))
    else:
        write_folder_atomically(target, load_run(run).save)


def recipe_for(task: str | None, run: RunFolder | None, sets: list[str], source: str) -> Recipe:
    """What `eval` measures on: the run's own recipe, another recipe's task and rewards, or a task with its usual rewards."""
    if task is None:
        if run is None:
            raise RecipeError(
                "--task",
                "missing",
                because=f"{source} is no run, so there is no recipe that says what to ask",
                fix=f"for a model, name a recipe or one of: {', '.join(TASKS)}; for a run, `oncurve runs` lists them",
            )
        own = load_recipe(run.recipe, sets)
        reject_python_only(own, own.stages[-1])
        trust.check(run, *trust.GRADING_PARTS)
        return own
    if task in TASKS and not Path(task).is_file():
        return parse_recipe({"name": task, "task": {"type": task}, "stages": [{"type": "sft"}]}, sets)
    trust.check_recipe(task)
    return parse_recipe(read_toml(find_recipe(Path(task))), sets)


def evaluate_model(
    opened: LoadedModel, recipe: Recipe, *, samples: int | None = None, temperature: float | None = None
) -> EvalReport:
    """Held-out accuracy, or reward where no rule says what is right, on the task and rewards of the recipe's last stage, under
    its evaluation settings where not told."""
    stage = recipe.stages[-1]
    reject_python_only(recipe, stage)
    torch.set_num_threads(recipe.threads or os.cpu_count() or 1)
    task, rewards = task_for(recipe, stage), rewards_for(recipe, stage)
    rewards.bind(lambda: opened.policy.decode, None if opened.run is None else opened.run.path)
    if not task.heldout:
        raise RecipeError("task.heldout", "no held-out prompts", because="there is nothing to measure on", fix="hold some out")
    if not rewards.rewards:
        because = f"the task '{recipe.task.type}' has no usual reward here, so there is nothing to measure by"
        raise RecipeError("rewards", "none", because=because, fix="name a recipe with rewards by --task")
    changed = {"samples": samples, "temperature": temperature}
    settings = Evaluation.model_validate(recipe.evaluation.model_dump() | {k: v for k, v in changed.items() if v is not None})
    limit = stage.sampling.max_new_tokens if isinstance(stage, RolloutStage) else default_answer_limit(opened.policy, task.heldout)
    engine = NativeEngine(opened.policy, recipe.engine)
    report = evaluate(
        engine, rewards, task.heldout, settings, max_new_tokens=limit, seed=recipe.seed, stage=stage.label, step=0
    )
    _refuse_ungraded(report, rewards.accuracy_reward)
    return report


def _refuse_ungraded(report: EvalReport, decider: str | None) -> None:
    """Where the reward that decides failed on every completion, the measurement would read as 0 %; where none decides and none
    counted, there would be nothing to read."""
    aspects = [a for group in report.groups for scored in group.scored for a in scored.aspects]
    asked = [a for a in aspects if (a.weight != 0 if decider is None else a.name == decider)]
    failed = [a for a in asked if a.failure is not None]
    if failed and len(failed) == len(asked):
        fix = "mend the reward, or name another task or recipe by --task"
        raise RewardError(f"rewards.{failed[0].name}", "no answer could be graded", because=failed[0].failure or "", fix=fix)
