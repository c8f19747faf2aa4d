"""8-bit moments: follow AdamW, with updates of the same length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


GRADIENTS: dict[str, Callable[[int], Tensor]] = {
    "one scale": lambda size: torch.ones(size),
    "two decades in a block": lambda size: 10 ** (-2 * torch.rand(size, generator=torch.Generator().manual_seed(1))),
    "three decades in a block": lambda size: 10 ** (-3 * torch.rand(size, generator=torch.Generator().manual_seed(1))),
}


def lengths_beside_float32(scales: Tensor, updates: int, beta2: float, mean: float = 0.0, density: float = 1.0) -> list[float]:
    """Length of int8's update over float32's AdamW, at each update, both on the same random gradients."""
    pair = [nn.Parameter(torch.zeros_like(scales)) for _ in range(2)]
    settings: Any = {"lr": 1.0, "betas": (0.9, beta2), "eps": 1e-12}
    int8, float32 = Adam8bit([pair[0]], **settings), torch.optim.AdamW([pair[1]], weight_decay=0.0, **settings)
    dice, ratios = torch.Generator().manual_seed(0), []
    for _ in range(updates):
        gradient = scales * (mean + torch.randn(len(scales), generator=dice))
        gradient *= torch.rand(len(scales), generator=dice) < density
        before = [p.detach().clone() for p in pair]
        for p, optimiser in zip(pair, (int8, float32), strict=True):
            p.grad = gradient.clone()
            optimiser.step()
        now = [float((p.detach() - old).norm()) for p, old in zip(pair, before, strict=True)]
        ratios.append(now[0] / now[1])
    return ratios


@pytest.mark.parametrize("scales", GRADIENTS)
@pytest.mark.parametrize(
    ("updates", "beta2", "mean", "density"),
    [
        (150, 0.999, 0.0, 1.0),
        (150, 0.99, 0.3, 1.0),
        (150, 0.999, 0.0, 0.3),
        pytest.param(2000, 0.999, 0.0, 1.0, marks=pytest.mark.slow),
        pytest.param(2000, 0.999, 0.3, 1.0, marks=pytest.mark.slow),
        pytest.param(2000, 0.95, 0.0, 0.1, marks=pytest.mark.slow),
    ],
)
def test_an_update_is_as_long_as_float32s(scales: str, updates: int, beta2: float, mean: float, density: float) -> None:
    """Rounded up, √v would climb without end: 88 % of the length after 50 updates, 44 % after 800."""
    ratios = lengths_beside_float32(GRADIENTS[scales](40 * BLOCK), updates, beta2, mean, density)
    assert max(abs(ratio - 1) for ratio in ratios) < 0.02


def test_the_second_moment_decays_when_gradients_vanish() -> None:
    """After large gradients come small ones: both optimisers forget at the same rate. To nearest, codes would never fall."""
    pair = [nn.Parameter(torch.zeros(8 * BLOCK)) for _ in range(2)]
    settings: Any = {"lr": 1.0, "betas": (0.9, 0.99), "eps": 1e-12}
    int8, float32 = Adam8bit([pair[0]], **settings), torch.optim.AdamW([pair[1]], weight_decay=0.0, **settings)
    dice = torch.Generator().manual_seed(0)
    for update in range(400):
        gradient = torch.randn(8 * BLOCK, generator=dice) * (1.0 if update < 50 else 0.05)
        for p, optimiser in zip(pair, (int8, float32), strict=True):
            p.grad = gradient.clone()
            optimiser.step()
    state = int8.state[pair[0]]
    root = (state["exp_avg_sq"].float() / 255) ** 3 * state["root_avg_sq_scale"]
    expected = float32.state[pair[1]]["exp_avg_sq"].sqrt()
    assert abs(float(root.mean() / expected.mean()) - 1) < 0.02


def test_no_gradient_is_divided_by_zero() -> None:
    """A gradient far below its block's largest keeps a v of at least one code, and takes no larger step than float32's."""
    p = nn.Parameter(torch.zeros(2))
    optimiser = Adam8bit([p], lr=0.1, betas=(0.9, 0.999), eps=0.0)
    for _ in range(20):
        before = p.detach().clone()
        p.grad = torch.tensor([1e4, 1e-6])
        optimiser.step()
        steps = (p.detach() - before).abs()
        assert torch.isfinite(steps).all()
        torch.testing.assert_close(steps[0], torch.tensor(0.1), rtol=0.02, atol=0.0)
        assert steps[1] <= 0.1001


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
