"""A list of checks as a table with a summary line, for `oncurve doctor` and `oncurve verify`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.operations.checks import Check
from oncurve.terminal.text import clean

STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}


def render_checks(title: str, checks: Sequence[Check], success: str) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        table.add_row(Text(check.mark, STYLES[check.mark]), Text(clean(check.name)), Text(clean(check.message)))
    wrong = sum(check.mark == "wrong" for check in checks)
    summary = Text(f"{wrong} of {len(checks)} checks failed" if wrong else success, "bold red" if wrong else "green")
    return Group(Text(title, "bold"), table, summary)


def checks_data(checks: Sequence[Check]) -> dict[str, Any]:
    return {"ok": all(check.mark != "wrong" for check in checks), "checks": [dataclasses.asdict(check) for check in checks]}
