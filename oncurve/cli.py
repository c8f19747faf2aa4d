"""The command line: one command per verb. What is heavy (torch, transformers) is imported by the commands that need it."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from oncurve import (
    __version__,
    cli_compare,
    cli_doctor,
    cli_models,
    cli_pairs,
    cli_plan,
    cli_ray,
    cli_replay,
    cli_rewards,
    cli_scale,
    cli_serve,
    cli_studio,
    cli_verify,
    trust,
)
from oncurve.cli_options import (
    RUNS,
    Json,
    Out,
    RecipeName,
    RunName,
    RunOrModel,
    Runs,
    Sets,
    Trust,
    say,
    say_json,
    trust_if_asked,
)
from oncurve.errors import OncurveError, RecipeError
from oncurve.recipe.load import dump_recipe, load_recipe
from oncurve.runs.disk import NO_PERMISSION, NO_ROOM, disk_error
from oncurve.runs.folder import RunFolder, list_runs
from oncurve.scale.world import ALONE, World
from oncurve.terminal.errors import print_advice, print_error

if TYPE_CHECKING:
    from oncurve.terminal.starting import Plan

app = typer.Typer(
    name="oncurve",
    help="Train language models with GRPO: each completion graded on the curve of its own group.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes = typer.Typer(help="Explain, show and convert recipes.", no_args_is_help=True)
app.add_typer(recipes, name="recipe")
app.add_typer(cli_rewards.rewards, name="rewards")
app.add_typer(cli_models.models, name="models")


@app.command(epilog="Example: oncurve train recipes/arithmetic.toml --set grpo.group_size=16")
def train(
    target: Annotated[str, typer.Argument(metavar="RECIPE|RUN", help="A recipe; with --resume also a run.")],
    sets: Sets = None,
    out: Out = None,
    runs: Runs = RUNS,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run, or with the recipe's last unfinished one.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.0, help="Save and stop after so many; --resume goes on exactly.")
    ] = None,
    gpus: cli_scale.Gpus = None,
    ray: cli_ray.Ray = None,
    trusted: Trust = False,
) -> None:
    """Train a recipe, or go on with a run that was stopped."""
    from oncurve.terminal.starting import plan

    asked = [*(sets or []), *cli_scale.asked_ranks(gpus)]
    trust_if_asked(trusted, trust.of_recipe(target))
    planned = plan(target, asked, out, runs, resume)
    trust_if_asked(trusted, planned.run)
    recipe = load_recipe(planned.run.recipe, planned.sets) if planned.run is not None else planned.recipe
    assert recipe is not None
    if ray is not None:
        cli_ray.check(ray)
        return _train(planned, out, runs, minutes, ALONE, ray)
    again = ["train", target, *_repeated("--set", asked), "--runs", str(runs), *(["--resume"] if resume else [])]
    again += [*_given("--out", out), *_given("--minutes", minutes), *(["--trust"] if trusted else [])]
    cli_scale.launch_where_asked(recipe, gpus, again)
    with cli_scale.joined(recipe) as world:
        _train(planned, out, runs, minutes, world)
    return None


def _repeated(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _given(option: str, value: object) -> list[str]:
    return [] if value is None else [option, str(value)]


def _train(planned: Plan, out: Path | None, runs: Path, minutes: float | None, world: World, ray: str | None = None) -> None:
    if planned.advice and world.is_first:
        print_advice(planned.advice)
    began = time.monotonic()
    with Console(stderr=True).status("starting"):
        from oncurve.terminal.hush import hush
        from oncurve.terminal.live import LiveDisplay
        from oncurve.train import start
        from oncurve.train.run import TimeUp

        hush()
    if planned.recipe is not None and world.is_first and ray is None:
        cli_plan.announce(planned.recipe)
    listeners = [LiveDisplay(Console(highlight=False))] if world.is_first else []
    try:
        if ray is not None:
            run = cli_ray.train(planned, out, runs, minutes, ray, listeners)
        elif planned.run is not None:
            run = start.resume(planned.run, sets=planned.sets, listeners=listeners, minutes=minutes, world=world)
        else:
            assert planned.recipe is not None
            run = start.begin(planned.recipe, runs_dir=runs, out=out, listeners=listeners, minutes=minutes, world=world)
    except TimeUp as stop:
        say(Text(f"{stop.where}: {stop.what}; {stop.fix}"))
        return
    if world.is_first:
        _end(run, time.monotonic() - began)


def _end(run: RunFolder, seconds: float) -> None:
    from oncurve.terminal.summary import render_summary

    say(Text())
    say(render_summary(run, seconds))


@app.command(epilog="Example: oncurve fork arithmetic-1 --step 100 --set grpo.group_size=16")
def fork(
    run: RunName,
    step: Annotated[int, typer.Option("--step", help="The checkpoint's step.")],
    stage: Annotated[str | None, typer.Option("--stage", help="Its stage; unset: the last one.")] = None,
    sets: Sets = None,
    out: Out = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
) -> None:
    """Go on from a checkpoint with something changed, on the same prompts and random numbers."""
    parent = RunFolder.open(run, runs)
    trust_if_asked(trusted, parent)
    asked = [*(sets or []), *cli_scale.asked_ranks(None)]
    recipe = load_recipe(parent.recipe, asked)
    again = ["fork", run, "--step", str(step), *_repeated("--set", asked), "--runs", str(runs)]
    again += ["--trust"] if trusted else []
    cli_scale.launch_where_asked(recipe, None, [*again, *_given("--stage", stage), *_given("--out", out)])
    began = time.monotonic()
    with Console(stderr=True).status("starting"):
        from oncurve.terminal.hush import hush
        from oncurve.terminal.live import LiveDisplay
        from oncurve.train import start

        hush()
    with cli_scale.joined(recipe) as world:
        shown = [LiveDisplay(Console(highlight=False))] if world.is_first else []
        child = start.fork(parent, step, asked, stage=stage, runs_dir=runs, out=out, listeners=shown, world=world)
        if world.is_first:
            _end(child, time.monotonic() - began)


@app.command("eval", epilog="Example: oncurve eval arithmetic-1 --task arithmetic --set task.digits=4")
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
    from oncurve.terminal.evaluation import eval_data, render_eval
    from oncurve.terminal.hush import hush
    from oncurve.train.opened import measure, open_target, recipe_for

    hush()
    for named in (trust.find(target, runs), trust.of_recipe(task or "")):
        trust_if_asked(trusted, named)
    recipe = recipe_for(task, RunFolder.find(target, runs), sets or [], target)
    opened = open_target(target, runs, recipe.model)
    report = measure(opened, recipe, samples=samples, temperature=temperature)
    count = samples or recipe.evaluation.samples
    if as_json:
        asked = {"model": opened.name, "task": recipe.task.model_dump(mode="json")}
        warmth = recipe.evaluation.temperature if temperature is None else temperature
        say_json({**asked, "temperature": warmth, **eval_data(report, count)})
    else:
        say(render_eval(report, f"{opened.name} on {recipe.task.type}, {report.asked} held-out problems", count))


@app.command(epilog="Example: echo '12+34=' | oncurve chat arithmetic-1")
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
    from oncurve.terminal.chat import Chat, ChatSettings, converse, typed_lines
    from oncurve.terminal.hush import hush
    from oncurve.train.opened import open_target

    hush()
    trust_if_asked(trusted, trust.find(target, runs))
    talk = Chat(open_target(target, runs).policy, ChatSettings(max_new_tokens, temperature, system, seed))
    live = sys.stdin.isatty()
    lines = typed_lines() if live else (line.rstrip("\n") for line in sys.stdin)
    converse(talk, lines, sys.stdout, live)


@app.command("runs", epilog="Example: oncurve runs --json")
def list_all(runs: Runs = RUNS, as_json: Json = False) -> None:
    """List the runs there are, newest first."""
    from oncurve.terminal.runs import render_runs, run_data

    entries = list_runs(runs)
    if as_json:
        say_json([run_data(entry) for entry in entries])
    elif entries:
        say(render_runs(entries))
    else:
        say(Text(f"There is no run in {runs} yet. Start one: oncurve train arithmetic", "dim"))


@app.command(epilog="Example: oncurve show arithmetic-1 --step 200 --group 3")
def show(
    run: RunName,
    step: Annotated[int | None, typer.Option("--step", min=1, help="Show this step's groups.")] = None,
    group: Annotated[int | None, typer.Option("--group", min=0, help="Show this group of the step in full.")] = None,
    stage: Annotated[
        str | None, typer.Option("--stage", help="The step's stage; unset: the last grpo stage that has it.")
    ] = None,
    bad: Annotated[bool, typer.Option("--bad", help="Show the batches whose update was left out, and why.")] = False,
    timing: Annotated[bool, typer.Option("--timing", help="Show where a step's time goes.")] = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Look at a run: its curves, a step's groups, one group in full, where its time goes, or what was left out."""
    from oncurve.terminal import show, shown_data

    folder = RunFolder.open(run, runs)
    if group is not None and step is None:
        raise RecipeError("--group", group, because="a group is one of a step", fix="add --step N")
    if bad:
        from oncurve.terminal import bad as shown

        say_json(shown.bad_data(folder)) if as_json else say(shown.render_bad(folder))
    elif timing:
        from oncurve.terminal import timing as by_phase

        say_json(by_phase.timing_data(folder)) if as_json else say(by_phase.render_timing(folder))
    elif as_json:
        say_json(shown_data.data_of(folder, stage, step, group))
    elif step is None:
        say(show.render_run(folder))
    elif group is None:
        say(show.render_step(folder, stage, step))
    else:
        say(show.render_one_group(folder, stage, step, group))


