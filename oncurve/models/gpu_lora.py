"""LoRA within the fast path: the adapters of one input's linear layers (q, k, v; gate and up; one alone) as two products.

A's rows lie in one storage below the rows of the frozen weights, so that a decode step has x Wᵀ and u = x Aᵀ of all adapters by
one product, and one launch more for s · u Bᵀ. B's rows lie side by side too. All are the adapter's own parameters: an
optimiser's update is seen with no call, and no merged weight is ever held.

With g the gradient of y = x Wᵀ + s · u Bᵀ: du = s · g B, dx = g W + du A, dA = duᵀ x, dB = s · gᵀ u. W gets none.

Legend: ``N`` tokens, ``I``/``O`` columns of input and output, ``r`` rank, ``R`` ranks of all adapters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oncurve.models.gradients import GradientSums, add_product
from oncurve.models.kernels.lora import spread, tiles_of
from oncurve.models.lora import Adapter


class JointLora:
    """``whole`` is [O + R, I]: the weights' rows, then A's; ``b`` is [Σ O of adapted layers, r]."""

    def __init__(self, sizes: Sequence[int], adapters: Sequence[Adapter | None], whole: Tensor, b: Tensor) -> None:
        self.whole, self.b, self.columns = whole, b, sum(sizes)
        self.a = whole[self.columns :]
        self.first = next(adapter for adapter in adapters if adapter is not None)
        self.scale, rank = self.first.scale, b.shape[1]
        has = [adapter is not None for adapter in adapters]
        self.all_tiles, self.own_tiles = (tiles_of(sizes, has, rank, whole.device, every=every) for every in (True, False))
        self.parts: list[tuple[slice, slice, Tensor]] = []
        """Of each adapter: its columns of the product, its columns of u, its B."""
        column, row = 0, 0
        for size, adapter in zip(sizes, adapters, strict=True):
            if adapter is not None:
                low = slice(len(self.parts) * rank, (len(self.parts) + 1) * rank)
                self.parts.append((slice(column, column + size), low, b[row : row + size]))
                row += size
            column += size

    @property
    def on(self) -> bool:
        """Off, the model is its base."""
        return self.first.on

    def product(self, x_NI: Tensor, bias_O: Tensor | None) -> Tensor:
        """The whole product in two launches: of the few rows of a decode step."""
        both = x_NI @ self.whole.t()
        out = torch.empty(len(x_NI), self.columns, dtype=x_NI.dtype, device=x_NI.device)
        spread(both, both[:, self.columns :], self.b, self.scale, self.all_tiles, bias_O, out)
        return out

    def add(self, y_NO: Tensor, x_NI: Tensor) -> None:
        """y += s · (x Aᵀ) Bᵀ, in place."""
        spread(y_NO, x_NI @ self.a.t(), self.b, self.scale, self.own_tiles, None, y_NO)

    def add_input_gradient(self, grad_NO: Tensor, d_x_NI: Tensor) -> Tensor:
        """d_x += du A, in place; returns du [N, R], of which ``add_gradients`` makes the rest."""
        d_low = torch.empty(len(grad_NO), len(self.a), dtype=grad_NO.dtype, device=grad_NO.device)
        for columns, low, b in self.parts:
            torch.addmm(d_low[:, low], grad_NO[:, columns], b, beta=0, alpha=self.scale, out=d_low[:, low])
        d_x_NI.addmm_(d_low, self.a)
        return d_low

    def add_gradients(self, sums: GradientSums, grad_NO: Tensor, d_low_NR: Tensor, x_NI: Tensor) -> None:
        """A's and B's."""
        add_product(sums.of(self.a), d_low_NR, x_NI)
        low_NR = x_NI @ self.a.t()
        for columns, low, b in self.parts:
            add_product(sums.of(b), grad_NO[:, columns], low_NR[:, low], self.scale)
