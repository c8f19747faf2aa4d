"""Several ranks, one trainer: rank 0 decides, records and saves, and sends commands; the others execute them.

Commands go one way, so ranks can't diverge: if rank 0 stops, rolls back or runs out of time, the others simply get no further
command. A step is the same code on every rank.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from oncurve.distributed.world import World
from oncurve.errors import OncurveError, RecipeError, ScaleError
from oncurve.models.policy import Policy
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Stage
from oncurve.runs.checkpoints import files
from oncurve.runs.folder import RunFolder
from oncurve.training.stages.table import StageLoop
from oncurve.training.trainer import RewardsOf, TaskOf, Trainer, load_weights

BuildTasksAndRewards = Callable[[Recipe], tuple[TaskOf, RewardsOf]]


def check_world_size(recipe: Recipe, world: World) -> None:
    """Raises an OncurveError if the ranks that were started are not those of the recipe, or can't run it. The learners of a Ray
    cluster, which have other processes beside them, are not checked here."""
    check_scale(recipe)
    keys = [key for key in ("samplers", "reward_workers", "max_staleness") if getattr(recipe.scale, key)]
    if keys:
        # A resumed run keeps its staleness (`MACHINE_KEYS`).
        who = "a new run or a fork" if recipe.scale.max_staleness else "any run"
        without = " ".join(f"--set scale.{key}=0" for key in keys)
        raise RecipeError(
            "scale",
            ", ".join(f"{key} = {getattr(recipe.scale, key)}" for key in keys),
            because="samplers and reward workers are processes of a Ray cluster, and no cluster was named",
            fix=f"add --ray auto to oncurve train, with or without --resume; {who} can also do without: {without}",
        )
    if recipe.scale.ranks != world.size:
        ranks = recipe.scale.ranks
        raise ScaleError(
            "scale.ranks",
            ranks,
            because=f"{world.size} of them {'was' if world.size == 1 else 'were'} started",
            fix=f"oncurve train RECIPE --gpus {ranks}, or from Python: torchrun --nproc-per-node {ranks} SCRIPT",
        )


def check_scale(recipe: Recipe) -> None:
    """Refuses what several ranks can't do, before anything is loaded."""
    if recipe.model.compile_blocks and recipe.scale.tensor > 1:
        raise RecipeError(
            "model.compile_blocks",
            "true",
            because="ranks that split a layer run collectives inside its blocks",
            fix="leave it out, or use scale.tensor = 1",
        )
    for stage in recipe.stages if recipe.scale.shard == "full" and recipe.scale.ranks > 1 else ():
        if stage.unsharded_reason is not None:
            raise RecipeError(
                "scale.shard",
                "full",
                because=f"no rank would hold all weights, and stage '{stage.label}' ({stage.type}) {stage.unsharded_reason}",
                fix='use scale.shard = "optimiser", or run that stage in a separate recipe',
            )


def announce_run(world: World, recipe: Recipe, run: RunFolder) -> None:
    """Rank 0's first command: the recipe with all defaults resolved, and the run's folder."""
    world.publish_status(run.path)
    world.send_command("open", recipe=recipe.model_dump(mode="json", exclude_none=True), run=str(run.path.resolve()))


def run_worker_rank(
    world: World,
    build_tasks_and_rewards: BuildTasksAndRewards,
    policy: Policy | None = None,
    build_trainer: Callable[..., Trainer] = Trainer,
) -> RunFolder:
    """Executes rank 0's commands until it ends. ``build_trainer`` must be that of rank 0."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when to stop
            signal.signal(number, signal.SIG_IGN)
    commands = world.commands()
    first = next(commands, None)
    if first is None:  # rank 0 could not start, and has printed why
        sys.exit(2)
    _, arguments = first
    recipe, run = parse_recipe(arguments["recipe"]), RunFolder(Path(arguments["run"]))
    world.publish_status(run.path)
    trainer = build_trainer(recipe, run, *build_tasks_and_rewards(recipe), policy=policy, world=world)
    stage, loop = recipe.stages[0], None
    for command, arguments in commands:
        if command == "stage":
            stage = recipe.stages[arguments["position"]]
            loop = _build_loop(trainer, stage, arguments["rollbacks"], arguments["start"])
        elif command == "weights" and trainer.policy is not None:
            world.broadcast_(list(trainer.policy.trainable.values()))
        elif command == "model":
            trainer.save_model()
        elif command == "evaluate":
            trainer.run_evaluation(stage, arguments["step"], arguments["replies"])
        elif loop is not None and command == "state":
            trainer.checkpoint_state(stage, loop)
        elif loop is not None and command == "step":
            _run_step(trainer, stage, loop, arguments["n"], arguments["replies"])
    return run


def _build_loop(trainer: Trainer, stage: Stage, rollbacks: int, start: str | None) -> StageLoop:
    """Builds the same loop of a stage that rank 0 has. Weights are loaded first, because a loop may copy them (as a
    reference)."""
    checkpoint = None if start is None else files.load(Path(start))
    if checkpoint is not None and trainer.policy is not None:
        load_weights(trainer.policy, checkpoint.tensors["model"])
    return trainer.build_loop(stage, rollbacks, checkpoint)


def _run_step(trainer: Trainer, stage: Stage, loop: StageLoop, n: int, replies: dict[str, str]) -> None:
    """Rank 0 reports a user's error that all ranks met, and may save first. An error on this rank alone is raised here and ends
    the run."""
    try:
        trainer.run_step(stage, loop, n, replies)
    except OncurveError:
        if not trainer.world.all_failed(f"{stage.label}/{n}"):
            raise
