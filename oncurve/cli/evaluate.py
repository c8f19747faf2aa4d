"""Commands that use a model: eval, chat, probe, export."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

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
    WithTools,
    check_target,
    folder_of_run,
    grant_trust,
    is_recipe,
    output,
    output_json,
)
from oncurve.errors import DataError, MissingPackage, RecipeError, RunError, pip_install
from oncurve.recipe.defaults import task_for_stage
from oncurve.recipe.load import load_recipe, parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Task
from oncurve.recipe.validate import reject_python_only
from oncurve.runs.checkpoints.listing import find_target, open_target
from oncurve.runs.folder import RunFolder
from oncurve.runs.step_notes import watch_progress
from oncurve.tasks.data.file_task import read_rows
from oncurve.tasks.registry import TASKS, check_files
from oncurve.terminal.console import SafeConsole
from oncurve.terminal.text import percent


def evaluate(
    target: RunOrModel,
    task: Annotated[str | None, typer.Option("--task", help="A task type or a recipe; default: the run's own recipe.")] = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="FILE", help="Evaluate on every row of this file.")] = None,
    sets: Sets = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Completions per problem.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = None,
    harness: Annotated[
        Literal["lm-eval"] | None, typer.Option("--harness", help="lm-eval: evaluate its tasks with Oncurve's engine instead.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="With --harness: names of its tasks, separated by commas.")
    ] = None,
    include: Annotated[
        Path | None, typer.Option("--include", metavar="DIR", help="With --harness: a folder of your own task files.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="With --harness: problems per task.")] = None,
    shots: Annotated[int | None, typer.Option("--shots", min=0, help="With --harness: examples before each problem.")] = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure held-out accuracy with a 95 % confidence interval.

    Without a verifiable reward, measures the mean reward instead. A file given with --data has a column `prompt`, and `answer`
    for the default reward; for a public data set in its authors' format add --task, such as --task gsm8k.
    """
    for run in (trust.run_of_target(target, runs), trust.run_of_recipe(task or "")):
        grant_trust(trusted, run)
    of_harness = {"--tasks": tasks, "--include": include, "--limit": limit, "--shots": shots}
    ours = {"--task": task, "--data": data, "--set": sets or None, "--samples": samples, "--temperature": temperature}
    if harness is not None:
        _refuse_options(ours, "with --harness", "lm-eval's tasks have their own data and settings", "leave it out")
        _run_harness(target, tasks, include, limit, shots, runs, as_json)
        return
    _refuse_options(of_harness, "without --harness", "it is an option of lm-eval's tasks", "add --harness lm-eval")
    own = trust.run_of_target(target, runs) if task is None else None
    recipe = _recipe_to_evaluate(task, own, data, sets or [], target)
    with folder_of_run(own):
        check_files(recipe)
    check_target(target, runs)
    from oncurve.operations.run_model import evaluate_model, load_model
    from oncurve.terminal.errors import silence_libraries
    from oncurve.terminal.evaluation import eval_data, render_eval
    from oncurve.training.start import task_for

    silence_libraries()
    with folder_of_run(own):
        rows = getattr(task_for(recipe, recipe.stages[-1]), "rows", None)
    with _progress(f"loading {target}", "evaluating"):
        run_model = load_model(target, runs, recipe.model)
        with folder_of_run(own):
            report = evaluate_model(run_model, recipe, samples=samples, temperature=temperature)
    count = samples or recipe.evaluation.samples
    if as_json:
        output_json(
            {
                "model": run_model.name,
                "task": recipe.task.model_dump(mode="json"),
                "temperature": recipe.evaluation.temperature if temperature is None else temperature,
                **({} if data is None else {"rows": rows}),
                **eval_data(report, count),
            }
        )
        return
    of_rows = f"{report.asked} held-out problems" if rows is None else f"{report.asked} of {rows} rows"
    output(render_eval(report, f"{run_model.name} on {recipe.task.type}, {of_rows}", count))
    if rows is not None and report.asked < rows:
        output(Text(f"\n{_hint_about_rows(recipe, rows)}", "dim"))


def _hint_about_rows(recipe: Recipe, rows: int) -> str:
    """How to evaluate on more rows. Rows of the training file that are not held out are for training: a model may know them."""
    stage = recipe.stages[-1]
    if task_for_stage(recipe, stage).options.get("heldout_path") is not None:
        key = "task.heldout" if stage.task is None else f"{stage.label}.task.heldout"
        return f"To evaluate on all {rows} rows: --set {key}={rows}"
    return "The file's other rows are for training. To evaluate on every row of another file: --data FILE"


@contextmanager
def _progress(start: str, verb: str) -> Iterator[None]:
    """Shows on a terminal what the body does: ``start``, then the share that is done."""
    with (
        SafeConsole(stderr=True).status(Text(start)) as status,
        watch_progress(lambda share: status.update(Text(f"{verb}, {percent(share)}"))),
    ):
        yield


