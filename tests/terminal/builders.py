"""Hand-made records to render."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oncurve.records import Aspect, Completion, GradedGroup, Group, Prompt, ScoredCompletion, ScoredGroup, StopReason


def completion(text: str, tokens: int = 3, stop: StopReason = "end") -> Completion:
    logps = np.zeros(tokens, np.float32)
    return Completion(np.arange(tokens, dtype=np.int64), text, stop, logps, logps, logps, np.ones(tokens, bool))


def graded_group(
    texts: Sequence[str], rewards: Sequence[float | None], advantages: Sequence[float], stops: Sequence[StopReason] = ()
) -> GradedGroup:
    """A group with one aspect, `answer`; a reward of None means that it failed."""
    stops = stops or ["end"] * len(texts)
    completions = tuple(completion(text, stop=stop) for text, stop in zip(texts, stops, strict=True))
    failures = [None if reward is not None else "ValueError: odd" for reward in rewards]
    aspects = [(Aspect("answer", reward, failure=failure),) for reward, failure in zip(rewards, failures, strict=True)]
    scored = tuple(ScoredCompletion(c, a) for c, a in zip(completions, aspects, strict=True))
    group = Group(Prompt("asked/1", text="12+34="), np.arange(6, dtype=np.int64), completions)
    tokens = tuple(np.full(3, value, np.float32) for value in advantages)
    return GradedGroup(ScoredGroup(group, scored), tokens, tuple(reward is not None for reward in rewards))
