"""The current code shows, verifies and replays the stored runs of version 1: command line, `import oncurve` and HTTP.

What is expected was written down when version 1 made the runs: `facts.json` without Oncurve, `told.json` by its own commands.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest

import oncurve as package
from tests.version1.conftest import Oncurve
from tests.version1.make_data import options_in
from tests.version1.versions import DATA, ROOT, RUNS, SAMPLED, groups_by_reward, weights_digest

EXPECTED: dict[str, Any] = json.loads((DATA / "told.json").read_text(encoding="utf-8"))
OPTIONS: dict[str, list[str]] = json.loads((DATA / "commands.json").read_text(encoding="utf-8"))
JSON_COMMANDS = [command for command in EXPECTED if command.endswith("--json")]

Facts = dict[str, Any]


@pytest.mark.parametrize("command", JSON_COMMANDS)
def test_json_is_what_version_1_printed(oncurve: Oncurve, command: str) -> None:
    output = oncurve(*command.split())
    assert output.code == 0
    assert output.json == EXPECTED[command]


@pytest.mark.parametrize("name", RUNS)
def test_show_has_the_facts_of_a_run(oncurve: Oncurve, facts: Facts, name: str) -> None:
    expected, shown = facts[name], oncurve("show", name, "--json").json
    assert shown["status"] == expected["status"]
    assert shown["stages"] == expected["stages"]
    measured = [(e["stage"], e["step"], e["accuracy"], e["asked"], e["reward"]) for e in shown["evals"]]
    assert measured == [(e["stage"], e["step"], e["accuracy"], e["asked"], e["metrics"]["reward"]) for e in expected["evals"]]
    for stage, metrics in expected["last_metrics"].items():
        assert {metric: shown["last_metrics"][stage][metric] for metric in metrics} == metrics


@pytest.mark.parametrize("name", SAMPLED)
def test_show_has_the_facts_of_a_group(oncurve: Oncurve, facts: Facts, name: str) -> None:
    group = facts[name]["group"]
    place = ["--stage", group["stage"], "--step", group["step"], "--group", group["position"]]
    output = oncurve("show", name, *place, "--json").json
    assert (output["prompt_id"], output["prompt"], output["has_signal"]) == (
        group["prompt_id"],
        group["prompt"],
        group["has_signal"],
    )
    by_text = {completion["text"]: completion for completion in output["completions"]}
    assert len(by_text) == len(output["completions"]) == len(group["completions"])
    for completion in group["completions"]:
        seen = by_text[completion["text"]]
        assert (seen["stop"], seen["reward"]) == (completion["stop"], completion["reward"])
        assert seen["advantage"] == pytest.approx(completion["advantage"], rel=1e-5)
    shown = oncurve("show", name, *place).out
    assert group["prompt"] in shown
    for completion in group["completions"]:
        assert f"{completion['reward']:.2f}" in shown


@pytest.mark.parametrize("name", SAMPLED)
def test_python_reads_a_group_bit_for_bit(version1_work: Path, facts: Facts, name: str) -> None:
    expected = facts[name]["group"]
    run = package.Run.open(name, version1_work / "runs")
    graded = run.groups(expected["step"], expected["stage"])[expected["position"]]
    assert graded.group.prompt.id == expected["prompt_id"]
    found = [
        (one.completion.token_ids.tolist(), one.completion.logps.tolist(), one.total, advantages.tolist())
        for one, advantages in zip(graded.scored.scored, graded.advantages, strict=True)
    ]
    assert found == [(c["token_ids"], c["logps"], c["reward"], c["advantages"]) for c in expected["completions"]]


@pytest.mark.parametrize("name", RUNS)
def test_python_reads_a_run(version1_work: Path, facts: Facts, name: str) -> None:
    expected = facts[name]
    run = package.Run.open(name, version1_work / "runs")
    assert run.status == expected["status"]
    assert (run.accuracy, run.heldout_reward) == (
        expected["evals"][-1]["accuracy"],
        expected["evals"][-1]["metrics"]["reward"],
    )
    stage = expected["stages"][-1]
    assert [step for step, _ in run.metrics("loss" if name in ("dpo", "rejection") else "reward")] == [
        *range(1, stage["done"] + 1)
    ]
    assert run.recipe.name == name


@pytest.mark.parametrize("name", RUNS)
def test_verify_finds_no_damage(oncurve: Oncurve, version1_work: Path, facts: Facts, name: str) -> None:
    output = oncurve("verify", name, "--json")
    assert output.code == 0
    marks = {check["name"]: check["mark"] for check in output.json["checks"]}
    checkpoints = {path.name for path in (version1_work / "runs" / name / "checkpoints").iterdir()}
    stages = {f"stage {stage['name']}" for stage in facts[name]["stages"]}
    assert marks.keys() == {"run.json", "recipe.toml", "run.db", "model", *checkpoints, *stages}
    assert len(checkpoints) >= 2
    assert marks.pop("model") == ("note" if name == "stopped" else "ok")
    assert set(marks.values()) == {"ok"}
    assert weights_digest(version1_work / "runs" / name) == facts[name]["weights"]


def test_verify_still_sees_a_byte_that_changed(oncurve: Oncurve, version1_work: Path) -> None:
    """The check of version 1's manifests is a real one."""
    file = version1_work / "runs" / "grpo" / "checkpoints" / "grpo-000002" / "optimiser.safetensors"
    whole = file.read_bytes()
    try:
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        output = oncurve("verify", "grpo", "--json")
    finally:
        file.write_bytes(whole)
    assert output.code == 2
    assert [check["name"] for check in output.json["checks"] if check["mark"] == "wrong"] == ["grpo-000002"]


