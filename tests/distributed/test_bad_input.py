"""User errors before ranks have joined: rank 0 prints one message with the fix, all exit with code 2, no process is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

import oncurve
from oncurve.cli.app import main
from oncurve.cluster import learner_actor
from oncurve.distributed import rendezvous
from oncurve.distributed.rank_status import read_statuses
from oncurve.errors import ScaleError
from oncurve.recipe.load import dump_recipe
from oncurve.workers.processes import is_alive
from tests.distributed.processes import SERVER, environment
from tests.distributed.runs import GONE_S, last_step, run_recipe, until
from tests.training.builders import recipe as small

HERE = Path(oncurve.__file__).parents[1]


def write_recipe(path: Path, ranks: int, *sets: str) -> Path:
    path.write_text(dump_recipe(run_recipe(ranks, *sets)))
    return path


def _oncurve(folder: Path, arguments: tuple[str, ...], environ: dict[str, str], log: Path, code: Path | None) -> None:
    os.environ.update(environ)
    os.chdir(folder)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if code is not None:
        rendezvous.PACKAGE = code
    sys.exit(main(arguments))


class Process:
    """`oncurve …` in a separate process. ``code``: the folder that it takes for Oncurve's own code."""

    def __init__(self, folder: Path, *arguments: str, environ: dict[str, str], code: Path | None = None) -> None:
        self.log = folder / f"{time.monotonic_ns()}.log"
        self.started = SERVER.Process(target=_oncurve, args=(folder, arguments, {"COLUMNS": "200", **environ}, self.log, code))
        self.started.start()

    def code(self, seconds: float = 300) -> int | None:
        self.started.join(seconds)
        code = self.started.exitcode
        self.started.kill()
        self.started.join()
        return code

    @property
    def stderr(self) -> str:
        return self.log.read_text()


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def as_ranks(folder: Path, store: TCPStore, *of_rank: str, code: Path | None = None) -> list[Process]:
    """`oncurve train RECIPE` on each rank, with a recipe for each; with ``code``, the last rank has other code."""
    last = len(of_rank) - 1
    return [
        Process(folder, "train", path, environ=environment(rank, len(of_rank), store.port), code=code if rank == last else None)
        for rank, path in enumerate(of_rank)
    ]


def test_more_ranks_than_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path / "r.toml", 1)
    assert main(["train", str(recipe), "--set", "scale.ranks=6", "--out", str(tmp_path / "out")]) == 2
    stderr = capsys.readouterr().err
    assert "scale.ranks: 6" in stderr
    assert "use 5 ranks or fewer" in stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests a machine without a GPU")
def test_gpus_on_a_machine_without_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path / "r.toml", 1)
    assert main(["train", str(recipe), "--gpus", "2", "--out", str(tmp_path / "out")]) == 2
    stderr = capsys.readouterr().err
    assert "this machine has 0 GPUs" in stderr
    assert "--set scale.ranks=N" in stderr


@pytest.mark.parametrize(
    ("sets", "where", "fix"),
    [
        (["scale.ranks=4", "scale.tensor=3"], "scale.tensor", "use a divisor of 4"),
        (["scale.ranks=4", "scale.tensor=2"], "scale.tensor", 'use shard = "full"'),
        (["scale.ranks=4", "scale.tensor=2", "scale.shard=optimiser"], "scale.tensor", 'use shard = "full"'),
        (["scale.ranks=1", "scale.tensor=1", "scale.offload=true"], "scale.offload", "shard"),
        (["scale.vllm_tensor=2"], "scale.vllm_tensor", 'use engine = "vllm"'),
        (["scale.vllm_tensor=2", "scale.engine=vllm", "scale.ranks=2"], "scale.vllm_tensor", "use ranks = 1"),
    ],
)
def test_sizes_that_do_not_divide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sets: list[str], where: str, fix: str
) -> None:
    recipe = write_recipe(tmp_path / "r.toml", 1)
    assert main(["train", str(recipe), *[word for s in sets for word in ("--set", s)]]) == 2
    stderr = capsys.readouterr().err
    assert where in stderr
    assert fix in stderr


def test_a_stage_that_cannot_be_sharded(tmp_path: Path, store: TCPStore) -> None:
    """The recipe itself is valid: rank 0 prints the error, and the other rank exits silently."""
    stage = 'stages=[{type = "ppo", steps = 1, prompts_per_step = 2, sampling.max_new_tokens = 8}]'
    recipe = str(write_recipe(tmp_path / "r.toml", 2, "scale.shard=full", stage))
    first, second = as_ranks(tmp_path, store, recipe, recipe)
    assert [first.code(), second.code(GONE_S)] == [2, 2]
    assert "scale.shard: full" in first.stderr
    assert 'use scale.shard = "optimiser"' in first.stderr
    assert second.stderr == ""
    assert not (tmp_path / "runs").exists()


