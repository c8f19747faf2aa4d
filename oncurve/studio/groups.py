"""A step's groups, one group in full, one prompt through training, and searches: what the Groups page shows."""

from __future__ import annotations

import math
import sqlite3
from dataclasses import dataclass
from typing import Any

import numpy as np

from oncurve.errors import OncurveError, RunError
from oncurve.recipe.defaults import advantage_settings, kl_settings
from oncurve.recipe.schema.stages import Grpo
from oncurve.records import Floats, Prompt, ScoredCompletion, TokenStats
from oncurve.runs.database import row_codec
from oncurve.runs.database.reader import Kind
from oncurve.runs.folder import RunFolder
from oncurve.runs.views import aspect_view, completion_view, finite, finite_values, json_text
from oncurve.studio.open_run import open_reader, recipe_of
from oncurve.studio.queries import CompletionFilter, CompletionPage, StudioQueries
from oncurve.studio.token_texts import token_texts, tokenizer_of

KL_STEPS = 5
"""Steps of highest KL that are searched for the completions of highest KL."""
EXCERPT = 280
"""Characters of a text in a list."""


@dataclass(frozen=True, slots=True)
class GroupLocation:
    """Which group of a run."""

    stage: str
    step: int
    kind: Kind
    position: int


def step_data(run: RunFolder, stage: str, step: int, kind: Kind) -> dict[str, Any]:
    """A step at a glance: its metrics, its groups, and the total reward of every completion."""
    with open_reader(run) as store:
        groups = store.group_heads(stage, step, kind)
        metrics = store.metrics_of(stage, step) if kind == "train" else {}
        totals = store.totals(stage, step, kind)
    return {
        "stage": stage,
        "step": step,
        "kind": kind,
        "metrics": finite_values(metrics),
        "groups": [_head(row) for row in groups],
        "totals": [[finite(value) for value in group] for group in totals],
    }


def _head(row: sqlite3.Row) -> dict[str, Any]:
    return {
        "position": row["position"],
        "prompt_id": cell_text(row["prompt_id"]),
        "prompt": _prompt_excerpt(row),
        "signal": None if row["has_signal"] is None else bool(row["has_signal"]),
        **{key: finite(row[key]) for key in ("mean", "lowest", "highest")},
        "completions": row["completions"],
        "failures": row["failures"],
    }


def cell_text(cell: str | bytes | None) -> str:
    """The text of a database cell, as JSON can hold it."""
    return json_text(row_codec.text_of(cell) or "")


def _prompt_excerpt(row: sqlite3.Row) -> str:
    """The start of a prompt: of its text, or of its messages as JSON."""
    return cell_text(row["messages"] if row["prompt"] is None else row["prompt"])[:EXCERPT]


def group_data(run: RunFolder, location: GroupLocation) -> dict[str, Any]:
    """One group in full, its completions in the order in which they were sampled; the page sorts them."""
    with open_reader(run) as store:
        group = store.scored_group(location.stage, location.step, location.kind, location.position)
        if group is None:
            raise RunError(
                run.name,
                f"no group {location.position} at {location.stage} {location.step}",
                because="it was not recorded",
                fix="choose one from the list",
            )
        totals = store.totals(location.stage, location.step, location.kind)
        scored, rows = group
        tokenizer = tokenizer_of(run)
        completions = [
            _completion(completion, row, token_texts(completion.completion, tokenizer))
            for completion, row in zip(scored.scored, rows, strict=True)
        ]
    return {
        "run": run.name,
        "stage": location.stage,
        "step": location.step,
        "kind": location.kind,
        "position": location.position,
        "prompt": _prompt(scored.group.prompt),
        "completions": completions,
        "grading": grading(run, location.stage),
        "batch": [[finite(value) for value in group_totals] for group_totals in totals],
    }


def _prompt(prompt: Prompt) -> dict[str, Any]:
    return {"id": json_text(prompt.id), "shown": json_text(prompt.shown), "columns": dict(prompt.columns)}


def _completion(scored: ScoredCompletion, row: sqlite3.Row, texts: list[str] | None) -> dict[str, Any]:
    advantages = None if row["advantages"] is None else row_codec.advantages_of(row)
    return {
        **completion_view(scored),
        "id": row["id"],
        "position": row["position"],
        "total": finite(scored.total),
        "graded": None if row["graded"] is None else bool(row["graded"]),
        "advantage": finite(row["advantage"]),
        "aspects": [
            {**aspect_view(aspect), "steps": None if aspect.steps is None else [list(step) for step in aspect.steps]}
            for aspect in scored.aspects
        ],
        "tokens": _tokens(scored, texts, advantages, row_codec.stats_of(row)),
    }


