"""The sequences of an agent's rollout, and which of them a call continues.

A call whose messages extend those of an earlier call, with the reply that the agent got, continues its sequence: the tokens so
far are the recorded ones, never encoded again, and only the new messages are encoded. If it branches off an earlier turn, or if
another call continues the sequence at the moment, it begins a new sequence after the recorded tokens. Any other call begins a
new sequence.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from oncurve.engines.native.session import SampledToken
from oncurve.records import (
    Completion,
    EpisodeRecord,
    Floats,
    Group,
    Ints,
    Message,
    Observation,
    Outcome,
    Prompt,
    StopReason,
    ToolCall,
)
from oncurve.runs.database import row_codec
from oncurve.strict_json import parse_json


@dataclass(eq=False)
class RolloutSequence:
    """One sequence of a rollout: a context, and the turns of the policy with what the agent said between them.

    ``messages`` are those of the conversation, replies included; None for text completions, whose ``text`` is the prompt with
    all that followed it. ``ended`` counts the rollout's turns before its last one. ``is_busy`` while a call continues it.
    """

    context_ids: Ints
    messages: tuple[Message, ...] | None
    tools: str
    text: str
    ended: int = 0
    is_busy: bool = False
    is_full: bool = False
    """Whether its last turn was as long as it could be: up to the stage's limit or the end of the context, and not only up to
    the limit of the call."""
    prompt_lengths: list[int] = field(default_factory=list)
    """How many tokens came before each turn, its context included."""
    token_ids: list[int] = field(default_factory=list)
    logps: list[tuple[float, float, float]] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    """The tokens [first, end) of each turn of the policy."""
    stops: list[StopReason] = field(default_factory=list)
    """Why each turn ended."""
    lengths: list[int] = field(default_factory=list)
    """How many messages, or characters of the text, the conversation had after each turn."""
    replies: list[Message] = field(default_factory=list)
    """Each turn as a message."""
    said: list[tuple[Message, ...]] = field(default_factory=list)
    """The messages that were new before each turn."""

    @property
    def stop(self) -> StopReason:
        return self.stops[-1]

    def ids_after(self, turn: int) -> Ints:
        """All tokens up to the end of a turn."""
        return np.concatenate((self.context_ids, np.asarray(self.token_ids[: self.turns[turn][1]], np.int64)))

    @property
    def loss_mask(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        mask = np.zeros(len(self.token_ids), np.bool_)
        for first, end in self.turns:
            mask[first:end] = True
        return mask

    @property
    def text_ids(self) -> Ints:
        """The tokens after the context, without the end token."""
        ids = np.asarray(self.token_ids, np.int64)
        return ids[:-1] if self.stop == "end" else ids

    def add_turn(self, reply_ids: Sequence[int], tokens: Sequence[SampledToken], room: int) -> None:
        """What the agent said, and the policy's turn that followed. ``room``: the most tokens that the turn could have."""
        self.token_ids += reply_ids
        self.logps += [(0.0, 0.0, 0.0)] * len(reply_ids)
        first = len(self.token_ids)
        self.token_ids += [token.token_id for token in tokens]
        self.logps += [(*token.sampling_logps, token.logp) for token in tokens]
        self.turns.append((first, len(self.token_ids)))
        last_stop = tokens[-1].stop
        assert last_stop is not None, "a turn has ended"
        self.stops.append(last_stop)
        self.is_full = len(tokens) >= room

    @property
    def order(self) -> tuple[int, list[int], list[int]]:
        """The sort key of a rollout's sequences: the context's length, then the tokens. Parallel calls begin and end in any
        order, so the order of arrival is not reproducible."""
        return len(self.context_ids), self.context_ids.tolist(), self.token_ids


@dataclass(frozen=True)
class Continued:
    """The place that a call continues: a sequence, after one of its turns. ``new`` are the messages, the text or the tokens
    that follow it."""

    sequence: RolloutSequence
    turn: int
    new: Any

    @property
    def branches(self) -> bool:
        """Whether the sequence itself can't continue here."""
        return self.sequence.is_busy or self.turn + 1 < len(self.sequence.turns)

    @property
    def parts(self) -> tuple[int, ...]:
        """The lengths of the contexts that it continues."""
        lengths = self.sequence.prompt_lengths
        return tuple(lengths[: len(lengths) - len(self.sequence.turns) + self.turn + 1])


