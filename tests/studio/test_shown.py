"""What the pages show is right: each test is a case in which an earlier version showed something wrong or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from oncurve.cli.app import main
from oncurve.recipe.load import dump_recipe, parse_recipe
from oncurve.records import Aspect, EvalReport, GradedGroup, StepReport
from oncurve.runs.checkpoints.listing import best_of_run, checkpoint_path
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
from oncurve.studio.report import report_html
from tests.studio.browsing import Watched, a_browser, a_page
from tests.studio.samples import RECIPE, eval_report, make_broken, make_run, make_stage_run, step_report
from tests.studio.serving import served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


@pytest.mark.parametrize(
    ("stage", "metrics"),
    [
        ("ppo", ("explained_variance", "value_loss", "value_clip_share", "critic_grad_norm", "value_mean")),
        ("dpo", ("chosen_reward", "rejected_reward", "pair_accuracy", "pair_margin")),
        ("reward_model", ("heldout_pair_accuracy", "calibration_error")),
        ("trpo", ("step_kl", "step_gain", "cg_residual", "line_search_tries")),
        ("grpo", ("update_kl", "ratio_max", "skipped_updates", "mfu", "clip_share", "a_metric_of_a_plugin", "family/one")),
    ],
)
def test_every_recorded_metric_is_drawn(tmp_path: Path, browser: Browser, stage: str, metrics: tuple[str, ...]) -> None:
    make_stage_run(tmp_path, "run", [(stage, stage, dict.fromkeys(metrics, 0.5))])
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=run") as watched:
        page = watched.page
        expect(page.locator("[data-chart]").first).to_be_visible()
        drawn = {line.get_attribute("data-metric") for line in page.locator("[data-chart] [data-metric]").all()}
        assert set(metrics) <= drawn


def test_evaluations_by_difficulty_and_with_several_samples_are_drawn(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path, "run", steps=2, finished=False)
    with RunWriter.open(run.path) as store:
        levels = {"1 digit": (3, 4), "2 digits": (1, 4)}
        store.record_eval(replace(eval_report(1, 0.5), by_difficulty=levels, metrics={"pass_at/4": 0.8, "maj_at/4": 0.7}))
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=run") as watched:
        levels_chart = watched.page.locator("[data-chart=heldout_levels]")
        expect(levels_chart).to_contain_text("2 digits (4)")
        expect(levels_chart).to_contain_text("25.0 %")
        expect(watched.page.locator("[data-chart=heldout_many]")).to_contain_text("pass@4 80.0 %")
        expect(watched.page.locator("[data-chart=heldout_many]")).to_contain_text("maj@4 70.0 %")


def with_rewards(report: StepReport, totals: tuple[float, ...]) -> StepReport:
    """The report with these rewards in its first group."""
    graded = report.groups[0]
    scored = tuple(
        replace(one, aspects=(Aspect("answer", total, 1.0),)) for one, total in zip(graded.scored.scored, totals, strict=True)
    )
    group = GradedGroup(replace(graded.scored, scored=scored), graded.advantages, graded.graded)
    return replace(report, groups=(group, *report.groups[1:]))


@pytest.mark.parametrize("totals", [(2.1, 0.1, 1.0, 0.5), (-5.0, -1.0, -3.0, -2.0), (0.1, 0.2, 0.3, 0.4)])
def test_the_spread_bars_stay_on_their_track(tmp_path: Path, browser: Browser, totals: tuple[float, ...]) -> None:
    run = make_run(tmp_path, "run", steps=0, finished=False)
    with RunWriter.open(run.path) as store:
        store.record_step(with_rewards(step_report(1), totals))
    everything = [*totals, 0.1, 1.1, 0.0]  # with the other groups' rewards
    lowest, highest = min(everything), max(everything)
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/groups/run/at/grpo/1/0") as watched:
        page = watched.page
        expect(page.locator("article[data-place]")).to_have_count(4)
        track = page.locator(".spread").first.bounding_box()
        bar = page.locator(".spread i").first.bounding_box()
        assert track is not None
        assert bar is not None
        assert (bar["x"] - track["x"]) / track["width"] == pytest.approx((min(totals) - lowest) / (highest - lowest), abs=0.02)
        end = (bar["x"] + bar["width"] - track["x"]) / track["width"]
        assert end == pytest.approx((max(totals) - lowest) / (highest - lowest), abs=0.03)
        assert page.locator("aside ol").evaluate("e => e.scrollWidth <= e.clientWidth")


def make_guess_run(runs_dir: Path) -> RunFolder:
    """A run without a verifiable reward and without a reference."""
    run = RunFolder.create_at(runs_dir / "guess-1")
    from oncurve.recipe.load import dump_recipe, parse_recipe

    recipe = {**RECIPE, "rewards": [{"type": "length"}], "stages": [{"type": "grpo", "group_size": 4}]}
    run.write_recipe(dump_recipe(parse_recipe(recipe, [])))
    report = step_report(1)
    groups = []
    for graded in report.groups:
        scored = tuple(replace(one, aspects=(Aspect("length", 0.5, 1.0),)) for one in graded.scored.scored)
        groups.append(GradedGroup(replace(graded.scored, scored=scored), graded.advantages, graded.graded))
    without = tuple((None,) * 4 for _ in groups)
    with RunWriter.create(run.path) as store:
        store.begin_stage("grpo", "grpo", 0, 2)
        store.record_step(replace(report, groups=tuple(groups), stats=without, metrics={"reward": 0.5}))
    run.set_status("finished")
    return run


def filters(page: Page) -> set[str]:
    expect(page.get_by_role("button", name="Truncated")).to_be_visible()
    return set(page.get_by_role("group", name="Filters").get_by_role("button").all_inner_texts())


def test_the_filters_of_a_search_belong_to_the_run(tmp_path: Path, browser: Browser) -> None:
    make_guess_run(tmp_path)
    make_run(tmp_path, "sums-1")
    answers = {"Right answers", "Wrong answers", "Right answer, wrong format", "Wrong answer, right format", "Highest KL"}
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/groups/guess-1") as watched:
        page = watched.page
        expect(page.locator("article[data-place]")).to_have_count(4)
        page.goto(f"{here.address}/#/groups/sums-1/search")
        expect(page.get_by_role("button", name="Right answers")).to_be_visible()
        assert answers <= filters(page)
        page.goto(f"{here.address}/#/groups/guess-1/search")
        expect(page.get_by_role("button", name="Right answers")).to_have_count(0)
        assert not answers & filters(page)
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/groups/guess-1/search?filter=solved") as watched:
        expect(watched.page.get_by_text("nothing that the filter “solved” could match")).to_be_visible()


def test_nothing_of_another_run_stays_after_an_error(tmp_path: Path, browser: Browser) -> None:
    make_guess_run(tmp_path)
    make_run(tmp_path, "sums-1")
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/groups/guess-1") as watched:
        page = watched.page
        expect(page.locator("aside li")).to_have_count(3)
        page.goto(f"{here.address}/#/groups/sums-1/at/grpo/9999/3")
        expect(page.get_by_role("alert")).to_contain_text("no group 3 at grpo 9999")
        expect(page.get_by_role("link", name="Open step 4, the newest")).to_be_visible()
        expect(page.locator("aside li")).to_have_count(0)
        expect(page.locator("article[data-place]")).to_have_count(0)
        page.goto(f"{here.address}/#/groups/sums-1/at/grpo/2/77")
        expect(page.get_by_role("alert")).to_contain_text("no group 77")
        expect(page.locator("aside li")).to_have_count(3)
        watched.errors.clear()  # the browser notes every refused request


def test_no_page_is_blank(tmp_path: Path, browser: Browser) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with served(empty) as here, a_page(browser, f"{here.address}/#/groups") as watched:
        expect(watched.page.get_by_text("There are no runs yet")).to_be_visible()
    full = tmp_path / "full"
    full.mkdir()
    make_broken(full)
    make_run(full, "sums-1")
    make_run(full, "young", steps=0)
    with served(full) as here, a_page(browser, f"{here.address}/#/groups/nosuch") as watched:
        page = watched.page
        expect(page.get_by_text("There is no run called nosuch")).to_be_visible()
        page.goto(f"{here.address}/#/groups/newer")
        expect(page.get_by_text("can't be read")).to_be_visible()
        page.goto(f"{here.address}/#/groups/nosuch/search")
        expect(page.get_by_text("There is no run called nosuch")).to_be_visible()
        page.goto(f"{here.address}/#/runs?run=nosuch,newer,sums-1")
        expect(page.get_by_text("There is no run called nosuch")).to_be_visible()
        expect(page.get_by_text("newer can't be read")).to_be_visible()
        expect(page.get_by_role("region", name="Run sums-1")).to_be_visible()
        page.goto(f"{here.address}/#/runs?run=young")
        expect(page.get_by_text("There is nothing to check before the first step.")).to_be_visible()
        page.goto(f"{here.address}/#/playground/nosuch")
        expect(page.get_by_text("There is no run called nosuch with a model")).to_be_visible()
        page.goto(f"{here.address}/#/groups/sums-1/prompt?id=nosuch")
        expect(page.get_by_text("This run has no group of this prompt.")).to_be_visible()
        expect(page.get_by_text("Sampled 0 times")).to_have_count(0)


def test_a_failed_run_says_why(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path, "run")
    old = make_run(tmp_path, "old")
    with RunWriter.open(run.path) as store:
        store.record_event("failed", "rewards: 60 of 100 completions failed\n  because ValueError\n  fix: fix the reward")
    run.set_status("failed")
    old.set_status("failed")
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=run") as watched:
        expect(watched.page.get_by_label("Why run failed")).to_contain_text("fix: fix the reward")
        expect(watched.page.get_by_label("Why old failed")).to_contain_text("not recorded")


def test_failed_verdicts_are_not_a_clean_bill(tmp_path: Path, browser: Browser) -> None:
    make_run(tmp_path, "run")
    with served(tmp_path) as here, a_page(browser, here.address) as watched:
        page = watched.page
        page.route("**/verdicts", lambda route: route.fulfill(status=500, json={}))
        page.goto(f"{here.address}/#/runs?run=run")
        page.reload()
        strip = page.get_by_role("region", name="Verdicts on run")
        expect(strip.get_by_role("alert")).to_contain_text("status 500")
        expect(strip).not_to_contain_text("No warning")
        watched.errors.clear()  # the browser notes the refused request


def test_answers_that_come_after_leaving_a_page_are_dropped(tmp_path: Path, browser: Browser) -> None:
    """An answer of the server that arrives when the page is gone gives no warning in the console."""
    make_run(tmp_path, "run")
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/plan") as watched:
        page = watched.page
        held: list[Route] = []
        page.route("**/audit", lambda route: held.append(route))
        page.evaluate("location.hash = '#/rewards/run'")
        expect(page.get_by_role("region", name="Scores")).to_be_visible()
        page.evaluate("location.hash = '#/plan'")
        expect(page.get_by_role("heading", name="Plan", exact=True)).to_be_visible()
        for route in held:
            route.continue_()
        expect(page.get_by_role("region", name="Memory by phase")).to_be_visible()


def test_a_run_at_a_glance(tmp_path: Path, browser: Browser) -> None:
    """Name, status, the best of its evaluations (not the last), and commands to copy."""
    run = make_run(tmp_path, "run", steps=3)
    with RunWriter.open(run.path) as store:
        for step, accuracy in ((1, 0.25), (2, 0.75)):
            store.record_eval(eval_report(step, accuracy))
    run.set_status("interrupted")
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=run") as watched:
        page = watched.page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        header = page.get_by_role("region", name="Run run")
        expect(header).to_contain_text("interrupted")
        expect(header).to_contain_text("best held-out 75.0 % of 2 at grpo 2")
        header.get_by_role("button", name="resume").click()
        assert page.evaluate("navigator.clipboard.readText()") == f"oncurve train --resume {tmp_path}/run"
        page.goto(f"{here.address}/#/groups/run/at/grpo/2/1")
        expect(page.locator("[data-where]")).to_have_text("grpo 2, group 1 of 3")
        page.get_by_role("button", name="Copy command").click()
        assert page.evaluate("navigator.clipboard.readText()") == f"oncurve show {tmp_path}/run --stage grpo --step 2 --group 1"


def test_the_audit_finds_constant_and_failing_rewards(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path, "run", steps=0, finished=False)
    with RunWriter.open(run.path) as store:
        for step in range(1, 5):
            report = step_report(step, kinds=("wrong", "failed", "wrong", "failed"))
            store.record_step(replace(report, groups=report.groups[:2], stats=report.stats[:2]))
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/rewards/run") as watched:
        audit = watched.page.get_by_role("region", name="Audit")
        expect(audit).to_contain_text("'answer' failed on 8 of 32 completions (25.0 %)")
        expect(audit).to_contain_text("'answer' gave all 32 audited completions the score 0")
        expect(audit).not_to_contain_text("No suspicious pattern")


def test_the_audit_finds_a_reward_that_contradicts_a_verifiable_one(tmp_path: Path, browser: Browser) -> None:
    """The answer is only watched, at weight 0, and the model's reward prefers the wrong completions."""
    run = make_run(tmp_path, "run", steps=0, finished=False)
    with RunWriter.open(run.path) as store:
        for step in range(1, 5):
            report = step_report(step)
            graded = report.groups[0]
            scored = tuple(
                replace(one, aspects=(Aspect("answer", right, 0.0), Aspect("model", score, 1.0)))
                for one, right, score in zip(graded.scored.scored, (1.0, 1.0, 0.0, 0.0), (0.1, 0.2, 0.8, 0.9), strict=True)
            )
            group = replace(graded, scored=replace(graded.scored, scored=scored))
            store.record_step(replace(report, groups=(group,), stats=report.stats[:1]))
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/rewards/run") as watched:
        page = watched.page
        audit = page.get_by_role("region", name="Audit")
        expect(audit).to_contain_text("reward contradicts correctness")
        expect(audit).to_contain_text("in 4 of 4 groups with right and wrong completions (100 %)")
        page.goto(f"{here.address}/#/runs?run=run")
        verdicts = page.get_by_role("region", name="Verdicts on run")
        expect(verdicts).to_contain_text("Reward contradicts correctness: in 4 of 4 groups")


