"""The scheduler: which sequence decodes in which slot, what it has sampled, and when it ends.

    admit waiting sequences to free slots → prefill their prompts → decode a round of C tokens → read the round → …

One scheduler drives three runners: torch and C (`torch_runner`, `c_decoder`) and CUDA graphs (`cuda.runner`). They differ in
three ways, which are all that the `Runner` protocol asks about:

- **Slots.** Torch and C share a prompt between the R slots of a block, so a block is refilled when all of them are free. On
  CUDA the KV cache is paged: any free slot takes any sequence.
- **Memory.** Torch and C have room for every slot. On CUDA pages may run out: then sequences wait, and the youngest of those
  that run are preempted. A preempted sequence starts again with the same random numbers.
- **Rounds ahead.** A CUDA round is launched before the one before it is read (``rounds_ahead`` = 1), so that the device never
  waits for the host. An end is noticed a round later by the host, and tokens decoded beyond it are discarded.

A completion's tokens and log-probs are the same bits whatever else is queued: random numbers depend on the request, the sample
and the position alone, and runners compute every slot independently of the others.
"""

from __future__ import annotations

from collections import abc, deque
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from oncurve.engines.base import SampleRequest, WeightSource
from oncurve.engines.native.sequence import Sequence, ends_with_stop
from oncurve.engines.native.turns import encode_next_reply
from oncurve.errors import ModelError
from oncurve.models.policy import Policy
from oncurve.records import Completion, Floats, Ints, StopReason

TopTokens = tuple[tuple[int, float], ...]
"""The likeliest tokens at a position with their log-probs."""


class RoundResult(Protocol):
    """The tokens of a decode round, which a device may still be computing."""

    def wait(self) -> None:
        """Return when all tokens are there."""

    def read(self, slots_n: Ints, position_nC: Ints) -> tuple[Ints, Floats]:
        """Tokens [n, C] and their three log-probs [n, C, 3] of these slots at these positions."""

    def top(self, slot: int, position: int, most: int) -> TopTokens:
        """The likeliest tokens that a slot had to choose from."""


@dataclass(frozen=True, slots=True)
class DecodeRound:
    """A launched round: each slot's generation (0: free) and first position, the number of tokens, and the result."""

    generation_S: Ints
    start_S: Ints
    tokens: int
    result: RoundResult


class Runner(Protocol):
    """Prefills prompts and decodes tokens for S slots. It keeps the KV cache and the state of each slot."""

    slots: int
    max_new_tokens: int
    """The most tokens that a sequence can have."""
    context: int
    """The most tokens that a prompt and its completion can have together."""
    rounds_ahead: int
    """Rounds that are launched before the oldest is read."""

    def free_slots(self, running: abc.Sequence[Sequence | None]) -> abc.Iterable[int]:
        """The slots that can take a sequence now, in the order in which they are filled."""

    def can_admit(self, waiting: abc.Sequence[Sequence], *, idle: bool) -> bool:
        """Whether there is memory for the first of the waiting. ``idle``: nothing runs. Raises if it could never run."""

    def assign(self, slot: int, sequence: Sequence) -> None:
        """Start a sequence in a free slot."""

    def resume(self, slot: int, sequence: Sequence, position: int, last_token: int, forced: abc.Sequence[int]) -> int:
        """Continue a sequence in its slot after ``position`` tokens, with these tokens forced next.

        Returns how many of them need no decode step: the next round prefills them.
        """

    def release(self, slot: int) -> None:
        """Free a slot."""

    def release_prompt(self, group: int) -> None:
        """No more sequences of this request will come."""

    def prefill(self) -> None:
        """Compute the KV cache of prompts that were admitted since the last call: all but each prompt's last token."""

    def reserve(self, slot: int, tokens: int) -> bool:
        """Make room for a sequence of this many tokens; False if there is no memory left."""

    def no_room(self) -> ModelError:
        """The error if memory does not hold even one sequence."""

    def round_tokens(self, live: int) -> int:
        """The tokens of a round with this many live slots."""

    def decode(self, live: abc.Sequence[int], tokens: int) -> RoundResult:
        """Sample this many tokens for each live slot; a slot may go beyond its sequence's end."""

    def weights_changed(self) -> None:
        """The policy's weights have changed since the last round."""

    def begin_to_close(self) -> None:
        """Nothing more will be decoded; ``close`` follows."""

    def close(self) -> None:
        """Release the KV cache."""


