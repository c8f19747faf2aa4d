"""A run's texts come from a model or a stranger: no command writes their control characters to a terminal, or reads markup."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from rich.text import Text

from oncurve.cli.app import main
from oncurve.errors import RunError
from oncurve.terminal.console import SafeConsole
from oncurve.training.start import begin
from tests.faults.cases import GRPO, recipe

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\r[/][bold]\x7f\x00"
"""A window title, a cleared screen, C1 codes, backspaces, and markup that ends nothing."""
STATEMENTS = (
    "UPDATE groups SET prompt_id = ?1 || position, prompt = ?1",
    "UPDATE groups SET columns = json_object('answer', ?1, ?1, 1) WHERE position = 1",
    "UPDATE groups SET messages = json_array(json_object('role', ?1, 'content', ?1)) WHERE position = 1",
    "UPDATE completions SET text = ?1 || position",
    "UPDATE aspects SET name = ?1 || position, reason = ?1",
    "UPDATE aspects SET failure = ?1, value = NULL WHERE position = 0",
    "UPDATE completions SET failure = ?1 WHERE position = 0",
    "UPDATE events SET message = ?1",
    "UPDATE evals SET by_difficulty = json_object(?1, json_array(1, 2))",
    "UPDATE meta SET oncurve = ?1",
)
COMMANDS = (
    ("runs",), ("runs", "--json"), ("show", "evil"), ("show", "evil", "--json"), ("show", "evil", "--step", "1"),
    ("show", "evil", "--step", "1", "--group", "0"), ("show", "evil", "--step", "1", "--group", "1"),
    ("show", "evil", "--step", "1", "--group", "1", "--json"), ("show", "evil", "--timing"), ("show", "evil", "--bad"),
    ("show", "evil", "--bad", "--json"), ("status", "evil"), ("verify", "evil"), ("rewards", "audit", "evil"),
    ("show", f"no{EVIL[:-1]}such"), ("recipe", "show", "evil"), ("show", "evil", "--stage", EVIL[:-1], "--step", "1"),
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    small = recipe({**GRPO, "steps": 1, "save_every": 1, "eval_every": 1, "prompts_per_step": 2, "group_size": 2})
    run = begin(small, out=folder / "evil")
    with closing(sqlite3.connect(run.database)) as store:
        for statement in STATEMENTS:
            store.execute(statement, (EVIL,))
        store.commit()
    state = json.loads((run.path / "run.json").read_text())
    parent = {"run": EVIL, "stage": EVIL, "step": 1, "changes": {EVIL: EVIL}}
    (run.path / "run.json").write_text(json.dumps({**state, "name": EVIL, "host": EVIL, "oncurve": EVIL, "parent": parent}))
    (run.path / "bad").mkdir(exist_ok=True)
    batch = {"stage": EVIL, "step": 1, "why": [EVIL], "metrics": {EVIL: 1.0}, "groups": []}
    (run.path / "bad" / "grpo-1.json").write_text(json.dumps(batch))
    shutil.copytree(run.path, folder / "b[/]c")
    return folder


def control_characters(text: str) -> set[str]:
    return {c for c in text if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command).encode("unicode_escape").decode()[:60])
def test_no_command_prints_a_control_character(command: tuple[str, ...], runs: Path, tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*command, "--runs", str(runs)])
    assert code in (0, 2)
    assert control_characters(out.getvalue() + err.getvalue()) == set()
    assert out.getvalue() or err.getvalue()


def test_on_a_terminal_only_the_console_s_own_codes_appear() -> None:
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=True, color_system="standard", width=60)
    console.print(Text(f"a{EVIL}b", "bold red"), EVIL)
    text = file.getvalue()
    assert "\x1b[1;31ma" in text, "styles still work"
    assert not {"\x07", "\x08", "\x7f", "\x00", "\x9b"} & set(text)
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text
    assert "[/][bold]" in text, "brackets are text"


def test_errors_are_cleaned(capsys: pytest.CaptureFixture[str]) -> None:
    from oncurve.terminal.errors import print_advice, print_error

    print_error(RunError(EVIL, EVIL, because=EVIL, fix=EVIL))
    print_advice(EVIL)
    assert control_characters(capsys.readouterr().err) == set()
