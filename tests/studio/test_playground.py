"""The Playground with real `oncurve serve` processes: the routes and the page."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import APIResponse, Browser, Page, Route, expect

from oncurve.models.loading.load import load_policy
from oncurve.recipe.load import load_recipe
from oncurve.runs.checkpoints import files
from oncurve.runs.folder import RunFolder
from oncurve.studio.playground import models_of
from oncurve.training.start import task_for
from oncurve.training.trainer import trained_weights
from tests.studio.browsing import a_browser, a_page
from tests.studio.samples import make_run
from tests.studio.serving import Served, served

SMALL = ("model.tiny.layers=1", "model.tiny.width=32", "model.tiny.mlp_width=64")
ASK: dict[str, Any] = {"prompt": "1+2=", "samples": 3, "temperature": 1.0, "top_p": 1.0, "max_tokens": 12, "seed": 4}


def give_model(run: RunFolder, seed: int) -> None:
    """A final model, a checkpoint with other weights, and a checkpoint that is being written."""
    recipe = load_recipe(run.recipe)
    alphabet = task_for(recipe, recipe.stages[0]).alphabet
    load_policy(recipe.model, alphabet=alphabet, seed=seed).save(run.model)
    earlier = load_policy(recipe.model, alphabet=alphabet, seed=seed + 10)
    files.save(run.checkpoints, "grpo", 2, {"model": trained_weights(earlier)}, {"state": {"stage": "grpo", "step": 2}})
    (run.checkpoints / ".writing-grpo-000003").mkdir()


@pytest.fixture(scope="module")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("playground")
    for seed, name in enumerate(("one", "two")):
        give_model(make_run(folder, name, sets=SMALL), seed)
    make_run(folder, "modelless")
    with served(folder) as offers:
        yield offers


def lines(studio: Served, request_body: dict[str, Any]) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        f"{studio.address}/api/playground/sample", json.dumps(request_body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as data:
        return [json.loads(line) for line in data]


def test_what_is_offered(playground: Served) -> None:
    data = playground.ask("/api/playground").json
    models = {one["run"]: [model["target"] for model in one["models"]] for one in data["runs"]}
    assert models == {"one": ["one", "one@grpo-2"], "two": ["two", "two@grpo-2"]}
    defaults = playground.ask("/api/playground/runs/one").json
    assert defaults["prompts"][0]["text"].startswith("9+"), "measurements first"
    assert len({prompt["id"] for prompt in defaults["prompts"]}) == len(defaults["prompts"])
    assert defaults["grading"] == {"baseline": "mean", "scale": "group", "eps": 1e-4, "mask_cut": False}
    assert [reward["type"] for reward in defaults["rewards"]] == ["answer", "format"]


@pytest.mark.parametrize("target", ["nothing", "../one", "--help", "modelless@grpo-2x/..", "/", "relative/model", "owner/name"])
def test_what_is_no_model_is_never_started(playground: Served, target: str) -> None:
    data = playground.ask("/api/playground/open", body={"target": target})
    assert data.status in (404, 422)
    assert playground.ask("/api/playground").json["there"] == []


@pytest.mark.slow
def test_samples_come_as_they_are_drawn(playground: Served) -> None:
    data = lines(playground, {"target": "one", **ASK})
    assert {line["sample"] for line in data} == {0, 1, 2}
    texts = ["".join(line["text"] for line in data if line["sample"] == n) for n in range(3)]
    assert [sum(line["finish"] is not None for line in data if line["sample"] == n) for n in range(3)] == [1, 1, 1]
    tokens = [token for line in data if line["sample"] == 0 for token in line["tokens"]]
    # Tokens are shown by their names; a text leaves out those that are no part of it.
    assert "".join(text for text, *_ in tokens if text not in ("<unk>", "<pad>", "<end>")) == texts[0]
    for text, _, logp, top in tokens:
        assert logp <= 0
        assert len(top) == 5
        assert [one for _, one in top] == sorted((one for _, one in top), reverse=True)
        # The sampled token is one of them, or less likely than all of them.
        assert dict(top).get(text, logp) == pytest.approx(logp, abs=1e-4)
        assert text in dict(top) or logp <= top[-1][1]
    again = lines(playground, {"target": "one", **ASK})
    assert ["".join(line["text"] for line in again if line["sample"] == n) for n in range(3)] == texts
    assert playground.ask("/api/playground").json["there"] == ["one"]
    (error,) = lines(playground, {"target": "one", **ASK, "prompt": ""})
    assert "no tokens" in error["error"]
    assert playground.ask("/api/playground/close", body={"target": "one"}).json["there"] == []


@pytest.mark.slow
def test_an_unfinished_run_offers_its_newest_model_first(tmp_path: Path) -> None:
    run = make_run(tmp_path, "unfinished")
    for name in ("grpo-000002", "grpo-000010", "sft-000300"):
        (run.checkpoints / name).mkdir(parents=True)
    assert [model["says"] for model in models_of(run)] == ["grpo 10", "grpo 2", "sft 300"]


def test_a_model_that_can_not_be_loaded_says_why(playground: Served, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(playground.runs_dir / "one" / "model", folder)
    (folder / "config.json").write_text('{"model_type": "no such thing"}')
    data = playground.ask("/api/playground/open", body={"target": str(folder)}, timeout=300)
    assert data.status == 422
    assert "can't be loaded" in data.json["error"]["what"]
    assert data.json["error"]["fix"]


@pytest.mark.slow
def test_the_page(playground: Served) -> None:
    """Two models side by side: streamed, scored and shown as groups; then stopped and unloaded."""
    with a_browser() as browser:
        _the_page(playground, browser)


@pytest.mark.slow
def test_what_is_typed_before_the_run_s_settings_arrive_stays(playground: Served) -> None:
    with a_browser() as browser, a_page(browser, "about:blank") as watched:
        watched.host = playground.address.removeprefix("http://")
        page = watched.page
        late: list[Route] = []
        page.route("**/api/playground/runs/one", lambda route: late.append(route))
        page.goto(f"{playground.address}/#/playground/one")
        expect(page.get_by_role("combobox", name="Model")).to_have_value("one")
        page.get_by_role("textbox", name="Prompt", exact=True).fill("1+2=")
        page.get_by_role("spinbutton", name="Max new tokens").fill("30")
        for route in late:
            route.continue_()
        expect(page.get_by_role("combobox", name="Prompt from that run")).to_be_visible()
        assert page.get_by_role("textbox", name="Prompt", exact=True).input_value() == "1+2="
        assert page.get_by_role("spinbutton", name="Max new tokens").input_value() == "30"


@pytest.mark.slow
@pytest.mark.parametrize(("role", "name", "typed"), [("textbox", "Prompt", "1+2="), ("spinbutton", "Max new tokens", "3")])
def test_settings_that_arrive_do_not_replace_the_field_with_the_cursor(
    playground: Served, role: Any, name: str, typed: str
) -> None:
    """The run's prompt arrived between the selection of a field and the first key, and what was typed stood behind it."""
    with a_browser() as browser, a_page(browser, "about:blank") as watched:
        watched.host = playground.address.removeprefix("http://")
        page = watched.page
        late: list[Route] = []
        page.route("**/api/playground/runs/one", lambda route: late.append(route))
        page.goto(f"{playground.address}/#/playground/one")
        expect(page.get_by_role("combobox", name="Model")).to_have_value("one")
        field = page.get_by_role(role, name=name, exact=True)
        field.focus()
        before = field.input_value()
        for route in late:
            route.continue_()
        expect(page.get_by_role("combobox", name="Prompt from that run")).to_be_visible()
        assert field.input_value() == before
        field.press("ControlOrMeta+A")
        page.keyboard.insert_text(typed)
        assert field.input_value() == typed