def _refuse_options(options: Mapping[str, object], how: str, because: str, fix: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise RecipeError(name, how, because=because, fix=fix)


def _run_harness(
    target: str,
    tasks: str | None,
    include: Path | None,
    limit: int | None,
    shots: int | None,
    runs: Path,
    as_json: bool,
) -> None:
    if tasks is None:
        raise RecipeError("--tasks", "missing", because="lm-eval has thousands", fix="add --tasks gsm8k,arc_easy")
    if include is not None and not include.is_dir():
        raise RecipeError(f"--include {include}", "not a folder", because="task files are read from it", fix="name a folder")
    check_target(target, runs)
    try:
        from oncurve.operations.eval_harness import run_harness
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "--harness lm-eval",
            f"{error.name} is not installed",
            because="the harness is an optional extra",
            fix=pip_install("harness"),
        ) from error
    from oncurve.operations.run_model import load_model
    from oncurve.terminal.errors import silence_libraries

    silence_libraries()
    with _progress(f"loading {target}", "evaluating"):
        model = load_model(target, runs)
        results = run_harness(model.policy, tasks.split(","), include=include, limit=limit, shots=shots)
    if as_json:
        output_json({"model": model.name, "results": results})
        return
    for name, figures in results.items():
        output(Text(name, "bold"))
        for metric, value in figures.items():
            output(Text(f"  {metric:40s} {value:.4f}"))


def _recipe_to_evaluate(task: str | None, run: RunFolder | None, data: Path | None, sets: list[str], target: str) -> Recipe:
    """The recipe that `eval` measures by: the run's, another recipe, or a task with its default rewards. With ``data``, its
    task reads that file instead of its own."""
    if task is not None and task in TASKS and not Path(task).is_file():
        recipe = _bare_recipe(task, data, sets)
    elif task is not None:
        trust.check_recipe(task)
        recipe = load_recipe(task, sets)
    elif run is not None:
        recipe = trust.load_recipe_of(run, sets)
        reject_python_only(recipe, recipe.stages[-1])
        trust.check(run, *trust.GRADING_PARTS)
        data = None if data is None else data.absolute()  # the run's own files may be in another folder
    elif data is not None:
        recipe = _bare_recipe("file", data, sets)
    else:
        raise RecipeError(
            "--task",
            "missing",
            because=f"{target} is not a run, so there is no recipe with a task",
            fix=f"for a model, give --data FILE, or --task with a recipe or one of: {', '.join(TASKS)}; "
            "for a run, `oncurve runs` lists them",
        )
    return recipe if data is None else _with_data(recipe, data, sets, is_task_chosen=task is not None)


def _bare_recipe(task: str, data: Path | None, sets: list[str]) -> Recipe:
    name = task if data is None else data.stem
    return parse_recipe({"name": name, "task": {"type": task}, "stages": [{"type": "sft"}]}, sets)


def _with_data(recipe: Recipe, data: Path, sets: list[str], *, is_task_chosen: bool) -> Recipe:
    """The recipe with every row of the file as its held-out split. A task that reads files keeps its columns and options; any
    other becomes the task `file`."""
    stage = recipe.stages[-1]
    config = task_for_stage(recipe, stage)
    reads_files = "heldout_path" in TASKS.find(config.type, "task.type").options.model_fields
    if is_task_chosen and not reads_files:
        raise RecipeError(
            "--data",
            data,
            because=f"the task {config.type} generates its problems, and reads no file",
            fix="leave out --task for a file with the columns prompt and answer, or name a task that reads files",
        )
    kept = {key: value for key, value in config.options.items() if key != "path"} if reads_files else {}
    rows = sum(1 for _ in read_rows(data, "--data"))
    if not rows:
        raise DataError(str(data), "no rows", because="the file is empty", fix="give a file with one problem per row")
    count = config.heldout if any(change.startswith("task.heldout=") for change in sets) else rows
    kind = config.type if reads_files else "file"
    changed = Task.model_validate({"type": kind, "seed": config.seed, "heldout": count, **kept, "heldout_path": str(data)})
    stages = (*recipe.stages[:-1], stage.model_copy(update={"task": None}))
    return recipe.model_copy(update={"task": changed, "stages": stages})


