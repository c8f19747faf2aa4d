"""A conversation of one model with its environment, sampled turn by turn outside a group: what `chat` and `serve` run.

The caller samples the tokens of a turn and passes them to `answer`; `add` returns the tokens of the tools' results. As in
training, what the model wrote is never encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from oncurve.engines.base import SampleKey
from oncurve.engines.native.sequence import ends_with_stop
from oncurve.engines.native.turns import begin_episode, with_observation
from oncurve.models.chat_template import encode_reply
from oncurve.models.policy import Policy
from oncurve.records import Observation, Prompt, StopReason, Turn


class InteractiveEpisode:
    """One conversation. ``token_ids`` is all that the model reads before its next turn."""

    def __init__(self, policy: Policy, prompt: Prompt, seed: int, sample: int = 0) -> None:
        self.policy, self.prompt = policy, prompt
        self.token_ids: list[int] = []
        self._episode = begin_episode(policy, prompt, SampleKey(seed, 0), sample)
        self._turn, self._has_ended = 0, False

    def start(self) -> Future[str | None] | None:
        """Begin; `open` gets the result. None: there is nothing to wait for."""
        return self._episode.start()

    def open(self, text: str | None) -> None:
        """The environment has begun, with ``text`` for the end of the prompt."""
        self.token_ids = self.policy.encode(with_observation(self.prompt, [text])).tolist()

    def ask(self, text: str) -> None:
        """The user's next message, after the model's last turn."""
        if not self._has_ended:
            self.token_ids.append(self.policy.eos_ids[0])
        self.token_ids += encode_reply(self.policy, self.prompt, text, ended=True)
        self._turn = 0

    def answer(self, turn_ids: Sequence[int], stop: StopReason) -> Future[Observation]:
        """The environment's answer to the turn that the model has sampled; `add` gets the result."""
        ids, calls = np.asarray(turn_ids, np.int64), self.prompt.calls
        text = self.policy.decode(ids[: len(ids) - (stop == "end")])
        is_call = stop == "stop_string" and bool(calls) and ends_with_stop(self.policy, ids, calls)
        is_last = stop == "length" or (stop == "stop_string" and not is_call)
        turn = Turn(self._turn, ids, text, is_last, np.asarray(self.token_ids, np.int64))
        self.token_ids += turn_ids
        self._has_ended = stop == "end"
        answer = self._episode.answer(turn)
        assert answer is not None, "only a replayed episode has no answer"
        self._turn += 1
        return answer

    def add(self, observation: Observation) -> list[int] | None:
        """Adds the tokens of the environment's reply and returns them; None if the model has had its last turn."""
        if observation.reply is None:
            return None
        reply_ids = encode_reply(self.policy, self.prompt, observation.reply, ended=self._has_ended)
        self.token_ids += reply_ids
        return reply_ids

    def close(self) -> None:
        """The conversation is over."""
        self._episode.close()
