"""Packs sequences for the learner: [prompt | completion 1 | … | completion G], with the prompt stored once per group.

Each completion attends to its prompt and to itself. A pack holds complete groups as far as the token budget allows; a group
larger than the budget is split between completions, and its prompt is repeated. The gradient does not depend on the split. A
completion's last token is a target and never an input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oncurve import kernels
from oncurve.models.attention_interface import AttentionContext
from oncurve.models.pack_attention import PackAttention
from oncurve.records import Ints


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """A prompt and the completions that share it, as token ids. ``keys`` identifies each completion to the caller.

    Example: ``PrefixGroup(np.array([10, 11]), (np.array([1, 2, 3]), np.array([4])), keys=(0, 1))`` is 4 input tokens.
    """

    prompt_ids: Ints
    completion_ids: tuple[Ints, ...]
    keys: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + sum(max(len(ids) - 1, 0) for ids in self.completion_ids)


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch, ready for a forward pass.

    Predicted token m follows input token ``predicted_from_M[m]`` and belongs to completion ``row_M[m]`` of the pack, which the
    caller knows as ``keys[row]``. A completion's predicted tokens are contiguous and in order.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention: AttentionContext
    predicted_from_M: Tensor
    target_M: Tensor
    row_M: Tensor
    keys: tuple[int, ...]
    lengths: tuple[int, ...]
    spans: tuple[tuple[int, int, int, int], ...]
    """Of each completion: where its prompt starts, the prompt's length, where its own inputs start, and their number."""
    scores: int = 0
    """Query-key pairs that attention computes, per head and layer without a sliding window."""

    @property
    def rows(self) -> int:
        return len(self.keys)

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]


def split_by_budget(groups: Iterable[PrefixGroup], budget: int) -> list[list[PrefixGroup]]:
    """Groups into packs of at most ``budget`` tokens, in order. A larger group is split between completions."""
    packs: list[list[PrefixGroup]] = []
    room = 0
    for part in (part for group in groups for part in _split_group(group, budget)):
        if part.tokens > room or not packs:
            packs.append([])
            room = budget
        packs[-1].append(part)
        room -= part.tokens
    return packs


def _split_group(group: PrefixGroup, budget: int) -> list[PrefixGroup]:
    parts: list[PrefixGroup] = []
    first, used = 0, len(group.prompt_ids)
    for i, ids in enumerate(group.completion_ids):
        inputs = max(len(ids) - 1, 0)
        if i > first and used + inputs > budget:
            parts.append(PrefixGroup(group.prompt_ids, group.completion_ids[first:i], group.keys[first:i]))
            first, used = i, len(group.prompt_ids)
        used += inputs
    parts.append(PrefixGroup(group.prompt_ids, group.completion_ids[first:], group.keys[first:]))
    return parts


def dummy_pack(device: torch.device) -> Pack:
    """The smallest pack, for dummy passes: see `oncurve.models.policy.dummy_passes`."""
    token = np.zeros(1, np.int64)
    return build_pack([PrefixGroup(token, (token,), (0,))], device)


def build_pack(groups: Sequence[PrefixGroup], device: torch.device) -> Pack:
    """Concatenate the groups and record, for each predicted token, which input token it is predicted from."""
    ids: list[Ints] = []
    positions: list[Ints] = []
    sources: list[Ints] = []
    targets: list[Ints] = []
    prompts: list[tuple[int, int]] = []
    completions: list[tuple[int, int, int]] = []
    offset = 0
    for p, group in enumerate(groups):
        length = len(group.prompt_ids)
        ids.append(group.prompt_ids)
        positions.append(np.arange(length))
        prompts.append((offset, length))
        last_of_prompt = offset + length - 1
        offset += length
        for completion in group.completion_ids:
            inputs = max(len(completion) - 1, 0)
            ids.append(completion[:inputs])
            positions.append(np.arange(length, length + inputs))
            sources.append(np.concatenate(([last_of_prompt], np.arange(offset, offset + inputs)))[: len(completion)])
            targets.append(completion)
            completions.append((offset, inputs, p))
            offset += inputs
    lengths = tuple(len(t) for t in targets)

    def concatenate(arrays: list[Ints]) -> Tensor:
        return to_device(np.concatenate(arrays).astype(np.int64), device)

    position_N = concatenate(positions)
    return Pack(
        input_ids=concatenate(ids)[None],
        position_ids=position_N[None],
        attention=_build_attention(prompts, completions, position_N),
        predicted_from_M=concatenate(sources),
        target_M=concatenate(targets),
        row_M=to_device(np.repeat(np.arange(len(lengths)), lengths), device),
        keys=tuple(key for group in groups for key in group.keys),
        lengths=lengths,
        spans=tuple((*prompts[p], start, inputs) for start, inputs, p in completions),
        scores=sum(n * (n + 1) // 2 for _, n in prompts) + sum(n * prompts[p][1] + n * (n + 1) // 2 for _, n, p in completions),
    )


def _build_attention(
    prompts: list[tuple[int, int]], completions: list[tuple[int, int, int]], position_N: Tensor
) -> AttentionContext:
    if not kernels.can_run_kernels(position_N.device):
        return PackAttention(prompts, completions, position_N)
    from oncurve.models.pack_attention_cuda import CudaPackAttention  # needs Triton

    max_length = max(prompts[p][1] + inputs for _, inputs, p in completions) if completions else max(n for _, n in prompts)
    return CudaPackAttention(prompts, completions, position_N, max_length)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy to a device. A GPU copy goes through pinned memory, so it does not wait for the work queued on the GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def predicting_states(hidden_ND: Tensor, predicted_from_M: Tensor) -> Tensor:
    """The hidden state from which each token of a pack is predicted, [M, D].

    The first tokens of a group's completions all follow from the prompt's last token, whose gradient is their sum. The two
    branches are the ones that sum in a fixed order, so the bits are reproducible: on a CPU the backward of indexing adds in
    thread order while that of `index_select` adds in index order; on a GPU it is the reverse.
    """
    if hidden_ND.device.type == "cpu":
        return hidden_ND.index_select(0, predicted_from_M)
    return hidden_ND[predicted_from_M]
