"""Commands that use a model: eval, chat, probe, export."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from oncurve import trust
from oncurve.cli.options import (
    RUNS,
    Json,
    RunName,
    RunOrModel,
    Runs,
    Sets,
    Trust,
    say,
    say_json,
    trust_if_asked,
)
from oncurve.recipe.load import load_recipe
from oncurve.runs.folder import RunFolder

if TYPE_CHECKING:
    pass


def evaluate(
    target: RunOrModel,
    task: Annotated[
        str | None, typer.Option("--task", help="A task's type, or a recipe; a run's own recipe by default.")
    ] = None,
    sets: Sets = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Completions of each problem.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure accuracy on held-out problems, with a 95 % interval, by difficulty; where no rule says what is right, reward."""
    from oncurve.operations.run_model import evaluate_model, load_model, recipe_for
    from oncurve.terminal.errors import hush
    from oncurve.terminal.evaluation import eval_data, render_eval

    hush()
    for named in (trust.find(target, runs), trust.of_recipe(task or "")):
        trust_if_asked(trusted, named)
    recipe = recipe_for(task, RunFolder.find(target, runs), sets or [], target)
    run_model = load_model(target, runs, recipe.model)
    report = evaluate_model(run_model, recipe, samples=samples, temperature=temperature)
    count = samples or recipe.evaluation.samples
    if as_json:
        asked = {"model": run_model.name, "task": recipe.task.model_dump(mode="json")}
        warmth = recipe.evaluation.temperature if temperature is None else temperature
        say_json({**asked, "temperature": warmth, **eval_data(report, count)})
    else:
        say(render_eval(report, f"{run_model.name} on {recipe.task.type}, {report.asked} held-out problems", count))


def chat(
    target: RunOrModel,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy: the same each time.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Length limit of an answer.")] = 512,
    system: Annotated[str | None, typer.Option("--system", help="A system message, for chat models.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampling.")] = 0,
    runs: Runs = RUNS,
    trusted: Trust = False,
) -> None:
    """Ask a model: a conversation at the terminal, or one prompt per line from a pipe."""
    from oncurve.operations.run_model import load_model
    from oncurve.terminal.chat import Chat, ChatSettings, converse, typed_lines
    from oncurve.terminal.errors import hush

    hush()
    trust_if_asked(trusted, trust.find(target, runs))
    talk = Chat(load_model(target, runs).policy, ChatSettings(max_new_tokens, temperature, system, seed))
    live = sys.stdin.isatty()
    lines = typed_lines() if live else (line.rstrip("\n") for line in sys.stdin)
    converse(talk, lines, sys.stdout, live)


def export(
    run: RunName, folder: Annotated[Path, typer.Argument(metavar="DIR")], runs: Runs = RUNS, trusted: Trust = False
) -> None:
    """Write a run's model to a folder in Hugging Face format."""
    source = RunFolder.open(run, runs)
    trust_if_asked(trusted, source)
    from oncurve.operations import run_model
    from oncurve.terminal.errors import hush

    hush()
    run_model.export(source, folder)
    say(Text(f"{folder}: loads with AutoModelForCausalLM.from_pretrained"))


def probe(
    target: Annotated[
        str, typer.Argument(metavar="RECIPE|RUN", help="A recipe, or a run whose model is probed under its recipe.")
    ],
    sets: Sets = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts to sample.")] = 16,
    samples: Annotated[int, typer.Option("--samples", min=2, help="Completions of each.")] = 16,
    source: Annotated[
        str | None, typer.Option("--from", metavar="RUN|MODEL", help="Probe this model under the recipe.")
    ] = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Before any training: what GRPO would see, and what to set."""
    from oncurve.recipe.validate import reject_python_only

    run = RunFolder.find(target, runs)
    for named in (run or trust.of_recipe(target), None if source is None else trust.find(source, runs)):
        trust_if_asked(trusted, named)
    recipe = load_recipe(target if run is None else run.recipe, sets or [])
    reject_python_only(recipe)
    if run is None:
        trust.check_recipe(target)
    else:
        trust.check(run, *trust.GRADED)
    source = source or (None if run is None else target)
    from oncurve.operations.probe import probe
    from oncurve.operations.run_model import load_model
    from oncurve.terminal.errors import hush
    from oncurve.terminal.probe import render_probe

    hush()
    policy = load_model(source, runs, recipe.model).policy if source is not None else None
    report = probe(recipe, prompts, samples=samples, policy=policy)
    if as_json:
        say_json(dataclasses.asdict(report))
    else:
        say(render_probe(report))
