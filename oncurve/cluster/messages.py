"""What learner, samplers and reward workers send to each other: plain records, carried by Ray between processes of one user."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oncurve.cluster.ray_client import Actor, ProcessLocation
from oncurve.engines.base import SampleKey
from oncurve.models.policy import Policy
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Group, Prompt

Bytes = NDArray[np.uint8]
GroupIndex = tuple[int, int]
"""A group: the id of the request that it belongs to, and its index among that request's prompts."""
LogEvent = Callable[[str], None]
"""Writes a line to the run's events."""
SetPhase = Callable[[str, ProcessLocation | None, str], None]
"""Publishes an actor's phase: its name, its process if known, the phase."""


@dataclass(frozen=True, slots=True)
class ClusterSession:
    """The run that an actor works for. Each start of the learner opens a new session; actors drop the work of older ones."""

    id: str
    recipe: str
    """As JSON."""
    folder: Path
    directory: Path

    def load_recipe(self) -> Recipe:
        """The recipe. Changes to the driver's working directory, which file names in the recipe are relative to."""
        if self.directory.is_dir():
            os.chdir(self.directory)
        return parse_recipe(json.loads(self.recipe))


@dataclass(frozen=True, slots=True)
class Actors:
    """The actors that work for the learners."""

    samplers: tuple[Actor, ...] = ()
    reward_workers: tuple[Actor, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Groups of one request that one sampler is to write, with weights of push ``min_version`` or newer ones.

    Batches with a lower ``priority`` come first: what the learner waits for, before what is prefetched.
    """

    id: int
    request_id: int
    priority: int
    indices: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    group_size: int
    sampling: Sampling
    key: SampleKey
    min_version: int


@dataclass(frozen=True, slots=True)
class SamplerReply:
    """A sampler's answer to a poll. It repeats a group until the learner has acknowledged it."""

    session_id: str | None
    groups: Sequence[tuple[GroupIndex, Group]] = ()
    phase: str = "idle"
    rounds: int = 0
    """Decode rounds so far: a sampler with work whose count does not change hangs."""
    failure: Mapping[str, Any] | None = None


def weights_as_bytes(policy: Policy) -> dict[str, Bytes]:
    """The trainable weights for the object store, which shares numpy arrays without a copy but has no bfloat16."""
    flat = {name: p.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for name, p in policy.trainable.items()}
    return {name: tensor.numpy() for name, tensor in flat.items()}


@torch.no_grad()
def copy_weights(policy: Policy, weights: Mapping[str, Bytes | Tensor]) -> None:
    """Copies weights into the policy's tensors in place, since the sampler's CUDA graphs read those addresses."""
    for name, p in policy.trainable.items():
        new = weights[name]
        p.copy_(new if isinstance(new, Tensor) else torch.from_numpy(new.copy()).view(p.dtype).view(p.shape))
