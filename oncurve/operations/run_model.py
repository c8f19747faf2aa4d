"""Load a model to sample from, evaluate or export: a run's latest weights, a folder in Hugging Face format, or a hub id."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oncurve import trust
from oncurve.agents.tool_environment import ToolEnvironment, missing_columns
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.native.sampler_check import check_sampler
from oncurve.errors import ModelError, OncurveError, RecipeError, RewardError, RunError
from oncurve.models import lora
from oncurve.models.loading.gguf_writer import GgufType, write_gguf, write_modelfile
from oncurve.models.loading.load import choose_device, load_adapter_over, load_policy, resolve_source
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import Model
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Evaluation
from oncurve.recipe.validate import is_from_python, reject_python_only
from oncurve.records import Environment, EvalReport, StatefulEnvironment
from oncurve.runs.atomic_files import write_folder_atomically
from oncurve.runs.checkpoints import files
from oncurve.runs.checkpoints.listing import CheckpointEntry, RunTarget, find_target
from oncurve.runs.folder import RunFolder
from oncurve.tasks.environments import PureEnvironment
from oncurve.training.evaluate import answer_sampling, evaluate
from oncurve.training.inputs import folder_of_inputs
from oncurve.training.start import rewards_for, task_for
from oncurve.training.trainer import load_weights, with_agents


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
    settings = model or _default_settings()
    if target == "tiny":
        raise RunError(
            target,
            "neither a run nor a model folder",
            because="the built-in model is untrained before a run",
            fix="name a run",
        )
    return LoadedModel(load_policy(settings.at(target), alphabet=None, seed=0), target)


def _default_settings() -> Model:
    return Model(dtype="bfloat16" if choose_device("auto").type == "cuda" else "float32")


@dataclass(frozen=True, slots=True)
class _OverBase:
    """A target as a base and an adapter over it, which ``settings`` name; no adapter: the target is the base itself."""

    base: Model
    settings: Model
    of_run: RunTarget | None

    @property
    def is_base(self) -> bool:
        return self.settings.adapter is None and self.settings.lora is None


def load_models(targets: Sequence[str], runs_dir: Path) -> list[LoadedModel]:
    """Load models to serve side by side. Adapters over one base share its weights; any other is merged into its own copy."""
    found = [_split_from_base(target, runs_dir) for target in targets] if len(targets) > 1 else [None]
    bases: dict[str, Policy | None] = {}
    loaded: list[LoadedModel] = []
    for target, over in zip(targets, found, strict=True):
        policy = None
        if over is not None and sum(other is not None and other.base == over.base for other in found) > 1:
            policy = _load_over_base(over, bases)
        if policy is None or any(policy is model.policy for model in loaded):
            loaded.append(_load_merged(target, runs_dir))
        else:
            of_run = over.of_run if over is not None else None
            loaded.append(LoadedModel(policy, of_run.name, of_run.run) if of_run else LoadedModel(policy, target))
    return loaded


def _split_from_base(target: str, runs_dir: Path) -> _OverBase | None:
    """None if the target's weights are its own, or if its adapter can't share those of its base."""
    of_run = find_target(target, runs_dir)
    if of_run is None:
        return _resolve_base(_default_settings().at(target), None)
    trust.check(of_run.run, *trust.LOADING_PARTS)
    settings = trust.load_recipe_of(of_run.run).model
    if settings.lora is None or settings.lora.dora or settings.quantise is not None:
        return None
    if _has_final_model(of_run):
        return _resolve_base(settings.at(str(of_run.run.path / "adapter")), of_run)
    with folder_of_inputs(of_run.run):
        return _resolve_base(settings, of_run)


def _resolve_base(settings: Model, of_run: RunTarget | None) -> _OverBase | None:
    if settings.source == "tiny":
        return None
    try:
        settings = resolve_source(settings)
        if settings.adapter is not None and not lora.can_share_base(Path(settings.adapter)):
            return None
    except ModelError:  # loading the model by itself says what is wrong, if it needs the base at all
        return None
    paths = {
        name: str(Path(path).resolve())
        for name in ("source", "adapter")
        if (path := getattr(settings, name)) and Path(path).exists()
    }
    settings = settings.model_copy(update=paths)
    base = Model(
        source=settings.source, dtype=settings.dtype, device=settings.device, trust_remote_code=settings.trust_remote_code
    )
    return _OverBase(base, settings, of_run)


def _load_over_base(over: _OverBase, bases: dict[str, Policy | None]) -> Policy | None:
    """The adapter over its base, or the base itself. ``bases`` has the loaded ones, and gets a new one.

    None if the model must be loaded by itself: a finished run has its merged model, even if its base is gone or has changed,
    and adapters of experts replace the base's weights in each pass.
    """
    key = over.base.model_dump_json()
    try:
        if key not in bases:
            bases[key] = None
            bases[key] = load_policy(over.base, alphabet=None, seed=0)
        base = bases[key]
        if base is None or over.is_base:
            return base
        policy = load_adapter_over(base, over.settings)
    except ModelError:
        return None
    if over.of_run is not None and not _has_final_model(over.of_run):
        load_weights(policy, _load_state(over.of_run.run, over.of_run.checkpoint))
    return policy if lora.is_linear(policy.model) else None


def _load_merged(target: str, runs_dir: Path) -> LoadedModel:
    """A model that is not trained. If each of its passes would merge its adapter, the adapter is merged once, here."""
    loaded = load_model(target, runs_dir)
    fast = loaded.policy.fast_backbone
    if fast is None or fast.joins_lora or not lora.is_attached(loaded.policy.model):
        return loaded
    return replace(loaded, policy=loaded.policy.merge_adapter())


def _has_final_model(of_run: RunTarget) -> bool:
    return of_run.checkpoint is None and (of_run.run.model / "config.json").is_file()


def load_run(run: RunFolder, checkpoint: CheckpointEntry | None = None) -> Policy:
    """The run's final model, or if it has none yet the weights of its newest valid checkpoint; or those of ``checkpoint``."""
    trust.check(run, *trust.LOADING_PARTS)
    recipe = trust.load_recipe_of(run)
    if not recipe.uses_policy:
        raise RunError(
            run.name,
            "has no model",
            because="its stages use a model behind an endpoint, and collect experiences",
            fix=f"use that endpoint, with the text in {run.path / 'experience'} before the question",
        )
    if _has_final_model(RunTarget(run, checkpoint)):
        return load_policy(recipe.model.at(str(run.model)), alphabet=None, seed=recipe.seed)
    weights = _load_state(run, checkpoint)
    with folder_of_inputs(run):
        alphabet = None if is_from_python(recipe) else task_for(recipe, recipe.stages[0]).alphabet
        policy = load_policy(recipe.model, alphabet=alphabet, seed=recipe.seed)
    load_weights(policy, weights)
    return policy