def chat(
    target: RunOrModel,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Maximum length of an answer.")] = 512,
    system: Annotated[str | None, typer.Option("--system", help="System message, for chat models.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed for sampling.")] = 0,
    with_tools: WithTools = False,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns", metavar="JSON", help="With --tools: the row that the environment's reset gets, as a JSON object."
        ),
    ] = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
) -> None:
    """Chat with a model.

    From a pipe, each line is a separate prompt. With --tools the model's calls run, and their results are printed.
    """
    check_target(target, runs)
    row = _columns(columns, with_tools)
    from oncurve.operations.run_model import load_model, load_trained_environment, missing_environment
    from oncurve.terminal.chat import Chat, ChatSettings, converse, typed_lines
    from oncurve.terminal.errors import print_advice, silence_libraries

    silence_libraries()
    grant_trust(trusted, trust.run_of_target(target, runs))
    loaded = load_model(target, runs)
    environment = load_trained_environment(loaded, row) if with_tools else None
    note = None if with_tools else missing_environment(loaded)
    if note is not None:
        print_advice(note)
    session = Chat(loaded.policy, ChatSettings(max_new_tokens, temperature, system, seed, environment, row))
    live = sys.stdin.isatty()
    lines = typed_lines() if live else (line.rstrip("\n") for line in sys.stdin)
    converse(session, lines, sys.stdout, live)


def _columns(text: str | None, with_tools: bool) -> dict[str, Any]:
    if text is None:
        return {}
    if not with_tools:
        raise RecipeError("--columns", text, because="only an environment reads them", fix="add --tools")
    try:
        row = json.loads(text)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        fix = """write them as --columns '{"name": 3}'"""
        raise RecipeError("--columns", text, because="it is not a JSON object", fix=fix)
    return row


def export(
    run: RunOrCheckpoint,
    folder: Annotated[Path, typer.Argument(metavar="DIR|FILE.gguf", help="Folder to write, or a GGUF file; must not exist.")],
    gguf_type: Annotated[
        Literal["f16", "q8_0", "q4_k_m"] | None,
        typer.Option("--type", help="Precision of a GGUF file; default: f16."),
    ] = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
) -> None:
    """Write a run's model to a folder in Hugging Face format, or to a GGUF file.

    A GGUF file gets a Modelfile next to it, for Ollama.
    """
    source = open_target(run, runs)
    grant_trust(trusted, source.run)
    is_gguf = folder.suffix == ".gguf"
    if gguf_type is not None and not is_gguf:
        raise RunError(
            "--type", gguf_type, because=f"{folder} is a folder, which keeps the run's precision", fix="name a file: out.gguf"
        )
    from oncurve.operations import run_model
    from oncurve.terminal.errors import silence_libraries

    silence_libraries()
    if is_gguf:
        with SafeConsole(stderr=True).status(Text(f"writing {folder.name}")):
            modelfile = run_model.export_gguf(source, folder, gguf_type or "f16")
        output(Text(f"{folder}: {source.name}, {folder.stat().st_size / 1e6:,.1f} MB"))
        output(Text(f"  llama-cli -m {folder}\n  ollama create {source.run.name} -f {modelfile}"))
        return
    run_model.export(source, folder)
    output(Text(f"{folder}: the model of {source.name}, for AutoModelForCausalLM.from_pretrained"))


def probe(
    target: Annotated[
        str, typer.Argument(metavar="RECIPE|RUN", help="A recipe, or a run: its model is probed with its recipe.")
    ],
    sets: Sets = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Number of prompts.")] = 16,
    samples: Annotated[int, typer.Option("--samples", min=2, help="Completions per prompt.")] = 16,
    source: Annotated[str | None, typer.Option("--from", metavar="RUN|MODEL", help="Probe this model with the recipe.")] = None,
    estimates: Annotated[
        Path | None,
        typer.Option("--estimates", metavar="FILE", help="Write each prompt's pass rate, for curriculum.estimates."),
    ] = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Sample before training to see how much signal GRPO would get.

    Suggests a group size, a temperature and a length limit, and estimates the time of a step.
    """
    of_run = None if is_recipe(target) else find_target(target, runs)
    run = None if of_run is None else of_run.run
    for trusted_run in (run or trust.run_of_recipe(target), None if source is None else trust.run_of_target(source, runs)):
        grant_trust(trusted, trusted_run)
    if run is None:
        trust.check_recipe(target)
    recipe = load_recipe(target, sets or []) if run is None else trust.load_recipe_of(run, sets or [])
    reject_python_only(recipe)
    if run is not None:
        trust.check(run, *trust.GRADING_PARTS)
    source = source or (None if run is None else target)
    from oncurve.operations.probe import probe
    from oncurve.operations.run_model import load_model
    from oncurve.terminal.errors import silence_libraries
    from oncurve.terminal.evaluation import render_probe

    silence_libraries()
    estimates = None if estimates is None else estimates.absolute()
    with _progress(f"loading {source or recipe.model.source}", "sampling"):
        policy = load_model(source, runs, recipe.model).policy if source is not None else None
        with folder_of_run(run):
            report = probe(recipe, prompts, samples=samples, policy=policy, estimates=estimates)
    if as_json:
        output_json(dataclasses.asdict(report))
    else:
        output(render_probe(report))
