"""Sums, means and broadcasts over the rows (completions) of a pack.

The learner packs completions end to end, so tensors here are flat: M predicted tokens that belong to R rows. A row lies within
one micro-batch; rows may come in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a micro-batch. ``length_R`` counts unmasked tokens: |o_i| of the formulas, 0 for an empty row.

    Sums use ``index_add`` and broadcasts ``index_select``, each of which is the other's derivative. On a CPU both add in index
    order, so equal inputs give equal bits; on a GPU this holds under ``torch.use_deterministic_algorithms``.
    """

    row_M: Tensor
    drop_M: Tensor
    length_R: Tensor

    @classmethod
    def of(cls, row_M: Tensor, mask_M: Tensor, rows: int, dtype: torch.dtype) -> PackedRows:
        length_R = torch.zeros(rows, dtype=dtype, device=row_M.device).index_add(0, row_M, mask_M.to(dtype))
        return cls(row_M, ~mask_M, length_R)

    def mask(self, values_M: Tensor) -> Tensor:
        """The values with 0 at masked-out tokens. Their values, even infinite ones, reach neither loss nor gradient."""
        return values_M.masked_fill(self.drop_M, 0.0)

    def sum(self, values_M: Tensor) -> Tensor:
        """The sum of each row over its unmasked tokens."""
        return torch.zeros_like(self.length_R, dtype=values_M.dtype).index_add(0, self.row_M, self.mask(values_M))

    def mean(self, values_M: Tensor) -> Tensor:
        """The mean of each row over its unmasked tokens; 0 for an empty row."""
        return self.sum(values_M) / self.length_R.clamp(min=1)

    def broadcast(self, values_R: Tensor) -> Tensor:
        """Each row's value at each of its tokens."""
        return values_R.index_select(0, self.row_M)
