"""Packs sequences for the learner: [prompt | completion 1 | … | completion G], with the prompt stored once per group.

Each completion attends to its prompt and to itself. A pack holds complete groups as far as the token budget allows; a group
larger than the budget is split between completions, and its prompt is repeated. The gradient does not depend on the split. A
completion's last token is a target and never an input.

A rollout of an agent may have several sequences. It is one completion, so that objectives see it as a whole: its further
sequences follow contexts of their own, which are packed like prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from oncurve import kernels
from oncurve.models.attention_interface import AttentionContext
from oncurve.models.pack_attention import PackAttention
from oncurve.records import Ints, Routing

Contexts = tuple[tuple[int, Ints], ...]
"""The contexts of a completion's further sequences: for each, the index of its first token, and the ids of its context."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """A prompt and the completions that share it, as token ids. ``keys`` identifies each completion to the caller.

    ``contexts``, if there are any, belong to completions with several sequences: for each completion, the index of each further
    sequence's first token, and the token ids of the context that the sequence follows.
    ``routing``, if it was recorded, has the experts of each completion (`Completion.routing`), ``prompt_routing`` the prompt's.

    Example: ``PrefixGroup(np.array([10, 11]), (np.array([1, 2, 3]), np.array([4])), keys=(0, 1))`` is 4 input tokens.
    """

    prompt_ids: Ints
    completion_ids: tuple[Ints, ...]
    keys: tuple[int, ...]
    contexts: tuple[Contexts, ...] = ()
    routing: tuple[Routing, ...] = ()
    prompt_routing: Routing | None = None

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + sum(self.inputs_of(i) for i in range(len(self.completion_ids)))

    def inputs_of(self, index: int) -> int:
        """Input tokens that a completion adds to a pack, at most."""
        contexts = self.contexts[index] if self.contexts else ()
        return max(len(self.completion_ids[index]) - 1, 0) + sum(len(ids) for _, ids in contexts)

    def part(self, first: int, end: int) -> PrefixGroup:
        """The prompt with some of its completions."""
        chosen = slice(first, end)
        return replace(
            self, completion_ids=self.completion_ids[chosen], keys=self.keys[chosen], contexts=self.contexts[chosen],
            routing=self.routing[chosen],
        )  # fmt: skip

    def sequences(self, index: int) -> list[tuple[Ints, Ints]]:
        """(context, tokens that follow it) of each sequence of a completion."""
        ids, contexts = self.completion_ids[index], [(0, self.prompt_ids), *(self.contexts[index] if self.contexts else ())]
        ends = [first for first, _ in contexts[1:]] + [len(ids)]
        return [(context, ids[first:end]) for (first, context), end in zip(contexts, ends, strict=True)]


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
    spans: tuple[tuple[int, int, int, int, int], ...]
    """Of each sequence: where its prompt starts, the prompt's length, where its own inputs start, their number, and how many
    tokens are predicted from them. A completion is one sequence, unless it has contexts of its own."""
    scores: int = 0
    """Query-key pairs that attention computes, per head and layer without a sliding window."""
    routing_NE: Tensor | None = None
    """The experts that each input token took in the sampler; None if they were not recorded."""

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
    for i in range(len(group.completion_ids)):
        inputs = group.inputs_of(i)
        if i > first and used + inputs > budget:
            parts.append(group.part(first, i))
            first, used = i, len(group.prompt_ids)
        used += inputs
    parts.append(group.part(first, len(group.completion_ids)))
    return parts


def dummy_pack(device: torch.device) -> Pack:
    """The smallest pack, for dummy passes: see `oncurve.models.policy.dummy_passes`."""
    token = np.zeros(1, np.int64)
    return build_pack([PrefixGroup(token, (token,), (0,))], device)


def build_pack(groups: Sequence[PrefixGroup], device: torch.device) -> Pack:
    """Concatenate the groups and record, for each predicted token, which input token it is predicted from."""
    ids: list[Ints] = []
    positions: list[Ints] = []
    prompts: list[tuple[int, int]] = []
    completions: list[tuple[int, int, int]] = []
    sources: dict[tuple[int, int], Ints] = {}
    """Looked up by (row, index of the row's sequence), because sequences are stored by prompt, but predicted tokens by row."""
    spans: dict[tuple[int, int], tuple[int, int, int, int, int]] = {}
    end = 0

    def append(tokens: Ints, first_position: int) -> int:
        nonlocal end
        offset, end = end, end + len(tokens)
        ids.append(tokens)
        positions.append(np.arange(first_position, first_position + len(tokens)))
        return offset

    def append_prompt(prompt_ids: Ints) -> None:
        prompts.append((append(prompt_ids, 0), len(prompt_ids)))

    def append_completion(key: tuple[int, int], tokens: Ints) -> None:
        """A completion of the last prompt."""
        start, length = prompts[-1]
        inputs = max(len(tokens) - 1, 0)
        offset = append(tokens[:inputs], length)
        sources[key] = np.concatenate(([start + length - 1], np.arange(offset, offset + inputs)))[: len(tokens)]
        spans[key] = (start, length, offset, inputs, len(tokens))
        completions.append((offset, inputs, len(prompts) - 1))

    rows = 0
    for group in groups:
        sequences = [group.sequences(i) for i in range(len(group.completion_ids))]
        shared = [(rows + i, of_row[0][1]) for i, of_row in enumerate(sequences) if len(of_row) == 1 or len(of_row[0][1])]
        if shared:
            append_prompt(group.prompt_ids)
        for row, tokens in shared:
            append_completion((row, 0), tokens)
        for i, of_row in enumerate(sequences):
            for number, (context, tokens) in enumerate(of_row[1:], start=1):
                append_prompt(context)
                append_completion((rows + i, number), tokens)
        rows += len(sequences)
    targets = [tokens for group in groups for tokens in group.completion_ids]
    lengths = tuple(len(t) for t in targets)

    def concatenate(arrays: list[Ints]) -> Tensor:
        return to_device(np.concatenate(arrays).astype(np.int64), device)

    position_N = concatenate(positions)
    return Pack(
        input_ids=concatenate(ids)[None],
        position_ids=position_N[None],
        attention=_build_attention(prompts, completions, position_N),
        predicted_from_M=concatenate([sources[key] for key in sorted(sources)]),
        target_M=concatenate(targets),
        row_M=to_device(np.repeat(np.arange(len(lengths)), lengths), device),
        keys=tuple(key for group in groups for key in group.keys),
        lengths=lengths,
        spans=tuple(spans[key] for key in sorted(spans)),
        scores=sum(n * (n + 1) // 2 for _, n in prompts) + sum(n * prompts[p][1] + n * (n + 1) // 2 for _, n, p in completions),
        routing_NE=_pack_routing(groups, device),
    )


def _pack_routing(groups: Sequence[PrefixGroup], device: torch.device) -> Tensor | None:
    """The prompt's last token is the first input of each completion, and takes the same experts in all of them."""
    parts: list[Routing] = []
    for group in groups:
        if group.prompt_routing is None or len(group.routing) != len(group.completion_ids):
            return None
        parts += [group.prompt_routing, group.routing[0][:1], *(routing[1:] for routing in group.routing)]
    return to_device(np.concatenate(parts), device) if parts else None


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
