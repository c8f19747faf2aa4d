"""The learner's engine on a cluster: `sample` sends a step's groups to samplers, and gives them back in order.

A group is asked for until it has come, and counts once, whoever wrote it: where a sampler dies or falls silent, its groups go
to the others. Samplers are asked all the time how they are, by calls that are answered within a second or two, so that one that
hangs is told from one that has much to do.

With ``max_staleness`` = k the steps that follow are asked for too, up to k of them: samplers write them while the learner
learns, and go on with its new weights in the middle of a completion.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from oncurve.cluster.messages import GroupIndex, Phase, SampleJob, SamplerReply, Say, Session, as_bytes
from oncurve.cluster.ray_client import (
    START_S,
    Actor,
    ActorDied,
    ActorTimeout,
    ProcessLocation,
    Ref,
    first_ready,
    put,
    result_of,
    this_process,
)
from oncurve.cluster.weight_broadcast import BroadcastGroup, GroupMembers, open_store
from oncurve.engines.native.engine import NativeEngine, SampleKey
from oncurve.errors import ClusterError, error_from_json
from oncurve.models.policy import Policy
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Group, Prompt
from oncurve.training.evaluate import EVAL_STEP

POLL_S = 1.0
"""How long a sampler that has nothing to say keeps the question."""
LEARNER = "learner"
Versions = tuple[tuple[int, int], ...]
MOST_KILLS = 2
"""How often a sampler that hangs is started again before the run gives up."""


@dataclass
class SamplerState:
    """One sampler, as far as the learner knows."""

    peer: Actor
    at: ProcessLocation | None = None
    state: str = "opening"
    """`opening`: it loads the model. `up`. `silent`: it has not answered in time, and may yet."""
    ref: Ref = None
    heard: float = field(default_factory=time.monotonic)
    """When it last answered, or was last seen to get on with its work."""
    rounds: int = -1
    why: str = ""
    """Why it could not be reached, where it could not."""
    kills: int = 0
    """How often it was killed because it hung and no other was left."""
    places: set[GroupIndex] = field(default_factory=set)
    acknowledged: list[GroupIndex] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PendingCall:
    """One call of ``sample``, under way or ahead of its time."""

    number: int
    prompts: tuple[Prompt, ...]
    group_size: int
    how: Sampling
    draws: SampleKey
    turn: int
    version: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """What the steps to come will ask: known beforehand, as prompts are a function of (seed, step)."""

    prompts_of: Callable[[int], Sequence[Prompt]]
    group_size: int
    how: Sampling
    seed: int
    last: int


class RemoteEngine(NativeEngine):
    """Samples by others. ``policy`` is the learner's own, whose weights are pushed before each call."""

    shares_weights = False

    def __init__(self, policy: Policy, recipe: Recipe, peers: Sequence[Actor], order: Session, say: Say, phase: Phase) -> None:
        super().__init__(policy, recipe.engine)
        self.order, self.say, self.phase = order, say, phase
        self.timeout_s, self.staleness = recipe.scale.timeout_s, recipe.scale.max_staleness
        self.seats = [SamplerState(peer) for peer in peers]
        self.calls: dict[int, PendingCall] = {}
        self.over: list[int] = []
        self.come: dict[GroupIndex, Group] = {}
        self.unsent: list[GroupIndex] = []
        self.prefetched: Prefetch | None = None
        self.weights: tuple[int, Ref] | None = None
        self.group: tuple[tuple[str, ...], GroupMembers] | None = None
        self.backend = "nccl" if policy.device.type == "cuda" else None
        self.updates = self.pushes = 0
        self.updates_at: dict[int, int] = {}
        """By push. Updates are counted anew in each stage, and after a roll-back; pushes never are."""
        self._numbers, self._jobs = itertools.count(), itertools.count()
        for seat in self.seats:
            self._open(seat)

    def prefetch(self, ahead: Prefetch | None) -> None:
        """A stage begins, or goes back to a checkpoint: what was asked ahead of another one is wanted no more."""
        for number in list(self.calls):
            self._end(number)
        self.prefetched = ahead

    def sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        how: Sampling,
        draws: SampleKey,
        on_group: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        self.updates = draws.step - EVAL_STEP if draws.step >= EVAL_STEP else draws.step - 1
        number = self._pending_call(prompts, group_size, how, draws)
        self._push()
        if number is None:
            number = self._ask(prompts, group_size, how, draws, turn=-1)
        self._ask_ahead()
        for seat in self.seats:  # nobody was asked while the learner learned
            seat.heard = time.monotonic()
        wanted = [(number, place) for place in range(len(prompts))]
        told: set[GroupIndex] = set()
        while True:
            for place in wanted:
                if place in self.come and place not in told:
                    told.add(place)
                    if on_group is not None:
                        on_group(place[1], self.come[place])
            if len(told) == len(wanted):
                break
            self._give_out()
            self._hear()
        groups = [self.come[place] for place in wanted]
        self._end(number)
        self.phase(LEARNER, None, "rewarding and learning")
        return groups

    # What is asked for.

    def _pending_call(self, prompts: Sequence[Prompt], group_size: int, how: Sampling, draws: SampleKey) -> int | None:
        """The call that asks just this already."""
        names = [p.id for p in prompts]
        for call in self.calls.values():
            same = (call.draws, call.how, call.group_size) == (draws, how, group_size)
            if same and [p.id for p in call.prompts] == names:
                return call.number
        return None

    def _ask(self, prompts: Sequence[Prompt], group_size: int, how: Sampling, draws: SampleKey, turn: int) -> int:
        call = PendingCall(next(self._numbers), tuple(prompts), group_size, how, draws, turn, self.pushes)
        self.calls[call.number] = call
        self.unsent += [(call.number, place) for place in range(len(prompts))]
        return call.number

    def _ask_ahead(self) -> None:
        ahead = self.prefetched
        if ahead is None or not self.staleness:
            return
        for n in range(self.updates + 1, min(self.updates + 1 + self.staleness, ahead.last) + 1):
            prompts, draws = ahead.prompts_of(n), SampleKey(ahead.seed, n)
            if self._pending_call(prompts, ahead.group_size, ahead.how, draws) is None:
                self._ask(prompts, ahead.group_size, ahead.how, draws, turn=n)

    def _end(self, number: int) -> None:
        """Forgets a call; what still comes of it is passed over."""
        self.calls.pop(number, None)
        self.over.append(number)
        self.come = {place: group for place, group in self.come.items() if place[0] != number}
        self.unsent = [place for place in self.unsent if place[0] != number]
        for seat in self.seats:
            seat.places = {place for place in seat.places if place[0] != number}

    # Weights.

    def _push(self) -> None:
        self.phase(LEARNER, None, "pushing weights")
        self.weights = None
        self.pushes += 1
        self.updates_at[self.pushes] = self.updates
        up = [seat for seat in self.seats if seat.state == "up"]
        if self.backend is None or not up or not self._broadcast(up, self.backend):
            self._push_by_store(up)
        self.phase(LEARNER, None, "waiting for samplers")

    def _push_by_store(self, seats: Sequence[SamplerState]) -> None:
        """Once into the object store, from where each sampler's node fetches them."""
        if self.weights is None:
            self.weights = (self.pushes, put(as_bytes(self.policy)))
        for seat in seats:
            seat.peer.call("push", self.order.session, *self.weights)

    def _broadcast(self, up: Sequence[SamplerState], backend: str) -> bool:
        """From GPU to GPU; False where the group could not be made or has lost a member."""
        names = tuple(seat.peer.name for seat in up)
        try:
            if self.group is None or self.group[0] != names:
                self.group = (names, self._meet(up, backend))
            asked = [seat.peer.call("receive", self.order.session, self.pushes) for seat in up]
            self.group[1].broadcast([p.detach() for p in self.policy.trainable.values()])
            if all(result_of(ref, self.timeout_s) for ref in asked):
                return True
        except (ActorDied, ActorTimeout, RuntimeError) as error:
            self.say(f"broadcasting weights failed ({str(error).partition(chr(10))[0][:160]}): sent through the object store")
        self.group = None
        return False

    def _meet(self, up: Sequence[SamplerState], backend: str) -> GroupMembers:
        address = this_process().address
        store = open_store(address, self.timeout_s)
        meeting = BroadcastGroup(address, store.port, 1 + len(up), backend, self.timeout_s)
        asked = [seat.peer.call("join", self.order.session, meeting, 1 + i) for i, seat in enumerate(up)]
        made = GroupMembers(meeting, 0, store)
        if not all(result_of(ref, self.timeout_s) for ref in asked):
            raise RuntimeError("a sampler was started again meanwhile")
        return made

    # Who writes what.

    def _give_out(self) -> None:
        """What nobody is writing, shared out among those who can; the least busy first."""
        up = [seat for seat in self.seats if seat.state == "up"]
        for number in sorted({place[0] for place in self.unsent}) if up else ():
            places = [place for place in self.unsent if place[0] == number]
            order = sorted(up, key=lambda seat: len(seat.places))
            for i, seat in enumerate(order):
                share = places[i :: len(order)]
                if share:
                    self._send(seat, self.calls[number], share)
            self.unsent = [place for place in self.unsent if place[0] != number]

    def _send(self, seat: SamplerState, call: PendingCall, share: list[GroupIndex]) -> None:
        places = tuple(place for _, place in share)
        prompts = tuple(call.prompts[place] for place in places)
        asked = (places, prompts, call.group_size, call.how, call.draws, call.version)
        seat.places |= set(share)
        seat.peer.call("submit", self.order.session, SampleJob(next(self._jobs), call.number, call.turn, *asked))

    # How they are.

    def _open(self, seat: SamplerState) -> None:
        seat.state, seat.heard, seat.rounds = "opening", time.monotonic(), -1
        seat.ref = seat.peer.call("open", self.order)
        self.phase(seat.peer.name, seat.at, "starting")

    def _question(self, seat: SamplerState) -> None:
        oldest = min(self.calls, default=0)
        recent = [number for number in self.over if number >= oldest - 64]
        self.over = recent
        seat.ref = seat.peer.call("take", self.order.session, recent, tuple(seat.acknowledged), POLL_S)
        seat.acknowledged = []

    def _hear(self) -> None:
        """The next answers; and what to do with those who give none."""
        by_ref = {seat.ref: seat for seat in self.seats if seat.ref is not None}
        for ref in first_ready(list(by_ref), POLL_S):
            seat = by_ref[ref]
            seat.ref = None
            try:
                said = result_of(ref, POLL_S)
            except ActorDied as error:
                self._lost(seat, str(error))
            else:
                self._mark_open(seat, said) if isinstance(said, ProcessLocation) else self._take_reply(seat, said)
        for seat in self.seats:
            self._look_after(seat)

    def _mark_open(self, seat: SamplerState, at: ProcessLocation) -> None:
        if seat.at is not None:
            self.say(f"{seat.peer.name} is up again: {at}")
        seat.at, seat.state, seat.heard = at, "up", time.monotonic()
        self._push_by_store([seat])
        self.phase(seat.peer.name, at, "idle")
        self._question(seat)

    def _take_reply(self, seat: SamplerState, said: SamplerReply) -> None:
        if said.failure is not None:
            raise error_from_json(dict(said.failure))
        if said.session != self.order.session:
            return self._lost(seat, "its process was started again")
        if seat.state == "silent":
            self.say(f"{seat.peer.name} ({seat.at}) answers again")
            seat.state = "up"
            self._push_by_store([seat])
        if said.rounds != seat.rounds or not seat.places:
            seat.heard, seat.rounds = time.monotonic(), said.rounds
        for place, group in said.groups:
            seat.acknowledged.append(place)
            seat.places.discard(place)
            if place[0] in self.calls and place not in self.come:
                self.come[place] = in_updates(group, self.updates_at)
                self._wanted_no_more(place)
        self.phase(seat.peer.name, seat.at, said.phase)
        self._question(seat)
        return None

    def _wanted_no_more(self, place: GroupIndex) -> None:
        """It has come: whoever else has it need not be waited for."""
        self.unsent = [other for other in self.unsent if other != place]
        for seat in self.seats:
            seat.places.discard(place)

    def _lost(self, seat: SamplerState, why: str) -> None:
        """Its process has died: its groups go to the others, and to itself once Ray has started it again."""
        if seat.state != "opening":
            self.say(f"{seat.peer.name} ({seat.at}) died{self._taken_back(seat)}: {why[:200]}")
            seat.heard = time.monotonic()
        seat.state, seat.why = "opening", why
        self.phase(seat.peer.name, seat.at, "died, being started again")

    def _taken_back(self, seat: SamplerState) -> str:
        back, seat.places = sorted(seat.places), set()
        self.unsent += back
        return f"; its {len(back)} groups are sent again" if back else ""

    def _look_after(self, seat: SamplerState) -> None:
        if seat.ref is None and seat.state == "opening":
            self._again(seat)
        quiet = time.monotonic() - seat.heard
        if quiet < (max(self.timeout_s, START_S) if seat.state == "opening" else self.timeout_s):
            return
        if seat.state == "up":
            self.say(
                f"{seat.peer.name} ({seat.at}) has not answered the learner for {quiet:.0f} s "
                f"(scale.timeout_s){self._taken_back(seat)}"
            )
            seat.state = "silent"
            self.phase(seat.peer.name, seat.at, "silent")
        if not any(other.state == "up" for other in self.seats):
            self._start_over(seat, quiet)

    def _again(self, seat: SamplerState) -> None:
        """Asks a process that died to open, until Ray has started it."""
        since = seat.heard
        time.sleep(0.2)
        self._open(seat)
        seat.heard = since

    def _start_over(self, seat: SamplerState, quiet: float) -> None:
        """Nobody is left to wait with: one that hangs is killed, to be started again; then the run gives up."""
        if seat.state == "opening" or seat.kills == MOST_KILLS:
            raise ClusterError(
                "samplers",
                f"the learner has waited {quiet:.0f} s for {seat.peer.name}, and no other answers",
                because="; ".join(
                    f"{s.peer.name} ({s.at or 'nowhere yet'}) is {s.state} {s.why[:120]}".strip() for s in self.seats
                ),
                fix="look at those nodes (`ray status`), then go on with --resume; raise scale.timeout_s for slow loading",
            )
        self.say(f"{seat.peer.name} ({seat.at}) is killed, to be started again: no other sampler answers")
        seat.peer.kill(for_good=False)
        seat.state, seat.ref, seat.heard, seat.kills = "opening", None, time.monotonic(), seat.kills + 1


def in_updates(group: Group, updates_at: Mapping[int, int]) -> Group:
    """A sampler counts pushes; the run is told how many updates the weights of each token had seen."""
    return replace(
        group, completions=tuple(replace(c, versions=_in_updates(c.versions, updates_at)) for c in group.completions)
    )


def _in_updates(versions: Versions | None, updates_at: Mapping[int, int]) -> Versions | None:
    if versions is None:
        return None
    seen = [(at, updates_at[push]) for at, push in versions]
    return tuple(pair for i, pair in enumerate(seen) if i == 0 or pair[1] != seen[i - 1][1])
