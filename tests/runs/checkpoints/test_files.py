from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oncurve.errors import CheckpointError, DiskError
from oncurve.runs.checkpoints import files
from oncurve.runs.checkpoints.files import load, newest_valid, prune, remove_leftovers, save
from oncurve.runs.checkpoints.listing import checkpoint_path, list_checkpoints
from tests.runs.processes import finish, kill_when_ready, start


def write(folder: Path, stage: str, step: int) -> Path:
    tensors = {"model": {"w": torch.full((2, 3), float(step)), "b": torch.arange(3)}, "optimiser": {"m.w": torch.zeros(2, 3)}}
    return save(folder, stage, step, tensors, {"trainer": {"step": step, "rate": 0.1}})


def no_damage(path: Path, why: str) -> None:
    raise AssertionError(f"{path}: {why}")


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoints", "grpo", 120)
    assert path.name == "grpo-000120"
    files = {"manifest.json", "model.safetensors", "optimiser.safetensors", "trainer.json"}
    assert {file.name for file in path.iterdir()} == files
    loaded = load(path)
    assert (loaded.path, loaded.stage, loaded.step) == (path, "grpo", 120)
    assert loaded.documents == {"trainer": {"step": 120, "rate": 0.1}}
    assert set(loaded.tensors) == {"model", "optimiser"}
    assert torch.equal(loaded.tensors["model"]["w"], torch.full((2, 3), 120.0))
    assert torch.equal(loaded.tensors["model"]["b"], torch.arange(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_every_type_of_number_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = (torch.randn(5, 4, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    loaded = load(save(tmp_path, "s", 1, {"a": {"x": tensor, "none": tensor[:0], "scalar": tensor[0, 0]}}, {}))
    for name, expected in {"x": tensor, "none": tensor[:0], "scalar": tensor[0, 0]}.items():
        got = loaded.tensors["a"][name]
        assert got.dtype == dtype
        assert got.shape == expected.shape
        assert torch.equal(got, expected)


def test_tied_tensors_are_written_once_and_come_back_tied(tmp_path: Path) -> None:
    embedding = torch.nn.Parameter(torch.randn(1000, 8))
    path = save(tmp_path, "s", 1, {"model": {"embed": embedding, "head": embedding, "other": torch.ones(2)}}, {})
    assert (path / "model.safetensors").stat().st_size < 1.2 * embedding.numel() * 4
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"]["model.safetensors"]["aliases"] == {"head": "embed"}
    loaded = load(path).tensors["model"]
    assert loaded["head"] is loaded["embed"]
    assert torch.equal(loaded["embed"], embedding)
    assert set(loaded) == {"embed", "head", "other"}


def test_views_of_one_memory_are_kept_apart(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    views = {"all": base, "shaped": base.view(3, 4), "turned": base.view(3, 4).T, "part": base[2:5], "overlap": base[4:8]}
    loaded = load(save(tmp_path, "s", 1, {"model": views}, {})).tensors["model"]
    for name, view in views.items():
        assert torch.equal(loaded[name], view)


def test_a_file_s_name_may_carry_its_ending(tmp_path: Path) -> None:
    path = save(tmp_path, "s", 1, {"model.safetensors": {"x": torch.ones(1)}}, {"state.json": [1, None, 0.1]})
    assert load(path).documents == {"state.json": [1, None, 0.1]}
    assert "model.safetensors" in load(path).tensors


@pytest.mark.parametrize("stage", ["grpo", "second stage", "a/b", "..", ".writing-x", "hard-000003", "größer"])
def test_any_stage_name_makes_one_folder(tmp_path: Path, stage: str) -> None:
    path = write(tmp_path, stage, 7)
    assert path.parent == tmp_path
    assert path == checkpoint_path(tmp_path, stage, 7)
    assert [(entry.stage, entry.step) for entry in list_checkpoints(tmp_path)] == [(stage, 7)]
    assert load(path).stage == stage


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_byte_is_found(tmp_path: Path, data: st.DataObject) -> None:
    shutil.rmtree(tmp_path)
    path = write(tmp_path, "grpo", 1)
    file = data.draw(st.sampled_from(sorted(path.iterdir())))
    content = bytearray(file.read_bytes())
    entry = data.draw(st.integers(0, len(content) - 1))
    content[entry] ^= data.draw(st.sampled_from([0x01, 0x80, 0xFF]))
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert file.name in str(caught.value) or "newer version" in str(caught.value)


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors", "optimiser.safetensors", "trainer.json"])
@pytest.mark.parametrize("damage", ["truncated", "missing", "longer"])
def test_the_one_before_a_damaged_checkpoint_is_used(tmp_path: Path, file: str, damage: str) -> None:
    write(tmp_path, "sft", 900)
    write(tmp_path, "grpo", 1)
    newest = write(tmp_path, "grpo", 2)
    target = newest / file
    if damage == "missing":
        target.unlink()
    elif damage == "truncated":
        os.truncate(target, target.stat().st_size - 5)
    else:
        target.write_bytes(target.read_bytes() + b"x")
    output: list[tuple[Path, str]] = []
    loaded = newest_valid(tmp_path, lambda path, why: output.append((path, why)))
    assert loaded is not None
    assert (loaded.stage, loaded.step) == ("grpo", 1)
    assert [path for path, _ in output] == [newest]
    assert file in output[0][1]


def test_the_newest_is_the_last_written_whatever_its_stage_or_step(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "none", no_damage) is None
    for stage, step in (("z", 500), ("b", 1000), ("a", 3)):
        write(tmp_path, stage, step)
    shutil.copytree(tmp_path, tmp_path / "copy")
    for folder in (tmp_path, tmp_path / "copy"):
        loaded = newest_valid(folder, no_damage)
        assert loaded is not None
        assert (loaded.stage, loaded.step) == ("a", 3)


def test_a_checkpoint_saved_again_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, "grpo", 1)
    path = save(tmp_path, "grpo", 1, {}, {"trainer": "again"})
    assert load(path).documents == {"trainer": "again"}
    assert [file.name for file in tmp_path.iterdir()] == ["grpo-000001"]


def test_pruning_keeps_the_last_and_the_protected(tmp_path: Path) -> None:
    for step in range(1, 7):
        write(tmp_path, "grpo", step)
    write(tmp_path, "sft", 1)
    gone = prune(tmp_path, "grpo", keep=2, protect={1})
    assert [path.name for path in gone] == ["grpo-000002", "grpo-000003", "grpo-000004"]
    assert [(entry.stage, entry.step) for entry in list_checkpoints(tmp_path)] == [
        ("grpo", 1),
        ("grpo", 5),
        ("grpo", 6),
        ("sft", 1),
    ]
    assert prune(tmp_path, "grpo", keep=2, protect={1}) == []


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "grpo", 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match=r"newer version(.|\n)*format is 99(.|\n)*upgrade Oncurve"):
        load(path)


@pytest.mark.parametrize("moment", ["before the rename", "between the renames"])
def test_a_kill_while_saving_leaves_no_half_checkpoint(tmp_path: Path, moment: str) -> None:
    write(tmp_path, "grpo", 1)
    code = """
        import sys, time
        from pathlib import Path
        from oncurve.runs import checkpoints
        from tests.runs.checkpoints.test_files import write
        real, stop_at = Path.rename, ".writing-"
        def stuck(self, target):
            if self.name.startswith(stop_at):
                print("ready", flush=True)
                time.sleep(60)
            return real(self, target)
        Path.rename = stuck
        write(Path(sys.argv[1]), "grpo", int(sys.argv[2]))
    """
    kill_when_ready(start(code, tmp_path, 2 if moment == "before the rename" else 1))
    leftovers = {path.name for path in tmp_path.iterdir() if path.name.startswith(".")}
    if moment == "before the rename":
        assert leftovers == {".writing-grpo-000002"}
        assert newest_valid(tmp_path, no_damage) is not None
    else:
        assert leftovers == {".writing-grpo-000001", ".replaced-grpo-000001"}
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["grpo-000001"]
    loaded = newest_valid(tmp_path, no_damage)
    assert loaded is not None
    assert loaded.documents["trainer"]["step"] == 1


def test_a_disk_that_fills_up_leaves_the_last_good_state(tmp_path: Path) -> None:
    """A real error in the middle of a file: the process may not write files larger than 100 kB."""
    write(tmp_path, "grpo", 1)
    code = """
        import resource, sys
        from pathlib import Path
        import torch
        from oncurve.errors import DiskError
        from oncurve.runs.checkpoints.files import save
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        for tensors, documents in (({"model": {"w": torch.zeros(100_000)}}, {}), ({}, {"big": "x" * 200_000})):
            try:
                save(Path(sys.argv[1]), "grpo", 2, tensors, documents)
            except DiskError as error:
                print(error)
    """
    output = finish(start(code, tmp_path))
    assert output.count("grpo-000002: no space left: 0.4 MiB needed, ") == 1
    assert output.count("no space left: 0.2 MiB needed, ") == 1
    assert output.count("earlier files are intact") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["grpo-000001"]
    assert newest_valid(tmp_path, no_damage) is not None


def test_no_room_is_noticed_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda path: 10)
    with pytest.raises(DiskError, match="no space left"):
        write(tmp_path, "grpo", 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "message"), [(errno.EACCES, "not allowed"), (errno.EROFS, "read-only"), (errno.ENOSPC, "no space left")]
)
def test_every_refusal_of_the_disk_is_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(number, os.strerror(number), str(path))

    write(tmp_path, "grpo", 1)
    monkeypatch.setattr(files, "write_durably", refuse)
    with pytest.raises(DiskError, match=message):
        write(tmp_path, "grpo", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["grpo-000001"]


def test_files_are_as_readable_as_their_folder(tmp_path: Path) -> None:
    path = write(tmp_path, "grpo", 1)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {path.stat().st_mode & 0o666}
