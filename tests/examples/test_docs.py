"""The docs agree with the code.

Generated pages are current; links, files, tests, commands, options, recipes and make targets that the pages name exist; the
design names the tree.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from oncurve.cli.app import COMMANDS, LazyCommand
from tests.test_layout import LAYERS

ROOT = Path(__file__).parents[2]
PAGES: dict[Path, str] = runpy.run_path(str(ROOT / "docs" / "make_pages.py"))["pages"]()
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_generated_pages_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path], "run make docs"


PAGE_FILES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "llms.txt",
    ROOT / "bench" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
each_page = pytest.mark.parametrize("page", PAGE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
PLACEHOLDER = re.compile(r"[A-Z]|…|\.\.\.|path/to")


def code_of(page: Path) -> list[str]:
    """The code of a page: each inline span, and each line of a block without its comment and with continued lines joined."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    (\S.*)$", prose.replace("\\\n", " "), re.MULTILINE)
    lines = [line for block in fences for line in block.replace("\\\n", " ").splitlines()] + indented
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose) + [re.sub(r"(^|  )#.*", "", line).strip() for line in lines]


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_exist(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")) if "://" not in link]
    for link in links:
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


@each_page
def test_named_files_exist(page: Path) -> None:
    """A path is relative to the repository, or to the package."""
    paths = re.findall(r"(?<![\w/.-])((?:[\w.-]+/)+[\w.-]+\.(?:py|c|toml|json|sbatch|yaml))\b", "\n".join(code_of(page)))
    named = [path for path in paths if not PLACEHOLDER.search(path)]
    assert [path for path in named if not any((root / path).exists() for root in (ROOT, ROOT / "oncurve"))] == []


@each_page
def test_named_tests_exist(page: Path) -> None:
    """As `tests/…/test_x.py::test_y`; docs/reliability.md leaves out `tests/faults`. `…` stands for the rest of a name."""
    for file, name in re.findall(r"([\w/]*test_\w+\.py)::(\w+…?)", "\n".join(code_of(page))):
        source = ROOT / (file if "/" in file else f"tests/faults/{file}")
        pattern = rf"^def {name.removesuffix('…')}" + ("" if name.endswith("…") else r"\b")
        assert re.search(pattern, source.read_text(encoding="utf-8"), re.MULTILINE), f"{file}::{name}"


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


@pytest.fixture(scope="module")
def options_by_command() -> dict[tuple[str, ...], set[str]]:
    """The options of every command: {("rewards", "try"): {"--completion", …}, …}."""
    found: dict[tuple[str, ...], set[str]] = {}
    for row in COMMANDS:
        command = LazyCommand(*row).load()
        found[(row[1],)] = options_of(command)
        found |= {(row[1], name): options_of(child) for name, child in getattr(command, "commands", {}).items()}
    return found


@each_page
def test_commands_and_their_options_exist(page: Path, options_by_command: dict[tuple[str, ...], set[str]]) -> None:
    groups = {command[0] for command in options_by_command if len(command) > 1}
    for code in code_of(page):
        words = re.split(r"\s+", code.replace("[", "").replace("]", "").replace("\\|", "|"))
        if len(words) < 2 or words[0] != "oncurve" or words[1].startswith("-") or "=" in words[1]:
            continue
        names = words[2].split("|") if words[1] in groups and words[2:] and words[2].split("|")[0].islower() else [None]
        for name in names:
            command = (words[1],) if name is None else (words[1], name)
            assert command in options_by_command, code
            options = {word for word in words if re.fullmatch(r"--?[a-z][\w-]*", word)}
            assert options <= options_by_command[command], code


@each_page
def test_named_recipes_and_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.toml")}
    for code in code_of(page):
        if target := re.match(r"make ([a-z-]+)\b", code):
            assert target[1] in targets, code
        if recipe := re.match(r"oncurve train ([a-z][\w-]*)(?:\s|$)", code):
            assert recipe[1] in recipes, code


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


def test_the_first_run_quotes_the_summary_that_training_prints() -> None:
    page = (ROOT / "docs" / "start" / "first-run.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- train-output -->\n(.*?)<!-- /train-output -->", page, re.S)
    assert block is not None
    purposes = re.findall(r"^      (\S.*?)  +(oncurve \w+) runs/arithmetic-1", block[1], re.M)
    assert [command for _, command in purposes] == ["oncurve show", "oncurve chat", "oncurve eval"]
    source = (ROOT / "oncurve" / "terminal" / "live" / "summary.py").read_text(encoding="utf-8")
    assert [purpose for purpose, command in purposes if f'("{purpose}", f"{command} {{run.' not in source] == []


def test_messages_name_sections_of_troubleshooting_that_exist() -> None:
    from oncurve.training.collapse_watch import COLLAPSE_RULES

    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "oncurve").rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"troubleshooting\([\"'](.+?)[\"']\)", source)}
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    sections = set(re.findall(r"^## (.+)$", page, re.MULTILINE))
    assert len(named) >= 4
    assert named | {rule.section for rule in COLLAPSE_RULES.values()} <= sections


def test_the_gallery_has_every_recipe() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### (.+)$", page, re.MULTILINE)) == {path.stem for path in (ROOT / "recipes").glob("*.toml")}


def test_llms_txt_lists_every_page() -> None:
    listed = set(re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text(encoding="utf-8")))
    pages = {str(page.relative_to(ROOT)) for page in PAGE_FILES} - {"llms.txt"}
    assert listed == pages
