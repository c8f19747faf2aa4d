"""Begin, resume or fork a run. The command line and the Python API both use these functions."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path

from oncurve import trust
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import check_engine, default_slots
from oncurve.errors import RecipeError, RunError
from oncurve.models.llama.c_build import load_library
from oncurve.models.loading.load import check_quantised, choose_device
from oncurve.models.policy import Policy
from oncurve.recipe.defaults import task_for_stage, with_importance_cap
from oncurve.recipe.load import changed_keys, dump_recipe, flatten, parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Task as TaskConfig
from oncurve.recipe.schema.stages import Stage
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.registry import build_stage_rewards
from oncurve.runs.checkpoints.listing import CheckpointEntry, check_metric, list_checkpoints
from oncurve.runs.database.connection import is_empty_database, open_database
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import Parent, RunFolder, check_destination
from oncurve.runs.secrets import holds_secret, redact
from oncurve.tasks.base import Task
from oncurve.tasks.registry import build_task
from oncurve.training.inputs import check_inputs, folder_of_inputs, record_inputs
from oncurve.training.listeners import Listener
from oncurve.training.preflight import check_stage_data
from oncurve.training.rank_commands import announce_run, check_world_size, run_worker_rank
from oncurve.training.semantics import as_first_trained, check_semantics
from oncurve.training.trainer import RewardsOf, TaskOf, Trainer, load_policy_for

RUNS = Path("runs")


def begin(
    recipe: Recipe,
    *,
    runs_dir: Path = RUNS,
    out: Path | None = None,
    listeners: Sequence[Listener] = (),
    task: Task | None = None,
    rewards: RewardMix | None = None,
    policy: Policy | None = None,
    minutes: float | None = None,
    world: World = SINGLE_PROCESS,
) -> RunFolder:
    """Train a recipe from its start. Python objects given here replace what the recipe names. With several ranks, every rank
    calls this, and all but rank 0 execute rank 0's commands.

    After ``minutes`` the step is finished and saved and TimeUp is raised: `resume` continues as if the run had never stopped.
    """
    if not world.is_rank_zero:
        return run_worker_rank(world, lambda recipe: build_tasks_and_rewards(recipe, task, rewards), policy)
    check_world_size(recipe, world)
    recipe = with_machine_defaults(recipe)
    check_destination(runs_dir, out)
    # Before the folder is created: a recipe that can't run leaves nothing behind.
    task_of, rewards_of = build_tasks_and_rewards(recipe, task, rewards)
    check_new_run(recipe)
    if world.size == 1:
        policy = load_policy_for(recipe, task_of, listeners, policy)

    def fill(new: RunFolder, path: Path) -> None:
        write_first_files(recipe, new, path, rewards, task)
        RunWriter.create(new.path).close()

    run = RunFolder.create_at(out, fill=fill) if out else RunFolder.create(runs_dir, recipe.name, fill=fill)
    try:
        announce_run(world, recipe, run)
        trainer = Trainer(recipe, run, task_of, rewards_of, listeners, policy, minutes, world)
        check_quantised(recipe.model, trainer.policy)
    except BaseException:
        run.remove()
        raise
    trainer.train()
    return run


def write_first_files(
    recipe: Recipe, new: RunFolder, path: Path, rewards: RewardMix | None = None, task: Task | None = None
) -> None:
    """The files that new runs and forks have in common. The user's agreement is stored for the path that the run is about to
    get."""
    new.write_recipe(dump_recipe(recipe))
    record_inputs(new, recipe, rewards, task)
    trust.grant(new, recipe, path)


def resume(
    run: RunFolder,
    *,
    sets: Sequence[str] = (),
    listeners: Sequence[Listener] = (),
    task: Task | None = None,
    rewards: RewardMix | None = None,
    policy: Policy | None = None,
    minutes: float | None = None,
    accept_changes: bool = False,
    world: World = SINGLE_PROCESS,
) -> RunFolder:
    """Continue an interrupted run: it ends with the same bits as a run that never stopped.

    ``sets`` may change keys that describe the machine (`MACHINE_KEYS`): prompts and random numbers stay the same, and rounding
    may differ. With ``accept_changes`` the run continues although its reward functions or data files have changed.
    """
    run = RunFolder(run.path.absolute())  # a reward may change the current directory
    with folder_of_inputs(run):
        return _resume(run, sets, listeners, task, rewards, policy, minutes, accept_changes, world)


def _resume(
    run: RunFolder, sets: Sequence[str], listeners: Sequence[Listener], task: Task | None, rewards: RewardMix | None,
    policy: Policy | None, minutes: float | None, accept_changes: bool, world: World,
) -> RunFolder:  # fmt: skip
    if not world.is_rank_zero:
        return run_worker_rank(world, lambda recipe: build_tasks_and_rewards(recipe, task, rewards), policy)
    from_python = {"task": task, "rewards": rewards, "model": policy}
    trust.check(run, *(part for part in trust.PARTS if from_python.get(part) is None))
    check_resumable(run, rewards, task, accept_changes=accept_changes)
    recipe = with_machine_overrides(run, sets)
    check_world_size(recipe, world)
    task_of, rewards_of = build_tasks_and_rewards(recipe, task, rewards)
    announce_run(world, recipe, run)
    trainer = Trainer(recipe, run, task_of, rewards_of, listeners, policy, minutes, world)
    complete_database(run)
    trainer.train(writes_recipe=bool(sets))
    return run


def complete_database(run: RunFolder) -> None:
    """Creates the database of a run whose process was killed before it had one, as version 1 could leave it."""
    if is_empty_database(run.database):
        RunWriter.create(run.path).close()


def check_resumable(
    run: RunFolder, rewards: RewardMix | None = None, task: Task | None = None, *, accept_changes: bool = False
) -> None:
    """Raises RunError if the run is finished or is being trained, or would not continue as it began: this release computes its
    settings differently, or its reward functions or data files have changed."""
    state = run.state()
    if state.current_status == "finished":
        raise RunError(
            run.name,
            "already finished",
            because="all of its stages are complete",
            fix=f"`oncurve fork {run.shown} --step N --set STAGE.steps=M` continues from step N, up to step M",
        )
    # If another machine was training the run, there is no process here to check: the lock on its database decides.
    if state.current_status == "running" and state.host == socket.gethostname():
        raise RunError(
            run.name, f"still running (process {state.pid})", because="a run has one writer", fix="stop that process first"
        )
    recipe = trust.load_recipe_of(run)
    check_semantics(run, recipe)
    check_inputs(run, recipe, rewards, task, accept_changes=accept_changes)


MACHINE_KEYS = re.compile(
    r"threads|model\.device|engine\..*|.*\.tokens_per_pack|(.*\.)?rewards\..*\.(workers|at_once|device)"
    r"|scale\.(ranks|shard|tensor|offload|gather|engine|vllm_tensor|samplers|reward_workers|timeout_s)"
)
"""Keys that say how a machine computes, not what: a run that resumes on another machine may change them."""


def with_machine_overrides(run: RunFolder, sets: Sequence[str]) -> Recipe:
    """The run's recipe, with changes of keys that describe the machine."""
    before = as_first_trained(run, trust.load_recipe_of(run))
    if not sets:
        return before
    recipe = parse_recipe(before.model_dump(mode="json", exclude_none=True), sets)
    for key, value in changed_keys(before, recipe).items():
        if not MACHINE_KEYS.fullmatch(key):
            raise RecipeError(
                "--set",
                f"{key}={value}",
                because="a resumed run keeps its recipe, so that it ends as if it had never stopped; only keys that describe "
                "the machine may change: threads, device, engine, scale, tokens_per_pack, workers",
                fix=f"`oncurve fork {run.shown} --step N --set {key}={value}` continues with the change; "
                "to start a new run, leave out --resume",
            )
    return recipe


