"""Every page in a real browser: content, interaction and keyboard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import axe_core_python
import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from oncurve.runs.database.writer import RunWriter
from oncurve.runs.feedback import FILE
from tests.studio.browsing import a_browser, a_page
from tests.studio.samples import HOSTILE, make_free_run, make_run, step_report
from tests.studio.serving import Served, served

pytestmark = pytest.mark.slow
NEWEST = Path(__file__).resolve().parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
AXE = NEWEST if NEWEST.is_file() else Path(axe_core_python.__file__).with_name("axe.min.js")
ADDRESSES = {
    "runs": "#/runs?run=sums-1,sums-2",
    "run": "#/runs?run=sums-1",
    "table": "#/runs?view=table&run=sums-1",
    "group": "#/groups/sums-1/at/grpo/2/0",
    "search": "#/groups/sums-1/search",
    "prompt": "#/groups/sums-1/prompt?id=sums%2F2",
    "compare": "#/groups/sums-1/compare",
    "playground": "#/playground",
    "chat": "#/playground?view=chat",
    "plan": "#/plan",
    "rewards": "#/rewards/sums-1",
    "learn-overview": "#/learn/overview",
    "learn-critic": "#/learn/critic?open=mathematics,implementation",
    "learn-advantages": "#/learn/advantages?open=mathematics,implementation",
    "learn-algorithm": "#/learn/algorithm?open=mathematics,implementation",
    "learn-relatives": "#/learn/relatives?open=mathematics,implementation",
    "learn-rewards": "#/learn/rewards?open=mathematics,implementation",
    "learn-pipelines": "#/learn/pipelines?open=implementation",
    "learn-details": "#/learn/details?open=mathematics,implementation",
    "learn-timeline": "#/learn/timeline",
    "learn-limits": "#/learn/limits?open=mathematics,implementation",
    "learn-derivations": "#/learn/derivations",
    "learn-questions": "#/learn/questions",
    "learn-troubleshooting": "#/learn/troubleshooting",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


STILL = """() => new Promise((done) => {
  const ended = () => Promise.race([
    Promise.all(document.getAnimations().map((animation) => animation.finished)),
    new Promise((late) => setTimeout(late, 2000)),
  ]).then(() => done(null));
  let timer = setTimeout(ended, 500);
  new MutationObserver(() => { clearTimeout(timer); timer = setTimeout(ended, 500); })
    .observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
  setTimeout(ended, 15000);
})"""
"""Resolves when nothing has changed for half a second and no transition runs; at the latest after 15 seconds."""


def settled(page: Page) -> None:
    page.wait_for_selector("h1")
    page.wait_for_load_state("load")
    page.evaluate(STILL)


@pytest.mark.parametrize("name", ADDRESSES)
def test_every_page_light_dark_and_narrow(studio: Served, browser: Browser, name: str) -> None:
    for width, dark in ((1280, False), (390, True)):
        with a_page(browser, f"{studio.address}/{ADDRESSES[name]}", width, dark) as watched:
            settled(watched.page)
            watched.keep(f"{name}-{'phone-dark' if dark else 'light'}")
            assert watched.fits(), f"{name} is wider than {width}"


def test_runs_are_listed_and_broken_folders_shown_as_such(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/runs?run=sums-1") as watched:
        page = watched.page
        expect(page.locator(".pill.broken")).to_have_count(5)
        expect(page.locator("li", has_text="newer")).to_contain_text("newer version")
        expect(page.locator("[data-chart=reward]")).to_have_attribute("data-points", "4")
        expect(page.locator("[data-chart=kl]")).to_contain_text("Healthy")
        page.get_by_label("Show sums-2").check()
        expect(page.locator("[data-chart=reward]")).to_have_attribute("data-points", "6")
        expect(page.locator("[data-chart=reward]")).to_contain_text("sums-2")
        assert "sums-2" in page.url
        page.get_by_role("button", name="Compare recipes").click()
        expect(page.get_by_label("Recipes")).to_contain_text("seed = 7")
        expect(page.get_by_label("Recipes")).to_contain_text("lines differ")
        page.get_by_label("Log scale", exact=True).check()
        page.get_by_label("From step").fill("2")
        page.get_by_label("From step").press("Enter")
        expect(page.get_by_role("button", name="All steps")).to_be_visible()


@pytest.mark.parametrize("kind", ["CSV", "PNG", "SVG"])
def test_a_chart_is_saved(studio: Served, browser: Browser, kind: str) -> None:
    with a_page(browser, f"{studio.address}/#/runs?run=sums-1") as watched:
        chart = watched.page.locator("[data-chart=kl]")
        chart.get_by_label("Save").click()
        with watched.page.expect_download() as downloaded:
            chart.get_by_role("button", name=kind).click()
        content = Path(downloaded.value.path()).read_bytes()
        assert downloaded.value.suggested_filename == f"sums-1-kl.{kind.lower()}"
    starts = {"CSV": b"step,sums-1 kl\n1,0.01\n2,0.02\n", "PNG": b"\x89PNG", "SVG": b"<svg xmlns"}
    assert content.startswith(starts[kind])


def test_a_run_without_a_verifiable_reward_shows_its_held_out_reward(tmp_path: Path, browser: Browser) -> None:
    make_free_run(tmp_path, "talk")
    make_run(tmp_path, "sums")
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=talk", 1280) as watched:
        expect(watched.page.locator("li", has_text="talk")).to_contain_text("held-out reward 0.50")
        expect(watched.page.locator("li", has_text="sums")).to_contain_text("held-out 50.0 %")
        expect(watched.page.get_by_role("heading", name="Held-out reward")).to_be_visible()
        expect(watched.page.get_by_role("heading", name="Held-out accuracy")).to_have_count(0)


def test_a_live_run_is_seen_to_move(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path, "live", steps=1, finished=False)
    with served(tmp_path) as found, a_page(browser, f"{found.address}/#/runs") as watched:
        chart = watched.page.locator("[data-chart=kl]")
        expect(chart).to_have_attribute("data-points", "1")
        expect(watched.page.get_by_text("live", exact=True).last).to_be_visible()
        watched.page.evaluate("window.same = true")
        with RunWriter.open(run.path) as store:
            for step in (2, 3):
                store.record_step(step_report(step))
        expect(chart).to_have_attribute("data-points", "3")
        expect(watched.page.get_by_text("grpo 3/8", exact=True)).to_be_visible()
        assert watched.page.evaluate("window.same")


def test_a_group_best_first_and_text_stays_text(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/groups/sums-1/at/grpo/2/0") as watched:
        cards = watched.page.locator("article[data-place]")
        expect(cards).to_have_count(4)
        assert [card.get_attribute("data-place") for card in cards.all()] == ["0", "1", "2", "3"]
        expect(cards.nth(3).locator(".text")).to_have_text(HOSTILE)
        assert watched.page.locator("article img").count() == 0
        watched.page.get_by_label("Colour by").select_option("clipped")
        assert cards.nth(0).locator("span.cut").count() > 0


def shown(page: Page, selector: str) -> list[float]:
    page.locator(selector).first.wait_for()
    return [float(text.replace("−", "-")) for text in page.locator(selector).all_inner_texts()]


def test_what_if_gives_the_formulas_numbers(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/groups/sums-1/at/grpo/2/0") as watched:
        page = watched.page
        page.get_by_role("button", name="What if").click()
        page.get_by_role("slider", name="Reward of completion 3").fill("1")
        rewards = np.array([1.1, 1.0, 0.1, 1.0])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        assert shown(page, "[data-advantage]") == pytest.approx(expected, abs=0.006)
        assert shown(page, "[data-mean]") == pytest.approx([0.8], abs=1e-3)
        page.get_by_label("Divide by").select_option("none")
        page.get_by_label("Subtract").select_option("leave_one_out")
        assert shown(page, "[data-advantage]") == pytest.approx((rewards - rewards.mean()) * 4 / 3, abs=0.006)
        page.get_by_role("button", name="Reset rewards").click()
        assert shown(page, "[data-reward]") == [1.1, 1.0, 0.1, 0.0]


def test_the_keyboard_goes_everywhere(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path, "keys", steps=3)
    with served(tmp_path) as found, a_page(browser, f"{found.address}/#/groups/keys/at/grpo/2/0") as watched:
        page = watched.page
        expect(page.locator("article[data-place]")).to_have_count(4)
        for key, place in (("n", "/2/1"), ("p", "/2/0"), ("]", "/3/0"), ("[", "/2/0")):
            page.keyboard.press(key)
            expect(page).to_have_url(re.compile(f"at/grpo{place}$"))
            expect(page.locator("[data-shown]")).to_have_attribute("data-shown", place.removeprefix("/"))
        page.keyboard.press("j")
        expect(page.locator("article[data-place='0']")).to_be_focused()
        page.keyboard.press("r")
        expect(page.get_by_label("Tier of completion 0")).to_be_visible()
        for key in "2131":
            page.keyboard.press(key)
        expect(page.get_by_label("Tier of completion 3")).to_have_value("1")
        page.keyboard.press("Enter")
        expect(page.get_by_text("ranked by you")).to_be_visible()
        expect(page.get_by_text("5 pairs")).to_be_visible()
        assert '"tiers": [[1, 3], [0], [2]]' in (run.path / FILE).read_text()
        page.keyboard.press("k")
        page.keyboard.press("d")
        page.get_by_label("Reward", exact=True).fill("0.5")
        page.keyboard.press("Enter")
        expect(page.get_by_text("disputed: 0.50")).to_be_visible()
        page.keyboard.press("?")
        expect(page.get_by_label("Keyboard shortcuts", exact=True)).to_be_visible()


@pytest.mark.parametrize(
    ("button", "count"),
    [("Right answer, wrong format", 4), ("Groups without signal", 4), ("Failed rewards", 4), ("Truncated", 4)],
)
def test_filters(studio: Served, browser: Browser, button: str, count: int) -> None:
    with a_page(browser, f"{studio.address}/#/groups/sums-1/search") as watched:
        watched.page.get_by_role("button", name=button).click()
        expect(watched.page.locator("[data-found]")).to_have_attribute("data-found", str(count))
        watched.page.locator("li a").first.click()
        expect(watched.page.locator("article[data-place]").first).to_be_visible()
        copies = [int(card.get_attribute("data-copies") or 0) for card in watched.page.locator("article[data-place]").all()]
        assert sum(copies) == 4


def test_text_is_found_and_its_address_can_be_kept(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/groups/sums-1/search") as watched:
        watched.page.get_by_label("Text").fill("onerror")
        expect(watched.page.locator("[data-found]")).to_have_attribute("data-found", "4")
        watched.page.reload()
        expect(watched.page.locator("[data-found]")).to_have_attribute("data-found", "4")


def test_rewards_are_tried(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/rewards") as watched:
        page = watched.page
        page.get_by_role("button", name="Score").click()
        expect(page.locator("[data-total]")).to_have_count(3, timeout=60_000)
        totals = [float(one.get_attribute("data-total") or "nan") for one in page.locator("[data-total]").all()]
        assert totals == pytest.approx([1.1, 0.0, 0.1])
        page.locator("#own").fill('[{ "type": "anser" }]')
        page.get_by_role("button", name="Score").click()
        expect(page.get_by_role("alert")).to_contain_text("did you mean 'answer'", timeout=60_000)


def test_a_trial_that_is_edited_before_the_run_s_completions_arrive_stays(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/rewards") as watched:
        page = watched.page
        late: list[Route] = []
        page.route("**/api/runs/sums-1/group?*", lambda route: late.append(route))
        with page.expect_request("**/api/runs/sums-1/group?*"):
            page.evaluate("location.hash = '#/rewards/sums-1'")
        page.locator("#prompt").fill("1+2=")
        with page.expect_response("**/api/runs/sums-1/group?*"):
            for route in late:
                route.continue_()
        page.get_by_role("button", name="Score").click()
        expect(page.locator("[data-total]")).to_have_count(3)
        assert page.locator("#prompt").input_value() == "1+2="


def test_the_plan_page(studio: Served, browser: Browser) -> None:
    """A change of the form updates the plan; for a plan that does not fit, a listed fix makes it fit."""
    with a_page(browser, f"{studio.address}/#/plan") as watched:
        page = watched.page
        expect(page.locator("[data-fits]")).to_have_attribute("data-fits", "false")
        expect(page.get_by_role("region", name="How to make it fit")).to_contain_text("LoRA")
        plan = studio.ask("/api/plan", body={"model": "Qwen/Qwen3-8B", "gpus": 1}).json
        update = next(phase for phase in plan["plan"]["memory"]["phases"] if phase["name"] == "update")
        expect(page.locator("[data-phase=update]")).to_have_text(f"{update['total'] / 2**30:.0f} GiB")
        page.get_by_role("button", name="Apply: LoRA of rank 16").click()
        expect(page.get_by_role("checkbox", name="LoRA")).to_be_checked()
        page.get_by_role("checkbox", name="Activation checkpointing").check()
        expect(page.locator("[data-fits]")).to_have_attribute("data-fits", "true")
        expect(page.locator("[data-title='grpo, LoRA']")).to_contain_text("fits")
        expect(page.locator(".note")).to_have_text(
            re.compile(r"Needs [\d.]+ GiB for weights, .* the KV cache takes [\d.]+ GiB, ")
        )
        watched.keep("plan-lora")
        page.get_by_role("combobox", name="Run or model").select_option("run sums-1")
        page.get_by_role("combobox", name="Device").select_option("cpu")
        expect(page.get_by_role("spinbutton", name="Group size")).to_have_attribute("placeholder", "4")
        page.get_by_role("spinbutton", name="Group size").fill("0")
        expect(page.get_by_role("alert")).to_be_visible()
        watched.errors.clear()  # the browser notes every refused request


@pytest.mark.parametrize("name", ADDRESSES)
def test_everyone_can_use_it(studio: Served, browser: Browser, name: str) -> None:
    """axe-core finds nothing, in either theme and at either width. The debugger injects it, so the page keeps its CSP."""
    for width, dark in ((1280, False), (390, True)):
        with a_page(browser, f"{studio.address}/{ADDRESSES[name]}", width, dark) as watched:
            settled(watched.page)
            watched.page.evaluate(AXE.read_text() + "; null")
            result = watched.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
            found = [(v["id"], v["impact"], [n["html"][:160] for n in v["nodes"][:4]]) for v in result["violations"]]
            assert not found, found


def test_first_paint_is_quick(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/runs") as watched:
        settled(watched.page)
        painted = watched.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
        print(f"first contentful paint after {painted:.0f} ms")
        assert painted < 10_000  # the goal is 0.4 s on an idle machine; this one may be busy with other tests
