"""Rewards in processes of their own: those that wait for something (a sandbox, a worker, a judge) go to reward workers.

The others are computed where the groups arrive: sending one would take longer than grading it. What came from outside is kept
with the run by the learner, as in a run of one process, and asked for once.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from oncurve.cluster.messages import Phase, Say, Session
from oncurve.cluster.ray_client import START_S, Actor, ActorDied, ActorTimeout, ProcessLocation, result_of, this_process
from oncurve.errors import ClusterError, OncurveError, error_from_json, error_to_json
from oncurve.models.loading.load import load_policy
from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import Aspect, Group, ScoredGroup
from oncurve.rewards.base import Reward
from oncurve.rewards.mix import AT_ONCE, RewardMix, aspects_of
from oncurve.rewards.reply_cache import is_nondeterministic
from oncurve.training.start import rewards_for, task_for

Said = list[Aspect] | dict[str, Any] | None
"""Aspects; or an error as data; or nothing, by a process that does not know the session."""


class RewardActor:
    """The actor. It grades one group at a time for each call; calls come side by side."""

    def __init__(self, name: str) -> None:
        self.name, self.session = name, ""
        self._lock = threading.Lock()

    def open(self, order: Session) -> ProcessLocation:
        with self._lock:
            if self.session != order.session:
                self.recipe, self.folder = order.enter(), order.folder
                self.mixes: dict[str, RewardMix] = {}
                self.session = order.session
        return this_process()

    def score(self, session: str, stage: str, reward: str, group: Group) -> Said:
        """What a reward says of a group; None where this process does not know the session (it was started again)."""
        if session != self.session:
            return None
        try:
            with self._lock:
                mix = self.mixes.get(stage) or self.mixes.setdefault(stage, self._mix(stage))
        except OncurveError as error:  # a package or a file that this node lacks
            return error_to_json(error, self.name)
        return aspects_of(next(one for one in mix.rewards if one.name == reward), group)

    def _mix(self, label: str) -> RewardMix:
        stage = next(s for s in self.recipe.stages if s.label == label)
        mix = rewards_for(self.recipe, stage)
        mix.bind(lambda: _decoder(self.recipe), self.folder)
        return mix


def _decoder(recipe: Recipe) -> Callable[..., str]:
    """The model's tokenizer, for rewards of single steps."""
    return load_policy(recipe.model, alphabet=task_for(recipe, recipe.stages[0]).alphabet, seed=recipe.seed).decode


class RewardActors:
    """The reward workers as the learner sees them. Asked from several threads."""

    def __init__(self, peers: tuple[Actor, ...], order: Session, timeout_s: float, phase: Phase) -> None:
        self.peers, self.order, self.timeout_s, self.phase = peers, order, timeout_s, phase
        self.news: list[str] = []
        self.at: dict[str, ProcessLocation] = {}
        self._turns = itertools.cycle(peers)
        self._lock = threading.Lock()
        self._down: set[str] = set()

    def open(self) -> None:
        """Waits until each of them knows the run."""
        for peer, ref in [(peer, peer.call("open", self.order)) for peer in self.peers]:
            try:
                self.at[peer.name] = result_of(ref, max(self.timeout_s, START_S))
                self.phase(peer.name, self.at[peer.name], "idle")
            except (ActorDied, ActorTimeout) as error:
                raise self._nobody(f"'{peer.name}' to start", error) from error

    def score(self, stage: str, reward: str, group: Group) -> list[Aspect]:
        """From the next worker; from another where that one dies or does not answer in time."""
        deadline: float | None = None
        while True:
            peer = self._next()
            try:
                said = self._call(peer, stage, reward, group)
            except (ActorDied, ActorTimeout) as error:
                self._missed(peer, error, f"'{reward}' of {group.prompt.id}")
                deadline = deadline or time.monotonic() + max(self.timeout_s, START_S)
                if time.monotonic() > deadline:
                    raise self._nobody(f"'{reward}' of {group.prompt.id}", error) from error
                time.sleep(0.5)
            else:
                if isinstance(said, dict):
                    raise error_from_json(said)
                if said is not None:
                    return said

    def _missed(self, peer: Actor, error: Exception, what: str) -> None:
        """One that died is being started again, which takes a while: it is told once."""
        died = isinstance(error, ActorDied)
        self.phase(peer.name, None, "died, being started again" if died else "silent")
        with self._lock:
            known = peer.name in self._down
            self._down.add(peer.name)
        if not known:
            why = "died" if died else f"has not answered for {self.timeout_s:g} s"
            self._tell(f"{peer.name} ({self.at.get(peer.name, 'starting')}) {why} while grading {what}; sent to another")

    def _call(self, peer: Actor, stage: str, reward: str, group: Group) -> Said:
        given = (self.order.session, stage, reward, group)
        self.phase(peer.name, None, "grading")
        said: Said = result_of(peer.call("score", *given), self.timeout_s)
        if said is None:  # it was started again, and must be told which run it works for
            self.at[peer.name] = result_of(peer.call("open", self.order), max(self.timeout_s, START_S))
            self._tell(f"{peer.name} was started again: {self.at[peer.name]}")
            said = result_of(peer.call("score", *given), self.timeout_s)
        self.phase(peer.name, self.at[peer.name], "idle")
        with self._lock:
            self._down.discard(peer.name)
        return said

    def _next(self) -> Actor:
        with self._lock:
            return next(self._turns)

    def _tell(self, line: str) -> None:
        with self._lock:
            self.news.append(line)

    def take_news(self) -> list[str]:
        """What has happened to workers since this was last asked."""
        with self._lock:
            news, self.news = self.news, []
        return news

    def _nobody(self, what: str, error: Exception) -> ClusterError:
        where = ", ".join(f"{p.name} ({self.at.get(p.name, 'not started')})" for p in self.peers)
        return ClusterError(
            "reward workers",
            f"the learner waits for {what}, and nobody answers",
            because=f"{str(error)[:200] or f'no answer within scale.timeout_s = {self.timeout_s:g} s'}; workers: {where}",
            fix="look at those nodes (`ray status`); raise scale.timeout_s where a reward takes longer",
        )


class RemoteRewardMix(RewardMix):
    """A stage's rewards, of which those that wait are asked of the workers."""

    def __init__(self, mix: RewardMix, stage: str, scorers: RewardActors, say: Say) -> None:
        super().__init__(mix.rewards, mix.rules)
        self.stage, self.scorers, self.say = stage, scorers, say

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        scored = super().score(groups)
        for line in self.scorers.take_news():
            self.say(line)
        return scored

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """Enough to keep every worker busy: each takes several groups side by side."""
        return ThreadPoolExecutor(AT_ONCE * len(self.scorers.peers), thread_name_prefix="oncurve-rewards")

    def _aspects(self, reward: Reward, group: Group) -> list[Aspect]:
        if reward not in self._waiting:
            return super()._aspects(reward, group)

        def ask() -> list[Aspect]:
            return self.scorers.score(self.stage, reward.name, group)

        return ask() if self._memory is None or not is_nondeterministic(reward) else self._memory.get_or_ask(reward, group, ask)
