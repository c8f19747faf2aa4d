"""The pages are programs. Tutorials and how-to pages run in an empty folder, as a reader would; the others in a folder with a
short run, with every command in this process.

Trainings that take minutes are shortened here, by the settings in `SHORTER`; nothing else is changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from oncurve.cli.app import main
from oncurve.recipe.load import parse_recipe

ROOT = Path(__file__).parents[2]
BLOCKS = runpy.run_path(str(ROOT / "docs" / "code_blocks.py"))
PAGES = [page for folder in BLOCKS["RUN_FOLDERS"] for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
FEW_STEPS = " --set sft.steps=60 --set grpo.steps=20 --set grpo.optimiser.warmup_steps=2 --set grpo.eval_every=0"
SHORTER = {
    "oncurve train arithmetic --out runs/arithmetic-1": FEW_STEPS,
    "oncurve train shop.toml --out runs/shop": " --set sft.steps=30 --set grpo.prompts_per_step=2",
}
"""What is appended to a command that would take minutes."""
TIMEOUT_S = 900
RUN_SCRIPT = """
import sys, types
module = types.ModuleType("__main__")
for name in sys.argv[1:]:
    exec(compile(open(name).read(), name, "exec"), module.__dict__)
"""


def run(command: list[str], folder: Path, blocks: str) -> str:
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    done = subprocess.run(
        command, cwd=folder / "work", env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{blocks}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def prepare(folder: Path) -> None:
    """A folder with the commands `oncurve` and `python` of this environment."""
    (folder / "work").mkdir()
    (folder / "bin").mkdir()
    for name, arguments in (("oncurve", "-m oncurve "), ("python", "")):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments}"$@"\n')
        script.chmod(0o755)


def run_page(page: Path, folder: Path) -> str:
    """Runs a page and returns what its commands print."""
    prepare(folder)
    output = ""
    python_blocks: list[str] = []
    for number, block in enumerate(BLOCKS["read_blocks"](page.read_text(encoding="utf-8"))):
        if block.reason is not None or block.language == "text":
            continue
        if block.title is not None:
            (folder / "work" / block.title).write_text(block.body)
        elif block.language == "sh":
            body = block.body
            for command, more in SHORTER.items():
                body = body.replace(command, command + more)
            output += run(["bash", "-e", "-o", "pipefail", "-c", body], folder, body)
        elif block.language == "python":
            python_blocks.append(str(folder / f"block{number}.py"))
            Path(python_blocks[-1]).write_text(block.body)
        else:
            raise AssertionError(f"{page.name}: a block of {block.language} needs a title, or a reason why it is not run")
    if python_blocks:
        output += run([sys.executable, "-c", RUN_SCRIPT, *python_blocks], folder, "\n".join(python_blocks))
    return output


EXPECTED: dict[str, list[str]] = {
    "install.md": ["0.2.0"],
    "first-run.md": ["held-out accuracy", "group_size", "small-groups"],
    "own-reward.md": ["mean reward:", "starts_right"],
    "own-data.md": ["answer", "words.jsonl", "exit code 2"],
    "agent.md": ["shop"],
    "stop-and-resume.md": ["small-slower", "20"],
    "lora.md": ["adapter_model.safetensors"],
    "evaluate.md": ["95 %", "exact_match,none"],
    "share.md": ["report.html", "chosen"],
}
"""Texts that a page's commands must print."""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    output = run_page(page, tmp_path)
    assert [text for text in EXPECTED.get(page.name, []) if text not in output] == [], output[-3000:]


# The other pages: commands run in this process, in one folder that has what they name.

REFERENCE_PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if page.name not in BLOCKS["RUN_BY_OTHER_TESTS"] and BLOCKS["read_blocks"](page.read_text(encoding="utf-8"))
]
SMALL = ["model.tiny.layers=1", "model.tiny.width=32", "model.tiny.mlp_width=64", "threads=1", "sft.steps=2", "task.heldout=4"]
SMALL += ["sft.optimiser.warmup_steps=1", "grpo.optimiser.warmup_steps=1", "grpo.sampling.max_new_tokens=4"]
SMALL_SETS = " ".join(f"--set {change}" for change in SMALL)
TWO_STEPS = f"{SMALL_SETS} --set grpo.steps=2 --set grpo.prompts_per_step=2 --set grpo.group_size=2 --set grpo.eval_every=0"
SHORTER_COMMANDS = {
    "oncurve train recipes/arithmetic.toml": TWO_STEPS,
    "oncurve train arithmetic --set scale.ranks=2": TWO_STEPS,
    "oncurve train capitals.toml": "--set grpo.steps=2",
    "oncurve fork arithmetic-1@best": "--set grpo.prompts_per_step=2 --set grpo.steps=102",
    "oncurve compare": TWO_STEPS.replace("--set task.heldout=4", "--set task.heldout=4 --set engine.slots=4"),
    "oncurve probe": "--prompts 2 --samples 2",
    "oncurve eval": "--set task.heldout=4",
}
"""What is appended to commands that would take minutes."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short run `arithmetic-1` and the files that the pages' commands name. A model of a few thousand weights
    in models/ stands in for a pretrained one."""
    folder = tmp_path_factory.mktemp("workshop")
    prepare(folder)
    work = folder / "work"
    (work / "recipes").symlink_to(ROOT / "recipes")
    length = '[[rewards]]\ntype = "length"\ntarget = 2\ntolerance = 4\n'  # differs within groups of an untrained model too
    (work / "varied.toml").write_text((ROOT / "recipes" / "arithmetic.toml").read_text() + length)
    (work / "stricter.toml").write_text(
        (ROOT / "recipes" / "arithmetic.toml").read_text().replace("weight = 0.1", "weight = 1.0")
    )
    (work / "grpo_config.yaml").write_text("learning_rate: 1.0e-5\nnum_generations: 4\nper_device_train_batch_size: 4\n")
    rows = [json.dumps({"country": f"land {n}", "answer": f"town {n}"}) for n in range(40)]
    (work / "capitals.jsonl").write_text("\n".join(rows))
    often = "--set grpo.eval_every=100 --set grpo.save_every=100 --set grpo.keep_checkpoints=9"
    few = "--set grpo.steps=200 --set grpo.prompts_per_step=4 --set grpo.group_size=2"
    train = f"oncurve train varied.toml {SMALL_SETS} {few} {often}"
    chat = f"oncurve train arithmetic --out models/chat {TWO_STEPS} --set model.tiny.chat=true"
    with contextlib.chdir(work):
        for command in (train, chat):
            assert main(shlex.split(command)[1:]) == 0, command
        Path("models/chat/model").rename("models/SmolLM2-135M-Instruct")
    return folder


