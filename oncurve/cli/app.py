"""The command line: every command with its example. Commands import torch and transformers only when they need them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from oncurve import __version__
from oncurve.cli import compare, evaluate, inspect, models, plan, recipe, rewards, servers, train
from oncurve.distributed.rendezvous import is_worker_rank, report_to_rank_zero
from oncurve.errors import OncurveError
from oncurve.runs.atomic_files import NO_PERMISSION, NO_ROOM, disk_error
from oncurve.terminal.errors import print_error


def version() -> None:
    """Print the version."""
    print(__version__)


COMMANDS: tuple[tuple[str, str, Callable[..., None], str], ...] = (
    ("Train", "train", train.train, "oncurve train recipes/arithmetic.toml --set grpo.group_size=16"),
    ("Train", "fork", train.fork, "oncurve fork arithmetic-1 --step 100 --set grpo.group_size=16"),
    ("Train", "compare", compare.compare, "oncurve compare arithmetic --algorithms grpo,ppo --seeds 3"),
    ("Before training", "plan", plan.plan, "oncurve plan --model Qwen/Qwen3-8B --gpu H100-80GB"),
    ("Before training", "probe", evaluate.probe, "oncurve probe recipes/arithmetic.toml --from arithmetic-1"),
    ("Before training", "doctor", inspect.doctor, "oncurve doctor --json"),
    ("Look at runs", "runs", inspect.runs, "oncurve runs --json"),
    ("Look at runs", "show", inspect.show, "oncurve show arithmetic-1 --step 200 --group 3"),
    ("Look at runs", "status", inspect.status, "oncurve status arithmetic-1"),
    ("Look at runs", "studio", servers.studio, "oncurve studio --open"),
    ("Look at runs", "report", servers.report, "oncurve report arithmetic-1 -o report.html"),
    ("Look at runs", "replay", inspect.replay, "oncurve replay arithmetic-1 --step 100 --group 3"),
    ("Look at runs", "verify", inspect.verify, "oncurve verify arithmetic-1"),
    ("Use a model", "eval", evaluate.evaluate, "oncurve eval arithmetic-1 --task arithmetic --set task.digits=4"),
    ("Use a model", "chat", evaluate.chat, "echo '12+34=' | oncurve chat arithmetic-1"),
    ("Use a model", "serve", servers.serve, "oncurve serve arithmetic-1 --port 8000"),
    ("Use a model", "export", evaluate.export, "oncurve export arithmetic-1 my-model"),
    ("Use a model", "pairs", inspect.pairs, "oncurve pairs arithmetic-1 -o pairs.jsonl"),
    ("More", "version", version, "oncurve version"),
)
"""(panel of `oncurve --help`, name, function, example)."""

app = typer.Typer(
    name="oncurve",
    help="Train language models with GRPO: each completion is graded on the curve of its own group.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, name, function, example in COMMANDS:
    app.command(name, epilog=f"Example: {example}", rich_help_panel=panel)(function)
for name, group in (("recipe", recipe.recipes), ("rewards", rewards.rewards), ("models", models.models)):
    app.add_typer(group, name=name, rich_help_panel="More")


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
        if is_worker_rank():
            report_to_rank_zero(error)
        else:
            print_error(error)
        return error.exit_code
    except OSError as error:
        if error.errno not in NO_ROOM | NO_PERMISSION:
            _print_bug_notice()
            raise
        print_error(disk_error(Path(str(error.filename or ".")), error.errno, error.strerror or str(error)))
        return 2
    except Exception:
        _print_bug_notice()
        raise
    return 0


def _print_bug_notice() -> None:
    notice = f"This is a bug in Oncurve {__version__}, not your mistake. Please report it with the lines below."
    Console(stderr=True, highlight=False).print(Text(notice, "bold red"))
