"""`oncurve replay`, `verify` and `doctor` from the command line."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from oncurve.cli.app import main
from oncurve.operations import doctor
from oncurve.operations.replay import replay
from oncurve.runs.folder import RunFolder
from oncurve.training.start import begin, fork
from tests.faults.cases import GRPO, SFT, SHORT, recipe
from tests.faults.test_exact import moody


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """sft and grpo with dynamic sampling; checkpoints of grpo at 3 and 5. Tests must not change it."""
    sft = {**SFT, "steps": 3, "eval_every": 0}
    grpo = {**GRPO, "steps": 5, "save_every": 3, "no_signal": "resample", "updates_per_step": 2, "kl": {"beta": 0.05}}
    return begin(recipe(sft, grpo, rewards=[SHORT]), out=tmp_path_factory.mktemp("commands") / "run")


@pytest.mark.parametrize(
    ("step", "start", "steps"), [(4, ("grpo", 3), 1), (5, ("grpo", 3), 2), (2, ("sft", 3), 2), (1, ("sft", 3), 1)]
)
def test_a_group_comes_out_the_same(step: int, start: tuple[str, int], steps: int, run: RunFolder) -> None:
    for group in (0, 2):
        result = replay(run, None, step, group)
        assert result.differences == []
        assert (result.start, result.steps) == (start, steps)


def test_replay_shows_the_group_and_the_differences(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = written(run)
    assert main(["replay", str(run.path), "--step", "4", "--group", "1"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "1 step repeated from the checkpoint of grpo step 3" in output
    assert "identical: 4 completions" in output
    assert written(run) == before
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)
    with closing(sqlite3.connect(copy.database)) as store, store:
        store.execute("UPDATE tokens SET logps = zeroblob(length(logps))")
    assert main(["replay", str(copy.path), "--step", "4", "--group", "1", "--json", "--trust"]) == 2
    data = json.loads(capsys.readouterr().out)
    assert data["identical"] is False
    assert "log-probs" in data["differences"][0]


def written(run: RunFolder) -> dict[str, int]:
    """When each file was last written, without the -wal and -shm files that readers of a database keep."""
    files = [p for p in run.path.rglob("*") if p.is_file() and not p.name.endswith(("-wal", "-shm"))]
    return {str(p): p.stat().st_mtime_ns for p in files}


def test_replay_uses_the_replies_that_were_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reward that never returns the same value twice, the stored values count."""
    monkeypatch.setattr("oncurve.operations.replay.reject_python_only", lambda recipe: None)
    run = begin(recipe({**GRPO, "steps": 2, "save_every": 1, "max_failure_share": 1.0}), out=tmp_path / "run", rewards=moody())
    monkeypatch.setattr("oncurve.operations.replay.build_tasks_and_rewards", lambda r: prepared(r))
    assert replay(run, None, 2, 0).differences == []


def prepared(asked: object) -> object:
    from oncurve.recipe.schema.recipe import Recipe
    from oncurve.training.start import build_tasks_and_rewards

    assert isinstance(asked, Recipe)
    return build_tasks_and_rewards(asked, None, moody())


def test_replay_of_what_is_not_there(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--step", "9", "--group", "0"],
        ["--step", "4", "--group", "77"],
        ["--step", "1", "--group", "0", "--stage", "x"],
    ):
        assert main(["replay", str(run.path), *words]) == 2
        assert "fix" in capsys.readouterr().err
    child = fork(run, 3, ["grpo.optimiser.learning_rate=0.01"], out=tmp_path / "child")
    assert replay(child, None, 4, 0).differences == []
    assert main(["replay", str(child.path), "--step", "2", "--group", "0"]) == 2
    assert "it is a fork of run" in " ".join(capsys.readouterr().err.split())


def test_verify_accepts_an_intact_run(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run.path)]) == 0
    output = capsys.readouterr().out
    assert "the run is intact" in output
    for part in ("run.json", "recipe.toml", "run.db", "stage grpo", "grpo-000003", "grpo-000005", "sft-000003", "model"):
        assert part in output