def test_commands_for_people_name_every_run_and_rank(oncurve: Oncurve) -> None:
    listed = oncurve("runs").out
    assert {line.split()[0] for line in listed.splitlines()} >= set(RUNS)
    status = oncurve("status", "two_ranks").out
    assert "two_ranks" in status
    assert [line.split()[0] for line in status.splitlines() if line.startswith("rank-")] == ["rank-0", "rank-1"]


@pytest.mark.parametrize("name", SAMPLED)
def test_pairs_are_those_of_version_1(oncurve: Oncurve, tmp_path: Path, name: str) -> None:
    file = tmp_path / "pairs.jsonl"
    assert oncurve("pairs", name, "-o", file).code == 0
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert found == [json.loads(line) for line in EXPECTED[f"pairs {name}"]]


def test_a_run_without_groups_has_no_pairs(oncurve: Oncurve, tmp_path: Path) -> None:
    assert oncurve("pairs", "dpo", "-o", tmp_path / "pairs.jsonl").code == 2


@pytest.mark.parametrize("name", RUNS)
def test_report_holds_the_run(oncurve: Oncurve, version1_work: Path, facts: Facts, tmp_path: Path, name: str) -> None:
    file = tmp_path / "report.html"
    assert oncurve("report", name, "-o", file).code == 0
    html = file.read_text()
    assert escape((version1_work / "runs" / name / "recipe.toml").read_text()) in html
    for evaluation in facts[name]["evals"]:
        assert f"{100 * evaluation['accuracy']:.1f} %" in html
    sampled = facts[name]["group"]
    ranked = groups_by_reward(version1_work / "runs" / name, sampled["stage"]) if sampled else []
    assert bool(ranked) == (name in SAMPLED)
    for group in (*ranked[:1], *ranked[-1:]):
        for text, reward in group:
            assert escape(text) in html
            assert f"reward {reward:.2f}" in html


@pytest.mark.parametrize("name", ["grpo", "ppo", "reward_model", "lora", "two_ranks", "stopped"])
def test_rewards_replay_gives_the_same_rewards(oncurve: Oncurve, facts: Facts, name: str) -> None:
    """Those of rules, and that of the reward model that the run trained."""
    output = oncurve("rewards", "replay", name)
    assert output.code == 0
    step = EXPECTED[f"show {name} --stage {facts[name]['group']['stage']} --step {facts[name]['group']['step']} --json"]
    groups = len(step["groups"]) * facts[name]["group"]["step"]
    completions = groups * len(facts[name]["group"]["completions"])
    assert f"{completions} in {groups} groups" in output.out
    assert "100.0 %" in output.out


def test_replay_samples_a_group_again(oncurve: Oncurve) -> None:
    """From version 1's checkpoint: the same tokens and rewards on any machine, and log-probs as near as rounding allows."""
    output = oncurve("replay", "grpo", "--step", 3, "--group", 1, "--json").json
    assert (output["stage"], output["step"], output["group"]) == ("grpo", 3, 1)
    assert output["from"] == {"stage": "grpo", "step": 2}
    assert output["steps_done_again"] == 1
    for line in output["differences"]:
        apart = re.search(r"log-probs up to ([\d.e+-]+) apart", line)
        assert apart is not None, line
        assert float(apart[1]) < 1e-5
    assert output["identical"] == (not output["differences"])


def test_a_run_with_its_own_python_is_evaluated_once_it_is_trusted(oncurve: Oncurve) -> None:
    """Version 1 had no record of trust, so its runs count as runs from elsewhere."""
    assert oncurve("eval", "dpo", "--json").code == 2
    output = oncurve("eval", "dpo", "--trust", "--json")
    assert output.code == 0
    expected = EXPECTED["eval dpo"]
    assert expected["accuracy"] > 0
    assert {key: output.json[key] for key in ("accuracy", "asked", "samples")} == {
        key: expected[key] for key in ("accuracy", "asked", "samples")
    }
    assert output.json["reward"] == pytest.approx(expected["reward"])
    assert oncurve("eval", "dpo", "--json").json == output.json


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_means_what_it_meant(oncurve: Oncurve, version1_work: Path, name: str) -> None:
    """Every key that version 1 wrote down for its run has the same value now; what is found on a machine aside."""
    shown = oncurve("recipe", "show", f"recipes/{name}.toml")
    assert shown.code == 0
    then = tomllib.loads((version1_work / "runs" / name / "recipe.toml").read_text())
    then["engine"].pop("slots", None)
    if then["model"]["compiled"]:
        then["model"].pop("compiled")
    again = oncurve("recipe", "show", f"runs/{name}/recipe.toml")
    for text in (shown.out, again.out):
        assert list(_changed(then, tomllib.loads(text))) == []
    assert package.load_recipe(f"recipes/{name}.toml").name == name


