"""What errors tell people to type works as it is typed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from oncurve.errors import pip_install


@pytest.mark.parametrize("path", [str(Path(sys.executable).parent), "/nowhere"], ids=["activated", "not activated"])
def test_an_extra_is_installed_where_oncurve_is(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pip that is named says itself which environment it belongs to."""
    monkeypatch.setenv("PATH", os.pathsep.join([path, "/usr/bin", "/bin"]))
    pip, _, rest = pip_install("studio").partition(" install ")
    assert shlex.split(rest) == ["oncurve[studio]"]
    assert (pip == "pip") == (path != "/nowhere")
    told = subprocess.run(f"{pip} --version", shell=True, capture_output=True, text=True, check=True).stdout
    assert f"from {sys.prefix}/" in told
