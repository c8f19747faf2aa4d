"""Runs Python code in a separate process, which can be killed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """Its output; a failure shows its traceback."""
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out


def kill_when_ready(process: subprocess.Popen[str]) -> None:
    """Kills it with SIGKILL once it has printed a line."""
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    process.kill()
    _, err = process.communicate(timeout=600)
    assert line, err
