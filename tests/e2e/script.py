"""Trains in a separate process, which can be killed: begins the run at a path, or resumes it.

    python -m tests.e2e.script PATH WAIT_AT [KEY=VALUE …]

Prints a line as each step is recorded, so that a test knows where the run is. After step WAIT_AT of this process (0: never) it
waits until standard input is closed, so that it can't finish before it is killed, however slow the test is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from oncurve.errors import OncurveError
from oncurve.records import StepReport
from oncurve.runs.folder import RunFolder
from oncurve.training.listeners import Listener
from oncurve.training.start import begin, resume
from tests.training.builders import recipe


class PrintSteps(Listener):
    def __init__(self, wait_at: int) -> None:
        self.left = wait_at

    def on_step(self, report: StepReport) -> None:
        print(f"{report.stage} {report.step}", flush=True)
        self.left -= 1
        if self.left == 0:
            sys.stdin.read()


def main(path: Path, wait_at: int, sets: list[str]) -> int:
    try:
        if path.exists():
            resume(RunFolder(path), listeners=[PrintSteps(wait_at)])
        else:
            begin(recipe(*sets), out=path, listeners=[PrintSteps(wait_at)])
    except OncurveError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
