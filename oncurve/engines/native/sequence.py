"""A completion in progress, and the search for stop strings in its text."""

from __future__ import annotations

from collections import abc
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from oncurve.engines.base import BegunCompletion, SampleRequest, TokenConstraint
from oncurve.models.policy import Policy
from oncurve.records import Bools, Completion, Episode, EpisodeRecord, Floats, Ints, Observation, Outcome, Routing, StopReason

SPARE = 4
"""To find a stop string, the last tokens are decoded: as many as it has bytes, and this many more, because the first of them
may start inside a character."""


@dataclass(eq=False)
class Sequence:
    """One completion in progress: sample ``sample`` of request number ``group``.

    ``logps`` is [T, 3]: at the sampling temperature, as sampled (truncated), and at temperature 1. ``forced`` holds the spans
    [first, end) that an environment wrote, and ``spans`` those of the policy's turns that it has answered. ``versions`` maps a
    position to the version of the weights from there on. A scheduler fills in tokens and log-probs when the sequence ends;
    until then, they are what an earlier call has sampled (``begun``). ``streamed`` counts the tokens that a session has handed
    out.

    ``episode`` is the conversation with an environment, ``answers`` has each turn's tokens with the answer, ``outcome`` how it
    ended. These and ``streamed`` survive preemption: an environment is never asked twice.

    A completion has several sequences if the chat template rewrites its history (`task.history`). Each has its own
    context, which is the prompt of its request, and ``before`` is the sequence before it. They share ``answers`` and the
    episode.

    ``constraint``: which tokens may come next in its slot, if the request has a grammar.
    """

    request: SampleRequest
    group: int
    sample: int
    token_ids: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    logps: Floats = field(default_factory=lambda: np.zeros((0, 3), np.float32))
    stop: StopReason | None = None
    versions: dict[int, int] = field(default_factory=dict)
    forced: list[tuple[int, int]] = field(default_factory=list)
    streamed: int = 0
    answers: list[tuple[Ints, Future[Observation]]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    outcome: Outcome | None = None
    before: Sequence | None = None
    routing: Routing | None = None
    constraint: TokenConstraint | None = None

    def __post_init__(self) -> None:
        self.episode: Episode | None = None
        if self.before is not None:
            self.episode = self.before.episode
        elif self.request.episodes:
            self.episode = self.request.episodes[self.sample - self.request.key.first]
        if self.begun is not None:
            self.token_ids, self.logps, self.stop = self.begun.token_ids, self.begun.logps, self.begun.stop
            self.versions = dict(self.begun.versions)

    @property
    def begun(self) -> BegunCompletion | None:
        """What an earlier call has sampled of it."""
        return self.request.begun[self.sample - self.request.key.first] if self.request.begun else None

    @property
    def chain(self) -> list[Sequence]:
        """The completion's sequences up to this one."""
        return [*(() if self.before is None else self.before.chain), self]

    @property
    def first(self) -> Sequence:
        """The completion's first sequence, which follows its prompt."""
        return self if self.before is None else self.before.first

    @property
    def tokens_before(self) -> int:
        """Tokens of the completion in earlier sequences."""
        return sum(len(sequence.token_ids) for sequence in self.chain[:-1])

    @property
    def turns(self) -> int:
        """The policy's turns so far that the environment has answered, those of earlier sequences included."""
        return sum(len(sequence.spans) for sequence in self.chain)

    def room_after(self, context_ids: Ints) -> int:
        """How many tokens a next sequence with this context may have: what is left of the completion's limit, and no more
        positions than the prompt and the longest completion have."""
        request = self.first.request
        limit = request.sampling.max_new_tokens
        return limit - max(self.tokens_before + len(self.token_ids), len(context_ids) - len(request.prompt_ids))

    def follow(self, group: int, context_ids: Ints, limit: int) -> Sequence:
        """The completion's next sequence. Its random numbers are those of a prompt with another id."""
        first = self.first.request
        prompt = replace(first.prompt, id=f"{first.prompt.id}/sequence/{len(self.chain)}")
        sampling = first.sampling.model_copy(update={"max_new_tokens": limit})
        request = replace(first, prompt=prompt, prompt_ids=context_ids, sampling=sampling, earlier=())
        return Sequence(request, group, self.sample, answers=self.answers, before=self)

    @property
    def turn_start(self) -> int:
        """Where the policy's current turn begins: after the environment's last reply."""
        return self.forced[-1][1] if self.forced else 0

    @property
    def loss_mask(self) -> Bools:
        """False on tokens of this sequence that the environment wrote."""
        mask = np.ones(len(self.token_ids), bool)
        for first, end in self.forced:
            mask[first:end] = False
        return mask

    @property
    def text_ids(self) -> Ints:
        """The tokens of the completion's text: all but the end token."""
        ids = np.concatenate([sequence.token_ids for sequence in self.chain])
        return ids[:-1] if self.stop == "end" else ids

    def restart(self) -> None:
        """Forget progress, after a preemption: the same random numbers will sample the same tokens again."""
        self.versions, self.forced, self.spans = {} if self.begun is None else dict(self.begun.versions), [], []

    def extend(self, token_ids: abc.Sequence[int], logps: abc.Sequence[tuple[float, float, float]]) -> None:
        """Append tokens, for engines that get them turn by turn."""
        self.token_ids = np.concatenate((self.token_ids, np.asarray(token_ids, np.int64)))
        self.logps = np.concatenate((self.logps, np.asarray(logps, np.float32).reshape(-1, 3)))

    def force(self, token_ids: abc.Sequence[int]) -> None:
        """Append an environment's reply; its log-probs are 0."""
        self.forced.append((len(self.token_ids), len(self.token_ids) + len(token_ids)))
        self.extend(token_ids, [(0.0, 0.0, 0.0)] * len(token_ids))

    def to_completion(self, text: str) -> Completion:
        """The record of a completion whose last sequence has ended."""
        assert self.stop is not None
        chain = self.chain
        ids, logps_T3 = (np.concatenate(parts) for parts in zip(*((s.token_ids, s.logps) for s in chain), strict=True))
        logps, sampled, raw = np.ascontiguousarray(logps_T3.T)
        sampled = logps if np.array_equal(sampled, logps) else sampled
        raw = logps if np.array_equal(raw, logps) else raw
        versions = [
            (s.tokens_before + at, version) for s in chain for at, version in s.versions.items() if at < len(s.token_ids)
        ]
        changed = [pair for i, pair in enumerate(versions) if not i or pair[1] != versions[i - 1][1]]
        return Completion(
            token_ids=ids,
            text=text,
            stop=self.stop,
            logps=logps,
            sampled_logps=sampled,
            raw_logps=raw,
            loss_mask=np.concatenate([s.loss_mask for s in chain]),
            versions=tuple(changed) or None,
            episode=self._episode_record(),
            routing=self.routing if len(chain) == 1 else None,
            contexts=tuple((s.tokens_before, s.request.prompt_ids) for s in chain[1:]),
        )

    def _episode_record(self) -> EpisodeRecord | None:
        if self.outcome is None:
            return None
        answers = [answer.result() for _, answer in self.answers]
        spans = [(s.tokens_before + start, s.tokens_before + end) for s in self.chain for start, end in s.spans]
        turns = tuple((*span, answer) for span, answer in zip(spans, answers, strict=True))
        return EpisodeRecord(turns, self.outcome)


def begun_completions(policy: Policy, request: SampleRequest) -> tuple[Completion, ...]:
    """The completions of a request that earlier calls have completed."""
    sequences = [Sequence(request, 0, request.key.first + i) for i in range(request.samples)]
    texts = policy.decode_all([sequence.text_ids for sequence in sequences])
    return tuple(sequence.to_completion(text) for sequence, text in zip(sequences, texts, strict=True))


def ends_with_stop(policy: Policy, token_ids: Ints | abc.Sequence[int], strings: abc.Sequence[str], more: int = 0) -> bool:
    """Whether one of the strings is in the last tokens' text, or was up to ``more`` tokens ago.

    A token of the text is at least one byte, so as many of them as the longest string has bytes are enough to hold any of the
    strings. Special tokens are not part of the text, so the window is that much longer.
    """
    needed = max(len(s.encode()) for s in strings) + SPARE + more
    window = needed
    while True:
        last_ids = np.asarray(token_ids[-window:], np.int64)
        text_ids = last_ids[~np.isin(last_ids, policy.special_ids)]
        if len(text_ids) >= needed or window >= len(token_ids):
            break
        window *= 2
    text = policy.decode(text_ids)
    return any(s in text for s in strings)
