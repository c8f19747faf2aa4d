"""Completions in several turns: an environment answers back, and sampling goes on in the same slot.

When a turn is over, the slot goes back to its last token: what was decoded beyond it is forgotten. The environment's tokens
are then fed in one by one, each in a decode step like all others, in place of the token that was drawn; they are in the
context, their log-probs count as 0, and ``loss_mask`` is False on them. Random numbers belong to positions, so how often turns
are looked for changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import BlockRequest, Logps, Row, Scheduler, Tokens
from oncurve.engines.native.sequence import ends_with_stop
from oncurve.engines.token_sampling import SampledTokens
from oncurve.errors import DataError
from oncurve.models.chat_template import encode_reply
from oncurve.records import Bools, Prompt, StopReason
from oncurve.rng import philox_generator

_NOT_GIVEN = -1
_NO_LOGPS = (0.0, 0.0, 0.0)


@dataclass
class TurnSequence(Row):
    """A completion with its turns. The present one began at token ``begun``, after what the environment said."""

    turns: list[str] = field(default_factory=list)
    begun: int = 0
    wrote: list[bool] = field(default_factory=list)

    @property
    def loss_mask(self) -> Bools:
        return np.asarray(self.wrote, bool)


class TurnScheduler(Scheduler):
    """A batch in which some prompts have an environment."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.rows = {g: [TurnSequence(g, row.sample) for row in rows] for g, rows in self.rows.items()}
        self.given_ST = torch.full(self.uniform_ST.shape, _NOT_GIVEN, dtype=torch.long, device=self.policy.device)

    def _assign_slot(self, block: int, job: BlockRequest) -> None:
        super()._assign_slot(block, job)
        self.given_ST[block * self.pool.rows : (block + 1) * self.pool.rows] = _NOT_GIVEN

    def _decode(self) -> SampledTokens:
        given_S = self.given_ST[self.slot_S, self.suffix_length_S]
        drawn = super()._decode()
        self.token_S = torch.where(given_S == _NOT_GIVEN, drawn.token_S, given_S)
        return replace(drawn, token_S=self.token_S)

    def _append(self, slot: int, row: Row, token_CS: Tokens, logp_CS: Logps) -> bool:
        assert isinstance(row, TurnSequence)
        for token_S, logp_S in zip(token_CS, logp_CS, strict=True):
            given = len(row.token_ids) < row.begun
            row.token_ids.append(token_S[slot])
            row.logps.append(_NO_LOGPS if given else logp_S[slot])
            row.wrote.append(not given)
            row.stop = self._cut(row) if given else self._stop_reason(row)
            if row.stop is not None:  # what was decoded beyond this turn is forgotten
                return row.stop == "length" or not self._goes_on(slot, row, row.stop)
        return False

    def _cut(self, row: Row) -> StopReason | None:
        return "length" if len(row.token_ids) == self.how_of(row.group).max_new_tokens else None

    def _stop_reason(self, row: Row) -> StopReason | None:
        """Why the policy's turn is over."""
        assert isinstance(row, TurnSequence)
        calls = self.prompts[row.group].calls
        if calls and self._says(row, calls):
            return "stop_string"
        return super()._stop_reason(row)

    def _says(self, row: Row, strings: Sequence[str]) -> bool:
        """In this turn."""
        assert isinstance(row, TurnSequence)
        return ends_with_stop(self.policy, row.token_ids[row.begun :], strings)

    def _goes_on(self, slot: int, row: TurnSequence, why: StopReason) -> bool:
        """Asks the environment; where it answers, the answer is what the slot gets to read next."""
        how, ended = self.how_of(row.group), why == "end"
        if why == "stop_string" and how.stop and self._says(row, how.stop):
            return False
        said = row.token_ids[row.begun : len(row.token_ids) - ended]
        row.turns.append(self.policy.decode(np.asarray(said, np.int64)))
        reply = reply_to(self.prompts[row.group], self.draws_of(row.group), row)
        if reply is None:
            return False
        at, room = len(row.token_ids), how.max_new_tokens - len(row.token_ids)
        row.stop = None if room else "length"
        if not room:
            return False
        row.turns.append(reply)
        ids = encode_reply(self.policy, self.prompts[row.group], reply, ended=ended)[:room]
        self.given_ST[slot, at : at + len(ids)] = torch.tensor(ids, dtype=torch.long, device=self.given_ST.device)
        self.token_S[slot], self.suffix_length_S[slot] = row.token_ids[-1], at
        row.begun = at + len(ids)
        return True


class TurnState(Protocol):
    """What an environment is told of a completion: which it is, and the turns so far."""

    sample: int
    turns: list[str]


def reply_to(prompt: Prompt, draws: SampleKey, row: TurnState) -> str | None:
    """What the prompt's environment says to the turns so far; None where there is none, or nothing to say."""
    if prompt.environment is None:
        return None
    dice = philox_generator(draws.seed, f"environment/{draws.step}/{prompt.id}/{row.sample}", len(row.turns))
    try:
        return prompt.environment.reply(prompt, tuple(row.turns), dice)
    except Exception as error:  # an environment may be anyone's code
        raise DataError(
            prompt.id,
            f"its environment failed: {type(error).__name__}: {error}",
            because="without an answer the completion can't go on",
            fix="mend the environment; one that has nothing to say returns None",
        ) from error
