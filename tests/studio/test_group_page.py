"""A group in a real browser: copies, differences, tokens by pointer and keyboard, lists, and one prompt through a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

from oncurve.records import EpisodeRecord, GradedGroup, Observation, Outcome, ToolCall
from oncurve.runs.database.writer import RunWriter
from tests.studio.browsing import a_browser, a_page
from tests.studio.samples import eval_report, make_run, step_report
from tests.studio.serving import Served, served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


def with_environment(graded: GradedGroup) -> GradedGroup:
    """The third and fourth token of each completion come from an environment."""
    scored = []
    for one in graded.scored.scored:
        mask = np.ones(len(one.completion.token_ids), np.bool_)
        mask[2:4] = False
        calls = (
            ToolCall("search", {"query": "tea"}, "3 kinds of tea", seconds=0.2),
            ToolCall("run", "not JSON", "", failure="timed out after 5 s", seconds=5.0),
        )
        episode = EpisodeRecord(((0, 2, Observation("3 kinds of tea", calls=calls)),), Outcome(0.5))
        scored.append(replace(one, completion=replace(one.completion, loss_mask=mask, episode=episode)))
    group = replace(graded.scored.group, completions=tuple(s.completion for s in scored))
    return GradedGroup(replace(graded.scored, group=group, scored=tuple(scored)), graded.advantages, graded.graded)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("groups")
    make_run(folder, "sums", steps=4)
    turns = make_run(folder, "turns", steps=0, finished=False)
    report = step_report(1)
    token_stats = []
    for one in report.stats[0]:
        assert one is not None
        entropy = one.entropy.copy()
        entropy[2:4] = 9.0  # of the environment's tokens, higher than of any other
        token_stats.append(replace(one, entropy=entropy))
    with RunWriter.open(turns.path) as store:
        groups = (with_environment(report.groups[0]), *report.groups[1:])
        store.record_step(replace(report, groups=groups, stats=(tuple(token_stats), *report.stats[1:])))
    turns.set_status("finished")
    with served(folder) as studio:
        yield studio


def test_identical_completions_share_a_card(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/groups/sums/at/grpo/2/1") as watched:
        page = watched.page
        cards = page.locator("article[data-place]")
        expect(cards).to_have_count(1)
        expect(cards.first).to_contain_text("× 4")
        page.get_by_label("Merge identical").uncheck()
        expect(cards).to_have_count(4)
        page.get_by_label("Merge identical").check()
        page.get_by_role("button", name="What if").click()
        expect(cards).to_have_count(4)  # each needs its own slider


def test_a_group_is_requested_once(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/groups/sums/at/grpo/2/0") as watched:
        page = watched.page
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url.partition("/api/runs/sums/")[2].partition("?")[0]))
        expect(page.locator("article[data-place]").first).to_be_visible()
        page.wait_for_timeout(500)
        asked.clear()
        page.keyboard.press("n")
        expect(page.locator("[data-where]")).to_contain_text("group 1 of 3")
        page.wait_for_timeout(1000)
        assert (asked.count("group"), asked.count("step")) == (1, 0)
        page.keyboard.press("]")
        expect(page.locator("[data-where]")).to_contain_text("grpo 3")
        page.wait_for_timeout(500)
        assert (asked.count("group"), asked.count("step")) == (2, 1)


def test_a_completion_is_compared_with_the_best(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/groups/sums/at/grpo/2/0") as watched:
        page = watched.page
        expect(page.locator("article[data-place='0']").get_by_role("button", name="Diff with best")).to_have_count(0)
        wrong = page.locator("article[data-place='2']")
        wrong.get_by_role("button", name="Diff with best").click()
        # From <think>1+2</think><answer>3</answer> to <think>hm</think><answer>4</answer>.
        assert wrong.locator("[data-diff] del").all_inner_texts() == ["1+2", "3"]
        assert wrong.locator("[data-diff] ins").all_inner_texts() == ["hm", "4"]


def test_the_token_panel_by_pointer_touch_and_keyboard(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/groups/sums/at/grpo/2/0") as watched:
        page = watched.page
        card = page.locator("article[data-place='0']")
        panel = card.locator("[data-token]")
        expect(card.locator("[data-t]").first).to_be_visible()
        expect(panel).to_have_count(0)
        box = card.bounding_box()
        card.locator("[data-t='1']").hover()
        expect(panel).to_have_attribute("data-token", "1")
        assert card.bounding_box() == box, "nothing moves under the pointer"
        for fact in ("probability", "log-prob", "advantage", "ratio", "entropy", "KL"):
            expect(panel).to_contain_text(fact)
        page.mouse.move(0, 0)
        expect(panel).to_have_count(0)
        card.locator("[data-t='2']").click()
        page.mouse.move(0, 0)
        expect(panel).to_have_attribute("data-token", "2")  # a click or tap keeps it
        card.get_by_role("group", name="Tokens of completion 0").focus()
        page.keyboard.press("ArrowRight")
        expect(panel).to_have_attribute("data-token", "3")
        page.keyboard.press("Home")
        expect(panel).to_have_attribute("data-token", "0")
        page.keyboard.press("Escape")
        expect(panel).to_have_count(0)
        shown = card.locator("[data-t='0']").get_attribute("title") or ""
        logp = float(re.findall(r"log-prob ([−\d.e]+)", shown)[0].replace("−", "-"))
        share = float(re.findall(r"probability ([\d.]+) %", shown)[0])
        assert share == pytest.approx(100 * np.exp(logp), abs=0.2)


def test_the_colours_have_a_scale(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/groups/sums/at/grpo/2/0") as watched:
        page = watched.page
        advantages = [1.1, 1.0, 0.1, 0.0]
        widest = max(abs(value - np.mean(advantages)) for value in advantages) / (np.std(advantages, ddof=1) + 1e-4)
        expect(page.get_by_role("img", name=re.compile("Colour scale"))).to_contain_text(f"+{widest:.2f}")
        page.get_by_label("Colour by").select_option("entropy")
        expect(page.get_by_role("img", name=re.compile("Colour scale"))).to_contain_text("nats")


def test_the_turns_of_an_environment_are_marked(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/groups/turns/at/grpo/1/0") as watched:
        card = watched.page.locator("article[data-place='0']")
        expect(card.locator(".turn").first).to_be_visible()
        assert [text.lower() for text in card.locator(".turn").all_inner_texts()] == ["environment", "policy"]
        card.locator("[data-t='2']").click()
        expect(card.locator("[data-token]")).to_contain_text("not trained on")


def test_an_environment_s_tokens_do_not_pale_the_others(here: Served, browser: Browser) -> None:
    """Their entropy, 9 nats, is no end of the colour scale; that of the policy's tokens is below 1."""
    with a_page(browser, f"{here.address}/#/groups/turns/at/grpo/1/0") as watched:
        watched.page.get_by_label("Colour by").select_option("entropy")
        expect(watched.page.get_by_role("img", name=re.compile(r"^Colour scale from 0 to (0\.\d+|1) nats$"))).to_be_visible()


