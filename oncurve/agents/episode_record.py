"""Episodes as run.db stores them: one JSON text for each observation, stored as soon as it arrives.

The keys are `episode/<prompt id>/<sample>/<part>`, where the part is `start`, the number of a turn, or `end`. An episode with
an `end` is finished: a repeated step replays it. One without starts again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from oncurve.records import Ints, Observation, Outcome, Prompt, Reply, ToolCall

PREFIX, START, END = "episode/", "start", "end"
UNFINISHED = "null"
"""Replaces the `end` of an episode that starts again: what is stored of it is not replayed."""


def episode_key(prompt: Prompt, sample: int, part: str | int) -> str:
    return f"{PREFIX}{prompt.id}/{sample}/{part}"


def encode_start(text: str | None) -> str:
    return json.dumps({"text": text})


def decode_start(stored: str) -> str | None:
    text = json.loads(stored)["text"]
    return None if text is None else str(text)


def encode_observation(observation: Observation, turn_ids: Ints, start: int) -> str:
    """The observation of a turn, with the turn's place and a hash of its tokens."""
    fields = asdict(observation)
    fields["calls"] = [asdict(call) for call in observation.calls]
    fields["reply"] = _encode_reply(observation.reply)
    place = {"start": start, "end": start + len(turn_ids), "turn": turn_hash(turn_ids)}
    return json.dumps({**fields, **place}, default=str, separators=(",", ":"))


def decode_observation(stored: str) -> tuple[int, int, str, Observation]:
    """(the turn's first token, the token after its last, its hash, the observation)."""
    fields = json.loads(stored)
    calls = tuple(ToolCall(**call) for call in fields["calls"])
    reply = _decode_reply(fields["reply"])
    observation = Observation(reply, fields["message"], calls, fields["reward"], fields["failure"])
    return fields["start"], fields["end"], fields["turn"], observation


def encode_outcome(outcome: Outcome) -> str:
    return json.dumps({"reward": outcome.reward, "failure": outcome.failure})


def decode_outcome(stored: str) -> Outcome:
    return Outcome(**json.loads(stored))


def turn_hash(turn_ids: Ints) -> str:
    return hashlib.sha256(turn_ids.astype("<i8").tobytes()).hexdigest()[:16]


def _encode_reply(reply: Reply | None) -> Any:
    if reply is None or isinstance(reply, str):
        return reply
    return {"messages": [dict(message) for message in reply]} if isinstance(reply, tuple) else {"tokens": reply.tolist()}


def _decode_reply(stored: Any) -> Reply | None:
    if stored is None or isinstance(stored, str):
        return stored
    if "messages" in stored:
        return tuple(stored["messages"])
    import numpy as np  # readers of runs need no arrays until they meet one

    return np.asarray(stored["tokens"], np.int64)
