"""Commands that use a model: eval, chat, probe, export."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from oncurve import trust
from oncurve.cli.options import (
    RUNS,
    Json,
    RunOrCheckpoint,
    RunOrModel,
    Runs,
    Sets,
    Trust,
    grant_trust,
    output,
    output_json,
)
from oncurve.recipe.load import load_recipe
from oncurve.runs.checkpoints.listing import find_target, open_target


def evaluate(
    target: RunOrModel,
    task: Annotated[str | None, typer.Option("--task", help="A task type or a recipe; default: the run's own recipe.")] = None,
    sets: Sets = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Completions per problem.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure held-out accuracy with a 95 % confidence interval.

    Without a verifiable reward, measures the mean reward instead.
    """
    from oncurve.operations.run_model import evaluate_model, load_model, recipe_for
    from oncurve.terminal.errors import silence_libraries
    from oncurve.terminal.evaluation import eval_data, render_eval

    silence_libraries()
    for run in (trust.run_of_target(target, runs), trust.run_of_recipe(task or "")):
        grant_trust(trusted, run)
    recipe = recipe_for(task, trust.run_of_target(target, runs), sets or [], target)
    run_model = load_model(target, runs, recipe.model)
    report = evaluate_model(run_model, recipe, samples=samples, temperature=temperature)
    count = samples or recipe.evaluation.samples
    if as_json:
        output_json(
            {
                "model": run_model.name,
                "task": recipe.task.model_dump(mode="json"),
                "temperature": recipe.evaluation.temperature if temperature is None else temperature,
                **eval_data(report, count),
            }
        )
    else:
        output(render_eval(report, f"{run_model.name} on {recipe.task.type}, {report.asked} held-out problems", count))


def chat(
    target: RunOrModel,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Maximum length of an answer.")] = 512,
    system: Annotated[str | None, typer.Option("--system", help="System message, for chat models.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed for sampling.")] = 0,
    runs: Runs = RUNS,
    trusted: Trust = False,
) -> None:
    """Chat with a model.

    From a pipe, each line is a separate prompt.
    """
    from oncurve.operations.run_model import load_model
    from oncurve.terminal.chat import Chat, ChatSettings, converse, typed_lines
    from oncurve.terminal.errors import silence_libraries

    silence_libraries()
    grant_trust(trusted, trust.run_of_target(target, runs))
    session = Chat(load_model(target, runs).policy, ChatSettings(max_new_tokens, temperature, system, seed))
    live = sys.stdin.isatty()
    lines = typed_lines() if live else (line.rstrip("\n") for line in sys.stdin)
    converse(session, lines, sys.stdout, live)


def export(
    run: RunOrCheckpoint,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; must not exist.")],
    runs: Runs = RUNS,
    trusted: Trust = False,
) -> None:
    """Write a run's model to a folder in Hugging Face format."""
    source = open_target(run, runs)
    grant_trust(trusted, source.run)
    from oncurve.operations import run_model
    from oncurve.terminal.errors import silence_libraries

    silence_libraries()
    run_model.export(source, folder)
    output(Text(f"{folder}: {source.name}, loads with AutoModelForCausalLM.from_pretrained"))


def probe(
    target: Annotated[
        str, typer.Argument(metavar="RECIPE|RUN", help="A recipe, or a run: its model is probed with its recipe.")
    ],
    sets: Sets = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Number of prompts.")] = 16,
    samples: Annotated[int, typer.Option("--samples", min=2, help="Completions per prompt.")] = 16,
    source: Annotated[str | None, typer.Option("--from", metavar="RUN|MODEL", help="Probe this model with the recipe.")] = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Sample before training to see how much signal GRPO would get.

    Suggests a group size, a temperature and a length limit, and estimates the time of a step.
    """
    from oncurve.recipe.validate import reject_python_only

    of_run = find_target(target, runs)
    run = None if of_run is None else of_run.run
    for trusted_run in (run or trust.run_of_recipe(target), None if source is None else trust.run_of_target(source, runs)):
        grant_trust(trusted, trusted_run)
    recipe = load_recipe(target if run is None else run.recipe, sets or [])
    reject_python_only(recipe)
    if run is None:
        trust.check_recipe(target)
    else:
        trust.check(run, *trust.GRADING_PARTS)
    source = source or (None if run is None else target)
    from oncurve.operations.probe import probe
    from oncurve.operations.run_model import load_model
    from oncurve.terminal.errors import silence_libraries
    from oncurve.terminal.evaluation import render_probe

    silence_libraries()
    policy = load_model(source, runs, recipe.model).policy if source is not None else None
    report = probe(recipe, prompts, samples=samples, policy=policy)
    if as_json:
        output_json(dataclasses.asdict(report))
    else:
        output(render_probe(report))
