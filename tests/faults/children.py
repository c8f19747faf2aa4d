"""Runs in processes of their own, to be killed for good: each is forked from one that has imported everything already."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from oncurve.errors import OncurveError
from oncurve.recipe.schema import Recipe
from oncurve.runs.folder import RunFolder
from oncurve.train import saving
from oncurve.train.start import begin, resume
from tests.faults.moments import MOMENTS

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.faults.children"])


def train(path: Path, recipe: Recipe, moment: str | None, call: int, behind: bool) -> None:
    """Begins the run at ``path`` or goes on with it; with a moment, dies there. ``behind`` saves all in the background."""
    if behind:
        saving.BEHIND_FROM = 0
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


def run(path: Path, recipe: Recipe, moment: str | None = None, call: int = 1, behind: bool = False) -> int:
    """The exit code of a child that trains; −9 where it was killed."""
    child: ForkServerProcess = SERVER.Process(target=train, args=(path, recipe, moment, call, behind))
    child.start()
    child.join(120)
    assert child.exitcode is not None, f"it hangs: {moment} {call}"
    return child.exitcode