def axis(watched: Watched, chart: str) -> list[float]:
    """The numbers at the y axis, drawn on a canvas: what the page passes to fillText while it draws again."""
    watched.page.evaluate(
        """() => { window.texts = []; const old = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
        window.texts.push([this.canvas.closest('[data-chart]')?.dataset.chart, text]);
        return old.call(this, text, ...rest); }; }"""
    )
    watched.page.set_viewport_size({"width": 1100, "height": 900})
    watched.page.wait_for_function(f"() => window.texts.some(([chart]) => chart === '{chart}')")
    texts = [text for of, text in watched.page.evaluate("window.texts") if of == chart]
    shares = [float(text.removesuffix(" %")) / 100 for text in texts if text.endswith(" %")]
    return shares or [float(text.replace("−", "-").replace(",", "")) for text in texts if re.fullmatch(r"[−\d.,e]+", text)]


def test_a_recorded_completion_is_tested_with_the_columns_of_its_prompt(tmp_path: Path, browser: Browser) -> None:
    make_run(tmp_path, "run")
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/rewards/run") as watched:
        page = watched.page
        page.locator("tr", has_text="no number here").get_by_role("button", name="test it").click()
        expect(page.get_by_role("textbox", name="Completion 1")).to_have_value("failed 1")
        expect(page.get_by_label("Prompt", exact=True)).to_have_value("1+50=")
        expect(page.get_by_label("Prompt columns (JSON)")).to_have_value('{"answer":"51"}')


