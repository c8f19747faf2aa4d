"""The endpoint over the GPU's session, here by Triton's interpreter: answers are those of plain torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from oncurve.engines.cuda.session import CudaSession
from oncurve.engines.native.session import Session, TorchSession
from tests.serve.serving import MODEL, Endpoint, chatting_policy, endpoint

ASKED: list[dict[str, Any]] = [
    {"prompt": "1+2=", "seed": 1, "n": 2, "logprobs": 2},
    {"prompt": "abc", "seed": 2, "temperature": 0.7, "top_p": 0.8, "stop": ["never"]},
    {"prompt": "x", "temperature": 0},
]
Told = list[tuple[str, str | None, list[float]]]


def whole(served: Endpoint, asked: dict[str, Any]) -> Told:
    with served.client() as client:
        told = client.completions.create(model=MODEL, max_tokens=4, **asked)
    return [(c.text, c.finish_reason, (c.logprobs.token_logprobs or []) if c.logprobs else []) for c in told.choices]


def streamed(served: Endpoint, asked: dict[str, Any]) -> list[str]:
    texts = [""] * asked.get("n", 1)
    with served.client() as client:
        for chunk in client.completions.create(model=MODEL, max_tokens=4, stream=True, **asked):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    return texts


@pytest.mark.slow
def test_requests_at_once_are_answered_as_by_torch_streamed_or_whole() -> None:
    policy = chatting_policy()
    captured = CudaSession.over(policy, 3, 16)
    assert captured is not None
    sessions: list[Session] = [captured, TorchSession(policy, 3, 16)]
    found: list[list[Told]] = []
    for session in sessions:
        with endpoint(policy, session=session) as served, ThreadPoolExecutor(len(ASKED)) as threads:
            found.append(list(threads.map(lambda asked: whole(served, asked), ASKED)))
            assert [[text for text, _, _ in told] for told in found[-1]] == list(
                threads.map(lambda asked: streamed(served, asked), ASKED)
            )
            assert not session.asks
    for ours, theirs in zip(*found, strict=True):
        for one, two in zip(ours, theirs, strict=True):
            assert one[:2] == two[:2]
            assert one[2] == pytest.approx(two[2], abs=1e-4)
