"""The HTTP API of the page, but for the Playground and the planner: one function per address. Only feedback and notes write,
and only trials run anything."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import sqlite3
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

from oncurve import __version__, trust
from oncurve.errors import RecipeError, RewardError, RunError
from oncurve.runs import feedback
from oncurve.runs.database.reader import Kind
from oncurve.runs.folder import RunFolder
from oncurve.runs.views import finite, json_text
from oncurve.studio import curves, groups, rewards, run_list
from oncurve.studio.open_run import check_agreed, find_run, open_reader
from oncurve.studio.queries import Comparison, CompletionFilter, StudioQueries
from oncurve.training.inputs import find_inputs_folder

api = APIRouter(prefix="/api")
RECENT_COMPLETIONS = 20_000
"""The newest completions, over which the Rewards page computes its statistics."""
RECENT_EPISODES = 2_000
"""The newest completions, in whose calls the tools and failures to search for are looked up."""
HISTOGRAM_BINS = 20
REASONS = 8
"""How many reasons of a reward the Rewards page lists."""
QUOTED = re.compile(r"'[^']*'")
Step = Annotated[int, Query(ge=0)]


def _runs_dir(request: Request) -> Path:
    runs_dir: Path = request.app.state.runs_dir
    return runs_dir


def _run(request: Request, name: str) -> RunFolder:
    return find_run(_runs_dir(request), name)


@api.get("/about")
def about(request: Request) -> dict[str, Any]:
    return {"version": __version__, "runs_dir": str(_runs_dir(request)), "metrics": curves.metric_texts()}


@api.get("/runs")
def all_runs(request: Request) -> list[dict[str, Any]]:
    return run_list.overview(_runs_dir(request))


@api.get("/settings")
def all_settings(request: Request) -> dict[str, dict[str, Any]]:
    """Every run's recipe as dotted keys, for the table of runs and for differences between recipes."""
    return run_list.settings_of_runs(_runs_dir(request))


@api.get("/runs/{name}/verdicts")
def run_verdicts(request: Request, name: str) -> list[dict[str, Any]]:
    return run_list.verdicts(_run(request, name))


@api.post("/runs/{name}/notes")
def set_notes(request: Request, name: str, notes: run_list.RunNotes) -> run_list.RunNotes:
    return run_list.update_notes(_run(request, name), notes)


@api.get("/live")
async def live(request: Request, run: Annotated[list[str], Query()]) -> StreamingResponse:
    stopping: asyncio.Event = request.app.state.stopping
    stream = curves.live(_runs_dir(request), run[:20], stopping)
    return StreamingResponse(stream, media_type="text/event-stream")


@api.get("/runs/{name}/curves")
def run_curves(request: Request, name: str) -> dict[str, Any]:
    return curves.curves(_run(request, name))


@api.get("/runs/{name}/recipe", response_class=PlainTextResponse)
def run_recipe(request: Request, name: str) -> str:
    run = _run(request, name)
    try:
        return run.recipe.read_text("utf-8", "replace")
    except OSError as error:
        raise RunError(run.name, "no recipe", because=str(error), fix="restore recipe.toml from a copy") from error


@api.get("/runs/{name}/events")
def run_events(request: Request, name: str) -> list[dict[str, Any]]:
    with open_reader(_run(request, name)) as store:
        events = store.events()[-200:]
    return [{"time": e.time, "kind": e.kind, "message": e.message, "stage": e.stage, "step": e.step} for e in events]


@api.get("/runs/{name}/step")
def run_step(request: Request, name: str, stage: str, step: Step, kind: Kind = "train") -> dict[str, Any]:
    return groups.step_data(_run(request, name), stage, step, kind)


@api.get("/runs/{name}/group")
def run_group(request: Request, name: str, stage: str, step: Step, position: Step, kind: Kind = "train") -> dict[str, Any]:
    return groups.group_data(_run(request, name), groups.GroupLocation(stage, step, kind, position))


@api.get("/runs/{name}/grading")
def run_grading(request: Request, name: str, stage: str, step: Step, kind: Kind = "train") -> dict[str, Any]:
    return groups.grading_data(_run(request, name), groups.GroupLocation(stage, step, kind, 0))


@api.get("/runs/{name}/prompt")
def run_prompt(request: Request, name: str, id: str) -> dict[str, Any]:
    run = _run(request, name)
    return groups.prompt_data(run, id, rewards.accuracy_aspects(run))


@api.get("/runs/{name}/search")
def run_search(
    request: Request,
    name: str,
    text: str = "",
    stage: str | None = None,
    step: int | None = None,
    kind: Kind | None = None,
    aspect: Annotated[list[str] | None, Query()] = None,
    failed: bool = False,
    cut: bool = False,
    no_signal: bool = False,
    highest_kl: bool = False,
    tool: str | None = None,
    tool_failure: str | None = None,
    before: int | None = None,
) -> dict[str, Any]:
    aspects = tuple(map(_comparison, aspect or ()))
    conditions = CompletionFilter(text, stage, step, kind, aspects, failed, cut, no_signal, tool, tool_failure)
    run = _run(request, name)
    return groups.highest_kl(run, conditions) if highest_kl else groups.search_data(run, conditions, before)


@api.get("/runs/{name}/searchable")
def run_searchable(request: Request, name: str) -> dict[str, Any]:
    """What a search can filter by: the run's reward aspects, the one that defines accuracy, whether KL is recorded, and the
    tools and failures of recent calls."""
    run = _run(request, name)
    with open_reader(run) as store:
        last = store.last_completion()
        aspects = [row["name"] for row in store.aspect_statistics(max(1, last - RECENT_COMPLETIONS + 1))]
        has_kl = any(store.token_kl(stage, step) for stage, step in store.steps_by_metric("kl", 1))
        tools, failures = store.calls(max(1, last - RECENT_EPISODES + 1))
    accuracy = rewards.accuracy_aspects(run)[0]
    calls = {"tools": [json_text(tool) for tool in tools], "tool_failures": failures}
    return {"aspects": aspects, "accuracy": accuracy if accuracy in aspects else None, "kl": has_kl, **calls}


