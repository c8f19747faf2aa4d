"""`oncurve publish` against a stand-in of the hub's HTTP interface, which stores what it is sent."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from oncurve.api import train
from oncurve.publish import licence_of, model_card, results_table
from oncurve.records import EvalReport
from oncurve.runs.checkpoints.listing import RunTarget
from tests.cli.conftest import Oncurve


@dataclass
class Hub:
    """What the stand-in received. ``status`` is sent instead of an answer if it is an error."""

    address: str = ""
    status: int = 200
    created: list[dict[str, object]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"id": "me/sums", "sha": "0" * 40, "siblings": []})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            hub.tokens.add(self.headers.get("authorization", ""))
            if self.path == "/api/repos/create":
                hub.created.append(json.loads(body))
                self.reply({"url": f"{hub.address}/me/sums", "name": "me/sums"})
            elif "/preupload/" in self.path:
                files = json.loads(body)["files"]
                self.reply({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
            elif "/commit/" in self.path:
                for line in map(json.loads, body.decode().splitlines()):
                    if line["key"] == "header":
                        hub.messages.append(line["value"]["summary"])
                    elif line["key"] == "file":
                        hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self.reply({"commitUrl": f"{hub.address}/me/sums/commit/1", "commitOid": "1" * 40, "success": True})
            else:
                self.reply({})

        def reply(self, data: object) -> None:
            text = json.dumps(data if hub.status == 200 else {"error": "no write access"}).encode()
            self.send_response(hub.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None: ...

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    found = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(found))
    found.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", found.address)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield found
    server.shutdown()
    server.server_close()


def test_a_run_is_published_with_its_card_recipe_and_curve(oncurve: Oncurve, runs: Path, hub: Hub) -> None:
    done = oncurve("publish", "small-1", "me/sums", "--license", "apache-2.0", "--private", "--runs", runs)
    assert done.code == 0, done.err
    assert hub.created[0]["name"] == "sums"
    assert "private" in (hub.created[0].get("visibility"), *(["private"] if hub.created[0].get("private") is True else []))
    assert hub.tokens == {"Bearer hf_test"}
    assert {"README.md", "recipe.toml", "curve.svg", "config.json", "tokenizer.json"} <= set(hub.files)
    assert hub.files["model.safetensors"] == (runs / "small-1" / "model" / "model.safetensors").read_bytes()
    assert hub.files["recipe.toml"] == (runs / "small-1" / "recipe.toml").read_bytes()
    assert hub.files["curve.svg"].startswith(b"<svg")
    card = hub.files["README.md"].decode()
    head = yaml.safe_load(card.split("---")[1])
    assert head["license"] == "apache-2.0"
    assert head["library_name"] == "transformers"
    assert "2 steps of sft, then 2 steps of grpo" in card
    assert hub.address in done.out


def test_a_dry_run_sends_nothing(oncurve: Oncurve, runs: Path, hub: Hub) -> None:
    done = oncurve("publish", "small-1", "me/sums", "--dry-run", "--json", "--runs", runs)
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["address"] is None
    assert "model.safetensors" in {file["name"] for file in data["files"]}
    assert "# sums" in data["card"]
    assert (hub.created, hub.files) == ([], {})


def test_a_refusal_of_the_hub_is_one_message(oncurve: Oncurve, runs: Path, hub: Hub) -> None:
    hub.status = 403
    done = oncurve("publish", "small-1", "me/sums", "--runs", runs)
    assert done.code == 2
    assert "the hub refused it" in done.err
    assert "token" in done.err
    assert hub.files == {}


def test_no_network_is_one_message(oncurve: Oncurve, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    done = oncurve("publish", "small-1", "me/sums", "--runs", runs)
    assert done.code == 2
    assert "--dry-run" in done.err


def test_a_name_that_the_hub_would_refuse_is_refused(oncurve: Oncurve, runs: Path) -> None:
    for name, reason in {"sums": "OWNER/NAME", "../x": "..", "me/-sums": "start or end", "me/sums.git": ".git"}.items():
        done = oncurve("publish", "small-1", name, "--dry-run", "--runs", runs)
        assert done.code == 2
        assert reason in done.err


def test_results_have_wilson_intervals() -> None:
    """50 of 100: the interval is 40.4 to 59.6 % (Wilson)."""
    table = results_table([EvalReport("grpo", 10, 0.5, 100, {})])
    assert "| grpo | 10 | 50.0 % | 40.4 – 59.6 % | 100 |" in table
    assert results_table([]) == "Nothing was held out."


def test_the_licence_of_a_local_base_is_read_from_its_card(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\nlicense: gpl\n")
    assert licence_of(str(tmp_path)) == "mit"
    assert licence_of("tiny") is None


def test_the_card_of_a_run_from_python_does_not_promise_that_its_recipe_repeats_it(tmp_path: Path) -> None:
    shape = {"steps": 1, "group_size": 2, "prompts_per_step": 1, "sampling": {"max_new_tokens": 2}}
    run = train(model="tiny", prompts=["1+1="], rewards=[len], runs_dir=tmp_path, quiet=True, **shape)  # type: ignore[arg-type]
    card = model_card(RunTarget(run.folder), "me/sums")
    assert "came from a Python program" in card
    assert "oncurve train recipe.toml" not in card
