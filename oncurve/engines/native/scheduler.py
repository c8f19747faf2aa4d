"""The scheduler: which sequence decodes in which slot, what it has sampled, and when it ends.

    admit waiting sequences to free slots → prefill their prompts → decode a round of C tokens → read the round → …

One scheduler drives all runners: torch and C (`torch_runner`, `general_runner`, `c_decoder`) and CUDA graphs (`cuda.runner`).
They differ in four ways:

- **Slots.** Torch and C share a prompt between the R slots of a block, so a block is refilled when all of them are free. On
  CUDA the KV cache is paged: any free slot takes any sequence.
- **Memory.** Torch and C have room for every slot. On CUDA pages may run out: then sequences wait, and the youngest of those
  that run are preempted. A preempted sequence starts again with the same random numbers.
- **Drafts.** If a runner's ``width`` is above 1, a step samples one token or more: how many is known when the round is read.
- **Rounds ahead.** A CUDA round is launched before the one before it is read (``rounds_ahead`` = 1), so that the device never
  waits for the host. An end is noticed a round later by the host, and tokens decoded beyond it are discarded.

A turn of the policy that ends parks its slot until the environment has answered: the slot keeps its memory and is not decoded,
while the others are.

A completion's tokens and log-probs are the same bits whatever else is queued: random numbers depend on the request, the sample
and the position alone, and runners compute every slot independently of the others.
"""

from __future__ import annotations

import threading
from collections import abc, deque
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, count
from typing import Protocol

import numpy as np

from oncurve.engines.base import BegunCompletion, PassCounts, ReplyStore, SampleRequest, WeightSource
from oncurve.engines.native.sequence import Sequence, ends_with_stop
from oncurve.engines.native.turns import ask, end_episode, following_tokens, record_answer, restart_episode
from oncurve.errors import ModelError
from oncurve.models.policy import Policy
from oncurve.records import Completion, Floats, Ints, Observation, Outcome, Routing, StopReason

TopTokens = tuple[tuple[int, float], ...]
"""The likeliest tokens at a position with their log-probs."""


class RoundResult(Protocol):
    """The tokens of a decode round, which a device may still be computing."""

    def wait(self) -> None:
        """Return when all tokens are there."""

    def read(self, slots_n: Ints, start_n: Ints) -> tuple[Ints, Floats, Ints]:
        """The tokens of these slots [n, C], three log-probs of each token (as `Sequence.logps`) [n, C, 3], and how many tokens
        each slot has. ``start_n``: the slots' positions when the round began."""

    def top(self, slot: int, position: int, most: int) -> TopTokens:
        """The likeliest tokens that a slot had to choose from."""

    def routing(self, slots_n: Ints, start_n: Ints) -> Routing | None:
        """The experts of the passes that sampled what ``read`` returns, [n, C, E]; None if they are not recorded."""

    def reply_routing(self) -> abc.Iterable[tuple[int, int, Routing]]:
        """For each reply that was prefilled before the round: its slot, its first position, and the experts from that position
        on."""


@dataclass(frozen=True, slots=True)
class DecodeRound:
    """A launched round: each slot's generation (0: free, parked or prefilling), the number of steps, and the result. A step
    samples a token for each slot, or more if drafts are accepted."""

    generation_S: Ints
    steps: int
    result: RoundResult


@dataclass(frozen=True, slots=True)
class ParkedTurn:
    """The turn of a parked slot: it ended after ``end`` tokens of the sequence, because of ``stop``."""

    end: int
    stop: StopReason
    answer: Future[Observation]


