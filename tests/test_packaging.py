"""The wheel and the source distribution: what they contain, and what a package index shows of them."""

from __future__ import annotations

import email
import email.message
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_sdist, build_wheel

import oncurve

ROOT = Path(__file__).parents[1]


def build_wheel_from_sdist(folder: Path) -> Path:
    """Built from the source distribution, as an installer builds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with tarfile.open(folder / build_sdist(str(folder))) as archive:
            archive.extractall(folder / "source", filter="data")
        (source,) = (folder / "source").iterdir()
        patch.chdir(source)
        return folder / build_wheel(str(folder))


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel_from_sdist(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    return metadata_of(wheel)


def test_the_wheel_has_every_file_of_the_package_and_the_recipes(wheel: Path) -> None:
    files = [path for path in (ROOT / "oncurve").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {str(path.relative_to(ROOT)) for path in files}
    expected |= {f"oncurve/{path.relative_to(ROOT)}" for path in (ROOT / "recipes").iterdir() if path.is_file()}
    assert "oncurve/py.typed" in expected
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")} == expected


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
    assert "`make docs` builds all pages" in text
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if "://" not in link] == []


def test_classifiers_agree_with_the_project(metadata: email.message.Message) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    classifiers = metadata.get_all("Classifier") or []
    assert f"Programming Language :: Python :: {project['requires-python'].removeprefix('>=')}" in classifiers
    assert "Typing :: Typed" in classifiers


def test_the_page_of_dependencies_gives_a_reason_for_each() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    names = {re.split(r"[\[<>=]", entry)[0] for group in [*groups, project["build-system"]["requires"]] for entry in group}
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([^|]+) \| [^|\s]", page, re.MULTILINE)
    explained = {name.strip() for cell in cells for name in cell.split(",")}
    assert names - explained == set()


def test_extras_that_are_named_exist_and_are_explained() -> None:
    """In docs, notebooks and Dockerfiles; the page Install lists all of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - {"dev"}
    files = [
        *ROOT.glob("Dockerfile*"),
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.ipynb"),
    ]
    named = {(file.name, names) for file in files for names in re.findall(r"(?:oncurve|\"\.)\[([a-z,]+)\]", file.read_text())}
    assert len(named) > 10
    assert [(file, names) for file, names in named if not set(names.split(",")) <= extras] == []
    page = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == extras
