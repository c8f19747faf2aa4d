"""AdamW with moments in 8 bits: a little over 2 bytes per parameter instead of 8.

Moments are stored in blocks of 128 with one float32 scale each, the block's maximum. The code of the first moment m is
127·∛(m/scale), that of the second 255·∛(√v/scale): cube roots resolve values a thousand times smaller than the largest of their
block. (8-bit optimisers: Dettmers et al., arXiv 2110.02861, whose dynamic quantisation these codes replace.)

How a code is rounded decides the length of an update. With β₂ = 0.999 a code of v falls by at most 0.04 in an update: rounded
to nearest it would never fall, and rounded up it would climb, which shrinks every update. So codes are rounded up with some
probability: for m it is the probability that keeps the mean of m, for v the fractional part of the code. Then 1/√v, which an
update is proportional to, keeps its mean; a rounding that kept the mean of v would make updates longer, since 1/√v is convex.
Instead of random numbers there is a Weyl sequence in the number of the update, shifted by the place in the block: it spreads
roundings evenly over updates (less noise), and is the same after a resume and on any number of ranks. An update's length stays
within 2 % of float32's (tests).

A v above 0 has at least code 1, 6e-8 of the largest √v, so nothing is divided by 0.

Parameters are updated one at a time, so only one parameter's moments exist in float32 at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
MAX_M, MAX_V = 127, 255
"""The largest codes."""
GOLDEN = (5**0.5 - 1) / 2
"""Step of the Weyl sequence: the multiples of the golden ratio, modulo 1, are spread most evenly."""
PLACES = (torch.arange(BLOCK, dtype=torch.float64) * (2**0.5 - 1)).frac()
"""Shift of the sequence for each place in a block."""


class Adam8bit(torch.optim.Optimizer):
    """The update of torch's AdamW, with quantised moments."""

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group)

    def _step(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), state = group["betas"], self.state[p]
        if not state:
            blocks = -(-p.numel() // BLOCK)
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros(blocks, BLOCK, dtype=torch.int8, device=p.device)
            state["exp_avg_sq"] = torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=p.device)
            state["exp_avg_scale"], state["root_avg_sq_scale"] = torch.zeros(2, blocks, 1, device=p.device).unbind()
        state["step"] += 1
        n = float(state["step"])
        g = _in_blocks(grad)
        m = (state["exp_avg"].float() / MAX_M).pow_(3).mul_(state["exp_avg_scale"])
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        root = (state["exp_avg_sq"].float() / MAX_V).pow_(3).mul_(state["root_avg_sq_scale"])
        root = root.square_().mul_(beta2).addcmul_(g, g, value=1 - beta2).sqrt_()
        update = m / (root / (1 - beta2**n) ** 0.5 + group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(update.flatten()[: p.numel()].view_as(p), alpha=group["lr"] / (1 - beta1**n))
        threshold = ((PLACES + n * GOLDEN) % 1.0).float().to(p.device)
        state["exp_avg"], state["exp_avg_scale"] = _quantise_first(m, threshold)
        state["exp_avg_sq"], state["root_avg_sq_scale"] = _quantise_second(root, threshold.flip(0))


def _quantise_first(m: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of the first moment, rounded so that its mean is kept."""
    scale = m.abs().amax(1, keepdim=True)
    share = m.abs().div_(scale.clamp(min=1e-38))
    low = _cube_root(share).mul_(MAX_M).floor_().clamp_(max=MAX_M - 1)
    below, above = (low / MAX_M).pow_(3), ((low + 1) / MAX_M).pow_(3)
    code = low.add_((share - below) / (above - below) > threshold).mul_(m.sign())
    return code.to(torch.int8), scale


def _quantise_second(root: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of √v: the code's fraction is the probability of rounding up."""
    scale = root.amax(1, keepdim=True)
    code = _cube_root(root / scale.clamp(min=1e-38)).mul_(MAX_V)
    low = code.floor().clamp_(max=MAX_V - 1)
    code = low.add(code - low > threshold).clamp_(min=1)
    return torch.where(root > 0, code, 0.0).to(torch.uint8), scale


def _cube_root(x: Tensor) -> Tensor:
    return x.pow(1 / 3)


def _in_blocks(x: Tensor) -> Tensor:
    flat = x.flatten()
    return functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