def load_models(playground: Served, *targets: str) -> None:
    """Waits until models are served, however busy the machine is, so that a page need not wait for them."""
    with ThreadPoolExecutor() as threads:
        opened = threads.map(lambda one: playground.ask("/api/playground/open", body={"target": one}, timeout=300), targets)
        assert [one.status for one in opened] == [200] * len(targets)


def sample(page: Page) -> None:
    """Samples, and waits until nothing is sampled or scored any more, with whatever result."""
    page.get_by_role("button", name="Sample", exact=True).click()
    expect(page.get_by_role("button", name="Sample", exact=True)).to_be_visible(timeout=300_000)


def _the_page(playground: Served, browser: Browser) -> None:
    load_models(playground, "one", "two@grpo-2")
    with a_page(browser, f"{playground.address}/#/playground/one") as watched:
        page = watched.page
        expect(page.get_by_role("combobox", name="Model")).to_have_value("one")
        page.get_by_role("combobox", name="Compare with").select_option("two@grpo-2")
        page.get_by_role("textbox", name="Prompt", exact=True).fill("1+2=")
        page.get_by_role("textbox", name="Prompt columns").fill('{"answer": "3"}')
        page.get_by_role("spinbutton", name="Max new tokens").fill("30")
        sample(page)
        assert page.locator("[data-state=done]").count() == 2
        for target in ("one", "two@grpo-2"):
            column = page.locator(f"[data-target='{target}']")
            expect(column.locator("article")).to_have_count(8)
            expect(column.locator("article").first).to_contain_text("answer")
            expect(column.get_by_role("button", name="Rank")).to_have_count(0)
        watched.keep("playground-light")
        texts = page.locator("[data-target='one'] article .text").all_inner_texts()
        page.reload()
        expect(page.locator("[data-state=done]")).to_have_count(2, timeout=30_000)
        expect(page.get_by_role("textbox", name="Prompt", exact=True)).to_have_value("1+2=")
        assert page.locator("[data-target='one'] article .text").all_inner_texts() == texts
        expect(page.get_by_role("combobox", name="Compare with")).to_have_value("two@grpo-2")
        expect(page.get_by_role("spinbutton", name="Max new tokens")).to_have_value("30")
        page.locator("[data-target='one'] article [data-t='0']").first.click()
        expect(page.locator("[data-token='0'] .top dd")).to_have_count(5)
        column = page.locator("[data-target='one']")
        column.get_by_role("button", name="What if").click()
        slider = column.get_by_role("slider", name="Reward of completion 3")
        slider.evaluate("node => { node.value = '1'; node.dispatchEvent(new Event('input', { bubbles: true })); }")
        # One reward of 1 among seven of 0: (1 − 1/8) / (std + 1e-4) with std = √(1/8).
        assert column.locator("[data-place='3'] [data-advantage]").inner_text() == f"+{(7 / 8) / (0.125**0.5 + 1e-4):.2f}"
        # A stop string ends a completion and is no part of it.
        page.get_by_label("Stop strings, one per line").fill("<answer>\n</think>")
        page.get_by_label("Top-p").fill("0.9")
        sample(page)
        assert page.locator("[data-state=done]").count() == 2
        after = page.locator("[data-target='one'] article .text").all_inner_texts()
        assert after
        assert not [text for text in after if "<answer>" in text and "</think>" in text]
        page.get_by_role("button", name="Chat").click()
        page.get_by_label("Message", exact=True).fill("1+2=")
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("button", name="New conversation")).to_be_visible(timeout=300_000)
        assert [item.get_attribute("data-role") for item in page.locator("[data-role]").all()] == ["user", "assistant"]
        said = page.locator("[data-role]").all_inner_texts()
        page.reload()
        expect(page.locator("[data-role]")).to_have_count(2, timeout=30_000)
        assert page.locator("[data-role]").all_inner_texts() == said
        page.goto(f"{playground.address}/#/groups/one/at/grpo/2/0")
        page.get_by_role("link", name="Try it in the Playground").click()
        expect(page.get_by_role("textbox", name="Prompt", exact=True)).to_have_value("1+2=")
        expect(page.get_by_role("textbox", name="Prompt columns")).to_have_value('{"answer":"3"}')
        page.get_by_role("textbox", name="Prompt", exact=True).fill("1" * 600)
        # The list of models that the page requests after sampling arrives only after a model was unloaded.
        late: list[tuple[Route, APIResponse]] = []
        page.route(f"{playground.address}/api/playground", lambda route: late.append((route, route.fetch())))
        sample(page)
        expect(page.get_by_role("alert").first).to_contain_text("don't fit")
        with page.expect_response("**/api/playground/close"):
            page.get_by_role("button", name="Unload one").click()
        for route, response in late:
            route.fulfill(response=response)
        assert late
        expect(page.get_by_role("button", name="Unload one")).to_have_count(0, timeout=30_000)
    until = time.monotonic() + 60
    while playground.ask("/api/playground").json["there"] and time.monotonic() < until:
        for target in playground.ask("/api/playground").json["there"]:
            playground.ask("/api/playground/close", body={"target": target})
