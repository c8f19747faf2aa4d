"""An element range of a tensor: identifies a rank's shard in memory and in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ElementRange:
    """Elements ``start`` to ``stop`` of the flattened tensor, restricted to the ``columns`` [first, last) of each row if set.

    Example: ``ElementRange(6, 12, columns=(0, 2))`` of a 4×3 tensor is the first two columns of its rows 2 and 3
    """

    start: int
    stop: int
    columns: tuple[int, int] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The elements of a complete tensor, flattened; a copy unless they are contiguous."""
        return self.within(tensor.contiguous()).reshape(-1)

    def within(self, tensor: Tensor) -> Tensor:
        """The elements as a view of the complete tensor."""
        elements = tensor.view(-1)[self.start : self.stop]
        return elements if self.columns is None else elements.view(-1, tensor.numel() // len(tensor))[:, slice(*self.columns)]

    def fill(self, tensor: Tensor, elements: Tensor) -> None:
        """Copies the elements, of any shape, into their position of the complete tensor."""
        view = self.within(tensor)
        view.copy_(elements.view(view.shape))
