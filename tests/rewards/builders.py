"""Builds groups from texts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from oncurve.records import Aspect, Completion, Group, Prompt
from oncurve.rewards.base import Reward
from oncurve.rewards.mix import aspects_of


def completion(text: str, length: int | None = None) -> Completion:
    count = len(text) if length is None else length
    zeros = np.zeros(count, dtype=np.float32)
    ids, mask = np.arange(count, dtype=np.int64), np.ones(count, dtype=np.bool_)
    return Completion(ids, text, "end", zeros, zeros, zeros, mask)


def group(*texts: str, prompt: str | list[dict[str, str]] = "?", **columns: Any) -> Group:
    question = (
        Prompt(id="p", text=prompt, columns=columns) if isinstance(prompt, str) else Prompt("p", None, tuple(prompt), columns)
    )
    return Group(question, np.zeros(1, dtype=np.int64), tuple(completion(text) for text in texts))


def aspects(reward: Reward, *texts: str, columns: Mapping[str, Any] | None = None) -> list[Aspect]:
    return aspects_of(reward, group(*texts, **(columns or {})))


def values(reward: Reward, *texts: str, **columns: Any) -> list[float | None]:
    return [aspect.value for aspect in aspects(reward, *texts, columns=columns)]
