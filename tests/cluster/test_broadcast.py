"""Weights by broadcast, as between GPUs, here over gloo: samplers in real actors sample what the policy samples."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from oncurve.cluster import ray_client
from oncurve.cluster.messages import ClusterSession
from oncurve.cluster.remote_engine import RemoteEngine
from oncurve.cluster.sampler_actor import SamplerActor
from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.models.loading.load import load_policy
from oncurve.models.policy import Policy
from oncurve.training.start import task_for, with_machine_defaults
from tests.distributed.runs import until
from tests.engines.native.test_engine import bits
from tests.faults.cases import GRPO, recipe

pytestmark = pytest.mark.slow
RUN = with_machine_defaults(recipe(GRPO, scale={"samplers": 2, "timeout_s": 60.0}))


@pytest.fixture
def samplers(cluster: Any) -> Iterator[list[ray_client.Actor]]:
    ray_client.connect(cluster.address)
    actors = [ray_client.start_actor(f"sampler-{i}", SamplerActor, {"CPU": 1.0}) for i in range(2)]
    yield actors
    for actor in actors:
        actor.kill(restart=False)
    ray_client.disconnect()


@torch.no_grad()
def move(policy: Policy, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    for p in policy.model.parameters():
        p.add_(torch.randn(p.shape, generator=dice), alpha=0.3)


def test_broadcast_weights_are_the_ones_that_are_sampled_from(samplers: list[ray_client.Actor], tmp_path: Path) -> None:
    """Also after a member has died and come back: the group is rebuilt, and meanwhile weights go through the object store."""
    events: list[str] = []
    task = task_for(RUN, RUN.stages[0])
    policy = load_policy(RUN.model, alphabet=task.alphabet, seed=RUN.seed)
    session = ClusterSession("here", RUN.model_dump_json(exclude_none=True), tmp_path, Path.cwd())
    engine = RemoteEngine(policy, RUN, samplers, session, events.append, lambda *_: None)
    engine.backend = "gloo"
    prompts, sampling = [task.train_prompt(i) for i in range(6)], RUN.stages[0].sampling  # type: ignore[union-attr]
    steps = count(1)

    def members() -> int:
        """Samples one more step, and returns the number of samplers that got its weights by broadcast."""
        step = next(steps)
        move(policy, step)
        ours = engine.sample(prompts, 4, sampling, SampleKey(0, step))
        plain = NativeEngine(policy, RUN.engine).sample(prompts, 4, sampling, SampleKey(0, step))
        assert [[bits(c) for c in g.completions] for g in ours] == [[bits(c) for c in g.completions] for g in plain]
        return 0 if engine.broadcast_group is None else len(engine.broadcast_group[0])

    until(lambda: members() == 2, 120)
    samplers[0].kill(restart=True)
    until(lambda: members() < 2, 60)
    until(lambda: members() == 2, 120)
    assert any("died" in line or "failed" in line for line in events)
