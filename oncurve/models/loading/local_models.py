"""The models on this machine and how a recipe names them. Only heads of files are read: neither torch nor transformers is."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from oncurve.errors import ModelError
from oncurve.plan.model_table import hub_folder

MAGIC = b"GGUF"
ORIGIN = "oncurve-origin.json"
"""Lies in a folder converted from a GGUF file: the file it was made from."""
DEPTH = 3
"""Folders below the current one that are looked through."""
PASSED_OVER = {"node_modules", "checkpoints", "__pycache__", "site-packages"}

Kind = Literal["folder", "gguf", "adapter", "converted", "run", "hub"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model: ``name`` is what `model.source` takes. What its files do not tell is None."""

    name: str
    kind: Kind
    architecture: str | None
    parameters: int | None
    dtype: str | None
    bytes: int


def cache_folder() -> Path:
    """`$ONCURVE_CACHE`, else `oncurve` in the user's cache."""
    own = os.environ.get("ONCURVE_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oncurve"


def list_local_models(start: Path, runs_dir: Path) -> list[LocalModel]:
    """Below ``start``, among the runs, converted GGUF files, and the hub's cache."""
    found = [*_below(start, Path(), runs_dir.resolve()), *_runs(runs_dir), *_converted(), *_hub()]
    return list({place.name: place for place in found}.values())


def _below(start: Path, path: Path, runs_dir: Path) -> Iterator[LocalModel]:
    here = start / path
    place = read_model_folder(here, str(path))
    if place is not None:
        yield place
        return
    try:
        entries = sorted(here.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.suffix == ".gguf" and entry.is_file():
            yield read_gguf(entry, str(path / entry.name))
        hidden = entry.name.startswith(".") or entry.name in PASSED_OVER or entry.resolve() == runs_dir
        if entry.is_dir() and not hidden and len(path.parts) < DEPTH:
            yield from _below(start, path / entry.name, runs_dir)


def _runs(runs_dir: Path) -> Iterator[LocalModel]:
    for model in sorted(runs_dir.glob("*/model")):
        place = read_model_folder(model, str(model), "run")
        if place is not None:
            yield place


def _converted() -> Iterator[LocalModel]:
    for folder in sorted((cache_folder() / "models").glob("[!.]*")):
        place = read_model_folder(folder, str(folder), "converted")
        if place is not None:
            yield place


def _hub() -> Iterator[LocalModel]:
    for repository in sorted(hub_folder().glob("models--*")):
        for snapshot in sorted(repository.glob("snapshots/*"))[-1:]:
            place = read_model_folder(snapshot, repository.name.removeprefix("models--").replace("--", "/"), "hub")
            if place is not None:
                yield place


def read_model_folder(folder: Path, name: str, kind: Kind | None = None) -> LocalModel | None:
    """A folder as a model or an adapter; None where it is neither."""
    weights = sorted(folder.glob("*.safetensors"))
    config = _json(folder / "adapter_config.json") or _json(folder / "config.json")
    if config is None or not weights:
        return None
    counted = [_safetensors(file) for file in weights]
    adapter = (folder / "adapter_config.json").is_file()
    architecture = f"adapter on {config.get('base_model_name_or_path')}" if adapter else _architecture(config)
    origin: Kind = "converted" if (folder / ORIGIN).is_file() else "folder"
    return LocalModel(
        name=name,
        kind="adapter" if adapter else kind or origin,
        architecture=architecture,
        parameters=sum(count for count, _ in counted),
        dtype=next((dtype for _, dtype in counted if dtype), None),
        bytes=sum(file.stat().st_size for file in weights),
    )


def _architecture(config: dict[str, Any]) -> str | None:
    named = config.get("architectures") or [config.get("model_type")]
    return None if named[0] is None else str(named[0])


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _safetensors(file: Path) -> tuple[int, str | None]:
    """(numbers, type of most of them) by the file's head: its length in 8 bytes, then JSON."""
    try:
        with file.open("rb") as opened:
            head = json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
    except (OSError, ValueError, struct.error, MemoryError):
        return 0, None
    tensors = [t for name, t in head.items() if name != "__metadata__"]
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor["dtype"]] = sizes.get(tensor["dtype"], 0) + math.prod(tensor["shape"])
    return sum(sizes.values()), max(sizes, key=lambda d: sizes[d]) if sizes else None


def read_gguf(file: Path, name: str) -> LocalModel:
    try:
        told = gguf_head(file)
    except ModelError:
        told = {}
    architecture = told.get("general.architecture")
    parameters = _labelled(str(told.get("general.size_label", "")))
    return LocalModel(name, "gguf", None if architecture is None else str(architecture), parameters, None, file.stat().st_size)


def _labelled(label: str) -> int | None:
    """`0.5B` and `135M` as numbers."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9}.get(label[-1:])
    try:
        return None if unit is None else round(float(label[:-1]) * unit)
    except ValueError:
        return None


_SIZES = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_LIST = 9


def gguf_head(file: Path) -> dict[str, Any]:
    """What a GGUF file says of itself, up to its first list (the vocabulary): magic, version, counts, then keys and values."""
    try:
        with file.open("rb") as opened:
            if opened.read(4) != MAGIC:
                raise ModelError(
                    str(file), "not a GGUF file", because="its first four bytes are not GGUF", fix="fetch the file again"
                )
            _, _, keys = struct.unpack("<IQQ", opened.read(20))
            return dict(_pairs(opened, keys))
    except (struct.error, UnicodeDecodeError) as error:
        raise ModelError(str(file), "a GGUF file that ends early", because=str(error), fix="fetch the file again") from error


def _pairs(opened: BinaryIO, count: int) -> Iterator[tuple[str, Any]]:
    for _ in range(count):
        key, kind = _text(opened), struct.unpack("<I", opened.read(4))[0]
        if kind == _LIST:
            return
        form = _SIZES.get(kind)
        yield key, _text(opened) if form is None else struct.unpack(form, opened.read(struct.calcsize(form)))[0]


def _text(opened: BinaryIO) -> str:
    length = struct.unpack("<Q", opened.read(8))[0]
    if length > 1 << 20:
        raise struct.error(f"a text of {length} bytes")
    return opened.read(length).decode()
