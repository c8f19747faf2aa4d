"""What-if in a real browser: the advantages that the run's own algorithm would compute, or a reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from oncurve.algos.advantages import grade
from oncurve.recipe.load import dump_recipe, parse_recipe
from oncurve.records import Aspect, GradedGroup, Group, Prompt, ScoredCompletion, ScoredGroup, StepReport
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
from tests.studio.browsing import a_browser, a_page
from tests.studio.samples import completion
from tests.studio.serving import served

pytestmark = pytest.mark.slow
Steps = Sequence[tuple[int, float]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


def scored_group(name: str, rewards: Sequence[float | None], steps: Sequence[Steps] | None = None) -> ScoredGroup:
    completions = []
    for index, reward in enumerate(rewards):
        outcome = () if reward is None else (Aspect("answer", reward, 1.0),)
        process = () if steps is None else (Aspect("process", None, 1.0, steps=tuple(steps[index])),)
        completions.append(ScoredCompletion(completion("abcdefg"[: 4 + index % 3], index), (*outcome, *process)))
    return ScoredGroup(
        Group(Prompt(name, text=f"{name}="), np.arange(3), tuple(s.completion for s in completions)), tuple(completions)
    )


def graded(groups: Sequence[ScoredGroup], settings: dict[str, Any]) -> list[GradedGroup]:
    return grade(groups, **{"baseline": "mean", "scale": "group", "eps": 1e-4, "mask_cut": False, **settings})


def write_run(runs_dir: Path, stage: dict[str, Any], groups: Sequence[GradedGroup]) -> RunFolder:
    recipe = {"name": "run", "task": {"type": "arithmetic"}, "rewards": [{"type": "answer"}]}
    run = RunFolder.create_at(runs_dir / "run")
    run.write_recipe(dump_recipe(parse_recipe({**recipe, "stages": [{"prompts_per_step": 3, "steps": 2, **stage}]}, [])))
    stats = tuple((None,) * len(group.graded) for group in groups)
    with RunWriter.create(run.path) as store:
        store.begin_stage(stage["type"], stage["type"], 0, 2)
        store.record_step(StepReport(stage["type"], 1, {"reward": 0.5}, {"sample": 0.1}, tuple(groups), stats))
    run.set_status("finished")
    return run


def advantages_shown(page: Page) -> list[float]:
    """By the completion's position."""
    found = {}
    for card in page.locator("article[data-place]").all():
        text = card.locator("[data-advantage]").inner_text()
        found[int(card.get_attribute("data-place") or "")] = float(text.replace("−", "-"))
    return [found[index] for index in sorted(found)]


def mean_advantages(group: GradedGroup) -> list[float]:
    return [float(tokens.mean()) for tokens in group.advantages]


OUTCOMES = [[1.0, 0.25, 0.0, 0.5], [0.0, 1.0, 1.0, 1.0], [2.0, -1.0, 0.5, 0.5]]


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        ({"type": "grpo"}, {}),
        ({"type": "grpo", "objective": "dr_grpo"}, {"scale": "none"}),
        ({"type": "grpo", "objective": "rloo"}, {"baseline": "leave_one_out", "scale": "none"}),
        ({"type": "grpo", "advantage": {"scale": "batch"}}, {"scale": "batch"}),
        ({"type": "grpo", "advantage": {"scale": "whiten", "baseline": "mean"}}, {"scale": "whiten"}),
        ({"type": "grpo", "advantage": {"scale": "whiten", "baseline": "none"}}, {"scale": "whiten", "baseline": "none"}),
        ({"type": "grpo", "advantage": {"scale": "none", "baseline": "none"}}, {"scale": "none", "baseline": "none"}),
        ({"type": "trpo"}, {}),
    ],
)
def test_the_runs_own_formula(tmp_path: Path, browser: Browser, stage: dict[str, Any], settings: dict[str, Any]) -> None:
    """Opened unchanged it shows the recorded advantages; then one reward changes."""
    groups = [scored_group(f"prompt-{index}", rewards) for index, rewards in enumerate(OUTCOMES)]
    recorded = graded(groups, settings)
    write_run(tmp_path, {"group_size": 4, **stage}, recorded)
    changed = [scored_group("prompt-0", [1.0, 0.25, 0.75, 0.5]), *groups[1:]]
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/groups/run/at/{stage['type']}/1/0") as watched:
        page = watched.page
        page.get_by_role("button", name="What if").click()
        expect(page.get_by_role("slider", name="Reward of completion 2")).to_be_visible()
        assert advantages_shown(page) == pytest.approx(mean_advantages(recorded[0]), abs=0.006)
        page.get_by_role("slider", name="Reward of completion 2").fill("0.75")
        assert advantages_shown(page) == pytest.approx(mean_advantages(graded(changed, settings)[0]), abs=0.006)


