"""The endpoint over real HTTP, called by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from tests.engines.native.plain import next_logits
from tests.models.architectures import make_model
from tests.serve.serving import MODEL, Endpoint, chatting_policy, endpoint

MESSAGES: Any = [{"role": "system", "content": "add"}, {"role": "user", "content": "what is 1+2"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Endpoint]:
    with endpoint(chatting_policy()) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Endpoint) -> Iterator[openai.OpenAI]:
    with served.client() as connection:
        yield connection


def becomes_idle(served: Endpoint, seconds: float = 120.0) -> bool:
    """Whether every slot is free again within the time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not served.engine.session.requests:
            return True
        time.sleep(0.02)
    return False


def test_metrics_count_what_was_sampled(served: Endpoint, client: openai.OpenAI) -> None:
    def read() -> dict[str, float]:
        with urllib.request.urlopen(f"{served.address}/metrics", timeout=30) as response:
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            lines = response.read().decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.partition(f'{{model="{MODEL}"}} ') for line in lines if line[0] != "#")
        }

    before = read()
    client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=5, n=2, seed=1)
    after = read()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["oncurve_completions_total"] == 2
    assert grown["oncurve_prompt_tokens_total"] == 3
    assert 2 <= grown["oncurve_tokens_total"] <= 10
    assert becomes_idle(served)
    idle = read()
    assert (idle["oncurve_running"], idle["oncurve_waiting"]) == (0, 0)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat(served: Endpoint, client: openai.OpenAI) -> None:
    response = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, seed=1)
    (choice,) = response.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert response.usage is not None
    prompt_ids = served.policy.tokenizer("s add\nu what is 1+2\na ")["input_ids"]
    assert response.usage.prompt_tokens == len(prompt_ids)
    assert 1 <= response.usage.completion_tokens <= 12
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens
    parts: Any = [{"role": "system", "content": [{"type": "text", "text": "add"}]}, MESSAGES[1]]
    again = client.chat.completions.create(model=MODEL, messages=parts, max_completion_tokens=12, seed=1)
    assert again.choices[0].message.content == choice.message.content


def test_the_same_seed_gives_the_same_text_whatever_else_is_requested(served: Endpoint) -> None:
    """With more concurrent requests than slots, each gets the answer that it gets alone, streamed or complete."""

    def ask(seed: int) -> tuple[str, ...]:
        with served.client() as client:
            response = client.completions.create(
                model=MODEL, prompt=f"{seed}+2=", max_tokens=30, seed=seed, n=2, temperature=0.9
            )
            return tuple(choice.text for choice in response.choices)

    def stream(seed: int) -> tuple[str, ...]:
        texts = ["", ""]
        with served.client() as client:
            for chunk in client.completions.create(
                model=MODEL, prompt=f"{seed}+2=", max_tokens=30, seed=seed, n=2, temperature=0.9, stream=True
            ):
                texts[chunk.choices[0].index] += chunk.choices[0].text
        return tuple(texts)

    alone = [ask(seed) for seed in range(3)]
    assert len({text for texts in alone for text in texts}) == 6
    with ThreadPoolExecutor(12) as threads:
        crowded = list(threads.map(lambda n: (ask if n % 2 else stream)(n % 3), range(12)))
    assert crowded == [alone[n % 3] for n in range(12)]


def test_without_a_seed_texts_differ_and_greedy_ones_do_not(client: openai.OpenAI) -> None:
    free = [client.completions.create(model=MODEL, prompt="abc", max_tokens=30).choices[0].text for _ in range(5)]
    assert len(set(free)) > 1  # one in twenty is empty
    greedy = client.completions.create(model=MODEL, prompt="abc", max_tokens=30, temperature=0, n=2)
    assert greedy.choices[0].text == greedy.choices[1].text


def test_without_a_seed_equal_prompts_of_a_request_have_different_texts(client: openai.OpenAI) -> None:
    first, second = client.completions.create(model=MODEL, prompt=["abc", "abc"], max_tokens=24).choices
    assert first.text != second.text
    first, second = client.completions.create(model=MODEL, prompt=["abc", "abc"], max_tokens=24, seed=1).choices
    assert first.text == second.text


def test_an_unset_limit_is_16_tokens_or_what_fits(served: Endpoint, client: openai.OpenAI) -> None:
    context = served.engine.session.context
    usages = [client.completions.create(model=MODEL, prompt=[5] * n, seed=1).usage for n in (3, context - 4)]
    assert [used.completion_tokens for used in usages if used] == [16, 4]
    with endpoint(chatting_policy(), slots=1, limit=8) as small, small.client() as other:
        used = other.completions.create(model=MODEL, prompt="abc", seed=1).usage
        assert used is not None
        assert used.completion_tokens == 8


