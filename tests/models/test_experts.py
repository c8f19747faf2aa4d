"""Mixtures of experts: what a pass records and forces, and products whose bits do not depend on the other tokens."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oncurve.errors import ModelError
from oncurve.models import experts, lora
from oncurve.models.experts import RoutingPass
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import Lora
from oncurve.recipe.schema.sections import Sampling
from tests.engines.native.plain import prompt_of, sample
from tests.models.architectures import make_model, tokenizer
from tests.models.tiny_families import tiny_model

FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3", "deepseek_v32")
MORE = ("deepseek_v2", "qwen2_moe", "qwen3_next", "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "granitemoe", "dots1")


def mixture(family: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    tokens = tokenizer()
    words = {"vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id}
    return tiny_model(family, seed, {**words, **changes})


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_experts_take_what_a_pass_forces_and_routers_keep_their_gradient(family: str) -> None:
    policy = Policy(mixture(family), tokenizer())
    layers = policy.routed_layers
    assert layers is not None
    assert policy.experts_per_token == 2 * layers.layers  # refuses a model that does not obey
    ids = np.arange(3, 12)
    pack = build_pack([PrefixGroup(ids, (ids[:4], ids[:6]), (0, 1))], policy.device)
    free = RoutingPass(records=True)
    with experts.routed(free):
        plain_M, _ = policy.pack_logps(pack)
    own_NLk = free.chosen_NE.view(-1, layers.layers, 2)
    if policy.general_reason is None:
        for forced_NLk, is_same in ((own_NLk, True), ((own_NLk + 1) % layers.experts, False)):
            with experts.routed(RoutingPass(forced_NLk=forced_NLk)):
                forced_M, _ = policy.pack_logps(pack)
            assert torch.equal(forced_M, plain_M) == is_same
    else:  # every completion has its own row there, with its prompt
        with experts.routed(RoutingPass(forced_NLk=torch.ones(pack.tokens, layers.layers, 1).long() * torch.tensor([1, 0]))):
            forced_M, _ = policy.pack_logps(pack)
        assert not torch.equal(forced_M, plain_M)
    forced_M.sum().backward()  # type: ignore[no-untyped-call]
    routers = [p.grad for name, p in policy.model.named_parameters() if ".gate." in name or "router" in name]
    assert routers
    assert any(grad is not None and grad.abs().sum() > 0 for grad in routers)


def test_a_model_without_experts_has_no_routing() -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    assert policy.routed_layers is None
    with pytest.raises(ModelError, match="routing replay"):
        _ = policy.experts_per_token


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_products_in_tiles_are_those_of_the_model(family: str) -> None:
    """gpt-oss: transposed weights, biases, and a gate of its own."""
    policy = Policy(mixture(family), tokenizer())
    module = next(module for module in policy.backbone.modules() if experts._is_experts(module))
    hidden_ND = torch.randn(37, 32, generator=torch.Generator().manual_seed(0))
    chosen_Nk = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(n))[:2] for n in range(37)])
    weight_Nk = torch.rand(37, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loop: Any = type(module).forward
        theirs = loop.__wrapped__(module, hidden_ND, chosen_Nk, weight_Nk)
        with experts.routed(RoutingPass(fixed_shapes=True)):
            tiled, fewer = module(hidden_ND, chosen_Nk, weight_Nk), module(hidden_ND[5:9], chosen_Nk[5:9], weight_Nk[5:9])
    torch.testing.assert_close(tiled, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(fewer, tiled[5:9]), "a token's bits depend on the others"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_completion_is_the_same_bits_whatever_else_is_queued(family: str) -> None:
    policy = Policy(mixture(family), tokenizer())
    pool, sampling = [prompt_of(n, str(n)) for n in (1, 9, 18, 40, 66)], Sampling(max_new_tokens=16)
    together = sample(policy, pool, 4, sampling)
    for prompt, group in zip(pool, together, strict=True):
        (lone,) = sample(policy, [prompt], 4, sampling)
        for one, other in zip(lone.completions, group.completions, strict=True):
            assert one.token_ids.tobytes() == other.token_ids.tobytes()
            assert one.logps.tobytes() == other.logps.tobytes()


def test_experts_with_adapters_are_recorded_and_forced_too() -> None:
    model = mixture("qwen3_moe")
    lora.attach(model, Lora(rank=2), 0, "mixture")
    policy = Policy(model, tokenizer())
    assert policy.experts_per_token == 4
    (group,) = sample(policy, [prompt_of(9)], 2, Sampling(max_new_tokens=6))
    pack = build_pack([PrefixGroup(group.prompt_ids, tuple(c.token_ids for c in group.completions), (0, 1))], policy.device)
    with torch.no_grad():
        logps_M, _ = policy.pack_logps(pack)
    np.testing.assert_allclose(np.concatenate([c.logps for c in group.completions]), logps_M.numpy(), atol=1e-5)


def test_a_saved_mixture_loads_in_transformers_alone() -> None:
    """Nothing of ours is written to its config, and a copy of the policy routes as it does."""
    policy = Policy(mixture("qwen3_moe"), tokenizer())
    assert experts.NAME not in str(policy.model.config.to_dict().values())
    assert policy.copy().routed_layers == policy.routed_layers
    again = Policy(copy.deepcopy(policy.model), tokenizer())
    assert again.experts_per_token == policy.experts_per_token
