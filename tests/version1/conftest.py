"""The stored runs of version 1, unpacked once, and the command line in this process."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.version1.versions import DATA, CommandOutput, copy_recipes, unpack

Oncurve = Callable[..., CommandOutput]


@pytest.fixture(scope="session")
def version1_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipes and runs of version 1. Not to be changed."""
    work = tmp_path_factory.mktemp("version1")
    copy_recipes(work)
    unpack(work)
    return work


@pytest.fixture(scope="session")
def facts() -> dict[str, Any]:
    """What is expected of each run, read without Oncurve when it was made."""
    return dict(json.loads((DATA / "facts.json").read_text(encoding="utf-8")))


@pytest.fixture
def oncurve(version1_work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Oncurve:
    """The command line, as `python -m oncurve` runs it, in the folder of the stored runs."""
    monkeypatch.chdir(version1_work)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> CommandOutput:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["oncurve", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_module("oncurve", run_name="__main__")
        code = end.value.code
        assert isinstance(code, int)
        return CommandOutput(code, capsys.readouterr().out)

    return run
