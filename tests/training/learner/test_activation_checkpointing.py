"""Activation checkpointing: the same gradient, and as few layers as fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from oncurve.distributed.world import SINGLE_PROCESS
from oncurve.engines.native.engine import NativeEngine
from oncurve.models.packing import build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine
from oncurve.recipe.schema.stages import Grpo, Ppo, RewardModel, Sft, Trpo
from oncurve.rewards.mix import RewardMix
from oncurve.tasks.data.reward_model_data import RewardModelData
from oncurve.training.learner import activation_checkpointing
from oncurve.training.learner.activation_checkpointing import (
    MAX_FRACTION,
    checkpoint_layers,
    decoder_layers,
    layers_to_checkpoint,
    saved_bytes_per_token,
)
from oncurve.training.stages.grpo import GrpoLoop
from oncurve.training.stages.ppo import PpoLoop
from oncurve.training.stages.reward_model import RewardModelLoop
from oncurve.training.stages.sft import SftLoop
from oncurve.training.stages.trpo import TrpoLoop
from tests.distributed.cases import CaseReward
from tests.distributed.stage_cases import EXAMPLES, dpo_loop
from tests.models.architectures import make_model, tokenizer
from tests.models.test_every_family import CharacterTokenizer
from tests.models.test_pack_attention import far_apart, gradients, groups_of, weighted
from tests.models.tiny_families import tiny_model
from tests.training.builders import PROMPTS, policy
from tests.training.stages.test_sft import TASK


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_the_gradient_is_the_same_with_any_number_of_layers(name: str) -> None:
    policy = Policy(make_model(name), tokenizer())
    policy.fast_backbone = None  # through transformers' modules, which every architecture has
    pack = build_pack(groups_of("ragged"), policy.device)
    layer: Any = policy.backbone.layers[0]  # type: ignore[index]
    calls: list[bool] = []
    layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    results = []
    for count in (0, 1, 2, 0):
        checkpoint_layers(policy, count)
        calls.clear()
        results.append(gradients(policy.model, weighted(*policy.pack_logps(pack, 0.9))))
        assert len(calls) == 1
    for other in results[1:]:
        assert all(far_apart(a, b) < 1e-6 for a, b in zip(other, results[0], strict=True))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("bloom", "falcon", "hrm_text", "mpt", "opt", "qwen3_next")]


@pytest.mark.parametrize("family", ["gpt2", *SLOW])
def test_families_that_name_their_layers_otherwise(family: str) -> None:
    policy = Policy(tiny_model(family), CharacterTokenizer())
    pack = build_pack(groups_of("ragged"), policy.device)
    layers = decoder_layers(policy.backbone)
    calls: list[nn.Module] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, _: calls.append(module))
    results = []
    for count in (0, len(layers)):
        checkpoint_layers(policy, count)
        results.append(gradients(policy.model, weighted(*policy.pack_logps(pack, 0.9))))
    assert set(calls) == set(layers), "each of them is run"
    assert sum(len(list(layer.parameters())) for layer in layers) > 0.5 * len(list(policy.backbone.parameters()))
    assert all(far_apart(a, b) < 1e-6 for a, b in zip(*results, strict=True))


def test_as_few_layers_as_possible_are_checkpointed() -> None:
    """Each of 2 layers saves 40 tokens × saved bytes; a checkpointed one saves only 40 × the residual, and is recomputed."""
    policy = Policy(make_model("llama"), tokenizer())
    each, residual = 40 * saved_bytes_per_token(policy), 40 * 4 * policy.model.config.hidden_size
    assert layers_to_checkpoint(policy, 40, int(2 * each / MAX_FRACTION) + 2) == 0
    assert layers_to_checkpoint(policy, 40, int((each + 2 * residual) / MAX_FRACTION) + 2) == 2
    assert layers_to_checkpoint(policy, 40, 0) == 2


def test_saved_bytes_of_the_fast_path_by_hand() -> None:
    """Two residuals, q, k, v and attention's output, gate and up in float32, and a log-sum-exp per head."""
    policy = Policy(make_model("llama"), tokenizer())
    config = policy.model.config
    d = config.hidden_size // config.num_attention_heads
    wide = 2 * config.hidden_size + (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * d
    assert saved_bytes_per_token(policy) == 4 * (wide + 2 * config.intermediate_size) + 4 * config.num_attention_heads


def loop_of(kind: str, trained: Policy, folder: Path, checkpointing: str) -> Any:
    options = {"steps": 2, "checkpointing": checkpointing}
    if kind == "sft":
        return SftLoop(Sft.model_validate({"batch_size": 4, **options}), 0, TASK, trained)
    if kind == "dpo":
        return dpo_loop(SINGLE_PROCESS, trained, checkpointing=checkpointing)
    if kind == "reward_model":
        data = RewardModelData(EXAMPLES["pairs"], ())
        return RewardModelLoop(RewardModel.model_validate({"data": "-", **options}), 0, trained, folder, data)
    rollouts = {"prompts_per_step": 2, "group_size": 4, "sampling": {"max_new_tokens": 4}, **options}
    kinds: dict[str, tuple[Any, Any]] = {"grpo": (Grpo, GrpoLoop), "ppo": (Ppo, PpoLoop), "trpo": (Trpo, TrpoLoop)}
    section, loop = kinds[kind]
    engine = NativeEngine(trained, Engine(slots=16))
    return loop(section.model_validate(rollouts), 0, PROMPTS, engine, RewardMix([CaseReward("digits")]))


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward_model", "grpo", "ppo", "trpo"])
def test_every_stage_checkpoints_as_its_recipe_says(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an earlier stage with the same policy did."""
    recomputed: list[object] = []

    def checkpoint(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recomputed.append(forward)
        return torch.utils.checkpoint.checkpoint(forward, *args, **kwargs)

    monkeypatch.setattr(activation_checkpointing, "checkpoint", checkpoint)
    trained = policy()
    trained.fast_backbone = None  # through transformers' modules
    for checkpointing in ("on", "off", "on"):
        recomputed.clear()
        loop_of(kind, trained, tmp_path, checkpointing).step(1)
        assert bool(recomputed) == (checkpointing == "on")
