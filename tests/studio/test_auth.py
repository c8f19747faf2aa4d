"""Which requests are accepted, and which headers every response has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oncurve.local_http import host_of_header, is_loopback
from oncurve.studio.auth import COOKIE
from tests.studio.serving import Served, served

TOKEN = "a-secret-of-this-test"


@pytest.fixture(scope="module")
def open_studio(runs_dir: Path) -> Iterator[Served]:
    with served(runs_dir, TOKEN) as server:
        yield server


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.5"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "example.org", "::", "localhost.example.org", ""])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_host_names() -> None:
    assert [host_of_header(h) for h in ("localhost:80", "[::1]:80", "127.0.0.1")] == ["localhost", "::1", "127.0.0.1"]


def test_every_answer_carries_the_policy(studio: Served) -> None:
    for path in ("/", "/api/runs", "/api/runs/nope/curves", "/nothing"):
        policy = studio.ask(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_another_name_for_this_machine_is_refused(studio: Served) -> None:
    assert studio.ask("/api/runs", {"host": "evil.example"}).status == 421
    assert studio.ask("/api/runs", {"host": "localhost:1"}).status == 200


def test_another_sites_page_is_refused(studio: Served) -> None:
    assert studio.ask("/api/runs", {"origin": "http://evil.example"}).status == 403
    assert studio.ask("/api/runs", {"origin": "null"}).status == 403
    assert studio.ask("/api/runs", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}).status == 403
    assert studio.ask("/", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}).status == 200


def test_only_json_can_be_posted(studio: Served) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert studio.ask("/api/trial", {"content-type": kind}, body={}).status == 415
    crossing = {"origin": "http://evil.example"}
    assert studio.ask("/api/runs/sums-1/feedback", crossing, body={}).status == 403


def test_without_the_token_there_is_no_way_in(open_studio: Served) -> None:
    assert open_studio.ask("/api/runs").status == 401
    assert open_studio.ask("/?token=wrong").status == 401
    assert open_studio.ask("/api/runs", {"cookie": f"{COOKIE}=wrong"}).status == 401
    assert open_studio.ask(f"/api/runs?token={TOKEN}").status == 401


def test_the_token_is_taken_from_the_url_once(open_studio: Served) -> None:
    entered = open_studio.ask(f"/?token={TOKEN}")
    assert (entered.status, entered.headers["location"]) == (303, "/")
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert open_studio.ask("/api/runs", {"cookie": cookie.partition(";")[0]}).status == 200