def _changed(then: Any, now: Any, key: str = "") -> Iterator[str]:
    """Keys whose values are not what they were. Keys that are new are let be."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name, value in then.items():
            yield from _changed(value, now.get(name), f"{key}.{name}")
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for place, (old, new) in enumerate(zip(then, now, strict=True)):
            yield from _changed(old, new, f"{key}[{place}]")
    elif then != now:
        yield f"{key}: {then!r} then, {now!r} now"


@pytest.mark.parametrize("command", OPTIONS)
def test_a_command_has_the_options_that_it_had(oncurve: Oncurve, command: str) -> None:
    output = oncurve(*command.split(), "--help")
    assert output.code == 0
    assert set(OPTIONS[command]) <= options_in(output.out)
    assert OPTIONS[command]


@pytest.mark.parametrize(
    "words", [["show", "gone"], ["show", "grpo", "--step", "9"], ["show", "grpo", "--gruop", "1"], ["sohw"]]
)
def test_a_mistake_ends_with_2(oncurve: Oncurve, words: list[str]) -> None:
    assert oncurve(*words).code == 2


def test_python_has_the_names_that_it_had() -> None:
    for name in ("Recipe", "Run", "load_recipe", "train"):
        assert name in package.__all__
        assert callable(getattr(package, name))


@pytest.fixture(scope="module")
def studio(version1_work: Path) -> Iterator[str]:
    """The address of a studio of the stored runs, in a separate process."""
    words = [sys.executable, "-m", "oncurve", "studio", "--runs", str(version1_work / "runs"), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, cwd=version1_work, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = next((line.strip() for line in server.stdout if "http://" in line), None)
        assert address is not None, "the studio ended before it told its address"
        _wait_for(address)
        yield address.rstrip("/")
        server.send_signal(signal.SIGINT)


def _wait_for(address: str) -> None:
    """The address is told just before the server answers there."""
    deadline = time.monotonic() + 300
    while True:
        try:
            urllib.request.urlopen(address, timeout=120).close()
        except urllib.error.URLError:
            assert time.monotonic() < deadline, f"nothing answers at {address}"
            time.sleep(0.05)
        else:
            return


def test_the_studio_serves_a_run_over_http(studio: str, version1_work: Path, facts: Facts) -> None:
    def ask(path: str) -> Any:
        with urllib.request.urlopen(f"{studio}/api{path}", timeout=120) as answer:
            return answer.read()

    listed = {run["name"]: run for run in json.loads(ask("/runs"))}
    assert listed.keys() == set(RUNS)
    assert {name: run["status"] for name, run in listed.items()} == {name: facts[name]["status"] for name in RUNS}
    expected = facts["grpo"]
    curves = json.loads(ask("/runs/grpo/curves"))
    rewards = [e["metrics"]["reward"] for e in expected["evals"]]
    assert [(e["stage"], e["step"], e["reward"]) for e in curves["evals"]] == [
        (e["stage"], e["step"], reward) for e, reward in zip(expected["evals"], rewards, strict=True)
    ]
    metrics = {stage["name"]: stage["metrics"] for stage in curves["stages"]}
    assert metrics["grpo"]["reward"]["steps"] == [1, 2, 3]
    assert metrics["grpo"]["reward"]["values"][-1] == expected["last_metrics"]["grpo"]["reward"]
    group = expected["group"]
    place = f"stage={group['stage']}&step={group['step']}&position={group['position']}"
    served_group = json.loads(ask(f"/runs/grpo/group?{place}"))
    assert served_group["prompt"]["id"] == group["prompt_id"]
    assert [c["tokens"]["ids"] for c in served_group["completions"]] == [c["token_ids"] for c in group["completions"]]
    assert [(c["total"], c["advantage"]) for c in served_group["completions"]] == [
        (c["reward"], c["advantage"]) for c in group["completions"]
    ]
    for seen, completion in zip(served_group["completions"], group["completions"], strict=True):
        assert seen["tokens"]["logp"] == pytest.approx(completion["logps"], rel=1e-3)
    assert ask("/runs/grpo/recipe").decode() == (version1_work / "runs" / "grpo" / "recipe.toml").read_text()
