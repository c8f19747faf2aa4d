"""Sessions with torch: each request gets what it would get without the others, and leaves nothing behind."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.engines.base import SampleRequest
from oncurve.engines.native.session import SampledToken, Session, served_request, torch_session
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
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


def test_training_is_not_disturbed() -> None:
    """A session over the same policy changes neither its weights nor the grad mode."""
    before = [p.detach().clone() for p in policy().model.parameters()]
    session = torch_session(policy(), SLOTS, 32)
    streamed(session, {session.submit(ask(0)): 0})
    assert torch.is_grad_enabled()
    assert all(torch.equal(a, b) for a, b in zip(before, policy().model.parameters(), strict=True))
