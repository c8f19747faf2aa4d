"""Errors: what they tell people to type works as typed, and they cross process borders unchanged."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from oncurve import errors
from oncurve.errors import (
    CheckpointError,
    OncurveError,
    RecipeError,
    ScaleError,
    closest,
    did_you_mean,
    error_from_json,
    error_to_json,
    pip_install,
)

ERRORS = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, OncurveError)]


@pytest.mark.parametrize("path", [str(Path(sys.executable).parent), "/nowhere"], ids=["activated", "not activated"])
def test_an_extra_is_installed_next_to_oncurve(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The named pip says itself which environment it belongs to."""
    monkeypatch.setenv("PATH", os.pathsep.join([path, "/usr/bin", "/bin"]))
    pip, _, rest = pip_install("studio").partition(" install ")
    assert shlex.split(rest) == ["oncurve[studio]"]
    assert (pip == "pip") == (path != "/nowhere")
    version = subprocess.run(f"{pip} --version", shell=True, capture_output=True, text=True, check=True).stdout
    assert f"from {sys.prefix}/" in version


def test_an_error_prints_the_place_the_reason_and_the_fix() -> None:
    """The example of `OncurveError`."""
    error = RecipeError("grpo.group_size", 1, because="a group needs 2 completions", fix="use 2 or more")
    assert str(error) == "grpo.group_size: 1\n  because a group needs 2 completions\n  fix: use 2 or more"


@pytest.mark.parametrize("cls", ERRORS)
def test_an_error_comes_back_from_json_as_what_it_was(cls: type[OncurveError]) -> None:
    error = cls("runs/a", 7, because="it is odd", fix="use 8")
    error.exit_code = 3
    read = error_from_json(json.loads(json.dumps(error_to_json(error, "rank 3"))))
    assert type(read) is cls
    assert (str(read), read.exit_code) == (str(error), 3)


def test_other_exceptions_come_back_as_a_scale_error_of_the_process() -> None:
    read = error_from_json(error_to_json(ValueError("x" * 1000), "rank 3"))
    assert type(read) is ScaleError
    assert (read.where, read.what, read.because, read.exit_code) == ("rank 3", "ended with ValueError", "x" * 400, 1)


def test_a_kind_that_is_no_error_is_not_called() -> None:
    """The kind comes from another process: it must not pick any object of the module."""
    data = error_to_json(CheckpointError("c", "damaged", because="b", fix="f"), "rank 0") | {"kind": "pip_install"}
    assert type(error_from_json(data)) is ScaleError


def test_the_tree_at_the_top_of_the_file_names_every_error() -> None:
    """With its parent: one that is indented twice derives from the one above it."""
    for cls in ERRORS:
        depth = len(cls.__mro__) - len(OncurveError.__mro__)
        line = next(
            line for line in (errors.__doc__ or "").splitlines() if line.lstrip("│├└─ ").split(" ")[:1] == [cls.__name__]
        )
        assert len(line) - len(line.lstrip("│├└─ ")) == 4 * depth


@pytest.mark.parametrize(
    ("word", "names"),
    [("gpro", ["grpo"]), ("GRPO", ["grpo"]), ("h100", ["H100"]), ("qqq", [])],
)
def test_the_closest_name_in_any_case(word: str, names: list[str]) -> None:
    assert closest(word, ["gspo", "grpo", "H100"]) == names
    assert did_you_mean(word, ["gspo", "grpo", "H100"]) == (f" (did you mean '{names[0]}'?)" if names else "")


def test_more_than_one_close_name() -> None:
    assert closest("gspo", ["gspo_token", "gspo", "grpo"], count=2) == ["gspo", "grpo"]
