"""vLLM as the sampler on a cluster: `make test-vllm` runs this in an environment that has vLLM and Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oncurve.runs.database.reader import RunReader
from tests.cluster.started import Started, each_group_once
from tests.faults.cases import FORMAT, GRPO, SHORT, recipe

pytestmark = pytest.mark.vllm
STEPS = 8
TINY = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 1, "head_size": 32, "mlp_width": 96, "context": 64}


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_run_whose_sampler_is_vllm(cluster: Any, tmp_path: Path, max_staleness: int) -> None:
    """Weights reach it before each step: sampler and learner agree, up to the allowed staleness."""
    stage = {**GRPO, "steps": STEPS, "save_every": 4, "eval_every": 0, "sampling": {"max_new_tokens": 24}}
    scale = {"samplers": 1, "engine": "vllm", "max_staleness": max_staleness}
    run = recipe(stage, rewards=[FORMAT, SHORT], scale=scale, model={"tiny": TINY}, engine={"slots": 16})
    started = Started.begin(tmp_path / "ray", run, cluster.address)
    started.end()
    each_group_once(started.run, STEPS, 3)
    with RunReader.open(started.run.path) as store:
        mismatch = dict(store.metric("mismatch_kl", "grpo"))
        if max_staleness:
            assert max(v for _, v in store.metric("staleness_max", "grpo")) <= max_staleness
            assert store.versions("grpo", STEPS)
        else:
            assert max(mismatch.values()) < 1e-5
            assert not store.versions("grpo", STEPS)
