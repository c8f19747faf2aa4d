"""A pack with shared prompts against plain transformers, one sequence at a time: values and gradients."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.models.attention_interface import ScoreRule
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from tests.models.architectures import ARCHITECTURES, make_model, tokenizer
from tests.models.test_packing import unshared

SHAPES = {
    "ragged": [(40, [30, 1, 7]), (3, [12]), (17, [1, 26])],
    "groups of one": [(30, [25]), (8, [9]), (2, [2])],
    "completions of one token": [(33, [1, 1]), (4, [1])],
    "equal": [(26, [20, 20])],
}
"""(prompt length, completion lengths): the window of 24 starts within prompts, at their ends, and within completions."""
TEMPERATURE = 0.9


def groups_of(shape: str) -> list[PrefixGroup]:
    generator, key, out = np.random.default_rng(3), 0, []
    for prompt, completions in SHAPES[shape]:
        ids = tuple(generator.integers(0, 47, n) for n in completions)
        out.append(PrefixGroup(generator.integers(0, 47, prompt), ids, tuple(range(key, key + len(completions)))))
        key += len(completions)
    return out


def plain_logps(model: PreTrainedModel, groups: list[PrefixGroup]) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every completion token, one sequence at a time: no packing, no shared prompts."""
    logps, entropies = [], []
    for b in groups:
        for ids in b.completion_ids:
            inputs = torch.from_numpy(np.concatenate((b.prompt_ids, ids)))[None]
            logits = model(input_ids=inputs, use_cache=False).logits[0, len(b.prompt_ids) - 1 : -1]
            logp_TV = (logits / TEMPERATURE).log_softmax(-1)
            logps.append(logp_TV.gather(1, torch.from_numpy(ids)[:, None])[:, 0])
            entropies.append(-(logp_TV.exp() * logp_TV).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


def weighted(logp_M: Tensor, entropy_M: Tensor) -> Tensor:
    weights = torch.randn(2, len(logp_M), generator=torch.Generator().manual_seed(5), dtype=logp_M.dtype)
    return (weights[0] * logp_M + weights[1] * entropy_M).sum()


def gradients(model: PreTrainedModel, loss: Tensor) -> list[Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, parameters))


def far_apart(one: Tensor, other: Tensor) -> float:
    """The relative L2 distance: a float keeps failure messages short."""
    return float((one - other).detach().norm() / (other.detach().norm() + 0.05))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_and_gradients_are_those_of_plain_transformers(name: str, shape: str) -> None:
    """In float64. transformers rounds attention weights to float32 in its eager path, hence 1e-5 and not 1e-12."""
    model = make_model(name)
    policy = Policy(copy.deepcopy(model), tokenizer())
    model.double()
    policy.model.double()
    groups = groups_of(shape)
    theirs = plain_logps(model, groups)
    expected = gradients(model, weighted(*theirs))
    for layout in (groups, unshared(groups)):
        ours = policy.pack_logps(build_pack(layout, policy.device), TEMPERATURE)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        for one, other in zip(gradients(policy.model, weighted(*ours)), expected, strict=True):
            assert far_apart(one, other) < 2e-5


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mistral"])
def test_in_float32_too(name: str) -> None:
    model = make_model(name)
    policy = Policy(copy.deepcopy(model), tokenizer())
    groups = groups_of("ragged")
    with torch.no_grad():
        ours, theirs = policy.pack_logps(build_pack(groups, policy.device), TEMPERATURE), plain_logps(model, groups)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_generic_path_is_the_flash_path(dtype: torch.dtype, within: float, shape: str) -> None:
    """Soft caps and windows use full scores, everything else the flash kernel: both give the same numbers."""
    pack = build_pack(groups_of(shape), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, pack.tokens, 8, generator=generator).to(dtype).requires_grad_() for heads in (4, 2, 2))
    results = []
    for cap in (None, 1e9):  # a cap so high that it changes nothing
        out = pack.attention.attend(0, q, k, v, ScoreRule(0.3, None, cap))
        assert out.dtype == dtype
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        results.append((out, *torch.autograd.grad((out * weights).sum(), (q, k, v))))
    for one, other in zip(*results, strict=True):
        assert far_apart(one, other) < within


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_fast_path_is_the_modules_own(name: str) -> None:
    """Llama family on a CPU: same values, gradients and parameters. Other families have no fast path."""
    policy = Policy(make_model(name), tokenizer())
    pack = build_pack(groups_of("ragged"), policy.device)
    fused, results = policy.fast_backbone, []
    assert fused is not None
    for path in (fused, None):
        policy.fast_backbone = path
        values = policy.pack_logps(pack, TEMPERATURE)
        results.append((*values, *gradients(policy.model, weighted(*values))))
        with torch.no_grad():
            results[-1] += policy.pack_logps(pack, TEMPERATURE)
    for one, other in zip(*results, strict=True):
        assert far_apart(one.detach(), other.detach()) < 1e-5
    assert Policy(make_model("llama_biased"), tokenizer()).fast_backbone is None
