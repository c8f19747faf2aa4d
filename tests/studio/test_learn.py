"""The Learn page in a real browser: its figures show what its texts say, with the formulas' numbers."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.studio.browsing import a_browser, a_page
from tests.studio.samples import make_run, make_stage_run
from tests.studio.serving import Served, served

pytestmark = pytest.mark.slow
CONTENT = Path(__file__).resolve().parents[2] / "web" / "src" / "learn" / "content"
SECTIONS = [*(path.stem.split("-", 1)[1] for path in sorted(CONTENT.glob("*.md"))), "troubleshooting"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


def numbers(page: Page, selector: str) -> list[float]:
    page.locator(selector).first.wait_for()
    texts = page.locator(selector).all_inner_texts()
    return [
        float(found[0].replace("−", "-").replace(",", "")) for text in texts if (found := re.findall(r"[−-]?[\d.,]*\d", text))
    ]


def test_figure_first_and_depth_that_unfolds(studio: Served, browser: Browser) -> None:
    """Nothing hides anything else; the address keeps what is open; the next section keeps it too."""
    with a_page(browser, f"{studio.address}/#/learn/advantages") as watched:
        page = watched.page
        expect(page.get_by_text("grade on the curve")).to_be_visible()
        figure, text = (
            page.get_by_role("region", name="Group advantages").bounding_box(),
            page.get_by_text("grade on the curve").bounding_box(),
        )
        assert figure is not None
        assert text is not None
        assert figure["y"] < text["y"]
        page.keyboard.press("2")
        expect(page.locator(".katex").first).to_be_visible()
        page.get_by_text("Implementation", exact=True).click()
        expect(page.get_by_text("Four details decide")).to_be_visible()
        expect(page.get_by_text("grade on the curve")).to_be_visible()
        page.reload()
        expect(page.get_by_text("Four details decide")).to_be_visible()
        expect(page.get_by_text("Three facts follow")).to_be_visible()
        page.keyboard.press("n")
        expect(page.get_by_role("heading", name="The full algorithm")).to_be_visible()
        expect(page.get_by_text("GRPO in 50 lines")).to_be_visible()
        assert page.locator(".katex-error").count() == 0


@pytest.mark.parametrize("section", SECTIONS)
def test_no_formula_fails_and_no_link_is_dead(studio: Served, browser: Browser, section: str) -> None:
    with a_page(browser, f"{studio.address}/#/learn/{section}?open=mathematics,implementation") as watched:
        page = watched.page
        expect(page.locator("article h1")).to_be_visible()
        assert page.locator(".katex-error").count() == 0
        links = [link.get_attribute("href") or "" for link in page.locator("article a").all()]
        for href in links:
            if href.startswith("#/learn/"):
                assert href.removeprefix("#/learn/").split("?")[0] in SECTIONS, href


def rewarded(text: str, rule: str) -> float:
    """The rules that the advantage figure states, applied to an answer."""
    result = re.findall(r"[−-]?\d+", text)[-1] == "75"
    if rule.startswith("Reward: 1 for the right result"):
        return float(result)
    has_working = "84" in text
    return (0.7 + 0.3 * has_working) if result else 0.2 * ("12 · 7 = 84" in text)


def test_the_advantage_figure_s_rewards_follow_its_rules(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn/advantages") as watched:
        page = watched.page
        presets = page.get_by_role("group", name="Example groups").get_by_role("button")
        expect(presets).to_have_count(5)
        for preset in presets.all():
            preset.click()
            rule = page.locator("[data-rule]").inner_text()
            answers = page.locator("[data-answer]").all_inner_texts()
            assert len(answers) == len(set(answers)) == 8
            shown = [float(page.get_by_label(f"Reward of answer {n}", exact=True).input_value()) for n in range(1, 9)]
            assert shown == pytest.approx([rewarded(text, rule) for text in answers])


def test_the_same_reward_is_good_or_bad_news(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn/advantages", 390) as watched:
        page = watched.page
        weak = numbers(page, "b[data-advantage='0']")[0]
        page.get_by_role("button", name="Strong group").click()
        strong = numbers(page, "b[data-advantage='0']")[0]
        assert weak > 1 > -1 > strong
        expect(page.locator(".bar").first).to_be_visible()  # on a phone too
        page.get_by_label("Reward of answer 1", exact=True).fill("1")
        assert numbers(page, "b[data-advantage='0']")[0] == 0
        page.get_by_role("button", name="All equal").click()
        assert numbers(page, "b[data-advantage]") == [0.0] * 8


def test_the_update_figure(studio: Served, browser: Browser) -> None:
    """It learns; its rewards follow the rule it states; the bars have moved when it says that the policy has."""
    share = re.compile(r"Right answers together: ([\d.]+) %")
    with a_page(browser, f"{studio.address}/#/learn/algorithm") as watched:
        page = watched.page
        update = page.get_by_role("region", name="One GRPO update, step by step")

        def right() -> float:
            found = share.search(update.get_by_text("Right answers together").inner_text())
            assert found is not None
            return float(found[1])

        before = right()
        update.get_by_role("button", name="2 Score").click()
        expect(update).to_contain_text("1 if it is right, plus 0.1 if it is a number in digits within 1 of the right one")
        for line in update.locator(".group li").all_inner_texts():
            answer, reward = line.replace("\n", " ").split(" r = ")
            digits = answer.strip().isdigit()
            expected = (answer.strip() in ("12", "twelve")) + 0.1 * (digits and abs(int(answer) - 12) <= 1 if digits else 0)
            assert float(reward) == pytest.approx(expected), line
        update.get_by_role("button", name="3 Normalise").click()
        assert "e−" not in update.inner_text()
        assert "e-" not in update.inner_text()
        assert right() == before
        update.get_by_role("button", name="4 Clip").click()
        assert right() > before
        for _ in range(18):
            update.get_by_role("button", name=re.compile("^(Next|Another round)$")).click()
        assert right() > before + 10


def test_the_update_figure_says_what_the_update_did(studio: Served, browser: Browser) -> None:
    """Round 1: every answer moves as its advantage says. Round 4: "twelve" loses despite a positive one. Round 7: no
    signal."""
    says = {
        1: "those with a positive advantage became more likely, and those with a negative one less likely",
        4: "“twelve” has a positive advantage but became less likely",
        7: "All rewards of the group are equal, so no advantage moves the policy",
    }
    with a_page(browser, f"{studio.address}/#/learn/algorithm") as watched:
        update = watched.page.get_by_role("region", name="One GRPO update, step by step")
        for number in range(1, 8):
            expect(update.get_by_role("heading", name=f"The group, round {number}")).to_be_visible()
            update.get_by_role("button", name="6 Update").click()
            if number in says:
                expect(update.locator(".says")).to_contain_text(says[number])
            update.get_by_role("button", name="Another round").click()


def test_the_memory_figure_shows_the_critic_s_half(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn/critic") as watched:
        page = watched.page

        def total(of: str) -> float:
            return numbers(page, f"[data-total='memory-{of}']")[0]

        for size, least in (("7B", 0.38), ("13B", 0.4), ("70B", 0.45)):
            page.get_by_role("button", name=size, exact=True).click()
            assert 1 - total("grpo") / total("ppo") > least
        page.get_by_role("checkbox", name="KL to a reference").uncheck()
        assert total("grpo") / total("ppo") == pytest.approx(0.5, abs=0.02)
        assert numbers(page, "[data-largest='grpo']")[0] == pytest.approx(
            2 * numbers(page, "[data-largest='ppo']")[0], rel=0.03
        )
        same = numbers(page, "[data-total='time-ppo']")[0] / numbers(page, "[data-total='time-grpo']")[0]
        assert same > 1.2, "with equal completions the critic costs time too"
        page.get_by_role("button", name="PPO samples each prompt once").click()
        assert numbers(page, "[data-total='time-ppo']")[0] < numbers(page, "[data-total='time-grpo']")[0]
        expect(page.locator("[data-trained=PPO]")).to_have_text("140 B")
        expect(page.locator("[data-trained=GRPO]")).to_have_text("70 B")


def test_removing_the_clip_destroys_the_policy(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn/details") as watched:
        page = watched.page
        page.get_by_role("button", name="Noisy rewards, with clip").click()
        assert numbers(page, "[data-share='0']")[0] > 90
        page.get_by_role("checkbox", name="Clip the ratio").uncheck()
        assert numbers(page, "[data-share='0']")[0] < 10
        found = re.search(r"wins (\d+) times with ε = 0.2 and (\d+) times without", page.locator("[data-wins]").inner_text())
        assert found is not None
        assert int(found[1]) >= 18
        assert int(found[2]) <= 10


def test_the_dynamics_figure_speaks_of_what_it_shows(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn/details") as watched:
        page, facts = watched.page, watched.page.locator("[data-facts]")
        assert numbers(page, "[data-share='0']")[0] > 80
        page.get_by_role("slider", name="Step", exact=True).fill("10")
        expect(facts).to_contain_text("in 10 steps")
        expect(page.get_by_text("The group of step 10:")).to_be_visible()
        page.get_by_role("button", name="All rewards equal").click()
        assert numbers(page, "[data-share='0']")[0] < 20
        expect(facts).to_contain_text("without signal 80, of which 80 in the 80 steps before")
        quiet = {}
        for name in ("G = 2", "G = 64"):
            page.get_by_role("button", name=name).click()
            found = re.search(r"of which (\d+) in the (\d+) steps before", facts.inner_text())
            assert found is not None
            quiet[name] = int(found[1]) / int(found[2])
        assert quiet["G = 2"] > quiet["G = 64"], "small groups have less signal while there is something to learn"


def test_the_sandbox_s_policy_exploits_the_reward(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn/rewards") as watched:
        page, told = watched.page, watched.page.locator("[data-hack]")

        def accepted() -> float:
            found = re.search(r"a person accepts [\d.]+ % → ([\d.]+) %", told.inner_text())
            assert found is not None
            return float(found[1])

        for name in ("Contains the answer", "Show your work", "Be thorough", "Penalise mistakes"):
            page.get_by_role("button", name=name).click()
            assert accepted() < 20, name
        page.get_by_role("button", name="A better reward").click()
        assert accepted() > 90
        page.get_by_label("Your reward, one rule per line").fill('1 if ends with "11"')
        expect(page.get_by_role("region", name="Reward-hacking sandbox").locator("li").first).to_contain_text("11")
        page.get_by_label("Your reward, one rule per line").fill("import os")
        expect(page.get_by_role("alert")).to_contain_text("Not a rule")


def test_the_clip_figure(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn/algorithm") as watched:
        page, says = watched.page, watched.page.locator("[data-clip]")
        page.get_by_label("Ratio ρ").fill("1.3")
        expect(says).to_contain_text("no gradient")
        page.get_by_role("button", name="A = −1").click()
        expect(says).to_contain_text("it moved the wrong way")
        page.get_by_label("Ratio ρ").fill("0.5")
        expect(says).to_contain_text("no gradient")


def test_the_clip_figure_is_dragged(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn/algorithm") as watched:
        page = watched.page
        figure = page.locator("#clip svg")
        figure.scroll_into_view_if_needed()
        box = figure.bounding_box()
        assert box is not None
        page.mouse.click(box["x"] + 0.97 * box["width"], box["y"] + 0.5 * box["height"])
        expect(page.get_by_label("Ratio ρ")).to_have_value("2")
        expect(page.locator("[data-clip]")).to_contain_text("no gradient")


def test_questions_lead_to_a_method(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn/relatives") as watched:
        page, method = watched.page, watched.page.locator("[data-method]")
        expect(method).to_contain_text("GRPO. The mean of the group is the baseline")
        for question, answer, name in (
            ("Do you want one update per batch and as few parts as possible?", "yes", "rloo"),
            ("Are there rewards for single steps, and enough memory for a critic?", "yes", "ppo"),
            ("Can you score a new answer?", "no", "dpo"),
            ("Can you change the model's weights?", "no", "training_free"),
        ):
            page.get_by_role("group", name=question).get_by_role("button", name=answer).click()
            expect(method).to_have_attribute("data-method", name)
        # A question after the one that decided is not asked.
        expect(page.get_by_role("group", name="Can you score a new answer?").get_by_role("button", name="yes")).to_be_disabled()


def test_the_opening_picture_and_a_run_of_one_s_own(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn") as watched:
        page = watched.page
        expect(page.get_by_role("heading", name="GRPO at a glance")).to_be_visible()
        expect(page.get_by_text("TL;DR")).to_be_visible()
        picture = page.get_by_role("region", name="GRPO in one picture")
        page.get_by_label("Time in the picture").fill("1.9")
        expect(picture).to_contain_text("Each completion gets a reward")
        assert "+" not in picture.locator("ol").inner_text().replace("7 + 5", "")
        page.get_by_label("Time in the picture").fill("5")
        assert "+" in picture.locator("ol").inner_text().replace("7 + 5", "")
        page.get_by_label("Example").select_option("sums-1")
        expect(picture).to_contain_text("<think>1+2</think><answer>3</answer>")
        page.get_by_text("Open this group").click()
        expect(page.locator("article[data-place]")).to_have_count(4)


def test_symbols_light_up_in_the_figure(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn/advantages?open=mathematics") as watched:
        page = watched.page
        formula = page.locator(".katex-html [data-symbol=A]").first
        formula.hover()
        expect(page.locator("b[data-advantage]").first).to_have_css("outline-style", "solid")
        page.mouse.move(0, 0)  # focus scrolls, and another symbol may come to lie under the pointer
        page.locator(".symbols button[data-symbol=r]").focus()
        expect(page.locator(".slider").first).to_have_css("outline-style", "solid")
        expect(page.locator("b[data-advantage]").first).to_have_css("outline-style", "none")


def test_questions_have_answers_that_unfold(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn/questions") as watched:
        page = watched.page
        for asked in (
            "Why might group-relative advantages suit",
            "How does the group size G affect",
            "lightweight critic for process rewards",
            "normalised across the complete batch",
        ):
            fold = page.locator("details", has_text=asked)
            expect(fold.locator("p")).to_be_hidden()
            fold.locator("summary").click()
            expect(fold.locator("p")).to_be_visible()
        for heard in (
            "doesn't use clipping",
            "requires less compute",
            "only works for mathematics",
            "advantage is per completion",
        ):
            expect(page.get_by_text(heard)).to_be_visible()


def test_code_is_highlighted_and_copied(studio: Served, browser: Browser) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "grpo_in_50_lines.py"
    with a_page(browser, f"{studio.address}/#/learn/algorithm?open=implementation") as watched:
        page = watched.page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        block = page.locator(".code", has_text="GRPO in 50 lines")
        expect(block.locator(".keyword").nth(20)).to_be_visible()
        expect(block).to_contain_text("beta * (d_BT.exp() - d_BT - 1)")
        block.get_by_role("button", name="Copy").click()
        expect(block.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()").strip() == example.read_text().strip()


def test_printing_opens_everything(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn/advantages") as watched:
        page = watched.page
        expect(page.get_by_text("grade on the curve")).to_be_visible()
        expect(page.get_by_text("Three facts follow")).to_be_hidden()
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        expect(page.get_by_text("Three facts follow")).to_be_visible()
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        expect(page.get_by_text("Three facts follow")).to_be_hidden()


def test_the_static_site_needs_no_server(tmp_path: Path, browser: Browser) -> None:
    """`make learn-site` in a copy of the repository, opened from the folder."""
    root = Path(__file__).resolve().parents[2]
    shutil.copy(root / "Makefile", tmp_path / "Makefile")
    shutil.copytree(root / "docs" / "learn", tmp_path / "docs" / "learn")
    subprocess.run(["make", "learn-site"], cwd=tmp_path, check=True, capture_output=True)
    address = (tmp_path / "build" / "learn" / "index.html").as_uri()
    with a_page(browser, address) as watched:
        page = watched.page
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        expect(page.get_by_role("heading", name="GRPO at a glance")).to_be_visible()
        expect(page.get_by_role("navigation", name="Pages").get_by_role("link")).to_have_text(["Learn"])
        for section in SECTIONS:
            page.goto(f"{address}#/learn/{section}?open=mathematics,implementation")
            expect(page.locator("article h1")).to_be_visible()
            links = [link.get_attribute("href") or "" for link in page.locator("a").all()]
            assert all(href.startswith(("#/learn", "http", "#main")) for href in links), links
        assert not [url for url in asked if not url.startswith(address.rpartition("/")[0])]
        assert page.evaluate("[...document.fonts].some((face) => face.status === 'loaded')")


def test_a_group_of_one_s_own_run_is_the_example_of_several_figures(studio: Served, browser: Browser) -> None:
    """Chosen once, it stays for the other figures, with the run's own numbers."""
    with a_page(browser, f"{studio.address}/#/learn/advantages") as watched:
        page = watched.page
        page.get_by_role("combobox", name="Example").select_option("sums-1")
        expect(page.get_by_role("button", name="Your group")).to_have_attribute("aria-pressed", "true")
        expect(page.locator("[data-answer]").first).to_have_text("<think>1+2</think><answer>3</answer>")
        rewards = np.array([1.1, 1.0, 0.1, 0.0])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        assert numbers(page, "b[data-advantage]") == pytest.approx(expected, abs=0.006)
        page.get_by_label("Reward of answer 4", exact=True).fill("1.1")
        assert numbers(page, "b[data-advantage='3']")[0] > 0
        page.goto(f"{studio.address}/#/learn/algorithm")
        expect(page.get_by_role("combobox", name="Example").first).to_have_value("sums-1")
        own = page.locator("[data-own-credit='0']")
        expect(own.locator("small").first).to_have_text(f"+{expected[0]:.1f}")
        page.goto(f"{studio.address}/#/learn/derivations")
        expect(page.get_by_text("The dots are the prompts of step")).to_be_visible()
        page.get_by_role("combobox", name="Example").first.select_option("")
        expect(page.get_by_text("The dots are the prompts of step")).to_have_count(0)


