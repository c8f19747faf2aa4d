"""Load a model to sample from, evaluate or export: a run's latest weights, a folder in Hugging Face format, or a hub id."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from oncurve import trust
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.native.sampler_check import check_sampler
from oncurve.errors import OncurveError, RecipeError, RewardError, RunError
from oncurve.models.loading.load import choose_device, load_policy
from oncurve.models.policy import Policy
from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema.model import Model
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Evaluation
from oncurve.recipe.validate import is_from_python, reject_python_only
from oncurve.records import EvalReport
from oncurve.runs.atomic_files import write_folder_atomically
from oncurve.runs.checkpoints import files
from oncurve.runs.checkpoints.listing import CheckpointEntry, RunTarget, find_target
from oncurve.runs.folder import RunFolder
from oncurve.training.evaluate import answer_sampling, evaluate
from oncurve.training.start import rewards_for, task_for
from oncurve.training.trainer import load_weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A policy, its name, and the run that it is from, if any."""

    policy: Policy
    name: str
    run: RunFolder | None = None


def load_model(target: str, runs_dir: Path, model: Model | None = None) -> LoadedModel:
    """Load a run, a checkpoint of a run (RUN@STAGE-STEP, RUN@best), a folder or a hub id.

    ``model`` sets the precision and device of a model that is not of a run; unset: bfloat16 on a GPU, float32 on a CPU. For a
    run its recipe sets them.
    """
    of_run = find_target(target, runs_dir)
    if of_run is not None:
        return LoadedModel(load_run(of_run.run, of_run.checkpoint), of_run.name, of_run.run)
    settings = model or Model(dtype="bfloat16" if choose_device("auto").type == "cuda" else "float32")
    if target == "tiny":
        raise RunError(
            target,
            "neither a run nor a model folder",
            because="the built-in model is untrained before a run",
            fix="name a run",
        )
    return LoadedModel(load_policy(settings.at(target), alphabet=None, seed=0), target)


def load_run(run: RunFolder, checkpoint: CheckpointEntry | None = None) -> Policy:
    """The run's final model, or if it has none yet the weights of its newest valid checkpoint; or those of ``checkpoint``."""
    trust.check(run, *trust.LOADING_PARTS)
    recipe = load_recipe(run.recipe)
    if not recipe.uses_policy:
        raise RunError(
            run.name,
            "has no model",
            because="its stages use a model behind an endpoint, and collect experiences",
            fix=f"use that endpoint, with the text in {run.path / 'experience'} before the question",
        )
    if checkpoint is None and (run.model / "config.json").is_file():
        return load_policy(recipe.model.at(str(run.model)), alphabet=None, seed=recipe.seed)
    state = files.load(checkpoint.path) if checkpoint else files.newest_valid(run.checkpoints, lambda path, why: None)
    if state is None:
        raise RunError(
            run.name,
            "has no model yet",
            because="it has neither finished nor written a checkpoint",
            fix=f"resume it: oncurve train --resume {run.shown}",
        )
    alphabet = None if is_from_python(recipe) else task_for(recipe, recipe.stages[0]).alphabet
    policy = load_policy(recipe.model, alphabet=alphabet, seed=recipe.seed)
    load_weights(policy, state.tensors["model"])
    return policy


def missing_environment(loaded: LoadedModel) -> str | None:
    """A note if a run's model was trained with an environment: `chat` and `serve` do not run it. None if there was none."""
    if loaded.run is None:
        return None
    recipe = load_recipe(loaded.run.recipe)
    if is_from_python(recipe):
        return None
    try:
        prompts = task_for(recipe, recipe.stages[-1]).heldout
    except OncurveError:  # the task's file may be gone, and the model can be used without it
        return None
    if not prompts or prompts[0].environment is None:
        return None
    name = recipe.task.options.get("environment", recipe.task.type)
    return f"note: the model was trained with the environment '{name}', which is not run here: nothing replies to its calls"


def export(source: RunTarget, folder: Path) -> None:
    """Writes the model of a run or checkpoint as a folder in Hugging Face format, atomically. Refuses an existing folder."""
    if folder.exists():
        raise RunError(str(folder), "already exists", because="an export never overwrites anything", fix="choose another name")
    run = source.run
    if source.checkpoint is None and (run.model / "config.json").is_file():
        write_folder_atomically(folder, lambda partial: shutil.copytree(run.model, partial))
    else:
        write_folder_atomically(folder, load_run(run, source.checkpoint).save)


def evaluate_model(
    loaded: LoadedModel, recipe: Recipe, *, samples: int | None = None, temperature: float | None = None
) -> EvalReport:
    """Held-out accuracy, or mean reward if there is no verifiable reward, on the task and rewards of the recipe's last stage.

    ``samples`` and ``temperature`` override the recipe's evaluation settings.
    """
    stage = recipe.stages[-1]
    reject_python_only(recipe, stage)
    torch.set_num_threads(recipe.threads or os.cpu_count() or 1)
    task, rewards = task_for(recipe, stage), rewards_for(recipe, stage)
    rewards.bind(lambda: loaded.policy.decode, None if loaded.run is None else loaded.run.path)
    if not task.heldout:
        raise RecipeError(
            "task.heldout", "no held-out prompts", because="there is nothing to evaluate on", fix="set task.heldout"
        )
    if not rewards.rewards:
        because = f"the task '{recipe.task.type}' has no default reward for this data"
        raise RecipeError("rewards", "none", because=because, fix="name a recipe with rewards with --task")
    overrides = {"samples": samples, "temperature": temperature}
    settings = Evaluation.model_validate(recipe.evaluation.model_dump() | {k: v for k, v in overrides.items() if v is not None})
    recipe = recipe.model_copy(update={"evaluation": settings})
    engine = NativeEngine(loaded.policy, recipe.engine)
    check_sampler(engine)
    sampling = answer_sampling(recipe, stage, loaded.policy, task.heldout)
    report = evaluate(
        engine, rewards, task.heldout, sampling=sampling, samples=settings.samples, seed=recipe.seed, stage=stage.label, step=0
    )
    _check_graded(report, rewards.accuracy_reward)
    return report


def _check_graded(report: EvalReport, accuracy_reward: str | None) -> None:
    """Raises RewardError if the reward that defines accuracy, or every reward if none does, failed on all completions: the
    result would be 0 % or empty."""
    aspects = [a for group in report.groups for scored in group.scored for a in scored.aspects]
    counted = [a for a in aspects if (a.weight != 0 if accuracy_reward is None else a.name == accuracy_reward)]
    failed = [a for a in counted if a.failure is not None]
    if failed and len(failed) == len(counted):
        fix = "fix the reward, or name another task or recipe with --task"
        raise RewardError(f"rewards.{failed[0].name}", "no answer could be graded", because=failed[0].failure or "", fix=fix)
