"""The Runs page in a real browser: a run at a glance, its charts, the table of runs, comparisons, and live runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from oncurve.errors import troubleshooting
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
from oncurve.studio.run_list import NOTES
from tests.studio.browsing import a_browser, a_page
from tests.studio.samples import HOSTILE, eval_report, make_run, step_report
from tests.studio.serving import Served, served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Three runs with different recipes. The first has tokens, levels of difficulty, a warning and a failing reward."""
    folder = tmp_path_factory.mktemp("runs")
    run = make_run(folder, "first", steps=0, finished=False)
    with RunWriter.open(run.path) as store:
        for step in range(1, 5):
            report = step_report(step, kinds=("right", "failed", "wrong", "failed"))
            metrics = {**report.metrics, "tokens": 100.0 * step, "sampled_entropy": 0.5, "turns_mean": 2.0}
            store.record_step(replace(report, metrics=metrics))
        levels = {"1 digit": (9, 10), "2 digits": (4, 10)}
        store.record_eval(replace(eval_report(2, 0.65), asked=20, by_difficulty=levels))
        store.record_eval(replace(eval_report(4, 0.5), asked=20))
        warning = "grpo 3: entropy is 0.005 nats: all completions are alike. Lower the learning rate"
        store.record_event("warning", warning, stage="grpo", step=3)
    run.set_status("finished")
    make_run(folder, "second", steps=4, sets=("seed=7", "grpo.optimiser.learning_rate=0.001"))
    third = make_run(folder, "third", steps=4, sets=("seed=8", "grpo.group_size=8"))
    with RunWriter.open(third.path) as store:
        hard = f"grpo 4: no group has a signal. Use easier prompts; {troubleshooting('Groups have no signal')}"
        store.record_event("warning", hard, stage="grpo", step=4)
    with served(folder) as studio:
        yield studio


def chart(page: Page, name: str):  # type: ignore[no-untyped-def]
    return page.locator(f"[data-chart={name}]")


def csv(page: Page, name: str) -> list[list[str]]:
    """The numbers of a chart, as its file has them."""
    chart(page, name).locator(".save").evaluate("menu => { menu.open = true; }")
    with page.expect_download() as downloaded:
        chart(page, name).get_by_role("button", name="CSV").click()
    return [line.split(",") for line in Path(downloaded.value.path()).read_text().splitlines()]


