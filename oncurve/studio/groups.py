"""One step's groups, one group in full, one prompt through training: as the page needs them."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

import numpy as np

from oncurve.errors import OncurveError, RunError
from oncurve.recipe.defaults import advantage_settings, kl_settings
from oncurve.recipe.schema.recipe import Grpo
from oncurve.records import Floats, Prompt, ScoredCompletion, TokenStats
from oncurve.runs.database import row_codec
from oncurve.runs.database.reader import Kind
from oncurve.runs.folder import RunFolder
from oncurve.studio.open_run import finite, finite_all, open_reader, recipe_of
from oncurve.studio.queries import CompletionFilter, CompletionPage, StudioQueries
from oncurve.studio.token_texts import token_texts, tokenizer_of

KL_STEPS = 5
"""Steps of highest KL whose completions are looked at for the highest of their own."""
EXCERPT = 280


@dataclass(frozen=True, slots=True)
class GroupLocation:
    """Which group is meant."""

    stage: str
    step: int
    kind: Kind
    position: int


def step_data(run: RunFolder, stage: str, step: int, kind: Kind) -> dict[str, Any]:
    """A step at a glance: its metrics, its groups, and every total reward in it."""
    with open_reader(run) as store:
        heads = store.group_heads(stage, step, kind)
        metrics = store.metrics_of(stage, step) if kind == "train" else {}
        totals = store.totals(stage, step, kind)
    return {
        "stage": stage,
        "step": step,
        "kind": kind,
        "metrics": {name: finite(value) for name, value in metrics.items()},
        "groups": [_head(row) for row in heads],
        "totals": [[finite(value) for value in group] for group in totals],
    }


def _head(row: sqlite3.Row) -> dict[str, Any]:
    numbers = {key: finite(row[key]) for key in ("mean", "lowest", "highest")}
    signal = None if row["has_signal"] is None else bool(row["has_signal"])
    counts = {"completions": row["completions"], "failures": row["failures"]}
    return {
        "position": row["position"],
        "prompt_id": shown_text(row["prompt_id"]),
        "prompt": _prompt_excerpt(row),
        "signal": signal,
    } | (numbers | counts)


def shown_text(cell: str | bytes | None) -> str:
    """Text that JSON can carry: a lone surrogate, which the store keeps faithfully, is shown as a mark."""
    return (row_codec.text_of(cell) or "").encode("utf-8", "replace").decode("utf-8")


def _prompt_excerpt(row: sqlite3.Row) -> str:
    """A prompt's excerpt from its row, whichever way it was asked."""
    if row["prompt"] is not None:
        return shown_text(row["prompt"])[:EXCERPT]
    return shown_text(row["messages"])[:EXCERPT]


def group_data(run: RunFolder, place: GroupLocation) -> dict[str, Any]:
    """One group in full, its completions in their own order; the page sorts them."""
    with open_reader(run) as store:
        found = store.scored_group(place.stage, place.step, place.kind, place.position)
        if found is None:
            raise RunError(
                run.name,
                f"no group {place.position} at {place.stage} {place.step}",
                because="it was not recorded",
                fix="choose one from the list",
            )
        totals = store.totals(place.stage, place.step, place.kind)
        scored, tokens = found
        tokenizer = tokenizer_of(run)
        completions = [
            _completion(one, row, token_texts(one.completion, tokenizer))
            for one, row in zip(scored.scored, tokens, strict=True)
        ]
    return {
        "run": run.name,
        "stage": place.stage,
        "step": place.step,
        "kind": place.kind,
        "position": place.position,
        "prompt": _prompt(scored.group.prompt),
        "completions": completions,
        "grading": grading(run, place.stage),
        "batch": [[finite(value) for value in group] for group in totals],
    }


def _prompt(prompt: Prompt) -> dict[str, Any]:
    return {"id": shown_text(prompt.id), "shown": shown_text(prompt.shown), "columns": dict(prompt.columns)}


def _completion(scored: ScoredCompletion, row: sqlite3.Row, parts: list[str] | None) -> dict[str, Any]:
    completion = scored.completion
    advantages = None if row["advantages"] is None else row_codec.advantages_of(row)
    return {
        "id": row["id"],
        "position": row["position"],
        "text": shown_text(completion.text),
        "stop": completion.stop,
        "length": completion.length,
        "total": finite(scored.total),
        "graded": None if row["graded"] is None else bool(row["graded"]),
        "failure": scored.failure,
        "advantage": finite(row["advantage"]),
        "aspects": [
            {"name": a.name, "value": finite(a.value), "weight": a.weight, "failure": a.failure, "reason": a.reason,
             "steps": None if a.steps is None else [list(step) for step in a.steps]}
            for a in scored.aspects
        ],
        "tokens": _tokens(scored, parts, advantages, row_codec.stats_of(row)),
    }  # fmt: skip


