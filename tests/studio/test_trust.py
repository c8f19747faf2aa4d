"""A page can make the studio run code or send keys only with --allow-code and the ticked box."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from oncurve.errors import ModelError
from oncurve.recipe.load import dump_recipe, load_recipe, parse_recipe
from oncurve.runs.folder import RunFolder
from oncurve.studio.auth import COOKIE
from oncurve.studio.model_servers import ModelServers
from oncurve.studio.server import make_app
from tests.studio.browsing import a_browser, a_page
from tests.studio.samples import make_run
from tests.studio.serving import Served, served
from tests.studio.test_playground import give_model

TOKEN = "a-secret-of-this-test"
COOKIES = {"cookie": f"{COOKIE}={TOKEN}"}
SECRET = "a-value-that-must-not-leave"

CODE: dict[str, dict[str, Any]] = {
    "a function": {"type": "python", "function": "FILE:f"},
    "a function in a worker": {"type": "python", "function": "FILE:f", "seconds": 5.0},
    "a module's function": {"type": "python", "function": "subprocess:getoutput"},
    "a function of steps": {"type": "process", "source": "python", "function": "FILE:f"},
    "a module's function of steps": {"type": "process", "source": "python", "function": "subprocess:getoutput"},
    "a function that the source does not use": {"type": "process", "source": "arithmetic", "function": "FILE:f"},
    "a splitter": {"type": "process", "source": "arithmetic", "splitter": "FILE:f"},
    "a splitter under another name": {"type": "process", "name": "answer", "weight": 0.1, "splitter": "FILE:f"},
    "programs without a sandbox": {"type": "code", "trusted": True},
    "programs without a sandbox, as text": {"type": "code", "trusted": "yes"},
}
KEYS: dict[str, dict[str, Any]] = {
    "a judge": {"type": "judge", "model": "m", "base_url": "URL", "key_env": "PRIVATE", "retries": 0},
    "a judge of steps": {
        "type": "process",
        "source": "judge",
        "judge": {"model": "m", "base_url": "URL", "key_env": "PRIVATE", "retries": 0},
    },
    "a judge at the usual address": {"type": "judge", "model": "m", "key_env": "PRIVATE"},
    "a judge with the usual key": {"type": "judge", "model": "m", "base_url": "URL", "retries": 0},
}


def trial_body(*rewards: dict[str, Any]) -> dict[str, Any]:
    return {"rewards": list(rewards), "prompt": "12+34=", "columns": {"answer": "46"}, "completions": ["echo 1 > ran", "46"]}


def filled(reward: dict[str, Any], folder: Path, address: str = "http://127.0.0.1:9/v1") -> dict[str, Any]:
    """The reward with a file whose import leaves a trace, and with an endpoint."""
    (folder / "mine.py").write_text(
        f"from pathlib import Path\nPath({str(folder / 'ran')!r}).touch()\n"
        "def f(first=None, **_):\n    return [1.0] * len(first) if isinstance(first, list) else []\n"
    )
    text = json.dumps(reward).replace("FILE", str(folder / "mine.py")).replace("URL", address)
    return dict(json.loads(text))


def run_with(folder: Path, name: str, **changed: Any) -> RunFolder:
    """A run from elsewhere: not recorded as trusted."""
    run = make_run(folder, name)
    plain = load_recipe(run.recipe).model_dump(mode="json", exclude_none=True)
    run.write_recipe(dump_recipe(parse_recipe({**plain, **changed})))
    return run


@contextmanager
def endpoint() -> Iterator[tuple[str, list[str]]]:
    """An endpoint that records the keys it is sent."""
    keys_sent: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            keys_sent.append(self.headers.get("authorization", ""))
            self.send_response(500)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", keys_sent
        server.shutdown()


@pytest.mark.parametrize("kind", CODE)
def test_no_code_of_a_page_runs(kind: str, tmp_path: Path) -> None:
    """Not even with the flag and the tick: rewards written on a page are not the user's recipe."""
    reward = filled(CODE[kind], tmp_path)
    with served(tmp_path) as plain, served(tmp_path, TOKEN, allow_code=True) as allowing:
        for path in ("/api/trial", "/api/trial?trusted=true"):
            for data in (plain.ask(path, body=trial_body(reward)), allowing.ask(path, COOKIES, body=trial_body(reward))):
                assert data.status == 422
                assert "may not run code" in data.json["error"]["because"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", CODE)
@pytest.mark.parametrize("of_stage", [False, True])
def test_no_code_of_a_run_runs_without_the_flag_and_the_tick(kind: str, of_stage: bool, tmp_path: Path) -> None:
    reward = filled(CODE[kind], tmp_path)
    stage = {"type": "grpo", "group_size": 4, "prompts_per_step": 3}
    stages = [{**stage, "rewards": [reward]}] if of_stage else [stage]
    run_with(tmp_path, "theirs", rewards=[{"type": "answer"} if of_stage else reward], stages=stages)
    with served(tmp_path) as plain:
        for path in ("/api/trial?run=theirs", "/api/trial?run=theirs&trusted=true"):
            data = plain.ask(path, body=trial_body())
            assert data.status == 422
            assert "--allow-code" in data.json["error"]["fix"]
    with served(tmp_path, TOKEN, allow_code=True) as allowing:
        data = allowing.ask("/api/trial?run=theirs", COOKIES, body=trial_body())
        assert data.status == 422
        assert "tick the box" in data.json["error"]["fix"]
        assert allowing.ask("/api/trial?run=theirs&trusted=true", body=trial_body()).status == 401, (
            "the tick alone opens nothing"
        )
        assert allowing.ask("/api/runs/theirs/rewards", COOKIES).json["asks"], "the page says what would run"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", KEYS)
def test_no_key_is_sent_without_the_flag_and_the_tick(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATE", SECRET)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with endpoint() as (address, keys_sent):
        reward = filled(KEYS[kind], tmp_path, address)
        run_with(tmp_path, "theirs", rewards=[reward])
        with served(tmp_path) as plain:
            for tick in ("false", "true"):
                assert plain.ask(f"/api/trial?trusted={tick}", body=trial_body(reward)).status == 422
                assert plain.ask(f"/api/trial?run=theirs&trusted={tick}", body=trial_body()).status == 422
        with served(tmp_path, TOKEN, allow_code=True) as allowing:
            assert allowing.ask("/api/trial?run=theirs", COOKIES, body=trial_body()).status == 422
            assert allowing.ask("/api/trial?trusted=true", COOKIES, body=trial_body(reward)).status == 422
    assert keys_sent == []


def test_what_is_allowed_and_ticked_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rewards run and send once the user agrees, so the refusals above test something."""
    monkeypatch.setenv("PRIVATE", SECRET)
    monkeypatch.chdir(tmp_path)
    with endpoint() as (address, keys_sent), served(tmp_path, TOKEN, allow_code=True) as allowing:
        run_with(tmp_path, "theirs", rewards=[filled(CODE["a splitter"], tmp_path)])
        run_with(tmp_path, "judged", rewards=[filled(KEYS["a judge"], tmp_path, address)])
        data = allowing.ask("/api/trial?run=theirs&trusted=true", COOKIES, body=trial_body())
        assert (data.status, len(data.json["completions"])) == (200, 2)
        assert (tmp_path / "ran").exists()
        data = allowing.ask("/api/trial?run=judged&trusted=true", COOKIES, body=trial_body())
        assert data.status == 200
    assert keys_sent[0] == f"Bearer {SECRET}"


def test_plain_rewards_never_ask(studio: Served) -> None:
    names: list[dict[str, Any]] = [{"type": "answer", "name": "judge"}, {"type": "format", "name": "function", "weight": 0.1}]
    assert studio.ask("/api/trial", body=trial_body(*names)).status == 200
    assert studio.ask("/api/runs/sums-1/rewards").json["asks"] == []


def test_code_is_allowed_only_with_a_token(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token"):
        make_app(tmp_path, None, None, allow_code=True)  # type: ignore[arg-type]


MODELS: dict[str, dict[str, Any]] = {
    "code in the model's folder": {"model": {"trust_remote_code": True}},
    "an environment": {"task": {"type": "file", "path": "FOLDER/rows.jsonl", "environment": "FOLDER/mine.py:f"}},
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("target", ["theirs", "theirs@grpo-2"])
def test_no_model_with_code_is_loaded_without_the_flag_and_the_tick(kind: str, target: str, tmp_path: Path) -> None:
    changed = json.loads(json.dumps(MODELS[kind]).replace("FOLDER", str(tmp_path)))
    run = run_with(tmp_path, "theirs", **changed)
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    (run.checkpoints / "grpo-000002").mkdir(parents=True)
    sampled = {"target": target, "prompt": "1", "samples": 1, "temperature": 1, "top_p": 1, "max_tokens": 4, "seed": 0}
    with served(tmp_path) as plain, served(tmp_path, TOKEN, allow_code=True) as allowing:
        (offered,) = plain.ask("/api/playground").json["runs"]
        assert "runs Python" in offered["asks"][0], "the page says what would run"
        for data in (
            plain.ask("/api/playground/open", body={"target": target}),
            plain.ask("/api/playground/open", body={"target": target, "trusted": True}),
            plain.ask("/api/playground/sample", body=sampled),
            allowing.ask("/api/playground/open", COOKIES, body={"target": target}),
            allowing.ask("/api/playground/sample", COOKIES, body=sampled),
        ):
            assert data.status == 422
            assert "runs Python" in data.json["error"]["what"]


@pytest.mark.parametrize("name", ["theirs", "theirs@grpo-2", "theirs@best"])
def test_a_run_elsewhere_is_no_model_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose path also names a run, or a checkpoint of one, would be opened as that run, with a recipe that the studio
    has not checked."""
    run = run_with(tmp_path / "elsewhere", "theirs", model={"trust_remote_code": True})
    (run.checkpoints / "grpo-000002").mkdir(parents=True)
    folder = run.path.with_name(name)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (tmp_path / "runs").mkdir()
    started: list[str] = []
    monkeypatch.setattr(ModelServers, "_start", lambda self, target, trusted: started.append(target))
    with served(tmp_path / "runs") as plain:
        for trusted in (False, True):
            data = plain.ask("/api/playground/open", body={"target": str(folder), "trusted": trusted})
            assert data.status == 422
            assert "no such model" in data.json["error"]["what"]
    assert started == []


def test_a_tick_without_anything_to_agree_to_is_no_agreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of a model gets --trust only for what the studio found, showed and was allowed."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    trusts: list[bool] = []

    def start(self: ModelServers, target: str, trusted: bool) -> None:
        trusts.append(trusted)
        raise ModelError(target, "not started", because="this is a test", fix="none")

    monkeypatch.setattr(ModelServers, "_start", start)
    with served(tmp_path) as plain:
        plain.ask("/api/playground/open", body={"target": str(tmp_path / "model"), "trusted": True})
    assert trusts == [False]


@pytest.mark.slow
def test_a_model_with_code_is_loaded_once_it_is_allowed_and_ticked(tmp_path: Path) -> None:
    small = {"layers": 1, "width": 32, "mlp_width": 64}
    run = run_with(tmp_path, "theirs", model={"trust_remote_code": True, "tiny": small})
    give_model(run, 0)
    with served(tmp_path, TOKEN, allow_code=True) as allowing:
        data = allowing.ask("/api/playground/open", COOKIES, body={"target": "theirs", "trusted": True}, timeout=300)
        assert data.status == 200, data.json
        assert allowing.ask("/api/playground", COOKIES).json["there"] == ["theirs"]


@pytest.mark.slow
def test_the_page_names_what_would_run_and_asks(tmp_path: Path) -> None:
    reward = filled(CODE["a splitter"], tmp_path)
    run_with(tmp_path, "theirs", rewards=[reward])
    with (
        served(tmp_path, TOKEN, allow_code=True) as allowing,
        a_browser() as browser,
        a_page(browser, f"{allowing.address}/?token={TOKEN}") as watched,
    ):
        page = watched.page
        page.goto(f"{allowing.address}/#/rewards/theirs")
        expect(page.get_by_text(f"rewards.process.splitter runs Python: {reward['splitter']}")).to_be_visible()
        page.get_by_role("button", name="Score").click()
        expect(page.get_by_role("alert").first).to_contain_text("tick the box")
        assert not (tmp_path / "ran").exists()
        assert all("422" in error for error in watched.errors)
        watched.errors.clear()
        page.get_by_role("checkbox", name="I trust this run").check()
        page.get_by_role("button", name="Score").click()
        expect(page.get_by_text("no reward").first).to_be_visible(timeout=60_000)
        assert (tmp_path / "ran").exists()
