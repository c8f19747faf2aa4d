"""One call of `VllmEngine.sample`: what is asked of vLLM, and what becomes of its answers.

A turn is a request of its own: where an environment answers back, what it says goes into the context of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import completion_of
from oncurve.engines.native.turns import TurnSequence, reply_to
from oncurve.engines.vllm.messages import Answer, Logprobs, Request
from oncurve.models.chat_template import encode_reply
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Group, Ints, Prompt
from oncurve.rng import sampling_key

UNREPORTED = float("nan")
"""A log-prob that vLLM does not tell."""


class PendingRequests:
    """One call of ``sample``: which completions are still to be written, and the groups that are whole."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        prompt_ids: Sequence[Ints],
        group_size: int,
        how: Sampling,
        draws: SampleKey,
        on_group: Callable[[int, Group], None] | None,
        version: int | None,
    ) -> None:
        self.policy, self.prompts, self.prompt_ids = policy, prompts, prompt_ids
        self.how, self.draws, self.on_group, self.version = how, draws, on_group, version
        self.written = {g: [TurnSequence(g, s) for s in range(group_size)] for g in range(len(prompts))}
        self.rows = {f"{g}/{s}": row for g, rows in self.written.items() for s, row in enumerate(rows)}
        self.left = dict.fromkeys(self.written, group_size)
        self.groups: dict[int, Group] = {}

    def requests(self) -> tuple[Request, ...]:
        """All that is missing. A turn that was begun by a process that is lost is written again from its start."""
        for row in self.rows.values():
            row.versions = {at: version for at, version in row.versions.items() if at < len(row.token_ids)}
        return tuple(self._request(key, row) for key, row in self.rows.items())

    def _request(self, key: str, row: TurnSequence) -> Request:
        """The row's next turn, from its prompt and all that has been said."""
        prompt, at = self.prompts[row.group], len(row.token_ids)
        self._note_version(row, at)
        return Request(
            key=key,
            token_ids=(*self.prompt_ids[row.group].tolist(), *row.token_ids),
            how=self.how,
            seed=seed_of(self.draws, prompt.id, row.sample, at) if self.how.temperature > 0 else None,
            most=self.how.max_new_tokens - at,
            least=max(0, self.how.min_new_tokens - at),
            stop=(*prompt.calls, *self.how.stop),
            end_ids=self.policy.eos_ids,
            counted=self.version is not None,
        )

    def go_on_from(self, written: Mapping[str, int]) -> None:
        """Weights have changed: what is on its way goes on with the present version, from so many tokens of its turn on."""
        for key, count in written.items():
            self._note_version(self.rows[key], len(self.rows[key].token_ids) + count)

    def _note_version(self, row: TurnSequence, at: int) -> None:
        if self.version is not None and self.version not in row.versions.values():
            row.versions[at] = self.version

    def take(self, answer: Answer) -> Request | None:
        """Writes an answer down; the row's next turn, where an environment answers back."""
        row = self.rows.pop(answer.key)
        row.token_ids += answer.token_ids
        row.logps += [_three(logp, self.how) for logp in answer.logps]
        row.wrote += [True] * len(answer.token_ids)
        row.stop = answer.stop
        if answer.stop != "length" and self._goes_on(row):
            self.rows[answer.key] = row
            return self._request(answer.key, row)
        self._ended(row)
        return None

    def _goes_on(self, row: TurnSequence) -> bool:
        """Asks the environment; where it answers, the answer is what the policy gets to read next."""
        prompt, ended = self.prompts[row.group], row.stop == "end"
        said = self.policy.decode(np.asarray(row.token_ids[row.begun : len(row.token_ids) - ended], np.int64))
        if prompt.environment is None or (row.stop == "stop_string" and any(s in said for s in self.how.stop)):
            return False
        row.turns.append(said)
        reply = reply_to(prompt, self.draws, row)
        if reply is None:
            return False
        row.turns.append(reply)
        room = self.how.max_new_tokens - len(row.token_ids)
        ids = encode_reply(self.policy, prompt, reply, ended=ended)[:room]
        row.token_ids += ids
        row.logps += [(0.0, 0.0, 0.0)] * len(ids)
        row.wrote += [False] * len(ids)
        row.begun = len(row.token_ids)
        row.stop = "length" if room == len(ids) else None
        return row.stop is None

    def _ended(self, row: TurnSequence) -> None:
        g = row.group
        self.left[g] -= 1
        if self.left[g]:
            return
        completions = tuple(completion_of(one, self.policy.decode(one.text_ids)) for one in self.written[g])
        self.groups[g] = Group(self.prompts[g], self.prompt_ids[g], completions)
        if self.on_group is not None:
            self.on_group(g, self.groups[g])


def seed_of(draws: SampleKey, prompt_id: str, sample: int, at: int = 0) -> int:
    """vLLM's seed for one completion, or for the turn of it that begins at token ``at``: 63 bits, as torch takes them."""
    return sampling_key(draws.seed, draws.step, f"{prompt_id}@{at}" if at else prompt_id, sample) >> 1


def truncated_logps(how: Sampling) -> bool:
    """Beside top_k, top_p and min_p, vLLM counts an end token that may not be drawn yet."""
    return how.truncates or how.min_new_tokens > 0


def logprobs_for(how: Sampling) -> Logprobs | None:
    """Which of vLLM's log-probs is that of the scaled, untruncated distribution; None: either."""
    if how.temperature == 0:
        return None
    return "raw_logprobs" if how.temperature == 1 else "processed_logprobs"


def _three(logp: float, how: Sampling) -> tuple[float, float, float]:
    """(scaled, as drawn from, at temperature 1) from the one that vLLM tells."""
    if how.temperature == 0:
        return logp, 0.0, logp
    if how.temperature == 1:
        return logp, UNREPORTED if truncated_logps(how) else logp, logp
    return logp, logp, UNREPORTED
