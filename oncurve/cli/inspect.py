"""`oncurve doctor`: what will run on this machine, and what won't.

`oncurve pairs`: preference data from a run's groups, for reward models and DPO.

`oncurve replay`: a recorded group sampled again, to show that it comes out the same.

`oncurve verify`: a run's folder checked end to end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from oncurve.cli.options import (
    RUNS,
    Json,
    RunName,
    Runs,
    Trust,
    say,
    say_json,
    trust_if_asked,
)
from oncurve.errors import RecipeError, RunError
from oncurve.runs.atomic_files import disk_errors
from oncurve.runs.database.reader import RunReader
from oncurve.runs.feedback import preference_lines, read_preferences
from oncurve.runs.folder import RunFolder, list_runs
from oncurve.runs.preference_pairs import best_against_worst

if TYPE_CHECKING:
    pass


def doctor(
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Look at this machine: versions, GPU, a training step, the sandbox, the disk. Ends with 2 where something is wrong."""
    with Console(stderr=True).status("looking"):
        from oncurve.operations import doctor
        from oncurve.terminal.checks import checks_data, render_checks
        from oncurve.terminal.errors import hush

        hush()
        checks = list(doctor.diagnose(runs))
    if as_json:
        say_json(checks_data(checks))
    else:
        say(render_checks("this machine", checks, "Oncurve can train here"))
    if any(check.mark == "wrong" for check in checks):
        raise typer.Exit(2)


def pairs(
    run: RunName,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Write here; a file that exists is refused.")],
    stage: Annotated[str | None, typer.Option("--stage", help="Only this stage's groups; unset: all.")] = None,
    people: Annotated[bool, typer.Option("--people", help="What people said in the studio, in place of rewards.")] = False,
    runs: Runs = RUNS,
) -> None:
    """Write preference pairs of a run's groups: the best completion against the worst, as JSON lines."""
    folder = RunFolder.open(run, runs)
    with RunReader.open(folder.path) as store:
        if people:
            text = preference_lines(read_preferences(folder.path, store))
        else:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in best_against_worst(store, stage))
    if not text:
        because = "nobody has ranked completions" if people else "no recorded group has completions of different rewards"
        ranked = "rank groups in the studio (`oncurve studio`), or leave --people out for pairs by reward"
        fix = ranked if people else "look at it with `oncurve show`, or name another run"
        raise RunError(folder.name, "no pairs", because=because, fix=fix)
    if out.exists():
        raise RunError(str(out), "already there", because="nothing is written over", fix="choose another name")
    with disk_errors(out):
        out.write_text(text, encoding="utf-8")
    count = text.count("\n")
    say(Text(f'{out}: {count} pairs; for a stage with type = "reward_model" or "dpo": prompt, chosen, rejected'))


def replay(
    run: RunName,
    step: Annotated[int, typer.Option("--step", min=1, help="The step.")],
    group: Annotated[int, typer.Option("--group", min=0, help="The group, counted from 0.")],
    stage: Annotated[str | None, typer.Option("--stage", help="Its stage; unset: the last that has such groups.")] = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Sample a group again from the checkpoint before it, and show that it is identical. Ends with 2 where it is not."""
    folder = RunFolder.open(run, runs)
    trust_if_asked(trusted, folder)
    with Console(stderr=True).status("doing it again"):
        from oncurve.operations import replay
        from oncurve.terminal.errors import hush
        from oncurve.terminal.group import render_replay, replay_data

        hush()
        found = replay.replay(folder, stage, step, group)
    if as_json:
        say_json({"run": folder.name, "group": group, **replay_data(found)})
    else:
        say(render_replay(found, Text(f"{folder.name}  {found.stage} step {step}  group {group}", "bold")))
    if found.differences:
        raise typer.Exit(2)


def verify(
    run: RunName,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Check a run: its database, every byte of its checkpoints, its recipe, and that its model loads. Ends with 2 where
    something is wrong."""
    folder = RunFolder.open(run, runs)
    trust_if_asked(trusted, folder)
    with Console(stderr=True).status("reading"):
        from oncurve.operations import verify
        from oncurve.terminal.checks import checks_data, render_checks
        from oncurve.terminal.errors import hush

        hush()
        checks = list(verify.verify(folder))
    if as_json:
        say_json({"run": folder.name, **checks_data(checks)})
    else:
        say(render_checks(f"{folder.name}  {folder.path}", checks, "the run is whole"))
    if any(check.mark == "wrong" for check in checks):
        raise typer.Exit(2)


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
    from oncurve.terminal import show

    folder = RunFolder.open(run, runs)
    if group is not None and step is None:
        raise RecipeError("--group", group, because="a group is one of a step", fix="add --step N")
    if bad:
        from oncurve.terminal import bad_batches as shown

        say_json(shown.bad_data(folder)) if as_json else say(shown.render_bad(folder))
    elif timing:
        from oncurve.terminal import timing as by_phase

        say_json(by_phase.timing_data(folder)) if as_json else say(by_phase.render_timing(folder))
    elif as_json:
        say_json(show.show_data(folder, stage, step, group))
    elif step is None:
        say(show.render_run(folder))
    elif group is None:
        say(show.render_step(folder, stage, step))
    else:
        say(show.render_one_group(folder, stage, step, group))
