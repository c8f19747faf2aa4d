"""One reward and one data set run in TRL and in Oncurve unchanged."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "with_trl.py"


def test_both_run_and_the_table_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", "2"])
    monkeypatch.setenv("COLUMNS", "160")
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split() for line in lines if line.startswith("  step")]
    assert [words[1] for words in steps] == ["1", "2"]
    assert all(0 < float(words[3]) < 1 and 0 < float(words[5]) < 1 for words in steps)
    assert any(line.split()[:2] == ["num_generations", "grpo.group_size"] for line in lines)


def test_the_reward_by_hand() -> None:
    reward = runpy.run_path(str(EXAMPLE))["starts_right"]
    assert reward(["12", " 12=", "1+", "5", "=="], answer=["12"] * 5, prompts=None) == [1.0, 1.0, 0.5, 0.1, 0.0]
