"""Several ranks, one trainer: the first decides, records and saves; the others do as it says, each with its part of a step.

Orders go one way, so ranks can't part: where the first stops, goes back to a checkpoint or has no time left, the others hear of
it or of nothing. A step itself is the same code on every rank.
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
from oncurve.training.stages.table import StageLoop, unsharded_reason
from oncurve.training.trainer import RewardsOf, TaskOf, Trainer, load_weights

Prepare = Callable[[Recipe], tuple[TaskOf, RewardsOf]]


def check_world_size(recipe: Recipe, world: World) -> None:
    """A recipe for several ranks needs them to be there, and must ask of them what they can do."""
    check_scale(recipe)
    if recipe.scale.ranks != world.size:
        ranks = recipe.scale.ranks
        raise ScaleError(
            "scale.ranks",
            ranks,
            because=f"{world.size} of them {'was' if world.size == 1 else 'were'} started",
            fix=f"oncurve train RECIPE --gpus {ranks}, or from Python: torchrun --nproc-per-node {ranks} SCRIPT",
        )


def check_scale(recipe: Recipe) -> None:
    """What ranks can't do together, said before anything is loaded."""
    if recipe.model.compile_blocks and recipe.scale.tensor > 1:
        raise RecipeError(
            "model.compile_blocks",
            "true",
            because="ranks that split a layer exchange numbers in the midst of its blocks",
            fix="leave it out, or use scale.tensor = 1",
        )
    for stage in recipe.stages if recipe.scale.shard == "full" and recipe.scale.ranks > 1 else ():
        why = unsharded_reason(stage)
        if why is not None:
            raise RecipeError(
                "scale.shard",
                "full",
                because=f"no rank would hold all weights, and the stage '{stage.label}' ({stage.type}) {why}",
                fix='use scale.shard = "optimiser", or run that stage in a recipe of its own',
            )


def announce_run(world: World, recipe: Recipe, run: RunFolder) -> None:
    """The first rank's first word: the recipe with everything chosen, and where the run lies."""
    world.publish_status(run.path)
    world.send_command("open", recipe=recipe.model_dump(mode="json", exclude_none=True), run=str(run.path.resolve()))


def run_worker_rank(world: World, prepare: Prepare, policy: Policy | None = None, make: type[Trainer] = Trainer) -> RunFolder:
    """What every other rank does, from the first word to the last. ``make`` is the kind of trainer that the first one is."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # the first rank decides when to stop
            signal.signal(number, signal.SIG_IGN)
    orders = world.commands()
    opened = next(orders, None)
    if opened is None:  # the first rank could not begin, and has said why
        sys.exit(2)
    said = opened[1]
    recipe, run = parse_recipe(said["recipe"]), RunFolder(Path(said["run"]))
    world.publish_status(run.path)
    trainer = make(recipe, run, *prepare(recipe), policy=policy, world=world)
    stage, loop = recipe.stages[0], None
    for do, said in orders:
        if do == "stage":
            stage = recipe.stages[said["position"]]
            loop = _begun(trainer, stage, said["detour"], said["start"])
        elif do == "weights" and trainer.policy is not None:
            world.broadcast_(list(trainer.policy.trainable.values()))
        elif do == "model":
            trainer.save_model()
        elif do == "measure":
            trainer.measure(stage, said["step"], said["replies"])
        elif loop is not None and do == "state":
            trainer.checkpoint_state(stage, loop)
        elif loop is not None and do == "step":
            _step(trainer, stage, loop, said["n"], said["replies"])
    return run


def _begun(trainer: Trainer, stage: Stage, detour: int, start: str | None) -> StageLoop:
    """A stage's loop, as the first rank has it: weights first, since a loop may copy them (a reference)."""
    found = None if start is None else files.load(Path(start))
    if found is not None and trainer.policy is not None:
        load_weights(trainer.policy, found.tensors["model"])
    return trainer.loop(stage, detour, found)


def _step(trainer: Trainer, stage: Stage, loop: StageLoop, n: int, replies: dict[str, str]) -> None:
    """A user's error that all ranks met is the first rank's to tell: it may save before it does. One that is this rank's alone
    ends the run."""
    try:
        trainer.run_step(stage, loop, n, replies)
    except OncurveError:
        if not trainer.world.all_failed(f"{stage.label}/{n}"):
            raise
