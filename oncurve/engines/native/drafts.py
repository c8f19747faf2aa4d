"""Drafts of the torch runner: which tokens probably come next, and how many of them equal the tokens that were sampled.

A draft is what followed the longest match of a sequence's last tokens (2 to 8) in its request's texts. On their devices,
`kernels/drafting.py` and `models/llama/decode.c` do the same.
"""

from __future__ import annotations

from collections import abc

import numpy as np

from oncurve.engines.base import PassCounts, SampleRequest
from oncurve.engines.native.sequence import Sequence
from oncurve.recipe.schema.sections import Draft
from oncurve.records import Ints

MIN_MATCH, MAX_MATCH = 2, 8
"""The shortest and the longest match that a draft can follow, in tokens."""


class RequestTexts:
    """The texts of one request in which drafts are looked for: its prompt, then each completion so far, then earlier answers.

    A row starts with the last 8 tokens of the prompt, so that the first tokens of a completion can be matched too.
    """

    def __init__(self, request: SampleRequest) -> None:
        prompt, first = request.prompt_ids, 1 + request.samples
        longest = max(len(prompt), request.sampling.max_new_tokens, *map(len, request.earlier), 0)
        self.tokens: Ints = np.full((first + len(request.earlier), MAX_MATCH + longest), -1, np.int64)
        self.lengths: Ints = np.zeros(len(self.tokens), np.int64)
        last = prompt[-MAX_MATCH:]
        self.tokens[1:, MAX_MATCH - len(last) : MAX_MATCH] = last
        self.tokens[0, :MAX_MATCH] = -2  # matches nothing
        for row, text in ((0, prompt), *enumerate(request.earlier, start=first)):
            self.write(row, 0, text)

    def write(self, row: int, start: int, tokens: abc.Sequence[int] | Ints) -> None:
        """A text continues after ``start`` tokens with these, and ends there."""
        end = start + len(tokens)
        self.tokens[row, MAX_MATCH + start : MAX_MATCH + end], self.lengths[row] = tokens, end

    def find(self, row: int, most: int, draft: Draft) -> Ints:
        """Up to ``most`` tokens that followed the longest match of a text's last tokens; of equal matches, the one that ends
        last."""
        rows = [0, row] if draft == "own" else slice(None)
        tokens, lengths = self.tokens[rows], self.lengths[rows]
        end, width = self.tokens[row, self.lengths[row] : self.lengths[row] + MAX_MATCH], int(lengths.max())
        same = np.arange(width) < lengths[:, None]
        matched = np.zeros(same.shape, np.int64)
        for back in range(MAX_MATCH - 1, -1, -1):
            same &= tokens[:, back : back + width] == end[back]
            if not same.any():
                break
            matched += same
        best = np.where(matched >= MIN_MATCH, matched * (width + 1) + np.arange(width), -1)
        source, at = divmod(int(best.argmax()), max(width, 1)) if best.size else (0, 0)
        if not best.size or best[source, at] < 0:
            return tokens[0, :0]
        return tokens[source, MAX_MATCH + at : MAX_MATCH + min(at + most, int(lengths[source]))]


class Drafter:
    """The drafts of S slots with W rows each: one for a slot's last token, and one for each drafted token."""

    def __init__(self, sequence_in: abc.Sequence[Sequence | None], width: int, draft: Draft, eos_ids: tuple[int, ...]) -> None:
        """``sequence_in``: the sequence of each slot. It is the runner's own list, not a copy, so it is always up to date."""
        self.sequence_in, self.width, self.draft, self.eos_ids = sequence_in, width, draft, eos_ids
        self.counts = PassCounts()
        self.texts: dict[int, RequestTexts] = {}
        """By request number."""
        self.position_S: Ints = np.zeros(len(sequence_in), np.int64)
        """Tokens of each slot's sequence."""
        self.has_ended: list[bool] = [False] * len(sequence_in)

    def start(self, slot: int, sequence: Sequence, position: int = 0, tokens: abc.Sequence[int] = ()) -> None:
        """A slot continues a sequence after ``position`` tokens and these, which an environment wrote."""
        if sequence.group not in self.texts:
            self.texts[sequence.group] = RequestTexts(sequence.request)
        self.has_ended[slot] = False
        self.texts[sequence.group].write(_row(sequence), position, tokens)
        self.position_S[slot] = position + len(tokens)

    def forget(self, group: int) -> None:
        """No more sequences of this request will come."""
        self.texts.pop(group, None)

    def propose(self, live: abc.Iterable[int], forced_ST: Ints | None) -> Ints:
        """What each live slot drafts, [S, W − 1], −1 if nothing: the tokens that an environment forces next, or a match."""
        draft_SW = np.full((len(self.sequence_in), self.width - 1), -1, np.int64)
        for slot in self._decoding(live):
            sequence, at = self.sequence_in[slot], int(self.position_S[slot])
            assert sequence is not None
            most = min(self.width - 1, sequence.request.sampling.max_new_tokens - 1 - at)
            tokens = self._forced(forced_ST, slot, at, most)
            # A constraint allows the next token only after it knows the last one.
            if not len(tokens) and most > 0 and sequence.constraint is None:
                tokens = self.texts[sequence.group].find(_row(sequence), most, self.draft)
            draft_SW[slot, : len(tokens)] = tokens
        return draft_SW

    def accept(self, live: abc.Iterable[int], draft_SW: Ints, sampled_SW: Ints, forced_ST: Ints | None) -> Ints:
        """How many sampled tokens each slot takes, [S]: up to and with the first that differs from the draft, or to its end."""
        count_S = np.zeros(len(self.sequence_in), np.int64)
        for slot in self._decoding(live):
            sequence, at = self.sequence_in[slot], int(self.position_S[slot])
            assert sequence is not None
            sampling, taken, is_last = sequence.request.sampling, 0, False
            while not is_last:
                token, is_forced = int(sampled_SW[slot, taken]), len(self._forced(forced_ST, slot, at + taken, 1)) > 0
                taken += 1
                ends = token in self.eos_ids and at + taken > sampling.min_new_tokens and not is_forced
                self.has_ended[slot] = ends or at + taken == sampling.max_new_tokens
                is_last = self.has_ended[slot] or taken == self.width or token != draft_SW[slot, taken - 1]
            self.texts[sequence.group].write(_row(sequence), at, sampled_SW[slot, :taken])
            self.position_S[slot] += taken
            count_S[slot] = taken
            self.counts += PassCounts(0, int((draft_SW[slot] >= 0).sum()), taken - 1, 1)
        self.counts += PassCounts(rows=sampled_SW.size)
        return count_S

    def _decoding(self, live: abc.Iterable[int]) -> list[int]:
        return [slot for slot in live if not self.has_ended[slot]]

    def _forced(self, forced_ST: Ints | None, slot: int, at: int, most: int) -> Ints:
        """The forced tokens from position ``at`` up to the first position that is not forced, and at most ``most``."""
        if forced_ST is None or most <= 0:
            return np.zeros(0, np.int64)
        tokens = forced_ST[slot, at : at + most]
        free = np.flatnonzero(tokens < 0)
        return tokens[: free[0]] if len(free) else tokens


def _row(sequence: Sequence) -> int:
    return 1 + sequence.sample - sequence.request.key.first