def _comparison(text: str) -> tuple[str, Comparison, float]:
    """Parses `format:lt:1` into ("format", "lt", 1.0)."""
    name, _, rest = text.rpartition(":")
    name, _, sign = name.rpartition(":")
    try:
        value = finite(float(rest))
    except ValueError:
        value = None
    if not name or sign not in ("lt", "ge") or value is None:
        raise RecipeError(
            "aspect", text, because="a condition is NAME:lt:NUMBER or NAME:ge:NUMBER", fix="write it like format:lt:1"
        )
    return name, "lt" if sign == "lt" else "ge", value


@api.get("/runs/{name}/feedback")
def run_feedback(request: Request, name: str) -> dict[str, Any]:
    """The labels of a run, how often the reward agrees with them, and how often people agree with each other."""
    run = _run(request, name)
    labels = feedback.read_labels(run.path)
    with open_reader(run) as store:
        agreement = [preference.agrees for preference in feedback.read_preferences(run.path, store, labels)]
    return {
        "labels": [label.model_dump() for label in labels],
        "pairs": len(agreement),
        "agree": agreement.count(True),
        "disagree": agreement.count(False),
        "undecided": agreement.count(None),
        "raters": dataclasses.asdict(feedback.rater_agreement(labels)),
    }


@api.post("/runs/{name}/feedback")
def add_feedback(request: Request, name: str, label: feedback.AnyLabel) -> dict[str, Any]:
    run = _run(request, name)
    with open_reader(run) as store:
        feedback.add_label(run.path, store, label)
    return run_feedback(request, name)


@api.get("/runs/{name}/pairs.jsonl", response_class=PlainTextResponse)
def run_pairs(request: Request, name: str) -> str:
    run = _run(request, name)
    with open_reader(run) as store:
        return feedback.preference_lines(feedback.read_preferences(run.path, store))


@api.get("/runs/{name}/rewards")
def run_rewards(request: Request, name: str) -> dict[str, Any]:
    """The recipe's rewards, and statistics of each over the newest completions."""
    run = _run(request, name)
    recipe = trust.load_recipe_of(run)
    with open_reader(run) as store:
        last = store.last_completion()
        since = max(1, last - RECENT_COMPLETIONS + 1)
        statistics = []
        for row in store.aspect_statistics(since):
            keys = ("name", "weight", "asked", "mean", "lowest", "highest", "failures")
            own = since, row["name"], row["weight"]
            spread = row["lowest"] is not None and row["lowest"] < row["highest"]
            bins = store.histogram(*own, row["lowest"], row["highest"], HISTOGRAM_BINS) if spread else []
            statistics.append({**{key: row[key] for key in keys}, "bins": bins, "reasons": _reasons(store, *own)})
    limit = recipe.stage_to_grade().max_new_tokens
    configs = rewards.rewards_of(recipe)
    asks = [str(capability) for capability in trust.capabilities_of_rewards(configs)]
    return {"rewards": configs, "asks": asks, "said": statistics, "of": last - since + 1, "max_new_tokens": limit}


def _reasons(store: StudioQueries, since: int, aspect: str, weight: float) -> list[dict[str, Any]]:
    """The failures, then the other reasons, most frequent first. Reasons that differ only in a quoted text are merged."""
    alike: dict[tuple[int, str], list[sqlite3.Row]] = {}
    for row in store.reasons(since, aspect, weight):
        alike.setdefault((row["failed"], QUOTED.sub("'…'", row["said"])), []).append(row)
    counted = [(failed, sum(row["times"] for row in rows), pattern, rows) for (failed, pattern), rows in alike.items()]
    reasons = []
    for failed, times, pattern, rows in sorted(counted, key=lambda one: (-one[0], -one[1]))[:REASONS]:
        value = None if failed else sum(row["times"] * (row["value"] or 0.0) for row in rows) / times
        example = store.completion(rows[0]["example"])
        line = None if example is None else groups.completion_line(example)
        said = groups.cell_text(rows[0]["said"] if len(rows) == 1 else pattern)
        reasons.append({"said": said, "failed": bool(failed), "value": value, "times": times, "example": line})
    return reasons


@api.get("/runs/{name}/audit")
def run_audit(request: Request, name: str) -> dict[str, Any]:
    return rewards.audit_data(_run(request, name))


@api.post("/trial")
def try_rewards(request: Request, trial: rewards.Trial, run: str | None = None, trusted: bool = False) -> dict[str, Any]:
    """Scores texts with the trial's rewards, or with a run's, which run code or send keys only if the user agreed."""
    folder = None
    if run is not None:
        recipe, folder = trust.load_recipe_of(_run(request, run)), find_inputs_folder(_run(request, run))
        limit = trial.max_new_tokens or recipe.stage_to_grade().max_new_tokens
        trial = trial.model_copy(update={"rewards": rewards.rewards_of(recipe), "max_new_tokens": limit})
    capabilities = trust.capabilities_of_rewards(trial.rewards)
    if capabilities and run is None:
        raise RewardError(
            "rewards",
            "; ".join(map(str, capabilities)),
            because="a reward written on the page may not run code or send a key",
            fix="put it in a recipe: oncurve rewards try RECIPE --completion TEXT",
        )
    check_agreed(request, capabilities, ticked=trusted)
    return rewards.run_trial(trial, folder)
