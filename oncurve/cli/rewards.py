"""`oncurve rewards`: try a recipe's rewards on a text, grade a run's completions again, look for signs of a gamed reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve import trust
from oncurve.cli.options import RUNS, RecipeName, RunName, Runs, Sets, Trust, say, trust_if_asked
from oncurve.errors import DataError, RunError
from oncurve.recipe.defaults import task_for_stage
from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema import stages
from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import GradedGroup, Ints, Prompt, ScoredGroup
from oncurve.records import Group as Sampled
from oncurve.rewards.audit import AuditFinding, History, audit
from oncurve.rewards.base import completion_by_letters, from_letters
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.registry import build_stage_rewards
from oncurve.rewards.regrade import ReplayReport, compare
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
from oncurve.tasks.registry import build_task
from oncurve.terminal.text import DASH, clean, percent, score, shorten

rewards = typer.Typer(help="Try, replay and audit rewards.", no_args_is_help=True)

Stage = Annotated[str | None, typer.Option("--stage", help="The stage; unset: the last one of type grpo.")]


@rewards.command("try", epilog="Example: oncurve rewards try arithmetic --completion '<think>…</think><answer>46</answer>'")
def try_rewards(
    recipe: RecipeName,
    completion: Annotated[str, typer.Option("--completion", metavar="TEXT|FILE", help="What the model might say.")],
    prompt: Annotated[int, typer.Option("--prompt", min=0, help="Number of the held-out prompt that it answers.")] = 0,
    sets: Sets = None,
    trusted: Trust = False,
) -> None:
    """Grade a text as a completion: every aspect, with its reason."""
    trust_if_asked(trusted, trust.of_recipe(recipe))
    trust.check_recipe(recipe)
    loaded = load_recipe(recipe, sets or [])
    asked = _prompt(loaded, prompt)
    mix = rewards_of(loaded)
    mix.bind(lambda: from_letters)
    text = Path(completion).read_text("utf-8") if _is_file(completion) else completion
    (graded,) = mix.score([Sampled(asked, np.zeros(1, np.int64), (completion_by_letters(text),))])
    say(Text.assemble(("prompt  ", "dim"), clean(asked.shown)))
    for remark in mix.log_lines:
        say(Text(remark, "dim"))
    say(_aspects(graded))


def _is_file(word: str) -> bool:
    try:
        return len(word) < 4096 and "\0" not in word and Path(word).is_file()
    except OSError:
        return False


def _prompt(recipe: Recipe, number: int) -> Prompt:
    task = build_task(recipe.task)
    prompts = task.heldout or [task.train_prompt(i) for i in range(min(number + 1, task.train_size or number + 1))]
    if number >= len(prompts):
        raise DataError(
            "--prompt", number, because=f"the task has {len(prompts)} held-out prompts", fix=f"use 0 to {len(prompts) - 1}"
        )
    return prompts[number]


def rewards_of(recipe: Recipe, stage: str | None = None) -> RewardMix:
    """The rewards that grade the stage of this name, or, without a name, the last stage that trains on samples."""
    graded = recipe.stage_to_grade(stage)
    return build_stage_rewards(recipe, graded, lambda: build_task(task_for_stage(recipe, graded)).default_rewards)


def _aspects(graded: ScoredGroup) -> RenderableType:
    (one,) = graded.scored
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("reward", "weight", "value", "reason"):
        table.add_column(head, justify="right" if head in ("weight", "value") else "left")
    for aspect in one.aspects:
        steps = "" if aspect.steps is None else " ".join(f"{reward:g}@{end}" for end, reward in aspect.steps)
        value = Text("failed", "bold red") if aspect.failure else Text(score(aspect.value))
        told = aspect.failure or " ".join(filter(None, (aspect.reason, steps))) or DASH
        table.add_row(aspect.name, f"{aspect.weight:g}", value, Text(clean(told)))
    total = (
        Text.assemble(("total  ", "dim"), (score(one.total), "bold")) if one.failure is None else Text(one.failure, "bold red")
    )
    return Group(table, total)


@rewards.command(epilog="Example: oncurve rewards replay arithmetic-1 --with stricter.toml")
def replay(
    run: RunName,
    other: Annotated[str | None, typer.Option("--with", metavar="RECIPE", help="Grade by this recipe's rewards.")] = None,
    stage: Stage = None,
    runs: Runs = RUNS,
    sets: Sets = None,
    trusted: Trust = False,
) -> None:
    """Grade all saved completions again, and say what changes."""
    folder = RunFolder.open(run, runs)
    trust_if_asked(trusted, folder if other is None else trust.of_recipe(other))
    if other is None:
        trust.check(folder, *trust.GRADED)
    else:
        trust.check_recipe(other)
    recipe = load_recipe(other or folder.recipe, sets or [])
    before, after = [], []
    with RunWriter.open(folder.path) as store:
        named, steps = _steps(store, stage)
        mix = rewards_of(recipe, named)
        mix.bind(lambda: _decoder(folder), folder.path)
        for _, groups in steps:
            before += [graded.scored for graded in groups]
            after += mix.score([graded.group for graded in groups])
    say(_replayed(compare(before, after), other or "the run's own rewards"))


def _decoder(folder: RunFolder) -> Callable[[Ints], str]:
    """The run's own tokenizer, for rewards of single steps."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer, trust_remote_code=False)
    return lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def _steps(store: RunWriter, stage: str | None) -> tuple[str, list[tuple[int, Sequence[GradedGroup]]]]:
    """(the stage, its steps with their groups): the stage named, else the last that trained on samples."""
    named = stage or next((s.name for s in reversed(store.stages()) if s.type in stages.SAMPLED_TYPES), None)
    steps = [step.step for step in store.steps(named)] if named is not None else []
    if named is None or not steps:
        raise RunError(
            str(store.path),
            "no step of a grpo stage" if stage is None else f"no step of stage '{stage}'",
            because="only what was sampled can be graded",
            fix="train first, or name another --stage",
        )
    return named, [(step, store.step(named, step).groups) for step in steps]


