"""Version 1 and the current code beside each other on this machine: the same recipes give the same bits.

Each version runs in processes of its own, in the same environment. Version 1 comes from its commit.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.version1.versions import (
    CURRENT,
    RUNS,
    CommandOutput,
    Version,
    contents,
    copy_recipes,
    extract_version_1,
    train_command,
    unpack,
)

pytestmark = pytest.mark.slow

RESUMED = "runs/stopped"
FORK = ["fork", "grpo", "--stage", "grpo", "--step", "2", "--set", "grpo.group_size=6", "--out", "runs/forked"]
REPLAYED = [("grpo", 3, 1), ("ppo", 3, 0), ("reward_model", 2, 1), ("two_ranks", 2, 2)]
"""Runs whose groups are sampled again, from a checkpoint in the middle of a stage: run, step, group."""
RESEEDED = "rejection"
"""Since version 2 a second sampling stage has its own prompts and random numbers (see training/semantics.py)."""
SCRIPT = "from_python"
ADAPTED = "lora"
"""Since version 2 adapters on a CPU are merged into the weights, which rounds differently (see training/semantics.py)."""


def replays(runs: str) -> list[list[str]]:
    return [
        ["replay", name, "--step", str(step), "--group", str(group), "--runs", runs, "--json"] for name, step, group in REPLAYED
    ]


@dataclass(frozen=True)
class Done:
    """One version's work: folders in which it trained anew, and in which it went on with the kept runs."""

    version: Version
    fresh: Path
    kept: Path
    told: Mapping[str, Sequence[CommandOutput]]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Done]:
    """Version 1 and the current code, after both have done the same; side by side, since each mostly uses one core."""
    version_1 = extract_version_1(tmp_path_factory.mktemp("code"))
    places = [tmp_path_factory.mktemp("then"), tmp_path_factory.mktemp("now")]
    with ThreadPoolExecutor(2) as pool:
        then, now = pool.map(_work, (version_1, CURRENT), places)
    return then, now


def _work(version: Version, place: Path) -> Done:
    fresh, kept = place / "fresh", place / "kept"
    for folder in (fresh, kept):
        folder.mkdir()
        copy_recipes(folder)
    unpack(kept)
    version.run(fresh, *(train_command(name) for name in RUNS))
    script = version.run(fresh, ["python", f"recipes/{SCRIPT}.py"])
    commands = [["train", RESUMED, "--resume"], FORK, *replays("runs"), ["eval", "lora", "--json"], ["eval", "grpo", "--json"]]
    resumed, forked, *rest = version.run(kept, *commands)
    told = {"script": script, "went on": [resumed, forked], "replays": rest[: len(REPLAYED)], "evals": rest[len(REPLAYED) :]}
    return Done(version, fresh, kept, told)


@pytest.mark.parametrize("name", [*(name for name in RUNS if name != ADAPTED), SCRIPT])
def test_a_recipe_gives_the_same_bits(versions: tuple[Done, Done], name: str) -> None:
    """Weights, checkpoints, tokens, log-probs, rewards, advantages, metrics and held-out figures."""
    then, now = (contents(done.fresh / "runs" / name) for done in versions)
    if name == RESEEDED:
        assert _differences(then, now)
        then, now = (_of_stage(found, "grpo") for found in (then, now))
        assert then["table tokens"]
    assert _differences(then, now) == []


def test_a_run_that_would_be_continued_otherwise_is_refused(versions: tuple[Done, Done]) -> None:
    """By replay and fork. It can still be measured."""
    kept = versions[1].kept
    commands = [
        ["replay", RESEEDED, "--step", "2", "--group", "0"],
        ["fork", RESEEDED, "--stage", "grpo", "--step", "2", "--out", "runs/forked-otherwise"],
        ["eval", RESEEDED, "--json"],
    ]
    _, _, measured = CURRENT.run(kept, *commands, codes=[2, 2, 0])
    assert not (kept / "runs" / "forked-otherwise").exists()
    assert measured.json["asked"] == 6


def test_an_adapter_gives_the_same_tokens_and_log_probs_up_to_rounding(versions: tuple[Done, Done]) -> None:
    then, now = (contents(done.fresh / "runs" / ADAPTED)["table tokens"] for done in versions)
    assert [row["token_ids"] for row in now] == [row["token_ids"] for row in then]
    for old, new in zip(then, now, strict=True):
        np.testing.assert_allclose(np.frombuffer(new["logps"], np.float32), np.frombuffer(old["logps"], np.float32), atol=1e-3)


