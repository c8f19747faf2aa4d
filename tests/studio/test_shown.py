"""What the pages show is right: each test is a case in which an earlier version showed something wrong or nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from oncurve.records import Aspect, EvalReport, GradedGroup, StepReport
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
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
        drawn = " ".join(page.locator("[data-chart] .values").all_inner_texts())
        for name in metrics:
            assert name in drawn, f"{name} is not drawn"


def test_evaluations_by_difficulty_and_with_several_samples_are_drawn(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path, "run", steps=2, finished=False)
    with RunWriter.open(run.path) as store:
        levels = {"1 digit": (3, 4), "2 digits": (1, 4)}
        store.record_eval(replace(eval_report(1, 0.5), by_difficulty=levels, metrics={"pass_at/4": 0.8, "maj_at/4": 0.7}))
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=run") as watched:
        levels_chart = watched.page.locator("[data-chart=heldout_levels]")
        expect(levels_chart).to_contain_text("2 digits (4)")
        expect(levels_chart).to_contain_text("0.250")
        expect(watched.page.locator("[data-chart=heldout_many]")).to_contain_text("pass@4 0.800")
        expect(watched.page.locator("[data-chart=heldout_many]")).to_contain_text("maj@4 0.700")


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
        expect(page.locator("[data-where]")).to_have_text("grpo 2, group 1")
        page.get_by_role("button", name="Copy command").click()
        assert page.evaluate("navigator.clipboard.readText()") == "oncurve show run --stage grpo --step 2 --group 1"


def test_the_audit_finds_constant_and_failing_rewards(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path, "run", steps=0, finished=False)
    with RunWriter.open(run.path) as store:
        for step in range(1, 5):
            report = step_report(step, kinds=("wrong", "failed", "wrong", "failed"))
            store.record_step(replace(report, groups=report.groups[:2], stats=report.stats[:2]))
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/rewards/run") as watched:
        audit = watched.page.get_by_role("region", name="Audit")
        expect(audit).to_contain_text("'answer' failed on 8 of 32 completions (25.0%)")
        expect(audit).to_contain_text("'answer' gave all 32 completions the score 0")
        expect(audit).not_to_contain_text("No suspicious pattern")


def axis(watched: Watched, chart: str) -> list[float]:
    """The numbers at the y axis, drawn on a canvas: what the page passes to fillText while it draws again."""
    watched.page.evaluate(
        """() => { window.texts = []; const old = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
        window.texts.push([this.canvas.closest('[data-chart]')?.dataset.chart, text]);
        return old.call(this, text, ...rest); }; }"""
    )
    watched.page.set_viewport_size({"width": 1100, "height": 900})
    watched.page.wait_for_function(f"window.texts.some(([chart]) => chart === '{chart}')")
    texts = [text for of, text in watched.page.evaluate("window.texts") if of == chart]
    return [float(text.replace("−", "-").replace(",", "")) for text in texts if re.fullmatch(r"[−\d.,e]+", text)]


def test_a_flat_share_has_an_axis_from_0_to_1(tmp_path: Path, browser: Browser) -> None:
    make_stage_run(tmp_path, "run", [("grpo", "grpo", {"failure_share": 0.0, "clip_low_share": 0.0, "clip_high_share": 0.0})])
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=run") as watched:
        expect(watched.page.locator("[data-chart=failures] canvas")).to_be_visible()
        assert max(axis(watched, "failures")) <= 3  # the steps 1 to 3 are on the x axis; an empty range was 0 to 100
        watched.page.get_by_label("Log scale").check()
        expect(watched.page.locator("[data-chart=failures]")).to_contain_text("only values above 0, and there are none")


def test_smoothing_leaves_measurements_and_schedules_alone(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path, "run", steps=0, finished=False)
    with RunWriter.open(run.path) as store:
        for step, accuracy in ((1, 0.2), (2, 0.4), (3, 0.99)):
            report = step_report(step)
            store.record_step(replace(report, metrics={**report.metrics, "learning_rate": 10.0**-step}))
            store.record_eval(EvalReport("grpo", step, accuracy, 2, {}, {}, eval_report(step, accuracy).groups))
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/runs?run=run&smooth=0.9") as watched:
        page = watched.page
        for chart, value in (("heldout", "0.990"), ("rate", "1.00e"), ("kl", "")):
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
        expect(page.locator("table")).to_contain_text("−5.9e−4")
        assert not hyphened.findall(page.locator("main").inner_text())
        page.goto(f"{here.address}/#/groups/run/at/grpo/1/0")
        expect(page.locator("article[data-place='0']")).to_contain_text("reward −5.03")
        assert not hyphened.findall(page.locator("main").inner_text())
        page.goto(f"{here.address}/#/runs?run=run")
        expect(page.locator("[data-chart=entropy]")).to_contain_text("−1.0e−8")
        assert not hyphened.findall(page.locator("main .charts").first.inner_text())


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
        page.get_by_label("Smoothing").fill("0.5")
        page.get_by_label("Log scale").check()
        page.get_by_label("From step").fill("2")
        page.get_by_label("From step").press("Enter")
        page.reload()
        expect(page.get_by_label("Stage")).to_have_value("first")
        expect(page.get_by_label("Smoothing")).to_have_value("0.5")
        expect(page.get_by_label("Log scale")).to_be_checked()
        expect(page.get_by_label("From step")).to_have_value("2")
