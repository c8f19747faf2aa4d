"""Tensors in pieces: what each rank writes of a checkpoint by itself, and how any number of ranks reads it again.

A piece is a contiguous range of a tensor's numbers, in the order of its rows; or, where rows are cut too, some columns of them.
Each rank's pieces are one safetensors file; the index (`pieces.json`) says of each tensor its shape and which file holds which
numbers of it. Reading takes what is asked for, a tensor at a time, whoever wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from oncurve.errors import CheckpointError
from oncurve.runs.atomic_files import disk_errors, sync
from oncurve.tensor_range import ElementRange

INDEX = "pieces"
"""The document of a checkpoint that says where its pieces are."""
Index = dict[str, dict[str, dict[str, Any]]]
"""Group of tensors, name, and what is known of it: `shape`, and `parts` as [file, first number, one past the last], with the
first column and one past the last behind them where a part has only some of its rows."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Numbers of a tensor of this shape, flat, and which they are."""

    flat: Tensor
    at: ElementRange
    shape: tuple[int, ...]


def write_shards(folder: Path, rank: int, groups: Mapping[str, Mapping[str, TensorShard]]) -> Index:
    """Writes a rank's pieces to a file in the folder, and returns its part of the index."""
    file = folder / f"pieces-{rank:05d}.safetensors"
    index: Index = {}
    tensors = {}
    for group, pieces in groups.items():
        for name, piece in pieces.items():
            index.setdefault(group, {})[name] = {"shape": list(piece.shape), "parts": [[file.name, *_written(piece.at)]]}
            tensors[f"{group}/{name}"] = piece.flat.detach().cpu().clone(memory_format=torch.contiguous_format)
    with disk_errors(file):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file)
        file.chmod(folder.stat().st_mode & 0o666)
        sync(file)
    return index


def _written(at: ElementRange) -> list[int]:
    """As the index has it."""
    return [at.start, at.stop, *(at.columns or ())]


def _read(place: Sequence[int]) -> ElementRange:
    start, stop, *columns = place
    return ElementRange(start, stop, (columns[0], columns[1]) if columns else None)


def merged_index(parts: Sequence[Index]) -> Index:
    """One index of all ranks' pieces, each tensor's in order."""
    whole: Index = {}
    for part in parts:
        for group, names in part.items():
            for name, entry in names.items():
                found = whole.setdefault(group, {}).setdefault(name, {"shape": entry["shape"], "parts": []})
                found["parts"] = sorted([*found["parts"], *entry["parts"]], key=lambda of: of[1:])
    return whole


class ShardedTensors(Mapping[str, Tensor]):
    """A group of tensors of a checkpoint that lies in pieces. A tensor is read when it is asked for, and whole."""

    def __init__(self, folder: Path, group: str, index: Mapping[str, Mapping[str, Any]]) -> None:
        self.folder, self.group, self.index = folder, group, index

    def __getitem__(self, name: str) -> Tensor:
        entry = self.index[name]
        ranges = [(file, _read(place)) for file, *place in entry["parts"]]
        parts = [(self._part(name, file), at) for file, at in ranges if at.stop > at.start]
        if sum(part.numel() for part, _ in parts) != math.prod(entry["shape"]):
            raise CheckpointError(
                str(self.folder), f"'{name}' is not all there", because="its pieces do not make a whole",
                fix="use an earlier checkpoint: --resume goes back to the last whole one",
            )  # fmt: skip
        whole = torch.empty(entry["shape"], dtype=parts[0][0].dtype if parts else torch.float32)
        for part, at in parts:
            at.fill(whole, part)
        return whole

    def _part(self, name: str, file: str) -> Tensor:
        with disk_errors(self.folder / file), safe_open(self.folder / file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(f"{self.group}/{name}")
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)


class MergedTensors(Mapping[str, Tensor]):
    """Tensors of one group, some of them whole and some in pieces."""

    def __init__(self, whole: Mapping[str, Tensor], pieces: Mapping[str, Tensor]) -> None:
        self.whole, self.pieces = whole, pieces

    def __getitem__(self, name: str) -> Tensor:
        return self.whole[name] if name in self.whole else self.pieces[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.whole
        yield from (name for name in self.pieces if name not in self.whole)

    def __len__(self) -> int:
        return len({*self.whole, *self.pieces})
