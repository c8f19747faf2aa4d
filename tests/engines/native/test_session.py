"""Sessions with torch: each request gets what it would get without the others, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.engines.base import PassCounts, SampleRequest
from oncurve.engines.native.session import SampledToken, Session, served_request, torch_session
from oncurve.engines.native.torch_runner import PROMPT_PART, TorchRunner
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Prompt
from tests.engines.native.plain import next_logits, prompt_of
from tests.models.architectures import make_model, make_policy

SLOTS = 4
SETTINGS = (
    Sampling(max_new_tokens=20),
    Sampling(max_new_tokens=9, temperature=0.0),
    Sampling(max_new_tokens=14, temperature=0.7, top_p=0.8),
    Sampling(max_new_tokens=12, top_k=3, min_p=0.05),
)


@cache
def policy() -> Policy:
    return make_policy("qwen3")


def ask(place: int) -> SampleRequest:
    ids = policy().encode(prompt_of((1, 9, 17, 70, 33)[place % 5]))
    return served_request(ids, 1 + place % 3, SETTINGS[place % 4], seed=place, top=place % 2)


def streamed(session: Session, numbers: dict[int, int]) -> dict[int, list[SampledToken]]:
    """Decodes to the end; the tokens of each request, by the place it was made from."""
    found: dict[int, list[SampledToken]] = {place: [] for place in numbers.values()}
    while session.requests:
        for token in session.step():
            found[numbers[token.request]].append(token)
    return found


@cache
def alone(place: int) -> tuple[tuple[object, ...], ...]:
    session = torch_session(policy(), SLOTS, 32)
    return tuple(map(tuple, by_sample(streamed(session, {session.submit(ask(place)): place})[place])))


def by_sample(tokens: list[SampledToken]) -> list[list[tuple[object, ...]]]:
    samples = sorted({t.sample for t in tokens})
    return [[(t.token_id, t.logp, t.top, t.stop) for t in tokens if t.sample == sample] for sample in samples]


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(8)), late=st.integers(0, 7))
def test_a_request_gets_the_same_bits_whatever_else_is_queued(order: list[int], late: int) -> None:
    """Some are there from the start, others come while those are being decoded."""
    session = torch_session(policy(), SLOTS, 32)
    numbers = {session.submit(ask(place)): place for place in order[: late + 1]}
    found: dict[int, list[SampledToken]] = {place: [] for place in order}
    for place in order[late + 1 :]:
        for token in session.step():
            found[numbers[token.request]].append(token)
        numbers[session.submit(ask(place))] = place
    for place, tokens in streamed(session, numbers).items():
        found[place] += tokens
    for place in order:
        assert tuple(map(tuple, by_sample(found[place]))) == alone(place)


def test_log_probs_are_those_of_a_full_forward() -> None:
    """At temperature 1 and untruncated, whatever the settings that a token was drawn under; likeliest tokens too."""
    for place in (3, 1, 2):
        request = ask(place)
        session = torch_session(policy(), SLOTS, 32)
        number = session.submit(served_request(request.prompt_ids, 1, request.sampling, request.key.seed, top=5))
        tokens = streamed(session, {number: 0})[0]
        ids = np.array([t.token_id for t in tokens])
        logps_TV = next_logits(make_model("qwen3"), request.prompt_ids, ids).log_softmax(-1)
        assert [t.logp for t in tokens] == pytest.approx(logps_TV[range(len(ids)), ids].tolist(), abs=1e-4)
        best = logps_TV.topk(5)
        for t, token in enumerate(tokens):
            assert [logp for _, logp in token.top] == pytest.approx(best.values[t].tolist(), abs=1e-4)


def test_greedy_takes_the_likeliest() -> None:
    session = torch_session(policy(), SLOTS, 32)
    tokens = streamed(session, {session.submit(ask(1)): 0})[0]
    assert all(token.token_id == token.top[0][0] for token in tokens)


def test_a_request_beyond_capacity_waits_and_a_cancelled_one_frees_its_slots() -> None:
    session = torch_session(policy(), 2, 32)
    sampling = Sampling(max_new_tokens=32, stop=("never",))
    first = session.submit(served_request(policy().encode(prompt_of(9)), 2, sampling, seed=0))
    second = session.submit(served_request(policy().encode(prompt_of(17)), 1, SETTINGS[1], seed=0))
    third = session.submit(served_request(policy().encode(prompt_of(18)), 1, SETTINGS[1], seed=0))
    assert {t.request for t in session.step()} == {first}
    assert len(session.waiting) == 2
    session.cancel(first)
    assert {t.request for t in session.step()} == {second, third}
    session.cancel(first)  # cancelling twice does no harm
    session.cancel(third)
    ended = streamed(session, {second: second, third: third})
    assert ended[third] == []
    assert ended[second][-1].stop is not None
    assert not session.requests
    assert not session.sequences


def test_how_a_completion_stops() -> None:
    session = torch_session(policy(), SLOTS, 32)
    ids = policy().encode(prompt_of(9))
    free = streamed(session, {session.submit(served_request(ids, 1, Sampling(max_new_tokens=30), seed=3)): 0})[0]
    text = policy().decode(np.array([t.token_id for t in free]))
    stop = text[3:5]
    number = session.submit(served_request(ids, 1, Sampling(max_new_tokens=30, stop=(stop,)), seed=3))
    stopped = streamed(session, {number: 0})[0]
    assert stopped[-1].stop == "stop_string"
    assert stop in policy().decode(np.array([t.token_id for t in stopped]))
    cut = streamed(session, {session.submit(served_request(ids, 1, Sampling(max_new_tokens=2), seed=3)): 0})[0]
    assert [t.stop for t in cut] == [None, "length"]


def test_a_free_slot_does_not_make_the_others_read_more_pages() -> None:
    """Every slot reads as many pages as the longest; a server has free slots most of the time."""
    session = torch_session(policy(), 2, 200)
    for tokens in (130, 2):
        session.submit(
            served_request(policy().encode(prompt_of(9)), 1, Sampling(max_new_tokens=tokens, min_new_tokens=tokens), 0)
        )
        while session.requests:
            session.step()
    assert isinstance(session.runner, TorchRunner)
    assert int(session.runner.suffix_length_S.max()) < 64


def test_training_is_not_disturbed() -> None:
    """A session over the same policy changes neither its weights nor the grad mode."""
    before = [p.detach().clone() for p in policy().model.parameters()]
    session = torch_session(policy(), SLOTS, 32)
    streamed(session, {session.submit(ask(0)): 0})
    assert torch.is_grad_enabled()
    assert all(torch.equal(a, b) for a, b in zip(before, policy().model.parameters(), strict=True))


def converse(
    session: Session, model: Policy, lengths: tuple[int, ...], between: Callable[[], None]
) -> list[tuple[SampleRequest, list[SampledToken]]]:
    """The calls of one conversation with their tokens. Each continues the one before, with a text of one of these lengths."""
    calls: list[tuple[SampleRequest, list[SampledToken]]] = []
    ids, parts = np.zeros(0, np.int64), tuple[int, ...]()
    for turn, length in enumerate(lengths):
        ids = np.concatenate((ids, model.encode(prompt_of(length))))
        request = replace(served_request(ids, 1, Sampling(max_new_tokens=6), seed=turn), parts=parts)
        tokens = streamed(session, {session.submit(request): 0})[0]
        calls.append((request, tokens))
        ids, parts = np.concatenate((ids, [t.token_id for t in tokens])), (*parts, len(ids))
        between()
    return calls


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize("lengths", [(20, 5, 70, 9), (1, 3, 2)])
def test_a_prompt_that_continues_another_has_the_same_bits_whether_its_kv_cache_was_kept_or_not(
    name: str, lengths: tuple[int, ...]
) -> None:
    model = make_policy(name)
    keeping, losing = (torch_session(model, 2, 16) for _ in range(2))

    of_others = PassCounts()

    def fill() -> None:
        """Other requests take all slots."""
        nonlocal of_others
        before = losing.runner.counts
        others = [served_request(model.encode(prompt_of(n)), 1, Sampling(max_new_tokens=2), seed=n) for n in (7, 8)]
        streamed(losing, {losing.submit(other): place for place, other in enumerate(others)})
        of_others += losing.runner.counts - before

    kept, lost = converse(keeping, model, lengths, lambda: None), converse(losing, model, lengths, fill)
    assert [by_sample(tokens) for _, tokens in kept] == [by_sample(tokens) for _, tokens in lost]
    prompts = [len(request.prompt_ids) - 1 for request, _ in kept]
    assert keeping.runner.counts.kept == sum(prompts[:-1])
    assert keeping.runner.counts.prefilled == prompts[-1], "each token is prefilled once"
    assert losing.runner.counts - of_others == PassCounts(prefilled=sum(prompts))
    for request, tokens in kept:
        ids = np.array([t.token_id for t in tokens])
        logps_TV = next_logits(make_model(name), request.prompt_ids, ids).log_softmax(-1)
        assert [t.logp for t in tokens] == pytest.approx(logps_TV[range(len(ids)), ids].tolist(), abs=1e-4)


def test_more_conversations_than_slots_all_end_with_the_bits_that_they_have_alone() -> None:
    """Each call waits for a slot, and takes it from a conversation that waits for its agent."""
    session, names = torch_session(policy(), 2, 16), range(5)
    alone = {n: converse(torch_session(policy(), 2, 16), policy(), (10 + n, 4, 6), lambda: None) for n in names}
    for turn in range(3):
        numbers = {session.submit(alone[n][turn][0]): n for n in (names, names[::-1])[turn % 2]}
        found = streamed(session, numbers)
        assert [by_sample(found[n]) for n in names] == [by_sample(alone[n][turn][1]) for n in names]
    assert 0 < session.runner.counts.kept < session.runner.counts.prefilled


def chunked_request(length: int, seed: int = 0, samples: int = 1, start: str = "x") -> SampleRequest:
    """A request with a prompt of this length. Prompts of one ``start`` begin alike."""
    ids = np.concatenate((policy().encode(Prompt("start", text=start)), np.tile(policy().encode(prompt_of(37)), 20)))
    return served_request(ids[:length], samples, Sampling(max_new_tokens=12), seed, top=2)


def bits(session: Session, request: SampleRequest) -> list[list[tuple[object, ...]]]:
    return by_sample(streamed(session, {session.submit(request): 0})[0])


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mistral"])
def test_a_prompt_of_several_parts_has_the_log_probs_of_a_full_forward(name: str) -> None:
    model = make_policy(name)
    request = chunked_request(2 * PROMPT_PART + 30)
    tokens = streamed(session := torch_session(model, 2, 16), {session.submit(request): 0})[0]
    ids = np.array([t.token_id for t in tokens])
    logps_TV = next_logits(make_model(name), request.prompt_ids, ids).log_softmax(-1)
    assert [t.logp for t in tokens] == pytest.approx(logps_TV[range(len(ids)), ids].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "lengths", [(300, 380), (380, 300), (256, 300), (300, 256), (257, 257), (128, 129), (129, 128), (127, 200)]
)
def test_a_prompt_that_begins_like_another_has_the_same_bits_and_computes_only_what_is_new(lengths: tuple[int, int]) -> None:
    session = torch_session(policy(), 3, 16)
    for seed, length in enumerate(lengths):
        request = chunked_request(length, seed, samples=1 + seed)
        assert bits(session, request) == bits(torch_session(policy(), 3, 16), request)
    first, second = lengths
    shared = second if first == second else min(lengths) // PROMPT_PART * PROMPT_PART
    kept = max(shared - 1, 0) + second - 1  # its second completion has all of it
    assert session.runner.counts == PassCounts(prefilled=first - 1 + 2 * (second - 1) - kept, kept=kept)


def test_other_prompts_share_nothing() -> None:
    session = torch_session(policy(), 2, 16)
    for seed, start in enumerate("abcab"):
        request = chunked_request(200, seed, start=start)
        assert bits(session, request) == bits(torch_session(policy(), 2, 16), request)
    assert session.runner.counts.kept == 0, "each was replaced before it came again"


def test_a_running_prompt_is_shared_too() -> None:
    session = torch_session(policy(), 4, 16)
    requests = [chunked_request(200 + 20 * n, seed=n) for n in range(3)]
    found = streamed(session, {session.submit(request): n for n, request in enumerate(requests)})
    assert [by_sample(found[n]) for n in range(3)] == [bits(torch_session(policy(), 4, 16), request) for request in requests]


def test_a_long_prompt_does_not_hold_up_others() -> None:
    """A running completion gets a token in every step, and a short prompt starts before the long one is complete."""
    session, parts = torch_session(policy(), 4, 32), 3
    running = session.submit(replace(chunked_request(9), sampling=Sampling(max_new_tokens=32, min_new_tokens=32)))
    session.step()
    long = session.submit(request := chunked_request(parts * PROMPT_PART + 50, seed=1, start="y"))
    found: list[SampledToken] = []
    steps, short = 0, None
    while not any(token.request == long for token in found):
        new = session.step()
        steps += 1
        assert sum(token.request == running for token in new) == 1
        found += new
        short = session.submit(chunked_request(20, seed=2, start="z")) if short is None else short
    assert steps > parts
    first = {number: next(i for i, t in enumerate(found) if t.request == number) for number in (long, short)}
    assert first[short] < first[long]
    while session.requests:
        found += session.step()
    mine = [token for token in found if token.request == long]
    assert by_sample(mine) == bits(torch_session(policy(), 4, 32), request)


def test_a_request_that_is_cancelled_in_its_prompt_leaves_what_it_has_to_others() -> None:
    session = torch_session(policy(), 2, 16)
    number = session.submit(chunked_request(400))
    assert session.step() == []
    session.cancel(number)
    request = chunked_request(380, seed=3)
    assert bits(session, request) == bits(torch_session(policy(), 2, 16), request)
    assert session.runner.counts.kept == PROMPT_PART - 1