def _tokens(
    scored: ScoredCompletion, texts: list[str] | None, advantages: Floats | None, stats: TokenStats | None
) -> dict[str, Any]:
    completion = scored.completion
    mask = completion.loss_mask
    return {
        "ids": completion.token_ids.tolist(),
        "pieces": None if texts is None else [json_text(text) for text in texts],
        "mask": None if mask.all() else mask.tolist(),
        "logp": _rounded(completion.logps, 4),
        "advantage": None if advantages is None else _rounded(advantages, 5),
        "ratio": None if stats is None else _rounded(stats.ratio, 5),
        "entropy": None if stats is None else _rounded(stats.entropy, 4),
        "clipped": None if stats is None else stats.clipped.tolist(),
        "kl": None if stats is None or stats.kl is None else _rounded(stats.kl, 4),
    }


def _rounded(values: Floats, digits: int) -> list[float | None]:
    """An array as JSON numbers, with as many significant digits as a page can show."""
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in values.tolist()]


def grading(run: RunFolder, name: str) -> dict[str, Any] | None:
    """How a stage computes advantages, which What-if starts from. None if the recipe can't be read or the stage is not grpo."""
    try:
        stage = next((s for s in recipe_of(run).stages if s.label == name), None)
    except OncurveError:
        return None
    if not isinstance(stage, Grpo):
        return None
    baseline, scale = advantage_settings(stage)
    return {
        "baseline": baseline,
        "scale": scale,
        "eps": stage.advantage.eps,
        "mask_cut": stage.mask_cut,
        "kl_in_reward": stage.kl.beta > 0 and kl_settings(stage)[0] == "reward",
        "group_size": stage.group_size,
    }


def prompt_data(run: RunFolder, prompt_id: str) -> dict[str, Any]:
    """Every group of one prompt."""
    with open_reader(run) as store:
        rows = store.groups_of_prompt(prompt_id)
    numbers = ("mean", "lowest", "highest", "length")
    return {
        "prompt_id": prompt_id,
        "asked": [
            {
                **{key: row[key] for key in ("stage", "step", "kind", "group", "completions")},
                "signal": None if row["has_signal"] is None else bool(row["has_signal"]),
                **{key: finite(row[key]) for key in numbers},
            }
            for row in rows
        ],
    }


def search_data(run: RunFolder, conditions: CompletionFilter, before: int | None) -> dict[str, Any]:
    with open_reader(run) as store:
        return _page(store.find(conditions, before), store.last_completion())


def highest_kl(run: RunFolder, conditions: CompletionFilter, limit: int = 50) -> dict[str, Any]:
    """The completions furthest from the reference by mean KL per token, in the steps whose KL was highest."""
    with open_reader(run) as store:
        steps = store.steps_by_metric("kl", KL_STEPS)
        if conditions.stage is not None and conditions.step is not None:
            steps = [(conditions.stage, conditions.step)]
        candidates = _with_kl(store, steps)
        total = store.last_completion()
    highest = sorted(candidates, key=lambda pair: -pair[0])[:limit]
    page = _page(CompletionPage([row for _, row in highest], None, len(candidates)), total)
    for entry, (kl, _) in zip(page["completions"], highest, strict=True):
        entry["kl"] = kl
    return page


def _with_kl(store: StudioQueries, steps: list[tuple[str, int]]) -> list[tuple[float, sqlite3.Row]]:
    rows = [row for stage, step in steps for row in store.token_kl(stage, step)]
    means = ((float(np.mean(row_codec.floats(row["kl"]))), row) for row in rows if row["kl"])
    return [(kl, row) for kl, row in means if np.isfinite(kl)]


def _page(page: CompletionPage, total: int) -> dict[str, Any]:
    return {
        "completions": [completion_line(row) for row in page.rows],
        "before": page.before,
        "seen": page.searched,
        "of": total,
    }


def completion_line(row: sqlite3.Row) -> dict[str, Any]:
    """A completion in a list."""
    return {
        **{key: row[key] for key in ("id", "stage", "step", "kind", "group", "place", "length", "stop")},
        "prompt": _prompt_excerpt(row),
        "prompt_id": cell_text(row["prompt_id"]),
        "text": cell_text(row["text"])[:EXCERPT],
        "total": finite(row["total"]),
        "advantage": finite(row["advantage"]),
        "failure": None if row["failure"] is None else cell_text(row["failure"]),
    }