def test_a_flat_share_has_an_axis_from_0_to_1(tmp_path: Path, browser: Browser) -> None:
    make_stage_run(tmp_path, "run", [("grpo", "grpo", {"failure_share": 0.0, "clip_low_share": 0.0, "clip_high_share": 0.0})])
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=run") as watched:
        expect(watched.page.locator("[data-chart=failures] canvas")).to_be_visible()
        assert max(axis(watched, "failures")) == 1
        watched.page.get_by_label("Log scale", exact=True).check()
        expect(watched.page.locator("[data-chart=failures]")).to_contain_text("only values above 0, and there are none")


def test_the_marks_of_the_step_axis_are_whole(tmp_path: Path, browser: Browser) -> None:
    make_stage_run(tmp_path, "run", [("grpo", "grpo", {"failure_share": 0.5, "skipped_updates": 0.0})])
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=run") as watched:
        expect(watched.page.locator("[data-chart=failures]")).to_be_visible()
        drawn = axis(watched, "skipped")
        assert min(drawn) == 0, "updates are never negative"
        marks = [text for of, text in watched.page.evaluate("window.texts") if of == "failures" and not text.endswith("%")]
        assert {"1", "2", "3"} <= set(marks)
        assert all(text.isdigit() for text in marks), marks


def test_smoothing_leaves_measurements_and_schedules_alone(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path, "run", steps=0, finished=False)
    with RunWriter.open(run.path) as store:
        for step, accuracy in ((1, 0.2), (2, 0.4), (3, 0.99)):
            report = step_report(step)
            store.record_step(replace(report, metrics={**report.metrics, "learning_rate": 10.0**-step}))
            store.record_eval(EvalReport("grpo", step, accuracy, 2, {}, {}, eval_report(step, accuracy).groups))
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=run&smooth=0.9") as watched:
        page = watched.page
        for chart, value in (("heldout", "99.0 %"), ("rate", "1.00e"), ("kl", "")):
            plot = page.locator(f"[data-chart={chart}] .u-over")
            plot.hover(position={"x": (plot.bounding_box() or {"width": 1})["width"] - 2, "y": 20})
            shown = page.locator(f"[data-chart={chart}] .value b").first
            if chart == "kl":  # steps 0.01, 0.02, 0.03: smoothed to less than the last
                assert float(shown.inner_text()) < 0.025
            elif chart == "rate":
                assert float(shown.inner_text().replace("−", "-")) == pytest.approx(1e-3)
            else:
                expect(shown).to_have_text(value)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_open_group_is_in_view(tmp_path: Path, browser: Browser, width: int) -> None:
    run = make_run(tmp_path, "run", steps=0, finished=False)
    report = step_report(1)
    with RunWriter.open(run.path) as store:
        store.record_step(replace(report, groups=tuple(report.groups) * 12, stats=tuple(report.stats) * 12))
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/groups/run/at/grpo/1/28", width) as watched:
        page = watched.page
        expect(page.locator("aside [aria-current]")).to_be_visible()
        page.wait_for_timeout(200)
        inside = """e => { const box = e.closest('ol').getBoundingClientRect(), item = e.getBoundingClientRect();
        return item.top >= box.top - 1 && item.bottom <= box.bottom + 1
        && item.left >= box.left - 1 && item.right <= box.right + 1; }"""
        assert page.locator("aside [aria-current]").evaluate(inside)