def test_a_run_at_a_glance(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/runs?run=first") as watched:
        header = watched.page.get_by_role("region", name="Run first")
        expect(header).to_contain_text("best held-out 65.0 % of 20 at grpo 2")
        # Wilson's interval of 13 of 20, computed by hand: 43.3 to 81.9 %.
        expect(header).to_contain_text("95 % interval 43.3 to 81.9 %")
        expect(header.get_by_label("Best held-out accuracy by difficulty")).to_contain_text("90.0 % of 10")
        expect(header).to_contain_text("trained for 0:03")
        for text in ("model tiny", "task arithmetic", "group size 4", "prompts per step 3", "KL weight 0.01", "seed 0"):
            expect(header).to_contain_text(re.compile(text.replace(" ", r"\s*")))


def test_the_verdicts_of_the_trainer_and_the_audit_link_to_their_evidence(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/runs?run=first") as watched:
        page = watched.page
        strip = page.get_by_role("region", name="Verdicts on first")
        trainer = strip.locator("li", has_text="trainer")
        expect(trainer).to_contain_text("entropy is 0.005 nats: all completions are alike. Lower the learning rate")
        expect(strip.locator("li", has_text="audit").first).to_contain_text("'answer' failed on")
        expect(trainer.get_by_role("link", name="What to do")).to_have_attribute("href", re.compile("at=entropy-collapses"))
        trainer.get_by_role("link", name="grpo 3").click()
        expect(page).to_have_url(re.compile(r"#/groups/first/at/grpo/3"))
        page.goto(f"{here.address}/#/runs?run=second")
        expect(page.get_by_role("region", name="Verdicts on second")).to_be_visible()
        expect(page.get_by_role("region", name="Verdicts on second").locator("li", has_text="trainer")).to_have_count(0)
        page.goto(f"{here.address}/#/runs?run=third")
        what_to_do = page.get_by_role("region", name="Verdicts on third").get_by_role("link", name="What to do").first
        expect(what_to_do).to_have_attribute("href", re.compile("at=groups-have-no-signal"))


def test_sections_pins_and_collapse_survive_a_reload(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/runs?run=first") as watched:
        page = watched.page
        expect(chart(page, "turns_mean")).to_be_visible()
        titles = page.locator(".part h2").all_inner_texts()
        assert titles == ["Learning", "Health", "Agents", "Speed"]
        expect(chart(page, "entropy").locator("[data-metric]")).to_have_attribute("data-metric", "sampled_entropy")
        expect(chart(page, "update_entropy").locator("[data-metric]")).to_have_attribute("data-metric", "entropy")
        page.get_by_role("button", name="Pin KL to the reference").click()
        page.locator(".part", has_text="Speed").locator("summary").first.click()
        expect(chart(page, "speed")).to_be_hidden()
        page.reload()
        expect(page.locator(".part").first.locator("h2")).to_have_text("Pinned")
        expect(page.locator(".part").first.locator("[data-chart]")).to_have_attribute("data-chart", "kl")
        expect(chart(page, "speed")).to_be_hidden()


def test_each_chart_has_its_own_axis_scale_and_smoothing(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/runs?run=first") as watched:
        page = watched.page
        settings = chart(page, "kl")
        settings.get_by_label("Settings of").click()
        settings.get_by_label("X axis of KL").select_option("tokens")
        settings.get_by_label("Log scale of").check()
        page.reload()
        assert csv(page, "kl") == [["tokens", "first kl"], ["100", "0.01"], ["300", "0.02"], ["600", "0.03"], ["1000", "0.04"]]
        assert [row[0] for row in csv(page, "entropy")] == ["step", "1", "2", "3", "4"]
        page.get_by_label("X axis", exact=True).select_option("samples")
        expect(chart(page, "entropy").locator(".values")).to_contain_text("completions 48")
        assert [row[0] for row in csv(page, "entropy")][1:] == ["12", "24", "36", "48"]
        page.get_by_label("X axis", exact=True).select_option("seconds")
        assert [float(row[0]) for row in csv(page, "heldout")[1:]] == pytest.approx([0.0, 1.5, 3.0])
        expect(page.get_by_label("Smoothing of Held-out accuracy", exact=True)).to_be_disabled()


def test_the_time_by_phase_is_stacked(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/runs?run=first") as watched:
        page = watched.page
        expect(chart(page, "phases").locator(".values")).to_contain_text("sample 0.500")
        rows = csv(page, "phases")
        assert rows[0] == ["step", "first seconds/sample", "first seconds/update"]
        assert rows[1] == ["1", "0.5", "0.25"]
        page.evaluate(
            """() => { window.tops = []; const old = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
            if (this.canvas.closest('[data-chart=phases]')) window.tops.push(text);
            return old.call(this, text, ...rest); }; }"""
        )
        page.set_viewport_size({"width": 1100, "height": 900})
        page.wait_for_function("() => window.tops.length > 0")
        # The areas lie on each other: the axis reaches their sum, 0.75, which no phase has.
        assert max(float(text) for text in page.evaluate("window.tops") if re.fullmatch(r"0\.\d+", text)) >= 0.6


def test_a_click_or_a_key_opens_a_step_s_groups(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/runs?run=first") as watched:
        page = watched.page
        plot = chart(page, "reward").locator(".u-over")
        box = plot.bounding_box()
        assert box is not None
        plot.click(position={"x": box["width"] - 3, "y": 40})
        expect(page).to_have_url(re.compile("#/groups/first/at/grpo/4"))
        page.go_back()
        chart(page, "reward").locator(".plot").focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        expect(chart(page, "reward").locator(".values")).to_contain_text("step 2")
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile("#/groups/first/at/grpo/2"))
        page.goto(f"{here.address}/#/runs?run=first")
        chart(page, "heldout").get_by_role("link", name="step 4").click()
        expect(page).to_have_url(re.compile("#/groups/first/at/grpo/4.*kind=eval"))


def names(page: Page) -> list[str]:
    return [row.get_attribute("data-run") or "" for row in page.locator("tr[data-run]").all()]


def test_the_table_sorts_filters_and_keeps_tags_and_notes(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/runs?view=table&run=first") as watched:
        page = watched.page
        table = page.get_by_role("region", name="Table of runs")
        expect(table.get_by_role("columnheader", name="grpo.group_size")).to_be_visible()
        table.get_by_role("button", name="seed").first.click()
        assert names(page) == ["third", "second", "first"]
        table.get_by_role("button", name="seed").first.click()
        assert names(page) == ["first", "second", "third"]
        table.get_by_role("button", name="Best held-out").click()
        assert names(page)[0] == "first"
        page.get_by_label("Filter runs").fill("group_size=8")
        assert names(page) == ["third"]
        page.get_by_label("Edit tags and note of third").click()
        page.get_by_label("Tags of third").fill("big group, favourite")
        page.get_by_label("Tags of third").press("Enter")
        with page.expect_response(
            lambda answer: answer.url.endswith("/notes") and '"note"' in (answer.request.post_data or "")
        ):
            page.get_by_label("Note on third").fill(HOSTILE)
            page.get_by_label("Filter runs").fill("favourite")
        expect(page.locator("tr[data-run]")).to_have_count(1)
        page.reload()
        expect(table).to_contain_text(HOSTILE)
        assert names(page) == ["third"]
        saved = json.loads((here.runs_dir / "third" / NOTES).read_text())
        assert saved == {"tags": ["big group", "favourite"], "note": HOSTILE}


def test_tags_and_a_note_saved_at_once_don_t_undo_each_other(tmp_path: Path, browser: Browser) -> None:
    """The request with the tags is held back until the server has answered the one with the note."""
    run = make_run(tmp_path, "noted", steps=1)
    with served(tmp_path) as studio, a_page(browser, f"{studio.address}/#/runs?view=table") as watched:
        page = watched.page
        waiting: list[Route] = []

        def hold_first(request: Route) -> None:
            if waiting:
                request.continue_()
            else:
                waiting.append(request)

        page.route("**/notes", hold_first)
        page.get_by_label("Edit tags and note of noted").click()
        page.get_by_label("Tags of noted").fill("late")
        page.get_by_label("Tags of noted").press("Enter")
        with page.expect_response("**/notes"):
            page.get_by_label("Note on noted").fill("early")
            page.get_by_label("Note on noted").press("Tab")
        with page.expect_response("**/notes"):
            waiting[0].continue_()
        expect(page.get_by_label("Note on noted")).to_have_value("early")
        expect(page.get_by_role("button", name="late", exact=True)).to_be_visible()
        assert json.loads((run.path / NOTES).read_text()) == {"tags": ["late"], "note": "early"}


def test_any_number_of_runs_is_compared(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/runs?run=first,second,third") as watched:
        page = watched.page
        compared = page.get_by_role("region", name="Comparison of 3 runs")
        expect(compared.locator("tr[data-key='grpo.group_size']")).to_be_visible()
        assert compared.locator("tr[data-key]").count() >= 3
        seeds = compared.locator("tr[data-key='seed'] td").all_inner_texts()
        assert seeds == ["0", "7", "8"]
        expect(compared.locator("tr[data-key='grpo.group_size']")).to_contain_text("8")
        # 13 of 20 and 1 of 2, with Wilson's 95 % intervals.
        expect(compared.locator("[data-best=first]")).to_have_text("65.0 % (43 to 82)")
        expect(compared.locator("[data-best=second]")).to_have_text("50.0 % (9 to 91)")
        expect(chart(page, "reward").locator("[data-metric]")).to_have_count(3)


def live_run(folder: Path) -> RunFolder:
    run = make_run(folder, "live", steps=0, finished=False)
    with RunWriter.open(run.path) as store:
        store.record_step(step_report(1))
    return run


def test_a_live_run_s_progress_is_in_the_title_and_its_end_is_told(tmp_path: Path, browser: Browser) -> None:
    run = live_run(tmp_path)
    with served(tmp_path) as studio, a_page(browser, f"{studio.address}/#/runs") as watched:
        page = watched.page
        page.context.grant_permissions(["notifications"])
        page.evaluate(
            """() => { window.told = []; const Real = Notification; window.Notification = class extends Real {
            constructor(title, options) { super(title, options); window.told.push(options.body); } }; }"""
        )
        expect(page).to_have_title(re.compile("^13 % live"))
        page.get_by_role("button", name="Notify me").click()
        with RunWriter.open(run.path) as store:
            store.record_step(step_report(2))
            store.record_eval(eval_report(2, 0.75))
        expect(page).to_have_title(re.compile("^25 % live"))
        expect(page.get_by_text("live: new best held-out 75.0 % at grpo 2")).to_be_visible()
        run.set_status("finished")
        expect(page.get_by_text("live is finished")).to_be_visible()
        assert page.evaluate("window.told") == ["live: new best held-out 75.0 % at grpo 2", "live is finished"]


def test_what_the_list_of_runs_shows_first_is_told_too(tmp_path: Path, browser: Browser) -> None:
    """The list is requested every few seconds, and can be faster than the event stream. Here there is no stream."""
    run = live_run(tmp_path)
    with served(tmp_path) as studio, a_page(browser, f"{studio.address}/#/plan") as watched:
        page = watched.page
        page.route("**/api/live?*", lambda route: route.fulfill(status=204))
        page.goto(f"{studio.address}/#/runs")
        expect(page).to_have_title(re.compile("^13 % live"))
        with RunWriter.open(run.path) as store:
            store.record_step(step_report(2))
            store.record_eval(eval_report(2, 0.75))
        expect(page.get_by_text("live: new best held-out 75.0 % at grpo 2")).to_be_visible(timeout=30_000)
        run.set_status("finished")
        expect(page.get_by_text("live is finished")).to_be_visible(timeout=30_000)


def test_the_newest_step_is_followed(tmp_path: Path, browser: Browser) -> None:
    run = live_run(tmp_path)
    with served(tmp_path) as studio, a_page(browser, f"{studio.address}/#/groups/live/at/grpo/1/0") as watched:
        page = watched.page
        page.get_by_label("Follow the newest step").check()
        with RunWriter.open(run.path) as store:
            store.record_step(step_report(2))
        expect(page).to_have_url(re.compile("at/grpo/2"), timeout=30_000)
        expect(page.locator("[data-where]")).to_contain_text("grpo 2")
