"""A pack's loss in parts whose logits fit at once: each part goes through the head, the loss, and back, before the next begins.

So no logits are computed twice. Parts are of whole completions, as objectives are over them; the sum of their losses is the
pack's, since reductions divide by the step's totals.

Legend: ``M`` predicted tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from oncurve.algos.objectives import LossInputs, LossOutputs
from oncurve.training.learner.update_stats import MicroBatch

T = TypeVar("T")


def split_micro_batch(micro: MicroBatch, most: int) -> Iterator[tuple[slice, MicroBatch]]:
    """(its tokens, the part) of at most ``most`` tokens each, or of one completion that is longer than that."""
    lengths = micro.pack.lengths
    row = token = 0
    while row < len(lengths):
        last, end = row + 1, token + lengths[row]
        while last < len(lengths) and end + lengths[last] - token <= most:
            end += lengths[last]
            last += 1
        yield slice(token, end), _part(micro, slice(row, last), slice(token, end))
        row, token = last, end


def _part(micro: MicroBatch, rows: slice, tokens: slice) -> MicroBatch:
    pack = micro.pack
    if rows == slice(0, pack.rows):
        return micro
    part = replace(
        pack,
        predicted_from_M=pack.predicted_from_M[tokens],
        target_M=pack.target_M[tokens],
        row_M=pack.row_M[tokens] - rows.start,
        keys=pack.keys[rows],
        lengths=pack.lengths[rows],
    )
    values = {name: getattr(micro, name)[tokens] for name in tensors_of(micro)}
    return replace(micro, pack=part, indices=micro.indices[rows], **values)


def tensors_of(micro: MicroBatch) -> list[str]:
    """The fields of a micro-batch, or of a stage's own kind of it, that hold one number per token."""
    return [field.name for field in fields(micro) if isinstance(getattr(micro, field.name), Tensor)]


def merge_inputs(micro: MicroBatch, parts: Sequence[LossInputs]) -> LossInputs:
    """The loss's inputs over the whole pack."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        _joined(parts), advantage_M=micro.advantage_M, mask_M=micro.mask_M, row_M=micro.pack.row_M, rows=micro.pack.rows
    )


def merge_outputs(parts: Sequence[LossOutputs]) -> LossOutputs:
    """What the loss gave over the whole pack; nothing of it can be differentiated any more."""
    if len(parts) == 1:
        return parts[0]
    loss, policy_loss = (
        torch.stack([getattr(part, name).detach() for part in parts]).sum() for name in ("loss", "policy_loss")
    )
    return replace(_joined(parts), loss=loss, policy_loss=policy_loss)


def _joined(parts: Sequence[T]) -> T:
    """Every tensor of one number per token, end to end; the rest is the first part's."""
    first = parts[0]
    long = [f.name for f in fields(first) if isinstance(x := getattr(first, f.name), Tensor) and x.dim()]  # type: ignore[arg-type]
    return replace(first, **{name: torch.cat([getattr(part, name).detach() for part in parts]) for name in long})  # type: ignore[type-var]
