"""Sharded tensors of a checkpoint: each rank writes its own shards, and any number of ranks can read them.

A shard is a contiguous range of a tensor's elements in row-major order, optionally limited to some columns. Each rank writes
its shards to one safetensors file. The index (`pieces.json`) has each tensor's shape, and the file and range of its shards.
Tensors are read one at a time, when they are needed.
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
"""The document of a checkpoint that lists its shards."""
Index = dict[str, dict[str, dict[str, Any]]]
"""Group of tensors → tensor name → `shape` and `parts`. A part is [file, first element, one past the last], followed by
the first column and one past the last if it has only some columns."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Some elements of a tensor of this shape, flat, and their range."""

    flat: Tensor
    at: ElementRange
    shape: tuple[int, ...]


def write_shards(folder: Path, rank: int, groups: Mapping[str, Mapping[str, TensorShard]]) -> Index:
    """Writes a rank's shards to a file in the folder, and returns their index."""
    file = folder / f"pieces-{rank:05d}.safetensors"
    index: Index = {}
    tensors = {}
    for group, shards in groups.items():
        for name, shard in shards.items():
            index.setdefault(group, {})[name] = {"shape": list(shard.shape), "parts": [[file.name, *_range_to_list(shard.at)]]}
            tensors[f"{group}/{name}"] = shard.flat.detach().cpu().clone(memory_format=torch.contiguous_format)
    with disk_errors(file):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file)
        file.chmod(folder.stat().st_mode & 0o666)
        sync(file)
    return index


def _range_to_list(at: ElementRange) -> list[int]:
    return [at.start, at.stop, *(at.columns or ())]


def _range_from_list(numbers: Sequence[int]) -> ElementRange:
    start, stop, *columns = numbers
    return ElementRange(start, stop, (columns[0], columns[1]) if columns else None)


def merge_indexes(parts: Sequence[Index]) -> Index:
    """The index of all ranks' shards, each tensor's shards in order."""
    merged: Index = {}
    for part in parts:
        for group, names in part.items():
            for name, entry in names.items():
                tensor = merged.setdefault(group, {}).setdefault(name, {"shape": entry["shape"], "parts": []})
                tensor["parts"] = sorted([*tensor["parts"], *entry["parts"]], key=lambda part: part[1:])
    return merged


class ShardedTensors(Mapping[str, Tensor]):
    """A group of sharded tensors in a checkpoint. A complete tensor is read from its shards when it is accessed."""

    def __init__(self, folder: Path, group: str, index: Mapping[str, Mapping[str, Any]]) -> None:
        self.folder, self.group, self.index = folder, group, index

    def __getitem__(self, name: str) -> Tensor:
        entry = self.index[name]
        ranges = [(file, _range_from_list(numbers)) for file, *numbers in entry["parts"]]
        parts = [(self._part(name, file), at) for file, at in ranges if at.stop > at.start]
        if sum(part.numel() for part, _ in parts) != math.prod(entry["shape"]):
            raise CheckpointError(
                str(self.folder), f"'{name}' is incomplete", because="its shards do not cover all of its elements",
                fix="use an earlier checkpoint: --resume takes the last intact one",
            )  # fmt: skip
        full = torch.empty(entry["shape"], dtype=parts[0][0].dtype if parts else torch.float32)
        for part, at in parts:
            at.fill(full, part)
        return full

    def _part(self, name: str, file: str) -> Tensor:
        with disk_errors(self.folder / file), safe_open(self.folder / file, framework="pt") as shards:
            tensor: Tensor = shards.get_tensor(f"{self.group}/{name}")
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)


class MergedTensors(Mapping[str, Tensor]):
    """The tensors of one group, some of them stored complete and some sharded."""

    def __init__(self, complete: Mapping[str, Tensor], sharded: Mapping[str, Tensor]) -> None:
        self.complete, self.sharded = complete, sharded

    def __getitem__(self, name: str) -> Tensor:
        return self.complete[name] if name in self.complete else self.sharded[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.complete
        yield from (name for name in self.sharded if name not in self.complete)

    def __len__(self) -> int:
        return len({*self.complete, *self.sharded})
