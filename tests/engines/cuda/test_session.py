"""Sessions of the GPU engine, here in Triton's interpreter, against torch with the same requests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from oncurve.engines.base import PassCounts, SampleRequest
from oncurve.engines.cuda import decode_step, paged_kv_cache, per_slot, runner
from oncurve.engines.cuda.per_slot import PerSlotCudaRunner
from oncurve.engines.native.session import SampledToken, Session, served_request, torch_session
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
from tests.engines.cuda.test_drafts import _drafting
from tests.engines.native.plain import prompt_of
from tests.engines.native.test_session import converse
from tests.models.architectures import make_model, tokenizer

SLOTS, LIMIT = 3, 12
SETTINGS = (
    Sampling(max_new_tokens=5),
    Sampling(max_new_tokens=3, temperature=0.0),
    Sampling(max_new_tokens=4, temperature=0.7, top_p=0.8),
    Sampling(max_new_tokens=5, top_k=3, min_p=0.05, min_new_tokens=4),
)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short texts cross pages, buckets and chunks; and rounds of one, two and four tokens."""
    for module in (runner, paged_kv_cache):
        monkeypatch.setattr(module, "PAGE", 4)
    monkeypatch.setattr(runner, "BUCKET", 4)
    for module in (runner, per_slot):
        monkeypatch.setattr(module, "PREFILL_TOKENS", 8)
    monkeypatch.setattr(PerSlotCudaRunner, "round_tokens", lambda self, live: {1: 1, 2: 2}.get(live, 4))


@cache
def policy() -> Policy:
    """Some letters are end tokens too, so that completions often end and the minimum length matters."""
    policy_ = Policy(make_model("qwen3", num_hidden_layers=1), tokenizer())
    policy_.eos_ids = (*policy_.eos_ids, *range(5, 12))
    return policy_


def open_session(
    slots: int = SLOTS, pages: int | None = None, monkeypatch: pytest.MonkeyPatch | None = None, width: int = 1
) -> Session:
    if pages is not None:
        assert monkeypatch is not None
        room = paged_kv_cache.PagedKVCache.open
        monkeypatch.setattr(
            paged_kv_cache.PagedKVCache, "open", lambda self, first, most, share: room(self, first, min(most, pages), share)
        )
    runner = PerSlotCudaRunner.open(policy(), slots, LIMIT, width)
    assert runner is not None
    return Session(policy(), runner)


def ask(place: int) -> SampleRequest:
    ids = policy().encode(prompt_of((1, 9, 5, 10)[place % 4]))
    return served_request(ids, 1 + place % 2, SETTINGS[place % 4], seed=place, top=(0, 3, 0, 5)[place % 4])


def finish(session: Session, found: dict[int, list[SampledToken]] | None = None) -> dict[int, list[SampledToken]]:
    """Decodes to the end; every request's tokens by its number."""
    found = {} if found is None else found
    while session.requests:
        for token in session.step():
            found.setdefault(token.request, []).append(token)
    return found


def by_sample(tokens: list[SampledToken]) -> list[list[SampledToken]]:
    return [[t for t in tokens if t.sample == sample] for sample in sorted({t.sample for t in tokens})]


def bits(tokens: list[SampledToken]) -> list[list[tuple[object, ...]]]:
    return [[(t.token_id, t.logp, t.top, t.stop) for t in own] for own in by_sample(tokens)]


def assert_alike(here: list[SampledToken], there: list[SampledToken]) -> None:
    """The same tokens and stops, and log-probs within rounding."""
    for ours, theirs in zip(by_sample(here), by_sample(there), strict=True):
        assert [(t.token_id, t.stop) for t in ours] == [(t.token_id, t.stop) for t in theirs]
        assert [t.logp for t in ours] == pytest.approx([t.logp for t in theirs], abs=1e-4)
        for one, two in zip(ours, theirs, strict=True):
            assert [i for i, _ in one.top] == [i for i, _ in two.top]
            assert [logp for _, logp in one.top] == pytest.approx([logp for _, logp in two.top], abs=1e-4)


@cache
def alone(place: int) -> list[list[tuple[object, ...]]]:
    session = open_session()
    number = session.submit(ask(place))
    return bits(finish(session)[number])