def test_ranks_with_different_recipes(tmp_path: Path, store: TCPStore) -> None:
    one, other = write_recipe(tmp_path / "one.toml", 2), write_recipe(tmp_path / "other.toml", 2, "seed=1")
    first, second = as_ranks(tmp_path, store, str(one), str(other))
    assert [first.code(), second.code(GONE_S)] == [2, 2]
    assert "rank 1 on" in first.stderr
    assert "recipe differs from rank 0's" in first.stderr
    assert "start every rank with the same recipe" in first.stderr
    assert second.stderr == ""


def test_ranks_with_different_code(tmp_path: Path, store: TCPStore) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(HERE / "oncurve", copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "errors.py").open("a") as file:
        file.write("\n# another version\n")
    recipe = str(write_recipe(tmp_path / "r.toml", 2))
    first, second = as_ranks(tmp_path, store, recipe, recipe, code=copy)
    assert [first.code(), second.code(GONE_S)] == [2, 2]
    assert "Oncurve's code differs from rank 0's" in first.stderr
    assert second.stderr == ""


def test_rank_zero_prints_the_error_of_a_rank_that_cannot_start(tmp_path: Path, store: TCPStore) -> None:
    recipe = str(write_recipe(tmp_path / "r.toml", 2))
    first, second = as_ranks(tmp_path, store, recipe, str(tmp_path / "missing.toml"))
    assert [first.code(), second.code(GONE_S)] == [2, 2]
    assert re.search(r"rank 1 on \S+: .*missing\.toml", first.stderr)
    assert second.stderr == ""


def test_a_rank_that_does_not_start(tmp_path: Path, store: TCPStore) -> None:
    recipe = str(write_recipe(tmp_path / "r.toml", 2, "scale.timeout_s=4.0"))
    alone = Process(tmp_path, "train", recipe, environ=environment(0, 2, store.port))
    assert alone.code() == 2
    assert "rank 1 of 2: did not connect within 4 s" in alone.stderr


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """MASTER_PORT is taken, for the launcher and for a rank 0 started otherwise."""
    recipe = str(write_recipe(tmp_path / "r.toml", 2))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launched = Process(tmp_path, "train", recipe, environ={"MASTER_PORT": str(port)})
        plain = {**environment(0, 2, port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        first = Process(tmp_path, "train", recipe, environ=plain)
        for process in (launched, first):
            assert process.code() == 2
            assert f"port {port}: already taken" in process.stderr
            assert "set MASTER_PORT to a free one" in process.stderr


def pids(path: Path) -> list[int]:
    return [status.pid for status in read_statuses(path)]


@pytest.mark.slow
def test_launched_ranks_end_together(tmp_path: Path) -> None:
    """One of the ranks that `oncurve train` started is killed: all end, with one message. Then the launcher is."""
    recipe = str(write_recipe(tmp_path / "r.toml", 2, "grpo.steps=2000", "grpo.save_every=0"))
    run = Process(tmp_path, "train", recipe, "--out", "run", environ={"PYTHONPATH": str(HERE)})
    until(lambda: last_step(tmp_path / "run") >= 2 and len(pids(tmp_path / "run")) == 2)
    _, second = pids(tmp_path / "run")
    os.kill(second, signal.SIGKILL)
    assert run.code(GONE_S) == 2
    assert run.stderr.count("error") == 1
    assert "rank 1 of 2: its process" in run.stderr

    run = Process(tmp_path, "train", recipe, "--out", "other", environ={"PYTHONPATH": str(HERE)})
    until(lambda: last_step(tmp_path / "other") >= 2 and len(pids(tmp_path / "other")) == 2)
    left = pids(tmp_path / "other")
    run.started.kill()
    until(lambda: not any(map(is_alive, left)), seconds=GONE_S)


@pytest.mark.slow
def test_torchrun_starts_ranks_too(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path / "r.toml", 2, "grpo.steps=2"))
    environ = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "oncurve", "train"]
    done = subprocess.run([*command, recipe, "--out", "run"], cwd=tmp_path, env=environ, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()
    assert last_step(tmp_path / "run") == 2
    assert len(pids(tmp_path / "run")) == 2


def test_learners_of_a_cluster_need_not_see_the_gpus_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray shows each actor its own GPU only, also if another learner is on the same machine."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    chosen: list[int] = []
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "0")
    recipe = small("scale.ranks=2")
    assert rendezvous._backend(recipe, 1) == "cpu:gloo,cuda:nccl"
    assert chosen == [0]
    with pytest.raises(ScaleError, match="2 ranks"):
        rendezvous._backend(recipe, 2)
    monkeypatch.setattr(learner_actor, "joined_ranks", lambda *_, has_own_gpu: nullcontext(has_own_gpu))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    locations = [SimpleNamespace(host="one", address="127.0.0.1")] * 2
    task: Any = SimpleNamespace(ranks=locations, port=1, session_id="secret")
    with learner_actor._joined_ranks(task, recipe, 1) as has_own_gpu:
        assert has_own_gpu
