"""Commands that inspect runs and this machine: runs, show, status, replay, verify, pairs, doctor."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oncurve.cli.options import (
    RUNS,
    Json,
    RunName,
    Runs,
    Trust,
    grant_trust,
    output,
    output_json,
)
from oncurve.errors import RecipeError, RunError, printable
from oncurve.runs.folder import RunFolder, list_runs
from oncurve.terminal.console import SafeConsole

if TYPE_CHECKING:
    from oncurve.operations.checks import Check


def doctor(
    runs: Runs = RUNS,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            min=2,
            max=64,
            metavar="N",
            help="Also train on N GPUs (or processes, without a GPU) with each kind of sharding, and compare the weights with "
            "those of one process.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine: versions, GPU, a training step, sandbox, disk.

    Exits with 2 if a check fails.
    """
    with SafeConsole(stderr=True).status("checking"):
        from oncurve.operations import doctor
        from oncurve.terminal.errors import silence_libraries

        silence_libraries()
        checks = list(doctor.diagnose(runs, gpus))
    if as_json:
        output_json(checks_data(checks))
    else:
        output(render_doctor(checks))
    if any(check.mark == "wrong" for check in checks):
        raise typer.Exit(2)


def pairs(
    run: RunName,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="File to write; must not exist.")],
    stage: Annotated[str | None, typer.Option("--stage", help="Groups of this stage only; default: all stages.")] = None,
    people: Annotated[
        bool, typer.Option("--people", help="Use the labels that people gave in the studio instead of rewards.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Write preference pairs from a run's groups.

    Each pair is the best completion of a group against the worst, as a JSON line.
    """
    from oncurve.runs.atomic_files import disk_errors
    from oncurve.runs.database.reader import RunReader
    from oncurve.runs.feedback import preference_lines, read_preferences
    from oncurve.runs.preference_pairs import best_against_worst

    folder = RunFolder.open(run, runs)
    with RunReader.open(folder.path) as store:
        if people:
            text = preference_lines(read_preferences(folder.path, store))
        else:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in best_against_worst(store, stage))
    if not text:
        because = "no labels decide a pair" if people else "no recorded group has completions with different rewards"
        rank = "rank groups in the studio (`oncurve studio`), or leave out --people for pairs by reward"
        fix = rank if people else "look at the run with `oncurve show`, or choose another run"
        raise RunError(folder.name, "no pairs", because=because, fix=fix)
    if out.exists():
        raise RunError(str(out), "already exists", because="nothing is overwritten", fix="choose another name")
    with disk_errors(out):
        out.write_text(text, encoding="utf-8")
    count = text.count("\n")
    output(Text(f'{out}: {count} pairs (prompt, chosen, rejected), for a stage with type = "reward_model" or "dpo"'))


def replay(
    run: RunName,
    step: Annotated[int, typer.Option("--step", min=1, help="Step of the group.")],
    group: Annotated[int, typer.Option("--group", min=0, help="Index of the group, from 0.")],
    stage: Annotated[str | None, typer.Option("--stage", help="Stage of the step; default: the last one with groups.")] = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Sample a recorded group again and check that it is identical.

    Repeats the steps from the last checkpoint before it. Exits with 2 if it is not identical.
    """
    folder = RunFolder.open(run, runs)
    grant_trust(trusted, folder)
    with SafeConsole(stderr=True).status("replaying"):
        from oncurve.operations import replay
        from oncurve.terminal.errors import silence_libraries
        from oncurve.terminal.group import render_replay, replay_data

        silence_libraries()
        result = replay.replay(folder, stage, step, group)
    if as_json:
        output_json({"run": folder.name, "group": group, **replay_data(result)})
    else:
        output(render_replay(result, Text(f"{folder.name}  {result.stage} step {step}  group {group}", "bold")))
    if result.differences:
        raise typer.Exit(2)


def verify(
    run: RunName,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Check a run's database, checkpoints, recipe and model.

    Exits with 2 if a check fails.
    """
    folder = RunFolder.open(run, runs)
    grant_trust(trusted, folder)
    with SafeConsole(stderr=True).status("verifying"):
        from oncurve.operations import verify
        from oncurve.terminal.errors import silence_libraries

        silence_libraries()
        checks = list(verify.verify(folder))
    if as_json:
        output_json({"run": folder.name, **checks_data(checks)})
    else:
        output(render_checks(f"{folder.name}  {folder.path}", checks, "the run is intact"))
    if any(check.mark == "wrong" for check in checks):
        raise typer.Exit(2)


def runs(runs_dir: Runs = RUNS, as_json: Json = False) -> None:
    """List all runs, newest first."""
    from oncurve.terminal.runs import render_runs, run_data

    entries = list_runs(runs_dir)
    if as_json:
        output_json([run_data(entry) for entry in entries])
    elif entries:
        output(render_runs(entries))
    else:
        output(Text(f"{runs_dir} has no runs yet. Start one: oncurve train arithmetic", "dim"))


def show(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STAGE-STEP]", help="Name or folder of a run; RUN@STAGE-STEP or RUN@best for a step of it."
        ),
    ],
    step: Annotated[int | None, typer.Option("--step", min=1, help="Show this step's groups.")] = None,
    group: Annotated[
        int | None, typer.Option("--group", min=0, help="Show this group of the step in full, counted from 0.")
    ] = None,
    stage: Annotated[str | None, typer.Option("--stage", help="Stage of the step; default: the last one that sampled.")] = None,
    bad: Annotated[bool, typer.Option("--bad", help="Show batches whose update was skipped, and why.")] = False,
    timing: Annotated[bool, typer.Option("--timing", help="Show the time of each phase of a step.")] = False,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Show a run's curves, a step's groups, or one group in full.

    Also shows the time of each phase (--timing) and skipped updates (--bad).
    """
    from oncurve.runs.checkpoints.listing import open_step
    from oncurve.terminal import show

    folder, named = open_step(run, runs)
    if named is not None:
        for option, value in {"--stage": stage, "--step": step, "--bad": bad or None, "--timing": timing or None}.items():
            if value is not None:
                because = f"{run} already names a step"
                raise RecipeError(option, f"with {run}", because=because, fix=f"leave it out, or write {folder.name}")
        stage, step = named
    if group is not None and step is None:
        raise RecipeError("--group", group, because="a group belongs to a step", fix="add --step N")
    if bad:
        from oncurve.terminal.show import bad_data, render_bad

        output_json(bad_data(folder)) if as_json else output(render_bad(folder))
    elif timing:
        from oncurve.terminal.show import render_timing, timing_data

        output_json(timing_data(folder)) if as_json else output(render_timing(folder))
    elif as_json:
        output_json(show.show_data(folder, stage, step, group))
    elif step is None:
        output(show.render_run(folder))
    elif group is None:
        output(show.render_step(folder, stage, step))
    else:
        output(show.render_one_group(folder, stage, step, group))


def status(run: RunName, runs: Runs = RUNS, as_json: Json = False) -> None:
    """Show a run's status and the current phase of each of its processes."""
    from oncurve.terminal.show import render_status, status_data

    folder = RunFolder.open(run, runs)
    if as_json:
        output_json(status_data(folder))
    else:
        output(render_status(folder))


CHECK_STYLES = {"ok": "green", "note": "yellow", "wrong": "bold red"}


def render_checks(title: str, checks: Sequence[Check], success: str) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        table.add_row(Text(check.mark, CHECK_STYLES[check.mark]), Text(printable(check.name)), Text(printable(check.message)))
    return Group(Text(title, "bold"), table, _verdict(checks, success))


def render_doctor(checks: Sequence[Check]) -> RenderableType:
    """The verdict first, then checks that fail, what works, what is worth knowing, and optional packages that are absent."""
    from oncurve.operations.checks import OPTIONAL_CHECK

    device = "GPU" if any(check.name == "training on cuda" for check in checks) else "CPU"
    absent = [check for check in checks if check.name == OPTIONAL_CHECK and check.mark == "note"]
    present = [check for check in checks if check not in absent]
    groups = [
        ("fails", CHECK_STYLES["wrong"], [(check.name, check.message) for check in present if check.mark == "wrong"]),
        ("works", CHECK_STYLES["ok"], [(check.name, check.message) for check in present if check.mark == "ok"]),
        ("worth knowing", CHECK_STYLES["note"], [(check.name, check.message) for check in present if check.mark == "note"]),
        (
            "optional, not installed; a recipe that needs one says so before it starts",
            "dim",
            [(feature, command) for feature, _, command in (check.message.partition(": ") for check in absent)],
        ),
    ]
    parts: list[RenderableType] = [_verdict(checks, f"ready to train on this {device}")]
    for title, style, rows in groups:
        if rows:
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(no_wrap=True)
            table.add_column(overflow="fold")
            for name, message in rows:
                table.add_row(Text(f"  {printable(name)}"), Text(printable(message)))
            parts += [Text(), Text(title, style), table]
    return Group(*parts)


def _verdict(checks: Sequence[Check], success: str) -> Text:
    wrong = sum(check.mark == "wrong" for check in checks)
    return Text(f"{wrong} of {len(checks)} checks failed" if wrong else success, "bold red" if wrong else "bold green")


def checks_data(checks: Sequence[Check]) -> dict[str, Any]:
    return {"ok": all(check.mark != "wrong" for check in checks), "checks": [dataclasses.asdict(check) for check in checks]}
