"""Compiled norms and units: the same gradient as the plain modules, at any size; the sampler keeps the plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from oncurve.models import torch_compile
from oncurve.models.packing import build_pack
from oncurve.models.policy import Policy
from tests.models.architectures import make_model, tokenizer
from tests.models.test_pack_forward import bundles_of, far_apart, gradients, weighted


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which classes were run in their compiled form."""
    seen: list[str] = []
    real = torch_compile._compile

    def quick(forward: Callable[..., Any]) -> Any:
        seen.append(forward.__qualname__)
        return real(forward)

    monkeypatch.setattr(torch_compile, "_compile", quick)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "phi3", "olmo2"])
def test_the_gradient_is_the_same_and_sizes_may_change(name: str, passed: list[str]) -> None:
    policy = Policy(make_model(name), tokenizer())
    packs = [build_pack(bundles_of(kind), policy.device) for kind in ("ragged", "groups of one")]
    expected = [gradients(policy.model, weighted(*policy.pack_logps(pack, 0.9))) for pack in packs]
    count = torch_compile.compile_blocks(policy.backbone)
    layers: Any = policy.backbone.layers
    assert count == sum("norm" in n or n.endswith("mlp") for layer in layers for n, _ in layer.named_children())
    for pack, wanted in zip(packs, expected, strict=True):
        found = gradients(policy.model, weighted(*policy.pack_logps(pack, 0.9)))
        assert all(far_apart(a, b) < 1e-5 for a, b in zip(found, wanted, strict=True))
    assert len(passed) == 2 * count


def test_the_sampler_keeps_the_plain_modules(passed: list[str]) -> None:
    policy = Policy(make_model("gemma2"), tokenizer())
    torch_compile.compile_blocks(policy.backbone)
    with torch.no_grad():
        policy.pack_logps(build_pack(bundles_of("ragged"), policy.device))
    assert not passed


def test_a_copy_has_its_own_weights() -> None:
    policy = Policy(make_model("gemma2"), tokenizer())
    torch_compile.compile_blocks(policy.backbone)
    pack = build_pack(bundles_of("ragged"), policy.device)
    with torch.no_grad():
        before, _ = policy.pack_logps(pack)
        other = Policy(copy.deepcopy(policy.model), tokenizer())
        for weight in policy.model.parameters():
            weight.mul_(1.5)
        after, _ = other.pack_logps(pack)
    assert torch.equal(before, after)


def test_experts_and_attention_stay_as_they_are() -> None:
    class SomeMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList()

    class SomeAttention(nn.Module):
        pass

    assert not torch_compile._is_compilable(SomeMLP())
    assert not torch_compile._is_compilable(SomeAttention())
    assert torch_compile._is_compilable(nn.RMSNorm(4))
