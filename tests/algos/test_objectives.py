"""The table of objectives: what each line composes, the terms beside the surrogate, and what the outputs say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from oncurve.algos.objectives import OBJECTIVES, LossInputs, LossSettings, Objective, with_clip
from oncurve.algos.reductions import LossDenominators
from oncurve.algos.surrogates import Clipped
from oncurve.errors import RecipeError
from oncurve.objective_specs import ObjectiveName
from tests.algos.builders import PLAIN, double, micro_batch


def gradient(objective: Objective, inputs: LossInputs, settings: LossSettings = PLAIN) -> Tensor:
    leaf_M = inputs.logp_new_M.detach().clone().requires_grad_()
    (grad_M,) = torch.autograd.grad(objective.loss(replace(inputs, logp_new_M=leaf_M), settings).loss, leaf_M)
    return grad_M


def test_the_table_and_the_schema_agree() -> None:
    assert set(OBJECTIVES) == set(get_args(ObjectiveName))


def test_grpo_by_hand() -> None:
    """Ratios 2 and 0.5 against advantages 1 and −1, then one token at ratio 1: clip at 0.2 on each side."""
    inputs = micro_batch(
        [2, 1],
        logp_new_M=double([-1.0, -2.0, -3.0]),
        logp_old_M=double([-1 - math.log(2), -2 + math.log(2), -3.0]),
        advantage_M=double([1.0, -1.0, 2.0]),
    )
    out = OBJECTIVES["grpo"].loss(inputs, PLAIN)
    assert out.ratio_M.tolist() == pytest.approx([2.0, 0.5, 1.0])
    assert out.clipped_M.tolist() == [True, True, False]
    assert out.clipped_low_M.tolist() == [False, True, False]
    # −((1.2 − 0.8)/2 + 2)/2
    assert out.loss.item() == pytest.approx(-1.1)
    assert gradient(OBJECTIVES["grpo"], inputs).tolist() == pytest.approx([0.0, 0.0, -1.0])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_every_objective_follows_the_policy_gradient(name: str) -> None:
    """At ρ = 1 the gradient at a token is −share · A (for one ratio per sequence: −Σ_t share · A, A being the sequence's)."""
    inputs = micro_batch([2, 3], advantage_M=double([1.5, 1.5, -0.5, -0.5, -0.5]), totals=LossDenominators(4, 20, 10))
    per_completion = {1.5: 1 / (4 * 2), -0.5: 1 / (4 * 3)}
    share = {"dapo": 1 / 20, "bnpo": 1 / 20, "cispo": 1 / 20, "reinforce_pp": 1 / 20, "dr_grpo": 1 / 40}
    share |= dict.fromkeys(("gpg", "dppo_tv", "dppo_kl", "vespo", "dro"), 1 / 20)
    share |= dict.fromkeys(("grpo_sequence", "rloo", "reinforce", "opo", "maxrl", "luspo"), 1 / 4)
    expected = [-a * share.get(name, per_completion[a]) for a in inputs.advantage_M.tolist()]
    assert gradient(OBJECTIVES[name], inputs).tolist() == pytest.approx(expected, abs=1e-12)


def test_reinforce_needs_no_old_policy() -> None:
    inputs = micro_batch([2], advantage_M=double([2.0, 2.0]))
    far = replace(inputs, logp_old_M=double([-9.0, -0.1]))
    assert torch.equal(gradient(OBJECTIVES["reinforce"], inputs), gradient(OBJECTIVES["reinforce"], far))
    assert OBJECTIVES["reinforce"].loss(inputs, PLAIN).loss.item() == 4.0


def test_old_log_probs_carry_no_gradient_even_if_they_are_the_new_ones() -> None:
    leaf_M = double([-1.0, -2.0]).requires_grad_()
    inputs = micro_batch([2], logp_new_M=leaf_M, logp_old_M=leaf_M)
    (grad_M,) = torch.autograd.grad(OBJECTIVES["grpo"].loss(inputs, PLAIN).loss, leaf_M)
    assert grad_M.tolist() == [-0.5, -0.5]


def test_kl_is_reduced_as_the_surrogate_is() -> None:
    inputs = micro_batch([1, 3], advantage_M=double([0.0] * 4), logp_ref_M=double([-1.5, -1.0, -1.0, 0.0]))
    settings = replace(PLAIN, beta=0.1)
    out = OBJECTIVES["grpo"].loss(inputs, settings)
    first, last = 0.10653065971263342, math.e - 2
    assert out.kl_M is not None
    assert out.kl_M.tolist() == pytest.approx([first, 0, 0, last])
    assert out.loss.item() == pytest.approx(0.1 * (first + last / 3) / 2)
    assert OBJECTIVES["dapo"].loss(inputs, settings).loss.item() == pytest.approx(0.1 * (first + last) / 4)
    assert out.policy_loss.item() == 0.0


def test_kl_weighted_by_the_ratio() -> None:
    inputs = micro_batch([1], advantage_M=double([0.0]), logp_old_M=double([-1 - math.log(3)]), logp_ref_M=double([-2.0]))
    settings = LossSettings(beta=2.0, kl_estimator="k1", ratio_weighted_kl=True, entropy_bonus=0.0)
    assert OBJECTIVES["grpo"].loss(inputs, settings).loss.item() == pytest.approx(2.0 * 3.0 * 1.0)
    # d/dlogp of ρ · k1 is ρ · (k1 + 1)
    assert gradient(OBJECTIVES["grpo"], inputs, settings).item() == pytest.approx(2.0 * 3.0 * 2.0)


def test_without_beta_a_reference_is_measured_and_not_followed() -> None:
    inputs = micro_batch([2], logp_ref_M=double([-1.5, -1.0]))
    out = OBJECTIVES["grpo"].loss(inputs, PLAIN)
    assert out.kl_M is not None
    assert out.loss.item() == -1.0


def test_entropy_bonus_is_the_mean_over_the_steps_tokens() -> None:
    mask_M, entropy_M = torch.tensor([True, True, False]), double([1.0, 2.0, 50.0])
    inputs = micro_batch(
        [3], advantage_M=double([0.0] * 3), entropy_M=entropy_M, mask_M=mask_M, totals=LossDenominators(1, 6, 9)
    )
    assert OBJECTIVES["gspo"].loss(inputs, replace(PLAIN, entropy_bonus=0.5)).loss.item() == pytest.approx(-0.5 * 3 / 6)


def test_importance_weights_scale_the_surrogate_alone() -> None:
    inputs = micro_batch([2], weight_M=double([0.5, 2.0]), logp_ref_M=double([-1.0, -2.0]))
    out = OBJECTIVES["grpo"].loss(inputs, replace(PLAIN, beta=1.0, kl_estimator="k1"))
    assert out.policy_loss.item() == -1.25
    assert out.loss.item() == -1.25 + 0.5


def test_clip_override() -> None:
    assert with_clip(OBJECTIVES["dapo"], 0.1, 0.4, 3.0).surrogate == Clipped(0.1, 0.4, 3.0)
    assert OBJECTIVES["dapo"].surrogate == Clipped(0.2, 0.28)
    with pytest.raises(RecipeError, match="clips nothing"):
        with_clip(OBJECTIVES["reinforce"], 0.2, 0.2)


def test_an_objective_says_what_it_is_made_of() -> None:
    assert str(OBJECTIVES["grpo"]) == "token_ratio · Clipped(low=0.2, high=0.2, dual=None) · mean_of_completion_means"


def test_a_micro_batch_of_nothing_is_differentiable_and_zero() -> None:
    mask_M = torch.tensor([False, False])
    for objective in OBJECTIVES.values():
        inputs = micro_batch([2], mask_M=mask_M, totals=LossDenominators(0, 0, 9))
        assert gradient(objective, inputs).tolist() == [0.0, 0.0]
        assert gradient(objective, micro_batch([], totals=LossDenominators(0, 0, 9))).shape == (0,)