def test_the_figures_follow_the_settings_of_one_s_own_run(tmp_path: Path, browser: Browser) -> None:
    """Dr. GRPO does not divide by the std; a KL in the reward can't be computed here; PPO is no example of GRPO."""
    make_run(tmp_path, "doctor", sets=("grpo.objective='dr_grpo'",))
    make_run(tmp_path, "leashed", sets=("grpo.kl.where='reward'",))
    make_stage_run(tmp_path, "critic", [("ppo", "ppo", {"reward": 1.0})])
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/learn/advantages") as watched:
        page = watched.page
        choice = page.get_by_role("combobox", name="Example")
        choice.select_option("doctor")
        assert {*choice.locator("option").all_inner_texts()} == {"built in", "your run doctor", "your run leashed"}
        expect(page.get_by_label("Divide by")).to_have_value("none")
        rewards = np.array([1.1, 1.0, 0.1, 0.0])
        assert numbers(page, "b[data-advantage]") == pytest.approx(rewards - rewards.mean(), abs=0.006)
        page.get_by_role("button", name="Weak group").click()
        expect(page.get_by_label("Divide by")).to_have_value("group")
        choice.select_option("leashed")
        expect(page.get_by_text("Computed with the mean and the std of the group, unlike in your run.")).to_be_visible()
        page.goto(f"{here.address}/#/learn")
        picture = page.get_by_role("region", name="GRPO in one picture")
        picture.get_by_role("button", name="4 Advantage").click()
        expect(picture).to_contain_text("These are the advantages that your run recorded. This run subtracts the KL")
        picture.get_by_role("combobox", name="Example").select_option("doctor")
        expect(picture).to_contain_text("your run does not divide by the std")


