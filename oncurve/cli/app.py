"""The command line: every command with its example. A command's module is imported when the command runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from oncurve import __version__
from oncurve.cli.options import Command, CommandGroup
from oncurve.errors import OncurveError

COMMANDS: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "Train", "train", "train:train", "Train a recipe, or continue a run that was stopped.",
        "oncurve train recipes/arithmetic.toml --set grpo.group_size=16",
    ),
    (
        "Train", "fork", "train:fork", "Continue from a checkpoint with changed settings.",
        "oncurve fork arithmetic-1@best --set grpo.group_size=16",
    ),
    (
        "Train", "compare", "compare:compare", "Compare algorithms on one recipe.",
        "oncurve compare arithmetic --algorithms grpo,ppo --seeds 3",
    ),
    (
        "Before training", "plan", "plan:plan", "Estimate memory and step time before training.",
        "oncurve plan --model Qwen/Qwen3-8B --gpu H100-80GB",
    ),
    (
        "Before training", "probe", "evaluate:probe", "Sample before training to see how much signal GRPO would get.",
        "oncurve probe recipes/arithmetic.toml --from arithmetic-1",
    ),
    (
        "Before training", "doctor", "inspect:doctor", "Check this machine: versions, GPU, a training step, sandbox, disk.",
        "oncurve doctor --json",
    ),
    ("Look at runs", "runs", "inspect:runs", "List all runs, newest first.", "oncurve runs --json"),
    (
        "Look at runs", "show", "inspect:show", "Show a run's curves, a step's groups, or one group in full.",
        "oncurve show arithmetic-1 --step 200 --group 3",
    ),
    (
        "Look at runs", "status", "inspect:status", "Show a run's status and the current phase of each of its processes.",
        "oncurve status arithmetic-1",
    ),
    (
        "Look at runs", "studio", "servers:studio", "Show runs in a browser: live curves, every group, GRPO explained.",
        "oncurve studio --open",
    ),
    (
        "Look at runs",
        "report",
        "servers:report",
        "Write a report of a run as one HTML file.",
        "oncurve report arithmetic-1 -o report.html",
    ),
    (
        "Look at runs", "replay", "inspect:replay", "Sample a recorded group again and check that it is identical.",
        "oncurve replay arithmetic-1 --step 100 --group 3",
    ),
    (
        "Look at runs", "verify", "inspect:verify", "Check a run's database, checkpoints, recipe and model.",
        "oncurve verify arithmetic-1",
    ),
    (
        "Use a model", "eval", "evaluate:evaluate", "Measure held-out accuracy with a 95 % confidence interval.",
        "oncurve eval arithmetic-1 --task arithmetic --set task.digits=4",
    ),
    ("Use a model", "chat", "evaluate:chat", "Chat with a model.", "echo '12+34=' | oncurve chat arithmetic-1"),
    (
        "Use a model", "serve", "servers:serve", "Serve models or runs as an OpenAI-compatible endpoint.",
        "oncurve serve arithmetic-1 --port 8000",
    ),
    (
        "Use a model", "tinker", "servers:tinker", "Serve a model to programs that train it with the Tinker SDK.",
        "oncurve tinker ./my-model --port 8010",
    ),
    (
        "Use a model", "export", "evaluate:export",
        "Write a run's model to a folder in Hugging Face format, or to a GGUF file.",
        "oncurve export arithmetic-1@best my-model",
    ),
    (
        "Use a model", "publish", "servers:publish", "Upload a run's model to the Hugging Face hub, with a model card.",
        "oncurve publish arithmetic-1@best me/sums --dry-run",
    ),
    (
        "Use a model", "pairs", "inspect:pairs", "Write preference pairs from a run's groups.",
        "oncurve pairs arithmetic-1 -o pairs.jsonl",
    ),
    ("More", "version", "app:version", "Print the version.", "oncurve version"),
    ("More", "recipe", "recipe:recipes", "List, explain, show and convert recipes.", "oncurve recipe explain grpo.group_size"),
    ("More", "rewards", "rewards:rewards", "Try, replay and audit rewards.", "oncurve rewards audit arithmetic-1"),
    (
        "More", "models", "models:models",
        "List the models on this machine, describe one (`oncurve models NAME`), or convert a GGUF file.",
        "oncurve models",
    ),
)  # fmt: skip
"""(panel of `oncurve --help`, name, MODULE:FUNCTION in `oncurve.cli`, what it does, example). The description is also the first
line of the function's docstring."""


class LazyCommand(Command):
    """A command as `oncurve --help` lists it. To run it, its module is imported: `--help` imports none of them."""

    def __init__(self, panel: str, name: str, location: str, summary: str, example: str) -> None:
        super().__init__(name, help=summary, rich_help_panel=panel)
        self.location, self.example = location, example

    def load(self) -> Any:
        """The command itself, with its options; or a group of commands."""
        module, _, name = self.location.partition(":")
        target = getattr(import_module(f"oncurve.cli.{module}"), name)
        if isinstance(target, typer.Typer):
            return typer.main.get_command(target)
        single = typer.Typer(add_completion=False, rich_markup_mode="rich")
        single.command(self.name, cls=Command, epilog=f"Example: {self.example}")(target)
        return typer.main.get_command(single)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent=parent, **extra)


class LazyGroup(CommandGroup):
    """The group of all commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {row[1]: LazyCommand(*row) for row in COMMANDS}


app = typer.Typer(
    name="oncurve",
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version() -> None:
    """Print the version."""
    print(__version__)


def _print_version(context: typer.Context, is_set: bool) -> None:
    if not is_set:
        return
    if context.params["as_json"]:
        import json

        from oncurve.runs.environment import environment

        print(json.dumps(environment(), indent=2))
    else:
        version()
    raise typer.Exit


@app.callback()
def oncurve(
    as_json: Annotated[
        bool,
        typer.Option("--json", is_eager=True, help="With --version: print the versions of Oncurve, Python, torch … as JSON."),
    ] = False,
    show_version: Annotated[bool, typer.Option("--version", callback=_print_version, help="Print the version.")] = False,
) -> None:
    """Train language models with GRPO: each completion is graded on the curve of its own group."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. A user error prints one message; a bug keeps its traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows '?' instead of a traceback
    try:
        app(args=None if arguments is None else list(arguments), prog_name="oncurve")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except OncurveError as error:
        _report(error)
        return error.exit_code
    except OSError as error:
        from oncurve.runs.atomic_files import BAD_PATH, NO_PERMISSION, NO_ROOM, disk_error

        if error.errno not in NO_ROOM | NO_PERMISSION | BAD_PATH:
            _print_bug_notice()
            raise
        _report(disk_error(Path(str(error.filename or ".")), error.errno, error.strerror or str(error)))
        return 2
    except Exception:
        _print_bug_notice()
        raise
    return 0


def _report(error: OncurveError) -> None:
    """Prints a user error; a rank other than 0 lets rank 0 print it."""
    from oncurve.distributed.rendezvous import is_worker_rank, report_to_rank_zero
    from oncurve.terminal.errors import print_error

    if is_worker_rank():
        report_to_rank_zero(error)
    else:
        print_error(error)


def _print_bug_notice() -> None:
    from rich.text import Text

    from oncurve.terminal.console import SafeConsole

    notice = f"This is a bug in Oncurve {__version__}, not your mistake. Please report it with the lines below."
    SafeConsole(stderr=True).print(Text(notice, "bold red"))
