from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from oncurve.errors import DiskError, RunError
from oncurve.runs import atomic_files
from oncurve.runs.environment import environment
from oncurve.runs.folder import Parent, RunFolder, list_runs
from oncurve.workers.processes import is_alive, process_start
from tests.runs.processes import finish, start


def edit(run: RunFolder, **changes: object) -> None:
    path = run.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_names_number_themselves(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert [RunFolder.create(runs, "arithmetic").name for _ in range(2)] == ["arithmetic-1", "arithmetic-2"]
    (runs / "arithmetic-7").mkdir()
    (runs / "arithmetic-x").mkdir()
    assert RunFolder.create(runs, "arithmetic").name == "arithmetic-8"
    assert RunFolder.create(runs, "arithmetic-8").name == "arithmetic-8-1"


@pytest.mark.parametrize(("name", "folder"), [("a/b", "a-b-1"), ("../up", "up-1"), ("", "run-1"), ("größe 2", "größe-2-1")])
def test_any_recipe_name_makes_a_folder(tmp_path: Path, name: str, folder: str) -> None:
    assert RunFolder.create(tmp_path, name).path == tmp_path / folder


@pytest.mark.parametrize("name", ["a" * 5000, "é" * 5000, "x" * 99 + "😀" * 50, "." * 300, "ab/" * 200])
def test_a_long_name_is_shortened(tmp_path: Path, name: str) -> None:
    runs = [RunFolder.create(tmp_path, name) for _ in range(2)]
    assert runs[0].name.removesuffix("-1") == runs[1].name.removesuffix("-2")
    assert len(runs[0].name.encode()) < 110
    assert RunFolder.open(runs[1].name, tmp_path) == runs[1]


@pytest.mark.parametrize("name", ["a" * 5000, "a/" * 3000])
def test_a_path_that_no_file_can_have_is_one_error(tmp_path: Path, name: str) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: RunFolder.create_at(tmp_path / name),
        lambda: RunFolder.open(name, tmp_path),
        lambda: RunFolder.find(tmp_path / name, tmp_path),
    ]
    for attempt in attempts:
        with pytest.raises(DiskError, match="shorter name") as caught:
            attempt()
        assert len(str(caught.value)) < 400


