"""A sampler: an engine in a process of its own, with weights that a learner pushes to it.

A thread writes what is asked for, in order; calls only leave work and fetch what is done, so that they are answered at once,
whatever is being written. Groups are pure functions of (weights, seed, step, prompt): which sampler writes one, and whether it
is asked for twice, changes nothing.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oncurve.cluster.messages import Bytes, GroupIndex, SampleJob, SamplerReply, Session, put_weights
from oncurve.cluster.ray_client import ProcessLocation, this_process
from oncurve.cluster.weight_broadcast import BroadcastGroup, GroupMembers
from oncurve.engines.base import build_engine
from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import OncurveError, error_to_json
from oncurve.models.loading.load import load_policy
from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import Group
from oncurve.training.learner.oom_retry import sample_with_retry
from oncurve.training.start import task_for


class SessionDropped(Exception):
    """What is being written is not wanted any more."""


class SamplerActor:
    """The actor. Of all methods, `open` alone may take long."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.session: str | None = None
        self.engine: NativeEngine | None = None
        self.group: GroupMembers | None = None
        self._changed = threading.Condition()
        self._forget()
        threading.Thread(target=self._work, name="oncurve-sampler", daemon=True).start()

    def _forget(self) -> None:
        self._jobs: dict[int, SampleJob] = {}
        self._known: set[int] = set()
        self._over: set[int] = set()
        self._done: dict[GroupIndex, Group] = {}
        self._at: SampleJob | None = None
        self._pushed: tuple[int, Mapping[str, Bytes | Tensor]] | None = None
        self._failure: Mapping[str, Any] | None = None
        self.version, self.rounds, self.phase = -1, 0, "idle"

    def open(self, order: Session) -> ProcessLocation | SamplerReply:
        """Loads the model, for a session; returns where this process is, or why it can't."""
        try:
            self._open(order)
        except OncurveError as error:
            return SamplerReply(None, failure=error_to_json(error, self.name))
        return this_process()

    def _open(self, order: Session) -> None:
        with self._changed:
            self.session = None  # what is being written is dropped
            self._forget()
        recipe = order.enter()
        torch.set_num_threads(recipe.threads or 1)
        self.phase = "loading the model"
        self.engine = self._build_engine(recipe)
        self.keeps_versions = recipe.scale.max_staleness > 0
        with self._changed:
            self._forget()
            self.session = order.session
            self._changed.notify_all()

    def _build_engine(self, recipe: Recipe) -> NativeEngine:
        if self.engine is not None:
            self.engine.close()
        alphabet = task_for(recipe, recipe.stages[0]).alphabet
        engine = build_engine(load_policy(recipe.model, alphabet=alphabet, seed=recipe.seed), recipe)
        engine.weight_source = PendingWeights(self)
        return engine

    def push(self, session: str, version: int, weights: Mapping[str, Bytes]) -> None:
        """The learner's weights, by the number of their push; in use from the next round of tokens on."""
        with self._changed:
            if session == self.session:
                self._pushed = (version, weights)
                self._changed.notify_all()

    def join(self, session: str, meeting: BroadcastGroup, rank: int) -> bool:
        """Takes this sampler's place in a group over which the learner will broadcast; False where it could not."""
        if session == self.session:
            self.group = GroupMembers(meeting, rank)
        return session == self.session

    def receive(self, session: str, version: int) -> bool:
        """As `push`, with what the learner broadcasts at this moment."""
        if session != self.session or self.group is None:
            return False
        assert self.engine is not None
        tensors = {name: torch.empty_like(p) for name, p in self.engine.policy.trainable.items()}
        self.group.broadcast(list(tensors.values()))
        with self._changed:
            self._pushed = (version, tensors)
            self._changed.notify_all()
        return True

    def submit(self, session: str, job: SampleJob) -> None:
        with self._changed:
            if session == self.session and job.number not in self._known and job.call not in self._over:
                self._known.add(job.number)
                self._jobs[job.number] = job
                self._changed.notify_all()

    def take(self, session: str, over: Collection[int], heard: Collection[GroupIndex], wait_s: float) -> SamplerReply:
        """Groups that are whole, as soon as there are any. Calls that are ``over`` want none any more."""
        with self._changed:
            if session != self.session:
                return SamplerReply(self.session)
            self._over |= set(over)
            self._jobs = {number: job for number, job in self._jobs.items() if job.call not in self._over}
            self._done = {p: group for p, group in self._done.items() if p not in heard and p[0] not in self._over}
            self._changed.wait_for(lambda: self._done or self._failure or session != self.session, wait_s)
            return SamplerReply(self.session, tuple(self._done.items()), self.phase, self.rounds, self._failure)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next() is not None)
                self._at = job = self._next()
            assert job is not None
            try:
                self._write(job)
            except SessionDropped:
                pass
            except BaseException as error:  # the learner is told, and decides
                if not isinstance(error, OncurveError):
                    traceback.print_exc()
                with self._changed:
                    self._failure = error_to_json(error, self.name)
            with self._changed:
                self._jobs.pop(job.number, None)
                self._at, self.phase = None, "idle"
                self._changed.notify_all()

    def _next(self) -> SampleJob | None:
        newest = self.version if self._pushed is None else self._pushed[0]
        ready = [job for job in self._jobs.values() if job.version <= newest]
        return min(ready, key=lambda job: (job.turn, job.number), default=None) if self._failure is None else None

    def _write(self, job: SampleJob) -> None:
        self.phase = "sampling"
        self.exchange()

        def whole(place: int, group: Group) -> None:
            with self._changed:
                if self._at is job:
                    kept = group if self.keeps_versions else without_versions(group)
                    self._done[job.call, job.places[place]] = kept
                    self._changed.notify_all()

        assert self.engine is not None
        sample_with_retry(self.engine, job.prompts, job.group_size, job.how, job.draws, on_group=whole)

    def exchange(self) -> bool:
        """Puts in what was pushed. Asked between rounds of tokens, where also a job that nobody wants any more ends."""
        with self._changed:
            self.rounds += 1
            if self.session is None or self._at is None or self._at.call in self._over:
                raise SessionDropped
            found, self._pushed = self._pushed, None
        if found is None or found[0] == self.version:
            return False
        assert self.engine is not None
        put_weights(self.engine.policy, found[1])
        self.version = found[0]
        return True


class PendingWeights:
    """The sampler as its engine sees it."""

    def __init__(self, sampler: SamplerActor) -> None:
        self.sampler = sampler

    @property
    def version(self) -> int:
        return self.sampler.version

    def __call__(self) -> bool:
        return self.sampler.exchange()


def without_versions(group: Group) -> Group:
    """As a run in one process writes it down: one version, which goes without saying."""
    return replace(group, completions=tuple(replace(c, versions=None) for c in group.completions))