def fork(
    parent: RunFolder,
    step: int,
    sets: Sequence[str],
    *,
    stage: str | None = None,
    runs_dir: Path = RUNS,
    out: Path | None = None,
    listeners: Sequence[Listener] = (),
    world: World = SINGLE_PROCESS,
) -> RunFolder:
    """A new run that continues from a checkpoint of another with changes, on the same prompts and random numbers. Relative
    paths in its recipe mean the parent's files, whatever the current folder is."""
    parent, out = RunFolder(parent.path.absolute()), None if out is None else out.absolute()
    runs_dir = runs_dir.absolute()
    with folder_of_inputs(parent):
        return _fork(parent, step, sets, stage, runs_dir, out, listeners, world)


def _fork(
    parent: RunFolder, step: int, sets: Sequence[str], stage: str | None, runs_dir: Path, out: Path | None,
    listeners: Sequence[Listener], world: World,
) -> RunFolder:  # fmt: skip
    if not world.is_rank_zero:
        return run_worker_rank(world, build_tasks_and_rewards)
    trust.check(parent)
    before = trust.load_recipe_of(parent)
    check_semantics(parent, before)
    recipe = with_machine_defaults(trust.load_recipe_of(parent, sets))
    check_world_size(recipe, world)
    check_destination(runs_dir, out)
    checkpoint = _find_checkpoint(parent, recipe, stage, step)
    task_of, rewards_of = build_tasks_and_rewards(recipe)
    check_new_run(recipe)
    policy = load_policy_for(recipe, task_of, listeners) if world.size == 1 else None
    origin = Parent(parent.name, checkpoint.stage, checkpoint.step, changed_keys(before, recipe))

    def fill(new: RunFolder, path: Path) -> None:
        write_first_files(recipe, new, path)
        shutil.copytree(checkpoint.path, new.checkpoints / checkpoint.path.name)
        copy_database(parent.database, new.database)
        with RunWriter.open(new.path) as store:
            store.forget_after(checkpoint.stage, checkpoint.step)
            store.forget_replies_after(checkpoint.stage, checkpoint.step)
            store.forget_rollbacks_after(checkpoint.stage, checkpoint.step)

    if out:
        run = RunFolder.create_at(out, parent=origin, fill=fill)
    else:
        run = RunFolder.create(runs_dir, recipe.name, parent=origin, fill=fill)
    try:
        announce_run(world, recipe, run)
        trainer = Trainer(recipe, run, task_of, rewards_of, listeners, policy, world=world)
        if recipe.model.quantise != before.model.quantise:
            check_quantised(recipe.model, trainer.policy)
    except BaseException:
        run.remove()
        raise
    trainer.train()
    return run