def test_a_run_appears_with_all_its_first_files_or_not_at_all(tmp_path: Path) -> None:
    listed: list[list[str]] = []

    def fill(new: RunFolder, path: Path) -> None:
        assert path == tmp_path / "x-1"
        new.write_recipe("a = 1")
        listed.append([entry.name for entry in list_runs(tmp_path)])

    run = RunFolder.create(tmp_path, "x", fill=fill)
    assert listed == [[]]
    assert run.recipe.read_text() == "a = 1"

    def fail(new: RunFolder, path: Path) -> None:
        new.write_recipe("a = 1")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RunFolder.create(tmp_path, "x", fill=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["x-1"]
    run.remove()
    assert list(tmp_path.iterdir()) == []


def test_two_runs_that_are_made_at_the_same_time_get_different_names(tmp_path: Path) -> None:
    made: list[RunFolder] = []

    def fill(new: RunFolder, path: Path) -> None:
        if not made:
            made.append(RunFolder.create(tmp_path, "x"))

    assert RunFolder.create(tmp_path, "x", fill=fill).name == "x-2"
    assert made[0].name == "x-1"
    with pytest.raises(RunError, match="already exists"):
        RunFolder.create_at(tmp_path / "mine", fill=lambda new, path: void(RunFolder.create_at(tmp_path / "mine")))


def void(_: object) -> None:
    pass


def test_four_processes_never_get_the_same_number(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from oncurve.runs.folder import RunFolder
        for _ in range(10):
            print(RunFolder.create(Path(sys.argv[1]), "race").name)
    """
    names = [name for process in [start(code, tmp_path) for _ in range(4)] for name in finish(process).split()]
    assert sorted(names) == sorted(f"race-{number}" for number in range(1, 41))
    assert all(entry.status == "interrupted" for entry in list_runs(tmp_path))
    assert len(list_runs(tmp_path)) == 40


def test_the_state_comes_back(tmp_path: Path) -> None:
    parent = Parent("arithmetic-1", "grpo", 40, {"grpo.group_size": 16})
    run = RunFolder.create(tmp_path, "fork", parent=parent)
    state = RunFolder.open("fork-1", tmp_path).state()
    assert (state.name, state.status, state.current_status, state.pid) == ("fork-1", "running", "running", os.getpid())
    assert state.parent == parent
    assert state.environment == environment()
    assert "torch" in state.environment
    run.write_state(dataclasses.replace(state, status="failed"))
    assert run.state().status == "failed"
    edit(run, settings={"slots": 8})  # as runs of the first versions have it
    assert run.state().status == "failed"


def test_where_things_lie(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "x")
    run.write_recipe('name = "größe"\n')
    assert run.recipe.read_text(encoding="utf-8") == 'name = "größe"\n'
    names = [path.name for path in (run.recipe, run.database, run.checkpoints, run.model)]
    assert names == ["recipe.toml", "run.db", "checkpoints", "model"]
    assert {path.name for path in run.path.iterdir()} == {"recipe.toml", "run.json"}


def test_an_out_that_exists_is_refused(tmp_path: Path) -> None:
    run = RunFolder.create_at(tmp_path / "deep" / "mine")
    assert run.state().name == "mine"
    with pytest.raises(RunError, match=r"already exists(.|\n)*--resume"):
        RunFolder.create_at(run.path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match=r"already exists(.|\n)*choose another name"):
        RunFolder.create_at(tmp_path / "file")
    with pytest.raises(RunError, match="file is a file"):
        RunFolder.create_at(tmp_path / "file" / "below" / "it")


def test_opening_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no such run\n(.|\n)*has no runs yet"):
        RunFolder.open("arithmetic-1", tmp_path / "runs")
    run = RunFolder.create(tmp_path / "runs", "arithmetic")
    assert RunFolder.open("arithmetic-1", tmp_path / "runs") == run
    assert RunFolder.open(run.path, Path("elsewhere")) == run
    with pytest.raises(RunError, match="did you mean 'arithmetic-1'"):
        RunFolder.open("arithmetc-1", tmp_path / "runs")
    with pytest.raises(RunError, match="not a run\n"):
        RunFolder.open(tmp_path, tmp_path / "runs")


def test_a_newer_run_is_refused(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "x")
    edit(run, format=99, oncurve="9.9", unheard_of=True)
    with pytest.raises(RunError, match=r"newer version(.|\n)*format is 99, by Oncurve 9.9(.|\n)*upgrade Oncurve"):
        RunFolder.open("x-1", tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"format": 1}', b'{"format": "x"}', b"\xff\xfe", b'{"format": null}']
)
def test_broken_and_foreign_folders_are_listed_as_such(tmp_path: Path, content: bytes) -> None:
    good = RunFolder.create(tmp_path, "good")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "a-file").write_text("x")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "run.json").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    entries = {entry.name: entry for entry in list_runs(tmp_path)}
    assert set(entries) == {"good-1", "foreign", "torn", "folder"}
    assert list_runs(tmp_path)[0].path == good.path
    assert entries["good-1"].status == "running"
    assert all(entries[name].status == "broken" and entries[name].reason for name in ("foreign", "torn", "folder"))
    with pytest.raises(RunError, match="unreadable"):
        RunFolder.open("torn", tmp_path)


@pytest.mark.parametrize("change", [{"status": "resting"}, {"pid": None}, {"parent": {"run": "x"}}, {"created": "yesterday"}])
def test_a_wrong_state_is_broken(tmp_path: Path, change: dict[str, object]) -> None:
    edit(RunFolder.create(tmp_path, "x"), **change)
    assert list_runs(tmp_path)[0].status == "broken"


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    for number, created in enumerate([5.0, 9.0, 7.0], start=1):
        edit(RunFolder.create(tmp_path, "x"), created=created)
        assert (tmp_path / f"x-{number}").is_dir()
    assert [entry.name for entry in list_runs(tmp_path)] == ["x-2", "x-3", "x-1"]


def test_a_run_whose_process_is_gone_was_interrupted(tmp_path: Path) -> None:
    process = start("import time; time.sleep(60)")
    run = RunFolder.create(tmp_path, "x")
    edit(run, pid=process.pid, pid_started=process_start(process.pid))
    assert run.state().current_status == "running"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert run.state().current_status == "interrupted"  # a zombie still has its pid
    process.communicate()
    assert run.state().current_status == "interrupted"
    assert run.state().status == "running"
    edit(run, status="finished")
    assert run.state().current_status == "finished"


def test_a_pid_given_out_again_is_another_process(tmp_path: Path) -> None:
    started = process_start(os.getpid())
    assert started is not None
    assert is_alive(os.getpid(), started)
    assert not is_alive(os.getpid(), started - 1)
    run = RunFolder.create(tmp_path, "x")
    edit(run, pid_started=started - 1)
    assert list_runs(tmp_path)[0].status == "interrupted"
    edit(run, host=socket.gethostname() + "-other")
    assert list_runs(tmp_path)[0].status == "running"


def test_the_status_moves_and_running_claims(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "x")
    assert run.set_status("failed").current_status == "failed"
    edit(run, pid=1, pid_started=0, host="elsewhere")
    state = run.set_status("running")
    assert state == run.state()
    assert state.pid == os.getpid()
    assert state.host == socket.gethostname()


def test_no_folder_is_left_if_its_state_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_files, "write_durably", lambda path, content: Path("/dev/full").write_bytes(content))
    with pytest.raises(DiskError, match="no space left"):
        RunFolder.create(tmp_path / "runs", "x")
    with pytest.raises(DiskError, match="no space left"):
        RunFolder.create_at(tmp_path / "runs" / "mine")
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    atomic_files.replace_file(path, b"old")

    def half(aside: Path, content: bytes) -> None:
        aside.write_bytes(content[:1])
        Path("/dev/full").write_bytes(content)

    monkeypatch.setattr(atomic_files, "write_durably", half)
    with pytest.raises(DiskError):
        atomic_files.replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_who_may_read_a_folder_may_read_its_weights(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        folder.mkdir()
        save_file({"weight": np.zeros(1)}, folder / "model.safetensors")

    atomic_files.write_folder_atomically(tmp_path / "model", write)
    assert (tmp_path / "model" / "model.safetensors").stat().st_mode & 0o777 == (tmp_path / "model").stat().st_mode & 0o666
