"""The chunked LM head against plain torch with autograd, in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from oncurve.models.heads import lm_head
from oncurve.models.heads.lm_head import Head, token_logps

M, D, V = 11, 6, 13


def tensors(bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_MD, weight_VD, bias_V = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in ((M, D), (V, D), (V,))
    )
    target_M = torch.randint(V, (M,), generator=generator)
    return hidden_MD, weight_VD, bias_V if bias else None, target_M


def plain(head: Head, hidden_MD: Tensor, target_M: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    z = hidden_MD @ head.weight_VD.T + (0 if head.bias_V is None else head.bias_V)
    z = z * head.scale
    z = z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)
    logp_MV = (z / temperature).log_softmax(-1)
    return logp_MV.gather(1, target_M[:, None])[:, 0], -(logp_MV.exp() * logp_MV).sum(-1)


@pytest.mark.parametrize(
    ("bias", "scale", "softcap", "temperature", "rows"),
    list(product((False, True), (1.0, 0.3), (None, 2.0), (1.0, 0.6), (1, 4, 100))),
)
def test_values_and_every_gradient(
    bias: bool, scale: float, softcap: float | None, temperature: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one row, of four (the last one short), and all at once."""
    monkeypatch.setattr(lm_head, "CPU_CHUNK_LOGITS", rows * V)
    hidden_MD, weight_VD, bias_V, target_M = tensors(bias)
    head = Head(weight_VD, bias_V, scale, softcap)
    leaves = [x for x in (hidden_MD, weight_VD, bias_V) if x is not None]
    weigh = torch.randn(2, M, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for function in (token_logps, plain):
        logp_M, entropy_M = function(head, hidden_MD, target_M, temperature)
        gradients = torch.autograd.grad((weigh[0] * logp_M).sum() + (weigh[1] * entropy_M).sum(), leaves)
        results.append([logp_M.detach(), entropy_M.detach(), *gradients])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_gradient_of_the_log_probs_alone() -> None:
    """Without an entropy term the backward pass skips it, with the same result."""
    hidden_MD, weight_VD, _, target_M = tensors(False)
    head = Head(weight_VD)
    ours, theirs = (
        torch.autograd.grad(f(head, hidden_MD, target_M, 1.0)[0].sum(), (hidden_MD, weight_VD)) for f in (token_logps, plain)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_by_hand() -> None:
    """Logits ln 1, ln 2, ln 5 of shares 1/8, 2/8, 5/8."""
    weight_VD = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64).log()
    logp_M, entropy_M = token_logps(Head(weight_VD), torch.ones(2, 1, dtype=torch.float64), torch.tensor([0, 2]))
    shares = torch.tensor([1, 2, 5], dtype=torch.float64) / 8
    torch.testing.assert_close(logp_M.exp(), shares[[0, 2]])
    torch.testing.assert_close(entropy_M, -(shares * shares.log()).sum().expand(2))


def test_no_tokens_and_low_precision() -> None:
    hidden_MD, weight_VD, _, target_M = (x if x is None else x.detach() for x in tensors(False))
    assert hidden_MD is not None
    assert weight_VD is not None
    assert target_M is not None
    none = token_logps(Head(weight_VD), hidden_MD[:0], target_M[:0])
    assert [len(x) for x in none] == [0, 0]
    low = weight_VD.bfloat16().requires_grad_(), hidden_MD.bfloat16().requires_grad_()
    logp_M, entropy_M = token_logps(Head(low[0]), low[1], target_M)
    assert logp_M.dtype == entropy_M.dtype == torch.float32
    gradients = torch.autograd.grad(logp_M.sum(), low)
    assert [g.dtype for g in gradients] == [torch.bfloat16] * 2
