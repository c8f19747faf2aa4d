"""Sums of gradients in float32, whatever the weights' precision.

A step's gradient is a sum over packs, and autograd would add in the precision of the weights: in bfloat16 each sum rounds to
three digits. Here every parameter has a float32 sum. The sums lie in memory as the parameters do, so that layers whose weights
lie side by side (models/fused.py) get their gradient by one product, added in place by the product itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class GradientSums:
    """One float32 buffer for each storage that holds parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._buffers: dict[int, Tensor] = {}
        self.spent = False
        """Whether an update has been taken: what comes next begins a new sum."""

    def of(self, weight: Tensor) -> Tensor:
        """The sum for a parameter, or for several that lie side by side in one tensor."""
        storage = weight.untyped_storage()
        where = storage.data_ptr()
        if where not in self._buffers:
            size = storage.nbytes() // weight.element_size()
            self._buffers[where] = torch.zeros(size, dtype=torch.float32, device=weight.device)
        return self._buffers[where].as_strided(weight.shape, weight.stride(), weight.storage_offset())

    @property
    def allocated(self) -> bool:
        return bool(self._buffers)

    def zero(self) -> None:
        """Also forgets the sums of parameters that have moved to another storage."""
        live = {p.untyped_storage().data_ptr() for p in self.parameters}
        self._buffers = {where: buffer for where, buffer in self._buffers.items() if where in live}
        if self._buffers:
            torch._foreach_zero_(list(self._buffers.values()))
        self.spent = False

    @torch.no_grad()
    def absorb(self) -> None:
        """Add what autograd left in the parameters' own ``grad``, and clear it; a ``grad`` that is the sum itself stays."""
        if self.spent:
            self.zero()
        found = [p for p in self.parameters if p.grad is not None and p.grad.data_ptr() != self.of(p).data_ptr()]
        if found:
            torch._foreach_add_([self.of(p) for p in found], [p.grad.float() for p in found if p.grad is not None])
        for p in found:
            p.grad = None

    def add_product(self, weight: Tensor, grad_NO: Tensor, input_NI: Tensor) -> None:
        """Adds gradᵀ · input, the gradient of a linear layer's weight [O, I]."""
        add_product(self.of(weight), grad_NO, input_NI)


def add_product(total_OI: Tensor, grad_NO: Tensor, input_NI: Tensor) -> None:
    """total += gradᵀ · input, in float32; on a GPU by one product that takes 16-bit factors and adds to its float32 output."""
    if total_OI.device.type == "cuda" and grad_NO.dtype != torch.float32:
        torch.ops.aten.addmm.dtype_out(total_OI, grad_NO.t(), input_NI, torch.float32, out=total_OI)
    else:
        total_OI.addmm_(grad_NO.t().to(total_OI.dtype), input_NI.to(total_OI.dtype))
