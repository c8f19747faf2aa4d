"""LoRA within the fast path: the adapters of one input's linear layers (q, k, v; gate and up; one alone) as two products.

A's rows lie in one storage below the rows of the frozen weights, so that one product has x Wᵀ and u = x Aᵀ of all adapters
beside each other, and one launch more adds s · u Bᵀ. B's rows lie side by side too. All are the adapter's own parameters: an
optimiser's update is seen with no call, and no merged weight is ever held.

With g the gradient of y = x Wᵀ + s · u Bᵀ: du = s · g B, dx = g W + du A, dA = duᵀ x, dB = s · gᵀ u. W gets none.

Legend: ``N`` tokens, ``I``/``O`` columns of input and output, ``r`` rank, ``R`` ranks of all adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oncurve.kernels.lora import AFTER, LoraTiles, expand
from oncurve.models.gradient_buffers import GradAccumulator, add_product
from oncurve.models.lora import Adapter


class JointLora:
    """``whole`` is [O + R, I]: the weights' rows, then A's; ``b`` is [Σ O of adapted layers, r]."""

    def __init__(self, sizes: Sequence[int], adapters: Sequence[Adapter | None], whole: Tensor, b: Tensor) -> None:
        self.whole, self.b, self.columns = whole, b, sum(sizes)
        self.a = whole[self.columns :]
        self.first = next(adapter for adapter in adapters if adapter is not None)
        self.scale, rank = self.first.scale, b.shape[1]
        has = [adapter is not None for adapter in adapters]
        self.all_tiles, self.own_tiles = (LoraTiles.of(sizes, has, rank, whole.device, every=every) for every in (True, False))
        self.parts: list[tuple[slice, slice, Tensor]] = []
        """Of each adapter: its columns of the product, its columns of u, its B."""
        column, row = 0, 0
        for size, adapter in zip(sizes, adapters, strict=True):
            if adapter is not None:
                low = slice(len(self.parts) * rank, (len(self.parts) + 1) * rank)
                self.parts.append((slice(column, column + size), low, b[row : row + size]))
                row += size
            column += size

    def __bool__(self) -> bool:
        """False while adapters are switched off: the model is its base then, as one without any."""
        return self.first.on

    def product(self, x_NI: Tensor, bias_O: Tensor | None, launch: Mapping[str, Any] = AFTER) -> tuple[Tensor, Tensor]:
        """(y, u): y in rows of its own, u beside what is not needed any more."""
        both = x_NI @ self.whole.t()
        out = torch.empty(len(x_NI), self.columns, dtype=x_NI.dtype, device=x_NI.device)
        expand(both, both[:, self.columns :], self.b, self.scale, self.all_tiles, bias_O, out, launch)
        return out, both[:, self.columns :]

    def wide(self, x_NI: Tensor, bias_O: Tensor | None) -> Tensor:
        """[y | u], [N, O + R]."""
        both = x_NI @ self.whole.t()
        tiles = self.own_tiles if bias_O is None else self.all_tiles
        expand(both, both[:, self.columns :], self.b, self.scale, tiles, bias_O, both)
        return both

    def wide_gradient(self, grad_NO: Tensor) -> Tensor:
        """[g | du], [N, O + R]: times ``whole`` it is the gradient of x. ``grad`` may have the columns for du already."""
        wide = grad_NO
        if grad_NO.shape[1] == self.columns:
            wide = torch.empty(len(grad_NO), len(self.whole), dtype=grad_NO.dtype, device=grad_NO.device)
            wide[:, : self.columns] = grad_NO
        d_low = wide[:, self.columns :]
        for columns, low, b in self.parts:
            torch.addmm(d_low[:, low], wide[:, columns], b, beta=0, alpha=self.scale, out=d_low[:, low])
        return wide

    def add_gradients(self, sums: GradAccumulator, wide: Tensor, low_NR: Tensor, x_NI: Tensor) -> None:
        """A's and B's, of a wide gradient, u and x."""
        add_product(sums.buffer_for(self.a), wide[:, self.columns :], x_NI)
        for columns, low, b in self.parts:
            add_product(sums.buffer_for(b), wide[:, columns], low_NR[:, low], self.scale)