class Runner(Protocol):
    """Prefills prompts and decodes tokens for S slots. It keeps the KV cache and the state of each slot."""

    slots: int
    max_new_tokens: int
    """The most tokens that a sequence can have."""
    context: int
    """The most tokens that a prompt and its completion can have together."""
    rounds_ahead: int
    """Rounds that are launched before the oldest is read."""
    width: int
    """The most tokens that a step samples for each slot: above 1 if the number is not known before the round is read."""
    can_constrain: bool
    """Whether it asks each sequence's constraint which tokens may come next."""

    @property
    def prefilling(self) -> abc.Collection[int]:
        """Slots whose prompt is not complete yet: they are not decoded."""

    @property
    def counts(self) -> PassCounts:
        """Of all passes so far; 0 if the runner does not count them."""

    def free_slots(self, running: abc.Sequence[Sequence | None], waiting: abc.Sequence[Sequence]) -> abc.Iterable[int]:
        """The slots that can take a sequence now. Each is meant for the sequence that is first in the queue at that time."""

    def can_admit(self, waiting: abc.Sequence[Sequence], *, idle: bool) -> bool:
        """Whether there is memory for the first waiting sequence. ``idle``: none is running. Raises if it can never fit."""

    def assign(self, slot: int, sequence: Sequence) -> None:
        """Start a sequence in a free slot."""

    def park(self, slot: int) -> None:
        """Decode no more tokens in a slot until it is resumed or released; what it has stored stays as it is."""

    def resume(self, slot: int, sequence: Sequence, position: int, last_token: int, forced: abc.Sequence[int]) -> int:
        """Continue a parked sequence in its slot after ``position`` tokens, with these tokens forced next.

        Returns how many of them need no decode step: the next round prefills them.
        """

    def prompt_routing(self, group: int) -> Routing | None:
        """The experts of a request's prompt, all but its last token; None if they are not recorded."""

    def release(self, slot: int) -> None:
        """Free a slot."""

    def release_prompt(self, group: int) -> None:
        """No more sequences of this request will come."""

    def prefill(self) -> None:
        """Compute the KV cache of prompts that were admitted: all but each prompt's last token. A runner may do a part of it,
        and the rest at the next calls."""

    def reserve(self, slot: int, tokens: int) -> bool:
        """Make room for a sequence of this many tokens; False if there is no memory left."""

    def no_room(self) -> ModelError:
        """The error if memory does not hold even one sequence."""

    def round_tokens(self, live: int) -> int:
        """The tokens of a round with this many live slots."""

    def decode(self, live: abc.Sequence[int], tokens: int) -> RoundResult:
        """Sample this many tokens for each live slot, or up to ``width`` times as many; a slot may go beyond its sequence's
        end."""

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
        replies: ReplyStore | None = None,
    ) -> None:
        self.policy, self.runner, self.weight_source, self.replies = policy, runner, weight_source, replies
        self.requests: dict[int, SampleRequest] = {}
        self.sequences: dict[int, list[Sequence]] = {}
        self.unfinished: dict[int, int] = {}
        self.waiting: deque[Sequence] = deque()
        S, T = runner.slots, runner.max_new_tokens
        self.running: list[Sequence | None] = [None] * S
        self.in_flight: deque[DecodeRound] = deque()
        self.parked: dict[int, ParkedTurn] = {}
        self.closing: list[tuple[Sequence, Future[Outcome]]] = []
        """Sequences that have ended and wait for the outcome of their episode."""
        self.wake = threading.Event()
        """Set when an environment has answered."""
        self.generation_S, self.admitted_S = np.zeros(S, np.int64), np.zeros(S, np.int64)
        self.read_S, self.launched_S, self.limit_S, self.min_tokens_S = (np.zeros(S, np.int64) for _ in range(4))
        self.token_ST: Ints = np.zeros((S, T), np.int64)
        self.logp_ST3: Floats = np.zeros((S, T, 3), np.float32)
        self.routing_STE: Routing | None = None
        self._numbers, self._generations = count(), count(1)
        # Text that is decoded in windows can be searched a round at a time, unless the tokenizer edits spaces between tokens.
        self._search_rounds = not getattr(policy.tokenizer, "clean_up_tokenization_spaces", False)
        for request in requests:
            self.submit(request)

    def submit(self, request: SampleRequest) -> int:
        """Queue a request; returns its number. Its sequences are decoded as slots become free."""
        assert request.grammar is None or self.runner.can_constrain
        number = next(self._numbers)
        self.sequences[number] = [Sequence(request, number, request.key.first + sample) for sample in range(request.samples)]
        waiting = [sequence for sequence in self.sequences[number] if sequence.stop is None]
        assert waiting, "a request that is complete needs no sampling"
        self.requests[number], self.unfinished[number] = request, len(waiting)
        self.waiting.extend(waiting)
        return number

    def progress(self, group: int) -> tuple[BegunCompletion, ...]:
        """The completions of a request as far as they are sampled, for a later call that continues them."""
        slot_of = {id(sequence): slot for slot, sequence in enumerate(self.running) if sequence is not None}
        begun = []
        for sequence in self.sequences[group]:
            ids, logps = sequence.token_ids, sequence.logps
            if sequence.stop is None and id(sequence) in slot_of:
                slot = slot_of[id(sequence)]
                ids, logps = self._tokens_of(slot, sequence, max(int(self.read_S[slot]), len(ids)))
            versions = tuple((at, version) for at, version in sequence.versions.items() if at < len(ids))
            begun.append(BegunCompletion(ids, logps, versions, sequence.stop))
        return tuple(begun)

    def completions(self) -> abc.Generator[tuple[int, tuple[Completion, ...]]]:
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
            while self.in_flight or any(self.running) or self.closing:
                self._wait_for_environments()
                self._take_new_weights()
                complete = self._advance()
                if not self.waiting and not any(self.running):
                    self.runner.begin_to_close()  # while the last texts are decoded
                if complete:
                    yield complete
                self._admit()
        finally:
            self.runner.close()
            for sequence in chain.from_iterable(self.sequences.values()):
                if sequence.episode is not None:  # not its request's if the conversation began again
                    sequence.episode.close()

    def _wait_for_environments(self) -> None:
        """If there is nothing to decode or to read, wait until an environment has answered."""
        while not self.in_flight and len(self.parked) == sum(sequence is not None for sequence in self.running):
            self.wake.clear()
            if any(turn.answer.done() for turn in self.parked.values()) or any(end.done() for _, end in self.closing):
                return
            self.wake.wait()

    def _take_new_weights(self) -> None:
        """Load new weights if there are any. Running sequences continue with them and keep the KV cache of the previous
        weights."""
        if self.weight_source is None:
            return
        if self.weight_source():
            self.runner.weights_changed()
        for slot, sequence in enumerate(self.running):
            if sequence is not None and self.weight_source.version not in sequence.versions.values():
                begun = 0 if sequence.begun is None else len(sequence.begun.token_ids)
                sequence.versions[max(int(self.launched_S[slot]), begun)] = self.weight_source.version

    # Slots.

    def _admit(self) -> None:
        """Fill free slots from the queue, as far as there is memory, and prefill the prompts."""
        if not self.waiting and not self.runner.prefilling:
            return
        for slot in self.runner.free_slots(self.running, self.waiting):
            if not self.waiting or not self.runner.can_admit(self.waiting, idle=not any(self.running)):
                break
            self._assign_slot(slot, self.waiting.popleft())
        self.runner.prefill()

    def _assign_slot(self, slot: int, sequence: Sequence) -> None:
        sampling, grammar = sequence.request.sampling, sequence.request.grammar
        sequence.constraint = None if grammar is None else grammar.start()
        self.running[slot], self.read_S[slot], self.launched_S[slot] = sequence, 0, 0
        self.limit_S[slot], self.min_tokens_S[slot] = sampling.max_new_tokens, sampling.min_new_tokens
        self.generation_S[slot] = self.admitted_S[slot] = next(self._generations)
        self.runner.assign(slot, sequence)
        if sequence.begun is not None and len(sequence.begun.token_ids):  # its tokens are fed as an environment's reply is
            ids = sequence.begun.token_ids.tolist()
            self.token_ST[slot, : len(ids)] = ids
            prefilled = self.runner.resume(slot, sequence, 0, int(sequence.request.prompt_ids[-1]), ids)
            self.read_S[slot] = self.launched_S[slot] = prefilled

    def _release_slot(self, slot: int) -> None:
        self.running[slot], self.generation_S[slot] = None, 0
        self.parked.pop(slot, None)
        self.runner.release(slot)

    def _reserve(self, live: list[int], tokens: int) -> list[int]:
        """Memory for the next round, the oldest sequences first; if it runs out, the youngest are preempted."""
        for slot in sorted(live, key=lambda s: self.admitted_S[s]):
            read, launched = int(self.read_S[slot]), int(self.launched_S[slot])
            needed = min(read + (launched - read + tokens) * self.runner.width, int(self.limit_S[slot]))
            while self.running[slot] is not None and not self.runner.reserve(slot, needed):
                running = (s for s in (*live, *self.parked) if self.running[s] is not None)
                self._preempt(max(running, key=lambda s: self.admitted_S[s]))
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
        """Resume what environments have answered, launch a round, and read the oldest once enough are in flight; returns the
        groups that are complete."""
        complete = self._take_answers() + self._take_outcomes()
        launched = self._launch()
        if launched is not None:
            self.in_flight.append(launched)
        if self.in_flight and (launched is None or len(self.in_flight) > self.runner.rounds_ahead):
            complete += self._read_round(self.in_flight.popleft())
        return complete

    def _launch(self) -> DecodeRound | None:
        waiting = {*self.parked, *self.runner.prefilling}
        running = [s for s, sequence in enumerate(self.running) if sequence is not None and s not in waiting]
        live = [s for s in running if self.launched_S[s] < self.limit_S[s]]
        if not live:
            return None
        tokens = min(self.runner.round_tokens(len(live)), int((self.limit_S - self.launched_S)[live].max()))
        live = self._reserve(live, tokens)
        result = self.runner.decode(live, tokens)
        self.launched_S[live] += tokens
        generation_S = self.generation_S.copy()
        generation_S[list(self.runner.prefilling)] = 0
        return DecodeRound(generation_S, tokens, result)

    def _read_round(self, done: DecodeRound) -> list[int]:
        """Append a round's tokens to their sequences; returns the groups that are complete now."""
        done.result.wait()
        slots_n = np.flatnonzero((done.generation_S > 0) & (done.generation_S == self.generation_S))
        if not len(slots_n):  # all of them have ended since, or were preempted
            return []
        start_n = self.read_S[slots_n]
        token_nC, logp_nC3, count_n = done.result.read(slots_n, start_n)
        index_C = np.arange(token_nC.shape[1])
        position_nC = start_n[:, None] + index_C
        within_nC = (position_nC < self.limit_S[slots_n, None]) & (index_C < count_n[:, None])
        n, c = np.nonzero(within_nC)
        self.token_ST[slots_n[n], position_nC[n, c]] = token_nC[n, c]
        self.logp_ST3[slots_n[n], position_nC[n, c]] = logp_nC3[n, c]
        routing_nCE = done.result.routing(slots_n, start_n)
        if routing_nCE is not None:
            if self.routing_STE is None:
                self.routing_STE = np.zeros((*self.token_ST.shape, routing_nCE.shape[-1]), np.int16)
            self.routing_STE[slots_n[n], position_nC[n, c]] = routing_nCE[n, c]
            for slot, first, routing_nE in done.result.reply_routing():
                if slot in slots_n:
                    self.routing_STE[slot, first : first + len(routing_nE)] = routing_nE
        ends_nC = np.isin(token_nC, self.policy.eos_ids) & (position_nC >= self.min_tokens_S[slots_n, None]) & within_nC
        last_nC = ends_nC | (within_nC & (position_nC == self.limit_S[slots_n, None] - 1))
        last_n = np.where(last_nC.any(1), last_nC.argmax(1), -1).tolist()
        self.read_S[slots_n] += count_n
        self.launched_S[slots_n] += count_n - done.steps
        complete = []
        for i, slot in enumerate(slots_n.tolist()):
            sequence, start, last = self.running[slot], int(start_n[i]), last_n[i]
            assert sequence is not None
            end, stop = start + int(count_n[i]), None
            if _needs_search(sequence.request):
                end, stop = self._search(slot, sequence, start, min(end, int(self.limit_S[slot])))
            elif last >= 0:
                end, stop = start + last + 1, "end" if ends_nC[i, last] else "length"
            if stop is not None and sequence.episode is not None:
                stop = self._end_turn(slot, sequence, end, stop)
            self._stream(slot, sequence, start, end, stop, done.result)
            if stop is not None and self._finish(slot, sequence, end, stop):
                complete.append(sequence.first.group)
        return complete

    def _stream(
        self, slot: int, sequence: Sequence, start: int, end: int, stop: StopReason | None, result: RoundResult
    ) -> None:
        """For sessions: tokens [start, end) of a sequence are final."""

    def _search(self, slot: int, sequence: Sequence, start: int, end: int) -> tuple[int, StopReason | None]:
        """After which of the tokens [start, end) the turn ends, and why. Forced tokens end it only if they fill the
        sequence."""
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

    def _end_turn(self, slot: int, sequence: Sequence, end: int, stop: StopReason) -> StopReason | None:
        """Ask the environment for a reply and park the slot. If the reply is there at once, the slot continues with it. Returns
        the stop reason if the sequence ends here.

        A resumed slot has a new generation, so that tokens in flight are discarded. It keeps its place in the order of
        admission. The oldest sequence is never preempted, so every sequence ends.
        """
        turn_ids, stops = self.token_ST[slot, sequence.turn_start : end], sequence.request.sampling.stop
        if not len(turn_ids):  # the last reply has filled the sequence
            return stop
        is_stopped = stop == "stop_string" and bool(stops) and ends_with_stop(self.policy, turn_ids, stops)
        answer = ask(self.policy, sequence, self.token_ST[slot, :end], stop, is_last=is_stopped or stop == "length")
        if answer is None:
            self._leave(slot, sequence)
            restart_episode(self.policy, sequence.first, self.replies)
            self._continue_with(sequence.first)
            return None
        self.generation_S[slot], self.read_S[slot], self.launched_S[slot] = 0, end, end
        self.parked[slot] = ParkedTurn(end, stop, answer)
        self.runner.park(slot)
        if answer.done():
            return self._take_answer(slot, sequence)
        answer.add_done_callback(lambda _: self.wake.set())
        return None

    def _take_answer(self, slot: int, sequence: Sequence) -> StopReason | None:
        """Resume a parked slot with the environment's reply; if there is none, returns why the sequence ends."""
        turn = self.parked.pop(slot)
        record_answer(self.replies, sequence, turn.answer.result())
        reply, room = turn.answer.result().reply, int(self.limit_S[slot]) - turn.end
        if reply is None:
            return turn.stop
        if not room:
            return "length"
        written_ids = self.token_ST[slot, : turn.end]
        reply_ids, context_ids = following_tokens(self.policy, sequence, written_ids, reply, ended=turn.stop == "end")
        if context_ids is not None:
            return self._begin_sequence(slot, sequence, turn, context_ids)
        reply_ids = reply_ids[:room]
        sequence.forced.append((turn.end, turn.end + len(reply_ids)))
        prefilled = self.runner.resume(slot, sequence, turn.end, int(self.token_ST[slot, turn.end - 1]), reply_ids)
        self.token_ST[slot, turn.end : turn.end + prefilled] = reply_ids[:prefilled]
        self.generation_S[slot] = next(self._generations)
        self.read_S[slot] = self.launched_S[slot] = turn.end + prefilled
        return None

    def _begin_sequence(self, slot: int, sequence: Sequence, turn: ParkedTurn, context_ids: Ints) -> StopReason | None:
        """Continue a completion in a new sequence with this context; if there is no room for one, returns why it ends."""
        self._store(slot, sequence, turn.end, turn.stop)
        room = sequence.room_after(context_ids)
        if room < 1:
            return "length"
        self._leave(slot, sequence)
        self._continue_with(sequence.follow(next(self._numbers), context_ids, room))
        return None

    def _continue_with(self, sequence: Sequence) -> None:
        """Make a sequence the current one of its completion, and put it at the front of the queue."""
        first = sequence.first
        self.sequences[first.group][sequence.sample - first.request.key.first] = sequence
        self.waiting.appendleft(sequence)

    def _leave(self, slot: int, sequence: Sequence) -> None:
        """Free a sequence's slot, and its context unless that is the prompt, which its group shares."""
        self._release_slot(slot)
        if sequence.before is not None:
            self.runner.release_prompt(sequence.group)

    def _take_answers(self) -> list[int]:
        """Resume the slots whose environments have answered; returns the groups that are complete now."""
        complete = []
        for slot, turn in [(slot, turn) for slot, turn in self.parked.items() if turn.answer.done()]:
            sequence = self.running[slot]
            assert sequence is not None
            stop = self._take_answer(slot, sequence)
            if stop is not None and self._finish(slot, sequence, turn.end, stop):
                complete.append(sequence.first.group)
        return complete

    def _finish(self, slot: int, sequence: Sequence, end: int, stop: StopReason) -> bool:
        """End a completion; returns whether its group is complete."""
        self._store(slot, sequence, end, stop)
        self._leave(slot, sequence)
        outcome = None if sequence.episode is None else sequence.episode.finish()
        if outcome is None:
            return self._count_finished(sequence)
        self.closing.append((sequence, outcome))
        outcome.add_done_callback(lambda _: self.wake.set())
        return False

    def _store(self, slot: int, sequence: Sequence, end: int, stop: StopReason) -> None:
        """Store the tokens, log-probs and experts that were sampled in a slot in its sequence."""
        sequence.token_ids, sequence.logps = self._tokens_of(slot, sequence, end)
        sequence.stop = stop
        sequence.routing = None if self.routing_STE is None else self.routing_STE[slot, :end].copy()
        for first, last in sequence.forced:
            sequence.logps[first:last] = 0.0

    def _tokens_of(self, slot: int, sequence: Sequence, end: int) -> tuple[Ints, Floats]:
        """A running sequence's first ``end`` tokens and their log-probs. Tokens of an earlier step keep the log-probs of the
        weights that sampled them."""
        logps = self.logp_ST3[slot, :end].copy()
        if sequence.begun is not None:
            logps[: len(sequence.begun.logps)] = sequence.begun.logps
        return self.token_ST[slot, :end].copy(), logps

    def _take_outcomes(self) -> list[int]:
        """Store how episodes have ended; returns the groups that are complete now."""
        done = [(sequence, outcome) for sequence, outcome in self.closing if outcome.done()]
        for sequence, outcome in done:
            end_episode(self.replies, sequence, outcome.result())
        self.closing = [(sequence, outcome) for sequence, outcome in self.closing if sequence.outcome is None]
        return [sequence.first.group for sequence, _ in done if self._count_finished(sequence)]

    def _count_finished(self, sequence: Sequence) -> bool:
        """Whether its group is complete now."""
        group = sequence.first.group
        self.unfinished[group] -= 1
        if self.unfinished[group]:
            return False
        self._end_group(group)
        return True

    def _end_group(self, group: int) -> None:
        self.runner.release_prompt(group)


def _needs_search(request: SampleRequest) -> bool:
    """Whether the end of a turn must be searched for: stop strings in the text, or any end after an environment's reply."""
    return bool(request.sampling.stop) or bool(request.episodes)
