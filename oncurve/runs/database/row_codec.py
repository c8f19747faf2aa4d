"""Converts records to rows of ``oncurve.runs.database.connection`` and back, bit for bit."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast, get_args

import numpy as np
from numpy.typing import NDArray

from oncurve.records import (
    Aspect,
    Bools,
    Completion,
    EpisodeRecord,
    Floats,
    GradedGroup,
    Group,
    Ints,
    Observation,
    Outcome,
    Prompt,
    Routing,
    ScoredCompletion,
    ScoredGroup,
    StopReason,
    TokenStats,
    ToolCall,
)

Row = tuple[Any, ...]
T = TypeVar("T")


def float_blob(values: Floats) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def floats(blob: bytes) -> Floats:
    return np.frombuffer(blob, dtype="<f4").astype(np.float32)


def int_blob(values: Ints) -> bytes:
    """Token ids as 32-bit integers: half the size, and no vocabulary has 2³¹ entries."""
    return np.asarray(values, dtype="<i4").tobytes()


def ints(blob: bytes) -> Ints:
    return np.frombuffer(blob, dtype="<i4").astype(np.int64)


def routing_blob(values: Routing) -> bytes:
    return np.asarray(values, dtype="<i2").tobytes()


def routing_of(blob: bytes, tokens: int) -> Routing:
    """[tokens, E] from the number of tokens."""
    if tokens == 0 or len(blob) % (2 * tokens):
        raise ValueError(f"routing has {len(blob)} bytes for {tokens} tokens")
    return np.frombuffer(blob, dtype="<i2").astype(np.int16).reshape(tokens, -1)


def bool_blob(values: Bools) -> bytes:
    return np.asarray(values, dtype=np.bool_).tobytes()


def bools(blob: bytes) -> Bools:
    return np.frombuffer(blob, dtype=np.bool_).copy()


def text_cell(text: str | None) -> str | bytes | None:
    """Text for SQLite. A text with a lone surrogate, which UTF-8 can't encode, is stored unchanged as a blob."""
    if text is None or text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def text_of(cell: str | bytes | None) -> str | None:
    return cell.decode("utf-8", "surrogatepass") if isinstance(cell, bytes) else cell if cell is None else _typed(str, cell)


def _typed(kind: type[T], cell: Any) -> T:
    if not isinstance(cell, kind):
        raise TypeError(f"{cell!r:.40} is no {kind.__name__}")
    return cell


def _check_lengths(row: sqlite3.Row, length: int, size: int, *names: str) -> None:
    """Arrays of one completion have one element for each token."""
    for name in names:
        if row[name] is not None and len(row[name]) != size * length:
            raise ValueError(f"{name} has {len(row[name])} bytes for {length} tokens")


