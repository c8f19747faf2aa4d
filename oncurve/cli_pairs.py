"""`oncurve pairs`: preference data from a run's groups, for reward models and DPO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from oncurve.cli_options import RUNS, RunName, Runs, say
from oncurve.errors import RunError
from oncurve.runs.disk import disk_errors
from oncurve.runs.folder import RunFolder
from oncurve.runs.pairs import best_against_worst
from oncurve.runs.store import Store
from oncurve.studio.feedback import pairs_lines


def pairs(
    run: RunName,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Write here; a file that exists is refused.")],
    stage: Annotated[str | None, typer.Option("--stage", help="Only this stage's groups; unset: all.")] = None,
    people: Annotated[bool, typer.Option("--people", help="What people said in the studio, in place of rewards.")] = False,
    runs: Runs = RUNS,
) -> None:
    """Write preference pairs of a run's groups: the best completion against the worst, as JSON lines."""
    folder = RunFolder.open(run, runs)
    if people:
        text = pairs_lines(folder)
    else:
        with Store.open(folder.path) as store:
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
