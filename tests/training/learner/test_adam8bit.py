"""8-bit moments: follow AdamW up to rounding, and never make a larger step than float32 would."""

from __future__ import annotations

import torch
from torch import nn

from oncurve.recipe.schema.sections import Guard
from oncurve.recipe.schema.sections import Optimiser as Settings
from oncurve.training.learner.adam8bit import BLOCK, Adam8bit
from oncurve.training.learner.optimiser import Optimiser


def test_the_first_update_is_adams_own() -> None:
    """m = (1 − β₁)g and √v = √(1 − β₂)|g| before any rounding: the step is lr · sign(g), up to eps."""
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([2.0, -0.5, 1e-3])
    Adam8bit([p], lr=0.1, betas=(0.9, 0.999), eps=1e-12).step()
    torch.testing.assert_close(p.detach(), torch.tensor([-0.1, 0.1, -0.1]))


def test_it_follows_adamw_down_a_valley() -> None:
    """A badly scaled quadratic: after 200 updates both are near its floor."""
    scale = torch.logspace(-1, 1, 3 * BLOCK + 5)
    start = torch.randn(scale.shape, generator=torch.Generator().manual_seed(0))
    result = []
    for moments in ("float32", "int8"):
        net = nn.Module()
        net.x = nn.Parameter(start.clone())
        optimiser = Optimiser(net, Settings(learning_rate=0.02, moments=moments, max_grad_norm=0.0), 200)
        for _ in range(200):
            optimiser.zero_grad()
            (scale * net.x.square()).sum().backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        result.append(net.x.detach())
    before = float((scale * start.square()).sum())
    losses = [float((scale * x.square()).sum()) for x in result]
    assert losses[0] < 1e-2 * before
    assert losses[1] < 2e-2 * before


def test_a_small_gradient_next_to_a_large_one_takes_no_larger_step() -> None:
    """√v is rounded up: in a block with a large one the small one's divisor grows, so that its step shrinks."""
    sizes = torch.tensor([100.0, 1e-3])
    steps = {}
    for moments in ("float32", "int8"):
        net = nn.Module()
        net.x = nn.Parameter(torch.zeros(2))
        optimiser = Optimiser(net, Settings(learning_rate=0.1, moments=moments, max_grad_norm=0.0, guard=Guard(spike=0)), 5)
        for _ in range(5):
            net.x.grad = sizes.clone()
            before = net.x.detach().clone()
            optimiser.step()
            steps[moments] = (net.x.detach() - before).abs()
    assert steps["int8"][1] < steps["float32"][1]
    torch.testing.assert_close(steps["int8"][0], steps["float32"][0], rtol=0.02, atol=0)


def test_its_state_is_small_and_comes_back_from_a_checkpoint() -> None:
    torch.manual_seed(0)
    nets = [nn.Linear(64, 64) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    settings = Settings(learning_rate=0.01, moments="int8")
    first, second = (Optimiser(net, settings, 10) for net in nets)
    gradients = [torch.randn(64, 64, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    nets[0].weight.grad, nets[0].bias.grad = gradients[0].clone(), gradients[0][0].clone()
    first.step()
    state = {name: value.clone() for name, value in first.state().items()}
    held = sum(v.numel() * v.element_size() for name, v in state.items() if name.startswith("weight/"))
    assert held < 2.2 * 64 * 64
    nets[1].load_state_dict(nets[0].state_dict())
    second.load_state(state)
    for net, optimiser in zip(nets, (first, second), strict=True):
        net.weight.grad, net.bias.grad = gradients[1].clone(), gradients[1][0].clone()
        optimiser.step()
    assert torch.equal(nets[0].weight, nets[1].weight)
