"""One damaged run: every command that reads runs lists the others or prints one message. No traceback, no hang."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from oncurve.runs.folder import RunFolder
from oncurve.training.start import begin
from tests.faults.cases import GRPO, recipe
from tests.faults.test_fuzz import exit_code_of

COMMANDS = (
    ("show",), ("show", "--json"), ("show", "--step", "1"), ("show", "--step", "1", "--group", "0"), ("show", "--bad"),
    ("show", "--timing"), ("status",), ("verify",), ("rewards", "audit"), ("pairs", "-o"),
)  # fmt: skip
DEEP = "[" * 100_000 + "]" * 100_000
DEEP_OBJECT = '{"a":' * 100_000 + "1" + "}" * 100_000


def sql(*statements: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        with closing(sqlite3.connect(run / "run.db")) as store:
            store.execute("PRAGMA ignore_check_constraints = ON")
            for statement in statements:
                store.execute(statement)
            store.commit()

    return damage


def written(name: str, content: str | bytes) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def state(**values: object) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        path = run / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def fifo(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        for path in run.glob(name):
            path.unlink()
            os.mkfifo(path)
            return
        (run / name).parent.mkdir(exist_ok=True)
        os.mkfifo(run / name)

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "deep run.json": written("run.json", DEEP),
    "deep object in run.json": written("run.json", DEEP_OBJECT),
    "run.json is a FIFO": fifo("run.json"),
    "run.json is binary": written("run.json", b"\xff\xfe\x00"),
    "infinite time": state(created=1e999),
    "huge number": state(format=10**400),
    "name is a number": state(name=3),
    "host is a list": state(host=[]),
    "changes are a list": state(parent={"run": "x", "stage": "grpo", "step": 1, "changes": [1]}),
    "deep recipe": written("recipe.toml", "x = " + DEEP),
    "deep keys in the recipe": written("recipe.toml", ".".join(["a"] * 20_000) + " = 1"),
    "recipe is a FIFO": fifo("recipe.toml"),
    "evals: no JSON": sql("UPDATE evals SET by_difficulty = 'x'"),
    "evals: deep JSON": sql(f"UPDATE evals SET metrics = '{DEEP}'"),
    "evals: a list": sql("UPDATE evals SET by_difficulty = '[1, 2]'"),
    "evals: numbers for pairs": sql("""UPDATE evals SET by_difficulty = '{"1": 5}'"""),
    "evals: text for a metric": sql("""UPDATE evals SET metrics = '{"reward": "high"}'"""),
    "evals: text for the accuracy": sql("UPDATE evals SET accuracy = 'high'"),
    "format is text": sql("UPDATE meta SET format = 'one'"),
    "format is a blob": sql("UPDATE meta SET format = x'00'"),
    "no meta": sql("DELETE FROM meta"),
    "no metrics table": sql("DROP TABLE metrics"),
    "no groups table": sql("PRAGMA foreign_keys = OFF", "DROP TABLE groups"),
    "a column is missing": sql("ALTER TABLE aspects DROP COLUMN reason"),
    "steps of a stage are text": sql("UPDATE stages SET steps = 'many'"),
    "start of a stage is text": sql("UPDATE stages SET started = 'noon'"),
    "name of a stage is a blob": sql("PRAGMA foreign_keys = OFF", "UPDATE stages SET type = x'ff'"),
    "seconds of a step are text": sql("UPDATE steps SET seconds = 'long'"),
    "metrics are text": sql("UPDATE metrics SET value = 'high'"),
    "messages are a number": sql("UPDATE groups SET messages = '5'"),
    "messages are texts": sql("""UPDATE groups SET messages = '["a"]'"""),
    "columns are a list": sql("UPDATE groups SET columns = '[1]'"),
    "columns are deep": sql(f"UPDATE groups SET columns = '{DEEP_OBJECT}'"),
    "prompt is a number": sql("UPDATE groups SET prompt = 3.5"),
    "prompt_ids are short": sql("UPDATE groups SET prompt_ids = x'010203'"),
    "token_ids are text": sql("UPDATE tokens SET token_ids = 'abc'"),
    "logps are short": sql("UPDATE tokens SET logps = x'00000000'"),
    "advantages are odd": sql("UPDATE tokens SET advantages = x'0000000000'"),
    "loss_mask is long": sql("UPDATE tokens SET loss_mask = zeroblob(999)"),
    "ratio is missing": sql("UPDATE tokens SET ratio = NULL"),
    "text is not UTF-8": sql("UPDATE completions SET text = x'fffe00'"),
    "stop is a number": sql("UPDATE completions SET stop = 3"),
    "reward is text": sql("UPDATE aspects SET value = 'good'"),
    "weight is text": sql("UPDATE aspects SET weight = 'heavy'"),
    "name of a reward is a blob": sql("UPDATE aspects SET name = x'ff'"),
    "steps of a reward are odd": sql("UPDATE aspects SET steps = '[1]'"),
    "events: no JSON": sql("UPDATE events SET data = ''"),
    "events: time is text": sql("UPDATE events SET time = 'noon'"),
    "database is empty": written("run.db", b""),
    "database is text": written("run.db", "hello\n" * 1000),
    "deep manifest": lambda run: written(f"checkpoints/{first(run)}/manifest.json", DEEP)(run),
    "manifest is a FIFO": lambda run: fifo(f"checkpoints/{first(run)}/manifest.json")(run),
    "deep bad batch": written("bad/grpo-1.json", DEEP),
    "bad batch is a FIFO": fifo("bad/grpo-1.json"),
    "deep feedback": written("feedback.jsonl", DEEP + "\n"),
    "feedback is a FIFO": fifo("feedback.jsonl"),
    "status of a rank is deep": written("actors/rank-0.json", DEEP),
    "status of a rank is a FIFO": fifo("actors/rank-0.json"),
}


def first(run: Path) -> str:
    return sorted(path.name for path in (run / "checkpoints").iterdir())[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run."""
    small = recipe({**GRPO, "steps": 2, "save_every": 1, "eval_every": 1, "prompts_per_step": 2, "group_size": 2})
    folder = tmp_path_factory.mktemp("runs")
    run = begin(small, out=folder / "good")
    with closing(sqlite3.connect(run.database)) as store:
        store.execute("PRAGMA journal_mode = DELETE")  # one file to damage
    return folder


QUICK = (
    "deep run.json", "run.json is a FIFO", "deep keys in the recipe", "evals: a list", "format is text", "metrics are text",
    "messages are texts", "logps are short", "manifest is a FIFO", "status of a rank is deep",
)  # fmt: skip


@pytest.mark.parametrize("damage", [pytest.param(d, marks=() if d in QUICK else pytest.mark.slow) for d in DAMAGES])
def test_a_damaged_run_breaks_no_command(
    damage: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    shutil.copytree(runs / "good", folder / "damaged")
    DAMAGES[damage](folder / "damaged")
    assert exit_code_of("runs", "--runs", str(folder)) == 0
    assert exit_code_of("runs", "--json", "--runs", str(folder)) == 0
    for command in COMMANDS:
        out = [str(tmp_path / "pairs.jsonl")] if command[-1] == "-o" else []
        (tmp_path / "pairs.jsonl").unlink(missing_ok=True)
        name, *options = command
        words = [name, options.pop(0)] if name == "rewards" else [name]
        exit_code_of(*words, "damaged", *options, *out, "--runs", str(folder))
    assert RunFolder.open("good", folder).state().status == "finished"