def test_steps_are_compared_within_any_stage_and_only_if_recorded(tmp_path: Path, browser: Browser) -> None:
    stages = [("first", "grpo", {"reward": 0.25}), ("second", "grpo", {"reward": 0.75})]
    make_stage_run(tmp_path, "run", stages)
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/groups/run/compare?stage=first&a=999") as watched:
        page = watched.page
        expect(page.get_by_role("status")).to_contain_text("There is no step 999 of first. Choose steps from 1 to 3.")
        expect(page.locator("table")).to_have_count(0)
        page.get_by_label("Stage").select_option("second")
        expect(page.locator("tr", has_text="reward").first).to_contain_text("0.750")
        assert "stage=second" in page.url


def test_minus_signs_are_one_character(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path, "run", steps=0, finished=False)
    with RunWriter.open(run.path) as store:
        for step, loss in ((1, -5.9e-4), (2, 5.9e-4)):
            report = with_rewards(step_report(step), (-5.03, -1.0, 0.5, 0.25))
            scored = report.groups[0].scored
            named = (
                replace(scored.scored[0], aspects=(Aspect("model", -5.03, -0.5, reason="reward -5.03"),)),
                *scored.scored[1:],
            )
            group = replace(report.groups[0], scored=replace(scored, scored=named))
            metrics = {**report.metrics, "loss": loss, "entropy": -1e-8}
            store.record_step(replace(report, groups=(group, *report.groups[1:]), metrics=metrics))
    hyphened = re.compile(r"(?<![\w-])-\d|\de-\d")
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/groups/run/compare") as watched:
        page = watched.page
        expect(page.get_by_role("region", name="Learning")).to_contain_text("−5.9e−4")
        assert not hyphened.findall(page.locator("main").inner_text())
        page.goto(f"{here.address}/#/groups/run/at/grpo/1/0")
        expect(page.locator("article[data-place='0']")).to_contain_text("reward −5.03")
        assert not hyphened.findall(page.locator("main").inner_text())
        page.goto(f"{here.address}/#/runs?run=run")
        expect(page.locator("[data-chart=entropy]")).to_contain_text("−1.0e−8")
        assert not hyphened.findall(page.locator("main .charts").first.inner_text())