def run_line(line: str, folder: Path) -> None:
    words = shlex.split(line, comments=True)
    if not words:
        return
    if "|" in words:
        run(["bash", "-e", "-o", "pipefail", "-c", line], folder, line)
        return
    assert words[0] == "oncurve", f"{line}: a command of another program needs a reason why it is not run"
    more = [options for start, options in SHORTER_COMMANDS.items() if line.startswith(start)]
    assert main([*words[1:], *shlex.split(" ".join(more))]) == 0, line


def parse_part(body: str) -> None:
    """A part of a recipe is one if a task, a reward and a stage complete it."""
    part = tomllib.loads(body)
    task = {"type": "file", "path": "rows.jsonl", **part.get("task", {})}
    stages = part.get("stages", [{"type": "grpo"}])
    parse_recipe({"name": "part", "rewards": [{"type": "answer"}], **part, "task": task, "stages": stages})


@pytest.mark.slow
@pytest.mark.parametrize("page", REFERENCE_PAGES, ids=lambda page: page.stem)
def test_a_reference_page_runs(page: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop / "work")
    Path("report.html").unlink(missing_ok=True)  # two pages write it, and nothing is overwritten
    for block in BLOCKS["read_blocks"](page.read_text(encoding="utf-8")):
        if block.reason is not None or block.language == "text":
            continue
        if block.title is not None:
            Path(block.title).write_text(block.body)
            if block.title.endswith(".py"):
                compile(block.body, block.title, "exec")
        elif block.language == "sh":
            for line in block.body.replace("\\\n", " ").splitlines():
                run_line(line, workshop)
        elif block.language == "toml":
            parse_part(block.body)
        elif page.name == "serving.md":
            run_client(block.body, workshop)
        else:
            exec(block.body.replace("rewards=[starts_right],", "rewards=[starts_right], steps=2, quiet=True,"), {})


def run_client(code: str, folder: Path) -> None:
    """Runs a page's client against a server that is started for it."""
    command = [str(folder / "bin" / "oncurve"), "serve", "arithmetic-1", "--port", "0", "--json", "--until-closed"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        address = json.loads(server.stdout.readline())["address"]
        names: dict[str, Any] = {}
        assert code.count("http://127.0.0.1:8000") == 1
        exec(code.replace("http://127.0.0.1:8000", address), names)
        assert len(names["response"].choices) == 8
        server.stdin.close()


ALL_PAGES = [*PAGES, *REFERENCE_PAGES]


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_every_block_says_how_it_is_run(page: Path) -> None:
    """Runs without commands, so that a typo in a mark is found quickly."""
    text = page.read_text(encoding="utf-8")
    blocks: list[Any] = BLOCKS["read_blocks"](text)
    fences = re.findall(r"^```\w", text, re.MULTILINE)
    assert len(blocks) == len(fences)
    assert text.count("<!-- needs") + text.count("<!-- not run") == sum(block.reason is not None for block in blocks)
    for block in blocks:
        languages = ("sh", "python", "text", *(() if page in PAGES else ("toml",)))
        assert block.language in languages or block.title is not None or block.reason is not None


MEASURED_PAGES = ("results.md", "compare.md", "faults.md")


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_only_commands_of_measurements_are_not_blocks(page: Path) -> None:
    indented = BLOCKS["COMMAND"].findall(BLOCKS["FENCE"].sub("", page.read_text(encoding="utf-8")))
    assert page.name in MEASURED_PAGES or indented == []


def test_counting_sorts_blocks_by_what_happens_to_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\ntrue\n```\n\n<!-- needs a GPU -->\n```sh\noncurve train x\n```\n\n```text\nout\n```\n\n    oncurve runs\n\n"
        "```toml\nseed = 1\n```\n"
    )
    assert BLOCKS["count_blocks"]([page]) == {
        "run by tests": 1,
        "needs a GPU": 1,
        "output": 1,
        "parsed as a part of a recipe by tests": 1,
        BLOCKS["MEASUREMENTS"]: 1,
    }