def find_continued(sequences: Sequence[RolloutSequence], messages: Sequence[Message], tools: str) -> Continued | None:
    """Where a chat continues one of the sequences."""
    canonical, found = [to_canonical(message) for message in messages], list[Continued]()
    for sequence in sequences:
        if sequence.messages is None or sequence.tools != tools:
            continue
        pairs = zip((to_canonical(message) for message in sequence.messages), canonical, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        for turn, length in enumerate(sequence.lengths):
            if length <= same and length < len(messages):
                found.append(Continued(sequence, turn, tuple(messages[length:])))
    return _longest(found)


def find_continued_text(sequences: Sequence[RolloutSequence], prompt: str | Sequence[int]) -> Continued | None:
    """Where a text prompt continues one of the sequences."""
    found = list[Continued]()
    for sequence in sequences:
        for turn, length in enumerate(sequence.lengths if sequence.messages is None else ()):
            known: Any = sequence.text[:length] if isinstance(prompt, str) else sequence.ids_after(turn).tolist()
            start: Any = prompt[: len(known)] if isinstance(prompt, str) else list(prompt[: len(known)])
            if start == known and 0 < len(known) < len(prompt):
                found.append(Continued(sequence, turn, prompt[len(known) :]))
    return _longest(found)


def _longest(found: Sequence[Continued]) -> Continued | None:
    """The place after which the least is new; of equal ones, one at which the sequence itself can continue."""
    return min(found, key=lambda place: (len(place.new), place.branches), default=None)


def to_canonical(message: Message) -> dict[str, Any]:
    """A message in the form in which messages are compared: clients drop empty keys, and write a call's arguments anew."""
    calls = [(call["function"]["name"], _parsed(call["function"]["arguments"])) for call in message.get("tool_calls") or ()]
    return {
        "role": message["role"],
        "content": message.get("content") or "",
        "tool_calls": calls,
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
    }


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments)
    except ValueError:
        return arguments


def final_sequence(sequences: Sequence[RolloutSequence]) -> RolloutSequence | None:
    """The sequence of the rollout's last turn: its conversation is what rewards read."""
    return max(sequences, key=lambda sequence: (sequence.ended, sequence.order), default=None)


def to_completion(sequences: Sequence[RolloutSequence], text: str, outcome: Outcome) -> Completion:
    """A rollout's sequences as one completion. All of them, the first too, have a context of their own (`with_prompt`)."""
    ordered = sorted(sequences, key=lambda sequence: sequence.order)
    starts = [sum(len(earlier.token_ids) for earlier in ordered[:index]) for index in range(len(ordered))]
    ids = np.asarray([token_id for sequence in ordered for token_id in sequence.token_ids], np.int64)
    table = np.asarray([logps for sequence in ordered for logps in sequence.logps], np.float32).reshape(-1, 3)
    logps, sampled, raw = (_shared(column, table) for column in range(3))
    mask = np.concatenate([sequence.loss_mask for sequence in ordered] or [np.zeros(0, np.bool_)])
    last = final_sequence(sequences)
    return Completion(
        token_ids=ids,
        text=text,
        stop="end" if last is None or (last.stop == "length" and not last.is_full) else last.stop,
        logps=logps,
        sampled_logps=sampled,
        raw_logps=raw,
        loss_mask=mask,
        contexts=tuple((start, sequence.context_ids) for start, sequence in zip(starts, ordered, strict=True)),
        episode=EpisodeRecord(
            tuple(turn for start, sequence in zip(starts, ordered, strict=True) for turn in _turns(sequence, start, ordered)),
            outcome,
        ),
    )


def _turns(
    sequence: RolloutSequence, start: int, sequences: Sequence[RolloutSequence]
) -> Iterator[tuple[int, int, Observation]]:
    """Each turn of a sequence with what the agent said to it. ``sequences`` are all of the rollout."""
    answers = [*sequence.said[1:], None]
    for turn, ((first, end), message, answer) in enumerate(zip(sequence.turns, sequence.replies, answers, strict=True)):
        calls = _tool_calls(sequence, turn, message, [sequence, *sequences]) if "tool_calls" in message else ()
        yield start + first, start + end, Observation(answer, message, calls)


def _tool_calls(
    sequence: RolloutSequence, turn: int, message: Message, sequences: Sequence[RolloutSequence]
) -> tuple[ToolCall, ...]:
    """The tool calls of a turn. Their results are the tool messages that follow it, in its own sequence or in another one that
    continues the conversation. A call whose result the agent did not send has an empty one; whether it failed is not known."""
    length, calls = sequence.lengths[turn], message["tool_calls"]
    before, results = (sequence.messages or ())[:length], [""] * len(calls)
    for other in sequences:
        messages = other.messages or ()
        said = list(takewhile(lambda message: message["role"] == "tool", messages[length:]))
        if said and _are_same(messages[:length], before):
            results = _results(messages[length - 1].get("tool_calls") or (), said)
            break
    return tuple(_tool_call(call, result) for call, result in zip(calls, results, strict=True))


