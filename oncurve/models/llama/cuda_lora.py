"""LoRA in the GPU fast path: the adapters of fused linear layers (q, k, v; gate, up; or one layer) as two products.

The A matrices follow the frozen weights in one storage, so that one product gives x Wᵀ and u = x Aᵀ of all adapters side by
side, and one more kernel adds s · u Bᵀ. The B matrices share a storage too. Both are the adapter's own parameters: optimiser
updates need no copy, and no merged weight exists.

With g the gradient of y = x Wᵀ + s · u Bᵀ: du = s · g B, dx = g W + du A, dA = duᵀ x, dB = s · gᵀ u. W is frozen.

Local shape letters: ``I``/``O`` input and output columns, ``r`` rank of an adapter, ``R`` ranks of all adapters together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oncurve.kernels.learner_layers import NO_PDL, LoraTiles, expand
from oncurve.models.gradient_buffers import GradAccumulator, add_product
from oncurve.models.lora import Adapter


class JointLora:
    """The adapters of fused linear layers. ``weight`` is [O + R, I]: rows of W, then of A. ``b`` is [Σ O adapted, r]."""

    def __init__(self, sizes: Sequence[int], adapters: Sequence[Adapter | None], weight: Tensor, b: Tensor) -> None:
        self.weight, self.b, self.columns = weight, b, sum(sizes)
        self.a = weight[self.columns :]
        self.first = next(adapter for adapter in adapters if adapter is not None)
        self.scale, rank = self.first.scale, b.shape[1]
        has_adapter = [adapter is not None for adapter in adapters]
        self.all_tiles, self.adapted_tiles = (
            LoraTiles.of(sizes, has_adapter, rank, weight.device, every=every) for every in (True, False)
        )
        self.parts: list[tuple[slice, slice, Tensor]] = []
        """Per adapter: its columns of y, its columns of u, its B."""
        column, row = 0, 0
        for size, adapter in zip(sizes, adapters, strict=True):
            if adapter is not None:
                low = slice(len(self.parts) * rank, (len(self.parts) + 1) * rank)
                self.parts.append((slice(column, column + size), low, b[row : row + size]))
                row += size
            column += size

    def __bool__(self) -> bool:
        """False while the adapters are disabled, so that callers use the frozen weights only."""
        return self.first.is_enabled

    def product(self, x_NI: Tensor, bias_O: Tensor | None, launch: Mapping[str, Any] = NO_PDL) -> tuple[Tensor, Tensor]:
        """(y, u), with y in a separate tensor."""
        joint = x_NI @ self.weight.t()
        out = torch.empty(len(x_NI), self.columns, dtype=x_NI.dtype, device=x_NI.device)
        expand(joint, joint[:, self.columns :], self.b, self.scale, self.all_tiles, bias_O, out, launch)
        return out, joint[:, self.columns :]

    def joint_product(self, x_NI: Tensor, bias_O: Tensor | None) -> Tensor:
        """y and u side by side in one tensor: [y | u], of shape [N, O + R]."""
        joint = x_NI @ self.weight.t()
        tiles = self.adapted_tiles if bias_O is None else self.all_tiles
        expand(joint, joint[:, self.columns :], self.b, self.scale, tiles, bias_O, joint)
        return joint

    def joint_gradient(self, grad_NO: Tensor) -> Tensor:
        """[g | du], [N, O + R]: times ``weight`` it is the gradient of x. In place if ``grad`` has the columns of du."""
        joint = grad_NO
        if grad_NO.shape[1] == self.columns:
            joint = torch.empty(len(grad_NO), len(self.weight), dtype=grad_NO.dtype, device=grad_NO.device)
            joint[:, : self.columns] = grad_NO
        d_low = joint[:, self.columns :]
        for columns, low, b in self.parts:
            torch.addmm(d_low[:, low], joint[:, columns], b, beta=0, alpha=self.scale, out=d_low[:, low])
        return joint

    def add_gradients(self, accumulator: GradAccumulator, joint_grad: Tensor, low_NR: Tensor, x_NI: Tensor) -> None:
        """Add the gradients of A and B, from [g | du], u and x."""
        add_product(accumulator.buffer_for(self.a), joint_grad[:, self.columns :], x_NI)
        for columns, low, b in self.parts:
            add_product(accumulator.buffer_for(b), joint_grad[:, columns], low_NR[:, low], self.scale)
