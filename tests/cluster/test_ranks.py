"""Several learner ranks on a cluster, each with its own sampler; one of them is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oncurve.runs.folder import RunFolder
from oncurve.training.start import begin
from tests.cluster.started import Started, each_group_once
from tests.faults.cases import FORMAT, GRPO, SHORT, recipe

pytestmark = pytest.mark.slow
STEPS = 40
STAGE = {**GRPO, "steps": STEPS, "prompts_per_step": 4, "save_every": 10, "eval_every": 0}


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_two_ranks_learn_what_one_process_learns_even_if_one_dies(cluster: Any, tmp_path: Path, kind: str) -> None:
    """The same gradient up to rounding, on the same prompts and random numbers."""
    stage = {**STAGE, "type": kind, "name": "grpo"}
    run = recipe(stage, rewards=[FORMAT, SHORT], scale={"ranks": 2, "samplers": 2, "timeout_s": 120.0})
    started = Started.begin(tmp_path / "ray", run, cluster.address)
    started.until(15)
    started.kill("rank-1")
    started.end()
    each_group_once(started.run, STEPS, 4)
    assert "the learner died" in " ".join(started.events())
    check_same(started, begin(recipe(stage, rewards=[FORMAT, SHORT]), out=tmp_path / "plain"))


def check_same(started: Started, plain: RunFolder) -> None:
    ours, theirs = (load_file(run.model / "model.safetensors") for run in (started.run, plain))
    for name, expected in theirs.items():
        assert torch.allclose(ours[name], expected, atol=1e-3), name


def test_two_ranks_that_split_layers_learn_what_one_process_learns(cluster: Any, tmp_path: Path) -> None:
    tiny = {"tiny": {"layers": 2, "width": 32, "heads": 2, "kv_heads": 2, "head_size": 16, "mlp_width": 48, "context": 64}}
    stage = {**STAGE, "steps": 8}
    scale = {"ranks": 2, "shard": "full", "tensor": 2, "timeout_s": 120.0}
    started = Started.begin(tmp_path / "ray", recipe(stage, rewards=[FORMAT, SHORT], model=tiny, scale=scale), cluster.address)
    started.end()
    each_group_once(started.run, 8, 4)
    check_same(started, begin(recipe(stage, rewards=[FORMAT, SHORT], model=tiny), out=tmp_path / "plain"))
