"""AdamW against torch's own, schedules by hand, bfloat16 masters, and gradients that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from oncurve.distributed.world import World
from oncurve.recipe.schema.sections import Optimiser as Settings
from oncurve.tensor_range import ElementRange
from oncurve.training.learner.optimiser import Optimiser, learning_rate_at
from oncurve.training.learner.sharded_optimiser import ShardedOptimiser


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).to(dtype)


def give_gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@pytest.mark.parametrize(
    ("options", "update", "share"),
    [
        ({}, 0, 1.0),
        ({}, 99, 1.0),
        ({"warmup_steps": 3}, 0, 1 / 4),
        ({"warmup_steps": 3}, 2, 3 / 4),
        ({"warmup_steps": 3}, 3, 1.0),
        ({"schedule": "linear"}, 0, 1.0),
        ({"schedule": "linear"}, 5, 0.5),
        ({"schedule": "linear"}, 9, 0.1),
        ({"schedule": "linear", "final_share": 0.2}, 5, 0.6),
        ({"schedule": "linear", "warmup_steps": 2}, 6, 0.5),
        ({"schedule": "cosine"}, 0, 1.0),
        ({"schedule": "cosine"}, 5, 0.5),
        ({"schedule": "cosine", "final_share": 0.1}, 10, 0.1),
        ({"schedule": "linear"}, 25, 0.0),
        ({"schedule": "cosine"}, 25, 0.0),
    ],
)
def test_schedules_by_hand(options: dict[str, object], update: int, share: float) -> None:
    """Of ten updates; beyond the last the rate stays where it ended."""
    settings = Settings.model_validate({"learning_rate": 0.01, **options})
    assert learning_rate_at(settings, update, 10) == pytest.approx(0.01 * share, abs=1e-12)


def test_updates_are_those_of_torch_with_decay_on_matrices_only() -> None:
    settings = Settings(learning_rate=0.02, schedule="linear", weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6, max_grad_norm=2.0)
    ours, theirs = model(), model()
    optimiser = Optimiser(ours, settings, updates=6)
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1.0,
        betas=(0.8, 0.95),
        eps=1e-6,
    )
    for n in range(6):
        give_gradients(ours, n)
        give_gradients(theirs, n)
        norm = float(nn.utils.clip_grad_norm_(theirs.parameters(), 2.0))
        for group in reference.param_groups:
            group["lr"] = 0.02 * (1 - n / 6)
        reference.step()
        update = optimiser.step()
        assert update.grad_norm == pytest.approx(norm, rel=1e-6)
        assert norm > 2.0, "clipping is at work"
        assert update.learning_rate == pytest.approx(0.02 * (1 - n / 6))
        assert not update.skipped
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_no_clipping_at_zero() -> None:
    net = model()
    optimiser = Optimiser(net, Settings(max_grad_norm=0.0), 1)
    give_gradients(net, 0)
    before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    optimiser.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True) if p.grad is not None)


def test_bfloat16_weights_follow_float32_masters() -> None:
    """An update of 1e-4 is below bfloat16's resolution near 1: without masters 100 of them would move nothing."""
    net = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.ones_(net.weight)
    twin = nn.Linear(4, 4, bias=False)
    nn.init.ones_(twin.weight)
    settings = Settings(learning_rate=1e-4)
    low, high = Optimiser(net, settings, 100), Optimiser(twin, settings, 100)
    for _ in range(100):
        net.weight.grad, twin.weight.grad = torch.ones_like(net.weight), torch.ones_like(twin.weight)
        low.step()
        high.step()
    torch.testing.assert_close(low.masters[0].data, twin.weight.data)
    assert torch.equal(net.weight, twin.weight.bfloat16())
    assert float(net.weight[0, 0]) == pytest.approx(0.99, abs=4e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_moves_nothing(bad: float, dtype: torch.dtype) -> None:
    net = model(dtype)
    optimiser = Optimiser(net, Settings(learning_rate=0.1, schedule="linear"), 10)
    give_gradients(net, 0)
    optimiser.step()
    weights = [p.detach().clone() for p in net.parameters()]
    state = {name: value.clone() for name, value in optimiser.state().items()}
    give_gradients(net, 1)
    next(net.parameters()).grad.view(-1)[3] = bad  # type: ignore[union-attr]
    update = optimiser.step()
    assert update.skipped
    assert not math.isfinite(update.grad_norm)
    assert all(torch.equal(p, w) for p, w in zip(net.parameters(), weights, strict=True))
    after = optimiser.state()
    assert all(torch.equal(value, after[name]) for name, value in state.items() if name != "updates_done")
    assert int(after["updates_done"]) == 2, "the schedule goes on"
    give_gradients(net, 2)
    assert not optimiser.step().skipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_brings_an_optimiser_back_to_the_bit(dtype: torch.dtype) -> None:
    one, two = model(dtype), model(dtype)
    settings = Settings(learning_rate=0.03, schedule="cosine", weight_decay=0.01)
    first = Optimiser(one, settings, 8)
    for n in range(4):
        give_gradients(one, n)
        first.step()
    state = {name: value.clone() for name, value in first.state().items()}
    two.load_state_dict(one.state_dict())
    second = Optimiser(two, settings, 8)
    second.load_state(state)
    for n in range(4, 8):
        for net, optimiser in ((one, first), (two, second)):
            give_gradients(net, n)
            optimiser.step()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert all(torch.equal(value, second.state()[name]) for name, value in first.state().items())


@pytest.mark.parametrize(("moments", "expected"), [("float32", "meta"), ("int8", "cpu")])
def test_a_resumed_shard_has_its_step_count_where_adam_reads_it(moments: str, expected: str) -> None:
    """On a GPU, torch's fused AdamW would read a step count in CPU memory by its address. Here "meta" stands for the GPU."""
    world = World()
    world.shard = "optimiser"
    optimiser = ShardedOptimiser(nn.Linear(3, 2), Settings.model_validate({"moments": moments}), 1, world)
    weight = optimiser.weights[0]
    step = optimiser._local_moment(torch.tensor(3.0), weight, ElementRange(0, weight.numel()), torch.device("meta"))
    assert step.device.type == expected
