"""One group: its completions from best to worst, each with its rewards and advantage. And the result of `oncurve replay`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from oncurve.errors import printable
from oncurve.records import STOP_REASONS, Aspect, Completion, GradedGroup, ScoredCompletion, TokenStats
from oncurve.terminal.text import DASH, number, score, shorten, signed

if TYPE_CHECKING:  # `oncurve show` must not import torch
    from oncurve.operations.replay import ReplayResult

NOTABLE_RATIO = 0.01
"""A ratio at least this far from 1 is shown; with one update per step there is none."""
EMPTY = "(empty)"
"""Shown for a completion without text: its only token is the end token."""
Stats = Sequence[TokenStats | None]


def aspect_names(graded: GradedGroup) -> list[str]:
    return list(dict.fromkeys(a.name for s in graded.scored.scored for a in s.aspects))


class GroupTable:
    """A group with one line per completion. The text is shortened to the rest of the line."""

    def __init__(self, graded: GradedGroup) -> None:
        self.graded = graded

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = aspect_names(self.graded)
        heads = ["advantage", "reward", *names, "tokens"]
        cells = [[*self._numbers(index, names)] for index in self.graded.best_first]
        taken = sum(max(len(str(row[i])) for row in [heads, *cells]) + 2 for i in range(len(heads)))
        room = max(options.max_width - taken, 16)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("completion", no_wrap=True, overflow="crop", max_width=room)
        for index, row in zip(self.graded.best_first, cells, strict=True):
            style = _style(self.graded.advantage_of(index))
            table.add_row(Text(row[0], style), *map(Text, row[1:]), _text(self.graded.scored.scored[index], room))
        yield Text.assemble(("prompt  ", "dim"), shorten(self.graded.group.prompt.shown, options.max_width - 9))
        yield table

    def _numbers(self, index: int, names: Sequence[str]) -> list[str]:
        scored = self.graded.scored.scored[index]
        aspects = {a.name: a for a in scored.aspects}
        values = [_value(aspects.get(name)) for name in names]
        return [signed(self.graded.advantage_of(index)), score(scored.total), *values, str(scored.completion.length)]


Decode = Callable[[list[int]], str]
"""Token ids as text, without special tokens."""


def render_group(graded: GradedGroup, stats: Stats = (), decode: Decode | None = None) -> RenderableType:
    """A group in full: every completion's complete text, under a line with its numbers. With ``decode``, what an environment
    replied is on separate lines."""
    token_stats = list(stats) or [None] * len(graded.graded)
    prompt = graded.group.prompt
    parts: list[RenderableType] = [
        Text.assemble(("prompt  ", "dim"), (prompt.id, "dim")),
        Text(printable(prompt.shown), "bold"),
    ]
    for rank, index in enumerate(graded.best_first, start=1):
        scored = graded.scored.scored[index]
        headline = _headline(graded, index, rank, token_stats[index])
        parts += [Text(), headline, turns_text(scored.completion, decode), *_reasons(scored)]
    return Group(*parts)


def turns_text(completion: Completion, decode: Decode | None) -> Text:
    """The completion's text, with each reply of an environment on a line that says so."""
    if decode is None or bool(completion.loss_mask.all()):
        return Text(printable(completion.text)) if completion.text else Text(EMPTY, "dim")
    tokens = zip(completion.loss_mask.tolist(), completion.token_ids.tolist(), strict=True)
    turns = [(is_policy, decode([token for _, token in ids])) for is_policy, ids in groupby(tokens, key=lambda pair: pair[0])]
    if "".join(text for _, text in turns) != completion.text:  # the tokens of a turn can't be decoded by themselves
        return Text(printable(completion.text))
    lines = [
        Text(printable(text)) if is_policy else Text(f"  environment: {printable(text)}", "cyan") for is_policy, text in turns
    ]
    return Text("\n").join(lines)


def _headline(graded: GradedGroup, index: int, rank: int, stats: TokenStats | None) -> Table:
    scored = graded.scored.scored[index]
    advantage = graded.advantage_of(index)
    facts = [f"reward {score(scored.total)}"]
    facts += [f"{a.name} {_value(a)}" + ("" if a.weight == 1 else f" × {a.weight:g}") for a in scored.aspects]
    length = scored.completion.length
    facts += [f"{length} token{'' if length == 1 else 's'}", STOP_REASONS[scored.completion.stop]]
    if not graded.graded[index]:
        facts.append("not graded")
    if stats is not None and len(stats.ratio) and float(abs(stats.ratio - 1).max()) > NOTABLE_RATIO:
        facts.append(f"largest ratio {number(float(stats.ratio.max()))}")
    label = ("advantage " + signed(advantage), _style(advantage))
    line = Table.grid()  # in a narrow terminal, the second line is indented
    line.add_row(Text(f"{rank}. ", "dim"), Text.assemble(label, ("  " + " · ".join(facts), "dim")))
    return line


def _reasons(scored: ScoredCompletion) -> list[RenderableType]:
    episode = scored.completion.episode
    ended = None if episode is None else episode.outcome.failure
    failed = [] if ended is None else [Text(f"   {ended}", "red")]
    failed += [Text(f"   {a.name} failed: {a.failure}", "red") for a in scored.aspects if a.failure is not None]
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


def _text(scored: ScoredCompletion, room: int) -> Text:
    """The completion's text, marked if it was truncated; the failure if it could not be rewarded."""
    if scored.failure is not None:
        return Text(shorten(f"! {scored.failure}", room), "red")
    if scored.completion.is_truncated:
        return Text.assemble(shorten(scored.completion.text, room - 12), (" ⋯ truncated", "yellow"))
    return Text(shorten(scored.completion.text, room)) if scored.completion.text else Text(EMPTY, "dim")


def render_replay(result: ReplayResult, title: Text) -> RenderableType:
    lines: list[RenderableType] = [title, GroupTable(result.replayed), Text(), Text(replay_start(result), "dim")]
    if result.changed_inputs:
        changed = f"changed since the run began: {', '.join(result.changed_inputs)}; stored scores are not computed again"
        lines.append(Text(changed, "yellow"))
    if not result.differences:
        completions = result.replayed.group.completions
        tokens = sum(len(c.token_ids) for c in completions)
        summary = f"identical: {len(completions)} completions, {tokens} tokens, log-probs, rewards and advantages, bit for bit"
        return Group(*lines, Text(summary, "bold green"))
    return Group(*lines, Text("not identical", "bold red"), *(Text(f"  {line}") for line in result.differences))


def replay_start(result: ReplayResult) -> str:
    source = "the initial weights" if result.start is None else f"the checkpoint of {result.start[0]} step {result.start[1]}"
    return f"{result.steps} {'step' if result.steps == 1 else 'steps'} repeated from {source}"


def replay_data(result: ReplayResult) -> dict[str, Any]:
    changed = {"changed_inputs": list(result.changed_inputs)} if result.changed_inputs else {}
    return {
        "stage": result.stage,
        "step": result.step,
        "identical": not result.differences,
        "differences": result.differences,
        "from": None if result.start is None else {"stage": result.start[0], "step": result.start[1]},
        "steps_done_again": result.steps,
        **changed,
    }
