"""What learner, samplers and reward workers say to each other: plain records, sent by Ray between processes of one user."""

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
from oncurve.engines.native.engine import SampleKey
from oncurve.models.policy import Policy
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Group, Prompt

Bytes = NDArray[np.uint8]
GroupIndex = tuple[int, int]
"""A group by the call of ``sample`` that asked for it, and its number among that call's prompts."""
Say = Callable[[str], None]
"""Tells a line of the run's log."""
Phase = Callable[[str, ProcessLocation | None, str], None]
"""Who, where as far as that is known, and in which phase."""


@dataclass(frozen=True, slots=True)
class Session:
    """The run that an actor works for. Each learner that begins opens a session; what is left of another is dropped."""

    session: str
    recipe: str
    folder: Path
    directory: Path

    def enter(self) -> Recipe:
        """The recipe, read where the driver reads it: its files are named from there."""
        if self.directory.is_dir():
            os.chdir(self.directory)
        return parse_recipe(json.loads(self.recipe))


@dataclass(frozen=True, slots=True)
class Actors:
    """Who works for a learner."""

    samplers: tuple[Actor, ...] = ()
    scorers: tuple[Actor, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleJob:
    """Groups for one sampler to write, all of one call. It begins with weights of push number ``version``, or newer ones.

    Jobs of a lower ``turn`` come first: what the learner waits for, before what is written ahead.
    """

    number: int
    call: int
    turn: int
    places: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    group_size: int
    how: Sampling
    draws: SampleKey
    version: int


@dataclass(frozen=True, slots=True)
class SamplerReply:
    """What a sampler says when it is asked. A group is said again until it is known to have been heard."""

    session: str | None
    groups: Sequence[tuple[GroupIndex, Group]] = ()
    phase: str = "idle"
    rounds: int = 0
    """Rounds of tokens that it has decoded: a sampler at work on which this stands still hangs."""
    failure: Mapping[str, Any] | None = None


def as_bytes(policy: Policy) -> dict[str, Bytes]:
    """For the object store: plain memory, whatever the type of the numbers."""
    flat = {name: p.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for name, p in policy.trainable.items()}
    return {name: tensor.numpy() for name, tensor in flat.items()}


@torch.no_grad()
def put_weights(policy: Policy, found: Mapping[str, Bytes | Tensor]) -> None:
    """Into the very tensors that the sampler decodes with."""
    for name, p in policy.trainable.items():
        new = found[name]
        p.copy_(new if isinstance(new, Tensor) else torch.from_numpy(new.copy()).view(p.dtype).view(p.shape))
