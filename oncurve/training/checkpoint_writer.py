"""Saving behind training's back: a checkpoint is copied to host memory, and a thread writes it while the next step runs.

Training waits only for the copy; and, where it saves faster than the disk can write, for the checkpoint before. Small states
are written at once: the copy and the thread would cost more than they save. What the disk refuses is raised on the training
thread, at the next save or at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oncurve.runs.checkpoints import files
from oncurve.training.learner.oom_retry import available

BEHIND_FROM = 32 << 20
"""Bytes of state from which a checkpoint is written in the background."""

Tensors = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """A checkpoint to be written, and which others of its stage stay beside it."""

    stage: str
    step: int
    documents: Mapping[str, Any]
    keep: int
    protect: Collection[int] = ()
    pieces: Collection[Path] = ()
    """Files that ranks have written for it."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    stage: str
    step: int
    path: Path


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time and in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="oncurve-saving")
        self._under_way: Future[SavedCheckpoint] | None = None

    def save(self, wanted: CheckpointRequest, tensors: Tensors) -> list[SavedCheckpoint]:
        """Begins to write a checkpoint. Returns those that have become whole since it was last asked."""
        done = self.wait()
        size = sum(t.numel() * t.element_size() for group in tensors.values() for t in group.values())
        if size < BEHIND_FROM or size > _free_memory() // 2:
            return [*done, self._write(wanted, tensors)]
        self._under_way = self._thread.submit(self._write, wanted, on_host(tensors))
        return done

    def done(self) -> list[SavedCheckpoint]:
        """What has become whole, without waiting."""
        return self.wait() if self._under_way is not None and self._under_way.done() else []

    def wait(self) -> list[SavedCheckpoint]:
        """Waits for what is being written; raises what the disk said."""
        under_way, self._under_way = self._under_way, None
        return [] if under_way is None else [under_way.result()]

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, wanted: CheckpointRequest, tensors: Tensors) -> SavedCheckpoint:
        path = files.save(self.folder, wanted.stage, wanted.step, tensors, wanted.documents, wanted.pieces)
        files.prune(self.folder, wanted.stage, wanted.keep, wanted.protect)
        return SavedCheckpoint(wanted.stage, wanted.step, path)


def on_host(tensors: Tensors) -> dict[str, dict[str, Tensor]]:
    """Copies in host memory, which training can't change; tensors that are one stay one, so that they are written once."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        key = (tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if not tensor.numel() or key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    with torch.no_grad():
        return {file: {name: copy(tensor) for name, tensor in group.items()} for file, group in tensors.items()}


def _free_memory() -> int:
    """Host memory that a copy may take, in bytes. Where the system does not say, as much as is needed."""
    found = available()
    return 1 << 62 if found is None else found
