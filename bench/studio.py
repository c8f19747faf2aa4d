"""How fast the studio is: first paint, a group, a search, and what is sent, for a run of yours and for a million completions.

    python bench/studio.py runs/arithmetic-1            # needs Chromium
    python bench/studio.py --million                    # makes a run of 990,000 completions in a temporary folder first

Each time is the best of five. On a busy machine times say nothing: the load is printed first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.studio.samples import make_large_run
from tests.studio.serving import Served, served

STEPS = 2000
"""Of the run of a million completions."""
GOALS_MS = {"first paint": 400.0, "group": 100.0, "search": 300.0}
MILLION_GOALS_MS = {
    "runs": 1000.0,
    "runs/million/curves": 1000.0,
    "runs/million/step?stage=grpo&step=1500": 200.0,
    "runs/million/search": 200.0,
    "runs/million/search?before=500000": 200.0,
    "runs/million/search?failed=true": 200.0,
    "runs/million/search?no_signal=true": 200.0,
    "runs/million/search?aspect=answer:ge:1&aspect=format:lt:1": 200.0,
    "runs/million/search?text=thought+123456": 200.0,
    "runs/million/search?text=nowhere+to+be+found": 200.0,
    "runs/million/search?stage=grpo&step=1500": 200.0,
    "runs/million/prompt?id=sums/77": 200.0,
    "runs/million/rewards": 500.0,
}
"""Requests to a run of a million completions."""


def best_of(count: int, measure: Callable[[], float]) -> float:
    return min(measure() for _ in range(count))


def request_ms(studio: Served, path: str) -> float:
    began = time.perf_counter()
    answer = studio.ask(path, {"accept-encoding": "gzip"})
    assert answer.status == 200, answer.body
    return 1000 * (time.perf_counter() - began)


def first_paint_ms(page: Page, address: str) -> float:
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("h1")
    page.wait_for_timeout(300)
    return float(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))


def next_group_ms(page: Page) -> float:
    """From the key to the next group on the screen, which must show completions with their tokens."""
    shown: dict[str, float] = page.evaluate(
        """() => new Promise((resolve) => {
        const main = document.querySelector('[data-shown]'), before = main.dataset.shown, began = performance.now();
        const count = (selector) => main.querySelectorAll(selector).length;
        new MutationObserver((_, observer) => { if (main.dataset.shown && main.dataset.shown !== before) {
        observer.disconnect(); requestAnimationFrame(() => resolve({ ms: performance.now() - began,
            completions: count('article[data-place]'), tokens: count('article[data-place] [data-t]') })); } })
        .observe(main, { attributes: true });
        document.body.dispatchEvent(new KeyboardEvent('keydown', { key: 'n', bubbles: true })); })"""
    )
    assert shown["completions"], "the page shows a group without completions"
    assert shown["tokens"], "the page shows completions without tokens"
    return shown["ms"]


def measure(studio: Served, run: str, stage: str, step: int) -> dict[str, float]:
    group = f"/api/runs/{run}/group?stage={stage}&step={step}&position=0"
    completions = studio.ask(group).json["completions"]
    assert completions, f"{group} has no completions"
    assert any(one["tokens"]["ids"] for one in completions), f"the completions of {group} have no tokens"
    texts = ("no+such+text+anywhere", "1", "think")
    return {
        "group": best_of(5, lambda: request_ms(studio, group)),
        "step": best_of(5, lambda: request_ms(studio, f"/api/runs/{run}/step?stage={stage}&step={step}")),
        "search": max(best_of(5, lambda t=text: request_ms(studio, f"/api/runs/{run}/search?text={t}")) for text in texts),  # type: ignore[misc]
        "curves": best_of(5, lambda: request_ms(studio, f"/api/runs/{run}/curves")),
    }


def in_browser(studio: Served, run: str, stage: str, step: int) -> dict[str, float]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        paint = best_of(5, lambda: first_paint_ms(browser.new_context().new_page(), f"{studio.address}/#/runs?run={run}"))
        page = browser.new_page()
        page.goto(f"{studio.address}/#/groups/{run}/at/{stage}/{step}/0")
        page.wait_for_selector("article[data-place]")
        moves = best_of(5, lambda: next_group_ms(page))
        browser.close()
    return {"first paint": paint, "group": moves}


def report(title: str, figures: dict[str, float], goals: dict[str, float]) -> None:
    for name, value in figures.items():
        goal = goals.get(name)
        verdict = "" if goal is None else f"  (goal {goal:.0f} ms: {'met' if value <= goal else 'missed'})"
        print(f"{title:24} {name:60} {value:8.1f} ms{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="a run's folder")
    parser.add_argument("--million", action="store_true", help="a run of a million completions")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load {load:.1f}" + (": this machine is busy, so these times are not a measurement" if load > 0.5 else ""))
    with tempfile.TemporaryDirectory() as temporary:
        path = (
            make_large_run(Path(temporary), "million", STEPS, range(2, STEPS + 1)).path if arguments.million else arguments.run
        )
        if path is None:
            parser.error("name a run's folder, or add --million")
        with served(path.parent) as studio:
            stages = next(run for run in studio.ask("/api/runs").json if run["name"] == path.name)["stages"]
            stage = next(one for one in reversed(stages) if one["done"])
            step = max(1, stage["done"] // 2)
            report(f"{path.name}, requests", measure(studio, path.name, stage["name"], step), GOALS_MS)
            report(f"{path.name}, in Chromium", in_browser(studio, path.name, stage["name"], step), GOALS_MS)
            if arguments.million:
                times = {view: best_of(5, lambda v=view: request_ms(studio, f"/api/{v}")) for view in MILLION_GOALS_MS}  # type: ignore[misc]
                report("each view", times, MILLION_GOALS_MS)
            for asset in ("", "api/runs", f"api/runs/{path.name}/curves"):
                plain, packed = (studio.ask(f"/{asset}", {"accept-encoding": way}).body for way in ("identity", "gzip"))
                print(f"{'/' + asset:45} {len(plain):9,} bytes, {len(packed):9,} sent")


if __name__ == "__main__":
    main()
