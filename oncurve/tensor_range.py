"""Which of a tensor's numbers: how a rank's part of it is named, in memory and on a disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ElementRange:
    """From ``start`` to ``stop`` in the order of a tensor's rows; of each row only some ``columns``, where they are named."""

    start: int
    stop: int
    columns: tuple[int, int] | None = None

    def of(self, whole: Tensor) -> Tensor:
        """Those numbers of a whole tensor, flat."""
        return self.within(whole.contiguous()).reshape(-1)

    def within(self, whole: Tensor) -> Tensor:
        """Those numbers, in the memory of the whole tensor."""
        numbers = whole.view(-1)[self.start : self.stop]
        return numbers if self.columns is None else numbers.view(-1, whole.numel() // len(whole))[:, slice(*self.columns)]

    def fill(self, whole: Tensor, part: Tensor) -> None:
        """Puts numbers, in whatever shape, where they belong in the whole tensor."""
        own = self.within(whole)
        own.copy_(part.view(own.shape))
