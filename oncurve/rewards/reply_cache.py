"""Cache of what comes from outside: results of nondeterministic rewards (judges, timeouts, user functions) and observations of
environments, so that a repeated step gets the same.

A nondeterministic reward is called once for each group of a step. Its results are stored in run.db, and a step that is repeated
(after a kill, by `oncurve replay`) reads them, failures and timeouts included. Observations are stored as they arrive.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from oncurve.agents.episode_record import END, PREFIX, UNFINISHED
from oncurve.records import Aspect, Group
from oncurve.rewards.base import Reward

Write = Callable[[Mapping[str, str]], None]
AskReward = Callable[[], list[Aspect]]


def is_nondeterministic(reward: Reward) -> bool:
    """Whether a second call may return something else."""
    return bool(getattr(reward, "is_nondeterministic", False) or getattr(reward, "is_async", False))


class ReplyCache:
    """The results of one step or evaluation at a time. Thread-safe: asynchronous rewards call it from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        self._new: dict[str, str] = {}
        self._write: Write | None = None

    def load(self, known: Mapping[str, str], write: Write | None = None) -> None:
        """Switches to another step or evaluation, with the results that are stored for it. ``write`` stores new ones at once,
        before the step has ended."""
        with self._lock:
            self._known, self._new, self._write = dict(known), {}, write

    @property
    def new_replies(self) -> dict[str, str]:
        """The results since `load`, to be stored."""
        with self._lock:
            return dict(self._new)

    def get(self, key: str) -> str | None:
        """What was stored under a key; None if nothing was."""
        with self._lock:
            return self._known.get(key)

    def add(self, key: str, reply: str) -> None:
        """Adds a reply that took long to get. It is stored at once if `load` got a ``write``, else with the step's other new
        replies. Call it from the thread of the run's database."""
        with self._lock:
            self._known[key] = reply
            if self._write is None:
                self._new[key] = reply
        if self._write is not None:
            self._write({key: reply})

    def drop_episodes(self) -> int:
        """Forgets all episodes, which then start again. Returns how many had finished. Call it like `add`."""
        with self._lock:
            keys = [key for key in self._known if key.startswith(PREFIX)]
            finished = [key for key in keys if key.endswith(f"/{END}") and self._known[key] != UNFINISHED]
            for key in keys:
                del self._known[key]
                self._new.pop(key, None)
        if self._write is not None:
            self._write(dict.fromkeys(finished, UNFINISHED))
        return len(finished)

    def get_or_ask(self, reward: Reward, group: Group, ask: AskReward) -> list[Aspect]:
        """The stored result for a group, else that of ``ask``. If two threads ask for the same, the first result counts."""
        key = _key(reward.name, group)
        with self._lock:
            reply = self._known.get(key)
        if reply is None:
            new_reply = _encode(ask())
            with self._lock:
                reply = self._known.setdefault(key, new_reply)
                self._new.setdefault(key, reply)
        return _decode(reply, reward)


def _key(name: str, group: Group) -> str:
    """A hash of the reward's name, the prompt's id and every completion's tokens."""
    digest = hashlib.sha256(json.dumps([name, group.prompt.id]).encode())
    for completion in group.completions:
        digest.update(len(completion.token_ids).to_bytes(8, "little"))
        digest.update(completion.token_ids.astype("<i8").tobytes())
    return digest.hexdigest()


def _encode(aspects: list[Aspect]) -> str:
    """JSON, which restores floats bit for bit."""
    return json.dumps([[a.value, a.failure, a.reason, a.steps] for a in aspects], separators=(",", ":"))


def _decode(reply: str, reward: Reward) -> list[Aspect]:
    rows: list[tuple[float | None, str | None, str | None, Any]] = json.loads(reply)
    return [Aspect(reward.name, value, reward.weight, failure, reason, _steps(steps)) for value, failure, reason, steps in rows]


def _steps(steps: Any) -> tuple[tuple[int, float], ...] | None:
    return None if steps is None else tuple((int(token), float(value)) for token, value in steps)