def test_mixed_requests_are_answered_as_by_torch() -> None:
    """Six completions of four requests with settings of their own, over three slots."""
    sessions = [open_session(), torch_session(policy(), SLOTS, LIMIT)]
    answers = []
    for session in sessions:
        numbers = [session.submit(ask(place)) for place in range(4)]
        assert len(session.waiting) == 6
        found = finish(session)
        answers.append([found[number] for number in numbers])
    for here, there in zip(*answers, strict=True):
        assert_alike(here, there)
    assert {t.stop for tokens in answers[0] for t in tokens} == {None, "length", "end"}
    assert all(t.token_id not in policy().eos_ids for own in by_sample(answers[0][3]) for t in own[:4])


@pytest.mark.slow
def test_drafts_change_no_token_and_wrong_ones_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the prompt and a request's own text; minimum lengths and the likeliest tokens differ by request."""
    answers = []
    for session in (open_session(width=3), torch_session(policy(), SLOTS, LIMIT)):
        numbers = [session.submit(ask(place)) for place in range(4)]
        found = finish(session)
        answers.append([found[number] for number in numbers])
    for here, there in zip(*answers, strict=True):
        assert_alike(here, there)
    lone = open_session(width=3)
    number = lone.submit(ask(3))
    assert bits(finish(lone)[number]) == bits(answers[0][3])
    right = {place: [t.token_id for t in own[0]] for place in range(4) for own in [by_sample(answers[0][place])]}

    def guess(text: int, position: int) -> list[int]:
        """Some slots get what another request has sampled, which is right for some."""
        return right[(text // 2 + position) % 4][position + 1 : position + 3] or [7, 8]

    monkeypatch.setattr(decode_step, "accept_and_draft", _drafting(guess))
    session = open_session(width=3)
    numbers = [session.submit(ask(place)) for place in range(4)]
    found = finish(session)
    assert session.runner.counts.drafted > 0
    assert [bits(found[number]) for number in numbers] == [bits(tokens) for tokens in answers[0]]


def test_a_request_gets_the_same_bits_whatever_else_is_served() -> None:
    """One is there from the start, two come later, and one of these leaves in the middle."""
    session = open_session()
    first = session.submit(ask(3))
    found: dict[int, list[SampledToken]] = {}
    for _ in range(2):
        for token in session.step():
            found.setdefault(token.request, []).append(token)
    sampling = Sampling(max_new_tokens=LIMIT, min_new_tokens=LIMIT)
    leaver, last = session.submit(served_request(policy().encode(prompt_of(3)), 1, sampling, seed=0)), session.submit(ask(2))
    while leaver not in found:
        for token in session.step():
            found.setdefault(token.request, []).append(token)
    session.cancel(leaver)
    count = len(found[leaver])
    assert count < LIMIT
    finish(session, found)
    assert len(found[leaver]) == count, "a cancelled request gets no more tokens"
    assert bits(found[first]) == alone(3)
    assert bits(found[last]) == alone(2)
    assert_nothing_is_left(session)


def assert_nothing_is_left(session: Session) -> None:
    assert not session.requests
    assert not session.sequences
    assert not any(session.running)
    assert isinstance(session.runner, PerSlotCudaRunner)
    assert not session.runner.prompt_pages
    assert session.runner.growth == 0
    assert session.runner.cache.left == session.runner.cache.limit


def test_requests_beyond_capacity_wait_and_a_cancelled_one_frees_its_slots() -> None:
    session = open_session(slots=2)
    sampling = Sampling(max_new_tokens=LIMIT, stop=("never",), min_new_tokens=LIMIT)
    first = session.submit(served_request(policy().encode(prompt_of(9)), 2, sampling, seed=0))
    second = session.submit(ask(1))
    session.step()
    assert len(session.waiting) == 2
    assert {t.request for t in session.step()} == {first}
    session.cancel(first)
    session.cancel(first)  # cancelling twice does no harm
    assert set(finish(session)) == {second}
    assert_nothing_is_left(session)


@pytest.mark.slow
def test_with_a_full_cache_requests_wait_and_no_token_is_streamed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pages of four positions: one for each prompt but the shortest, two for a completion of six. What has to start
    again continues where it was."""
    sampling = Sampling(max_new_tokens=6, min_new_tokens=6)
    requests = [served_request(policy().encode(prompt_of(n)), 1, sampling, seed=n) for n in (1, 5, 4)]
    free = open_session()
    numbers = [free.submit(one) for one in requests]
    expected = finish(free)
    full = open_session(pages=4, monkeypatch=monkeypatch)
    preempt, preempted = full._preempt, list[int]()

    def watched(slot: int) -> None:
        preempted.append(slot)
        preempt(slot)

    monkeypatch.setattr(full, "_preempt", watched)
    again = [full.submit(one) for one in requests]
    found = finish(full)
    assert preempted, "the pool was large enough for all"
    assert [bits(found[b]) for b in again] == [bits(expected[a]) for a in numbers]
    assert full.context == 12
    assert_nothing_is_left(full)


def test_a_stop_string_over_two_tokens() -> None:
    ids, sampling = policy().encode(prompt_of(9)), Sampling(max_new_tokens=8, min_new_tokens=8)
    session = open_session()
    number = session.submit(served_request(ids, 1, sampling, seed=3))
    whole = policy().decode(np.array([t.token_id for t in finish(session)[number]]))
    stop = whole[2:4]
    number = session.submit(served_request(ids, 1, sampling.model_copy(update={"stop": (stop, "never")}), seed=3))
    tokens = finish(session)[number]
    assert tokens[-1].stop == "stop_string"
    assert policy().decode(np.array([t.token_id for t in tokens])) == whole[: whole.index(stop) + 2]
    assert_nothing_is_left(session)


def test_completions_of_one_request_share_the_pages_of_its_prompt() -> None:
    session = open_session()
    session.submit(served_request(policy().encode(prompt_of(10)), 3, Sampling(max_new_tokens=4), seed=1))
    session.step()
    assert isinstance(session.runner, PerSlotCudaRunner)
    assert session.runner.cache.limit - session.runner.cache.left == 3 + 3, "three for the prompt, and one for each completion"
    session.cancel(0)
    assert_nothing_is_left(session)


def test_after_a_prefill_that_fails_other_requests_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server cancels what was running, and continues. Pages that were not prefilled are not kept for a later request."""
    session, fresh = open_session(slots=2), open_session(slots=2)
    ids = policy().encode(prompt_of(9))
    failing = replace(served_request(ids, 1, SETTINGS[0], seed=0), parts=())
    following = replace(served_request(np.concatenate((ids, ids[:3])), 1, SETTINGS[0], seed=0), parts=(len(ids),))

    def no_memory(self: PerSlotCudaRunner, *arguments: object) -> None:
        raise torch.OutOfMemoryError("no memory for the pass")

    number = session.submit(failing)
    with monkeypatch.context() as patch:
        patch.setattr(PerSlotCudaRunner, "_run", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            session.step()
    session.cancel(number)
    assert_nothing_is_left(session)
    number, expected = session.submit(following), fresh.submit(following)
    assert bits(finish(session)[number]) == bits(finish(fresh)[expected])


def test_warming_up_leaves_nothing_behind() -> None:
    session = open_session()
    session.warm_up()
    assert_nothing_is_left(session)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(9, 3, 10), (1, 2, 5)])
def test_a_prompt_that_continues_another_takes_over_its_pages_and_loses_them_without_a_change_of_bits(
    lengths: tuple[int, ...],
) -> None:
    keeping, losing = open_session(slots=2), open_session(slots=2)

    def lose() -> None:
        assert isinstance(losing.runner, PerSlotCudaRunner)
        while losing.runner._drop_prompts():
            pass
        assert_nothing_is_left(losing)

    kept, lost = converse(keeping, policy(), lengths, lambda: None), converse(losing, policy(), lengths, lose)
    assert [bits(tokens) for _, tokens in kept] == [bits(tokens) for _, tokens in lost]
    prompts = [len(request.prompt_ids) - 1 for request, _ in kept]
    assert keeping.runner.counts == PassCounts(prefilled=prompts[-1], kept=sum(prompts[:-1]))
    assert losing.runner.counts == PassCounts(prefilled=sum(prompts))
    for (_, here), (_, there) in zip(kept, converse(torch_session(policy(), 2, LIMIT), policy(), lengths, lose), strict=True):
        assert_alike(here, there)


@pytest.mark.slow
def test_kept_prompts_make_room_for_others_if_pages_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six pages of four positions: each conversation needs nearly all of them."""
    free = open_session(slots=2)
    expected = [converse(free, policy(), lengths, lambda: None) for lengths in ((4, 2), (5, 1))]
    full = open_session(slots=2, pages=6, monkeypatch=monkeypatch)
    for turn in range(2):
        numbers = [(full.submit(calls[turn][0]), calls[turn][1]) for calls in expected]
        found = finish(full)
        assert all(bits(found[number]) == bits(tokens) for number, tokens in numbers)