@pytest.mark.parametrize("outcomes", [(None,) * 4, (1.0, 0.0, 0.0, 1.0)])
def test_step_rewards(tmp_path: Path, browser: Browser, outcomes: tuple[float | None, ...]) -> None:
    """Each step's reward can be changed; with outcome rewards too, the two advantages add up."""
    steps = [[(1, 0.5), (3, -1.0)], [(2, 1.0)], [(0, -0.5), (4, 0.25)], []]
    group = scored_group("p", outcomes, steps)
    recorded = graded([group], {})
    write_run(tmp_path, {"type": "grpo", "group_size": 4}, recorded)
    changed = graded([scored_group("p", outcomes, [[(1, 0.5), (3, 1.0)], *steps[1:]])], {})[0]
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/groups/run/at/grpo/1/0") as watched:
        page = watched.page
        page.get_by_role("button", name="What if").click()
        expect(page.get_by_label("Reward of step 2 of completion 0")).to_be_visible()
        assert advantages_shown(page) == pytest.approx(mean_advantages(recorded[0]), abs=0.006)
        expect(page.get_by_text("has no signal")).to_have_count(0)
        assert page.get_by_label("Reward of completion 0", exact=True).count() == (0 if outcomes[0] is None else 1)
        page.get_by_label("Reward of step 2 of completion 0").fill("1")
        assert advantages_shown(page) == pytest.approx(mean_advantages(changed), abs=0.006)
        titles = [span.get_attribute("title") or "" for span in page.locator("article[data-place='0'] .text > span").all()]
        tokens = [float(t.split("advantage ")[1].split("\n")[0].replace("−", "-").replace("+", "")) for t in titles]
        assert tokens == pytest.approx(changed.advantages[0].tolist(), abs=0.006)


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        ({"type": "ppo"}, "critic"),
        ({"type": "grpo", "group_size": 4, "kl": {"beta": 0.1, "where": "reward"}}, "KL"),
        ({"type": "rejection_sample", "group_size": 4, "at_least": 0.0}, "does not train on advantages"),
    ],
)
def test_what_it_cannot_compute_is_off(tmp_path: Path, browser: Browser, stage: dict[str, Any], reason: str) -> None:
    recorded = graded([scored_group("p", OUTCOMES[0])], {})
    write_run(tmp_path, stage, recorded)
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/groups/run/at/{stage['type']}/1/0") as watched:
        page = watched.page
        page.get_by_role("button", name="What if").click()
        expect(page.locator("[data-off]")).to_contain_text(reason)
        assert page.get_by_role("slider", name="Reward of completion 0").count() == 0
        assert advantages_shown(page) == pytest.approx(mean_advantages(recorded[0]), abs=0.006)


def test_advantages_that_the_recipe_does_not_explain_turn_it_off(tmp_path: Path, browser: Browser) -> None:
    recorded = graded([scored_group("p", OUTCOMES[0])], {})
    other = [replace(group, advantages=tuple(2 * tokens for tokens in group.advantages)) for group in recorded]
    write_run(tmp_path, {"type": "grpo", "group_size": 4}, other)
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/groups/run/at/grpo/1/0") as watched:
        watched.page.get_by_role("button", name="What if").click()
        expect(watched.page.locator("[data-off]")).to_contain_text("recorded advantages are not those")


def test_tokens_take_the_colour_of_the_new_advantage_and_a_reload_keeps_it(tmp_path: Path, browser: Browser) -> None:
    write_run(tmp_path, {"type": "grpo", "group_size": 4}, graded([scored_group("p", OUTCOMES[0])], {}))
    with served(tmp_path) as here, a_page(browser, f"{here.address}/#/groups/run/at/grpo/1/0") as watched:
        page = watched.page
        token = page.locator("article[data-place='0'] .text > span").first

        def red_minus_green() -> int:
            red, green, *_ = token.evaluate("e => getComputedStyle(e).backgroundColor.match(/\\d+/g).map(Number)")
            return int(red - green)

        assert red_minus_green() < 0, "teal: made more likely"
        page.get_by_role("button", name="What if").click()
        page.get_by_role("slider", name="Reward of completion 0").fill("0")
        page.get_by_role("slider", name="Reward of completion 2").fill("1")
        assert red_minus_green() > 0, "orange: made less likely"
        before = advantages_shown(page)
        page.reload()
        expect(page.get_by_role("slider", name="Reward of completion 0")).to_have_value("0")
        assert advantages_shown(page) == before
        assert red_minus_green() > 0
