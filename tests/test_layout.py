"""Rules of the tree: imports point down, light modules stay light, folders stay small, and names mean something."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "oncurve"
LAYERS = [
    {"records", "errors", "rng", "tensor_range", "model_families", "strict_json"},
    {"plugins", "workers", "local_http"},
    {"objective_specs"},
    {"recipe", "agents"},
    {"algos", "tasks", "plan", "kernels"},
    {"models", "runs", "distributed"},
    {"trust", "engines", "rewards"},
    {"serve"},
    {"agent_programs"},
    {"training"},
    {"operations"},
    {"terminal", "cluster", "studio", "tinker"},
    {"notebook", "publish"},
    {"api"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")
MAX_MODULES = 16
"""Modules in one folder, `__init__.py` aside."""
PRESENTING = {"cli", "terminal", "studio", "operations"}
"""Packages that name a module after the subject that they show or act on."""
VARIANTS = {"engines/native", "engines/cuda", "engines/vllm"}
"""Sibling folders that do the same by other means, with the same file names."""
TWINS = {
    "reasoning_gym",  # a task and its reward
    "lm_head", "pack_attention",  # a part of a model and its kernels
    "registry", "base", "load",
    "preference_pairs", "reward_model", "messages", "launch",
}  # fmt: skip
"""Further names that two modules share on purpose."""
BANNED = {
    "told", "untold", "said", "seen", "given", "opened", "asked", "heard", "wanted", "found", "kept", "held", "made", "heart",
    "pulse", "crew", "seat", "stretch", "wishes", "habits", "door", "pieces", "utils", "util", "helpers", "misc", "common",
}  # fmt: skip
"""Bare participles, invented words and drawers: no module, class or function is called so."""


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


def test_algos_know_torch_records_and_the_table_of_objectives_alone() -> None:
    """And errors, which every part may raise."""
    allowed = {"records", "errors", "objective_specs", "algos"}
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


LIGHT = [
    *sorted((PACKAGE / "recipe").rglob("*.py")),
    PACKAGE / "runs" / "database" / "writer.py",
    PACKAGE / "records.py",
    PACKAGE / "objective_specs.py",
    PACKAGE / "cli" / "app.py",
]


@pytest.mark.parametrize("path", [p for p in LIGHT if p.exists()], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_light_modules_load_neither_torch_nor_transformers(path: Path) -> None:
    heavy = {name.split(".")[0] for name in reached(path)} & {"torch", "transformers", "tokenizers", "safetensors"}
    assert not heavy


def test_triton_is_imported_by_kernels_only() -> None:
    """Triton may be missing on a machine without a GPU."""
    for path in MODULES:
        if "triton" in {name.split(".")[0] for name in imports(path)}:
            assert path.parent == PACKAGE / "kernels", path


@pytest.mark.parametrize("package", ["vllm", "ray", "trl", "peft", "gymnasium", "textarena", "websockets", "verifiers"])
def test_heavy_packages_enter_through_one_door(package: str) -> None:
    doors = {str(path) for path in MODULES for name in imports(path) if name.split(".")[0] == package}
    assert len(doors) <= 1


def folders() -> list[Path]:
    return sorted({path.parent for path in MODULES})


@pytest.mark.parametrize("folder", folders(), ids=lambda p: str(p.relative_to(PACKAGE.parent)))
def test_a_folder_holds_few_enough_modules_to_read(folder: Path) -> None:
    modules = [p.name for p in folder.glob("*.py") if p.name != "__init__.py"]
    assert len(modules) <= MAX_MODULES, f"{folder.name} has {len(modules)} modules: split it by subject"


def test_module_names_are_unique() -> None:
    named: dict[str, set[str]] = {}
    for path in MODULES:
        if path.stem != "__init__" and home(path) not in PRESENTING:
            folder = str(path.parent.relative_to(PACKAGE))
            named.setdefault(path.stem, set()).add("engines" if folder in VARIANTS else folder)
    shared = {name for name, homes in named.items() if len(homes) > 1}
    assert shared == TWINS, {name: sorted(named[name]) for name in shared ^ TWINS}


def defined_names(path: Path) -> Iterator[str]:
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_names_say_what_a_thing_is(path: Path) -> None:
    banned = {name for name in defined_names(path) if name.lower().strip("_") in BANNED}
    assert not banned, f"{path.name}: {sorted(banned)}"


def test_every_package_says_what_it_is() -> None:
    for init in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(init.read_text())), init
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), path
