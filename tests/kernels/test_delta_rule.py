"""The kernel of the gated delta rule against transformers' own function and against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from oncurve.kernels.delta_rule import can_step, delta_rule_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inputs(slots: int, heads: int, keys: int, values: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = noise(slots, heads, keys), noise(slots, heads, keys), noise(slots, heads, values)
    return q, k, v, -noise(slots, heads).abs(), noise(slots, heads).sigmoid(), noise(slots, heads, keys, values)


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, active: Tensor, normalise: bool
) -> Tensor:  # fmt: skip
    q, k, v, g, beta = (x.to(DEVICE) for x in (q, k, v, g, beta))
    return delta_rule_step(q, k, v, g, beta, state, active, normalise)


@pytest.mark.parametrize(("keys", "values"), [(16, 16), (16, 64), (32, 32)])
@pytest.mark.parametrize("normalise", [True, False])
def test_a_step_is_transformers_own(keys: int, values: int, normalise: bool) -> None:
    q, k, v, g, beta, state = inputs(3, 2, keys, values)
    theirs, after = torch_recurrent_gated_delta_rule(
        q[:, None], k[:, None], v[:, None], g=g[:, None], beta=beta[:, None], initial_state=state.clone(),
        output_final_state=True, use_qk_l2norm_in_kernel=normalise,
    )  # fmt: skip
    ours, active = state.to(DEVICE), torch.ones(3, dtype=torch.bool, device=DEVICE)
    out = step(q, k, v, g, beta, ours, active, normalise)
    torch.testing.assert_close(out.cpu(), theirs[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.cpu(), after, rtol=1e-5, atol=1e-5)


def test_a_step_in_float64() -> None:
    q, k, v, g, beta, state = inputs(2, 2, 16, 32)
    exact_q, exact_k, exact_v, exact = (x.double() for x in (q, k, v, state))
    exact = exact * g.double().exp()[..., None, None]
    delta = (exact_v - (exact * exact_k[..., None]).sum(-2)) * beta.double()[..., None]
    exact = exact + exact_k[..., None] * delta[..., None, :]
    ours, active = state.to(DEVICE), torch.ones(2, dtype=torch.bool, device=DEVICE)
    out = step(q, k, v, g, beta, ours, active, False)
    torch.testing.assert_close(out.cpu().double(), (exact * exact_q[..., None]).sum(-2) / 4, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.cpu().double(), exact, rtol=1e-5, atol=1e-5)


def test_an_idle_slot_keeps_its_state() -> None:
    q, k, v, g, beta, state = inputs(3, 2, 16, 16)
    ours = state.to(DEVICE, copy=True)
    out = step(q, k, v, g, beta, ours, torch.tensor([True, False, True], device=DEVICE), True)
    ours = ours.cpu()
    assert torch.equal(ours[1], state[1])
    assert not torch.equal(ours[0], state[0])
    assert not out[1].any()


def test_which_states_fit() -> None:
    state = torch.zeros(2, 3, 16, 32)
    assert can_step(state)
    assert not can_step(state.bfloat16())
    assert not can_step(torch.zeros(2, 3, 24, 32))
    assert not can_step(state.transpose(2, 3))
