"""Weights by broadcast, as between GPUs, here over gloo: samplers in real actors write with them what the policy writes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from oncurve.cluster import door
from oncurve.cluster.engine import RemoteEngine
from oncurve.cluster.orders import Order
from oncurve.cluster.sampler import Sampler
from oncurve.engines.native import Draws, NativeEngine
from oncurve.models.load import load_policy
from oncurve.models.policy import Policy
from oncurve.train.start import frozen, task_for
from tests.engines.test_native import bits
from tests.faults.cases import GRPO, recipe
from tests.scale.runs import until

pytestmark = pytest.mark.slow
RUN = frozen(recipe(GRPO, scale={"samplers": 2, "timeout_s": 60.0}))


@pytest.fixture
def peers(cluster: Any) -> Iterator[list[door.Peer]]:
    door.connect(cluster.address)
    made = [door.put_up(f"sampler-{i}", Sampler, {"CPU": 1.0}) for i in range(2)]
    yield made
    for peer in made:
        peer.kill(for_good=True)
    door.leave()


@torch.no_grad()
def move(policy: Policy, seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    for p in policy.model.parameters():
        p.add_(torch.randn(p.shape, generator=dice), alpha=0.3)


def test_broadcast_weights_are_the_ones_that_are_sampled_from(peers: list[door.Peer], tmp_path: Path) -> None:
    """Also after a member has died and come back: the group is made anew, and what could not be broadcast came otherwise."""
    told: list[str] = []
    task = task_for(RUN, RUN.stages[0])
    policy = load_policy(RUN.model, alphabet=task.alphabet, seed=RUN.seed)
    order = Order("here", RUN.model_dump_json(exclude_none=True), tmp_path, Path.cwd())
    engine = RemoteEngine(policy, RUN, peers, order, told.append, lambda *_: None)
    engine.backend = "gloo"
    prompts, how = [task.train_prompt(i) for i in range(6)], RUN.stages[0].sampling  # type: ignore[union-attr]
    steps = count(1)

    def members() -> int:
        """How many samplers the weights of one more step were broadcast to."""
        step = next(steps)
        move(policy, step)
        ours = engine.sample(prompts, 4, how, Draws(0, step))
        plain = NativeEngine(policy, RUN.engine).sample(prompts, 4, how, Draws(0, step))
        assert [[bits(c) for c in g.completions] for g in ours] == [[bits(c) for c in g.completions] for g in plain]
        return 0 if engine.group is None else len(engine.group[0])

    until(lambda: members() == 2, 120)
    peers[0].kill(for_good=False)
    until(lambda: members() < 2, 60)
    until(lambda: members() == 2, 120)
    assert any("died" in line or "failed" in line for line in told)
