"""Rewards in other processes: asynchronous rewards (a sandbox, a worker, a judge) are computed by reward workers.

The learner computes the others itself: sending a group would take longer than scoring it. As in a run of one process, the
learner stores the results of non-deterministic rewards with the run and asks for them once.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any

from oncurve.cluster.messages import ClusterSession, LogEvent, SetPhase
from oncurve.cluster.ray_client import START_S, Actor, ActorDied, ActorTimeout, ProcessLocation, get_result, this_process
from oncurve.errors import ClusterError, OncurveError, error_from_json, error_to_json
from oncurve.models.loading.load import load_policy
from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import Aspect, Group, ScoredGroup
from oncurve.rewards.base import Reward
from oncurve.rewards.mix import AT_ONCE, RewardMix, aspects_of
from oncurve.rewards.reply_cache import is_nondeterministic
from oncurve.training.start import rewards_for, task_for

RewardReply = list[Aspect] | dict[str, Any] | None
"""Aspects; or an error as JSON; or None from a process that does not know the session."""


class RewardActor:
    """The Ray actor. Each call scores one group; several calls run at once."""

    def __init__(self, name: str) -> None:
        self.name, self.session_id = name, ""
        self._lock = threading.Lock()

    def open(self, session: ClusterSession) -> ProcessLocation:
        with self._lock:
            if self.session_id != session.id:
                self.recipe, self.folder = session.load_recipe(), session.folder
                self.mixes: dict[str, RewardMix] = {}
                self.session_id = session.id
        return this_process()

    def score(self, session_id: str, stage: str, reward: str, group: Group) -> RewardReply:
        """One reward's aspects of a group; None if this process was restarted and does not know the session."""
        if session_id != self.session_id:
            return None
        try:
            with self._lock:
                mix = self.mixes.get(stage) or self.mixes.setdefault(stage, self._build_mix(stage))
        except OncurveError as error:  # a package or file that this node lacks
            return error_to_json(error, self.name)
        return aspects_of(next(r for r in mix.rewards if r.name == reward), group)

    def _build_mix(self, label: str) -> RewardMix:
        stage = next(s for s in self.recipe.stages if s.label == label)
        mix = rewards_for(self.recipe, stage)
        mix.bind(lambda: _load_decoder(self.recipe), self.folder)
        return mix


def _load_decoder(recipe: Recipe) -> Callable[..., str]:
    """The tokenizer's decode function, which process rewards need."""
    return load_policy(recipe.model, alphabet=task_for(recipe, recipe.stages[0]).alphabet, seed=recipe.seed).decode


class RewardWorkers:
    """The learner's side of the reward workers. Thread-safe."""

    def __init__(self, actors: tuple[Actor, ...], session: ClusterSession, timeout_s: float, set_phase: SetPhase) -> None:
        self.actors, self.session, self.timeout_s, self.set_phase = actors, session, timeout_s, set_phase
        self.locations: dict[str, ProcessLocation] = {}
        self._events: list[str] = []
        self._round_robin = itertools.cycle(actors)
        self._lock = threading.Lock()
        self._down: set[str] = set()

    def open(self) -> None:
        """Opens the session on all workers and waits for them."""
        for actor, ref in [(actor, actor.call("open", self.session)) for actor in self.actors]:
            try:
                self.locations[actor.name] = get_result(ref, max(self.timeout_s, START_S))
                self.set_phase(actor.name, self.locations[actor.name], "idle")
            except (ActorDied, ActorTimeout) as error:
                raise self._no_answer_error(f"'{actor.name}' to start", error) from error

    def score(self, stage: str, reward: str, group: Group) -> list[Aspect]:
        """Scores a group on the next worker; on another one if that worker dies or does not answer in time."""
        deadline: float | None = None
        while True:
            actor = self._next_actor()
            try:
                reply = self._call(actor, stage, reward, group)
            except (ActorDied, ActorTimeout) as error:
                self._record_loss(actor, error, f"'{reward}' of {group.prompt.id}")
                deadline = deadline or time.monotonic() + max(self.timeout_s, START_S)
                if time.monotonic() > deadline:
                    raise self._no_answer_error(f"'{reward}' of {group.prompt.id}", error) from error
                time.sleep(0.5)
            else:
                if isinstance(reply, dict):
                    raise error_from_json(reply)
                if reply is not None:
                    return reply

    def _record_loss(self, actor: Actor, error: Exception, work: str) -> None:
        """Logs a lost worker once, though many calls may fail while Ray restarts it."""
        died = isinstance(error, ActorDied)
        self.set_phase(actor.name, None, "died, being restarted" if died else "silent")
        with self._lock:
            is_known = actor.name in self._down
            self._down.add(actor.name)
        if not is_known:
            reason = "died" if died else f"has not answered for {self.timeout_s:g} s"
            location = self.locations.get(actor.name, "starting")
            self._log(f"{actor.name} ({location}) {reason} while scoring {work}; sent to another worker")

    def _call(self, actor: Actor, stage: str, reward: str, group: Group) -> RewardReply:
        # Without the environment, which the worker would have to load.
        arguments = (self.session.id, stage, reward, replace(group, prompt=replace(group.prompt, environment=None)))
        self.set_phase(actor.name, None, "scoring")
        reply: RewardReply = get_result(actor.call("score", *arguments), self.timeout_s)
        if reply is None:  # it was restarted and needs the session again
            self.locations[actor.name] = get_result(actor.call("open", self.session), max(self.timeout_s, START_S))
            self._log(f"{actor.name} was restarted: {self.locations[actor.name]}")
            reply = get_result(actor.call("score", *arguments), self.timeout_s)
        self.set_phase(actor.name, self.locations[actor.name], "idle")
        with self._lock:
            self._down.discard(actor.name)
        return reply

    def _next_actor(self) -> Actor:
        with self._lock:
            return next(self._round_robin)

    def _log(self, line: str) -> None:
        with self._lock:
            self._events.append(line)

    def take_events(self) -> list[str]:
        """What has happened to workers since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def _no_answer_error(self, work: str, error: Exception) -> ClusterError:
        workers = ", ".join(f"{a.name} ({self.locations.get(a.name, 'not started')})" for a in self.actors)
        reason = str(error)[:200] or f"no answer within scale.timeout_s = {self.timeout_s:g} s"
        return ClusterError(
            "reward workers",
            f"the learner waits for {work}, and no worker answers",
            because=f"{reason}; workers: {workers}",
            fix="check those nodes (`ray status`); raise scale.timeout_s if a reward takes longer",
        )


class RemoteRewardMix(RewardMix):
    """A stage's rewards, of which the asynchronous ones are computed by reward workers."""

    def __init__(self, mix: RewardMix, stage: str, workers: RewardWorkers, log_event: LogEvent) -> None:
        super().__init__(mix.rewards, mix.accuracy_names, mix.task_of, mix.tasks)
        self.stage, self.workers, self.log_event = stage, workers, log_event

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        scored = super().score(groups)
        for line in self.workers.take_events():
            self.log_event(line)
        return scored

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """Enough threads to keep every worker busy: each scores several groups at once."""
        return ThreadPoolExecutor(AT_ONCE * len(self.workers.actors), thread_name_prefix="oncurve-rewards")

    def _aspects(self, reward: Reward, group: Group) -> list[Aspect]:
        if reward not in self._async_rewards:
            return super()._aspects(reward, group)

        def ask() -> list[Aspect]:
            return self.workers.score(self.stage, reward.name, group)

        return ask() if self._cache is None or not is_nondeterministic(reward) else self._cache.get_or_ask(reward, group, ask)
