"""Compiled norms and MLPs: the same gradient as the plain modules at any size; the sampler uses the plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from oncurve.models.loading import load
from oncurve.models.packing import build_pack
from oncurve.models.policy import Policy
from tests.models.architectures import make_model, tokenizer
from tests.models.test_pack_attention import far_apart, gradients, groups_of, weighted


@pytest.fixture
def compiled_forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The forward methods that ran compiled."""
    forwards: list[str] = []
    compile_forward = load._compile

    def compile_and_record(forward: Callable[..., Any]) -> Any:
        forwards.append(forward.__qualname__)
        return compile_forward(forward)

    monkeypatch.setattr(load, "_compile", compile_and_record)
    return forwards


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "phi3", "olmo2"])
def test_the_gradient_is_the_same_for_any_size(name: str, compiled_forwards: list[str]) -> None:
    policy = Policy(make_model(name), tokenizer())
    packs = [build_pack(groups_of(kind), policy.device) for kind in ("ragged", "groups of one")]
    expected = [gradients(policy.model, weighted(*policy.pack_logps(pack, 0.9))) for pack in packs]
    count = load.compile_blocks(policy.backbone)
    layers: Any = policy.backbone.layers
    assert count == sum("norm" in n or n.endswith("mlp") for layer in layers for n, _ in layer.named_children())
    for pack, expected_grads in zip(packs, expected, strict=True):
        grads = gradients(policy.model, weighted(*policy.pack_logps(pack, 0.9)))
        assert all(far_apart(a, b) < 1e-5 for a, b in zip(grads, expected_grads, strict=True))
    assert len(compiled_forwards) == 2 * count


def test_the_sampler_keeps_the_plain_modules(compiled_forwards: list[str]) -> None:
    policy = Policy(make_model("gemma2"), tokenizer())
    load.compile_blocks(policy.backbone)
    with torch.no_grad():
        policy.pack_logps(build_pack(groups_of("ragged"), policy.device))
    assert not compiled_forwards


def test_a_copy_has_its_own_weights() -> None:
    policy = Policy(make_model("gemma2"), tokenizer())
    load.compile_blocks(policy.backbone)
    pack = build_pack(groups_of("ragged"), policy.device)
    with torch.no_grad():
        before, _ = policy.pack_logps(pack)
        other = Policy(copy.deepcopy(policy.model), tokenizer())
        for weight in policy.model.parameters():
            weight.mul_(1.5)
        after, _ = other.pack_logps(pack)
    assert torch.equal(before, after)


def test_experts_and_attention_are_not_compiled() -> None:
    class SomeMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList()

    class SomeAttention(nn.Module):
        pass

    assert not load._is_compilable(SomeMLP())
    assert not load._is_compilable(SomeAttention())
    assert load._is_compilable(nn.RMSNorm(4))
