"""Environments of packages that are not part of the development environment.

Each package is installed into an environment of its own, which finds everything else in this one, and the tests that need it
run there. They are in files that pytest does not collect by itself.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def environment_with(requirement: str, folder: Path) -> str:
    """The interpreter of an environment with a package, and with all packages of this environment that it does not replace."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "parent.pth").write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", requirement], check=True, timeout=1800)
    return python


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requirement", "file"),
    [
        ("textarena==0.7.4", "with_textarena.py"),
        ("openenv==0.10.0", "with_openenv.py"),
        ("verifiers==0.4.0", "with_verifiers.py"),
    ],
)
def test_environments_of_another_package(requirement: str, file: str, tmp_path: Path) -> None:
    python = environment_with(requirement, tmp_path / "environment")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / file)]
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
