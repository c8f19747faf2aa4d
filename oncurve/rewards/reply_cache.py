"""What came from outside the run, kept: a judge, a worker's clock or any function may answer otherwise when asked again.

A reward that is `outside` is asked once about each group of a step. Its answer is kept with the run, and a step that is done
again (after a kill, by `oncurve replay`) gets the answer that was kept, failures and timeouts included.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from oncurve.records import Aspect, Group
from oncurve.rewards.base import Reward

AskReward = Callable[[], list[Aspect]]


def is_nondeterministic(reward: Reward) -> bool:
    """Whether its answer may be another one next time."""
    return bool(getattr(reward, "outside", False) or getattr(reward, "waits", False))


class ReplyCache:
    """The replies of one place in a run (a step, a measurement) at a time. Rewards ask from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        self._fresh: dict[str, str] = {}

    def load(self, known: Mapping[str, str]) -> None:
        """Turns to another place, with the replies that were kept for it."""
        with self._lock:
            self._known, self._fresh = dict(known), {}

    @property
    def new_replies(self) -> dict[str, str]:
        """The replies that came in since `at`, to be kept."""
        with self._lock:
            return dict(self._fresh)

    def get_or_ask(self, reward: Reward, group: Group, ask: AskReward) -> list[Aspect]:
        """What was answered about the group, else what is answered now. Where two ask the same, the first answer counts."""
        key = _key(reward.name, group)
        with self._lock:
            kept = self._known.get(key)
        if kept is None:
            fresh = _written(ask())
            with self._lock:
                kept = self._known.setdefault(key, fresh)
                self._fresh.setdefault(key, kept)
        return _read(kept, reward)


def _key(name: str, group: Group) -> str:
    """A group by what was asked and what was written, token by token."""
    digest = hashlib.sha256(json.dumps([name, group.prompt.id]).encode())
    for completion in group.completions:
        digest.update(len(completion.token_ids).to_bytes(8, "little"))
        digest.update(completion.token_ids.astype("<i8").tobytes())
    return digest.hexdigest()


def _written(aspects: list[Aspect]) -> str:
    """JSON writes floats so that they come back bit for bit."""
    return json.dumps([[a.value, a.failure, a.reason, a.steps] for a in aspects], separators=(",", ":"))


def _read(text: str, reward: Reward) -> list[Aspect]:
    rows: list[tuple[float | None, str | None, str | None, Any]] = json.loads(text)
    return [Aspect(reward.name, value, reward.weight, failure, reason, _steps(steps)) for value, failure, reason, steps in rows]


def _steps(steps: Any) -> tuple[tuple[int, float], ...] | None:
    return None if steps is None else tuple((int(token), float(value)) for token, value in steps)