def hurt(run: RunFolder, name: str) -> None:
    path = run.path / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("checkpoints/grpo-000005/optimiser.safetensors", "optimiser.safetensors is damaged"),
        ("checkpoints/sft-000003/manifest.json", "manifest.json is damaged"),
        ("model/model.safetensors", "weights differ from grpo-000005"),
        ("model/config.json", "model"),
        ("recipe.toml", "recipe.toml"),
    ],
)
def test_verify_says_what_is_wrong(
    name: str, words: str, run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)
    hurt(copy, name)
    assert main(["verify", str(copy.path), "--json"]) == 2
    data = json.loads(capsys.readouterr().out)
    wrong = [f"{c['name']} {c['message']}" for c in data["checks"] if c["mark"] == "wrong"]
    assert any(words in line for line in wrong), wrong


def test_verify_looks_at_the_database_row_by_row(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)
    with closing(sqlite3.connect(copy.database)) as store, store:
        store.execute("DELETE FROM steps WHERE stage = 'grpo' AND step = 2")
    assert main(["verify", str(copy.path)]) == 2
    assert "rows refer to rows that do not exist" in " ".join(capsys.readouterr().out.split())
    copy.database.write_bytes(copy.database.read_bytes()[:5000])
    assert main(["verify", str(copy.path)]) == 2
    assert "wrong" in capsys.readouterr().out


def test_doctor_says_what_will_run_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--runs", str(tmp_path / "runs"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    checks = {c["name"]: c for c in data["checks"]}
    assert checks["training on cpu"]["mark"] == "ok", checks
    assert "bit for bit" in checks["training on cpu"]["message"]
    assert checks["runs"]["mark"] == "ok"
    assert {"versions", "machine", "C compiler", "sandbox", "disk"} <= checks.keys()
    assert not (tmp_path / "runs").exists(), "looking leaves nothing behind"


@pytest.mark.parametrize("columns", [80, 120])
def test_doctor_begins_with_a_verdict_and_ends_with_optional_packages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(doctor, "pip_install", lambda extra: f"pip install 'oncurve[{extra}]'")
    monkeypatch.setattr(doctor, "OPTIONAL", {f"absent_{name}": needed for name, needed in doctor.OPTIONAL.items()})
    assert main(["doctor", "--runs", str(tmp_path / "runs")]) == 0
    verdict, works, *notes, absent = capsys.readouterr().out.split("\n\n")
    assert verdict.startswith("ready to train on this ")
    assert works.startswith("works\n")
    assert "training on cpu" in works
    assert not any("install" in note for note in notes)
    lines = [line.rstrip() for line in absent.rstrip().splitlines()]
    assert "  LoRA                           pip install 'oncurve[lora]'" in lines
    assert len(lines) == 1 + len(doctor.OPTIONAL), "a title, and one line for each"


@pytest.mark.slow
def test_doctor_compares_several_ranks_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncurve.operations.doctor.SHARDS", ("optimiser",))
    assert main(["doctor", "--gpus", "2", "--runs", str(tmp_path / "runs"), "--json"]) == 0
    (check,) = (c for c in json.loads(capsys.readouterr().out)["checks"] if c["name"].startswith("ranks"))
    assert check["mark"] == "ok"
    assert "2 processes on the CPU" in check["message"]

    # Ranks that train something else are found: here each with another batch than the single rank.
    train = doctor._train
    monkeypatch.setattr(
        doctor,
        "_train",
        lambda out, settings: train(out, [*settings, "seed=1"] if "scale.ranks=2" in settings else settings),
    )
    (check,) = list(doctor._check_ranks(2))
    assert check.mark == "wrong"
    assert "differ" in check.message


def test_doctor_says_why_ranks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "RANKS_RECIPE", doctor.RANKS_RECIPE.replace("steps = 2", "steps = -2"))
    (check,) = list(doctor._check_ranks(2))
    assert (check.name, check.mark) == ("one rank", "wrong")
    assert "exit code 2" in check.message
    assert "grpo.steps" in check.message
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(doctor, "NCCL_PROGRAM", "raise SystemExit('no GPU')")
    nccl, one = list(doctor._check_ranks(2))
    assert (nccl.name, nccl.mark) == ("NCCL", "wrong")
    assert "exit code 1: no GPU" in nccl.message
    assert (one.name, one.mark) == ("one rank", "wrong")
