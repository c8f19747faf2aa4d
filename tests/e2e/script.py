"""Trains in a separate process, which can be killed: begins the run at a path, or resumes it.

    python -m tests.e2e.script PATH [--set KEY=VALUE …]

Prints a line as each step is recorded, so that a test knows where the run is.
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
    def on_step(self, report: StepReport) -> None:
        print(f"{report.stage} {report.step}", flush=True)


def main(path: Path, sets: list[str]) -> int:
    try:
        if path.exists():
            resume(RunFolder(path), listeners=[PrintSteps()])
        else:
            begin(recipe(*sets), out=path, listeners=[PrintSteps()])
    except OncurveError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