def test_a_chart_and_a_failed_run_lead_to_what_to_do(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path, "sums", finished=False)
    with RunWriter.open(run.path) as store:
        store.record_event("failed", "grpo 4: CUDA out of memory", stage="grpo", step=4)
    run.set_status("failed")
    with served(tmp_path) as studio, a_page(browser, f"{studio.address}/#/runs?run=sums") as watched:
        page = watched.page
        chart = page.locator("[data-chart=kl]")
        chart.locator(".about summary").click()
        chart.get_by_role("link", name="What to do if it isn't").click()
        expect(page.get_by_role("heading", name="The policy moves too far")).to_be_in_viewport()
        page.go_back()
        page.get_by_label("Verdicts on sums").get_by_role("link", name="What to do").first.click()
        expect(page.get_by_role("heading", name="Out of memory")).to_be_in_viewport()
        page.get_by_role("link", name="the next section").first.click()
        expect(page.get_by_role("heading", name="Groups have no signal")).to_be_in_viewport()
        page.go_back()
        page.go_back()
        page.get_by_label("Run sums").get_by_role("link", name="What to do").click()
        expect(page.get_by_role("heading", name="Out of memory")).to_be_in_viewport()


def test_a_chart_of_two_metrics_explains_both(tmp_path: Path, browser: Browser) -> None:
    make_run(tmp_path, "run")
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=run") as watched:
        chart = watched.page.locator("[data-chart=clip]")
        expect(chart).to_contain_text("clipped from below")
        expect(chart).to_contain_text("clipped from above")
        assert not re.search(r":\S", " ".join(chart.locator("p").all_inner_texts()))


