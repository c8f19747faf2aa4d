"""Write the gallery: every recipe with its curve, and with one of its groups if a CPU can train it; pictures of the studio.

python docs/make_gallery.py RUNS                 # a folder for the runs; those that are finished are not trained again
python docs/make_gallery.py RUNS --finished      # trains nothing: recipes without a finished run keep their entry
python docs/make_gallery.py RUNS --pictures      # only the pictures of the studio

Writes docs/gallery.md and docs/images. Takes about half an hour on two cores. Recipes that need a GPU are not trained: their
curves are those of bench/results.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page

import oncurve
from oncurve.records import GradedGroup
from oncurve.studio.report import chart

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
CPU_RECIPES = (
    "arithmetic",
    "imitation-only",
    "countdown",
    "backwards",
    "compare",
    "guess",
    "calculator",
    "agent-safe",
    "agent-sort",
    "agent-wordle",
    "iterative",
)
"""Recipes that train from scratch on a CPU in minutes."""
GPU_RECIPES = {
    "gsm8k-qwen": "real-gsm8k-qwen-1",
    "gsm8k-qwen-lora": "real-gsm8k-qwen-lora-0",
    "gsm8k-smollm2": "real-gsm8k-smollm2-1",
    "gsm8k-smollm2-lora": None,
    "math-qwen": "real-math-qwen-1",
    "mbpp-qwen": None,
    "agent-gsm8k": None,
    "agent-repair": None,
    "rlhf": "frontier",
    "r1-zero": None,
    "r1": None,
    "training-free": None,
}
"""Recipes that need a pretrained model, and in practice a GPU: the file of bench/results with their measurement."""
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
STYLE = (
    "<style>text{fill:#7a7f87;font:11px sans-serif}.grid{stroke:#8a8f9740}"
    ".line{stroke:#2b87c2;fill:none;stroke-width:1.8}.dot{fill:#2b87c2}</style>"
)
"""Colours that can be read on a white and on a dark page."""


def train(recipe: str, runs: Path) -> oncurve.Run:
    folder = runs / recipe
    command = [sys.executable, "-m", "oncurve", "train", recipe, "--out", str(folder), "--resume"]
    if not (folder / "model").is_dir():
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return oncurve.Run.open(folder)


def write_chart(name: str, title: str, points: list[tuple[int, float]]) -> None:
    folder = IMAGES / "gallery"
    folder.mkdir(parents=True, exist_ok=True)
    svg = chart(title, points)
    head, _, body = svg.partition(">")
    (folder / f"{name}.svg").write_text(f'{head} xmlns="http://www.w3.org/2000/svg">{STYLE}{body}\n', encoding="utf-8")


def characteristic_group(run: oncurve.Run, step: int) -> int:
    """The group of a step whose rewards differ most: it shows what the update compares."""

    def spread(group: GradedGroup) -> float:
        totals = [scored.total for scored in group.scored.scored if scored.total is not None]
        return max(totals) - min(totals) if totals else 0.0

    groups = run.groups(step)
    return max(range(len(groups)), key=lambda index: spread(groups[index]))


def about(recipe: str) -> str:
    """The first paragraph of the comment at the top of a recipe, without its commands and what follows "The data"."""
    source = (ROOT / "recipes" / f"{recipe}.toml").read_text(encoding="utf-8")
    comment = re.match(r"(?:# [^\n]*\n)+", source)
    lines = [line.removeprefix("# ") for line in comment[0].splitlines()] if comment else []
    lines = list(itertools.takewhile(lambda line: not line.startswith("The data"), lines))
    text = " ".join(line for line in lines if "oncurve " not in line)
    return f"{text[:-1]}." if text.endswith(":") else text


def cpu_section(recipe: str, runs: Path, *, may_train: bool) -> str:
    heading = [f"### {recipe}", about(recipe)]
    if not may_train and not (runs / recipe / "model").is_dir():
        kept = earlier_entry(recipe)
        if "\n![" in kept:
            return "\n\n".join([*heading, kept])
        told = f"`oncurve train {recipe}` ([the recipe](../recipes/{recipe}.toml)). It was not trained for this page"
        return "\n\n".join([*heading, f"{told}{why_not_trained(recipe)}.{measured_where(recipe)}"])
    run = train(recipe, runs)
    evals = run.evals
    before, after = evals[0], evals[-1]
    measure = "held-out accuracy" if after.accuracy is not None else "held-out reward"
    values = [f"{100 * e.accuracy:.1f} %" if e.accuracy is not None else f"{e.reward:.2f}" for e in (before, after)]
    rewards = run.metrics("reward")
    metric = "reward" if rewards else "loss"
    curve = rewards or run.metrics(metric)
    title = "Mean reward" if rewards else "Loss"
    write_chart(recipe, f"{title.lower()} of {recipe}", curve)
    parts = [
        *heading,
        f"`oncurve train {recipe}` ([the recipe](../recipes/{recipe}.toml)): {measure} is {values[0]} after {before.stage} "
        f"step {before.step:,} and {values[1]} after {after.stage} step {after.step:,} ({after.asked} prompts). {title} of "
        "each step:",
        f"![{title} of each step](images/gallery/{recipe}.svg)",
    ]
    return "\n\n".join([*parts, *(group_of(run, rewards[len(rewards) // 3][0]) if rewards else ())])


def earlier_entry(recipe: str) -> str:
    """The page's present text about a recipe, from its command on: the result and the curve of a run that is not in this
    folder."""
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    entry = page.partition(f"\n### {recipe}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
    return "".join(entry.partition(f"`oncurve train {recipe}`")[1:]).strip()


def why_not_trained(recipe: str) -> str:
    """A recipe whose length is a time has to be trained on an idle machine."""
    stages = tomllib.loads((ROOT / "recipes" / f"{recipe}.toml").read_text(encoding="utf-8"))["stages"]
    seconds = next((stage["seconds"] for stage in stages if "seconds" in stage), None)
    reason = f": it trains for {seconds} seconds, so its curve depends on the speed of the machine, which must be idle"
    return "" if seconds is None else reason


def measured_where(recipe: str) -> str:
    """A link to the page that has figures of a recipe."""
    pages = {
        "results.md": f"`oncurve train {recipe}",
        "compare.md": f"recipes/{recipe}.toml",
        "tasks.md": f"`oncurve train {recipe}",
    }
    for page, mention in pages.items():
        if mention in (ROOT / "docs" / page).read_text(encoding="utf-8"):
            return f" Measured figures are in [{page.removesuffix('.md')}]({page})."
    return ""


def group_of(run: oncurve.Run, step: int) -> tuple[str, str]:
    """The group of a step whose rewards differ most, as `oncurve show` prints it."""
    command = ["show", str(run.path), "--step", str(step), "--group", str(characteristic_group(run, step))]
    environment = {"COLUMNS": "118", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(
        [sys.executable, "-m", "oncurve", *command], env=environment, check=True, capture_output=True, text=True
    ).stdout
    table, _, _ = shown.partition("\n\n")  # each completion in full follows
    text = "\n".join(line.rstrip() for line in table.splitlines())
    return f"The group of step {step} whose rewards differ most:", f"```text\n{text}\n```"


def gpu_section(recipe: str, result: str | None) -> str:
    parts = [f"### {recipe}", about(recipe)]
    needs = f"It needs a pretrained model, and in practice a GPU ([the recipe](../recipes/{recipe}.toml))."
    if result is None:
        return "\n\n".join([*parts, f"{needs} It has not been measured, so there is no curve."])
    file = ROOT / "bench" / "results" / f"{result}.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    if recipe == "rlhf":
        stage, what = data["runs"]["0.1"], "SmolLM2-135M, β = 0.1"
    else:
        stage, what = data["run"]["grpo"], f"{Path(data['model']).name}, seed {data['seed']}"
    curve = stage["curves"]["reward"]
    points = [(int(step), float(value)) for step, value in curve] if isinstance(curve[0], list) else list(enumerate(curve, 1))
    write_chart(recipe, f"mean reward of {recipe}", points)
    measured = f"It was measured with {what}, for {len(points)} steps on an {data['machine']['device']}"
    return "\n\n".join(
        [
            *parts,
            f"{needs} {measured} (`bench/results/{file.name}`, explained in [results](results.md)). The groups of this run "
            "were not recorded. Mean reward of each step:",
            f"![Mean reward of each step](images/gallery/{recipe}.svg)",
        ]
    )


@contextmanager
def open_studio(runs: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "oncurve", "studio", "--runs", str(runs), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
        yield address.rstrip("/")
    finally:
        process.terminate()
        process.wait()


def take_pictures(runs: Path) -> None:
    """Screenshots of each page of the studio, and a short animation of a group."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    run = oncurve.Run.open(runs / "arithmetic")
    group = f"#/groups/arithmetic/at/grpo/20/{characteristic_group(run, 20)}"
    pages = {
        "studio-run": "#/runs?run=arithmetic",
        "studio-group": group,
        "studio-rewards": "#/rewards/arithmetic",
        "studio-plan": "#/plan",
        "studio-learn": "#/learn/advantages",
    }
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    with open_studio(runs) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 760})
        for name, place in pages.items():
            page.goto(f"{address}/{place}")
            wait_until_drawn(page)
            save_small(Image.open(io.BytesIO(page.screenshot())), IMAGES / f"{name}.png")
        page.set_viewport_size({"width": 960, "height": 640})
        page.goto(f"{address}/{group}")
        wait_until_drawn(page)
        frames = []
        for key in ("", "", "c", "c", "c", "c", "]", "]", "n", "n", "w", ""):
            if key:
                page.keyboard.press(key)
            page.wait_for_timeout(900)
            frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB").resize((720, 480)))
        frames[0].save(
            IMAGES / "studio.webp", save_all=True, append_images=frames[1:], duration=1100, loop=0, quality=60, method=6
        )
        browser.close()


