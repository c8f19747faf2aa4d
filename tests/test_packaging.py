"""The wheel and the source distribution: what they contain, and what a package index shows of them."""

from __future__ import annotations

import email
import email.message
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_sdist, build_wheel

import oncurve

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from the source distribution, as an installer builds it."""
    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with tarfile.open(folder / build_sdist(str(folder))) as archive:
            archive.extractall(folder / "source", filter="data")
        (source,) = (folder / "source").iterdir()
        patch.chdir(source)
        return zipfile.ZipFile(folder / build_wheel(str(folder)))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_the_wheel_has_every_file_of_the_package_and_the_recipes(wheel: zipfile.ZipFile) -> None:
    files = [path for path in (ROOT / "oncurve").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {str(path.relative_to(ROOT)) for path in files}
    expected |= {f"oncurve/{path.relative_to(ROOT)}" for path in (ROOT / "recipes").iterdir()}
    assert "oncurve/py.typed" in expected
    assert {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")} == expected


def test_the_version_has_one_source(metadata: email.message.Message) -> None:
    assert metadata["Version"] == oncurve.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == oncurve.__version__
    for file in (ROOT / "pyproject.toml", ROOT / "CITATION.cff"):
        assert not re.search(r"^version\b", file.read_text(encoding="utf-8"), re.MULTILINE), file


def test_an_index_can_show_the_description(metadata: email.message.Message) -> None:
    """An index renders the description without the repository: a relative link would lead nowhere."""
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert text.startswith("# Oncurve")
    assert "the planner" in text
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if "://" not in link] == []


def test_classifiers_agree_with_the_project(metadata: email.message.Message) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    classifiers = metadata.get_all("Classifier") or []
    assert f"Programming Language :: Python :: {project['requires-python'].removeprefix('>=')}" in classifiers
    assert "Typing :: Typed" in classifiers


@pytest.mark.slow
def test_an_installed_wheel_trains_a_built_in_recipe_without_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    assert wheel.filename is not None
    installed, work = tmp_path / "installed", tmp_path / "work"
    work.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed)]
    subprocess.run([*pip, wheel.filename], check=True)
    python = [sys.executable, "-P", "-c"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    home = subprocess.run(
        [*python, "import oncurve; print(oncurve.__file__)"],
        cwd=work,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert Path(home.stdout.strip()) == installed / "oncurve" / "__init__.py"
    command = [sys.executable, "-P", "-m", "oncurve", "train", "arithmetic", "--smoke"]
    done = subprocess.run(command, cwd=work, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(work.glob("runs/*/model/config.json"))) == 1
