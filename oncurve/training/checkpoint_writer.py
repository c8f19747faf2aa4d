"""Writes checkpoints in the background: the state is copied to host memory, and a thread writes it while training continues.

Training waits only for the copy, and for the previous checkpoint if that is still being written. Small states are written
directly, since the copy and the thread would cost more, and so are states that are too large to copy to host memory. A disk
error is raised on the training thread, at the next save or at the end. If ranks hold shards, each rank writes its own first,
and rank 0 adds them to the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oncurve.distributed.world import World
from oncurve.models.device_memory import free_memory
from oncurve.models.parallel.dtensor import is_dtensor, local_elements, local_range
from oncurve.runs.checkpoints import files
from oncurve.runs.checkpoints.shards import INDEX, TensorShard, merge_indexes, write_shards
from oncurve.training.learner.sharded_optimiser import is_replica

BACKGROUND_FROM = 32 << 20
"""Bytes of state from which a checkpoint is written in the background."""
SHARD_FOLDER = "pieces"
"""Folder of the run to which ranks write their shards, before they are moved into the checkpoint."""

Tensors = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """The content of a checkpoint: complete tensors, the files with the ranks' shards, and the index of the shards."""

    tensors: dict[str, dict[str, Tensor]]
    shards: list[Path] = field(default_factory=list)
    documents: dict[str, Any] = field(default_factory=dict)


def collect_checkpoint_state(
    world: World, folder: Path, state: Mapping[str, Mapping[str, Tensor | TensorShard]]
) -> CheckpointState:
    """Collective: every rank writes its shards of the state to the folder, and gets the index of all."""
    complete: dict[str, dict[str, Tensor]] = {group: {} for group in state}
    shards: dict[str, dict[str, TensorShard]] = {}
    for group, tensors in state.items():
        for name, tensor in tensors.items():
            if isinstance(tensor, TensorShard):
                shards.setdefault(group, {})[name] = tensor
            elif not is_dtensor(tensor):
                complete[group][name] = tensor
            elif not is_replica(tensor, world):
                shard = TensorShard(local_elements(tensor), local_range(tensor), tuple(tensor.shape))
                shards.setdefault(group, {})[name] = shard
    if world.shard == "none":
        return CheckpointState(complete)
    indexes = world.all_gather_dict({world.rank: write_shards(folder, world.rank, shards)})
    paths = [folder / f"pieces-{rank:05d}.safetensors" for rank in range(world.size)]
    return CheckpointState(
        {g: t for g, t in complete.items() if t}, paths, {INDEX: merge_indexes([indexes[r] for r in range(world.size)])}
    )


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """A checkpoint to write, and which others of its stage to keep: the ``keep`` newest, and those of steps in ``protect``."""

    stage: str
    step: int
    documents: Mapping[str, Any]
    keep: int
    protect: Collection[int] = ()
    shards: Collection[Path] = ()
    """Files that ranks have written for it."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that is completely written."""

    stage: str
    step: int
    path: Path


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time and in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="oncurve-saving")
        self._pending: Future[SavedCheckpoint] | None = None

    def save(self, request: CheckpointRequest, tensors: Tensors) -> list[SavedCheckpoint]:
        """Starts to write a checkpoint. Returns those that were completed since the last call."""
        completed = self.wait()
        size = sum(t.numel() * t.element_size() for group in tensors.values() for t in group.values())
        if size < BACKGROUND_FROM or size > free_memory() // 2:
            return [*completed, self._write(request, tensors)]
        self._pending = self._thread.submit(self._write, request, copy_to_host(tensors))
        return completed

    def completed(self) -> list[SavedCheckpoint]:
        """The checkpoints that were completed since the last call. Does not wait."""
        return self.wait() if self._pending is not None and self._pending.done() else []

    def wait(self) -> list[SavedCheckpoint]:
        """Waits for the checkpoint that is being written. Raises its disk error."""
        pending, self._pending = self._pending, None
        return [] if pending is None else [pending.result()]

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, request: CheckpointRequest, tensors: Tensors) -> SavedCheckpoint:
        path = files.save(self.folder, request.stage, request.step, tensors, request.documents, request.shards)
        files.prune(self.folder, request.stage, request.keep, request.protect)
        return SavedCheckpoint(request.stage, request.step, path)


def copy_to_host(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    """Copies in host memory, which training does not change. Tensors that share memory share their copy: it is written once."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        key = (tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if not tensor.numel() or key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    with torch.no_grad():
        return {file: {name: copy(tensor) for name, tensor in group.items()} for file, group in tensors.items()}
