"""Commands find the files of a run's recipe, whose paths are relative, also if they are called in another folder."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from oncurve.runs.folder import RunFolder
from tests.cli.conftest import Oncurve
from tests.studio.serving import served
from tests.studio.test_trust import COOKIES, TOKEN

RECIPE = """
name = "stops"
threads = 1
model = { tiny = { layers = 1, width = 32, heads = 2, kv_heads = 1, head_size = 16, mlp_width = 64, context = 128 } }
task = { type = "file", path = "data/rows.jsonl", heldout = 4, environment = "own/stops.py:Stops" }
rewards = [{ type = "answer" }, { type = "python", name = "short", function = "own/stops.py:short" }]

[[stages]]
type = "grpo"
steps = 2
prompts_per_step = 2
group_size = 4
save_every = 1
sampling = { max_new_tokens = 16 }
"""
STOPS = """
class Stops:
    calls = ("1", "2", "3")

    def reply(self, prompt, turns, dice):
        return "." if len(turns) < 4 else None

def short(completion):
    return float(len(completion) < 8)
"""


def write_project(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    (folder / "own").mkdir()
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (folder / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own" / "stops.py").write_text(STOPS)
    (folder / "stops.toml").write_text(RECIPE)


@pytest.fixture
def run(tmp_path: Path, oncurve: Oncurve, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of a project's folder, with another folder as the current one."""
    write_project(tmp_path / "project")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    assert oncurve("train", "stops.toml", "--out", "runs/stops").code == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    return RunFolder(tmp_path / "project" / "runs" / "stops")


def test_commands_in_another_folder(run: RunFolder, oncurve: Oncurve, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(run.path.parents[1] / "data" / "rows.jsonl", "mine.jsonl")
    path = "../project/runs/stops"
    assert oncurve("export", f"{path}@grpo-1", "model").code == 0
    assert Path("model/config.json").is_file()
    monkeypatch.setattr("sys.stdin", io.StringIO("1+2=\n"))
    assert oncurve("chat", f"{path}@grpo-1", "--tools", "--max-new-tokens", "8").code == 0
    assert json.loads(oncurve("replay", path, "--step", "2", "--group", "0", "--json").out)["identical"] is True
    assert oncurve("eval", path).code == 0
    rows = json.loads(oncurve("eval", path, "--data", "mine.jsonl", "--json").out)["rows"]
    assert rows == 25, "--data is relative to the current folder"
    assert oncurve("probe", path, "--prompts", "2", "--samples", "2").code == 0
    assert oncurve("rewards", "replay", path).code == 0
    assert "reward functions and data files as when the run began" in " ".join(oncurve("verify", path).out.split())


def test_a_copy_of_the_project_uses_its_own_files(run: RunFolder, oncurve: Oncurve, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = run.path.parents[2] / "copy"
    write_project(copy)
    (copy / "own" / "stops.py").write_text("raise SystemExit('the copy')")
    monkeypatch.chdir(copy)
    assert "the copy" in oncurve("eval", run.path).err


def test_a_stopped_run_resumes_in_another_folder(run: RunFolder, oncurve: Oncurve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.path.parents[1])
    assert oncurve("train", "stops.toml", "--out", "runs/stopped", "--minutes", "0").code == 0
    monkeypatch.chdir(run.path.parents[2] / "elsewhere")
    result = oncurve("train", "--resume", "../project/runs/stopped")
    assert result.code == 0, result.err
    assert RunFolder(run.path.with_name("stopped")).state().current_status == "finished"


def test_a_fork_in_another_folder_uses_its_parents_files_and_is_made_here(run: RunFolder, oncurve: Oncurve) -> None:
    result = oncurve("fork", "../project/runs/stops", "--step", "1")
    assert result.code == 0, result.err
    fork = RunFolder(Path("runs/stops-1"))
    assert fork.state().current_status == "finished"
    assert fork.state().folder == str(run.path.parents[1]), "its files are there for later commands too"
    assert oncurve("fork", "../project/runs/stops", "--step", "1", "--out", "mine").code == 0
    assert Path("mine/run.json").is_file()


def test_a_studio_in_another_folder_scores_with_the_runs_rewards(run: RunFolder) -> None:
    body = {"rewards": [], "prompt": "1+1=", "columns": {"answer": "2"}, "completions": ["2", "a long answer: 2"]}
    with served(run.path.parent, TOKEN, allow_code=True) as studio:
        scored = studio.ask("/api/trial?run=stops&trusted=true", COOKIES, body=body).json["completions"]
    assert [one["aspects"][1]["value"] for one in scored] == [1.0, 0.0]


def test_trust_is_for_files_of_one_folder(run: RunFolder, oncurve: Oncurve, tmp_path: Path) -> None:
    """Otherwise a changed run.json would run other code than what the user agreed to."""
    assert oncurve("eval", run.path).code == 0
    state = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**state, "folder": str(tmp_path / "theirs")}))
    message = " ".join(oncurve("eval", run.path).err.split())
    assert "not trusted" in message
    assert "theirs" in message