def _tokens(
    scored: ScoredCompletion, parts: list[str] | None, graded: Floats | None, seen: TokenStats | None
) -> dict[str, Any]:
    completion = scored.completion
    mask = completion.loss_mask
    return {
        "ids": completion.token_ids.tolist(),
        "pieces": None if parts is None else [shown_text(part) for part in parts],
        "mask": None if mask.all() else mask.tolist(),
        "logp": finite_all(completion.logps, 4),
        "advantage": None if graded is None else finite_all(graded, 5),
        "ratio": None if seen is None else finite_all(seen.ratio, 5),
        "entropy": None if seen is None else finite_all(seen.entropy, 4),
        "clipped": None if seen is None else seen.clipped.tolist(),
        "kl": None if seen is None or seen.kl is None else finite_all(seen.kl, 4),
    }


def grading(run: RunFolder, stage: str) -> dict[str, Any] | None:
    """How a stage grades: what the page's what-if starts from. None where the recipe does not tell."""
    try:
        found = next((s for s in recipe_of(run).stages if s.label == stage), None)
    except OncurveError:
        return None
    if not isinstance(found, Grpo):
        return None
    baseline, scale = advantage_settings(found)
    in_reward = found.kl.beta > 0 and kl_settings(found)[0] == "reward"
    return {
        "baseline": baseline,
        "scale": scale,
        "eps": found.advantage.eps,
        "mask_cut": found.mask_cut,
        "kl_in_reward": in_reward,
        "group_size": found.group_size,
    }


def prompt_data(run: RunFolder, prompt_id: str) -> dict[str, Any]:
    """Every time one prompt was asked."""
    with open_reader(run) as store:
        asked = store.of_prompt(prompt_id)
    numbers = ("mean", "lowest", "highest", "length")
    return {
        "prompt_id": prompt_id,
        "asked": [
            {
                **{key: row[key] for key in ("stage", "step", "kind", "group", "completions")},
                "signal": None if row["has_signal"] is None else bool(row["has_signal"]),
                **{key: finite(row[key]) for key in numbers},
            }
            for row in asked
        ],
    }


def search_data(run: RunFolder, wanted: CompletionFilter, before: int | None) -> dict[str, Any]:
    with open_reader(run) as store:
        found = store.find(wanted, before)
        whole = store.last_completion()
    return _page(found, whole)


def highest_kl(run: RunFolder, wanted: CompletionFilter, limit: int = 50) -> dict[str, Any]:
    """Completions furthest from the reference, by their mean KL per token, among the steps whose KL was highest."""
    with open_reader(run) as store:
        steps = store.steps_by_metric("kl", KL_STEPS)
        if wanted.stage is not None and wanted.step is not None:
            steps = [(wanted.stage, wanted.step)]
        measured = _with_kl(store, steps)
        whole = store.last_completion()
    best = sorted(measured, key=lambda pair: -pair[0])[:limit]
    page = _page(CompletionPage([row for _, row in best], None, len(measured)), whole)
    for entry, (kl, _) in zip(page["completions"], best, strict=True):
        entry["kl"] = kl
    return page


def _with_kl(store: StudioQueries, steps: list[tuple[str, int]]) -> list[tuple[float, sqlite3.Row]]:
    found = [row for stage, step in steps for row in store.token_kl(stage, step)]
    means = ((float(np.mean(row_codec.floats(row["kl"]))), row) for row in found if row["kl"])
    return [(kl, row) for kl, row in means if np.isfinite(kl)]


def _page(found: CompletionPage, whole: int) -> dict[str, Any]:
    return {
        "completions": [completion_line(row) for row in found.rows],
        "before": found.before,
        "seen": found.seen,
        "of": whole,
    }


def completion_line(row: sqlite3.Row) -> dict[str, Any]:
    """A completion in a list."""
    plain = {key: row[key] for key in ("id", "stage", "step", "kind", "group", "place", "length", "stop")}
    told = {
        "prompt": _prompt_excerpt(row),
        "prompt_id": shown_text(row["prompt_id"]),
        "text": shown_text(row["text"])[:EXCERPT],
    }
    return {**plain, **told, "total": finite(row["total"]), "advantage": finite(row["advantage"]), "failure": row["failure"]}
