"""``checkpoints/<stage>-<step>/``: safetensors and JSON, checksummed, written aside and renamed. No pickle anywhere.

A checkpoint is there whole or not at all: its files are written into ``.writing-<name>``, each is synced, then the folder,
which is renamed, and the rename is synced. ``manifest.json`` lists every file with its size and SHA-256, and has one of its
own; ``load`` checks them all. Tensors that are one (tied embeddings) are written once and listed as aliases, and come back
as one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oncurve.errors import CheckpointError, DiskError, OncurveError
from oncurve.runs.atomic_files import disk_error, disk_errors, free_bytes, sync, write_durably
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
    """A checkpoint that was read and found whole. Tied tensors are the same object under each of their names."""

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
    pieces: Collection[Path] = (),
) -> Path:
    """Writes a checkpoint whole, or raises and leaves everything as it was. ``pieces`` are files that ranks have written for it
    (`oncurve.runs.checkpoints.shards`): they are moved into it.

    ``tensors`` and ``documents`` map the name of a file, with or without its ending, to its content. A checkpoint of the same
    step is replaced. Only a run's one writer may call this: it sweeps what a killed save left behind.
    """
    contents = {_file_name(name, ".json"): (name, to_json(document)) for name, document in documents.items()}
    needed = sum(len(text) for _, text in contents.values()) + sum(_bytes_of(group) for group in tensors.values())
    target = checkpoint_path(folder, stage, step)
    with disk_errors(target, needed):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        _need_room(target, needed)
        aside = folder / f"{WRITING}{target.name}"
        try:
            aside.mkdir()
            files = {file: _write_document(aside / file, name, text) for file, (name, text) in contents.items()}
            for name, group in tensors.items():
                file = _file_name(name, ".safetensors")
                files[file] = _write_tensors(aside / file, name, group)
            for piece in pieces:
                piece.rename(aside / piece.name)
                files[piece.name] = {"name": piece.stem, **_measure(aside / piece.name), "piece": True}
            number = 1 + max((number_of(place.path) for place in list_checkpoints(folder)), default=0)
            _write_manifest(aside, {"stage": stage, "step": step, "number": number, "files": files})
            sync(aside)
            _move_into_place(aside, target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    return target


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint and checks every byte of it. Raises CheckpointError naming the file that is damaged."""
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
            raise _damaged(path / MANIFEST, f"'{file}' is no file of it", "its index names it")
        tensors[group] = MergedTensors(tensors.get(group, {}), ShardedTensors(path, group, names))
    return Checkpoint(path, manifest["stage"], manifest["step"], tensors, documents)


