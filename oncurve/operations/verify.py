"""`oncurve verify`: checks a run's state, recipe and database, every byte of its checkpoints, and its model. Read-only."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from oncurve import trust
from oncurve.errors import OncurveError, PluginError, RecipeError
from oncurve.models.loading.load import load_policy
from oncurve.operations.checks import Check
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.atomic_files import partial_writes
from oncurve.runs.bad_batches import bad_batches
from oncurve.runs.checkpoints import files
from oncurve.runs.checkpoints.files import REPLACED, WRITING, Checkpoint
from oncurve.runs.checkpoints.listing import list_checkpoints
from oncurve.runs.database.connection import open_database, user_error
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.inputs import RECORD, changed_inputs, folder_of_inputs


def verify(run: RunFolder) -> Iterator[Check]:
    """Each part of a run in turn. A broken part does not prevent the check of the others."""
    state = run.state()
    yield Check("run.json", "ok", f"{state.current_status}, by Oncurve {state.oncurve}")
    recipe = _load_recipe(run)
    if not isinstance(recipe, str):
        trust.check(run, "model")
    yield Check("recipe.toml", "wrong", recipe) if isinstance(recipe, str) else Check("recipe.toml", "ok", "can be loaded")
    yield from _check_database(run)
    newest: Checkpoint | None = None
    for entry in list_checkpoints(run.checkpoints):
        try:
            checkpoint = files.load(entry.path)
        except OncurveError as error:
            yield Check(entry.path.name, "wrong", f"{error.what}, because {error.because}")
            continue
        tensors = sum(len(group) for group in checkpoint.tensors.values())
        yield Check(entry.path.name, "ok", f"all checksums match, {tensors} tensors")
        newest = checkpoint if newest is None or _number(checkpoint) > _number(newest) else newest
    if not isinstance(recipe, str):
        yield from _check_model(run, recipe, newest, finished=state.current_status == "finished")
        yield from _check_inputs(run, recipe)
    yield from _check_leftovers(run)


def _check_inputs(run: RunFolder, recipe: Recipe) -> Iterator[Check]:
    """Whether the reward functions and data files that the recipe names are those that the run began with."""
    path = run.path.absolute()
    try:
        with folder_of_inputs(run):
            changed = changed_inputs(RunFolder(path), recipe)
    except OncurveError as error:
        yield Check("inputs", "wrong", f"{error.what}, because {error.because}")
        return
    accepted: list[str] = []
    with suppress(OncurveError), RunReader.open(run.path) as store:  # a damaged database is reported above
        accepted = [event.message for event in store.events("inputs")]
    if changed:
        yield Check("inputs", "note", f"changed since the run began: {', '.join(changed)}")
    for message in accepted:
        yield Check("inputs", "note", f"a resumed run {message}")
    if not changed and not accepted and (run.path / RECORD).is_file():
        yield Check("inputs", "ok", "reward functions and data files as when the run began")


def _load_recipe(run: RunFolder) -> Recipe | str:
    """The recipe, or why it can't be loaded."""
    try:
        return trust.load_recipe_of(run)
    except (RecipeError, PluginError) as error:
        return f"{error.where}: {error.what}, because {error.because}"


def _check_database(run: RunFolder) -> Iterator[Check]:
    name = run.database.name
    try:
        with closing(open_database(run.database, read_only=True)) as connection:
            problems = [row[0] for row in connection.execute("PRAGMA integrity_check(3)")]
            orphans = len(connection.execute("PRAGMA foreign_key_check").fetchall())
    except OncurveError as error:
        yield Check(name, "wrong", f"{error.what}, because {error.because}")
        return
    except sqlite3.Error as error:
        yield Check(name, "wrong", str(user_error(run.database, error) or error))
        return
    if problems != ["ok"] or orphans:
        lines = "; ".join(line for line in problems if line != "ok")
        yield Check(name, "wrong", lines or f"{orphans} rows refer to rows that do not exist")
        return
    with RunReader.open(run.path) as store:
        summary = store.summary()
        yield Check(name, "ok", f"{summary.groups:,} groups, {summary.completions:,} completions, {summary.failures:,} failed")
        for stage in summary.stages:
            steps = [row.step for row in store.steps(stage.name)]
            is_complete = steps == list(range(1, len(steps) + 1))
            count = f"{len(steps)} of {stage.steps} steps"
            message = count if is_complete else f"{count}, and some are missing"
            yield Check(f"stage {stage.name}", "ok" if is_complete else "wrong", message)


def _check_model(run: RunFolder, recipe: Recipe, newest: Checkpoint | None, finished: bool) -> Iterator[Check]:
    if not recipe.uses_policy:
        yield Check("model", "ok", "none: no stage of the recipe uses one")
        return
    if not (run.model / "config.json").is_file():
        yield Check("model", "wrong" if finished else "note", "missing" if finished else "not written yet")
        return
    try:
        policy = load_policy(recipe.model.at(str(run.model)), alphabet=None, seed=recipe.seed)
    except OncurveError as error:
        yield Check("model", "wrong", f"{error.what}, because {error.because}")
        return
    parameters = dict(policy.model.named_parameters())
    broken = [name for name, p in parameters.items() if not bool(torch.isfinite(p).all())]
    if broken:
        yield Check("model", "wrong", f"can be loaded, but {broken[0]} has values that are not finite")
    elif newest is not None and finished and not _same_weights(run.model, newest):
        yield Check("model", "wrong", f"can be loaded, but its weights differ from {newest.path.name}, the last checkpoint")
    else:
        yield Check("model", "ok", f"can be loaded, {sum(p.numel() for p in parameters.values()):,} parameters, all finite")


def _same_weights(folder: Path, newest: Checkpoint) -> bool:
    """Whether the model is the last checkpoint, bit for bit. Names that only one of them has (tied, merged) are ignored."""
    weights = newest.tensors["model"]
    try:
        files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    except (SafetensorError, OSError):
        return False
    written = {name: tensor for file in files for name, tensor in file.items()}
    return all(torch.equal(written[name], weights[name].to(written[name].dtype)) for name in written.keys() & weights.keys())


def _check_leftovers(run: RunFolder) -> Iterator[Check]:
    leftovers = (*partial_writes(run.path), *run.checkpoints.glob(f"{WRITING}*"), *run.checkpoints.glob(f"{REPLACED}*"))
    names = sorted({path.name for path in leftovers})
    if names:
        yield Check("leftovers", "note", f"{', '.join(names[:4])}: an interrupted save; --resume removes it")
    try:
        bad = bad_batches(run.path)
    except OncurveError as error:
        yield Check("bad batches", "wrong", str(error.what))
        return
    if bad:
        yield Check("bad batches", "note", f"{len(bad)} updates were skipped: oncurve show {run.shown} --bad")


def _number(checkpoint: Checkpoint) -> int:
    return files.number_of(checkpoint.path)