def with_machine_defaults(recipe: Recipe) -> Recipe:
    """The recipe with the choices made for this machine written down: they stay the same if the run resumes on another."""
    completions = [math.ceil(s.prompts_per_step / recipe.scale.copies) * s.group_size for s in recipe.rollout_stages]
    slots = recipe.engine.slots or default_slots(choose_device(recipe.model.device), max(completions, default=0))
    engine = recipe.engine.model_copy(update={"slots": slots})
    model = recipe.model.model_copy(update={"compiled": recipe.model.compiled and load_library() is not None})
    resolved = {"threads": recipe.threads or os.cpu_count() or 1, "engine": engine, "model": model}
    return recipe.model_copy(update={**resolved, "stages": with_importance_cap(recipe)})


def task_for(recipe: Recipe, stage: Stage) -> Task:
    """The stage's task, built once per process."""
    where = "task" if stage.task is None else f"{stage.label}.task"
    return _build_task(task_for_stage(recipe, stage).model_dump_json(), where, os.getcwd())


@lru_cache(maxsize=8)
def _build_task(config: str, where: str, folder: str) -> Task:
    """``folder`` is the current one: the task's files are relative to it."""
    return build_task(TaskConfig.model_validate_json(config), where)


def rewards_for(recipe: Recipe, stage: Stage) -> RewardMix:
    """The rewards that grade a stage's completions, and its held-out answers."""
    return build_stage_rewards(recipe, stage, lambda: task_for(recipe, stage).default_rewards)


def refuse_secrets(recipe: Recipe) -> None:
    """Raises RecipeError if the recipe holds a secret: the run's folder stores it for everyone who can read the run."""
    for key, value in flatten(recipe).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        if holds_secret(text) or holds_secret(key):
            raise RecipeError(
                redact(key),
                redact(text),
                because="it holds a key or password, and the run's folder stores the recipe unchanged",
                fix="put it in an environment variable and name the variable (key_env of a judge, os.environ in a function)",
            )


def build_tasks_and_rewards(
    recipe: Recipe, task: Task | None = None, rewards: RewardMix | None = None
) -> tuple[TaskOf, RewardsOf]:
    """The tasks and rewards of every stage, built and checked before anything is written."""
    refuse_secrets(recipe)
    check_engine(recipe)
    tasks = {s.label: task or task_for(recipe, s) for s in recipe.stages}
    mixes = {s.label: rewards or rewards_for(recipe, s) for s in recipe.stages}
    for stage in recipe.stages:
        check_stage_data(stage, tasks[stage.label], mixes[stage.label])
    return (lambda s: tasks[s.label]), (lambda s: mixes[s.label])


def check_new_run(recipe: Recipe) -> None:
    """Refuses keys that would have no effect in a new run. Runs of earlier releases that have them can still be shown, served
    and evaluated."""
    for stage in recipe.stages:
        check_metric(f"{stage.label}.keep_best", stage.keep_best)


def _find_checkpoint(run: RunFolder, recipe: Recipe, stage: str | None, step: int) -> CheckpointEntry:
    name = stage or recipe.stages[-1].label
    entries = list_checkpoints(run.checkpoints)
    for entry in entries:
        if (entry.stage, entry.step) == (name, step):
            return entry
    existing = ", ".join(f"{entry.stage} {entry.step}" for entry in entries) or "none"
    raise RunError(
        run.name, f"no checkpoint of stage {name} at step {step}", because=f"it has these: {existing}",
        fix="choose one of them with --stage and --step; `save_every` and `keep_checkpoints` decide which exist",
    )  # fmt: skip


def copy_database(source: Path, target: Path) -> None:
    """A consistent copy of a run's database, even while the run is training."""
    with closing(open_database(source, read_only=True)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)
