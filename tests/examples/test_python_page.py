"""docs/python.md is one program: its examples run in order, and its output is what the page says."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import oncurve
from oncurve.errors import RunError

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")


def test_every_argument_of_train_is_on_the_page() -> None:
    documented = set(re.findall(r"`(\w+)`", PAGE)) | set(re.findall(r"(\w+)=", PAGE))
    assert [name for name in signature(oncurve.train).parameters if name not in documented | {"grpo_options", "recipe"}] == []


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(block, names)
    run = names["run"]
    assert [step for step, _ in run.metrics("reward")] == [1, 2, 3, 4]
    assert [report.asked for report in run.evals] == [20, 20]
    assert names["short"].recipe.seed == 1
    output = capsys.readouterr().out
    assert "finished" in output
    assert "prompts=['3+4=']" in output
    assert len(re.findall(r"^[+−-]\d\.\d\d ", output, re.MULTILINE)) == 16
    (resume,) = re.findall(r"^    (run = oncurve\.train\(resume=.*\))$", PAGE, re.MULTILINE)
    assert run.path == tmp_path / "runs" / "run-1"
    with pytest.raises(RunError, match="already finished"):
        exec(resume, names)
