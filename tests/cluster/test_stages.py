"""Every stage type that samples, on a cluster: the bits of one process. With LoRA only the adapter is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oncurve.cluster.messages import copy_weights, weights_as_bytes
from oncurve.models.loading.load import load_policy
from oncurve.recipe.schema.model import Lora, Model, TinyModel
from tests.cluster.started import Started, same_as_in_one_process
from tests.faults.cases import CASES

KINDS = [
    "sft then grpo",
    "process rewards",
    "dynamic sampling",
    "without a verifiable reward",
    "environments and drafts",
    "ppo",
    "rejection sampling",
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_on_a_cluster_leaves_what_it_leaves_in_one_process(cluster: Any, tmp_path: Path, kind: str) -> None:
    case = CASES[kind]
    scale = case.scale.model_copy(update={"samplers": 2, "reward_workers": 1})
    short = tuple(s.model_copy(update={"steps": min(s.steps, 8)}) for s in case.stages)
    recipe = case.model_copy(update={"scale": scale, "stages": short})
    started = Started.begin(tmp_path / "ray", recipe, cluster.address)
    started.end()
    same_as_in_one_process(started.run, recipe, tmp_path / "plain")


def test_with_lora_only_the_adapter_is_sent() -> None:
    small = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=48, context=64)
    model = Model(tiny=small, lora=Lora(rank=2))
    one, other = (load_policy(model, alphabet="0123456789+=", seed=seed) for seed in (0, 1))
    sent = weights_as_bytes(one)
    assert sent
    assert all("lora" in name for name in sent)
    assert sum(array.nbytes for array in sent.values()) < sum(p.nbytes for p in one.model.parameters()) / 4
    copy_weights(other, sent)
    for name, p in other.trainable.items():
        assert p.detach().numpy().tobytes() == one.trainable[name].detach().numpy().tobytes()