def test_any_two_of_several_recipes_are_compared(tmp_path: Path, browser: Browser) -> None:
    for index in range(4):
        make_run(tmp_path, f"run-{index}", sets=(f"seed={50 + index}",))
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=run-0,run-1,run-2,run-3") as watched:
        page = watched.page
        page.get_by_role("button", name="Compare recipes").click()
        page.get_by_label("First recipe").select_option("run-2")
        page.get_by_label("Second recipe").select_option("run-3")
        expect(page.get_by_label("Recipes", exact=True)).to_contain_text("seed = 52")
        expect(page.get_by_label("Recipes", exact=True)).to_contain_text("seed = 53")


def test_a_reload_keeps_the_settings_of_the_charts(tmp_path: Path, browser: Browser) -> None:
    make_stage_run(tmp_path, "run", [("first", "grpo", {"reward": 0.25}), ("second", "grpo", {"reward": 0.75})])
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=run") as watched:
        page = watched.page
        page.get_by_label("Stage").select_option("first")
        page.get_by_label("Smoothing", exact=True).fill("0.5")
        page.get_by_label("Log scale", exact=True).check()
        page.get_by_label("From step").fill("2")
        page.get_by_label("From step").press("Enter")
        page.reload()
        expect(page.get_by_label("Stage")).to_have_value("first")
        expect(page.get_by_label("Smoothing", exact=True)).to_have_value("0.5")
        expect(page.get_by_label("Log scale", exact=True)).to_be_checked()
        expect(page.get_by_label("From step")).to_have_value("2")


