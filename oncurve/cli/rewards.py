"""`oncurve rewards`: scores a text with a recipe's rewards, regrades a run's completions, and audits rewards for hacking."""

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
from oncurve.cli.options import (
    RUNS,
    Command,
    CommandGroup,
    RecipeOrRun,
    RunName,
    Runs,
    Sets,
    Trust,
    folder_of_run,
    grant_trust,
    output,
    recipe_file,
)
from oncurve.errors import DataError, RunError, printable
from oncurve.recipe.defaults import task_for_stage
from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema import stages
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.validate import reject_python_only
from oncurve.records import GradedGroup, Ints, Prompt, ScoredGroup
from oncurve.records import Group as Sampled
from oncurve.rewards.audit import AuditFinding, History, audit
from oncurve.rewards.base import completion_by_letters, from_letters
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.registry import build_stage_rewards
from oncurve.rewards.regrade import ReplayReport, compare
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.studio.rewards import accuracy_aspects
from oncurve.tasks.registry import build_task
from oncurve.terminal.group import EMPTY
from oncurve.terminal.text import DASH, percent, score, shorten

rewards = typer.Typer(cls=CommandGroup, add_completion=False, help="Try, replay and audit rewards.", no_args_is_help=True)

Stage = Annotated[str | None, typer.Option("--stage", help="Stage; default: the last one that trained on samples.")]


@rewards.command(
    "try", cls=Command, epilog="Example: oncurve rewards try arithmetic --completion '<think>…</think><answer>46</answer>'"
)
def try_rewards(
    recipe: RecipeOrRun,
    completion: Annotated[str, typer.Option("--completion", metavar="TEXT|FILE", help="A completion, or a file with one.")],
    prompt: Annotated[int, typer.Option("--prompt", min=0, help="Index of the held-out prompt that it answers, from 0.")] = 0,
    sets: Sets = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
) -> None:
    """Score a text as a completion, and print every reward with its reason."""
    file = recipe_file(recipe, runs)
    grant_trust(trusted, trust.run_of_recipe(file))
    trust.check_recipe(file)
    loaded = load_recipe(file, sets or [])
    reject_python_only(loaded)
    task_prompt = _prompt(loaded, prompt)
    mix = rewards_of(loaded)
    mix.bind(lambda: from_letters)
    text = _completion(completion)
    (graded,) = mix.score([Sampled(task_prompt, np.zeros(1, np.int64), (completion_by_letters(text),))])
    output(Text.assemble(("prompt  ", "dim"), printable(task_prompt.shown)))
    for line in mix.log_lines:
        output(Text(line, "dim"))
    output(_aspects(graded))
    if graded.scored[0].failure is not None:
        raise typer.Exit(2)


def _completion(value: str) -> str:
    """The completion, or the text of the file that it names. A path to no file is an error, not a text to score."""
    if _is_file(value):
        return Path(value).read_text("utf-8")
    if not any(c.isspace() or c in "<>{}" for c in value) and (
        value.startswith(_PATH_STARTS) or Path(value).suffix in _TEXT_FILES
    ):
        raise DataError("--completion", value, because="there is no such file", fix="give an existing file, or the text itself")
    return value


_PATH_STARTS, _TEXT_FILES = ("./", "../", "~/"), (".txt", ".md", ".json", ".jsonl", ".py", ".log")


def _is_file(text: str) -> bool:
    try:
        return len(text) < 4096 and "\0" not in text and Path(text).is_file()
    except OSError:
        return False


def _prompt(recipe: Recipe, number: int) -> Prompt:
    task = build_task(recipe.task)
    prompts = task.heldout or [task.train_prompt(i) for i in range(min(number + 1, task.train_size or number + 1))]
    if number >= len(prompts):
        raise DataError(
            "--prompt", number, because=f"there are {len(prompts)} prompts to choose from", fix=f"use 0 to {len(prompts) - 1}"
        )
    return prompts[number]


def rewards_of(recipe: Recipe, stage: str | None = None) -> RewardMix:
    """The rewards that grade the stage of this name, or, without a name, the last stage that trains on samples."""
    graded = recipe.stage_to_grade(stage)
    return build_stage_rewards(recipe, graded, lambda: build_task(task_for_stage(recipe, graded)).default_rewards)


def _aspects(graded: ScoredGroup) -> RenderableType:
    (completion,) = graded.scored
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head in ("reward", "weight", "value", "reason"):
        table.add_column(head, justify="right" if head in ("weight", "value") else "left")
    for aspect in completion.aspects:
        steps = ", ".join(f"{reward:g} for the step that ends at character {end + 1}" for end, reward in aspect.steps or ())
        value = Text("failed", "bold red") if aspect.failure else Text(score(aspect.value))
        reason = aspect.failure or ": ".join(filter(None, (aspect.reason, steps))) or DASH
        table.add_row(aspect.name, f"{aspect.weight:g}", value, Text(printable(reason)))
    if completion.failure is not None:
        return Group(table, Text.assemble(("total  ", "dim"), ("none: a reward failed", "bold red")))
    total = Text.assemble(("total  ", "dim"), (score(completion.total), "bold"))
    if any(aspect.steps for aspect in completion.aspects):
        total.append("  (rewards of single steps are not in the total: each counts for the tokens of its step)", "dim")
    return Group(table, total)