def wait_until_drawn(page: Page) -> None:
    """Waits for the heading and the run's verdicts, then until the page has not changed for two seconds. Waiting for the end
    of all requests would take forever, because the stream of news about live runs stays open."""
    page.wait_for_selector("h1")
    page.get_by_text("Checking the run").first.wait_for(state="hidden")
    text = "document.body.innerHTML.length"
    length = -1
    while length != (length := page.evaluate(text)):
        page.wait_for_timeout(2000)


def save_small(image: object, path: Path) -> None:
    """Saves a PNG with a palette, which is a third of the size; on a page of text and lines no difference is visible."""
    image.convert("RGB").quantize(128).save(path, optimize=True)  # type: ignore[attr-defined]


HEAD = """\
<!-- Made by docs/make_gallery.py: run it again instead of editing this page. -->

# Gallery

This page shows every built-in recipe: what it does, its curve if it has been trained, and one of its groups if it was trained
on a CPU. `python docs/make_gallery.py RUNS` trains the CPU recipes and writes this page and its pictures.

![The studio: colour the tokens of a group, step through training, and change a reward](images/studio.webp)

| | |
|---|---|
| ![Curves of a run](images/studio-run.png) | ![One group](images/studio-group.png) |
| ![Rewards of a run](images/studio-rewards.png) | ![The planner](images/studio-plan.png) |"""


def main() -> None:
    runs = Path(sys.argv[1]).resolve()
    runs.mkdir(parents=True, exist_ok=True)
    may_train = "--finished" not in sys.argv
    if "--pictures" not in sys.argv:
        parts = [HEAD, "## On a CPU", *(cpu_section(recipe, runs, may_train=may_train) for recipe in CPU_RECIPES)]
        parts += ["## On a GPU", *(gpu_section(recipe, result) for recipe, result in GPU_RECIPES.items())]
        (ROOT / "docs" / "gallery.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    if may_train:
        train("arithmetic", runs)
    if (runs / "arithmetic" / "model").is_dir():
        take_pictures(runs)


if __name__ == "__main__":
    main()
