"""The scheduler by itself, over a runner that computes tokens from (request, sample, position) and has a given number of
pages."""

from __future__ import annotations

import threading
from collections import abc
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.engines.base import PassCounts, SampleKey, SampleRequest
from oncurve.engines.native.scheduler import RoundResult, Scheduler, TopTokens
from oncurve.engines.native.sequence import Sequence
from oncurve.engines.native.turns import PureEpisode, begin_episode
from oncurve.errors import ModelError
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Completion, Episode, Floats, Ints, Observation, Prompt, Rollout, Turn

EOS, LETTERS, LIMIT = 0, "abcdefg", 12


class LetterPolicy:
    """Token i is the i-th letter; token 0 ends."""

    eos_ids = (EOS,)

    def tokenizer(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [LETTERS.index(letter) + 1 for letter in text]}

    special_ids = np.array([], np.int64)

    def decode(self, ids: Ints) -> str:
        return "".join(LETTERS[i - 1] for i in ids.tolist() if i)

    def decode_all(self, completions: abc.Sequence[Ints]) -> list[str]:
        return [self.decode(ids) for ids in completions]


class Replies:
    """Ends a turn at "c" and replies "ga", twice."""

    calls = ("c",)

    def reply(self, prompt: Prompt, turns: abc.Sequence[str], dice: np.random.Generator) -> str | None:
        return "ga" if len(turns) < 4 else None


class SlowReplies:
    """The same replies from another thread, each turn's after a delay."""

    calls = ("c",)

    def __init__(self, delays: tuple[float, ...]) -> None:
        self.delays = delays

    def begin(self, rollout: Rollout) -> Episode:
        return SlowEpisode(PureEpisode(Replies(), rollout), self.delays)


class SlowEpisode(PureEpisode):
    def __init__(self, pure: PureEpisode, delays: tuple[float, ...]) -> None:
        super().__init__(pure.environment, pure.rollout)
        self.delays, self.asked = delays, 0

    def answer(self, turn: Turn) -> Future[Observation]:
        assert turn.index == self.asked, "an environment is asked once for each turn"
        self.asked += 1
        answer, future = super().answer(turn).result(), Future[Observation]()
        threading.Timer(self.delays[turn.index % len(self.delays)], future.set_result, (answer,)).start()
        return future


def token_at(sequence: Sequence, position: int) -> int:
    """One of eight tokens, whatever came before."""
    return int(np.random.default_rng([int(sequence.request.prompt.id), sequence.sample, position]).integers(8))


@dataclass(frozen=True)
class DraftedRound:
    """Some slots have more tokens than others."""

    token_CS: Ints
    logp_CS3: Floats
    count_S: Ints

    def wait(self) -> None: ...

    def read(self, slots_n: Ints, start_n: Ints) -> tuple[Ints, Floats, Ints]:
        return self.token_CS[:, slots_n].T, self.logp_CS3[:, slots_n].transpose(1, 0, 2), self.count_S[slots_n]

    def top(self, slot: int, position: int, most: int) -> TopTokens:
        raise NotImplementedError

    def routing(self, slots_n: Ints, start_n: Ints) -> None:
        """Nothing is recorded."""

    def reply_routing(self) -> tuple[()]:
        return ()