def test_streaming(client: openai.OpenAI) -> None:
    complete = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, n=3, seed=5)
    texts, last = ["", "", ""], None
    finished: dict[int, str] = {}
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=20, n=3, seed=5, stream=True, stream_options=options
        )
    )
    for chunk in chunks:
        last = chunk.usage or last
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason is not None:
                finished[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in complete.choices]
    assert finished == {choice.index: choice.finish_reason for choice in complete.choices}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 20, "it comes token by token"
    assert last == complete.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_several_prompts_and_token_ids(served: Endpoint, client: openai.OpenAI) -> None:
    ids = [served.policy.tokenizer(text)["input_ids"] for text in ("ab", "cde")]
    by_text = client.completions.create(model=MODEL, prompt=["ab", "cde"], max_tokens=9, n=2, seed=3)
    by_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=9, n=2, seed=3)
    one = client.completions.create(model=MODEL, prompt=ids[1], max_tokens=9, n=2, seed=3)
    assert [(c.index, c.text) for c in by_text.choices] == [(c.index, c.text) for c in by_ids.choices]
    assert [c.text for c in one.choices] == [c.text for c in by_text.choices[2:]]
    assert by_text.usage is not None
    assert by_text.usage.prompt_tokens == 5


def test_stop_strings(client: openai.OpenAI) -> None:
    free = client.completions.create(model=MODEL, prompt="abc", max_tokens=60, seed=2).choices[0].text
    stop = free[20:22]
    response = client.completions.create(model=MODEL, prompt="abc", max_tokens=60, seed=2, stop=[stop, "never"]).choices[0]
    assert response.text == free[: free.index(stop)]
    assert response.finish_reason == "stop"
    parts = client.completions.create(model=MODEL, prompt="abc", max_tokens=60, seed=2, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in parts) == response.text


def test_log_probs_are_those_of_a_full_forward(served: Endpoint, client: openai.OpenAI) -> None:
    response = client.completions.create(
        model=MODEL, prompt="2+3=", max_tokens=20, seed=4, logprobs=3, temperature=0.7, top_p=0.9
    )
    (choice,) = response.choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    prompt = served.policy.tokenizer("2+3=")["input_ids"]
    ids = np.array([served.policy.tokenizer.convert_tokens_to_ids(token) for token in choice.logprobs.tokens])
    logps_TV = next_logits(make_model("qwen3"), np.array(prompt), ids).log_softmax(-1)
    assert choice.logprobs.token_logprobs == pytest.approx(logps_TV[range(len(ids)), ids].tolist(), abs=1e-4)
    assert choice.logprobs.top_logprobs is not None
    for top, best in zip(choice.logprobs.top_logprobs, logps_TV.topk(3).values.tolist(), strict=True):
        assert sorted(top.values(), reverse=True) == pytest.approx(best, abs=1e-4)
    assert choice.logprobs.text_offset == [0, *np.cumsum([len(t) for t in choice.logprobs.tokens])[:-1].tolist()]
    assert "".join(choice.logprobs.tokens) == choice.text


def test_log_probs_of_a_chat_streamed_or_complete(client: openai.OpenAI) -> None:
    request: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 15, "seed": 4, "logprobs": True, "top_logprobs": 2}
    complete = client.chat.completions.create(**request).choices[0]
    assert complete.logprobs is not None
    assert complete.logprobs.content is not None
    first = complete.logprobs.content[0]
    assert first.bytes == list(first.token.encode())
    assert len(first.top_logprobs) == 2
    streamed = [
        entry
        for chunk in client.chat.completions.create(**request, stream=True)
        for entry in (chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else [])
    ]
    assert [(e.token, e.logprob) for e in streamed] == [(e.token, e.logprob) for e in complete.logprobs.content]
    assert "".join(e.token for e in streamed) == complete.message.content


