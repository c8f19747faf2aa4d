"""Models, shards and the database on a disk that is full, or that loses power."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from oncurve.errors import DiskError
from oncurve.runs.atomic_files import write_folder_atomically
from oncurve.runs.checkpoints.shards import TensorShard, write_shards
from oncurve.runs.database.connection import open_database
from oncurve.runs.database.writer import RunWriter
from oncurve.tensor_range import ElementRange
from tests.training.builders import policy


@contextmanager
def max_file_size(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_model_that_does_not_fit_is_one_message_and_the_old_one_stays(tmp_path: Path) -> None:
    target, model = tmp_path / "model", policy()
    write_folder_atomically(target, model.save)
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    with max_file_size(20_000), pytest.raises(DiskError, match="no space left"):
        write_folder_atomically(target, model.save)
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before
    assert list(tmp_path.iterdir()) == [target]


def test_a_shard_that_does_not_fit_is_one_message(tmp_path: Path) -> None:
    shard = TensorShard(torch.zeros(9_000), ElementRange(0, 9_000), (9_000,))
    with max_file_size(20_000), pytest.raises(DiskError, match="no space left"):
        write_shards(tmp_path, 0, {"model": {"weight": shard}})


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were synced."""
    names: list[str] = []
    fsync = os.fsync

    def record(handle: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    return names


def test_a_folder_is_on_disk_before_it_gets_its_name(tmp_path: Path, synced: list[str]) -> None:
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_bytes(b"1")
        assert synced == []

    write_folder_atomically(tmp_path / "model", write)
    assert synced == ["weights", ".writing-model", tmp_path.name]


def test_a_flush_reaches_the_disk_while_a_reader_keeps_an_old_state_open(tmp_path: Path, synced: list[str]) -> None:
    with RunWriter.create(tmp_path) as store, closing(open_database(tmp_path / "run.db", read_only=True)) as reader:
        reader.execute("BEGIN").execute("SELECT * FROM events").fetchall()
        store.record_event("test", "recorded after the reader's state")
        store.flush()
        assert synced == ["run.db-wal"]