def _load_state(run: RunFolder, checkpoint: CheckpointEntry | None) -> Mapping[str, Tensor]:
    """The trained weights of a checkpoint, or of the run's newest valid one."""
    state = files.load(checkpoint.path) if checkpoint else files.newest_valid(run.checkpoints, lambda path, why: None)
    if state is None:
        raise RunError(
            run.name,
            "has no model yet",
            because="it has neither finished nor written a checkpoint",
            fix=f"resume it: oncurve train --resume {run.shown}",
        )
    weights: Mapping[str, Tensor] = state.tensors["model"]
    return weights


def missing_environment(loaded: LoadedModel) -> str | None:
    """A note if a run's model was trained with an environment, for commands that do not run it. None if there was none."""
    if loaded.run is None:
        return None
    recipe = trust.load_recipe_of(loaded.run)
    if is_from_python(recipe):
        return None
    try:
        with folder_of_inputs(loaded.run):
            prompts = task_for(recipe, recipe.stages[-1]).heldout
    except OncurveError:  # the task's file may be gone, and the model can be used without it
        return None
    if not prompts or prompts[0].environment is None:
        return None
    name = recipe.task.options.get("environment", recipe.task.type)
    return f"note: the model was trained with the environment '{name}', which does not run here: add --tools to run it"


