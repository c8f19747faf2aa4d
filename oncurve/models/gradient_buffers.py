"""Accumulates gradients in float32, whatever the weights' precision.

A step's gradient is a sum over packs. Autograd would add in the precision of the weights, and bfloat16 rounds every sum to
three digits. Here every parameter has a float32 buffer. The buffers have the memory layout of the parameters, so that layers
whose weights share a storage (models/llama/fused.py) get their gradient by one matrix product that adds in place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class GradAccumulator:
    """One float32 buffer for each storage that holds trained parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._buffers: dict[int, Tensor] = {}
        self._spans: dict[int, tuple[int, int]] = {}
        self.consumed = False
        """Whether the optimiser has used the sums: the next gradient starts from zero."""

    def buffer_for(self, weight: Tensor) -> Tensor:
        """The buffer of a parameter, or of several that are adjacent in one tensor."""
        storage = weight.untyped_storage().data_ptr()
        if storage not in self._buffers:
            first, end = self._span(weight)
            self._buffers[storage] = torch.zeros(end - first, dtype=torch.float32, device=weight.device)
        offset = weight.storage_offset() - self._span(weight)[0]
        return self._buffers[storage].as_strided(weight.shape, weight.stride(), offset)

    def _span(self, weight: Tensor) -> tuple[int, int]:
        """From the first to the last trained element of a storage: frozen weights outside of it need no buffer."""
        storage = weight.untyped_storage()
        if storage.data_ptr() not in self._spans:
            self._spans = _find_spans(self.parameters)
        return self._spans.get(storage.data_ptr(), (0, storage.nbytes() // weight.element_size()))

    @property
    def is_allocated(self) -> bool:
        return bool(self._buffers)

    def zero(self) -> None:
        """Set all buffers to zero, and free those of parameters that have moved to another storage."""
        live = {p.untyped_storage().data_ptr() for p in self.parameters}
        if not self._buffers.keys() <= live:
            self._buffers = {storage: buffer for storage, buffer in self._buffers.items() if storage in live}
            self._spans = _find_spans(self.parameters)
        if self._buffers:
            torch._foreach_zero_(list(self._buffers.values()))
        self.consumed = False

    @torch.no_grad()
    def add_autograd_grads(self) -> None:
        """Add the gradients that autograd left in the parameters' ``grad``, and clear those that are not the buffer itself."""
        if self.consumed:
            self.zero()
        added = [p for p in self.parameters if p.grad is not None and p.grad.data_ptr() != self.buffer_for(p).data_ptr()]
        if added:
            torch._foreach_add_([self.buffer_for(p) for p in added], [p.grad.float() for p in added if p.grad is not None])
        for p in added:
            p.grad = None


def _find_spans(parameters: Iterable[nn.Parameter]) -> dict[int, tuple[int, int]]:
    """By storage: the first element of these parameters there, and the end of the last."""
    spans: dict[int, tuple[int, int]] = {}
    for p in parameters:
        storage, first = p.untyped_storage().data_ptr(), int(p.storage_offset())
        span = spans.get(storage, (first, first))
        spans[storage] = min(span[0], first), max(span[1], first + p.numel())
    return spans


def add_product(total_OI: Tensor, grad_NO: Tensor, input_NI: Tensor, scale: float = 1.0) -> None:
    """total += scale · gradᵀ · input, the gradient of a linear layer's weight, summed in float32.

    On a GPU, 16-bit factors are not converted: one matrix product accumulates into the float32 total.
    """
    if total_OI.device.type == "cuda" and grad_NO.dtype != torch.float32:
        torch.ops.aten.addmm.dtype_out(total_OI, grad_NO.t(), input_NI, torch.float32, alpha=scale, out=total_OI)
    else:
        total_OI.addmm_(grad_NO.t().to(total_OI.dtype), input_NI.to(total_OI.dtype), alpha=scale)
