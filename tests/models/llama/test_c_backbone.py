"""The decoder layers in C: values and gradients against torch in float64, and reproducible bits."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.models import lora
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.records import Ints
from tests.engines.native.test_c_decoder import MODELS, make_model
from tests.models.architectures import adapted, tokenizer
from tests.models.test_packing import unshared

WEIGHTS = torch.linspace(-1, 1, 4096, dtype=torch.float64)


def random_tokens(count: int, rng: np.random.Generator) -> Ints:
    return rng.integers(3, 40, count).astype(np.int64)


def groups_of(shape: list[tuple[int, list[int]]], seed: int = 0) -> list[PrefixGroup]:
    """Groups with these prompt and completion lengths."""
    rng = np.random.default_rng(seed)
    return [
        PrefixGroup(random_tokens(n, rng), tuple(random_tokens(c, rng) for c in lengths), tuple(range(len(lengths))))
        for n, lengths in shape
    ]


SHAPE = [(9, [12, 1, 33]), (1, [5]), (70, [20] * 8), (2, [1]), (3, [2, 2])]


def values(policy: Policy, groups: list[PrefixGroup]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probs, entropies and the gradient of a weighted sum of both."""
    policy.model.zero_grad()
    logp_M, entropy_M = policy.pack_logps(build_pack(groups, policy.device), 0.9)
    weight_M = WEIGHTS[: len(logp_M)].to(logp_M.dtype)
    (weight_M * logp_M + 0.3 * weight_M.flip(0) * entropy_M).sum().backward()  # type: ignore[no-untyped-call]
    return logp_M.detach(), entropy_M.detach(), {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}


def exact(model: PreTrainedModel) -> Policy:
    policy = Policy(copy.deepcopy(model), tokenizer(), compiled=False)
    policy.model.double()
    return policy


def assert_close(grads: dict[str, Tensor], expected: dict[str, Tensor], within: float) -> None:
    assert grads.keys() == expected.keys()
    for name, gradient in expected.items():
        assert distance(grads[name], gradient) < within, f"{name}: {distance(grads[name], gradient)}"


def distance(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / (exact.double().norm() + 1e-3))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "mistral"])
def test_values_and_gradients_are_those_of_torch_in_float64(name: str) -> None:
    model = make_model(name)
    policy = Policy(copy.deepcopy(model), tokenizer())
    assert policy.uses_c
    logp_M, entropy_M, gradients = values(policy, groups_of(SHAPE))
    expected_logp_M, expected_entropy_M, expected = values(exact(model), groups_of(SHAPE))
    assert float((logp_M - expected_logp_M).abs().max()) < 3e-5
    assert float((entropy_M - expected_entropy_M).abs().max()) < 3e-5
    assert_close(gradients, expected, 1e-5)


ADAPTERS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen2", {"rank": 20, "rslora": True}),
    ("llama", {"targets": ("q_proj", "v_proj", "down_proj")}),
]


@pytest.mark.parametrize(("name", "options"), ADAPTERS, ids=str)
def test_an_adapter_and_its_gradients_are_those_of_peft_in_float64(name: str, options: dict[str, Any]) -> None:
    """The C functions run W + s·B·A, and get the gradients of A and B from that of the sum: as near as peft in float32."""
    model = adapted(make_model(name), **options)
    policy, modules = Policy(copy.deepcopy(model), tokenizer()), Policy(copy.deepcopy(model), tokenizer())
    assert policy.uses_c
    modules.fast_backbone = None
    logp_M, _, gradients = values(policy, groups_of(SHAPE))
    peft_M, _, of_peft = values(modules, groups_of(SHAPE))
    of_peft = {name: gradient.clone() for name, gradient in of_peft.items()}
    modules.model.double()
    expected_M, _, expected = values(modules, groups_of(SHAPE))
    assert gradients.keys() == lora.adapter_parameters(policy.model).keys()
    assert float((logp_M - expected_M).abs().max()) < max(3e-5, 2 * float((peft_M - expected_M).abs().max()))
    assert_close(gradients, expected, max(1e-5, 2 * max(distance(of_peft[name], expected[name]) for name in expected)))


def test_a_disabled_adapter_leaves_the_base() -> None:
    policy, base = Policy(adapted(make_model("qwen3")), tokenizer()), Policy(make_model("qwen3"), tokenizer())
    pack = build_pack(groups_of(SHAPE), policy.device)
    with torch.no_grad(), lora.adapter_disabled(policy.model):
        assert torch.equal(policy.pack_logps(pack)[0], base.pack_logps(pack)[0])


def test_an_adapter_in_a_window_shorter_than_a_sequence_is_run_by_torch() -> None:
    model = adapted(make_model("mistral"))
    policy, modules = Policy(copy.deepcopy(model), tokenizer()), Policy(model, tokenizer())
    modules.fast_backbone = None
    assert_close(values(policy, groups_of([(9, [40, 3])]))[2], values(modules, groups_of([(9, [40, 3])]))[2], 1e-4)


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
        _, _, shared = values(policy, groups_of(shape))
        shared = {name: gradient.clone() for name, gradient in shared.items()}
        _, _, apart = values(policy, unshared(groups_of(shape)))
    finally:
        torch.set_num_threads(before)
    assert_close(apart, shared, 1e-4)


def test_the_same_pack_gives_the_same_bits() -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    first = {name: gradient.clone() for name, gradient in values(policy, groups_of(SHAPE))[2].items()}
    values(policy, groups_of([(30, [30, 30])], seed=3))  # another pass in between reuses the memory
    second = values(policy, groups_of(SHAPE))[2]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_forward_passes_may_precede_their_backward_passes() -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    packs = [build_pack(groups_of(SHAPE, seed), policy.device) for seed in (0, 1)]
    expected = [torch.autograd.grad(policy.pack_logps(pack)[0].sum(), policy.model.parameters()) for pack in packs]
    together = [policy.pack_logps(pack)[0].sum() for pack in packs]
    for loss, gradients in zip(together, expected, strict=True):
        grads = torch.autograd.grad(loss, policy.model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(grads, gradients, strict=True))


def test_a_window_shorter_than_a_sequence_is_run_by_torch() -> None:
    model = make_model("mistral")
    policy = Policy(copy.deepcopy(model), tokenizer())
    for shape in ([(9, [12, 3])], [(9, [40, 3])]):  # within the window of 24, and longer
        assert_close(values(policy, groups_of(shape))[2], values(exact(model), groups_of(shape))[2], 1e-5)


def test_a_model_converted_to_float64_is_run_by_torch() -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    policy.model.double()
    assert not policy.uses_c
    assert values(policy, groups_of(SHAPE))[0].dtype == torch.float64
