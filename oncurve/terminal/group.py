"""One group: its completions from best to worst, with what each reward said and the advantage that came of it.

What `oncurve replay` shows: the group, and whether it came out the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from oncurve.operations.replay import ReplayResult
from oncurve.records import STOPPED, Aspect, GradedGroup, ScoredCompletion, TokenStats
from oncurve.terminal.text import DASH, clean, number, score, shorten, signed

NOTABLE = 0.01
"""A ratio this far from 1 is worth a word; with one update per step none is."""
Stats = Sequence[TokenStats | None]


def aspect_names(graded: GradedGroup) -> list[str]:
    return list(dict.fromkeys(a.name for s in graded.scored.scored for a in s.aspects))


class GroupTable:
    """A group in one line per completion, the text shortened to what is left of the line."""

    def __init__(self, graded: GradedGroup) -> None:
        self.graded = graded

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = aspect_names(self.graded)
        heads = ["advantage", "reward", *names, "tokens"]
        cells = [[*self._numbers(place, names)] for place in self.graded.best_first]
        taken = sum(max(len(str(row[i])) for row in [heads, *cells]) + 2 for i in range(len(heads)))
        room = max(options.max_width - taken, 16)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("completion", no_wrap=True, overflow="crop", max_width=room)
        for place, row in zip(self.graded.best_first, cells, strict=True):
            style = _style(self.graded.advantage_of(place))
            shown = [Text(row[0], style), *map(Text, row[1:]), _ending(self.graded.scored.scored[place], room)]
            table.add_row(*shown)
        yield Text.assemble(("asked  ", "dim"), shorten(self.graded.group.prompt.shown, options.max_width - 8))
        yield table

    def _numbers(self, place: int, names: Sequence[str]) -> list[str]:
        scored = self.graded.scored.scored[place]
        aspects = {a.name: a for a in scored.aspects}
        values = [_value(aspects.get(name)) for name in names]
        return [signed(self.graded.advantage_of(place)), score(scored.total), *values, str(scored.completion.length)]


def render_group(graded: GradedGroup, stats: Stats = ()) -> RenderableType:
    """A group in full: every completion's text as it was written, under a line with its numbers."""
    seen = list(stats) or [None] * len(graded.graded)
    prompt = graded.group.prompt
    parts: list[RenderableType] = [Text.assemble(("prompt  ", "dim"), (prompt.id, "dim")), Text(clean(prompt.shown), "bold")]
    for rank, place in enumerate(graded.best_first, start=1):
        scored = graded.scored.scored[place]
        parts += [Text(), _headline(graded, place, rank, seen[place]), Text(clean(scored.completion.text)), *_remarks(scored)]
    return Group(*parts)


def _headline(graded: GradedGroup, place: int, rank: int, seen: TokenStats | None) -> Text:
    scored = graded.scored.scored[place]
    advantage = graded.advantage_of(place)
    facts = [f"reward {score(scored.total)}"]
    facts += [f"{a.name} {_value(a)}" + ("" if a.weight == 1 else f" × {a.weight:g}") for a in scored.aspects]
    facts += [f"{scored.completion.length} tokens", STOPPED[scored.completion.stop]]
    if not graded.graded[place]:
        facts.append("not graded")
    if seen is not None and len(seen.ratio) and float(abs(seen.ratio - 1).max()) > NOTABLE:
        facts.append(f"largest ratio {number(float(seen.ratio.max()))}")
    mark = ("advantage " + signed(advantage), _style(advantage))
    return Text.assemble((f"{rank}. ", "dim"), mark, ("  " + " · ".join(facts), "dim"))


def _remarks(scored: ScoredCompletion) -> list[RenderableType]:
    failed = [Text(f"   {a.name} failed: {a.failure}", "red") for a in scored.aspects if a.failure is not None]
    reasons = [Text(f"   {a.name}: {a.reason}", "dim") for a in scored.aspects if a.reason is not None]
    return [*failed, *reasons]


def _value(aspect: Aspect | None) -> str:
    if aspect is None:
        return DASH
    if aspect.failure is not None:
        return "failed"
    if aspect.value is None and aspect.steps:
        return f"{len(aspect.steps)} steps"
    return score(aspect.value)


def _style(advantage: float | None) -> str:
    if advantage is None:
        return "dim"
    return "green" if advantage > 0 else "red" if advantage < 0 else ""


def _ending(scored: ScoredCompletion, room: int) -> Text:
    """The text, and a mark where it was cut or could not be rewarded."""
    if scored.failure is not None:
        return Text(shorten(f"! {scored.failure}", room), "red")
    if scored.completion.cut:
        return Text.assemble(shorten(scored.completion.text, room - 6), (" ⋯ cut", "yellow"))
    return Text(shorten(scored.completion.text, room))


def render_replay(found: ReplayResult, title: Text) -> RenderableType:
    lines: list[RenderableType] = [title, GroupTable(found.now), Text(), Text(began(found), "dim")]
    if not found.differences:
        completions = found.now.group.completions
        tokens = sum(len(c.token_ids) for c in completions)
        told = (
            f"identical: {len(completions)} completions, {tokens} tokens, their log-probs, rewards and advantages, bit for bit"
        )
        return Group(*lines, Text(told, "bold green"))
    return Group(*lines, Text("not identical", "bold red"), *(Text(f"  {line}") for line in found.differences))


def began(found: ReplayResult) -> str:
    source = "the first weights" if found.start is None else f"the checkpoint of {found.start[0]} step {found.start[1]}"
    return f"from {source}, {found.steps} {'step' if found.steps == 1 else 'steps'} done again"


def replay_data(found: ReplayResult) -> dict[str, Any]:
    return {
        "stage": found.stage,
        "step": found.step,
        "identical": not found.differences,
        "differences": found.differences,
        "from": None if found.start is None else {"stage": found.start[0], "step": found.start[1]},
        "steps_done_again": found.steps,
    }