def newest_valid(folder: Path, on_damaged: Callable[[Path, str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None. Each damaged one passed over is told to ``on_damaged``, with the reason.

    Newest is by the number in the manifest: times do not survive a copy. One whose manifest can't be read counts as
    newest of all, so that it is always told of. Where the disk refused to read one and none is whole, that is raised: a run
    must not begin again because it may not see what it has.
    """
    refused: DiskError | None = None
    for path in sorted((place.path for place in list_checkpoints(folder)), key=_age):
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
    """Deletes all but the ``keep`` last checkpoints of a stage; returns those. Steps in ``protect`` stay, and don't count."""
    remove_leftovers(folder)
    mine = [place for place in list_checkpoints(folder) if place.stage == stage and place.step not in protect]
    gone = [place.path for place in mine[: max(0, len(mine) - keep)]]
    for path in gone:
        # Renamed first: a kill half-way through leaves something to sweep, not something to mistake for a checkpoint.
        doomed = folder / f"{WRITING}{path.name}"
        with disk_errors(path):
            path.rename(doomed)
            shutil.rmtree(doomed)
    return gone


def remove_leftovers(folder: Path) -> None:
    """Clears what a killed save left: half-written folders go; one that was being replaced comes back, unless it was."""
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


def _file_name(name: str, ending: str) -> str:
    file = name if name.endswith(ending) else name + ending
    assert "/" not in file, f"not a file's name: {name}"
    assert file != MANIFEST, "the manifest is written last, by itself"
    return file


def _bytes_of(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _need_room(target: Path, needed: int) -> None:
    """Refuses before a byte is written where the disk plainly has no room."""
    free = free_bytes(target.parent)
    if free is not None and free < needed:
        raise disk_error(target, errno.ENOSPC, "refused before writing", needed)


def _write_document(path: Path, name: str, text: bytes) -> dict[str, Any]:
    write_durably(path, text)
    return {"name": name, **_measure(path)}


def _write_tensors(path: Path, name: str, tensors: Tensors) -> dict[str, Any]:
    apart, aliases = _untie(tensors)
    try:
        save_file(apart, path)
    except SafetensorError as error:
        _raise_os_error(error)
    # safetensors makes its files private; a run is as readable as the folder it lies in.
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync(path)
    return {"name": name, **_measure(path), "aliases": aliases}


def _raise_os_error(error: SafetensorError) -> NoReturn:
    """safetensors has its own exception for what the system said; the number in its text is the system's."""
    number = re.search(r"os error (\d+)", str(error))
    if number is None:
        raise error
    raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def _untie(tensors: Tensors) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each tensor once, in memory of its own, and which other names it has: safetensors refuses memory that is shared."""
    apart: dict[str, torch.Tensor] = {}
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
        apart[name] = plain
    return apart, aliases


def _measure(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _move_into_place(aside: Path, target: Path) -> None:
    """A folder can't be renamed onto another, so the old one is moved aside first.

    If the process is killed in between, ``remove_leftovers`` moves it back.
    """
    old = target.with_name(f"{REPLACED}{target.name}")
    if target.exists():
        target.rename(old)
    try:
        aside.rename(target)
    except OSError:
        remove_leftovers(target.parent)
        raise
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_manifest(folder: Path, told: Mapping[str, Any]) -> None:
    manifest = {"format": FORMAT, "oncurve": oncurve_version(), **told}
    write_durably(folder / MANIFEST, to_json({**manifest, "sha256": _digest(manifest)}, indent=2))


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_json({key: value for key, value in manifest.items() if key != "sha256"})).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_bytes())
        made, whole = int(manifest["format"]), manifest["sha256"] == _digest(manifest)
    except FileNotFoundError as error:
        raise _damaged(file, f"{MANIFEST} is missing", "every checkpoint has one") from error
    except IsADirectoryError as error:
        raise _damaged(file, f"{MANIFEST} is a folder", "every checkpoint has a file of that name") from error
    except OSError as error:
        raise disk_error(file, error.errno, str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(file, f"{MANIFEST} is damaged", f"it can't be read ({error})") from error
    if made > FORMAT:
        because = f"its format is {made}, and this is Oncurve {oncurve_version()}, which reads up to {FORMAT}"
        raise CheckpointError(
            str(path), "made by a newer version", because=because, fix="upgrade Oncurve: pip install -U oncurve"
        )
    if not whole:
        raise _damaged(file, f"{MANIFEST} is damaged", "its bytes are not those that were written (SHA-256 differs)")
    return dict(manifest)


def _check_name(path: Path, file: str) -> None:
    """A manifest may have been written by anyone: it names files of its own folder, of the two kinds that hold data."""
    if Path(file).name != file or not file.endswith((".json", ".safetensors")):
        raise _damaged(path / MANIFEST, f"'{file}' is no file of a checkpoint", "it has safetensors and JSON, side by side")


def _damaged(file: Path, what: str, because: str) -> CheckpointError:
    return CheckpointError(
        str(file), what, because=because, fix="use an earlier checkpoint: --resume goes back to the last whole one"
    )


def _verify(path: Path, entry: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise _damaged(path, f"{path.name} is missing", "the manifest lists it")
    with disk_errors(path):
        found = _measure(path)
    if found["size"] != entry["size"]:
        raise _damaged(path, f"{path.name} is damaged", f"it has {found['size']} bytes instead of {entry['size']}")
    if found["sha256"] != entry["sha256"]:
        raise _damaged(path, f"{path.name} is damaged", "its bytes are not those that were written (SHA-256 differs)")


def _read_tensors(path: Path, aliases: Mapping[str, str]) -> dict[str, torch.Tensor]:
    tensors = load_file(path)
    return tensors | {alias: tensors[name] for alias, name in aliases.items()}


def number_of(path: Path) -> int:
    """The order in which checkpoints were written; 0 for one that can't say."""
    try:
        return int(_read_manifest(path)["number"])
    except OncurveError:
        return 0


def _age(path: Path) -> tuple[bool, int]:
    number = number_of(path)
    return number > 0, -number
