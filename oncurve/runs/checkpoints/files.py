"""``checkpoints/<stage>-<step>/``: safetensors and JSON with checksums, written atomically. No pickle.

A checkpoint is complete or absent: its files are written to ``.writing-<name>`` and synced, the folder is synced and renamed,
and the rename is synced. ``manifest.json`` lists every file with its size and SHA-256, and is itself protected by
a SHA-256; ``load`` checks them all. Tied tensors (embeddings) are written once, listed as aliases, and loaded as one tensor.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from oncurve.errors import CheckpointError, DiskError, OncurveError
from oncurve.runs.atomic_files import disk_error, disk_errors, free_bytes, read_file, sync, write_durably
from oncurve.runs.checkpoints.listing import checkpoint_path, list_checkpoints
from oncurve.runs.checkpoints.shards import INDEX, MergedTensors, ShardedTensors
from oncurve.runs.environment import oncurve_version

FORMAT = 1
MANIFEST = "manifest.json"
WRITING = ".writing-"
REPLACED = ".replaced-"

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read and verified. Tied tensors are the same object under each of their names."""

    path: Path
    stage: str
    step: int
    tensors: Mapping[str, Tensors]
    documents: Mapping[str, Any]


def save(
    folder: Path,
    stage: str,
    step: int,
    tensors: Mapping[str, Tensors],
    documents: Mapping[str, Any],
    shards: Collection[Path] = (),
) -> Path:
    """Writes a complete checkpoint, or raises and changes nothing.

    ``tensors`` and ``documents`` map a file name, with or without its extension, to its content. ``shards`` are files that
    ranks have written for it (`oncurve.runs.checkpoints.shards`); they are moved into the checkpoint. An existing checkpoint of
    the same step is replaced. Only a run's one writer may call this: it removes what a killed save left behind.
    """
    contents = {_file_name(name, ".json"): (name, to_json(document)) for name, document in documents.items()}
    needed = sum(len(text) for _, text in contents.values()) + sum(_bytes_of(group) for group in tensors.values())
    target = checkpoint_path(folder, stage, step)
    with disk_errors(target, needed):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        _check_space(target, needed)
        temporary = folder / f"{WRITING}{target.name}"
        try:
            temporary.mkdir()
            files = {file: _write_document(temporary / file, name, text) for file, (name, text) in contents.items()}
            for name, group in tensors.items():
                file = _file_name(name, ".safetensors")
                files[file] = _write_tensors(temporary / file, name, group)
            for shard in shards:
                shard.rename(temporary / shard.name)
                files[shard.name] = {"name": shard.stem, **_measure(temporary / shard.name), "piece": True}
            number = 1 + max((number_of(entry.path) for entry in list_checkpoints(folder)), default=0)
            _write_manifest(temporary, {"stage": stage, "step": step, "number": number, "files": files})
            sync(temporary)
            _rename_over(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return target


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint and verifies every file. Raises a CheckpointError that names a damaged file."""
    manifest = _read_manifest(path)
    tensors: dict[str, Tensors] = {}
    documents: dict[str, Any] = {}
    for file, entry in manifest["files"].items():
        _check_name(path, file)
        _verify(path / file, entry)
        if "aliases" in entry:
            tensors[entry["name"]] = _read_tensors(path / file, entry["aliases"])
        elif not entry.get("piece"):
            documents[entry["name"]] = json.loads((path / file).read_bytes())
    for group, names in documents.get(INDEX, {}).items():
        for file in {part[0] for entry in names.values() for part in entry["parts"]} - manifest["files"].keys():
            raise _damaged(path / MANIFEST, f"'{file}' is not listed", "the index of shards refers to it")
        tensors[group] = MergedTensors(tensors.get(group, {}), ShardedTensors(path, group, names))
    return Checkpoint(path, manifest["stage"], manifest["step"], tensors, documents)


def newest_valid(folder: Path, on_damaged: Callable[[Path, str], None]) -> Checkpoint | None:
    """The newest undamaged checkpoint, or None. Calls ``on_damaged`` with each damaged one that is skipped, and the reason.

    Newest is by the number in the manifest, because file times do not survive a copy. A checkpoint whose manifest can't be read
    counts as the newest, so that it is always reported. If the disk refused to read a checkpoint and none is intact, that error
    is raised: a run must not start over because it lacks permission to read its checkpoints.
    """
    refused: DiskError | None = None
    for path in sorted((entry.path for entry in list_checkpoints(folder)), key=_age):
        try:
            return load(path)
        except CheckpointError as error:
            on_damaged(path, f"{error.what}, because {error.because}")
        except DiskError as error:
            refused = refused or error
            on_damaged(path, f"{error.what}, because {error.because}")
    if refused is not None:
        raise refused
    return None


def prune(folder: Path, stage: str, keep: int, protect: Collection[int]) -> list[Path]:
    """Deletes all but the last ``keep`` checkpoints of a stage and returns the deleted ones. Steps in ``protect`` stay, and
    don't count."""
    remove_leftovers(folder)
    entries = [entry for entry in list_checkpoints(folder) if entry.stage == stage and entry.step not in protect]
    deleted = [entry.path for entry in entries[: max(0, len(entries) - keep)]]
    for path in deleted:
        # Renamed first: a kill in between leaves a leftover to remove, not a folder that looks like a checkpoint.
        renamed = folder / f"{WRITING}{path.name}"
        with disk_errors(path):
            path.rename(renamed)
            shutil.rmtree(renamed)
    return deleted


def remove_leftovers(folder: Path) -> None:
    """Cleans up after a killed save: removes partial folders, and restores a checkpoint whose replacement was not finished."""
    with disk_errors(folder):
        for leftover in folder.glob(f"{WRITING}*"):
            shutil.rmtree(leftover)
        for replaced in folder.glob(f"{REPLACED}*"):
            target = folder / replaced.name.removeprefix(REPLACED)
            if target.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(target)


def to_json(value: Any, indent: int | None = None) -> bytes:
    return json.dumps(value, indent=indent).encode()


def _file_name(name: str, extension: str) -> str:
    file = name if name.endswith(extension) else name + extension
    assert "/" not in file, f"not a file name: {name}"
    assert file != MANIFEST, "the manifest is written separately, last"
    return file


def _bytes_of(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _check_space(target: Path, needed: int) -> None:
    """Raises before anything is written if the disk has too little space."""
    free = free_bytes(target.parent)
    if free is not None and free < needed:
        raise disk_error(target, errno.ENOSPC, "refused before writing", needed)


def _write_document(path: Path, name: str, text: bytes) -> dict[str, Any]:
    write_durably(path, text)
    return {"name": name, **_measure(path)}


def _write_tensors(path: Path, name: str, tensors: Tensors) -> dict[str, Any]:
    untied, aliases = _untie(tensors)
    save_file(untied, path)
    # safetensors creates files that only the owner may read; a checkpoint has the permissions of its folder.
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync(path)
    return {"name": name, **_measure(path), "aliases": aliases}


def _untie(tensors: Tensors) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each tensor once, in separate memory, and the aliases of tied ones: safetensors refuses shared memory."""
    untied: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        key = (tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        plain = tensor.cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone()
        storages.add(plain.untyped_storage().data_ptr())
        untied[name] = plain
    return untied, aliases


def _measure(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _rename_over(source: Path, target: Path) -> None:
    """Renames a folder to ``target``. A folder can't be renamed onto another, so an existing one is renamed first.

    If the process is killed in between, ``remove_leftovers`` restores the old one.
    """
    old = target.with_name(f"{REPLACED}{target.name}")
    if target.exists():
        target.rename(old)
    try:
        source.rename(target)
    except OSError:
        remove_leftovers(target.parent)
        raise
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    manifest = {"format": FORMAT, "oncurve": oncurve_version(), **content}
    write_durably(folder / MANIFEST, to_json({**manifest, "sha256": _digest(manifest)}, indent=2))


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_json({key: value for key, value in manifest.items() if key != "sha256"})).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = json.loads(read_file(file))
        version, is_intact = int(manifest["format"]), manifest["sha256"] == _digest(manifest)
    except FileNotFoundError as error:
        raise _damaged(file, f"{MANIFEST} is missing", "every checkpoint has one") from error
    except IsADirectoryError as error:
        raise _damaged(file, f"{MANIFEST} is a folder", "it must be a file") from error
    except OSError as error:
        raise disk_error(file, error.errno, str(error)) from error
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise _damaged(file, f"{MANIFEST} is damaged", f"it can't be read ({error})") from error
    if version > FORMAT:
        because = f"its format is {version}, and this is Oncurve {oncurve_version()}, which reads up to {FORMAT}"
        raise CheckpointError(
            str(path), "made by a newer version", because=because, fix="upgrade Oncurve: pip install -U oncurve"
        )
    if not is_intact:
        raise _damaged(file, f"{MANIFEST} is damaged", "its SHA-256 differs from the recorded one")
    return dict(manifest)


def _check_name(path: Path, file: str) -> None:
    """A manifest may come from anyone: it may only name safetensors and JSON files in its own folder."""
    if Path(file).name != file or not file.endswith((".json", ".safetensors")):
        raise _damaged(
            path / MANIFEST, f"'{file}' is not a checkpoint file", "a checkpoint has safetensors and JSON files in one folder"
        )


def _damaged(file: Path, what: str, because: str) -> CheckpointError:
    return CheckpointError(
        str(file), what, because=because, fix="use an earlier checkpoint: --resume takes the last intact one"
    )


def _verify(path: Path, entry: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise _damaged(path, f"{path.name} is missing", "the manifest lists it")
    with disk_errors(path):
        actual = _measure(path)
    if actual["size"] != entry["size"]:
        raise _damaged(path, f"{path.name} is damaged", f"it has {actual['size']} bytes instead of {entry['size']}")
    if actual["sha256"] != entry["sha256"]:
        raise _damaged(path, f"{path.name} is damaged", "its SHA-256 differs from the recorded one")


def _read_tensors(path: Path, aliases: Mapping[str, str]) -> dict[str, torch.Tensor]:
    tensors = load_file(path)
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}


def number_of(path: Path) -> int:
    """A checkpoint's number in the order of writing; 0 if its manifest can't be read."""
    try:
        return int(_read_manifest(path)["number"])
    except OncurveError:
        return 0


def _age(path: Path) -> tuple[bool, int]:
    number = number_of(path)
    return number > 0, -number