def _are_same(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Whether two conversations are the same in the form in which `find_continued` compares them."""
    return one == other or [to_canonical(message) for message in one] == [to_canonical(message) for message in other]


def _results(calls: Sequence[Mapping[str, Any]], said: Sequence[Message]) -> list[str]:
    """The result of each call: the tool message with its id, as the client wrote both. Calls and messages whose ids match no
    other are matched in their order."""
    left = list(said)
    found: list[Message | None] = []
    for call in calls:
        found.append(next((message for message in left if message.get("tool_call_id") == call["id"]), None))
        left = [message for message in left if message is not found[-1]]
    others = iter(left)
    return [(message or next(others, {"content": ""}))["content"] for message in found]


def _tool_call(call: Mapping[str, Any], result: str) -> ToolCall:
    name, written = call["function"]["name"], call["function"]["arguments"]
    arguments = _parsed(written)
    return ToolCall(name, arguments if isinstance(arguments, dict) else written, result, seconds=None)


def _shared(column: int, table: Floats) -> Floats:
    """A column of log-probs; the first column if both are equal, as in completions of other engines."""
    same = np.array_equal(table[:, column], table[:, 0])
    return np.ascontiguousarray(table[:, 0 if same else column])


def build_group(prompt: Prompt, completions: Sequence[Completion]) -> Group:
    """The rollouts of one prompt. Its tokens are the context that most of them have: these share it, and the other sequences
    keep contexts of their own. There are none if no agent made a call."""
    contexts = {ids.tobytes(): ids for completion in completions for _, ids in completion.contexts}
    counts = Counter(context for completion in completions for context in {ids.tobytes() for _, ids in completion.contexts})
    prompt_ids = min(
        contexts.values(), key=lambda ids: (-counts[ids.tobytes()], len(ids), ids.tolist()), default=np.zeros(0, np.int64)
    )
    return Group(prompt, prompt_ids, tuple(with_prompt(completion, prompt_ids) for completion in completions))


def with_prompt(completion: Completion, prompt_ids: Ints) -> Completion:
    """The completion with one sequence moved to the front and stripped of its context: one whose context is the prompt. If
    there is none, the completion is unchanged."""
    which = next((i for i, (_, ids) in enumerate(completion.contexts) if np.array_equal(ids, prompt_ids)), None)
    if which is None:
        return completion
    start, end = ([first for first, _ in completion.contexts] + [len(completion.token_ids)])[which : which + 2]
    index = np.r_[start:end, 0:start, end : len(completion.token_ids)]

    def moved(position: int) -> int:
        return position - start if start <= position < end else position + (end - start) * (position < start)

    episode = completion.episode
    if episode is not None:
        turns = sorted((moved(first), moved(last - 1) + 1, answer) for first, last, answer in episode.turns)
        episode = replace(episode, turns=tuple(turns))
    others = [(moved(first), ids) for i, (first, ids) in enumerate(completion.contexts) if i != which]
    return replace(
        completion,
        token_ids=completion.token_ids[index],
        logps=completion.logps[index],
        sampled_logps=completion.sampled_logps[index],
        raw_logps=completion.raw_logps[index],
        loss_mask=completion.loss_mask[index],
        contexts=tuple(others),
        episode=episode,
    )


def rollout_json(completion: Completion) -> str:
    """A rollout as it is stored when it has ended: a repeated step reads it instead of running the agent again."""
    arrays = {
        "token_ids": row_codec.int_blob(completion.token_ids),
        "logps": row_codec.float_blob(completion.logps),
        "sampled_logps": row_codec.float_blob(completion.sampled_logps),
        "raw_logps": row_codec.float_blob(completion.raw_logps),
        "loss_mask": row_codec.bool_blob(completion.loss_mask),
    }
    assert completion.episode is not None
    return json.dumps(
        {
            "text": completion.text,
            "stop": completion.stop,
            "episode": row_codec.episode_json(completion.episode),
            "contexts": [[first, b64encode(row_codec.int_blob(ids)).decode()] for first, ids in completion.contexts],
            **{name: b64encode(blob).decode() for name, blob in arrays.items()},
        }
    )


def rollout_of(stored: str) -> Completion:
    data = json.loads(stored)

    def blob(name: str) -> bytes:
        return b64decode(data[name])

    logps = row_codec.floats(blob("logps"))
    return Completion(
        token_ids=row_codec.ints(blob("token_ids")),
        text=data["text"],
        stop=data["stop"],
        logps=logps,
        sampled_logps=row_codec.floats(blob("sampled_logps")),
        raw_logps=row_codec.floats(blob("raw_logps")),
        loss_mask=row_codec.bools(blob("loss_mask")),
        contexts=tuple((int(first), row_codec.ints(b64decode(ids))) for first, ids in data["contexts"]),
        episode=row_codec.episode_of(data["episode"]),
    )
