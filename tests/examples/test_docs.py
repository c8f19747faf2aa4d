"""The docs agree with the code: generated pages are current, links and file names exist, and the design names the tree."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.test_layout import LAYERS

ROOT = Path(__file__).parents[2]
PAGES: dict[Path, str] = runpy.run_path(str(ROOT / "docs" / "make_pages.py"))["pages"]()
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_generated_pages_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path], "run make docs"


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []
    named = re.findall(r"`((?:oncurve|recipes|examples|docs|bench|tests)/[\w/.-]+\.\w+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_design_gives_the_layers_that_the_layout_test_enforces() -> None:
    block = re.search(r"The layers, from the bottom:\n\n((?:    .*\n)+)", DESIGN)
    assert block is not None
    layers = [set(layer.replace(" ", "").strip().split(",")) for layer in block[1].replace("\n", "").split("<")]
    assert layers == LAYERS[:-1], "LAYERS in tests/test_layout.py, without __main__"


def test_the_design_lists_every_module_and_folder_of_the_tree() -> None:
    """Modules at the top, and every package; `__main__` is the same as `cli`."""
    block = re.search(r"## Layout\n\n    oncurve/\n((?:      .*\n)+)", DESIGN)
    assert block is not None
    listed: set[str] = set()
    parent = ""
    for line in block[1].splitlines():
        name = line.split()[0]
        is_child = line.startswith("        ")
        parent = parent if is_child else name
        listed.add(parent + name if is_child else name)
    package = ROOT / "oncurve"
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    packages = {f"{path.parent.relative_to(package)}/" for path in package.glob("*/**/__init__.py")}
    assert listed == modules | packages


def test_the_readme_quotes_the_summary_that_training_prints() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- train-output -->\n(.*?)<!-- /train-output -->", readme, re.S)
    assert block is not None
    purposes = re.findall(r"^      (\S.*?)  +(oncurve \w+) runs/arithmetic-1", block[1], re.M)
    assert [command for _, command in purposes] == ["oncurve show", "oncurve chat", "oncurve eval"]
    source = (ROOT / "oncurve" / "terminal" / "live" / "summary.py").read_text(encoding="utf-8")
    assert [purpose for purpose, command in purposes if f'("{purpose}", f"{command} {{run.path}}' not in source] == []
