"""Speculative sampling on the GPU without the host: accept what was drafted, and draft what probably comes next.

A decode step computes W rows for each slot: one for its last token and one for each drafted token. Every row samples a token
with the uniform number of its own position, and a drafted token is accepted exactly if the row before it sampled that token. So
a completion has the tokens that it would have without drafts.

A draft is what followed the longest match of a slot's last tokens (2 to 8) in its sources: the texts of its group, which lie
side by side in memory, the prompt first. A text row starts with the last 8 tokens of its prompt, so that its first tokens can
be matched too. Reading a text that other slots extend is safe: a step's kernels run one after the other.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_MATCH = 2
MAX_MATCH = 8
"""A draft follows the longest match of at least MIN_MATCH and at most MAX_MATCH tokens."""
_MATCH = tl.constexpr(MAX_MATCH)
_SPAN = tl.constexpr(1 << 26)  # a match is its length · 2^26 + where it ends
_LEAST = tl.constexpr(MIN_MATCH << 26)
BLOCK = 1024
"""Positions of a text that a program compares at once."""


@dataclass(frozen=True, slots=True)
class DraftState:
    """What drafting reads and updates besides the rows; int32 tensors on the device that keep their addresses.

    By slot: ``position`` counts its tokens (−1: idle) and ``written`` those that the host may read; ``limit`` is the maximum
    length and ``min_tokens`` the minimum; ``draft`` [S, W − 1] holds the drafted tokens, −1 if there is none; ``text`` is its
    own row of ``texts`` and ``first_text`` the first of its sources. ``sampled`` [C, S] and ``logps`` [C, 3, S] are rings as in
    ``sampling.Slots``, and ``forced`` [S, T] is as there. ``texts`` [texts, MAX_MATCH + length] and ``text_length`` are the
    texts. ``match`` [S, sources] is scratch. ``counts`` [texts, 3], by text: tokens drafted and accepted, and passes.
    """

    position: Tensor
    written: Tensor
    limit: Tensor
    min_tokens: Tensor
    draft: Tensor
    text: Tensor
    first_text: Tensor
    sampled: Tensor
    logps: Tensor
    forced: Tensor
    texts: Tensor
    text_length: Tensor
    match: Tensor
    counts: Tensor

    @property
    def width(self) -> int:
        """W, rows of a slot."""
        return self.draft.shape[1] + 1

    @classmethod
    def empty(
        cls, slots: int, width: int, ring: int, texts: int, text_width: int, sources: int, forced: int, device: torch.device
    ) -> DraftState:
        def ints(*size: int, fill: int = 0) -> Tensor:
            return torch.full(size, fill, dtype=torch.int32, device=device)

        S = slots
        return cls(
            ints(S, fill=-1), ints(S), ints(S), ints(S), ints(S, width - 1, fill=-1), ints(S), ints(S), ints(ring * width, S),
            torch.zeros((ring * width, 3, S), dtype=torch.float32, device=device), ints(S, forced, fill=-1),
            ints(texts, text_width), ints(texts), ints(S, sources), ints(texts, 3),
        )  # fmt: skip


@triton.jit
def _accept(row_sampled, row_logps, position, written, limit, min_tokens, draft, text, ring, logps, forced, is_end, texts,
            text_length, token_row, counts, slots, text_width, C: tl.constexpr, W: tl.constexpr,
            FORCED: tl.constexpr):  # fmt: skip
    """Append to each slot the tokens that its rows sampled, up to and including the first one that differs from the draft, or
    up to the end of the completion."""
    slot = tl.program_id(0)
    first = tl.load(position + slot)
    if first >= 0:
        number = tl.load(text + slot)
        own = texts + number.to(tl.int64) * text_width + _MATCH
        most = tl.load(limit + slot)
        least = tl.load(min_tokens + slot)
        rows = slots * W
        goes_on = first >= 0
        ended = first < 0
        made = 0
        drafted = 0
        last = first * 0
        for w in tl.static_range(W):
            at = first + w
            row = slot * W + w
            token = tl.load(row_sampled + row, mask=goes_on, other=0)
            sampled_end = goes_on
            if FORCED:
                forced_token = tl.load(forced + slot * FORCED + at, mask=goes_on, other=-1)
                token = tl.where(forced_token >= 0, forced_token, token)
                sampled_end = forced_token < 0
            place = (at % C) * slots + slot
            tl.store(ring + place, token, mask=goes_on)
            for i in tl.static_range(3):
                value = tl.load(row_logps + i * rows + row, mask=goes_on, other=0.0)
                tl.store(logps + ((at % C) * 3 + i) * slots + slot, value, mask=goes_on)
            tl.store(own + at, token, mask=goes_on)
            is_last = (tl.load(is_end + token, mask=goes_on, other=0) != 0) & (at >= least) & sampled_end
            is_last = is_last | (at + 1 >= most)
            ended = tl.where(goes_on, is_last, ended)
            last = tl.where(goes_on, token, last)
            made += goes_on.to(tl.int32)
            if w + 1 < W:
                guess = tl.load(draft + slot * (W - 1) + w)
                drafted += (guess >= 0).to(tl.int32)
                goes_on = goes_on & (is_last == 0) & (guess == token)
        end = first + made
        tl.store(position + slot, tl.where(ended, -1, end))
        tl.store(written + slot, end)
        tl.store(text_length + number, end)
        tl.store(token_row + slot * W, last.to(token_row.dtype.element_ty))
        tl.store(counts + number * 3, tl.load(counts + number * 3) + drafted)
        tl.store(counts + number * 3 + 1, tl.load(counts + number * 3 + 1) + made - 1)
        tl.store(counts + number * 3 + 2, tl.load(counts + number * 3 + 2) + 1)


@triton.jit
def _match(position, text, first_text, texts, text_length, match, text_width, sources,
           OWN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The longest match of a slot's last tokens in one of its sources, the latest of equal ones. OWN: the sources are the
    prompt and the slot's own text."""
    slot, source = tl.program_id(0), tl.program_id(1)
    length = tl.load(position + slot)
    if length >= 0:
        own = tl.load(text + slot)
        row = tl.load(first_text + slot) + source
        if OWN:
            row = tl.where(source == 0, row, own)
        end = texts + own.to(tl.int64) * text_width + length
        base = texts + row.to(tl.int64) * text_width
        count = tl.load(text_length + row)
        best = tl.full([BLOCK], -1, tl.int32)
        for start in range(0, count, BLOCK):
            i = start + tl.arange(0, BLOCK)
            same = i < count
            n = tl.zeros([BLOCK], tl.int32)
            for back in tl.static_range(_MATCH):
                token = tl.load(end + _MATCH - 1 - back)
                same = same & (tl.load(base + i + _MATCH - 1 - back, mask=same, other=-3) == token)
                n += same.to(tl.int32)
            best = tl.maximum(best, n * _SPAN + i)
        tl.store(match + slot * sources + source, tl.max(best, 0))


