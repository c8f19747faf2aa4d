"""A step's groups, one group in full, one prompt through training, and searches: what the Groups page shows."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from oncurve.errors import OncurveError, RunError
from oncurve.objective_specs import AdvantageScale, Baseline
from oncurve.recipe.defaults import advantage_settings, kl_settings
from oncurve.recipe.schema.stages import Grpo, Ppo, Trpo
from oncurve.records import (
    Aspect,
    Completion,
    EpisodeRecord,
    Floats,
    Observation,
    Prompt,
    ScoredCompletion,
    TokenStats,
    ToolCall,
    message_text,
)
from oncurve.runs.database import row_codec
from oncurve.runs.database.reader import Kind
from oncurve.runs.folder import RunFolder
from oncurve.runs.views import aspect_view, completion_view, finite, finite_values, json_text
from oncurve.studio.open_run import open_reader
from oncurve.studio.queries import CompletionFilter, CompletionPage
from oncurve.tasks.base import TAGS
from oncurve.trust import load_recipe_of

KL_STEPS = 5
"""Steps of highest KL that are searched for the completions of highest KL."""
EXCERPT = 280
"""Characters of a text in a list."""
EPISODE_TEXT = 4000
"""Characters of a tool call's arguments and of its result."""
TOKENIZER = "tokenizer.json"
CHARACTERS = re.compile("|".join(map(re.escape, TAGS)) + r"|[\s\S]")


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
    """The start of a prompt: of its text, or of the last thing that the user says in a conversation."""
    if row["prompt"] is not None:
        return cell_text(row["prompt"])[:EXCERPT]
    said = [message["content"] for message in json.loads(cell_text(row["messages"])) if message.get("role") == "user"]
    return (said[-1] if said and isinstance(said[-1], str) else cell_text(row["messages"]))[:EXCERPT]


def group_data(run: RunFolder, location: GroupLocation) -> dict[str, Any]:
    """One group in full, its completions in the order in which they were sampled; the page sorts them."""
    with open_reader(run) as store:
        group = store.scored_group(location.stage, location.step, location.kind, location.position)
        if group is None:
            raise RunError(
                run.name,
                f"no group {location.position} at {location.stage} {location.step}",
                because="it was not recorded",
                fix="choose a step and a group of the run",
            )
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
        "aspects": [aspect_with_steps(aspect) for aspect in scored.aspects],
        "tokens": _tokens(scored, texts, advantages, row_codec.stats_of(row)),
        "episode": None if scored.completion.episode is None else _episode(scored.completion.episode),
    }


def _episode(episode: EpisodeRecord) -> dict[str, Any]:
    """The turns of an agent, each with the tokens [start, end) that the policy wrote and the tool calls among them."""
    turns = [
        {
            "start": start,
            "end": end,
            "calls": [_call(call) for call in observation.calls],
            "reply": _reply(observation),
            "reward": finite(observation.reward),
            "failure": None if observation.failure is None else json_text(observation.failure),
        }
        for start, end, observation in episode.turns
    ]
    outcome = episode.outcome
    return {"turns": turns, "reward": finite(outcome.reward), "failure": outcome.failure and json_text(outcome.failure)}


def _reply(observation: Observation) -> str | None:
    """What was said to a turn, without the results of its tool calls."""
    reply = observation.reply
    if isinstance(reply, tuple):
        said = [message for message in reply if message["role"] != "tool" or not observation.calls]
        reply = "\n".join(f"{message['role']}: {message_text(message)}" for message in said) or None
    return json_text(reply)[:EPISODE_TEXT] if isinstance(reply, str) else None


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(dict(call.arguments), ensure_ascii=False)
    return {
        "name": json_text(call.name),
        "arguments": json_text(arguments)[:EPISODE_TEXT],
        "result": json_text(call.result)[:EPISODE_TEXT],
        "failure": None if call.failure is None else json_text(call.failure),
        "seconds": finite(call.seconds),
    }


def tokenizer_of(run: RunFolder) -> Tokenizer | None:
    """The run's tokenizer, if its file is on this machine: in the run's folder, its model's folder, or the hub's cache."""
    for path in _tokenizer_paths(run):
        if path.is_file():
            return _load_tokenizer(path, path.stat().st_mtime_ns)
    return None


def _tokenizer_paths(run: RunFolder) -> list[Path]:
    paths = [run.tokenizer / TOKENIZER, run.model / TOKENIZER]
    try:
        source = load_recipe_of(run).model.source
    except OncurveError:
        return paths
    if source != "tiny":
        paths.append(Path(source) / TOKENIZER)
        cached = try_to_load_from_cache(source, TOKENIZER) if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) else None
        if isinstance(cached, str):
            paths.append(Path(cached))
    return paths


@lru_cache(maxsize=8)
def _load_tokenizer(path: Path, changed: int) -> Tokenizer | None:
    """``changed`` is part of the cache key, so that a new version of the file is read again."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # tokenizers raises plain Exception for any invalid file
        return None


def token_texts(completion: Completion, tokenizer: Tokenizer | None) -> list[str] | None:
    """One text per token; None if the text can't be split into its tokens.

    Without a tokenizer file, the text is split into characters and tags, as the built-in model's tokenizer does. The result is
    used if its length matches the number of tokens; the end token has no text.
    """
    ids = completion.token_ids.tolist()
    if tokenizer is not None:
        return _decoded(tokenizer, ids)
    texts = CHARACTERS.findall(completion.text)
    missing = len(ids) - len(texts)
    return texts + [""] * missing if 0 <= missing <= 1 else None


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Decodes as a stream: a character that spans several tokens belongs to the last of them."""
    stream: Any = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in ids]


