"""The layout's own rules: imports point down only, heavy things stay out of light modules, and no file grows past reading."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "oncurve"
LAYERS = [
    {"records", "errors", "processes", "ranges"},
    {"recipe", "listening"},
    {"algos", "tasks", "plan"},
    {"models", "runs", "scale"},
    {"engines", "rewards", "trust"},
    {"train"},
    {"terminal", "cluster", "serve", "studio"},
    {"api", "cli_options"},
    {
        "cli_compare",
        "cli_doctor",
        "cli_models",
        "cli_pairs",
        "cli_plan",
        "cli_ray",
        "cli_replay",
        "cli_rewards",
        "cli_scale",
        "cli_serve",
        "cli_studio",
        "cli_verify",
    },
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")
LONGEST = 450


def home(path: Path) -> str:
    """The package, or the module at the top, that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, within functions too, so that a lazy import is no way around."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(name: str) -> str | None:
    """Which part of Oncurve a name is of; None for others' packages and for the package itself (its version)."""
    parts = name.split(".")
    return parts[1] if parts[0] == "oncurve" and len(parts) > 1 and parts[1] in RANK else None


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down_only(path: Path) -> None:
    here = home(path)
    assert here in RANK, f"'{here}' has no layer: name one in LAYERS"
    for name in imports(path):
        other = own(name)
        if other is not None and other != here:
            assert RANK[other] < RANK[here], f"{here} imports {name}"


def test_algos_know_torch_and_records_alone() -> None:
    """And errors, which every part may raise."""
    allowed = {"records", "errors", "algos"}
    for path in (PACKAGE / "algos").glob("*.py"):
        for name in imports(path):
            top = name.split(".")[0]
            assert own(name) in allowed if top == "oncurve" else top in {"torch", "numpy", *STANDARD}, (
                f"{path.name} imports {name}"
            )


STANDARD = {"__future__", "collections", "dataclasses", "functools", "math", "typing"}


def reached(start: Path) -> set[str]:
    """Every module that importing this one loads, by following what stands at the top of files (not within functions)."""
    seen: set[str] = set()
    queue = [start]
    while queue:
        tree = ast.parse(queue.pop().read_text())
        for node in tree.body:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in set(names) - seen:
                seen.add(name)
                queue += _file_of(name)
    return seen


def _file_of(name: str) -> list[Path]:
    if not name.startswith("oncurve."):
        return []
    place = PACKAGE.joinpath(*name.split(".")[1:])
    return [p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()]


LIGHT = [*sorted((PACKAGE / "recipe").glob("*.py")), PACKAGE / "runs" / "store.py", PACKAGE / "records.py", PACKAGE / "cli.py"]


@pytest.mark.parametrize("path", [p for p in LIGHT if p.exists()], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_light_modules_load_neither_torch_nor_transformers(path: Path) -> None:
    heavy = {name.split(".")[0] for name in reached(path)} & {"torch", "transformers", "tokenizers", "safetensors"}
    assert not heavy


def test_triton_stays_within_the_folders_of_kernels() -> None:
    """Where there is no GPU it may be missing: only what lies in a folder `kernels` may need it."""
    for path in MODULES:
        if "triton" in {name.split(".")[0] for name in imports(path)}:
            assert path.parent.name == "kernels", path


@pytest.mark.parametrize("package", ["vllm", "ray", "trl", "peft"])
def test_heavy_packages_enter_through_one_door(package: str) -> None:
    doors = {str(path) for path in MODULES for name in imports(path) if name.split(".")[0] == package}
    assert len(doors) <= 1


def test_no_file_is_too_long_to_read_and_none_is_a_drawer() -> None:
    for path in [*MODULES, *(PACKAGE.parent / "tests").rglob("*.py")]:
        lines = len(path.read_text().splitlines())
        assert lines <= LONGEST, f"{path.name} has {lines} lines"
        assert not {"utils", "util", "helpers", "misc", "common"} & set(path.with_suffix("").parts[-2:]), path


def test_every_package_says_what_it_is() -> None:
    for init in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(init.read_text())), init
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), path