def test_an_agent_s_turns_show_its_tool_calls(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/groups/turns/at/grpo/1/0") as watched:
        card = watched.page.locator("article[data-place='0']")
        episode = card.locator("[data-episode]")
        expect(episode.locator("summary")).to_contain_text("1 turn, 2 tool calls, the environment's reward 0.50")
        episode.locator("summary").click()
        expect(episode).to_contain_text('search({"query": "tea"})')
        expect(episode).to_contain_text("200 ms")
        expect(episode).to_contain_text("3 kinds of tea")
        expect(episode.locator("pre.bad")).to_have_text("timed out after 5 s")


def test_the_groups_of_a_step_are_sorted_and_filtered(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/groups/sums/at/grpo/2/0") as watched:
        page = watched.page
        listed = page.locator("aside ol li")
        expect(listed).to_have_count(3)
        expect(page.get_by_role("img", name="2 of 3 groups have a signal")).to_be_visible()
        page.get_by_label("Groups to list").select_option("silent")
        expect(listed).to_have_count(1)
        expect(listed.first).to_contain_text("no signal")
        page.get_by_label("Groups to list").select_option("all")
        page.get_by_label("Order of groups").select_option("failures")
        expect(listed.first).to_contain_text("1 failure")
        page.get_by_label("Order of groups").select_option("lowest")
        expect(listed.first).to_contain_text("no signal")  # 0.1 for everyone
        order = [int(text.split()[0]) for text in listed.all_inner_texts()]
        assert order[0] == 1
        listed.first.locator("a").click()
        expect(page.locator("[data-where]")).to_contain_text("group 1 of 3")
        page.keyboard.press("n")  # the next one in the order of the list
        expect(page.locator("[data-where]")).to_contain_text(f"group {order[1]} of 3")


def test_one_prompt_through_the_run(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/groups/sums/at/grpo/2/0") as watched:
        page = watched.page
        page.get_by_role("link", name="sums/2", exact=True).click()
        expect(page.get_by_text("Sampled 4 times in this run")).to_be_visible()
        expect(
            page.get_by_role("img", name=re.compile("Mean reward of this prompt's groups, from 0.550 at grpo 1 to"))
        ).to_be_visible()
        page.get_by_role("link", name="grpo 3").click()
        expect(page.locator("[data-where]")).to_contain_text("grpo 3")


def test_search_by_a_condition_marks_what_matches(here: Served, browser: Browser) -> None:
    with a_page(browser, f"{here.address}/#/groups/sums/search?text=hm") as watched:
        page = watched.page
        expect(page.locator("mark").first).to_have_text("hm")
        page.get_by_label("Text").fill("")
        page.get_by_label("Reward aspect").select_option("answer")
        page.get_by_label("Comparison").select_option("ge")
        page.get_by_label("Bound").fill("1")
        expect(page.locator("li a").first).to_be_visible()
        rewards = [float(text.replace("−", "-")) for text in page.locator("li .reward").all_inner_texts()]
        assert rewards
        assert min(rewards) >= 1
        page.reload()
        expect(page.get_by_label("Bound")).to_have_value("1")


def test_search_by_tool_and_by_failure(here: Served, browser: Browser) -> None:
    def found(query: str) -> int:
        return len(here.ask(f"/api/runs/turns/search?{query}").json["completions"])

    everything = found("")
    with_calls = found("tool=search")
    assert 0 < with_calls < everything
    assert found("tool=run&tool_failure=any") == found("tool_failure=timed+out+after+5+s") == with_calls
    assert found("tool=search&tool_failure=any") == found("tool=nothing") == found("tool_failure=syntax") == 0
    with a_page(browser, f"{here.address}/#/groups/turns/search") as watched:
        page = watched.page
        expect(page.locator("[data-found]")).to_have_attribute("data-found", str(everything))
        page.get_by_label("Tool", exact=True).select_option("run")
        page.get_by_label("Calls", exact=True).select_option("any")
        expect(page.locator("[data-found]")).to_have_attribute("data-found", str(with_calls))
        page.get_by_label("Tool", exact=True).select_option("search")
        expect(page.get_by_text("No matches.")).to_be_visible()
    with a_page(browser, f"{here.address}/#/groups/sums/search") as watched:
        expect(watched.page.locator("[data-found]")).to_be_visible()
        expect(watched.page.get_by_label("Tool", exact=True)).to_have_count(0)


@pytest.mark.parametrize("width", [390, 1440])
def test_the_map_of_many_groups_is_as_wide_as_the_list(tmp_path: Path, browser: Browser, width: int) -> None:
    run = make_run(tmp_path, "many")
    with RunWriter.open(run.path) as store:
        store.record_eval(replace(eval_report(3, 0.5), asked=200, groups=tuple(eval_report(3, 0.5).groups) * 100))
    with (
        served(tmp_path) as served_here,
        a_page(browser, f"{served_here.address}/#/groups/many/at/grpo/3?kind=eval", width) as watched,
    ):
        bars = watched.page.get_by_role("img", name="of 200 groups have a signal")
        expect(bars).to_be_visible()
        assert bars.evaluate("bars => bars.scrollWidth <= bars.clientWidth")
        assert watched.fits()
