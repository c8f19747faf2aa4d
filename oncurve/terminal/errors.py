"""A user's error as one block: what and where, because, fix."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.errors import OncurveError


def render_error(error: OncurveError) -> RenderableType:
    told = Text.assemble(("error", "bold red"), " ", (error.where, "bold"), f": {error.what}")
    reasons = Table.grid(padding=(0, 1, 0, 0))
    reasons.add_column(no_wrap=True)
    reasons.add_column(overflow="fold")
    reasons.add_row(Text("  because", "dim"), Text(error.because, "dim"))
    reasons.add_row(Text("  fix", "green"), Text(error.fix))
    return Group(told, reasons)
