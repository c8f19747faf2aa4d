"""The batch that decodes by one compiled function (compiled.py): the same queue, blocks and random numbers as the plain one."""

from __future__ import annotations

from typing import Any

import numpy as np

from oncurve.engines.native.c_decoder import CDecoder, SlotState
from oncurve.engines.native.engine import BlockRequest, Row, Scheduler
from oncurve.engines.native.sequence import ends_with_stop
from oncurve.records import Bools, Floats, Ints


class CScheduler(Scheduler):
    """Rows are looked at together: what was drawn is kept by slot and handed to a row when it has ended."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        slots, limit = self.pool.slots, self.how.max_new_tokens
        self.written_S = np.zeros(slots, np.int64)
        self.tokens_ST = np.zeros((slots, limit), np.int64)
        self.logps_ST = np.zeros((slots, limit, 3), np.float32)
        state = SlotState(self.token_S, self.prompt_length_S, self.suffix_length_S, self.uniform_ST)
        self.decoder = CDecoder(self.policy, self.pool, self.how, state)

    def _assign_slot(self, block: int, job: BlockRequest) -> None:
        super()._assign_slot(block, job)
        self.written_S[block * self.pool.rows : (block + 1) * self.pool.rows] = 0

    def _prefill_all(self, seats: list[tuple[int, int]]) -> None:
        self.decoder.prefill(seats, self.prompt_ids)

    def _weights_changed(self) -> None:
        self.decoder.pack_weights()

    def _written(self, slot: int, row: Row) -> int:
        return int(self.written_S[slot])

    def _decode_round(self, steps: int) -> list[Row]:
        slots = np.flatnonzero([row is not None for row in self.row_in])
        tokens_CS, logps_CS = self.decoder.decode(slots, steps)
        before_S = self.written_S
        ends_S = self._keep(tokens_CS.T, logps_CS.transpose(1, 0, 2))
        ended = []
        for slot in slots.tolist():
            row = self.row_in[slot]
            assert row is not None
            row.stop = "end" if ends_S[slot] else "length" if self.written_S[slot] == self.how.max_new_tokens else None
            if self.how.stop:
                self._look_for_stop_string(slot, row, int(before_S[slot]))
            if row.stop is not None:
                count = self.written_S[slot]
                row.token_ids, row.logps = self.tokens_ST[slot, :count].tolist(), self.logps_ST[slot, :count].tolist()
                self.row_in[slot] = None
                ended.append(row)
        self._free_blocks()
        return ended

    def _keep(self, tokens_SC: Ints, logps_SC: Floats) -> Bools:
        """Puts what was drawn behind what each slot has; which slots drew an end token past their minimum."""
        count, limit = tokens_SC.shape[1], self.how.max_new_tokens
        place_SC = self.written_S[:, None] + np.arange(count)
        slot, column = np.nonzero(place_SC < limit)
        self.tokens_ST[slot, place_SC[slot, column]] = tokens_SC[slot, column]
        self.logps_ST[slot, place_SC[slot, column]] = logps_SC[slot, column]
        end_SC = np.isin(tokens_SC, self.policy.eos_ids) & (place_SC >= self.how.min_new_tokens) & (place_SC < limit)
        ends_S = np.asarray(end_SC.any(axis=1))
        self.written_S = np.where(ends_S, self.written_S + end_SC.argmax(1) + 1, np.minimum(self.written_S + count, limit))
        return ends_S

    def _look_for_stop_string(self, slot: int, row: Row, before: int) -> None:
        """Cuts the slot's text where it first holds a stop string; an end token's own text is not looked at."""
        for count in range(before + 1, int(self.written_S[slot]) + (row.stop != "end")):
            if ends_with_stop(self.policy, self.tokens_ST[slot, :count], self.how.stop):
                row.stop, self.written_S[slot] = "stop_string", count
                return
