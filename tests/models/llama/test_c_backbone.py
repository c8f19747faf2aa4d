"""The decoder layers by compiled functions: values and gradients against torch in float64, and the same bits each time."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.records import Ints
from tests.engines.native.test_c_decoder import MODELS, make_model
from tests.models.architectures import tokenizer
from tests.models.test_packing import unshared

WEIGHTS = torch.linspace(-1, 1, 4096, dtype=torch.float64)


def words(count: int, rng: np.random.Generator) -> Ints:
    return rng.integers(3, 40, count).astype(np.int64)


def bundles_of(shape: list[tuple[int, list[int]]], seed: int = 0) -> list[PrefixGroup]:
    """Prompts and completions of the given lengths."""
    rng = np.random.default_rng(seed)
    return [
        PrefixGroup(words(n, rng), tuple(words(c, rng) for c in lengths), tuple(range(len(lengths)))) for n, lengths in shape
    ]


SHAPE = [(9, [12, 1, 33]), (1, [5]), (70, [20] * 8), (2, [1]), (3, [2, 2])]


def values(policy: Policy, bundles: list[PrefixGroup]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probs, entropies and the gradient of a weighted sum of both."""
    policy.model.zero_grad()
    logp_M, entropy_M = policy.pack_logps(build_pack(bundles, policy.device), 0.9)
    weight_M = WEIGHTS[: len(logp_M)].to(logp_M.dtype)
    (weight_M * logp_M + 0.3 * weight_M.flip(0) * entropy_M).sum().backward()  # type: ignore[no-untyped-call]
    return logp_M.detach(), entropy_M.detach(), {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}


def exact(model: PreTrainedModel) -> Policy:
    policy = Policy(copy.deepcopy(model), tokenizer(), compiled=False)
    policy.model.double()
    return policy


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], within: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        apart = float((found[name].double() - gradient.double()).norm() / (gradient.double().norm() + 1e-3))
        assert apart < within, f"{name}: {apart}"


@pytest.mark.parametrize("name", [name for name in MODELS if name != "mistral"])
def test_values_and_gradients_are_those_of_torch_in_float64(name: str) -> None:
    model = make_model(name)
    policy = Policy(copy.deepcopy(model), tokenizer())
    assert policy.uses_c
    logp_M, entropy_M, gradients = values(policy, bundles_of(SHAPE))
    expected_logp_M, expected_entropy_M, expected = values(exact(model), bundles_of(SHAPE))
    assert float((logp_M - expected_logp_M).abs().max()) < 3e-5
    assert float((entropy_M - expected_entropy_M).abs().max()) < 3e-5
    assert_close(gradients, expected, 1e-5)


@settings(max_examples=10, deadline=None)
@given(
    shape=st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=4)), min_size=1, max_size=4),
    threads=st.integers(1, 3),
)
def test_sharing_the_prompt_and_threads_change_no_gradient(shape: list[tuple[int, list[int]]], threads: int) -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        _, _, shared = values(policy, bundles_of(shape))
        shared = {name: gradient.clone() for name, gradient in shared.items()}
        _, _, apart = values(policy, unshared(bundles_of(shape)))
    finally:
        torch.set_num_threads(before)
    assert_close(apart, shared, 1e-4)


def test_the_same_pack_gives_the_same_bits() -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    first = {name: gradient.clone() for name, gradient in values(policy, bundles_of(SHAPE))[2].items()}
    values(policy, bundles_of([(30, [30, 30])], seed=3))  # another pass in between uses the same memory
    second = values(policy, bundles_of(SHAPE))[2]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_passes_may_be_under_way_at_once() -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    packs = [build_pack(bundles_of(SHAPE, seed), policy.device) for seed in (0, 1)]
    expected = [torch.autograd.grad(policy.pack_logps(pack)[0].sum(), policy.model.parameters()) for pack in packs]
    together = [policy.pack_logps(pack)[0].sum() for pack in packs]
    for loss, gradients in zip(together, expected, strict=True):
        found = torch.autograd.grad(loss, policy.model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


def test_a_window_that_hides_tokens_goes_through_torch() -> None:
    model = make_model("mistral")
    policy = Policy(copy.deepcopy(model), tokenizer())
    for shape in ([(9, [12, 3])], [(9, [40, 3])]):  # within the window of 24, and beyond it
        assert_close(values(policy, bundles_of(shape))[2], values(exact(model), bundles_of(shape))[2], 1e-5)


def test_a_model_made_double_later_is_torch_s() -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    policy.model.double()
    assert not policy.uses_c
    assert values(policy, bundles_of(SHAPE))[0].dtype == torch.float64
