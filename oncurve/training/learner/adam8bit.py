"""AdamW with moments in 8 bits: a little over 2 bytes per parameter instead of 8.

Moments are stored in blocks of 128 with one float32 scale each. The first moment is quantised linearly, in steps of 1/127 of
the block's maximum. Of the second moment the square root is stored, in steps of 1/255 and rounded up: if small and large
gradients share a block, rounding can only make an update smaller, never blow it up. (8-bit optimisers: Dettmers et al., arXiv
2110.02861. The square root and the rounding up replace their dynamic quantisation.)

Parameters are updated one at a time, so only one parameter's moments exist in float32 at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128


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
            state["root_avg_sq"] = torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=p.device)
            state["exp_avg_scale"], state["root_avg_sq_scale"] = torch.zeros(2, blocks, 1, device=p.device).unbind()
        state["step"] += 1
        n = float(state["step"])
        g = _in_blocks(grad)
        m = (state["exp_avg"].float() * state["exp_avg_scale"]).mul_(beta1).add_(g, alpha=1 - beta1)
        v = (state["root_avg_sq"].float() * state["root_avg_sq_scale"]).square_().mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = v.sqrt_()
        update = m / (root / (1 - beta2**n) ** 0.5 + group["eps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(update.flatten()[: p.numel()].view_as(p), alpha=group["lr"] / (1 - beta1**n))
        state["exp_avg_scale"] = scale = m.abs().amax(1, keepdim=True) / 127
        state["exp_avg"] = (m / scale.clamp(min=1e-38)).round_().to(torch.int8)
        state["root_avg_sq_scale"] = scale = root.amax(1, keepdim=True) / 255
        state["root_avg_sq"] = (root / scale.clamp(min=1e-38)).ceil_().clamp_(max=255).to(torch.uint8)


def _in_blocks(x: Tensor) -> Tensor:
    flat = x.flatten()
    return functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
