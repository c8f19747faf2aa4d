"""Which requests a served model answers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import openai
import pytest

from oncurve.errors import RecipeError
from oncurve.serve.server import api_key_for
from tests.serve.serving import Endpoint, chatting_policy, endpoint

KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def locked() -> Iterator[Endpoint]:
    with endpoint(chatting_policy(), slots=1, limit=8, key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def unlocked() -> Iterator[Endpoint]:
    with endpoint(chatting_policy(), slots=1, limit=8) as server:
        yield server


def status(served: Endpoint, headers: dict[str, str]) -> int:
    request = urllib.request.Request(f"{served.address}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code if json.loads(error.read())["error"]["message"] else 0


@pytest.mark.parametrize("key", ["", "wrong", KEY[:-1], KEY + "x", "café"])
def test_requests_without_the_key_are_refused(locked: Endpoint, key: str) -> None:
    assert status(locked, {"authorization": f"Bearer {key}".encode().decode("latin-1")}) == 401


def test_requests_with_the_key_are_answered(locked: Endpoint) -> None:
    with locked.client(KEY) as client:
        assert client.models.list().data
    assert [status(locked, {"authorization": f"{scheme} {KEY}"}) for scheme in ("bearer", "BEARER", "Basic")] == [200, 200, 401]
    with locked.client("wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"
    assert KEY not in str(caught.value)


def test_without_a_key_only_local_requests_are_answered(unlocked: Endpoint) -> None:
    assert status(unlocked, {}) == 200
    assert status(unlocked, {"host": "evil.example"}) == 421
    assert status(unlocked, {"origin": "https://evil.example"}) == 403
    assert status(unlocked, {"sec-fetch-site": "cross-site"}) == 403


def test_another_site_s_page_is_refused_even_with_the_key(locked: Endpoint) -> None:
    assert status(locked, {"authorization": f"Bearer {KEY}", "origin": "https://evil.example"}) == 403
    assert status(locked, {"authorization": f"Bearer {KEY}", "host": "my-server.example"}) == 200


def test_where_the_key_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    assert api_key_for("127.0.0.1", "SOME_KEY") == (None, False)
    key, is_new = api_key_for("0.0.0.0", "SOME_KEY")
    assert is_new
    assert key is not None
    assert len(key) >= 32
    assert api_key_for("0.0.0.0", "SOME_KEY")[0] != key
    monkeypatch.setenv("SOME_KEY", "from-the-environment")
    assert api_key_for("0.0.0.0", "SOME_KEY") == ("from-the-environment", False)
    assert api_key_for("127.0.0.1", "SOME_KEY") == ("from-the-environment", False)
    monkeypatch.setenv("SOME_KEY", "short")
    with pytest.raises(RecipeError, match="guessed"):
        api_key_for("0.0.0.0", "SOME_KEY")