def test_requests_beyond_capacity_wait(served: Endpoint) -> None:
    """40 completions over 4 slots: all finish, and at no time do more than 4 decode."""
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, sum(row is not None for row in served.engine.session.running))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with served.client() as client, ThreadPoolExecutor(8) as threads:
        requests = [
            threads.submit(client.completions.create, model=MODEL, prompt="x", max_tokens=20, n=5, seed=n) for n in range(8)
        ]
        assert all(len(request.result().choices) == 5 for request in requests)
    done.set()
    watcher.join()
    assert peak == 4
    assert becomes_idle(served)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slots(served: Endpoint, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Twelve completions take all four slots of a slow engine; their client goes away, and the slots are free long before
    they could have been written."""
    session, steps, step = served.engine.session, 0, served.engine.session.step

    def slow() -> Any:
        nonlocal steps
        steps += 1
        time.sleep(0.1)
        return step()

    monkeypatch.setattr(session, "step", slow)
    with served.client() as client:
        if stream:
            chunks = client.completions.create(model=MODEL, prompt="abc", max_tokens=400, n=12, seed=0, stream=True)
            next(iter(chunks))
            chunks.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.5).completions.create(model=MODEL, prompt="abc", max_tokens=400, n=12, seed=0)
        assert becomes_idle(served), "the slots were not freed"
        assert not session.waiting
        assert steps < 400, "a completion has 400 tokens"
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=3, seed=0).choices


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"max_tokens": 100_000}, "messages", "don't fit"),
    ({"max_tokens": 401}, "max_tokens", "at most 400"),
    ({"stop": ["x"] * 20}, "stop", "stop: List should have at most 16 items"),
    ({"stop": 3}, "stop", "stop: Input should be a valid"),
    ({"stop": ["x", ""]}, "stop", "at least 1 character"),
    ({"top_logprobs": 3}, None, "needs logprobs"),
    ({"logit_bias": {"5": 1.0}}, None, "not supported"),
    ({"frequency_penalty": 0.5}, None, "not supported"),
    ({"functions": []}, "functions", "unknown key"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages", "role"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages", "don't fit"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "messages.0.content.0.type: "),
    ({"stop": ""}, "stop", "at least 1 character"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema needs it"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
]


@pytest.mark.parametrize(("changed", "param", "message"), BAD, ids=[next(iter(case[0])) for case in BAD])
def test_bad_requests_say_what_is_wrong(
    client: openai.OpenAI, changed: dict[str, Any], param: str | None, message: str
) -> None:
    body = {"messages": MESSAGES, **changed}
    messages = body.pop("messages")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=messages, extra_body=body)
    assert message in str(caught.value)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_other_refused_requests(served: Endpoint, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="the model has"):
        client.completions.create(model=MODEL, prompt=[1, 99_999])
    with pytest.raises(openai.BadRequestError, match="no tokens"):
        client.completions.create(model=MODEL, prompt="")
    half = {"model": MODEL, "prompt": "cut \ud83d"}, {"model": MODEL, "messages": [{"role": "user", "content": "cut \ud83d"}]}
    for path, payload in zip(("/v1/completions", "/v1/chat/completions"), half, strict=True):
        request = urllib.request.Request(
            served.address + path, json.dumps(payload).encode(), {"content-type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=120)
        assert caught.value.code == 400
        assert "half of a character" in json.loads(caught.value.read())["error"]["message"]
    for path, body, status in (
        ("/v1/completions", b"{", 400),
        ("/nothing", b"{}", 404),
        ("/v1/models", b"{}", 405),
        ("/v1/responses", b"{}", 404),
        ("/v1/messages/count_tokens", b"{}", 404),
    ):
        request = urllib.request.Request(served.address + path, body, {"content-type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=120)
        assert caught.value.code == status
        error = json.loads(caught.value.read())["error"]
        assert error["param"] is None
        assert error["message"].startswith("the body is not JSON: ") == (body == b"{")
        assert ("use /v1/chat/completions" in error["message"]) == ("responses" in path or "messages" in path)


def test_a_model_without_a_chat_template_says_so() -> None:
    policy = chatting_policy()
    policy.tokenizer.chat_template = None
    with (
        endpoint(policy, slots=1, limit=8) as served,
        served.client() as client,
        pytest.raises(openai.BadRequestError, match="/v1/completions"),
    ):
        client.chat.completions.create(model=MODEL, messages=MESSAGES)


def test_a_template_that_raises_is_a_bad_request() -> None:
    policy = chatting_policy()
    policy.tokenizer.chat_template = "{{ raise_exception('only users speak here') }}"
    with (
        endpoint(policy, slots=1, limit=8) as served,
        served.client() as client,
        pytest.raises(openai.BadRequestError, match="only users speak here") as refused,
    ):
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert refused.value.param == "messages"


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_engine_error_is_reported_and_the_server_continues(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    with endpoint(chatting_policy(), slots=1, limit=8) as served:
        step = served.engine.session.step

        def fails() -> Any:
            monkeypatch.setattr(served.engine.session, "step", step)
            raise kind("no memory left")

        for stream, expected in ((False, openai.InternalServerError), (True, openai.APIError)):
            monkeypatch.setattr(served.engine.session, "step", fails)
            with served.client() as client, pytest.raises(expected, match="no memory left") as caught:
                list(client.completions.create(model=MODEL, prompt="x", max_tokens=3, stream=stream))
            assert caught.value.type == "server_error"
        with served.client() as client:
            assert client.completions.create(model=MODEL, prompt="x", max_tokens=3).choices


def test_work_that_nobody_waits_for_does_not_end_the_engine() -> None:
    with endpoint(chatting_policy(), slots=1, limit=8) as served, served.client() as client:

        async def leave() -> None:
            waiting = asyncio.ensure_future(served.engine.compute(lambda: time.sleep(0.2)))
            leaving = asyncio.ensure_future(served.engine.compute(lambda: 1))
            await asyncio.sleep(0)
            leaving.cancel()
            await waiting

        asyncio.run(leave())
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=3).choices