FORKED = """
name = "small"
threads = 1
model = { tiny = { layers = 1, width = 32, heads = 2, kv_heads = 1, head_size = 16, mlp_width = 64, context = 128 } }
task = { type = "arithmetic", digits = 2, heldout = 8 }
rewards = [{ type = "format" }]

[[stages]]
type = "grpo"
steps = 2
prompts_per_step = 2
group_size = 4
save_every = 1
sampling = { max_new_tokens = 16 }
"""


def test_a_fork_that_turns_the_kl_on_runs_and_draws_it(tmp_path: Path, browser: Browser) -> None:
    """Trained and forked by the command line: the parent has no reference, and the fork gets one."""
    recipe, runs = tmp_path / "small.toml", tmp_path / "runs"
    recipe.write_text(FORKED)
    assert main(["train", str(recipe), "--runs", str(runs)]) == 0
    changes = ["--step", "1", "--set", "grpo.kl.beta=0.02"]
    assert main(["fork", str(runs / "small-1"), "--runs", str(runs), *changes]) == 0
    with served(runs) as here, a_page(browser, f"{here.address}/#/runs?run=small-2") as watched:
        page = watched.page
        expect(page.get_by_role("region", name="Run small-2")).to_contain_text("finished")
        expect(page.locator("li", has_text="small-2")).to_contain_text("fork of small-1 at grpo 1: grpo.kl.beta = 0.02")
        expect(page.locator("[data-chart=kl] [data-metric=kl]")).to_be_visible()
        page.goto(f"{here.address}/#/runs?run=small-1")
        expect(page.get_by_role("region", name="Run small-1")).to_contain_text("finished")
        expect(page.locator("[data-chart=kl]")).to_have_count(0)


def test_the_best_of_tied_steps_is_the_one_that_the_command_line_names(tmp_path: Path, browser: Browser) -> None:
    """Of equal results it is the step with a checkpoint, in the list, the header and the report."""
    run = make_run(tmp_path, "tied", steps=4)
    with RunWriter.open(run.path) as store:
        for step in (1, 2, 3):
            store.record_eval(eval_report(step, 0.75))
    checkpoint_path(run.checkpoints, "grpo", 2).mkdir(parents=True)
    best = best_of_run(run)
    assert best is not None
    assert best.step == 2
    assert "Best held-out accuracy <b>75.0 %</b> of 2 prompts at grpo 2, from 75.0 % at grpo 1" in report_html(run)
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=tied") as watched:
        assert here.ask("/api/runs").json[0]["best"] == {
            "stage": "grpo", "step": 2, "metric": "held-out accuracy", "value": 0.75,
        }  # fmt: skip
        expect(watched.page.get_by_role("region", name="Run tied")).to_contain_text("best held-out 75.0 % of 2 at grpo 2")


