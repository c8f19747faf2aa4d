"""A completion in progress, and the search for stop strings in its text."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

import numpy as np

from oncurve.engines.base import SampleRequest
from oncurve.models.policy import Policy
from oncurve.records import Bools, Completion, Floats, Ints, StopReason

SPARE = 4
"""Tokens decoded beyond a stop string's length in bytes: the first of them may start inside a character."""


@dataclass(eq=False)
class Sequence:
    """One completion in progress: sample ``sample`` of request number ``group``.

    ``logps`` is [T, 3]: at the sampling temperature, as sampled (truncated), and at temperature 1. ``forced`` holds the spans
    [first, end) that an environment wrote; ``turns`` the texts of both sides, the policy's first. ``versions`` maps a position
    to the version of the weights from there on. A scheduler fills in tokens and log-probs when the sequence ends. ``streamed``
    counts the tokens that a session has handed out: it survives preemption.
    """

    request: SampleRequest
    group: int
    sample: int
    token_ids: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    logps: Floats = field(default_factory=lambda: np.zeros((0, 3), np.float32))
    stop: StopReason | None = None
    versions: dict[int, int] = field(default_factory=dict)
    turns: list[str] = field(default_factory=list)
    forced: list[tuple[int, int]] = field(default_factory=list)
    streamed: int = 0

    @property
    def turn_start(self) -> int:
        """Where the policy's present turn begins: after the environment's last reply."""
        return self.forced[-1][1] if self.forced else 0

    @property
    def loss_mask(self) -> Bools:
        """False on tokens that the environment wrote."""
        mask = np.ones(len(self.token_ids), bool)
        for first, end in self.forced:
            mask[first:end] = False
        return mask

    @property
    def text_ids(self) -> Ints:
        """The tokens of the text: all but the end token."""
        return self.token_ids[:-1] if self.stop == "end" else self.token_ids

    def restart(self) -> None:
        """Forget progress, after a preemption: the same random numbers will sample the same tokens again."""
        self.versions, self.turns, self.forced = {}, [], []

    def extend(self, token_ids: abc.Sequence[int], logps: abc.Sequence[tuple[float, float, float]]) -> None:
        """Append tokens, for engines that get them turn by turn."""
        self.token_ids = np.concatenate((self.token_ids, np.asarray(token_ids, np.int64)))
        self.logps = np.concatenate((self.logps, np.asarray(logps, np.float32).reshape(-1, 3)))

    def force(self, token_ids: abc.Sequence[int]) -> None:
        """Append an environment's reply; its log-probs are 0."""
        self.forced.append((len(self.token_ids), len(self.token_ids) + len(token_ids)))
        self.extend(token_ids, [(0.0, 0.0, 0.0)] * len(token_ids))

    def to_completion(self, text: str) -> Completion:
        """The record of a sequence that has ended."""
        assert self.stop is not None
        logps, sampled, raw = np.ascontiguousarray(self.logps.T)
        sampled = logps if np.array_equal(sampled, logps) else sampled
        raw = logps if np.array_equal(raw, logps) else raw
        versions = tuple((at, v) for at, v in self.versions.items() if at < len(self.token_ids)) or None
        return Completion(self.token_ids, text, self.stop, logps, sampled, raw, self.loss_mask, versions)


def ends_with_stop(policy: Policy, token_ids: Ints | abc.Sequence[int], strings: abc.Sequence[str], more: int = 0) -> bool:
    """Whether one of the strings is in the last tokens' text, or was up to ``more`` tokens ago.

    A token is at least one byte, so as many tokens as the longest string has bytes are enough to hold any of them.
    """
    longest = max(len(s.encode()) for s in strings)
    text = policy.decode(np.asarray(token_ids[-(longest + SPARE + more) :], np.int64))
    return any(s in text for s in strings)