def test_the_weight_of_a_prompt_under_the_std(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn/derivations") as watched:
        page = watched.page
        for p in (0.05, 0.5, 0.9):
            page.get_by_label("Probability that the prompt is solved").fill(str(p))
            weight, objective, right, wrong = numbers(page, "[data-weight] b")
            assert weight == pytest.approx(1 / np.sqrt(p * (1 - p)), rel=0.01)
            assert objective == pytest.approx(2 * np.arcsin(np.sqrt(p)), rel=0.01)
            assert right == pytest.approx(np.sqrt((1 - p) / p), rel=0.01)
            assert wrong == pytest.approx(-np.sqrt(p / (1 - p)), rel=0.01)


def test_how_often_a_group_has_a_signal(studio: Served, browser: Browser) -> None:
    with a_page(browser, f"{studio.address}/#/learn/limits") as watched:
        page = watched.page
        for p, power in ((0.05, 2), (0.05, 5), (0.5, 0), (1.0, 3)):
            page.get_by_label("Probability p that an answer is right").fill(str(p))
            page.get_by_label("Size of the group").fill(str(power))
            size = 2 ** (power + 1)
            expect(page.locator("[data-signal] b")).to_have_text(f"{100 * (1 - p**size - (1 - p) ** size):.1f} %")


def test_a_link_leads_to_a_heading_a_figure_or_a_paragraph(studio: Served, browser: Browser) -> None:
    links = {
        "relatives?at=when-to-prefer-which": "When to prefer which",
        "algorithm?at=credit": "Credit for tokens",
        "critic?open=mathematics&at=the-bootstrapping-problem": "The bootstrapping problem.",
    }
    for address, text in links.items():
        with a_page(browser, f"{studio.address}/#/learn/{address}") as watched:
            page = watched.page
            target = page.get_by_text(text, exact=False).last
            expect(target).to_be_in_viewport()
            page.wait_for_timeout(300)
            box = page.locator(f"[id='{address.rpartition('at=')[2]}']").bounding_box()
            assert box is not None
            assert -5 <= box["y"] < 450, address


def test_reduced_motion_is_honoured(studio: Served, browser: Browser) -> None:
    """The picture jumps from stage to stage, and nothing on the page is animated."""
    context = browser.new_context(reduced_motion="reduce", viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(f"{studio.address}/#/learn")
    page.get_by_label("Time in the picture").fill("0")
    page.get_by_role("button", name="Play").click()
    seen = set()
    for _ in range(20):
        seen.add(float(page.get_by_label("Time in the picture").input_value()))
        page.wait_for_timeout(100)
    assert all(value == int(value) for value in seen), seen
    page.goto(f"{studio.address}/#/learn/algorithm")
    page.get_by_role("button", name="2 Score").click()
    moving = page.evaluate("document.getAnimations().filter((one) => one.playState === 'running').length")
    assert moving == 0
    context.close()


@pytest.mark.parametrize("section", ["overview", "advantages", "algorithm", "relatives", "rewards", "pipelines", "details"])
def test_every_control_is_reached_by_the_keyboard(studio: Served, browser: Browser, section: str) -> None:
    with a_page(browser, f"{studio.address}/#/learn/{section}") as watched:
        page = watched.page
        expect(page.locator("article h1")).to_be_visible()
        page.wait_for_timeout(300)
        controls = "article :is(button, input, select, textarea, summary, a[href]):not(:disabled)"
        mark = "filter((one) => one.checkVisibility()).forEach((one, index) => (one.dataset.stop = index))"
        page.evaluate(f"[...document.querySelectorAll('{controls}')].{mark}")
        wanted = page.locator("[data-stop]").count()
        page.locator("article").evaluate("one => { one.tabIndex = -1; one.focus(); }")
        reached = set()
        for _ in range(wanted + 60):
            page.keyboard.press("Tab")
            at = page.evaluate("document.activeElement?.dataset?.stop")
            if at is not None:
                reached.add(at)
            if len(reached) == wanted:
                break
        assert len(reached) == wanted
