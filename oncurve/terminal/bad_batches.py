"""`oncurve show RUN --bad`: the batches whose update was skipped, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.runs.bad_batches import FOLDER, BadBatch, bad_batches
from oncurve.runs.folder import RunFolder
from oncurve.terminal.text import number, score, shorten

MAX_GROUPS = 3
"""Groups of a batch that are shown, those with the largest rewards; the file has all."""


def render_bad(run: RunFolder) -> RenderableType:
    batches = bad_batches(run.path)
    if not batches:
        return Text(f"{run.name}: no update was skipped", "green")
    count = "1 batch" if len(batches) == 1 else f"{len(batches)} batches"
    parts: list[RenderableType] = [Text(f"{run.name}  {count} whose update was skipped", "bold")]
    for batch in batches:
        parts += [Text(), *_batch(batch)]
    return Group(*parts, Text(), Text(f"complete batches: {run.path / FOLDER}", "dim"))


def _batch(batch: BadBatch) -> list[RenderableType]:
    figures = ", ".join(
        f"{name} {number(batch.metrics[name])}" for name in ("loss", "grad_norm", "reward", "kl") if name in batch.metrics
    )
    head = [Text.assemble((f"{batch.stage} step {batch.step}", "bold"), f"  {figures}")]
    why = [Text(f"  {line}", "red") for line in batch.why]
    if not batch.groups:
        return [*head, *why]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="dim")
    for name in ("reward", "tokens", "prompt", "completion"):
        table.add_column(name, justify="right" if name in ("reward", "tokens") else "left", no_wrap=True, overflow="ellipsis")
    for group in sorted(batch.groups, key=_largest_reward, reverse=True)[:MAX_GROUPS]:
        largest = max(group["completions"], key=lambda c: abs(c["reward"] or 0.0))
        cells = (
            score(largest["reward"]),
            str(len(largest["token_ids"])),
            shorten(group["prompt"], 24),
            shorten(largest["text"], 40),
        )
        table.add_row(*cells)
    return [*head, *why, table]


def _largest_reward(group: Mapping[str, Any]) -> float:
    return max((abs(c["reward"] or 0.0) for c in group["completions"]), default=0.0)


def bad_data(run: RunFolder) -> list[dict[str, Any]]:
    return [dataclasses.asdict(batch) for batch in bad_batches(run.path)]
