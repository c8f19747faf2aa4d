"""Malformed requests to the studio: always the client's error, in the format that the page shows."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import pytest

from oncurve.local_http import BODY_BYTES
from tests.studio.serving import Served

ODD = [
    "NaN", "1e999", '"\\ud800"', '{"\\udc00": 1}', "9" * 5000, "[" * 5000 + "]" * 5000, "null", "-1", "[]", '"x"',
    "1" + "0" * 30,
]  # fmt: skip
POSTS = {
    "/api/trial": {"rewards": "[]", "prompt": '"p"', "columns": "{}", "completions": '["a"]', "max_new_tokens": "5"},
    "/api/trial?run=sums-1": {"rewards": "[]", "prompt": '"p"', "columns": "{}", "completions": '["a"]'},
    "/api/runs/sums-1/feedback": {"type": '"flag"', "stage": '"grpo"', "step": "1", "kind": '"train"', "group": "0"},
}


def post(studio: Served, path: str, body: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(studio.address).netloc, timeout=120)
    connection.request("POST", path, body.encode(), {"content-type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read().decode()


@pytest.mark.parametrize("path", POSTS)
def test_a_malformed_body_is_never_a_server_error(studio: Served, path: str) -> None:
    for key in (*POSTS[path], "unheard_of"):
        for value in ODD:
            body = "{" + ", ".join(f'"{name}": {text}' for name, text in {**POSTS[path], key: value}.items()) + "}"
            status, answer = post(studio, path, body)
            assert status < 500, (key, value[:30], answer)


@pytest.mark.parametrize("body", ["", "{", "NaN", "[" * 100_000, "\ufeff{}"])
def test_what_is_no_json_is_the_client_s_error(studio: Served, body: str) -> None:
    for path in POSTS:
        assert 400 <= post(studio, path, body)[0] < 500


def test_a_large_body_is_refused(studio: Served) -> None:
    connection = http.client.HTTPConnection(urlsplit(studio.address).netloc, timeout=120)
    connection.putrequest("POST", "/api/trial")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(BODY_BYTES + 1))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["fix"]


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, -(2**63) - 1, 10**400])
def test_a_number_of_a_query_that_no_database_holds(studio: Served, number: int) -> None:
    for path in (
        f"/api/runs/sums-1/step?stage=grpo&step={number}",
        f"/api/runs/sums-1/group?stage=grpo&step=1&position={number}",
        f"/api/runs/sums-1/group?stage=grpo&step={number}&position=0",
        f"/api/runs/sums-1/search?step={number}",
        f"/api/runs/sums-1/search?before={number}",
        f"/api/runs/sums-1/search?before={number}&highest_kl=true",
        f"/api/runs/sums-1/prompt?id={number}",
    ):
        assert studio.ask(path).status < 500, path
