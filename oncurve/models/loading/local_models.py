"""Lists the models on this machine and how a recipe refers to them. Reads only file headers, without torch or transformers."""

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
"""Present in a folder converted from a GGUF file: names that file."""
MAX_DEPTH = 3
"""Levels of subfolders that are searched."""
SKIPPED_FOLDERS = {"node_modules", "checkpoints", "__pycache__", "site-packages"}

Kind = Literal["folder", "gguf", "adapter", "converted", "run", "hub"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model. ``name`` is what `model.source` takes; fields that its files do not contain are None."""

    name: str
    kind: Kind
    architecture: str | None
    parameters: int | None
    dtype: str | None
    bytes: int


def cache_folder() -> Path:
    """`$ONCURVE_CACHE`, else `oncurve` in the user's cache folder."""
    configured = os.environ.get("ONCURVE_CACHE")
    return Path(configured) if configured else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oncurve"


def list_local_models(start: Path, runs_dir: Path) -> list[LocalModel]:
    """Models below ``start``, of runs, converted from GGUF files, and in the Hugging Face cache."""
    models = [*_search(start, Path(), runs_dir.resolve()), *_run_models(runs_dir), *_converted_models(), *_hub_models()]
    return list({model.name: model for model in models}.values())


def _search(start: Path, path: Path, runs_dir: Path) -> Iterator[LocalModel]:
    here = start / path
    model = describe_folder(here, str(path))
    if model is not None:
        yield model
        return
    try:
        entries = sorted(here.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.suffix == ".gguf" and entry.is_file():
            yield describe_gguf(entry, str(path / entry.name))
        hidden = entry.name.startswith(".") or entry.name in SKIPPED_FOLDERS or entry.resolve() == runs_dir
        if entry.is_dir() and not hidden and len(path.parts) < MAX_DEPTH:
            yield from _search(start, path / entry.name, runs_dir)


def _run_models(runs_dir: Path) -> Iterator[LocalModel]:
    for folder in sorted(runs_dir.glob("*/model")):
        model = describe_folder(folder, str(folder), "run")
        if model is not None:
            yield model


def _converted_models() -> Iterator[LocalModel]:
    for folder in sorted((cache_folder() / "models").glob("[!.]*")):
        model = describe_folder(folder, str(folder), "converted")
        if model is not None:
            yield model


def _hub_models() -> Iterator[LocalModel]:
    for repository in sorted(hub_folder().glob("models--*")):
        for snapshot in sorted(repository.glob("snapshots/*"))[-1:]:
            model = describe_folder(snapshot, repository.name.removeprefix("models--").replace("--", "/"), "hub")
            if model is not None:
                yield model


def describe_folder(folder: Path, name: str, kind: Kind | None = None) -> LocalModel | None:
    """A folder as a model or an adapter; None if it is neither."""
    weights = [file for file in sorted(folder.glob("*.safetensors")) if file.is_file()]
    config = _read_json(folder / "adapter_config.json") or _read_json(folder / "config.json")
    if config is None or not weights:
        return None
    headers = [_read_safetensors_header(file) for file in weights]
    is_adapter = (folder / "adapter_config.json").is_file()
    architecture = f"adapter on {config.get('base_model_name_or_path')}" if is_adapter else _architecture(config)
    origin: Kind = "converted" if (folder / ORIGIN).is_file() else "folder"
    return LocalModel(
        name=name,
        kind="adapter" if is_adapter else kind or origin,
        architecture=architecture,
        parameters=sum(count for count, _ in headers),
        dtype=next((dtype for _, dtype in headers if dtype), None),
        bytes=sum(file.stat().st_size for file in weights),
    )


def read_config(source: str) -> dict[str, Any]:
    """The settings (config.json) of what `model.source` names, without its weights. Of an adapter: those of its base."""
    if source == "tiny":
        return {"model_type": "qwen3"}
    path = Path(source)
    if path.suffix == ".gguf" and path.is_file():
        return {"model_type": read_gguf_metadata(path).get("general.architecture")}
    snapshots = sorted((hub_folder() / f"models--{source.replace('/', '--')}" / "snapshots").glob("*"))
    folder = path if path.is_dir() else snapshots[-1] if snapshots else None
    adapter = None if folder is None else _read_json(folder / "adapter_config.json")
    if adapter is not None and adapter.get("base_model_name_or_path") not in (None, source):
        return read_config(str(adapter["base_model_name_or_path"]))
    config = None if folder is None else _read_json(folder / "config.json")
    if config is None:
        raise ModelError(
            source,
            "no config.json" if folder is not None else "no such folder or file, and not in the hub cache",
            because="config.json says which family a model belongs to",
            fix="use a folder in Hugging Face format; `oncurve models` lists the models on this machine",
        )
    return config


def _architecture(config: dict[str, Any]) -> str | None:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else config.get("model_type")
    return None if name is None else str(name)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():  # reading a FIFO would block
        return None
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _read_safetensors_header(file: Path) -> tuple[int, str | None]:
    """(number of elements, most frequent dtype) from the file's header: its length in 8 bytes, then JSON."""
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        sizes: dict[str, int] = {}
        for tensor in [t for name, t in header.items() if name != "__metadata__"]:
            sizes[tensor["dtype"]] = sizes.get(tensor["dtype"], 0) + int(math.prod(tensor["shape"]))
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        struct.error,
        MemoryError,
    ):
        return 0, None  # a damaged file is listed without its size
    return sum(sizes.values()), max(sizes, key=lambda d: sizes[d]) if sizes else None


def describe_gguf(file: Path, name: str) -> LocalModel:
    try:
        metadata = read_gguf_metadata(file)
    except ModelError:
        metadata = {}
    architecture = metadata.get("general.architecture")
    parameters = _parse_size_label(str(metadata.get("general.size_label", "")))
    return LocalModel(name, "gguf", None if architecture is None else str(architecture), parameters, None, file.stat().st_size)


def _parse_size_label(label: str) -> int | None:
    """`0.5B` or `135M` as a number."""
    unit = {"K": 1e3, "M": 1e6, "B": 1e9}.get(label[-1:])
    try:
        return None if unit is None else round(float(label[:-1]) * unit)
    except ValueError:
        return None


_SIZES = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_LIST = 9


def read_gguf_metadata(file: Path) -> dict[str, Any]:
    """A GGUF file's metadata up to its first list (the vocabulary): magic, version, counts, then key-value pairs."""
    try:
        with file.open("rb") as stream:
            if stream.read(4) != MAGIC:
                raise ModelError(
                    str(file), "not a GGUF file", because="its first four bytes are not GGUF", fix="download the file again"
                )
            _, _, keys = struct.unpack("<IQQ", stream.read(20))
            return dict(_read_pairs(stream, keys))
    except (struct.error, UnicodeDecodeError) as error:
        raise ModelError(str(file), "a truncated GGUF file", because=str(error), fix="download the file again") from error


def _read_pairs(stream: BinaryIO, count: int) -> Iterator[tuple[str, Any]]:
    for _ in range(count):
        key, kind = _read_text(stream), struct.unpack("<I", stream.read(4))[0]
        if kind == _LIST:
            return
        form = _SIZES.get(kind)
        yield key, _read_text(stream) if form is None else struct.unpack(form, stream.read(struct.calcsize(form)))[0]


def _read_text(stream: BinaryIO) -> str:
    length = struct.unpack("<Q", stream.read(8))[0]
    if length > 1 << 20:
        raise struct.error(f"a text of {length} bytes")
    return stream.read(length).decode()


def check_exists(source: str) -> None:
    """Refuses a source that looks like a path but does not exist. Quick, so that it can be called before slow imports."""
    if not Path(source).exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ModelError(source, "no such folder", because="nothing is there", fix="check the path; a hub id is OWNER/NAME")
