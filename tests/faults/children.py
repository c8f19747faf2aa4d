"""Runs in separate processes that are killed. Each is forked from a server that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import signal
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
from oncurve.training.start import begin, fork, resume
from tests.faults.moments import MOMENTS, at_file_operation

FORK_STEP = 2
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


def start_early(path: Path, recipe: Recipe, parent: Path | None, call: int, number: int) -> None:
    """Begins a run at ``path`` or forks ``parent`` there, as a job that is started again and again does: a run that exists is
    resumed. A signal comes at its ``call``-th file operation; 0: none."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    if call:
        at_file_operation(path.parent, call, number)
    try:
        if path.exists():
            resume(RunFolder(path))
        elif parent is not None:
            fork(RunFolder(parent), FORK_STEP, ["grpo.optimiser.learning_rate=0.002"], out=path)
        else:
            begin(recipe, out=path)
    except KeyboardInterrupt:
        sys.exit(130)
    except OncurveError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def run_early(path: Path, recipe: Recipe, parent: Path | None = None, call: int = 0, number: int = signal.SIGKILL) -> int:
    """The exit code of such a process."""
    child: ForkServerProcess = SERVER.Process(target=start_early, args=(path, recipe, parent, call, number))
    child.start()
    child.join(120)
    assert child.exitcode is not None, f"it hangs: file operation {call}"
    return child.exitcode


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
