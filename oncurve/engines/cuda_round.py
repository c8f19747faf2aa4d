"""A round of tokens under way on the device, and how the host reads it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oncurve.records import Ints


@dataclass(frozen=True, slots=True)
class Round:
    """Who sat where (0: nobody), from which position on, how many tokens, and what will be read: tokens, log-probs, and
    whatever else a batch wants."""

    age_S: Ints
    start_S: Ints
    tokens: int
    read: tuple[Tensor, ...]
    done: torch.cuda.Event | None

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    @property
    def drawn(self) -> np.ndarray:
        return self.read[0].numpy()

    @property
    def logps(self) -> np.ndarray:
        return self.read[1].numpy()


def read(*written: Tensor) -> tuple[tuple[Tensor, ...], torch.cuda.Event | None]:
    """Copies on the host, complete once the event has happened."""
    if written[0].device.type != "cuda":
        return tuple(x.clone() for x in written), None
    there = tuple(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in written)
    for to, x in zip(there, written, strict=True):
        to.copy_(x, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return there, done