def aspect_with_steps(aspect: Aspect) -> dict[str, Any]:
    return {**aspect_view(aspect), "steps": None if aspect.steps is None else [list(step) for step in aspect.steps]}


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


def grading_data(run: RunFolder, location: GroupLocation) -> dict[str, Any]:
    """The data for What-if: how the stage computes advantages, and the step's rewards. ``off`` says why there is no What-if."""
    settings = grading_settings(run, location)
    if isinstance(settings, str):
        return {"settings": None, "off": settings, "batch": []}
    with open_reader(run) as store:
        groups = store.step(location.stage, location.step).groups
    batch = [[gradable(scored) for scored in graded.scored.scored] for graded in groups]
    return {"settings": settings, "off": None, "batch": batch}


def grading_settings(run: RunFolder, location: GroupLocation) -> dict[str, Any] | str:
    """The stage's advantage settings, or the reason why What-if can't compute advantages as the stage does."""
    if location.kind == "eval":
        return "Held-out completions are not trained on, so they have no advantages."
    try:
        stage = next((s for s in load_recipe_of(run).stages if s.label == location.stage), None)
    except OncurveError as error:
        return f"The run's recipe can't be read ({error.what}), so its advantage settings are not known."
    if isinstance(stage, Ppo):
        return "PPO's advantages come from its critic, and the critic's values are not recorded."
    if not isinstance(stage, Grpo | Trpo):
        return "This stage does not train on advantages."
    if isinstance(stage, Grpo) and stage.kl.beta > 0 and kl_settings(stage)[0] == "reward":
        return "This run subtracts the KL to the reference from each reward first, and these KL sums are not recorded."
    baseline, scale = advantage_settings(stage)
    if baseline not in SHOWN_BASELINES or scale not in SHOWN_SCALES:
        return f"This page does not compute advantages with baseline = {baseline} and scale = {scale}."
    return {"baseline": baseline, "scale": scale, "eps": stage.advantage.eps, "mask_cut": stage.mask_cut}


SHOWN_BASELINES: frozenset[Baseline] = frozenset({"mean", "leave_one_out", "none"})
SHOWN_SCALES: frozenset[AdvantageScale] = frozenset({"group", "batch", "whiten", "none"})
"""What web/src/formulas/advantages.ts computes."""


def gradable(scored: ScoredCompletion) -> dict[str, Any]:
    """What `oncurve.algos.advantages.grade` reads of a completion (that module needs torch, which the studio does not load)."""
    completion = scored.completion
    counted = [aspect for aspect in scored.aspects if aspect.weight != 0]
    has_outcome = any(aspect.value is not None for aspect in counted)
    steps = [[end, aspect.weight * reward] for aspect in counted for end, reward in aspect.steps or ()]
    return {
        "reward": finite(scored.total) if has_outcome else None,
        "failed": scored.failure is not None,
        "truncated": completion.is_truncated,
        "length": len(completion.token_ids),
        "mask": None if completion.loss_mask.all() else completion.loss_mask.tolist(),
        "steps": steps if any(aspect.steps is not None for aspect in counted) else None,
    }


def prompt_data(run: RunFolder, prompt_id: str, accuracy: Sequence[str] = ()) -> dict[str, Any]:
    """Every group of one prompt. ``accuracy`` names the aspects in which a score of 1 means correct."""
    with open_reader(run) as store:
        rows = store.groups_of_prompt(prompt_id, accuracy)
    numbers = ("mean", "lowest", "highest", "length")
    return {
        "prompt_id": prompt_id,
        "asked": [
            {
                **{key: row[key] for key in ("stage", "step", "kind", "group", "completions", "solved")},
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
    """The completions that match and are furthest from the reference, by mean KL per token that the policy wrote, in the steps
    whose KL was highest."""
    with open_reader(run) as store:
        if conditions.asks_for_calls and not store.has_episodes():
            return _page(CompletionPage(), store.last_completion())
        steps = store.steps_by_metric("kl", KL_STEPS, conditions.stage)
        if conditions.stage is not None and conditions.step is not None:
            steps = [(conditions.stage, conditions.step)]
        searched = [row for stage, step in steps for row in store.token_kl(stage, step, conditions)]
        total = store.last_completion()
    candidates = [(kl, row) for row in searched if row["matches"] and (kl := _mean_kl(row)) is not None]
    highest = sorted(candidates, key=lambda pair: -pair[0])[:limit]
    page = _page(CompletionPage([row for _, row in highest], None, len(searched)), total)
    for entry, (kl, _) in zip(page["completions"], highest, strict=True):
        entry["kl"] = kl
    return page


def _mean_kl(row: sqlite3.Row) -> float | None:
    """The mean over the loss mask: tokens that the environment wrote have no KL and are recorded as 0."""
    kl = row_codec.floats(row["kl"])
    written = kl if row["loss_mask"] is None else kl[row_codec.bools(row["loss_mask"])]
    return float(np.mean(written)) if len(written) and np.isfinite(written).all() else None


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
