"""The endpoint over the CUDA session, here with Triton's interpreter: its responses are those of the torch session."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from oncurve.engines.cuda.per_slot import PerSlotCudaRunner
from oncurve.engines.native.session import Session, torch_session
from tests.serve.serving import MODEL, Endpoint, chatting_policy, endpoint

REQUESTS: list[dict[str, Any]] = [
    {"prompt": "1+2=", "seed": 1, "n": 2, "logprobs": 2},
    {"prompt": "abc", "seed": 2, "temperature": 0.7, "top_p": 0.8, "stop": ["never"]},
    {"prompt": "x", "temperature": 0},
]
Answer = list[tuple[str, str | None, list[float]]]


def complete(served: Endpoint, request: dict[str, Any]) -> Answer:
    with served.client() as client:
        response = client.completions.create(model=MODEL, max_tokens=4, **request)
    return [(c.text, c.finish_reason, (c.logprobs.token_logprobs or []) if c.logprobs else []) for c in response.choices]


def streamed(served: Endpoint, request: dict[str, Any]) -> list[str]:
    texts = [""] * request.get("n", 1)
    with served.client() as client:
        for chunk in client.completions.create(model=MODEL, max_tokens=4, stream=True, **request):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    return texts


@pytest.mark.slow
def test_concurrent_requests_are_answered_as_by_torch_streamed_or_complete() -> None:
    policy = chatting_policy()
    runner = PerSlotCudaRunner.open(policy, 3, 16)
    assert runner is not None
    sessions = [Session(policy, runner), torch_session(policy, 3, 16)]
    answers: list[list[Answer]] = []
    for session in sessions:
        with endpoint(policy, session=session) as served, ThreadPoolExecutor(len(REQUESTS)) as threads:
            answers.append(list(threads.map(lambda request: complete(served, request), REQUESTS)))
            assert [[text for text, _, _ in answer] for answer in answers[-1]] == list(
                threads.map(lambda request: streamed(served, request), REQUESTS)
            )
            assert not session.requests
    for ours, theirs in zip(*answers, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a[:2] == b[:2]
            assert a[2] == pytest.approx(b[2], abs=1e-4)
