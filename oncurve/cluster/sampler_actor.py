"""A sampler: an engine in its own process, with weights that a learner pushes to it.

One thread samples the submitted batches in order of priority. Calls only submit work and fetch what is done, so they return
within a second or two, whatever is being sampled. A group is a pure function of (weights, seed, step, prompt), so it makes no
difference which sampler samples it, or whether two do.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oncurve.cluster.messages import Bytes, ClusterSession, GroupIndex, SampleBatch, SamplerReply, copy_weights
from oncurve.cluster.ray_client import ProcessLocation, this_process
from oncurve.cluster.weight_broadcast import BroadcastAddress, BroadcastGroup
from oncurve.engines.base import Engine, build_engine
from oncurve.errors import OncurveError, error_to_json
from oncurve.models.loading.load import load_policy
from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import Group
from oncurve.training.learner.oom_retry import sample_with_retry
from oncurve.training.start import task_for


class BatchCancelled(Exception):
    """The batch that is being sampled is not needed any more."""


class SamplerActor:
    """The Ray actor. Only `open` may take long."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.session_id: str | None = None
        self.engine: Engine | None = None
        self.broadcast_group: BroadcastGroup | None = None
        self._changed = threading.Condition()
        self._reset()
        threading.Thread(target=self._run, name="oncurve-sampler", daemon=True).start()

    def _reset(self) -> None:
        self._batches: dict[int, SampleBatch] = {}
        self._submitted: set[int] = set()
        self._ended_requests: set[int] = set()
        self._done: dict[GroupIndex, Group] = {}
        self._current: SampleBatch | None = None
        self._pushed: tuple[int, Mapping[str, Bytes | Tensor]] | None = None
        self._failure: Mapping[str, Any] | None = None
        self.version, self.rounds, self.phase = -1, 0, "idle"

    def open(self, session: ClusterSession) -> ProcessLocation | SamplerReply:
        """Loads the model for a session. Returns this process's location, or the failure."""
        try:
            self._open(session)
        except OncurveError as error:
            return SamplerReply(None, failure=error_to_json(error, self.name))
        return this_process()

    def _open(self, session: ClusterSession) -> None:
        with self._changed:
            self.session_id = None  # cancels the current batch
            self._reset()
        recipe = session.load_recipe()
        torch.set_num_threads(recipe.threads or 1)
        self.phase = "loading the model"
        self.engine = self._build_engine(recipe)
        self.keeps_versions = recipe.scale.max_staleness > 0
        with self._changed:
            self._reset()
            self.session_id = session.id
            self._changed.notify_all()

    def _build_engine(self, recipe: Recipe) -> Engine:
        if self.engine is not None:
            self.engine.close()
        alphabet = task_for(recipe, recipe.stages[0]).alphabet
        engine = build_engine(load_policy(recipe.model, alphabet=alphabet, seed=recipe.seed), recipe)
        engine.weight_source = PendingWeights(self)
        return engine

    def push_weights(self, session_id: str, version: int, weights: Mapping[str, Bytes]) -> None:
        """Takes the learner's weights with the number of the push; the engine uses them from the next decode round on."""
        with self._changed:
            if session_id == self.session_id:
                self._pushed = (version, weights)
                self._changed.notify_all()

    def join_broadcast(self, session_id: str, address: BroadcastAddress, rank: int) -> bool:
        """Joins a group over which the learner will broadcast weights; False if this sampler has another session."""
        if session_id == self.session_id:
            self.broadcast_group = BroadcastGroup(address, rank)
        return session_id == self.session_id

    def receive_broadcast(self, session_id: str, version: int) -> bool:
        """Like `push_weights`, but the weights come from the broadcast that the learner is running. False if this sampler has
        another session or has not joined a broadcast group."""
        if session_id != self.session_id or self.broadcast_group is None:
            return False
        assert self.engine is not None
        tensors = {name: torch.empty_like(p) for name, p in self.engine.policy.trainable.items()}
        self.broadcast_group.broadcast(list(tensors.values()))
        with self._changed:
            self._pushed = (version, tensors)
            self._changed.notify_all()
        return True

    def submit(self, session_id: str, batch: SampleBatch) -> None:
        with self._changed:
            is_new = batch.id not in self._submitted and batch.request_id not in self._ended_requests
            if session_id == self.session_id and is_new:
                self._submitted.add(batch.id)
                self._batches[batch.id] = batch
                self._changed.notify_all()

    def poll(
        self, session_id: str, ended_requests: Collection[int], acknowledged: Collection[GroupIndex], wait_s: float
    ) -> SamplerReply:
        """Complete groups, as soon as there are any. Cancels ``ended_requests`` and drops ``acknowledged`` groups."""
        with self._changed:
            if session_id != self.session_id:
                return SamplerReply(self.session_id)
            self._ended_requests |= set(ended_requests)
            ended = self._ended_requests
            self._batches = {number: batch for number, batch in self._batches.items() if batch.request_id not in ended}
            self._done = {i: group for i, group in self._done.items() if i not in acknowledged and i[0] not in ended}
            self._changed.wait_for(lambda: self._done or self._failure or session_id != self.session_id, wait_s)
            return SamplerReply(self.session_id, tuple(self._done.items()), self.phase, self.rounds, self._failure)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next_batch() is not None)
                self._current = batch = self._next_batch()
            assert batch is not None
            try:
                self._sample(batch)
            except BatchCancelled:
                pass
            except BaseException as error:  # the learner gets the error and decides
                if not isinstance(error, OncurveError):
                    traceback.print_exc()
                with self._changed:
                    self._failure = error_to_json(error, self.name)
            with self._changed:
                self._batches.pop(batch.id, None)
                self._current, self.phase = None, "idle"
                self._changed.notify_all()

    def _next_batch(self) -> SampleBatch | None:
        if self._failure is not None:
            return None
        newest = self.version if self._pushed is None else self._pushed[0]
        ready = [batch for batch in self._batches.values() if batch.min_version <= newest]
        return min(ready, key=lambda batch: (batch.priority, batch.id), default=None)

    def _sample(self, batch: SampleBatch) -> None:
        self.phase = "sampling"
        self.update_weights()

        def on_group(position: int, group: Group) -> None:
            with self._changed:
                if self._current is batch:
                    index = batch.request_id, batch.indices[position]
                    self._done[index] = group if self.keeps_versions else without_versions(group)
                    self._changed.notify_all()

        assert self.engine is not None
        sample_with_retry(self.engine, batch.prompts, batch.group_size, batch.sampling, batch.key, on_group=on_group)

    def update_weights(self) -> bool:
        """Copies pushed weights into the policy; True if there were new ones. Called between decode rounds.

        Raises `BatchCancelled` if the current batch is not needed any more.
        """
        with self._changed:
            self.rounds += 1
            if self.session_id is None or self._current is None or self._current.request_id in self._ended_requests:
                raise BatchCancelled
            pushed, self._pushed = self._pushed, None
        if pushed is None or pushed[0] == self.version:
            return False
        assert self.engine is not None
        copy_weights(self.engine.policy, pushed[1])
        self.version = pushed[0]
        return True


class PendingWeights:
    """The sampler as its engine's `WeightSource`."""

    def __init__(self, sampler: SamplerActor) -> None:
        self.sampler = sampler

    @property
    def version(self) -> int:
        return self.sampler.version

    def __call__(self) -> bool:
        return self.sampler.update_weights()


def without_versions(group: Group) -> Group:
    """The group without weight versions: in a synchronous run every token has the same one, and none is recorded."""
    return replace(group, completions=tuple(replace(c, versions=None) for c in group.completions))