@app.command(epilog="Example: oncurve export arithmetic-1 my-model")
def export(
    run: RunName, folder: Annotated[Path, typer.Argument(metavar="DIR")], runs: Runs = RUNS, trusted: Trust = False
) -> None:
    """Write a run's model to a folder in Hugging Face format."""
    source = RunFolder.open(run, runs)
    trust_if_asked(trusted, source)
    from oncurve.terminal.hush import hush
    from oncurve.train import opened

    hush()
    opened.export(source, folder)
    say(Text(f"{folder}: loads with AutoModelForCausalLM.from_pretrained"))


@app.command(epilog="Example: oncurve probe recipes/arithmetic.toml --from arithmetic-1")
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
    from oncurve.train.given import refuse_from_python

    run = RunFolder.find(target, runs)
    for named in (run or trust.of_recipe(target), None if source is None else trust.find(source, runs)):
        trust_if_asked(trusted, named)
    recipe = load_recipe(target if run is None else run.recipe, sets or [])
    refuse_from_python(recipe)
    if run is None:
        trust.check_recipe(target)
    else:
        trust.check(run, *trust.GRADED)
    source = source or (None if run is None else target)
    from oncurve.terminal.hush import hush
    from oncurve.terminal.probe import render_probe
    from oncurve.train.opened import open_target
    from oncurve.train.probe import probe

    hush()
    policy = open_target(source, runs, recipe.model).policy if source is not None else None
    report = probe(recipe, prompts, samples=samples, policy=policy)
    if as_json:
        say_json(dataclasses.asdict(report))
    else:
        say(render_probe(report))