def test_a_studio_without_runs_shows_no_controls(tmp_path: Path, browser: Browser) -> None:
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs", width=390) as watched:
        page = watched.page
        expect(page.get_by_role("region", name="First run")).to_contain_text("oncurve train arithmetic")
        expect(page.get_by_text("0 runs")).to_have_count(0)
        page.goto(f"{here.address}/#/groups")
        expect(page.get_by_text("There are no runs yet")).to_be_visible()
        expect(page.get_by_role("tab")).to_have_count(0)
        page.goto(f"{here.address}/#/rewards/gone")
        expect(page.get_by_text("There is no run called gone")).to_be_visible()
        page.goto(f"{here.address}/#/plan")
        table = page.get_by_role("group", name="Table of algorithms")
        expect(table.get_by_text("grpo, full")).to_be_visible()
        assert table.evaluate("table => table.scrollWidth <= table.clientWidth")


def test_a_run_without_steps_has_no_chart_controls(tmp_path: Path, browser: Browser) -> None:
    run = RunFolder.create_at(tmp_path / "begun")
    run.write_recipe(dump_recipe(parse_recipe(RECIPE, [])))
    with RunWriter.create(run.path) as store:
        store.begin_stage("grpo", "grpo", 0, 8)
    run.set_status("interrupted")
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=begun") as watched:
        expect(watched.page.get_by_text("No step has been recorded yet")).to_be_visible()
        expect(watched.page.get_by_role("button", name="Recipe")).to_be_visible()
        expect(watched.page.get_by_label("Smoothing")).to_have_count(0)


def test_a_dispute_opens_in_its_card_with_the_focus(tmp_path: Path, browser: Browser) -> None:
    make_run(tmp_path, "run", steps=2)
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/groups/run/at/grpo/2/0", width=390) as watched:
        card = watched.page.locator("article[data-place='2']")
        card.get_by_role("button", name="Dispute").click()
        reward = card.get_by_role("form", name="Dispute").get_by_label("Reward", exact=True)
        expect(reward).to_be_focused()
        expect(reward).to_be_in_viewport()
        card.get_by_role("button", name="Cancel").click()
        expect(card).to_be_focused()


@pytest.fixture
def axis_marks(tmp_path: Path, browser: Browser) -> Callable[[dict[int, float]], list[str]]:
    """The texts that the chart of a run with these entropies draws on its axes."""

    def draw(entropies: dict[int, float]) -> list[str]:
        run = RunFolder.create_at(tmp_path / "run")
        run.write_recipe(dump_recipe(parse_recipe(RECIPE, [])))
        with RunWriter.create(run.path) as store:
            store.begin_stage("grpo", "grpo", 0, 40)
            for step, entropy in entropies.items():
                store.record_step(StepReport("grpo", step, {"entropy": entropy}, {}, (), ()))
        run.set_status("interrupted")
        with served(tmp_path) as here, a_page(browser, f"{here.address}/#/plan") as watched:
            watched.page.evaluate(
                """() => {
                  const fill = CanvasRenderingContext2D.prototype.fillText;
                  window.drawn = [];
                  CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
                    drawn.push(text);
                    fill.call(this, text, ...at);
                  };
                }"""
            )
            watched.page.goto(f"{here.address}/#/runs?run=run")
            expect(watched.page.locator("[data-chart=entropy] canvas")).to_be_visible()
            watched.page.evaluate("() => new Promise(requestAnimationFrame)")
            found: list[str] = watched.page.evaluate("drawn")
            return found

    return draw


def test_close_values_have_different_marks(axis_marks: Callable[[dict[int, float]], list[str]]) -> None:
    marks = [text for text in axis_marks({1: 3.1002, 2: 3.1004}) if text.startswith("3.1")]
    assert len(set(marks)) == len(marks) >= 3, marks


def test_a_chart_with_one_point_shows_the_steps_around_it(axis_marks: Callable[[dict[int, float]], list[str]]) -> None:
    marks = axis_marks({20: 0.5})
    assert [text for text in marks if text in ("0", "19", "20", "21", "40")] == ["19", "20", "21"], marks
