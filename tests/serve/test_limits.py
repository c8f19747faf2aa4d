"""What a served model refuses: bodies that are too large, too slow or malformed, and slow headers. Others go on."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from oncurve import local_http
from oncurve.local_http import BODY_BYTES, check_json
from tests.serve.serving import MODEL, Endpoint, chatting_policy, endpoint


@pytest.fixture(scope="module")
def served() -> Iterator[Endpoint]:
    with endpoint(chatting_policy(), slots=2, limit=8) as server:
        yield server


def post(served: Endpoint, body: bytes | str, path: str = "/v1/completions") -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(served.address).netloc, timeout=120)
    connection.request("POST", path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read().decode()


def text_body(**values: str) -> str:
    """A good body, with raw JSON in place of some values."""
    good = {"model": f'"{MODEL}"', "prompt": '"0"', "max_tokens": "2"}
    return "{" + ", ".join(f'"{key}": {value}' for key, value in {**good, **values}.items()) + "}"


ODD = [
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"\\ud800"', '"a\\udfffb"', "9" * 400, "9" * 5000, "-1", "-1e-5",
    "true", "null", "[]", "{}", '""', '"x"', "[" * 5000 + "]" * 5000, '{"a":' * 300 + "1" + "}" * 300, "1.5", "[[]]", "[null]",
    '[["a"], 1]', "18446744073709551616", "2147483648", '{"\\ud800": 1}', '[1e999]', "[-1]", "[99999999999999999999]",
]  # fmt: skip
KEYS = (
    "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "logprobs", "stream",
    "stream_options", "model", "user", "logit_bias", "frequency_penalty", "echo", "unheard_of", "\\ud800",
)  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_every_malformed_value_is_the_client_s_error(served: Endpoint, key: str) -> None:
    for value in ODD:
        status, answer = post(served, text_body(**{key: value}))
        assert status == 200 or 400 <= status < 500, (key, value[:40], status, answer)
        if status != 200:
            assert json.loads(answer)["error"]["message"], (key, value[:40])
    assert post(served, text_body())[0] == 200


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "1e-320"},
        {"temperature": "1e-30"},
        {"temperature": "0"},
        {"top_p": "1e-320"},
        {"min_p": "0.9999999999"},
        {"seed": "-9223372036854775808"},
        {"seed": "18446744073709551615"},
        {"top_k": "2147483647"},
        {"top_k": "0"},
        {"n": "128"},
    ],
)
def test_extreme_but_valid_values_are_answered(served: Endpoint, values: dict[str, str]) -> None:
    status, answer = post(served, text_body(**values))
    assert status == 200, answer
    assert json.loads(answer)["choices"]


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", "null", "1", '"x"', b"\xff\xfe", "{}" * 2, "{'a': 1}", "[" * 100_000, '{"a":' * 100_000, b"\x00" * 100],
)
def test_a_malformed_body_is_the_client_s_error(served: Endpoint, body: bytes | str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, answer = post(served, body, path)
        assert 400 <= status < 500, answer
        assert json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", '[{"type": "text", "text": "\\udc00"}]', "1e999", '[{"type": "text"}]'])
def test_malformed_messages_are_the_client_s_error(served: Endpoint, value: str) -> None:
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": {value}}}]}}'
    status, answer = post(served, body, "/v1/chat/completions")
    assert 400 <= status < 500, answer


def raw(served: Endpoint, data: bytes) -> socket.socket:
    where = urlsplit(served.address)
    connection = socket.create_connection((where.hostname, where.port), timeout=120)
    connection.sendall(data)
    return connection


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


def test_a_body_that_is_announced_too_large_is_not_read(served: Endpoint) -> None:
    with raw(served, HEAD + f"content-length: {BODY_BYTES + 1}\r\n\r\n".encode()) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_body_without_a_length_is_limited(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_http, "BODY_BYTES", 100_000)
    with raw(served, HEAD + b"transfer-encoding: chunked\r\n\r\n") as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is closed before all is sent
            for _ in range(20):
                connection.sendall(b"2710\r\n" + b" " * 10_000 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_slow_body_times_out(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_http, "BODY_S", 0.3)
    with raw(served, HEAD + b'content-length: 100\r\n\r\n{"model":') as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_headers_that_are_too_long_are_refused(served: Endpoint) -> None:
    with raw(served, HEAD + b"x: " + b"y" * 200_000) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_half_open_connections_are_closed_and_others_are_answered(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_http, "HEADER_S", 2.0)
    starts = (
        b"",
        b"G",
        HEAD,
        b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\nGET /v1",
    )  # the last one after a good request
    connections = [raw(served, starts[i % len(starts)]) for i in range(200)]
    assert post(served, text_body())[0] == 200
    for index, connection in enumerate(connections):
        with connection:
            if index % len(starts) == 3:
                assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            assert is_closed(connection), index


def test_a_slow_answer_is_not_cut_off(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limits are for what a client sends."""
    monkeypatch.setattr(local_http, "HEADER_S", 1.0)
    real = served.policy.encode

    def slow(prompt: object) -> object:
        time.sleep(2.0)
        return real(prompt)  # type: ignore[arg-type]

    monkeypatch.setattr(served.policy, "encode", slow)
    assert post(served, text_body())[0] == 200


def test_a_long_prompt_does_not_hold_up_others(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    real, started, release = served.policy.encode, threading.Event(), threading.Event()

    def blocked(prompt: object) -> object:
        started.set()
        assert release.wait(120)
        return real(prompt)  # type: ignore[arg-type]

    monkeypatch.setattr(served.policy, "encode", blocked)
    answers: list[int] = []
    waiting = threading.Thread(target=lambda: answers.append(post(served, text_body())[0]))
    waiting.start()
    assert started.wait(120)
    connection = http.client.HTTPConnection(urlsplit(served.address).netloc, timeout=120)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    assert answers == []
    release.set()
    waiting.join()
    assert answers == [200]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a": NaN}', "NaN is not a number of JSON"),
        (b"[1e400]", "too large"),
        (b'["\\ud83d"]', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b"[1,]", "at character"),
        (b"\xe9", "byte 0 is not UTF-8"),
        (b"[" * 9999, "nested too deeply"),
        (b"[" * 300 + b"]" * 300, "nested too deeply"),
        (b"9" * 9999, "digits"),
    ],
)
def test_the_reason_is_named(body: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_json(body)


@pytest.mark.parametrize(
    "body", [b"{}", b'"\\ud83d\\ude00"', '"größe 😀"'.encode(), b"[1e308, -0.0, 12345678901234567890]", b"\t1 "]
)
def test_good_json_passes(body: bytes) -> None:
    check_json(body)