def load_trained_environment(
    loaded: LoadedModel, columns: Mapping[str, Any] | None = None
) -> Environment | StatefulEnvironment:
    """The environment or tools that a run's model was trained with. ``columns`` are those that it will begin with, if they are
    known already. Raises an error if there is no environment, or if it needs other columns."""
    if loaded.run is None:
        because = "a run's recipe names its tools, and this model does not belong to a run"
        raise RunError(loaded.name, "no tools to run", because=because, fix="name a run, or leave out --tools")
    recipe = trust.load_recipe_of(loaded.run)
    stage = recipe.stages[-1]
    if is_from_python(recipe, stage):
        because = "its tools and environment were passed from Python, and are not in the run's folder"
        fix = 'name them in a recipe, as task.tools = ["file.py:name"], or leave out --tools'
        raise RunError(loaded.name, "no tools to run", because=because, fix=fix)
    with folder_of_inputs(loaded.run):
        task = task_for(recipe, stage)
    prompts = task.heldout or (task.train_prompt(0),)
    found = list({_identity(prompt.environment): prompt for prompt in reversed(prompts)}.values())
    if found[0].agent is not None:
        because = "its agent is a program, which calls the model by its URL"
        fix = "serve the model without --tools, and start the agent with OPENAI_BASE_URL"
        raise RunError(loaded.name, "no tools to run", because=because, fix=fix)
    if len(found) > 1:
        because = "the tasks of its mix have different environments"
        raise RunError(loaded.name, "several environments", because=because, fix="leave out --tools")
    environment = found[0].environment
    if environment is None:
        because = "it was trained without tools or an environment"
        raise RunError(loaded.name, "no tools to run", because=because, fix="leave out --tools")
    missing = missing_columns(environment, columns) if columns is not None else []
    if missing:
        example = json.dumps({name: found[0].columns[name] for name in missing if name in found[0].columns}, default=str)
        because = "the environment begins with the columns of a row, and `reset` needs these"
        fix = f"give them, for example as a row of the task has them: --columns '{example}'"
        raise RecipeError("--columns", f"missing: {', '.join(missing)}", because=because, fix=fix)
    return environment


def _identity(environment: Environment | StatefulEnvironment | None) -> object:
    """Equal for environments that reply alike: a task's prompts share one environment with tools, but each may have its own of
    the pure form."""
    if isinstance(environment, ToolEnvironment):
        return id(environment)
    return type(environment.environment if isinstance(environment, PureEnvironment) else environment)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise RunError(str(path), "already exists", because="an export never overwrites anything", fix="choose another name")


def export_gguf(source: RunTarget, file: Path, kind: GgufType) -> Path:
    """Writes the model of a run or checkpoint as a GGUF file, with a Modelfile for Ollama, whose path is returned."""
    _refuse_existing(file)
    _refuse_existing(file.with_suffix(".Modelfile"))
    if not file.parent.is_dir():
        raise RunError(str(file.parent), "no such folder", because="the file is written there", fix=f"mkdir -p {file.parent}")
    policy = load_run(source.run, source.checkpoint)
    write_gguf(policy, file, kind, source.run.name)
    return write_modelfile(policy, file, trust.load_recipe_of(source.run).model.system_prompt)


def export(source: RunTarget, folder: Path) -> None:
    """Writes the model of a run or checkpoint as a folder in Hugging Face format, atomically. Refuses an existing folder."""
    _refuse_existing(folder)
    run = source.run
    if _has_final_model(source):
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
    rewards.bind(lambda: loaded.policy.decode, None if loaded.run is None else loaded.run.path.absolute())
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
    native = NativeEngine(loaded.policy, recipe.engine)
    check_sampler(native)
    sampling = answer_sampling(recipe, stage, loaded.policy, task.heldout)
    with closing(with_agents(native, recipe)) as engine:
        report = evaluate(
            engine, rewards, task.heldout, sampling=sampling, samples=settings.samples, seed=recipe.seed,
            stage=stage.label, step=0,
        )  # fmt: skip
    _check_graded(report, rewards.accuracy_reward)
    return report


def _check_graded(report: EvalReport, accuracy_reward: str | None) -> None:
    """Raises RewardError if the reward that defines accuracy, or every reward if none does, failed on all completions: the
    result would be 0 % or empty."""
    aspects = [a for group in report.groups for scored in group.scored for a in scored.aspects]
    counted = [a for a in aspects if (a.weight != 0 if accuracy_reward is None else a.name == accuracy_reward)]
    failed = [a for a in counted if a.failure is not None]
    if failed and len(failed) == len(counted):
        fix = "correct the reward, or name another task or recipe with --task"
        raise RewardError(f"rewards.{failed[0].name}", "no answer could be graded", because=failed[0].failure or "", fix=fix)
