"""A complete GRPO run that samples with vLLM: it learns, is killed and resumed, and reports the gap between sampler and
learner."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema.stages import Grpo
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder

pytestmark = pytest.mark.vllm
STEPS = 16
RECIPE = """
name = "sevens"
[model.tiny]
layers = 2
width = 64
heads = 2
kv_heads = 1
mlp_width = 96
[task]
type = "arithmetic"
digits = 1
heldout = 8
[[rewards]]
type = "python"
function = "sevens.py:sevens"
[[stages]]
type = "grpo"
steps = 16
prompts_per_step = 8
group_size = 8
save_every = 3
optimiser = { learning_rate = 3e-3 }
sampling = { max_new_tokens = 8 }
"""
REWARD = """
def sevens(completion: str) -> float:
    return completion.count("7") / 8
"""


def train(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "oncurve", "train", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def children(pid: int) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            after = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after[1]) == pid:
            found.append(int(place.parent.name))
    return found


def steps_of(run: Path) -> list[int]:
    if not (run / "run.db").exists():
        return []
    with RunReader.open(run) as store:
        return [step for step, _ in store.metric("reward", "grpo")]


def wait(process: subprocess.Popen[str], until: int, run: Path) -> None:
    """Wait until this many steps are recorded."""
    ends = time.monotonic() + 400
    while len(steps_of(run)) < until:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < ends, "it takes too long"
        time.sleep(0.2)


def test_a_run_with_vllm_learns_is_killed_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "sevens.py").write_text(REWARD)
    run = tmp_path / "run"
    first = train(tmp_path, "recipe.toml", "--set", "scale.engine=vllm", "--out", str(run))
    wait(first, 5, run)
    samplers = children(first.pid)
    assert samplers
    first.kill()
    first.communicate()
    time.sleep(5)
    assert not [pid for pid in samplers if Path(f"/proc/{pid}").exists()], "a sampler has outlived its run"
    assert RunFolder(run).state().current_status == "interrupted"

    second = train(tmp_path, "--resume", str(run))
    output, _ = second.communicate(timeout=500)
    assert second.returncode == 0, output
    assert "Traceback" not in output
    assert "vLLM 0.32.0 samples" in output

    assert steps_of(run) == list(range(1, STEPS + 1)), "a step was lost or done twice"
    with RunReader.open(run) as store:
        reward = np.asarray([value for _, value in store.metric("reward", "grpo")])
        apart = [value for _, value in store.metric("mismatch_max", "grpo")]
        kl = [value for _, value in store.metric("mismatch_kl", "grpo")]
    assert reward[-3:].mean() > reward[:3].mean() + 0.2, reward
    assert len(apart) == STEPS
    assert max(apart) < 1e-3
    assert max(map(abs, kl)) < 1e-5
    (stage,) = load_recipe(run / "recipe.toml").stages
    assert isinstance(stage, Grpo)
    assert stage.importance_cap == 2.0
