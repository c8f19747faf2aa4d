"""`oncurve train --ray`: the same recipe on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oncurve.runs.folder import RunFolder

if TYPE_CHECKING:
    from oncurve.terminal.starting import Plan
    from oncurve.train.listeners import Listener

Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="auto|HOST:PORT", help="Train on a Ray cluster: this machine's own, or the one there."),
]


def check(address: str) -> None:
    """Whether a cluster answers there: first of all, as what comes then takes seconds to load."""
    from oncurve.cluster.door import check_answers

    check_answers(address)


def train(
    planned: Plan, out: Path | None, runs: Path, minutes: float | None, address: str, listeners: Sequence[Listener]
) -> RunFolder:
    """Begins a run on the cluster at an address, or goes on with one."""
    from oncurve.cluster.driver import Asked
    from oncurve.cluster.driver import train as drive

    return drive(Asked(planned.recipe, planned.run, tuple(planned.sets), runs, out, minutes), address, listeners)
