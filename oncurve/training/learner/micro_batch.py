"""Micro-batches: a pack with what its loss needs, split so that the logits of a part fit at once.

Each part goes forward through the LM head and the loss and backward before the next, so no logits are computed twice. Parts
hold complete completions, since objectives are defined on them. Their losses sum to the pack's, since reductions divide by
the step's totals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from oncurve.algos.objectives import LossInputs, LossOutputs
from oncurve.models.heads.lm_head import Truncation
from oncurve.models.packing import Pack

T = TypeVar("T")
CompletionIndex = tuple[int, int]
"""(group, completion) of a packed completion, as indices into the step's groups."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A pack, and what the loss needs to know about each of its predicted tokens.

    ``sampler_M`` holds the sampler's log-probs. ``logp_old_M`` is None until the first update has computed it.
    """

    pack: Pack
    indices: tuple[CompletionIndex, ...]
    advantage_M: Tensor
    mask_M: Tensor
    sampler_M: Tensor
    logp_old_M: Tensor | None
    logp_ref_M: Tensor | None
    truncation: Truncation | None = None
    """With truncated sampling: the tokens that were kept."""
    kept_M: Tensor | None = None
    anchor_M: Tensor | None = None
    """What entropy controls say of each token (`LossInputs`)."""


def split_micro_batch(micro: MicroBatch, max_tokens: int) -> Iterator[tuple[slice, MicroBatch]]:
    """Splits a micro-batch into parts of at most ``max_tokens``; a longer completion is a part by itself. Yields the slice of
    predicted tokens and the part."""
    lengths = micro.pack.lengths
    row = token = 0
    while row < len(lengths):
        last, end = row + 1, token + lengths[row]
        while last < len(lengths) and end + lengths[last] - token <= max_tokens:
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
    values = {name: getattr(micro, name)[tokens] for name in token_fields(micro)}
    truncation = None if micro.truncation is None else micro.truncation.part(tokens)
    return replace(micro, pack=part, indices=micro.indices[rows], truncation=truncation, **values)


def token_fields(micro: MicroBatch) -> list[str]:
    """The fields of a micro-batch, or of a subclass, that hold one value per predicted token."""
    return [field.name for field in fields(micro) if isinstance(getattr(micro, field.name), Tensor)]


def merge_inputs(micro: MicroBatch, parts: Sequence[LossInputs]) -> LossInputs:
    """The loss inputs of the complete pack."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        _concatenate(parts), advantage_M=micro.advantage_M, mask_M=micro.mask_M, row_M=micro.pack.row_M, rows=micro.pack.rows
    )


def merge_outputs(parts: Sequence[LossOutputs]) -> LossOutputs:
    """The loss outputs of the complete pack, detached."""
    if len(parts) == 1:
        return parts[0]
    loss, policy_loss = (
        torch.stack([getattr(part, name).detach() for part in parts]).sum() for name in ("loss", "policy_loss")
    )
    return replace(_concatenate(parts), loss=loss, policy_loss=policy_loss)


def _concatenate(parts: Sequence[T]) -> T:
    """Concatenates every field with one value per token; the other fields are the first part's."""
    first = parts[0]
    names = [f.name for f in fields(first) if isinstance(x := getattr(first, f.name), Tensor) and x.dim()]  # type: ignore[arg-type]
    return replace(first, **{name: torch.cat([getattr(part, name).detach() for part in parts]) for name in names})  # type: ignore[type-var]
