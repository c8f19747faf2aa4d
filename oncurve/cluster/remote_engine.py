"""The learner's engine on a cluster: `sample` distributes a step's groups over the samplers, and returns them in order.

A group is requested until it arrives, and counts once, even if two samplers wrote it: if a sampler dies or stops answering, its
groups go to the others. The learner polls every sampler all the time, by calls that return within a second or two, so it can
tell a sampler that hangs from one that is busy.

With ``max_staleness`` = k the engine also prefetches up to k following steps: samplers write them while the learner updates,
and continue with its new weights in the middle of a completion.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from oncurve.cluster.messages import (
    ClusterSession,
    GroupIndex,
    LogEvent,
    SampleBatch,
    SamplerReply,
    SetPhase,
    weights_as_bytes,
)
from oncurve.cluster.ray_client import (
    START_S,
    Actor,
    ActorDied,
    ActorTimeout,
    ProcessLocation,
    Ref,
    get_result,
    put,
    this_process,
    wait_any,
)
from oncurve.cluster.weight_broadcast import BroadcastAddress, BroadcastGroup, open_store
from oncurve.engines.base import PassCounts, ReplyStore, SampleKey, WeightSource
from oncurve.errors import ClusterError, error_from_json
from oncurve.models.policy import Policy
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Group, Ints, Prompt
from oncurve.training.evaluate import EVAL_STEP

POLL_S = 1.0
"""How long a sampler without news holds a poll before it answers."""
LEARNER = "learner"
Versions = tuple[tuple[int, int], ...]
MAX_RESTARTS = 2
"""How often a sampler that hangs is restarted before the run fails."""


@dataclass
class SamplerState:
    """What the learner knows of one sampler."""

    actor: Actor
    location: ProcessLocation | None = None
    state: Literal["opening", "up", "silent"] = "opening"
    """`opening`: it loads the model. `silent`: it has not answered in time, and may yet."""
    pending: Ref = None
    """The call that it has not answered yet."""
    last_progress: float = field(default_factory=time.monotonic)
    """When it last answered while idle, or was last seen to make progress."""
    rounds: int = -1
    error: str = ""
    """Why it could not be reached."""
    restarts: int = 0
    """How often it was killed because it hung and no other sampler answered."""
    assigned: set[GroupIndex] = field(default_factory=set)
    acknowledged: list[GroupIndex] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """One call of `sample`, in progress or prefetched."""

    id: int
    prompts: tuple[Prompt, ...]
    group_size: int
    sampling: Sampling
    key: SampleKey
    priority: int
    min_version: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """What the following steps will request: known in advance, as prompts are a function of (seed, step)."""

    prompts_of: Callable[[int], Sequence[Prompt]]
    group_size: int
    sampling: Sampling
    seed: int
    last_step: int


class RemoteEngine:
    """An `Engine` that samples in other processes. ``policy`` is the learner's; its weights are pushed before each call."""

    shares_weights = False
    records_routing = False
    counts = PassCounts()
    weight_source: WeightSource | None = None
    replies: ReplyStore | None = None
    """Not used: episodes run in the samplers, and a repeated step runs them again."""
    log_lines: tuple[str, ...] = ()

    def __init__(
        self,
        policy: Policy,
        recipe: Recipe,
        actors: Sequence[Actor],
        session: ClusterSession,
        log_event: LogEvent,
        set_phase: SetPhase,
    ) -> None:
        self.policy, self.settings = policy, recipe.engine
        self.answers: dict[str, tuple[Ints, ...]] = {}
        self.session, self.log_event, self.set_phase = session, log_event, set_phase
        self.timeout_s, self.max_staleness = recipe.scale.timeout_s, recipe.scale.max_staleness
        self.samplers = [SamplerState(actor) for actor in actors]
        self.requests: dict[int, PendingRequest] = {}
        self.ended_requests: list[int] = []
        self.groups: dict[GroupIndex, Group] = {}
        self.unassigned: list[GroupIndex] = []
        self.prefetched: Prefetch | None = None
        self.weights: tuple[int, Ref] | None = None
        self.broadcast_group: tuple[tuple[str, ...], BroadcastGroup] | None = None
        self.backend = "nccl" if policy.device.type == "cuda" else None
        self.updates = self.pushes = 0
        self.updates_at: dict[int, int] = {}
        """The number of updates at each push. Updates restart in each stage and after a roll-back; pushes never do."""
        self._request_ids, self._batch_ids = itertools.count(), itertools.count()
        for sampler in self.samplers:
            self._open(sampler)

    def close(self) -> None:
        """The samplers belong to the driver, which ends them."""

    def prefetch(self, prefetch: Prefetch | None) -> None:
        """Called when a stage begins or rolls back to a checkpoint: cancels requests of the previous stage."""
        for request_id in list(self.requests):
            self._end_request(request_id)
        self.prefetched = prefetch

    def sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: SampleKey,
        on_group: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        self.updates = key.step - EVAL_STEP if key.step >= EVAL_STEP else key.step - 1
        request_id = self._find_request(prompts, group_size, sampling, key)
        self._push_weights()
        if request_id is None:
            request_id = self._add_request(prompts, group_size, sampling, key, priority=-1)
        self._add_prefetch_requests()
        for sampler in self.samplers:  # nobody polled them during the update
            sampler.last_progress = time.monotonic()
        indices = [(request_id, i) for i in range(len(prompts))]
        reported: set[GroupIndex] = set()
        while True:
            for index in indices:
                if index in self.groups and index not in reported:
                    reported.add(index)
                    if on_group is not None:
                        on_group(index[1], self.groups[index])
            if len(reported) == len(indices):
                break
            self._assign_groups()
            self._receive()
        groups = [self.groups[index] for index in indices]
        self._end_request(request_id)
        self.set_phase(LEARNER, None, "rewarding and learning")
        return groups

    # Requests.

    def _find_request(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, key: SampleKey) -> int | None:
        """The id of an equal request that was prefetched."""
        ids = [p.id for p in prompts]
        for request in self.requests.values():
            is_same = (request.key, request.sampling, request.group_size) == (key, sampling, group_size)
            if is_same and [p.id for p in request.prompts] == ids:
                return request.id
        return None

    def _add_request(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, key: SampleKey, priority: int
    ) -> int:
        request = PendingRequest(next(self._request_ids), tuple(prompts), group_size, sampling, key, priority, self.pushes)
        self.requests[request.id] = request
        self.unassigned += [(request.id, i) for i in range(len(prompts))]
        return request.id

    def _add_prefetch_requests(self) -> None:
        prefetch = self.prefetched
        if prefetch is None or not self.max_staleness:
            return
        for n in range(self.updates + 1, min(self.updates + 1 + self.max_staleness, prefetch.last_step) + 1):
            prompts, key = prefetch.prompts_of(n), SampleKey(prefetch.seed, n)
            if self._find_request(prompts, prefetch.group_size, prefetch.sampling, key) is None:
                self._add_request(prompts, prefetch.group_size, prefetch.sampling, key, priority=n)

    def _end_request(self, request_id: int) -> None:
        """Forgets a request; groups of it that still arrive are dropped."""
        self.requests.pop(request_id, None)
        self.ended_requests.append(request_id)
        self.groups = {index: group for index, group in self.groups.items() if index[0] != request_id}
        self.unassigned = [index for index in self.unassigned if index[0] != request_id]
        for sampler in self.samplers:
            sampler.assigned = {index for index in sampler.assigned if index[0] != request_id}

    # Weights.

    def _push_weights(self) -> None:
        self.set_phase(LEARNER, None, "pushing weights")
        self.weights = None
        self.pushes += 1
        self.updates_at[self.pushes] = self.updates
        up = [sampler for sampler in self.samplers if sampler.state == "up"]
        if self.backend is None or not up or not self._broadcast_weights(up, self.backend):
            self._push_through_store(up)
        self.set_phase(LEARNER, None, "waiting for samplers")

    def _push_through_store(self, samplers: Sequence[SamplerState]) -> None:
        """Puts the weights into Ray's object store once; each sampler's node fetches them from there."""
        if self.weights is None:
            self.weights = (self.pushes, put(weights_as_bytes(self.policy)))
        for sampler in samplers:
            sampler.actor.call("push_weights", self.session.id, *self.weights)

    def _broadcast_weights(self, up: Sequence[SamplerState], backend: str) -> bool:
        """Sends the weights from GPU to GPU; False if the group could not be built or has lost a member."""
        names = tuple(sampler.actor.name for sampler in up)
        try:
            if self.broadcast_group is None or self.broadcast_group[0] != names:
                self.broadcast_group = (names, self._build_broadcast_group(up, backend))
            calls = [sampler.actor.call("receive_broadcast", self.session.id, self.pushes) for sampler in up]
            self.broadcast_group[1].broadcast([p.detach() for p in self.policy.trainable.values()])
            if all(get_result(ref, self.timeout_s) for ref in calls):
                return True
        except (ActorDied, ActorTimeout, RuntimeError) as error:
            reason = str(error).partition("\n")[0][:160]
            self.log_event(f"broadcasting weights failed ({reason}): sent through the object store")
        self.broadcast_group = None
        return False

    def _build_broadcast_group(self, up: Sequence[SamplerState], backend: str) -> BroadcastGroup:
        host = this_process().address
        store = open_store(host, self.timeout_s)
        address = BroadcastAddress(host, store.port, 1 + len(up), backend, self.timeout_s)
        calls = [sampler.actor.call("join_broadcast", self.session.id, address, 1 + i) for i, sampler in enumerate(up)]
        group = BroadcastGroup(address, 0, store)
        if not all(get_result(ref, self.timeout_s) for ref in calls):
            raise RuntimeError("a sampler was restarted meanwhile")
        return group

    # Assigning groups to samplers.

    def _assign_groups(self) -> None:
        """Distributes unassigned groups over the samplers that are up, the least loaded first."""
        up = [sampler for sampler in self.samplers if sampler.state == "up"]
        for request_id in sorted({index[0] for index in self.unassigned}) if up else ():
            indices = [index for index in self.unassigned if index[0] == request_id]
            by_load = sorted(up, key=lambda sampler: len(sampler.assigned))
            for i, sampler in enumerate(by_load):
                if share := indices[i :: len(by_load)]:
                    self._submit(sampler, self.requests[request_id], share)
            self.unassigned = [index for index in self.unassigned if index[0] != request_id]

    def _submit(self, sampler: SamplerState, request: PendingRequest, indices: list[GroupIndex]) -> None:
        sampler.assigned |= set(indices)
        batch = SampleBatch(
            next(self._batch_ids),
            request.id,
            request.priority,
            tuple(i for _, i in indices),
            tuple(request.prompts[i] for _, i in indices),
            request.group_size,
            request.sampling,
            request.key,
            request.min_version,
        )
        sampler.actor.call("submit", self.session.id, batch)

    # Polling samplers.

    def _open(self, sampler: SamplerState) -> None:
        sampler.state, sampler.last_progress, sampler.rounds = "opening", time.monotonic(), -1
        sampler.pending = sampler.actor.call("open", self.session)
        self.set_phase(sampler.actor.name, sampler.location, "starting")

    def _poll(self, sampler: SamplerState) -> None:
        oldest = min(self.requests, default=0)
        self.ended_requests = [request_id for request_id in self.ended_requests if request_id >= oldest - 64]
        arguments = (self.ended_requests, tuple(sampler.acknowledged), POLL_S)
        sampler.pending = sampler.actor.call("poll", self.session.id, *arguments)
        sampler.acknowledged = []

    def _receive(self) -> None:
        """Handles the next replies, and samplers that give none."""
        by_ref = {sampler.pending: sampler for sampler in self.samplers if sampler.pending is not None}
        for ref in wait_any(list(by_ref), POLL_S):
            sampler = by_ref[ref]
            sampler.pending = None
            try:
                reply = get_result(ref, POLL_S)
            except ActorDied as error:
                self._handle_death(sampler, str(error))
            else:
                if isinstance(reply, ProcessLocation):
                    self._handle_open(sampler, reply)
                else:
                    self._handle_reply(sampler, reply)
        for sampler in self.samplers:
            self._check_progress(sampler)

    def _handle_open(self, sampler: SamplerState, location: ProcessLocation) -> None:
        if sampler.location is not None:
            self.log_event(f"{sampler.actor.name} is up again: {location}")
        sampler.location, sampler.state, sampler.last_progress = location, "up", time.monotonic()
        self._push_through_store([sampler])
        self.set_phase(sampler.actor.name, location, "idle")
        self._poll(sampler)

    def _handle_reply(self, sampler: SamplerState, reply: SamplerReply) -> None:
        if reply.failure is not None:
            raise error_from_json(dict(reply.failure))
        if reply.session_id != self.session.id:
            return self._handle_death(sampler, "its process was restarted")
        if sampler.state == "silent":
            self.log_event(f"{sampler.actor.name} ({sampler.location}) answers again")
            sampler.state = "up"
            self._push_through_store([sampler])
        if reply.rounds != sampler.rounds or not sampler.assigned:
            sampler.last_progress, sampler.rounds = time.monotonic(), reply.rounds
        for index, group in reply.groups:
            sampler.acknowledged.append(index)
            sampler.assigned.discard(index)
            if index[0] in self.requests and index not in self.groups:
                self.groups[index] = with_update_counts(group, self.updates_at)
                self._unassign(index)
        self.set_phase(sampler.actor.name, sampler.location, reply.phase)
        self._poll(sampler)
        return None

    def _unassign(self, index: GroupIndex) -> None:
        """A group has arrived: no other sampler needs to write it."""
        self.unassigned = [other for other in self.unassigned if other != index]
        for sampler in self.samplers:
            sampler.assigned.discard(index)

    def _handle_death(self, sampler: SamplerState, error: str) -> None:
        """Its groups go to the others, and to itself once Ray has restarted it."""
        if sampler.state != "opening":
            self.log_event(f"{sampler.actor.name} ({sampler.location}) died{self._take_back(sampler)}: {error[:200]}")
            sampler.last_progress = time.monotonic()
        sampler.state, sampler.error = "opening", error
        self.set_phase(sampler.actor.name, sampler.location, "died, being restarted")

    def _take_back(self, sampler: SamplerState) -> str:
        """Unassigns all groups of a sampler. Returns text for the event."""
        indices, sampler.assigned = sorted(sampler.assigned), set()
        self.unassigned += indices
        return f"; its {len(indices)} groups are sent again" if indices else ""

    def _check_progress(self, sampler: SamplerState) -> None:
        if sampler.pending is None and sampler.state == "opening":
            self._reopen(sampler)
        idle_s = time.monotonic() - sampler.last_progress
        if idle_s < (max(self.timeout_s, START_S) if sampler.state == "opening" else self.timeout_s):
            return
        if sampler.state == "up":
            self.log_event(
                f"{sampler.actor.name} ({sampler.location}) has not answered the learner for {idle_s:.0f} s "
                f"(scale.timeout_s){self._take_back(sampler)}"
            )
            sampler.state = "silent"
            self.set_phase(sampler.actor.name, sampler.location, "silent")
        if not any(other.state == "up" for other in self.samplers):
            self._restart(sampler, idle_s)

    def _reopen(self, sampler: SamplerState) -> None:
        """Opens the session on a process that died. Repeated until Ray has restarted it, within one time limit."""
        last_progress = sampler.last_progress
        time.sleep(0.2)
        self._open(sampler)
        sampler.last_progress = last_progress

    def _restart(self, sampler: SamplerState, idle_s: float) -> None:
        """No sampler is up: kills one that hangs, for Ray to restart it. After `MAX_RESTARTS` the run fails."""
        if sampler.state == "opening" or sampler.restarts == MAX_RESTARTS:
            states = (f"{s.actor.name} ({s.location or 'not started'}) is {s.state} {s.error[:120]}" for s in self.samplers)
            raise ClusterError(
                "samplers",
                f"the learner has waited {idle_s:.0f} s for {sampler.actor.name}, and no other sampler answers",
                because="; ".join(state.strip() for state in states),
                fix="check those nodes (`ray status`), then use --resume; raise scale.timeout_s if models load slowly",
            )
        self.log_event(f"{sampler.actor.name} ({sampler.location}) is killed and restarted: no other sampler answers")
        sampler.actor.kill(restart=True)
        sampler.state, sampler.pending, sampler.last_progress = "opening", None, time.monotonic()
        sampler.restarts += 1


def with_update_counts(group: Group, updates_at: Mapping[int, int]) -> Group:
    """The group with its weight versions converted from numbers of pushes, which samplers count, to numbers of updates, which
    the run records."""
    completions = (replace(c, versions=_update_counts(c.versions, updates_at)) for c in group.completions)
    return replace(group, completions=tuple(completions))


def _update_counts(versions: Versions | None, updates_at: Mapping[int, int]) -> Versions | None:
    if versions is None:
        return None
    spans = [(start, updates_at[push]) for start, push in versions]
    return tuple(span for i, span in enumerate(spans) if i == 0 or span[1] != spans[i - 1][1])