@rewards.command(cls=Command, epilog="Example: oncurve rewards replay arithmetic-1 --with stricter.toml")
def replay(
    run: RunName,
    other: Annotated[str | None, typer.Option("--with", metavar="RECIPE", help="Score with this recipe's rewards.")] = None,
    stage: Stage = None,
    runs: Runs = RUNS,
    sets: Sets = None,
    trusted: Trust = False,
) -> None:
    """Score all recorded completions again, and print what changes."""
    folder = RunFolder(RunFolder.open(run, runs).path.absolute())
    grant_trust(trusted, folder if other is None else trust.run_of_recipe(other))
    if other is None:
        trust.check(folder, *trust.GRADING_PARTS)
    else:
        trust.check_recipe(other)
    recipe = trust.load_recipe_of(folder, sets or []) if other is None else load_recipe(other, sets or [])
    before, after = [], []
    with folder_of_run(folder if other is None else None), RunReader.open(folder.path) as store:
        stage_name, steps = _steps(store, stage)
        mix = rewards_of(recipe, stage_name)
        mix.bind(lambda: _decoder(folder), folder.path)
        for _, groups in steps:
            before += [graded.scored for graded in groups]
            after += mix.score([graded.group for graded in groups])
    output(_comparison(compare(before, after), other or "the run's own rewards"))


def _decoder(folder: RunFolder) -> Callable[[Ints], str]:
    """Decodes with the run's tokenizer, for rewards of single reasoning steps."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder.tokenizer, trust_remote_code=False)
    return lambda ids: str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def _steps(store: RunReader, stage: str | None) -> tuple[str, list[tuple[int, Sequence[GradedGroup]]]]:
    """(the stage, its steps with their groups): the stage named, else the last that trained on samples."""
    named = stage or next((s.name for s in reversed(store.stages()) if s.type in stages.SAMPLED_TYPES), None)
    steps = [step.step for step in store.steps(named)] if named is not None else []
    if named is None or not steps:
        raise RunError(
            str(store.path),
            "no step of a stage that trained on samples" if stage is None else f"no step of stage '{stage}'",
            because="only sampled completions can be scored",
            fix="train first, or name another --stage",
        )
    return named, [(step, store.step(named, step).groups) for step in steps]


def _comparison(report: ReplayReport, source: str) -> RenderableType:
    order = DASH if report.correlation is None else f"{report.correlation:.3f} over {report.ranked_groups} groups"
    rows = [
        ("scored with", source),
        ("completions", f"{report.completions} in {report.groups} groups"),
        ("same reward", percent(report.agreement, 1)),
        ("rank correlation within groups", order),
        ("groups in which an advantage changes sign", str(report.turned_groups)),
        ("failures before, after", f"{report.failed_before}, {report.failed_after}"),
    ]
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(Text(name, "dim"), value)
    parts: list[RenderableType] = [table]
    for difference in report.differences:
        change = f"{score(difference.before.total)} → {score(difference.after.total)}"
        reason = difference.after.failure or "; ".join(a.reason for a in difference.after.aspects if a.reason)
        parts += [
            Text(),
            Text.assemble((change, "bold"), "  ", (printable(reason)[:200], "dim")),
            _quoted(difference.prompt, difference.text),
        ]
    return Group(*parts)


def _quoted(prompt: str, text: str) -> Text:
    return Text.assemble(("  ", ""), (shorten(prompt, 60), "dim"), "  ", shorten(text, 160))


@rewards.command("audit", cls=Command, epilog="Example: oncurve rewards audit arithmetic-1")
def audit_run(run: RunName, stage: Stage = None, runs: Runs = RUNS) -> None:
    """Look for signs of reward hacking. Each comes with completions to check, because a sign is not a proof."""
    folder = RunFolder.open(run, runs)
    with RunReader.open(folder.path) as store:
        stage_name, steps = _steps(store, stage)
        findings = audit(History.of(steps, store.evals(stage_name), accuracy_aspects(folder, stage_name)))
    if not findings:
        output(Text(f"No signs of reward hacking in {len(steps)} steps. Look at some groups too (oncurve show)."))
    for finding in findings:
        output(_finding(finding))


def _finding(finding: AuditFinding) -> RenderableType:
    lines: list[RenderableType] = [Text.assemble((finding.name, "bold yellow"), "  ", finding.what)]
    for example in finding.examples:
        where = Text(f"  step {example.step}, group {example.group}: ", "dim")
        lines.append(Text.assemble(where, shorten(example.text, 200) or EMPTY))
    return Group(*lines, Text())