def _replayed(report: ReplayReport, by: str) -> RenderableType:
    order = DASH if report.correlation is None else f"{report.correlation:.3f} over {report.ranked_groups} groups"
    rows = [
        ("graded again by", by),
        ("completions", f"{report.completions} in {report.groups} groups"),
        ("same reward", percent(report.agreement, 1)),
        ("rank correlation within groups", order),
        ("groups where an advantage changes sign", str(report.turned_groups)),
        ("failures before and now", f"{report.failed_before}, {report.failed_after}"),
    ]
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(Text(name, "dim"), value)
    parts: list[RenderableType] = [table]
    for difference in report.differences:
        told = f"{score(difference.before.total)} → {score(difference.after.total)}"
        why = difference.after.failure or "; ".join(a.reason for a in difference.after.aspects if a.reason)
        parts += [
            Text(),
            Text.assemble((told, "bold"), "  ", (clean(why)[:200], "dim")),
            _quoted(difference.prompt, difference.text),
        ]
    return Group(*parts)


def _quoted(prompt: str, text: str) -> Text:
    return Text.assemble(("  ", ""), (shorten(prompt, 60), "dim"), "  ", shorten(text, 160))


@rewards.command("audit", epilog="Example: oncurve rewards audit arithmetic-1")
def audit_run(run: RunName, stage: Stage = None, runs: Runs = RUNS) -> None:
    """Look for signs that a reward is gamed. Signs, not proofs: each comes with completions to look at."""
    folder = RunFolder.open(run, runs)
    with RunWriter.open(folder.path) as store:
        _, steps = _steps(store, stage)
        signals = audit(History.of(steps, store.evals()))
    if not signals:
        say(Text(f"Nothing stands out in {len(steps)} steps. That is no proof: look at some groups too (oncurve show)."))
    for signal in signals:
        say(_signal(signal))


def _signal(signal: AuditFinding) -> RenderableType:
    lines: list[RenderableType] = [Text.assemble((signal.name, "bold yellow"), "  worth a look: ", signal.what)]
    for seen in signal.examples:
        where = Text(f"  step {seen.step}, group {seen.group}: ", "dim")
        lines.append(Text.assemble(where, shorten(seen.text, 200)))
    return Group(*lines, Text())
