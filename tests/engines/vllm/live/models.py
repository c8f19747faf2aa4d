"""Small random models with heads of a size that vLLM runs on a CPU, and what their texts must agree with."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.vllm.engine import VllmEngine
from oncurve.models import lora
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import Lora
from oncurve.recipe.schema.sections import Engine, Sampling, Scale
from oncurve.records import Group, Prompt
from tests.engines.native.plain import assert_logps, assert_same_greedy, prompt_of
from tests.models.architectures import make_model, tokenizer

GREEDY = Sampling(temperature=0.0, max_new_tokens=32)
PROMPTS = [prompt_of(n, name) for name, n in zip("abcdef", (1, 2, 9, 17, 40, 66), strict=True)]
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


TWICE = {**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 2}
"""With heads enough for two parts."""


def policy_of(name: str = "qwen3", *, rank: int = 0, shape: Mapping[str, int] = SHAPE) -> Policy:
    model = make_model(name, **shape)
    if rank:
        lora.attach(model, Lora(rank=rank), seed=0, base="none")
    return Policy(model, tokenizer())


def engine_of(policy: Policy, *, timeout_s: float = 300.0, tensor: int = 1) -> VllmEngine:
    return VllmEngine(policy, Engine(slots=32), Scale(engine="vllm", timeout_s=timeout_s, vllm_tensor=tensor))


@torch.no_grad()
def train(policy: Policy, seed: int = 0) -> None:
    """A large step somewhere, as an update would take a small one: every trained weight changes."""
    dice = torch.Generator().manual_seed(seed)
    for p in policy.model.parameters():
        if p.requires_grad:
            p.add_(torch.randn(p.shape, generator=dice) * 0.2 * max(float(p.std()), 0.05))


def plain(policy: Policy) -> PreTrainedModel:
    """The same weights, as transformers alone runs them."""
    model: PreTrainedModel = copy.deepcopy(policy.model)
    model.set_attn_implementation("eager")
    return model


def native(policy: Policy, prompts: list[Prompt], sampling: Sampling, group_size: int = 1) -> list[Group]:
    return NativeEngine(policy, Engine(slots=32)).sample(prompts, group_size, sampling, SampleKey(seed=0, step=1))


def assert_agree(policy: Policy, ours: list[Group], theirs: list[Group]) -> None:
    """Greedy texts of two engines: token for token up to a near tie, and log-probs as transformers has them, within 1e-3."""
    model = plain(policy)
    for a, b in zip(ours, theirs, strict=True):
        one, other = a.completions[0], b.completions[0]
        assert_same_greedy(model, a.prompt_ids, one.token_ids, other.token_ids.tolist())
        assert_logps(model, a.prompt_ids, one, 1.0, within=1e-3)
        if one.token_ids.tolist() == other.token_ids.tolist():
            assert (one.text, one.stop) == (other.text, other.stop)
            assert (one.loss_mask == other.loss_mask).all()
