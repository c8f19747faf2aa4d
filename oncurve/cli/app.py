"""The command line: one command per verb. What is heavy (torch, transformers) is imported by the commands that need it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from oncurve import __version__
from oncurve.cli import compare, evaluate, inspect, models, plan, recipe, rewards, servers
from oncurve.cli import train as training_commands
from oncurve.errors import OncurveError
from oncurve.runs.atomic_files import NO_PERMISSION, NO_ROOM, disk_error
from oncurve.terminal.errors import print_error

app = typer.Typer(
    name="oncurve",
    help="Train language models with GRPO: each completion graded on the curve of its own group.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(recipe.recipes, name="recipe")
app.add_typer(rewards.rewards, name="rewards")
app.add_typer(models.models, name="models")


app.command(epilog="Example: oncurve train recipes/arithmetic.toml --set grpo.group_size=16")(training_commands.train)
app.command(epilog="Example: oncurve fork arithmetic-1 --step 100 --set grpo.group_size=16")(training_commands.fork)
app.command("eval", epilog="Example: oncurve eval arithmetic-1 --task arithmetic --set task.digits=4")(evaluate.evaluate)
app.command(epilog="Example: echo '12+34=' | oncurve chat arithmetic-1")(evaluate.chat)
app.command("runs", epilog="Example: oncurve runs --json")(inspect.list_all)
app.command(epilog="Example: oncurve show arithmetic-1 --step 200 --group 3")(inspect.show)
app.command(epilog="Example: oncurve export arithmetic-1 my-model")(evaluate.export)
app.command(epilog="Example: oncurve probe recipes/arithmetic.toml --from arithmetic-1")(evaluate.probe)
app.command(epilog="Example: oncurve replay arithmetic-1 --step 100 --group 3")(inspect.replay)
app.command(epilog="Example: oncurve verify arithmetic-1")(inspect.verify)
app.command(epilog="Example: oncurve status arithmetic-1")(training_commands.status)
app.command(epilog="Example: oncurve doctor --json")(inspect.doctor)
app.command(epilog="Example: oncurve plan --model Qwen/Qwen3-8B --gpu H100-80GB")(plan.plan)
app.command(epilog="Example: oncurve serve arithmetic-1 --port 8000")(servers.serve)
app.command(epilog="Example: oncurve compare arithmetic --algorithms grpo,ppo --seeds 3")(compare.compare)
app.command(epilog="Example: oncurve studio --open")(servers.studio)
app.command(epilog="Example: oncurve report arithmetic-1 -o report.html")(servers.report)
app.command(epilog="Example: oncurve pairs arithmetic-1 -o pairs.jsonl")(inspect.pairs)


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
        training_commands.show_error(error)
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