class Scheduler:
    """The queue, the slots and the sampled tokens of some requests. Request number g makes the sequences of group g."""

    def __init__(
        self,
        policy: Policy,
        runner: Runner,
        requests: abc.Iterable[SampleRequest] = (),
        weight_source: WeightSource | None = None,
    ) -> None:
        self.policy, self.runner, self.weight_source = policy, runner, weight_source
        self.requests: dict[int, SampleRequest] = {}
        self.sequences: dict[int, list[Sequence]] = {}
        self.unfinished: dict[int, int] = {}
        self.waiting: deque[Sequence] = deque()
        S, T = runner.slots, runner.max_new_tokens
        self.running: list[Sequence | None] = [None] * S
        self.in_flight: deque[DecodeRound] = deque()
        self.generation_S, self.admitted_S = np.zeros(S, np.int64), np.zeros(S, np.int64)
        self.launched_S, self.limit_S, self.min_tokens_S = (np.zeros(S, np.int64) for _ in range(3))
        self.token_ST: Ints = np.zeros((S, T), np.int64)
        self.logp_ST3: Floats = np.zeros((S, T, 3), np.float32)
        self._numbers, self._generations = count(), count(1)
        # Text that is decoded in windows can be searched a round at a time, unless the tokenizer edits spaces between tokens.
        self._search_rounds = not getattr(policy.tokenizer, "clean_up_tokenization_spaces", False)
        for request in requests:
            self.submit(request)

    def submit(self, request: SampleRequest) -> int:
        """Queue a request; returns its number. Its sequences are decoded as slots become free."""
        number = next(self._numbers)
        self.requests[number], self.unfinished[number] = request, request.samples
        self.sequences[number] = [Sequence(request, number, sample) for sample in range(request.samples)]
        self.waiting.extend(self.sequences[number])
        return number

    def completions(self) -> abc.Iterator[tuple[int, tuple[Completion, ...]]]:
        """Run all requests; yields each one's number and completions once it is complete."""
        for groups in self._run():
            sequences = [sequence for group in groups for sequence in self.sequences[group]]
            texts = iter(self.policy.decode_all([sequence.text_ids for sequence in sequences]))
            for group in groups:
                yield group, tuple(sequence.to_completion(next(texts)) for sequence in self.sequences[group])

    def _run(self) -> abc.Iterator[list[int]]:
        """Decode until nothing is left; yields the groups that are complete, round by round."""
        try:
            self._admit()
            while self.in_flight or any(self.running):
                self._take_new_weights()
                complete = self._advance()
                if not self.waiting and not any(self.running):
                    self.runner.begin_to_close()  # while the last texts are decoded
                if complete:
                    yield complete
                self._admit()
        finally:
            self.runner.close()

    def _take_new_weights(self) -> None:
        """Running sequences continue with them; their KV cache stays as the former weights computed it."""
        if self.weight_source is None:
            return
        if self.weight_source():
            self.runner.weights_changed()
        for slot, sequence in enumerate(self.running):
            if sequence is not None and self.weight_source.version not in sequence.versions.values():
                sequence.versions[int(self.launched_S[slot])] = self.weight_source.version

    # Slots.

    def _admit(self) -> None:
        """Fill free slots from the queue, as far as there is memory, and prefill the prompts."""
        if not self.waiting:
            return
        for slot in self.runner.free_slots(self.running):
            if not self.waiting or not self.runner.can_admit(self.waiting, idle=not any(self.running)):
                break
            self._assign_slot(slot, self.waiting.popleft())
        self.runner.prefill()

    def _assign_slot(self, slot: int, sequence: Sequence) -> None:
        sampling = sequence.request.sampling
        self.running[slot], self.launched_S[slot] = sequence, 0
        self.limit_S[slot], self.min_tokens_S[slot] = sampling.max_new_tokens, sampling.min_new_tokens
        self.generation_S[slot] = self.admitted_S[slot] = next(self._generations)
        self.runner.assign(slot, sequence)

    def _release_slot(self, slot: int) -> None:
        self.running[slot], self.generation_S[slot] = None, 0
        self.runner.release(slot)

    def _reserve(self, live: list[int], tokens: int) -> list[int]:
        """Memory for the next round, the oldest sequences first; if it runs out, the youngest are preempted."""
        for slot in sorted(live, key=lambda s: self.admitted_S[s]):
            needed = min(int(self.launched_S[slot]) + tokens, int(self.limit_S[slot]))
            while self.running[slot] is not None and not self.runner.reserve(slot, needed):
                self._preempt(max((s for s in live if self.running[s] is not None), key=lambda s: self.admitted_S[s]))
        return [s for s in live if self.running[s] is not None]

    def _preempt(self, slot: int) -> None:
        """Put a sequence back at the head of the queue."""
        sequence = self.running[slot]
        assert sequence is not None
        self._release_slot(slot)
        sequence.restart()
        self.waiting.appendleft(sequence)
        if not any(self.running):
            raise self.runner.no_room()

    # Rounds.

    def _advance(self) -> list[int]:
        """Launch a round, and read the oldest once enough are in flight; returns the groups that are complete."""
        launched = self._launch()
        if launched is not None:
            self.in_flight.append(launched)
        if self.in_flight and (launched is None or len(self.in_flight) > self.runner.rounds_ahead):
            return self._read_round(self.in_flight.popleft())
        return []

    def _launch(self) -> DecodeRound | None:
        live = [s for s, sequence in enumerate(self.running) if sequence is not None and self.launched_S[s] < self.limit_S[s]]
        if not live:
            return None
        tokens = min(self.runner.round_tokens(len(live)), int((self.limit_S - self.launched_S)[live].max()))
        live = self._reserve(live, tokens)
        result = self.runner.decode(live, tokens)
        start_S = self.launched_S.copy()
        self.launched_S[live] += tokens
        return DecodeRound(self.generation_S.copy(), start_S, tokens, result)

    def _read_round(self, done: DecodeRound) -> list[int]:
        """Append a round's tokens to their sequences; returns the groups that are complete now."""
        done.result.wait()
        slots_n = np.flatnonzero((done.generation_S > 0) & (done.generation_S == self.generation_S))
        if not len(slots_n):  # all of them have ended since, or were preempted
            return []
        position_nC = done.start_S[slots_n, None] + np.arange(done.tokens)
        token_nC, logp_nC3 = done.result.read(slots_n, position_nC)
        within_nC = position_nC < self.limit_S[slots_n, None]
        n, c = np.nonzero(within_nC)
        self.token_ST[slots_n[n], position_nC[n, c]] = token_nC[n, c]
        self.logp_ST3[slots_n[n], position_nC[n, c]] = logp_nC3[n, c]
        ends_nC = np.isin(token_nC, self.policy.eos_ids) & (position_nC >= self.min_tokens_S[slots_n, None]) & within_nC
        last_nC = ends_nC | (position_nC == self.limit_S[slots_n, None] - 1)
        last_n = np.where(last_nC.any(1), last_nC.argmax(1), -1).tolist()
        complete = []
        for i, slot in enumerate(slots_n.tolist()):
            sequence, start, last = self.running[slot], int(done.start_S[slot]), last_n[i]
            assert sequence is not None
            end, stop = start + done.tokens, None
            if _needs_search(sequence.request):
                end, stop = self._search(slot, sequence, start, min(end, int(self.limit_S[slot])))
            elif last >= 0:
                end, stop = start + last + 1, "end" if ends_nC[i, last] else "length"
            if stop in ("end", "stop_string") and sequence.request.prompt.environment is not None:
                stop = self._next_turn(slot, sequence, end, stop)
            self._stream(slot, sequence, start, end, stop, done.result)
            if stop is not None and self._finish(slot, sequence, end, stop):
                complete.append(sequence.group)
        return complete

    def _stream(
        self, slot: int, sequence: Sequence, start: int, end: int, stop: StopReason | None, result: RoundResult
    ) -> None:
        """For sessions: tokens [start, end) of a sequence are final."""

    def _search(self, slot: int, sequence: Sequence, start: int, end: int) -> tuple[int, StopReason | None]:
        """After which of the tokens [start, end) the turn ends, and why. Forced tokens end nothing but a full sequence."""
        calls, stops = sequence.request.prompt.calls, sequence.request.sampling.stop
        first, token_T = sequence.turn_start, self.token_ST[slot]

        def has(strings: tuple[str, ...], upto: int, more: int = 0) -> bool:
            return bool(strings) and ends_with_stop(self.policy, token_T[first:upto], strings, more)

        possible = not self._search_rounds or has(calls + stops, end, end - start)
        for position in range(max(start, first), end):
            if possible and has(calls, position + 1):
                return position + 1, "stop_string"
            if token_T[position] in self.policy.eos_ids and position >= self.min_tokens_S[slot]:
                return position + 1, "end"
            if possible and has(stops, position + 1):
                return position + 1, "stop_string"
        return end, "length" if end == self.limit_S[slot] else None

    def _next_turn(self, slot: int, sequence: Sequence, end: int, stop: StopReason) -> StopReason | None:
        """Ask the environment. If it replies, the slot resumes at the turn's last token; if not, returns why the sequence ends.

        A resumed slot has a new generation, so that tokens in flight are discarded. It keeps its order of admission, so that
        the oldest sequence is never preempted and every sequence ends.
        """
        turn_ids, stops = self.token_ST[slot, sequence.turn_start : end], sequence.request.sampling.stop
        if stop == "stop_string" and stops and ends_with_stop(self.policy, turn_ids, stops):
            return stop
        room = int(self.limit_S[slot]) - end
        reply = encode_next_reply(self.policy, sequence, turn_ids, stop, room)
        if reply is None:
            return stop
        if not room:
            return "length"
        sequence.forced.append((end, end + len(reply)))
        prefilled = self.runner.resume(slot, sequence, end, int(turn_ids[-1]), reply)
        self.token_ST[slot, end : end + prefilled] = reply[:prefilled]
        self.generation_S[slot], self.launched_S[slot] = next(self._generations), end + prefilled
        return None

    def _finish(self, slot: int, sequence: Sequence, end: int, stop: StopReason) -> bool:
        """End a sequence; returns whether its group is complete."""
        sequence.token_ids, sequence.logps = self.token_ST[slot, :end].copy(), self.logp_ST3[slot, :end].copy()
        sequence.stop = stop
        for first, last in sequence.forced:
            sequence.logps[first:last] = 0.0
        self._release_slot(slot)
        self.unfinished[sequence.group] -= 1
        if self.unfinished[sequence.group]:
            return False
        self._end_group(sequence.group)
        return True

    def _end_group(self, group: int) -> None:
        self.runner.release_prompt(group)


def _needs_search(request: SampleRequest) -> bool:
    """Whether the end of a turn has to be looked for in the text, or after an environment's reply."""
    return bool(request.sampling.stop) or request.prompt.environment is not None