@triton.jit
def _draft(position, limit, draft, text, first_text, forced, texts, text_length, match, row_token, row_position, text_width,
           sources, W: tl.constexpr, SOURCES: tl.constexpr, FORCED: tl.constexpr, OWN: tl.constexpr):  # fmt: skip
    """The rows of each slot's next step: its last token, and the tokens after the best match."""
    slot = tl.program_id(0)
    length = tl.load(position + slot)
    source_S = tl.arange(0, SOURCES)
    match_S = tl.load(match + slot * sources + source_S, mask=source_S < sources, other=-1)
    best = tl.max(match_S, 0)
    source = tl.argmax(match_S, 0)
    row = tl.load(first_text + slot) + source
    if OWN:
        row = tl.where(source == 0, row, tl.load(text + slot))
    at = best % _SPAN
    runs = length >= 0
    found = runs & (best >= _LEAST)
    room = tl.load(text_length + row, mask=found, other=0) - at
    tokens = texts + row.to(tl.int64) * text_width + _MATCH + at
    most = tl.load(limit + slot)
    tl.store(row_position + slot * W, length)
    valid = runs
    for w in tl.static_range(1, W):
        token = tl.load(tokens + w - 1, mask=found & (w - 1 < room), other=-1)
        if FORCED:
            inside = runs & (length + w - 1 < FORCED)
            forced_token = tl.load(forced + slot * FORCED + length + w - 1, mask=inside, other=-1)
            token = tl.where(forced_token >= 0, forced_token, token)
        valid = valid & (token >= 0) & (length + w < most)
        tl.store(draft + slot * (W - 1) + w - 1, tl.where(valid, token, -1))
        tl.store(row_token + slot * W + w, tl.where(valid, token, 0).to(row_token.dtype.element_ty))
        tl.store(row_position + slot * W + w, tl.where(valid, length + w, -1))


def accept_and_draft(
    row_token: Tensor,
    row_position: Tensor,
    row_sampled: Tensor,
    row_logps: Tensor,
    state: DraftState,
    is_end_V: Tensor,
    *,
    own: bool,
) -> None:
    """After a step: accept what its rows sampled ([1, S · W] tokens and [1, 3, S · W] log-probs), and write the rows of the
    next step, token and position. ``own``: no drafts from the other texts of the group."""
    S, W = len(state.position), state.width
    forced, width = state.forced.shape[1], state.texts.shape[1]
    sources = 2 if own else state.match.shape[1]
    _accept[(S,)](
        row_sampled, row_logps, state.position, state.written, state.limit, state.min_tokens, state.draft, state.text,
        state.sampled, state.logps, state.forced, is_end_V, state.texts, state.text_length, row_token, state.counts, S, width,
        C=len(state.sampled), W=W, FORCED=forced, num_warps=1,
    )  # fmt: skip
    _match[(S, sources)](
        state.position, state.text, state.first_text, state.texts, state.text_length, state.match, width,
        state.match.shape[1], OWN=own, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    _draft[(S,)](
        state.position, state.limit, state.draft, state.text, state.first_text, state.forced, state.texts, state.text_length,
        state.match, row_token, row_position, width, state.match.shape[1], W=W,
        SOURCES=triton.next_power_of_2(state.match.shape[1]), FORCED=forced, OWN=own, num_warps=1,
    )  # fmt: skip
