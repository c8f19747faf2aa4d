"""Completions in several turns on a GPU: an environment answers back, and sampling goes on in the same slot.

The same turns as in episodes.py. The host reads a round, sees that a turn is over, asks the environment, and seats the
completion anew at its last token; what the device has decoded beyond that is not read. The answer's tokens wait on the device,
each at its place, and are read there in place of what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oncurve.engines.base import SampleKey
from oncurve.engines.cuda.scheduler import CudaScheduler, CudaSequence, DecodeRound
from oncurve.engines.native.sequence import ends_with_stop
from oncurve.engines.native.turns import reply_to
from oncurve.models.chat_template import encode_reply
from oncurve.records import Bools, Ints, StopReason


@dataclass(eq=False)
class CudaTurnSequence(CudaSequence):
    """A completion with its turns. ``given`` are the stretches that the environment wrote; the present turn begins after the
    last of them."""

    turns: list[str] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)

    @property
    def begun(self) -> int:
        return self.given[-1][1] if self.given else 0

    @property
    def loss_mask(self) -> Bools:
        own = np.ones(len(self.token_ids), bool)
        for first, last in self.given:
            own[first:last] = False
        return own

    def start_again(self) -> None:
        super().start_again()
        self.turns, self.given = [], []


class CudaTurnScheduler(CudaScheduler):
    """A batch in which prompts have environments."""

    row_type = CudaTurnSequence

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.told: dict[int, Ints] = {}
        """By slot, tokens that the device has not been told of yet."""
        self.draws = SampleKey(self.ask.seed, self.ask.step)

    def _assign_slot(self, slot: int, row: CudaSequence) -> None:
        super()._assign_slot(slot, row)
        self.told[slot] = np.full(self.board.limits.given, -1, np.int64)

    def _upload_state(self) -> None:
        if self.told:
            slots = self._send(np.array(list(self.told), np.int64))
            given = self.board.slots.given
            given.index_copy_(0, slots, self._send(np.stack(list(self.told.values()))).to(given.dtype))
            self.told.clear()
        super()._upload_state()

    def _read_round(self, done: DecodeRound) -> list[int]:
        """Write down what a round has drawn or read, turn by turn; returns the groups that are whole now."""
        done.wait()
        drawn, logps, whole = done.drawn, done.logps, []
        for slot in np.flatnonzero((done.age_S > 0) & (done.age_S == self.age_S)).tolist():
            row = self.row_in[slot]
            assert isinstance(row, CudaTurnSequence)
            place = np.arange(done.start_S[slot], min(done.start_S[slot] + done.tokens, self.how.max_new_tokens))
            self.token_ST[slot, place] = drawn[place % len(drawn), slot]
            self.logp_ST3[slot, place] = logps[place % len(drawn), :, slot]
            found = self._turn_over(slot, row, place)
            if found is None:
                continue
            count, why = found
            stop = why if why == "length" else self._goes_on(slot, row, count, why)
            if stop is not None and self._end(slot, row, count, stop):
                whole.append(row.group)
        return whole

    def _end(self, slot: int, row: CudaSequence, count: int, stop: StopReason) -> bool:
        assert isinstance(row, CudaTurnSequence)
        for first, last in row.given:
            self.logp_ST3[slot, first:last] = 0.0
        return super()._end(slot, row, count, stop)

    def _turn_over(self, slot: int, row: CudaTurnSequence, place: Ints) -> tuple[int, StopReason] | None:
        """After how many tokens, of these the last ones, the turn is over, and why."""
        calls, stops, limit = self.ask.prompts[row.group].calls, self.how.stop, self.how.max_new_tokens
        said = bool(calls or stops) and self._says(slot, row, int(place[-1]) + 1, calls + stops, len(place))
        for n in place.tolist():
            if n >= row.begun:
                if said and calls and self._says(slot, row, n + 1, calls):
                    return n + 1, "stop_string"
                if self.is_end_V[self.token_ST[slot, n]] and n >= self.how.min_new_tokens:
                    return n + 1, "end"
                if said and stops and self._says(slot, row, n + 1, stops):
                    return n + 1, "stop_string"
            if n + 1 == limit:
                return limit, "length"
        return None

    def _says(self, slot: int, row: CudaTurnSequence, count: int, strings: Sequence[str], more: int = 0) -> bool:
        """Whether the turn, up to so many tokens of the completion, says one of these at its end."""
        return ends_with_stop(self.sampler.policy, self.token_ST[slot, row.begun : count], strings, more)

    def _goes_on(self, slot: int, row: CudaTurnSequence, count: int, why: StopReason) -> StopReason | None:
        """Asks the environment; where it answers, the slot goes on. Else why the completion ends."""
        if why == "stop_string" and self.how.stop and self._says(slot, row, count, self.how.stop):
            return why
        policy, prompt, ended = self.sampler.policy, self.ask.prompts[row.group], why == "end"
        row.turns.append(policy.decode(self.token_ST[slot, row.begun : count - ended]))
        reply = reply_to(prompt, self.draws, row)
        if reply is None:
            return why
        room = self.how.max_new_tokens - count
        if not room:
            return "length"
        row.turns.append(reply)
        ids = encode_reply(policy, prompt, reply, ended=ended)[:room]
        row.given.append((count, count + len(ids)))
        self._resume(slot, row, count, np.asarray(ids, np.int64))
        return None

    def _resume(self, slot: int, row: CudaTurnSequence, count: int, ids: Ints) -> None:
        """The same seat again, from its last token on: a new age, so that what is under way for it is not read. It stays as
        senior as it was, so that the oldest is never sent back and all come to an end."""
        self.age_S[slot] = self.seated = self.seated + 1
        self.launched_S[slot] = count
        self.told[slot] = np.full(self.board.limits.given, -1, np.int64)
        self.told[slot][count : count + len(ids)] = ids
        length = len(self.prompt_ids[row.group]) - 1
        last = int(self.token_ST[slot, count - 1])
        self.updates[slot] = (slot, last, length, count, self.how.max_new_tokens, self.key_of(row))
