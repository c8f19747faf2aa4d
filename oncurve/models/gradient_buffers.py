"""Sums of gradients in float32, whatever the weights' precision.

A step's gradient is a sum over packs, and autograd would add in the precision of the weights: in bfloat16 each sum rounds to
three digits. Here every parameter has a float32 sum. The sums lie in memory as the parameters do, so that layers whose weights
lie side by side (models/llama/fused.py) get their gradient by one product, added in place by the product itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class GradAccumulator:
    """One float32 buffer for each storage that holds parameters, as long as what is trained there."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._buffers: dict[int, Tensor] = {}
        self._spans: dict[int, tuple[int, int]] = {}
        self.spent = False
        """Whether an update has been taken: what comes next begins a new sum."""

    def buffer_for(self, weight: Tensor) -> Tensor:
        """The sum for a parameter, or for several that lie side by side in one tensor."""
        where = weight.untyped_storage().data_ptr()
        if where not in self._buffers:
            first, end = self._span(weight)
            self._buffers[where] = torch.zeros(end - first, dtype=torch.float32, device=weight.device)
        return self._buffers[where].as_strided(weight.shape, weight.stride(), weight.storage_offset() - self._span(weight)[0])

    def _span(self, weight: Tensor) -> tuple[int, int]:
        """From the first to the last trained number of a storage: frozen weights that lie before them have no sum."""
        storage = weight.untyped_storage()
        if storage.data_ptr() not in self._spans:
            self._spans = _spans_of(self.parameters)
        return self._spans.get(storage.data_ptr(), (0, storage.nbytes() // weight.element_size()))

    @property
    def allocated(self) -> bool:
        return bool(self._buffers)

    def zero(self) -> None:
        """Also forgets the sums of parameters that have moved to another storage."""
        live = {p.untyped_storage().data_ptr() for p in self.parameters}
        if not self._buffers.keys() <= live:
            self._buffers = {where: buffer for where, buffer in self._buffers.items() if where in live}
            self._spans = _spans_of(self.parameters)
        if self._buffers:
            torch._foreach_zero_(list(self._buffers.values()))
        self.spent = False

    @torch.no_grad()
    def add_autograd_grads(self) -> None:
        """Add what autograd left in the parameters' own ``grad``, and clear it; a ``grad`` that is the sum itself stays."""
        if self.spent:
            self.zero()
        found = [p for p in self.parameters if p.grad is not None and p.grad.data_ptr() != self.buffer_for(p).data_ptr()]
        if found:
            torch._foreach_add_([self.buffer_for(p) for p in found], [p.grad.float() for p in found if p.grad is not None])
        for p in found:
            p.grad = None

    def add_product(self, weight: Tensor, grad_NO: Tensor, input_NI: Tensor) -> None:
        """Adds gradᵀ · input, the gradient of a linear layer's weight [O, I]."""
        add_product(self.buffer_for(weight), grad_NO, input_NI)


def _spans_of(parameters: Iterable[nn.Parameter]) -> dict[int, tuple[int, int]]:
    """By storage: the first and the last number of these parameters there."""
    spans: dict[int, tuple[int, int]] = {}
    for p in parameters:
        where, first = p.untyped_storage().data_ptr(), int(p.storage_offset())
        known = spans.get(where, (first, first))
        spans[where] = min(known[0], first), max(known[1], first + p.numel())
    return spans


def add_product(total_OI: Tensor, grad_NO: Tensor, input_NI: Tensor, scale: float = 1.0) -> None:
    """total += scale · gradᵀ · input in float32; on a GPU by one product of 16-bit factors that adds to its float32 output."""
    if total_OI.device.type == "cuda" and grad_NO.dtype != torch.float32:
        torch.ops.aten.addmm.dtype_out(total_OI, grad_NO.t(), input_NI, torch.float32, alpha=scale, out=total_OI)
    else:
        total_OI.addmm_(grad_NO.t().to(total_OI.dtype), input_NI.to(total_OI.dtype), alpha=scale)