def test_what_is_compared_is_there(versions: tuple[Done, Done]) -> None:
    """A comparison of nothing would pass."""
    then = {name: contents(versions[0].fresh / "runs" / name) for name in RUNS}
    for name, found in then.items():
        assert {"table metrics", "table evals", "table steps", "model/model.safetensors", "table recipe"} <= found.keys(), name
        assert all(found[f"table {table}"] for table in ("metrics", "evals", "steps", "tokens", "completions", "groups"))
        assert any(file.startswith("checkpoints/") and file.endswith("optimiser.safetensors") for file in found)
    assert "reward_models/reward_model/model.safetensors" in then["reward_model"]
    assert "samples/rejection_sample.jsonl" in then["rejection"]
    logps = {row["completion_id"]: row["logps"] for row in then["grpo"]["table tokens"]}
    assert len(set(logps.values())) == len(logps)


def test_a_difference_is_seen(versions: tuple[Done, Done]) -> None:
    """Of another run, and of a single token."""
    grpo, ppo = (contents(versions[0].fresh / "runs" / name) for name in ("grpo", "ppo"))
    assert _differences(grpo, ppo)
    tokens = [dict(row) for row in grpo["table tokens"]]
    tokens[-1]["token_ids"] = tokens[-1]["token_ids"][:-4] + b"\0\0\0\0"
    assert _differences(grpo, grpo | {"table tokens": tokens}) == [f"table tokens: token_ids of row {len(tokens) - 1}"]


def test_the_stopped_run_of_version_1_is_resumed_to_the_same_bits(versions: tuple[Done, Done]) -> None:
    then, now = (contents(done.kept / RESUMED) for done in versions)
    assert _differences(then, now) == []
    steps = [(row["stage"], row["step"]) for row in now["table steps"]]
    assert steps == [*(("grpo", step) for step in range(1, 7)), ("sft", 1), ("sft", 2)]


def test_a_checkpoint_of_version_1_is_forked_to_the_same_bits(versions: tuple[Done, Done]) -> None:
    then, now = (contents(done.kept / "runs" / "forked") for done in versions)
    assert _differences(then, now) == []
    places = {row["id"]: row["step"] for row in now["table groups"] if (row["stage"], row["kind"]) == ("grpo", "train")}
    sizes = Counter(row["group_id"] for row in now["table completions"] if row["group_id"] in places)
    assert sorted((places[group], size) for group, size in sizes.items()) == [(1, 4), (1, 4), (2, 4), (2, 4), (3, 6), (3, 6)]


def test_groups_are_replayed_as_version_1_replays_them(versions: tuple[Done, Done], tmp_path: Path) -> None:
    """The kept ones come out alike, whatever machine this is; those that version 1 sampled here, identical."""
    then, now = versions
    assert [told.json for told in now.told["replays"]] == [told.json for told in then.told["replays"]]
    shutil.copytree(then.fresh, tmp_path / "work")
    for told, (name, step, group) in zip(CURRENT.run(tmp_path / "work", *replays("runs")), REPLAYED, strict=True):
        assert (told.json["run"], told.json["step"], told.json["group"]) == (name, step, group)
        assert told.json["identical"], told.json["differences"]


def test_models_of_version_1_are_measured_alike(versions: tuple[Done, Done]) -> None:
    then, now = versions
    assert [told.json for told in now.told["evals"]] == [told.json for told in then.told["evals"]]
    assert all(told.json["asked"] == 6 for told in now.told["evals"])


def test_a_script_sees_the_same_run(versions: tuple[Done, Done]) -> None:
    then, now = versions
    assert now.told["script"] == then.told["script"]
    assert now.told["script"][0].out.startswith(f"{SCRIPT} ")


def _of_stage(found: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """What of a run's contents belongs to one stage."""
    by_stage = ("table steps", "table metrics", "table evals", "table groups")
    tables = {name: [row for row in found[name] if row["stage"] == stage] for name in by_stage}
    groups = {row["id"] for row in tables["table groups"]}
    tables["table completions"] = [row for row in found["table completions"] if row["group_id"] in groups]
    completions = {row["id"] for row in tables["table completions"]}
    tables["table tokens"] = [row for row in found["table tokens"] if row["completion_id"] in completions]
    return tables | {name: value for name, value in found.items() if name.startswith(f"checkpoints/{stage}-")}


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What version 1 wrote and the current code did not, or otherwise. Tables, columns, keys and metrics that are new are let
    be."""
    found: list[str] = []
    known = {row["name"] for row in then["table metrics"]}
    now = {**now, "table metrics": [row for row in now["table metrics"] if row["name"] in known]}
    for name, value in then.items():
        if name not in now:
            found.append(f"{name}: missing")
        elif not name.startswith("table "):
            found += [f"{name}: other bytes"] if now[name] != value else []
        elif len(now[name]) != len(value):
            found.append(f"{name}: {len(value)} rows then, {len(now[name])} now")
        else:
            rows = enumerate(zip(value, now[name], strict=True))
            found += [f"{name}: {key} of row {n}" for n, (old, new) in rows for key in old if new.get(key) != old[key]]
    files = {name for name in now.keys() - then.keys() if not name.startswith("table ")}
    return found + [f"{name}: new" for name in sorted(files)]
