"""What the page can ask for: one function per address. All but feedback and trials only read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

from oncurve import __version__, trust
from oncurve.errors import RecipeError, RewardError, RunError
from oncurve.rewards.registry import REWARDS
from oncurve.runs.database.reader import Kind
from oncurve.runs.folder import RunFolder
from oncurve.studio import curves, feedback, groups, rewards, run_list
from oncurve.studio.open_run import check_agreed, find_run, finite, open_reader, recipe_of
from oncurve.studio.queries import Comparison, CompletionFilter

api = APIRouter(prefix="/api")
SAID_OF = 20_000
"""Completions, the newest, over which the rewards page counts."""
Step = Annotated[int, Query(ge=0)]


def _runs_dir(request: Request) -> Path:
    runs_dir: Path = request.app.state.runs_dir
    return runs_dir


def _run(request: Request, name: str) -> RunFolder:
    return find_run(_runs_dir(request), name)


@api.get("/about")
def about(request: Request) -> dict[str, Any]:
    return {"version": __version__, "runs_dir": str(_runs_dir(request)), "metrics": curves.metric_words()}


@api.get("/runs")
def all_runs(request: Request) -> list[dict[str, Any]]:
    return run_list.overview(_runs_dir(request))


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
        found = store.events()[-200:]
    return [{"time": e.time, "kind": e.kind, "message": e.message, "stage": e.stage, "step": e.step} for e in found]


@api.get("/runs/{name}/step")
def run_step(request: Request, name: str, stage: str, step: Step, kind: Kind = "train") -> dict[str, Any]:
    return groups.step_data(_run(request, name), stage, step, kind)


@api.get("/runs/{name}/group")
def run_group(request: Request, name: str, stage: str, step: Step, position: Step, kind: Kind = "train") -> dict[str, Any]:
    return groups.group_data(_run(request, name), groups.GroupLocation(stage, step, kind, position))


@api.get("/runs/{name}/prompt")
def run_prompt(request: Request, name: str, id: str) -> dict[str, Any]:
    return groups.prompt_data(_run(request, name), id)


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
    before: int | None = None,
) -> dict[str, Any]:
    compared = tuple(map(_comparison, aspect or ()))
    wanted = CompletionFilter(text, stage, step, kind, compared, failed, cut, no_signal)
    run = _run(request, name)
    return groups.highest_kl(run, wanted) if highest_kl else groups.search_data(run, wanted, before)


def _comparison(written: str) -> tuple[str, Comparison, float]:
    """`format:lt:1` as ("format", "lt", 1.0)."""
    name, _, rest = written.rpartition(":")
    name, _, sign = name.rpartition(":")
    try:
        value = finite(float(rest))
    except ValueError:
        value = None
    if not name or sign not in ("lt", "ge") or value is None:
        raise RecipeError("aspect", written, because="it is not written as name:lt:number or name:ge:number", fix="mend it")
    return name, "lt" if sign == "lt" else "ge", value


@api.get("/runs/{name}/feedback")
def run_feedback(request: Request, name: str) -> dict[str, Any]:
    return feedback.feedback_data(_run(request, name))


@api.post("/runs/{name}/feedback")
def add_feedback(request: Request, name: str, label: feedback.AnyLabel) -> dict[str, Any]:
    run = _run(request, name)
    feedback.add_label(run, label)
    return feedback.feedback_data(run)


@api.get("/runs/{name}/pairs.jsonl", response_class=PlainTextResponse)
def run_pairs(request: Request, name: str) -> str:
    return feedback.pairs_lines(_run(request, name))


@api.get("/runs/{name}/rewards")
def run_rewards(request: Request, name: str) -> dict[str, Any]:
    """The recipe's rewards, and what each has said of late."""
    run = _run(request, name)
    recipe = recipe_of(run)
    with open_reader(run) as store:
        last = store.last_completion()
        since = max(1, last - SAID_OF + 1)
        said = []
        for row in store.said_by_aspect(since):
            reasons = []
            for told in store.reasons(since, row["name"]):
                example = store.place_of(told["example"])
                line = None if example is None else groups.completion_line(example)
                reasons.append({"said": told["said"], "failed": bool(told["failed"]), "times": told["times"], "example": line})
            keys = ("name", "weight", "asked", "mean", "lowest", "highest", "failures")
            said.append({**{key: row[key] for key in keys}, "reasons": reasons})
    limit = recipe.stage_to_grade().max_new_tokens
    configs = rewards.rewards_of(recipe)
    asks = [str(power) for power in trust.powers_of_rewards(configs)]
    return {"rewards": configs, "asks": asks, "said": said, "of": last - since + 1, "max_new_tokens": limit}


@api.get("/runs/{name}/audit")
def run_audit(request: Request, name: str) -> dict[str, Any]:
    return rewards.audit_data(_run(request, name))


@api.get("/rewards")
def reward_types() -> dict[str, Any]:
    """The built-in rewards that a page may ask for, with their options."""
    return {
        name: {
            "says": (kind.options.__doc__ or "").strip(),
            "options": [
                {"name": key, "says": field.description or "", "default": None if field.is_required() else field.default}
                for key, field in kind.options.model_fields.items()
            ],
        }
        for name, kind in REWARDS.items()
        if name not in ("python", "judge")
    }


@api.post("/trial")
def try_rewards(request: Request, asked: rewards.Trial, run: str | None = None, trusted: bool = False) -> dict[str, Any]:
    """Scores texts by the rewards given, or by those of a run's recipe, which run code and send keys only if that is agreed."""
    if run is not None:
        found = _run(request, run)
        recipe = recipe_of(found)
        limit = asked.max_new_tokens or recipe.stage_to_grade().max_new_tokens
        asked = asked.model_copy(update={"rewards": rewards.rewards_of(recipe), "max_new_tokens": limit})
    powers = trust.powers_of_rewards(asked.rewards)
    if powers and run is None:
        raise RewardError(
            "rewards",
            "; ".join(map(str, powers)),
            because="rewards that are written on a page may not run code or send a key",
            fix="write them in a recipe: oncurve rewards try RECIPE --completion TEXT",
        )
    check_agreed(request, powers, ticked=trusted)
    return rewards.run_trial(asked)
