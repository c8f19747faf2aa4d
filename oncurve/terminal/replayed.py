"""What `oncurve replay` shows: the group, and whether it came out the same."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from oncurve.terminal.group import GroupTable
from oncurve.train.replaying import Replayed


def render_replayed(found: Replayed, title: Text) -> RenderableType:
    lines: list[RenderableType] = [title, GroupTable(found.now), Text(), Text(began(found), "dim")]
    if not found.differences:
        completions = found.now.group.completions
        tokens = sum(len(c.token_ids) for c in completions)
        told = (
            f"identical: {len(completions)} completions, {tokens} tokens, their log-probs, rewards and advantages, bit for bit"
        )
        return Group(*lines, Text(told, "bold green"))
    return Group(*lines, Text("not identical", "bold red"), *(Text(f"  {line}") for line in found.differences))


def began(found: Replayed) -> str:
    source = "the first weights" if found.start is None else f"the checkpoint of {found.start[0]} step {found.start[1]}"
    return f"from {source}, {found.steps} {'step' if found.steps == 1 else 'steps'} done again"


def replayed_data(found: Replayed) -> dict[str, Any]:
    return {
        "stage": found.stage,
        "step": found.step,
        "identical": not found.differences,
        "differences": found.differences,
        "from": None if found.start is None else {"stage": found.start[0], "step": found.start[1]},
        "steps_done_again": found.steps,
    }