@recipes.command("explain", epilog="Example: oncurve recipe explain grpo.group_size")
def explain_key(
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="A key as in --set; unset: all of them.")] = None,
) -> None:
    """What a recipe can say: every key, or one in full."""
    from oncurve.recipe.explain import explain
    from oncurve.rewards.registry import REWARDS
    from oncurve.tasks.registry import TASKS

    options = {f"task.{name}": kind.options for name, kind in TASKS.items()}
    options |= {f"rewards.{name}": kind.options for name, kind in REWARDS.items()}
    say(explain(key, options))


@recipes.command("show", epilog="Example: oncurve recipe show arithmetic --set seed=1")
def show_recipe(recipe: RecipeName, sets: Sets = None) -> None:
    """The recipe with every default written out, as TOML."""
    print(dump_recipe(load_recipe(recipe, sets or [])), end="")


@recipes.command("from-trl", epilog="Example: oncurve recipe from-trl grpo_config.yaml -o mine.toml")
def convert(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="A config of TRL's GRPOTrainer.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write it here; a file that exists is refused.")
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Devices that TRL ran on: its batch sizes are per device.")
    ] = 1,
) -> None:
    """A recipe made from a TRL config, with notes on what differs."""
    from oncurve.recipe.from_trl import from_trl

    text, notes = from_trl(config, processes)
    for note in notes:
        print_advice(f"note: {note}")
    if out is None:
        print(text, end="")
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(
            str(out), "already there", because="no file is written over", fix="choose another name with -o"
        ) from None
    say(Text(f"{out}: look through it, then oncurve train {out}"))


app.command(epilog="Example: oncurve replay arithmetic-1 --step 100 --group 3")(cli_replay.replay)
app.command(epilog="Example: oncurve verify arithmetic-1")(cli_verify.verify)
app.command(epilog="Example: oncurve status arithmetic-1")(cli_scale.status)
app.command(epilog="Example: oncurve doctor --json")(cli_doctor.doctor)
app.command(epilog="Example: oncurve plan --model Qwen/Qwen3-8B --gpu H100-80GB")(cli_plan.plan)
app.command(epilog="Example: oncurve serve arithmetic-1 --port 8000")(cli_serve.serve)
app.command(epilog="Example: oncurve compare arithmetic --algorithms grpo,ppo --seeds 3")(cli_compare.compare)
app.command(epilog="Example: oncurve studio --open")(cli_studio.studio)
app.command(epilog="Example: oncurve report arithmetic-1 -o report.html")(cli_studio.report)
app.command(epilog="Example: oncurve pairs arithmetic-1 -o pairs.jsonl")(cli_pairs.pairs)


@app.command(epilog="Example: oncurve version")
def version() -> None:
    """Print the version."""
    print(__version__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. A user's mistake is told in one block; a bug of ours keeps its traceback."""
    errors = Console(stderr=True, highlight=False)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows '?', not a traceback
    try:
        app(args=None if arguments is None else list(arguments), prog_name="oncurve")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except OncurveError as error:
        cli_scale.show_error(error)
        return error.exit_code
    except OSError as error:
        if error.errno not in NO_ROOM | NO_PERMISSION:
            _apologise(errors)
            raise
        print_error(disk_error(Path(str(error.filename or ".")), error.errno, error.strerror or str(error)))
        return 2
    except Exception:
        _apologise(errors)
        raise
    return 0


def _apologise(errors: Console) -> None:
    errors.print(
        Text(f"This is a bug in Oncurve {__version__}, not your mistake. Please report it with the lines below.", "bold red")
    )
