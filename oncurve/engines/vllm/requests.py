"""One call of `VllmEngine.sample`: the requests that go to vLLM, and the groups that its answers form.

Each turn is a separate vLLM request: if an environment replies, the reply is in the context of the next.
"""

from __future__ import annotations

from collections import abc

from oncurve.engines.base import ReplyStore, SampleKey, SampleRequest
from oncurve.engines.native.sequence import Sequence
from oncurve.engines.native.turns import ask, end_episode, following_tokens, record_answer, restart_episode
from oncurve.engines.vllm.messages import Answer, Logprobs, TurnRequest
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Group, StopReason
from oncurve.rng import sampling_key

UNREPORTED = float("nan")
"""A log-prob that vLLM does not report."""


class PendingRequests:
    """The sequences that are not complete, by the key of their vLLM request, and the groups that are.

    ``version`` is that of the weights that vLLM has now; None if versions are not recorded.
    """

    def __init__(
        self,
        policy: Policy,
        requests: abc.Sequence[SampleRequest],
        on_group: abc.Callable[[int, Group], None] | None,
        version: int | None,
        replies: ReplyStore | None = None,
    ) -> None:
        self.policy, self.requests, self.on_group, self.version, self.replies = policy, requests, on_group, version, replies
        self.sequences = {
            g: [Sequence(request, g, request.key.first + s) for s in range(request.samples)]
            for g, request in enumerate(requests)
        }
        self.pending = {f"{g}/{s.sample}": s for g, sequences in self.sequences.items() for s in sequences}
        self.unfinished = {g: request.samples for g, request in enumerate(requests)}
        self.groups: dict[int, Group] = {}

    def turn_requests(self) -> tuple[TurnRequest, ...]:
        """Requests for all that is pending. A turn that a lost process had begun is sampled again from its start."""
        for sequence in self.pending.values():
            sequence.versions = {at: version for at, version in sequence.versions.items() if at < len(sequence.token_ids)}
        return tuple(self._turn_request(key, sequence) for key, sequence in self.pending.items())

    def _turn_request(self, key: str, sequence: Sequence) -> TurnRequest:
        """A sequence's next turn, after its prompt and all turns so far."""
        request, position = sequence.request, len(sequence.token_ids)
        sampling = request.sampling
        self._note_version(sequence, position)
        return TurnRequest(
            key=key,
            token_ids=(*request.prompt_ids.tolist(), *sequence.token_ids.tolist()),
            sampling=sampling,
            seed=seed_of(request.key, request.prompt.id, sequence.sample, position) if sampling.temperature > 0 else None,
            max_tokens=sampling.max_new_tokens - position,
            min_tokens=max(0, sampling.min_new_tokens - position),
            stop=(*request.prompt.calls, *sampling.stop),
            eos_ids=self.policy.eos_ids,
            counts_tokens=self.version is not None,
        )

    def mark_version(self, written: abc.Mapping[str, int]) -> None:
        """The weights have changed: from these token counts of their turns on, sequences have the current version."""
        for key, count in written.items():
            self._note_version(self.pending[key], len(self.pending[key].token_ids) + count)

    def _note_version(self, sequence: Sequence, position: int) -> None:
        if self.version is not None and self.version not in sequence.versions.values():
            sequence.versions[position] = self.version

    def take(self, answer: Answer) -> TurnRequest | None:
        """Add an answer to its sequence; returns the request for its next turn if an environment replies."""
        sequence = self.pending.pop(answer.key)
        sampling = sequence.request.sampling
        sequence.extend(answer.token_ids, [_three_logps(logp, sampling) for logp in answer.logps])
        sequence.stop = answer.stop
        following = None
        if sequence.episode is not None and answer.token_ids:
            following = self._next_turn(sequence, answer.stop)
        if following is not None:
            self.pending[answer.key] = following
            return self._turn_request(answer.key, following)
        self._finish(sequence)
        return None

    def _next_turn(self, sequence: Sequence, stop: StopReason) -> Sequence | None:
        """Wait for the environment's answer. If it replies and there is room for more, the policy has another turn, in this
        sequence or in a new one."""
        request = sequence.request
        turn_ids = sequence.token_ids[sequence.turn_start :]
        is_stopped = stop == "stop_string" and any(s in self.policy.decode(turn_ids) for s in request.sampling.stop)
        is_last = is_stopped or stop == "length"
        answer = ask(self.policy, sequence, sequence.token_ids, stop, is_last=is_last)
        if answer is None:  # vLLM's rounding depends on its batch: this turn is not the one that was recorded
            return self._restart(sequence.first)
        record_answer(self.replies, sequence, answer.result())
        reply = answer.result().reply
        if reply is None:
            return None
        reply_ids, context_ids = following_tokens(self.policy, sequence, sequence.token_ids, reply, ended=stop == "end")
        if context_ids is not None:
            room = sequence.room_after(context_ids)
            if room < 1:
                sequence.stop = "length"
                return None
            following = sequence.follow(sequence.group, context_ids, room)
            self.sequences[sequence.group][sequence.sample - request.key.first] = following
            return following
        room = request.sampling.max_new_tokens - len(sequence.token_ids)
        sequence.force(reply_ids[:room])
        sequence.stop = "length" if len(sequence.token_ids) == request.sampling.max_new_tokens else None
        return sequence if sequence.stop is None else None

    def _restart(self, sequence: Sequence) -> Sequence:
        """Begin a completion and its conversation again, with a new instance of the environment."""
        restart_episode(self.policy, sequence, self.replies)
        sequence.token_ids, sequence.logps, sequence.stop = sequence.token_ids[:0], sequence.logps[:0], None
        self.sequences[sequence.group][sequence.sample - sequence.request.key.first] = sequence
        return sequence

    def _finish(self, sequence: Sequence) -> None:
        outcome = None if sequence.episode is None else sequence.episode.finish()
        if outcome is not None:
            end_episode(self.replies, sequence, outcome.result())
        g = sequence.group
        self.unfinished[g] -= 1
        if self.unfinished[g]:
            return
        completions = tuple(s.to_completion(self.policy.decode(s.text_ids)) for s in self.sequences[g])
        self.groups[g] = Group(self.requests[g].prompt, self.requests[g].prompt_ids, completions)
        if self.on_group is not None:
            self.on_group(g, self.groups[g])


def seed_of(key: SampleKey, prompt_id: str, sample: int, position: int = 0) -> int:
    """vLLM's seed for a completion, or for its turn that begins at this position: 63 bits, as torch takes them."""
    return sampling_key(key.seed, key.step, f"{prompt_id}@{position}" if position else prompt_id, sample) >> 1


def has_truncated_logps(sampling: Sampling) -> bool:
    """Whether vLLM's processed log-probs are of a truncated distribution: by top_k, top_p and min_p, or because it bans end
    tokens before the minimum length."""
    return sampling.truncates or sampling.min_new_tokens > 0


def logprobs_for(sampling: Sampling) -> Logprobs | None:
    """Which of vLLM's log-probs are those of the scaled, untruncated distribution; None: either."""
    if sampling.temperature == 0:
        return None
    return "raw_logprobs" if sampling.temperature == 1 else "processed_logprobs"


def _three_logps(logp: float, sampling: Sampling) -> tuple[float, float, float]:
    """(at the sampling temperature, as sampled, at temperature 1) from the one log-prob that vLLM reports."""
    if sampling.temperature == 0:
        return logp, 0.0, logp
    if sampling.temperature == 1:
        return logp, UNREPORTED if has_truncated_logps(sampling) else logp, logp
    return logp, logp, UNREPORTED
