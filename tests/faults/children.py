"""Runs in separate processes that are killed. Each is forked from a server that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from oncurve import trust
from oncurve.errors import OncurveError
from oncurve.models.loading.load import load_policy
from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.folder import RunFolder
from oncurve.training import checkpoint_writer
from oncurve.training.start import begin, resume
from tests.faults.moments import MOMENTS

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.faults.children"])


def train(path: Path, recipe: Recipe, moment: str | None, call: int, behind: bool) -> None:
    """Begins or resumes the run at ``path``; with a moment, dies there. ``behind`` saves everything in the background."""
    if behind:
        checkpoint_writer.BACKGROUND_FROM = 0
    if moment is not None:
        MOMENTS[moment].arm(call)
    try:
        if path.exists():
            resume(RunFolder(path))
        else:
            begin(recipe, out=path)
    except OncurveError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def _as_nobody(path: Path, report: Connection) -> None:
    """Everything is loaded first: the user `nobody` may not read the sources."""
    load_policy(load_recipe(RunFolder(path).recipe).model, alphabet="0", seed=0)
    trust.grant(RunFolder(path))  # to this process: nobody may not read the records of others
    os.setgid(65534)
    os.setuid(65534)
    try:
        resume(RunFolder(path))
        report.send("it went on")
    except OncurveError as error:
        report.send(f"{type(error).__name__} {error}")


def resume_as_nobody(path: Path) -> str:
    """The error of a user who may read the run but not write it."""
    mine, theirs = SERVER.Pipe(duplex=False)
    child: ForkServerProcess = SERVER.Process(target=_as_nobody, args=(path, theirs))
    child.start()
    theirs.close()
    output = str(mine.recv()) if mine.poll(120) else "nothing"
    child.join(60)
    return output


def run(path: Path, recipe: Recipe, moment: str | None = None, call: int = 1, behind: bool = False) -> int:
    """The exit code of a training process; −9 if it was killed."""
    child: ForkServerProcess = SERVER.Process(target=train, args=(path, recipe, moment, call, behind))
    child.start()
    child.join(120)
    assert child.exitcode is not None, f"it hangs: {moment} {call}"
    return child.exitcode