def to_json(value: Any) -> str:
    return json.dumps(value, default=_plain, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """For types that JSON lacks: numpy numbers and arrays become Python's, mappings dicts, the rest (a date, bytes) text."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


@dataclass(slots=True)
class StepRows:
    """The rows of a step's or an evaluation's groups, by table, so that each table is written with one statement."""

    groups: list[Row] = field(default_factory=list)
    completions: list[Row] = field(default_factory=list)
    aspects: list[Row] = field(default_factory=list)
    tokens: list[Row] = field(default_factory=list)
    versions: list[Row] = field(default_factory=list)
    contexts: list[Row] = field(default_factory=list)
    episodes: list[Row] = field(default_factory=list)
    routing: list[Row] = field(default_factory=list)
    prompt_routing: list[Row] = field(default_factory=list)


Graded = GradedGroup | ScoredGroup
Stats = Sequence[TokenStats | None]


def group_rows(
    stage: str, step: int, groups: Sequence[Graded], stats: Sequence[Stats], last_group: int, last_completion: int
) -> StepRows:
    """Rows for ``groups``, with ids that follow the last ones. A ScoredGroup, of an evaluation, has no advantages."""
    rows = StepRows()
    for position, (graded, group_stats) in enumerate(zip(groups, stats, strict=True)):
        group_id = last_group + 1 + position
        rows.groups.append(_group_row(group_id, stage, step, position, graded))
        if graded.group.prompt_routing is not None:
            rows.prompt_routing.append((group_id, routing_blob(graded.group.prompt_routing)))
        scored = graded.scored.scored if isinstance(graded, GradedGroup) else graded.scored
        for index, (completion, token_stats) in enumerate(zip(scored, group_stats, strict=True)):
            last_completion += 1
            advantages = graded.advantages[index] if isinstance(graded, GradedGroup) else None
            is_graded = int(graded.graded[index]) if isinstance(graded, GradedGroup) else None
            rows.completions.append(_completion_row(last_completion, group_id, index, completion, is_graded, advantages))
            rows.aspects += [_aspect_row(last_completion, i, aspect) for i, aspect in enumerate(completion.aspects)]
            rows.tokens.append(_token_row(last_completion, completion.completion, advantages, token_stats))
            if completion.completion.versions is not None:
                rows.versions.append((last_completion, to_json(completion.completion.versions)))
            if completion.completion.episode is not None:
                rows.episodes.append((last_completion, episode_json(completion.completion.episode)))
            if completion.completion.routing is not None:
                rows.routing.append((last_completion, routing_blob(completion.completion.routing)))
            rows.contexts += [(last_completion, first, int_blob(ids)) for first, ids in completion.completion.contexts]
    return rows


def _group_row(group_id: int, stage: str, step: int, position: int, graded: Graded) -> Row:
    group, prompt = graded.group, graded.group.prompt
    kind, signal = ("train", int(graded.has_signal)) if isinstance(graded, GradedGroup) else ("eval", None)
    messages = None if prompt.messages is None else to_json([dict(m) for m in prompt.messages])
    prompt_cells = (text_cell(prompt.id), text_cell(prompt.text), messages, to_json(dict(prompt.columns)))
    return (group_id, stage, step, kind, position, *prompt_cells, int_blob(group.prompt_ids), signal)


def _completion_row(
    row_id: int, group_id: int, position: int, scored: ScoredCompletion, graded: int | None, advantages: Floats | None
) -> Row:
    completion = scored.completion
    sampled = (text_cell(completion.text), completion.stop, completion.length)
    advantage = _mean_advantage(completion, advantages)
    return (row_id, group_id, position, *sampled, scored.total, graded, text_cell(scored.failure), advantage)


def _mean_advantage(completion: Completion, advantages: Floats | None) -> float | None:
    """Mean over the tokens that the policy sampled, in float64; None if there are none. A constant is returned unrounded."""
    if advantages is None:
        return None
    sampled = np.asarray(advantages)[completion.loss_mask]
    if not sampled.size:
        return None
    first = float(sampled[0])
    return first if bool((sampled == sampled[0]).all()) else float(sampled.mean(dtype=np.float64))


def _aspect_row(completion_id: int, position: int, aspect: Aspect) -> Row:
    steps = None if aspect.steps is None else to_json(aspect.steps)
    result = (aspect.value, aspect.weight, text_cell(aspect.failure), text_cell(aspect.reason), steps)
    return (completion_id, position, aspect.name, *result)


def _token_row(completion_id: int, completion: Completion, advantages: Floats | None, stats: TokenStats | None) -> Row:
    logps = float_blob(completion.logps)
    mask = None if completion.loss_mask.all() else bool_blob(completion.loss_mask)
    sampled, raw = _unless_same(completion.sampled_logps, logps), _unless_same(completion.raw_logps, logps)
    graded = None if advantages is None else _constant_or_all(float_blob(advantages))
    sampler = (int_blob(completion.token_ids), mask, logps, sampled, raw, graded)
    if stats is None:
        return (completion_id, *sampler, None, None, None, None, None)
    kl = None if stats.kl is None else float_blob(stats.kl)
    learner = (float_blob(stats.logps), float_blob(stats.ratio), float_blob(stats.entropy), bool_blob(stats.clipped), kl)
    return (completion_id, *sampler, *learner)


def _unless_same(values: Floats, logps: bytes) -> bytes | None:
    blob = float_blob(values)
    return None if blob == logps else blob


def _constant_or_all(blob: bytes) -> bytes:
    return blob[:4] if blob == blob[:4] * (len(blob) // 4) else blob


def prompt_of(row: sqlite3.Row) -> Prompt:
    messages = None if row["messages"] is None else tuple(dict(message) for message in json.loads(row["messages"]))
    columns = dict(json.loads(row["columns"]))
    return Prompt(id=text_of(row["prompt_id"]) or "", text=text_of(row["prompt"]), messages=messages, columns=columns)


def completion_of(row: sqlite3.Row) -> Completion:
    """The completion as sampled. Log-probs that are equal share one array, as they did then."""
    ids, logps = ints(row["token_ids"]), floats(row["logps"])
    _check_lengths(row, len(ids), 4, "logps", "sampled_logps", "raw_logps")
    _check_lengths(row, len(ids), 1, "loss_mask")
    return Completion(
        token_ids=ids,
        text=text_of(row["text"]) or "",
        stop=_stop_of(row["stop"]),
        logps=logps,
        sampled_logps=logps if row["sampled_logps"] is None else floats(row["sampled_logps"]),
        raw_logps=logps if row["raw_logps"] is None else floats(row["raw_logps"]),
        loss_mask=np.ones(len(ids), dtype=np.bool_) if row["loss_mask"] is None else bools(row["loss_mask"]),
    )


def _stop_of(cell: Any) -> StopReason:
    if cell not in get_args(StopReason):
        raise ValueError(f"a completion ended by {cell!r:.40}")
    return cast(StopReason, cell)


def aspect_of(row: sqlite3.Row) -> Aspect:
    steps = None if row["steps"] is None else tuple((int(token), float(reward)) for token, reward in json.loads(row["steps"]))
    return Aspect(
        name=_typed(str, row["name"]),
        value=None if row["value"] is None else float(row["value"]),
        weight=float(row["weight"]),
        failure=text_of(row["failure"]),
        reason=text_of(row["reason"]),
        steps=steps,
    )


def advantages_of(row: sqlite3.Row) -> Floats:
    values: NDArray[np.float32] = floats(row["advantages"])
    length = len(row["token_ids"]) // 4
    if len(values) == 1:
        return np.repeat(values, length)
    _check_lengths(row, length, 4, "advantages")
    return values


def stats_of(row: sqlite3.Row) -> TokenStats | None:
    if row["learner_logps"] is None:
        return None
    length = len(row["token_ids"]) // 4
    _check_lengths(row, length, 4, "learner_logps", "ratio", "entropy", "kl")
    _check_lengths(row, length, 1, "clipped")
    return TokenStats(
        logps=floats(row["learner_logps"]),
        ratio=floats(row["ratio"]),
        entropy=floats(row["entropy"]),
        clipped=bools(row["clipped"]),
        kl=None if row["kl"] is None else floats(row["kl"]),
    )


def episode_json(episode: EpisodeRecord) -> str:
    turns = [[start, end, _observation_cell(observation)] for start, end, observation in episode.turns]
    return to_json({"turns": turns, "reward": episode.outcome.reward, "failure": episode.outcome.failure})


def _observation_cell(observation: Observation) -> dict[str, Any]:
    """An observation without its empty fields. A reply is a text, a list of messages, or tokens."""
    reply = {"tokens": observation.reply} if isinstance(observation.reply, np.ndarray) else observation.reply
    calls = [
        [call.name, call.arguments, call.result, call.failure, call.seconds, *(() if call.value is None else (call.value,))]
        for call in observation.calls
    ]
    cell: dict[str, Any] = {"reply": reply, "message": observation.message, "calls": calls or None}
    cell |= {"reward": observation.reward, "failure": observation.failure}
    return {name: value for name, value in cell.items() if value is not None}


def episode_of(cell: Any) -> EpisodeRecord:
    data = json.loads(_typed(str, cell))
    turns = tuple((int(start), int(end), _observation_of(observation)) for start, end, observation in data["turns"])
    return EpisodeRecord(turns, Outcome(data["reward"], data["failure"]))


def _observation_of(cell: Mapping[str, Any]) -> Observation:
    reply = cell.get("reply")
    if isinstance(reply, dict):
        reply = np.asarray(reply["tokens"], np.int64)
    elif isinstance(reply, list):
        reply = tuple(reply)
    calls = tuple(ToolCall(*call) for call in cell.get("calls", ()))
    return Observation(reply, cell.get("message"), calls, cell.get("reward"), cell.get("failure"))


@dataclass(slots=True)
class CompletionRows:
    """What other tables hold of completions, by completion id."""

    aspects: dict[int, list[Aspect]] = field(default_factory=dict)
    contexts: dict[int, list[tuple[int, Ints]]] = field(default_factory=dict)
    episodes: dict[int, EpisodeRecord] = field(default_factory=dict)
    routing: dict[int, bytes] = field(default_factory=dict)
    prompt_routing: dict[int, bytes] = field(default_factory=dict)
    """By group id."""


def scored_group_of(group: sqlite3.Row, completions: Sequence[sqlite3.Row], others: CompletionRows) -> ScoredGroup:
    """A group from its row, its completions' rows (joined with their tokens), and what other tables hold of them."""

    def scored_of(row: sqlite3.Row) -> ScoredCompletion:
        contexts, episode = tuple(others.contexts.get(row["id"], ())), others.episodes.get(row["id"])
        completion = replace(completion_of(row), contexts=contexts, episode=episode)
        if row["id"] in others.routing:
            completion = replace(completion, routing=routing_of(others.routing[row["id"]], len(completion.token_ids)))
        return ScoredCompletion(completion, tuple(others.aspects.get(row["id"], ())))

    scored = tuple(map(scored_of, completions))
    prompt_ids, prompt_routing, first = ints(group["prompt_ids"]), None, scored[0].completion if scored else None
    if group["id"] in others.prompt_routing and first is not None and first.routing is not None:
        blob, experts = others.prompt_routing[group["id"]], first.routing.shape[1]
        prompt_routing = routing_of(blob, len(prompt_ids) - 1) if blob else np.zeros((0, experts), np.int16)
    sampled = Group(prompt_of(group), prompt_ids, tuple(s.completion for s in scored), prompt_routing)
    return ScoredGroup(sampled, scored)