class PagedRunner:
    """One page per two tokens; a slot's tokens follow from its sequence and position, unless they are forced. A step samples
    one token or more, up to ``width``."""

    max_new_tokens, context, counts, can_constrain = LIMIT, 1000, PassCounts(), False
    prefilling: abc.Collection[int] = ()

    def __init__(self, slots: int, pages: int, rounds_ahead: int, tokens: int, width: int = 1) -> None:
        self.slots, self.pages, self.rounds_ahead, self.tokens, self.width = slots, pages, rounds_ahead, tokens, width
        self.sequence_in: dict[int, Sequence] = {}
        self.position: dict[int, int] = {}
        self.forced: dict[int, dict[int, int]] = {}
        self.own_pages = [0] * slots
        self.prefilled: set[int] = set()
        self._new: set[int] = set()
        self.is_closed = False

    def free_slots(self, running: abc.Sequence[Sequence | None], waiting: abc.Sequence[Sequence]) -> list[int]:
        return [slot for slot, sequence in enumerate(running) if sequence is None]

    def can_admit(self, waiting: abc.Sequence[Sequence], *, idle: bool) -> bool:
        return idle or sum(self.own_pages) < self.pages

    def assign(self, slot: int, sequence: Sequence) -> None:
        assert slot not in self.sequence_in
        self._new.add(sequence.group)
        self.sequence_in[slot], self.position[slot], self.forced[slot] = sequence, 0, {}

    def park(self, slot: int) -> None:
        self.position[slot] = -1

    def resume(self, slot: int, sequence: Sequence, position: int, last_token: int, forced: abc.Sequence[int]) -> int:
        assert self.sequence_in[slot] is sequence
        prefilled = len(forced) - 1 if len(forced) > 2 else 0
        self.position[slot] = position + prefilled
        self.forced[slot] = {position + prefilled + i: token for i, token in enumerate(forced[prefilled:])}
        return prefilled

    def release(self, slot: int) -> None:
        del self.sequence_in[slot]
        self.own_pages[slot] = 0

    def release_prompt(self, group: int) -> None:
        self.prefilled.remove(group)

    def prompt_routing(self, group: int) -> None:
        """Nothing is recorded."""

    def prefill(self) -> None:
        self.prefilled |= self._new
        self._new = set()

    def reserve(self, slot: int, tokens: int) -> bool:
        more = -(-tokens // 2) - self.own_pages[slot]
        if more > 0 and sum(self.own_pages) + more > self.pages:
            return False
        self.own_pages[slot] += max(more, 0)
        return True

    def no_room(self) -> ModelError:
        return ModelError("pages", self.pages, because="a sequence does not fit", fix="more pages")

    def round_tokens(self, live: int) -> int:
        return self.tokens

    def decode(self, live: abc.Sequence[int], tokens: int) -> RoundResult:
        token_CS, count_S = np.full((tokens * self.width, self.slots), -1, np.int64), np.zeros(self.slots, np.int64)
        for slot in live:
            sequence, start = self.sequence_in[slot], self.position[slot]
            assert sequence.group in self.prefilled
            assert start >= 0, "a parked slot is not decoded"
            accepted = np.random.default_rng([start, slot, self.width]).integers(0, self.width, tokens).sum()
            count_S[slot] = tokens if self.width == 1 else max(min(tokens + accepted, LIMIT - start), 0)
            for i in range(count_S[slot]):
                token_CS[i, slot] = self.forced[slot].get(start + i, token_at(sequence, start + i))
            self.position[slot] = start + int(count_S[slot])
            assert min(self.position[slot], LIMIT) <= 2 * self.own_pages[slot]
        logp_CS3 = np.repeat(-token_CS[:, :, None].astype(np.float32) - 1, 3, axis=2)
        return DraftedRound(token_CS, logp_CS3, count_S)

    def weights_changed(self) -> None: ...

    def begin_to_close(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


def expected(request: SampleRequest, sample: int) -> tuple[list[int], str, list[bool]]:
    """The tokens, the reason to stop, and which tokens the policy sampled, one token after the other."""
    sequence, sampling = Sequence(request, 0, sample), request.sampling
    ids: list[int] = []
    mask: list[bool] = []
    replies, turn = 0, 0
    while True:
        ids.append(token_at(sequence, len(ids)))
        mask.append(True)
        text = "".join(LETTERS[i - 1] for i in ids[turn:] if i)
        calls = request.prompt.environment is not None and text.endswith("c") and ids[-1] != EOS
        ended = ids[-1] == EOS and len(ids) > sampling.min_new_tokens
        stopped = bool(sampling.stop) and ids[-1] != EOS and text.endswith(sampling.stop)
        if stopped:
            return ids, "stop_string", mask
        if calls or ended:
            if request.prompt.environment is None or replies == 2:
                return ids, "stop_string" if calls else "end", mask
            replies += 1
            room = LIMIT - len(ids)
            ids += [LETTERS.index(letter) + 1 for letter in "ga"[:room]]
            mask += [False] * min(room, 2)
            turn = len(ids)
        if len(ids) == LIMIT:
            return ids, "length", mask


SETTINGS = st.builds(
    Sampling,
    max_new_tokens=st.just(LIMIT),
    min_new_tokens=st.integers(0, 5),
    stop=st.sampled_from([(), ("fb",), ("d", "ag")]),
)


ENVIRONMENTS = st.one_of(st.none(), st.builds(Replies), st.builds(SlowReplies, st.tuples(*[st.sampled_from([0.0, 0.001])] * 3)))


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 3), SETTINGS, ENVIRONMENTS), min_size=1, max_size=5),
    slots=st.integers(1, 5),
    pages=st.integers(6, 20),
    ahead=st.integers(0, 1),
    tokens=st.integers(1, 5),
    width=st.integers(1, 4),
)
def test_completions_do_not_depend_on_slots_pages_and_rounds(
    groups: list[tuple[int, Sampling, Replies | SlowReplies | None]],
    slots: int,
    pages: int,
    ahead: int,
    tokens: int,
    width: int,
) -> None:
    """Sequences wait, are parked, preempted and resumed, and end as they would one token after the other."""
    policy: Any = LetterPolicy()
    requests = []
    for i, (samples, sampling, environment) in enumerate(groups):
        given: Any = environment
        prompt, key = Prompt(str(i), text="a", environment=given), SampleKey(0, 1)
        episodes = () if environment is None else tuple(begin_episode(policy, prompt, key, s) for s in range(samples))
        requests.append(SampleRequest(prompt, np.array([1, 2]), samples, sampling, key, episodes=episodes))
    runner = PagedRunner(slots, pages, ahead, tokens, width)
    completions: dict[int, tuple[Completion, ...]] = dict(Scheduler(policy, runner, requests).completions())
    for i, request in enumerate(requests):
        for sample, completion in enumerate(completions[i]):
            ids, stop, mask = expected(request, sample)
            assert (completion.token_ids.tolist(), completion.stop, completion.loss_mask.tolist()) == (ids, stop, mask)
            assert completion.logps.tolist() == [
                -float(token) - 1 if own else 0.0 for token, own in zip(ids, mask, strict=True)
            ]
    assert runner.is_closed
    assert not runner.sequence_in
    assert not runner.prefilled
    assert sum(runner.own_pages) == 0


def test_a_sequence_that_can_never_fit_is_an_error() -> None:
    policy: Any = LetterPolicy()
    request = SampleRequest(
        Prompt("0", text="a"), np.array([1, 2]), 1, Sampling(max_new_tokens=LIMIT, min_new_tokens=LIMIT), SampleKey(0, 1)
    )
    with pytest.raises(ModelError, match="does not fit"):
        list(Scheduler(policy, PagedRunner(2, 3, 1, 4), [request]).completions())
