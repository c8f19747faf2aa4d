"""Objectives, advantages and corrections that verl 0.9.1 has too: what its own functions returned (`make_verl_fixture.py`)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oncurve.algos.advantages import decoupled_advantages, outcome_advantages
from oncurve.algos.entropy_controls import clip_cov_tokens, covariances, kl_cov_tokens
from oncurve.algos.objectives import OBJECTIVES, LossInputs, LossSettings, Objective, with_clip
from oncurve.algos.packed_rows import PackedRows
from oncurve.algos.ratios import correction_weights
from oncurve.algos.reductions import LossDenominators
from oncurve.algos.surrogates import Dro, Unclipped
from oncurve.objective_specs import CORRECTIONS, CorrectionName

VERL: dict[str, Any] = json.loads(Path(__file__).with_name("verl_0_9_1.json").read_text(encoding="utf-8"))
LENGTHS = torch.tensor(VERL["lengths"])
MASK_BT = torch.arange(5)[None] < LENGTHS[:, None]
ROWS = PackedRows.of(torch.arange(8).repeat_interleave(5), MASK_BT.flatten(), 8, torch.float64)
PLAIN = LossSettings(beta=0.0, kl_estimator="k3", ratio_weighted_kl=False, entropy_bonus=0.0)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_version() -> None:
    assert VERL["verl"] == "0.9.1"


def loss_and_gradient(objective: Objective, inputs: dict[str, Any], **marks: Tensor) -> tuple[Tensor, Tensor]:
    leaf_BT = tensor(inputs["logp"]).requires_grad_()
    loss = objective.loss(
        LossInputs(
            logp_new_M=leaf_BT.flatten(),
            logp_old_M=tensor(inputs["old"]).flatten(),
            advantage_M=tensor(inputs["advantage"]).repeat_interleave(5),
            mask_M=MASK_BT.flatten(),
            row_M=ROWS.row_M,
            rows=8,
            totals=LossDenominators(8, int(LENGTHS.sum()), 5),
            **marks,
        ),
        PLAIN,
    ).loss
    return loss.detach(), torch.autograd.grad(loss, leaf_BT)[0]


@pytest.mark.parametrize("name", ["gmpo", "gpg", "dppo_tv", "dppo_kl", "dro"])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient(name: str, seed: int) -> None:
    inputs, theirs = VERL["seeds"][seed]["inputs"], VERL["seeds"][seed]["losses"][name]
    ours = OBJECTIVES[name]
    if name == "dro":
        ours = replace(ours, surrogate=Dro(theirs["dro_beta"]))
    elif name != "gpg":
        ours = with_clip(ours, theirs["low"], theirs["high"], theirs.get("cap"))
    loss, gradient_BT = loss_and_gradient(ours, inputs)
    expected_BT = tensor(theirs["gradient"])
    assert (gradient_BT == 0).any() or name in ("gpg", "dro", "gmpo")  # something is clipped
    torch.testing.assert_close(loss, tensor(theirs["loss"]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient_BT, expected_BT, atol=1e-8, rtol=1e-6)


def flat(values_BT: Any) -> np.ndarray:
    return tensor(values_BT)[MASK_BT].numpy()


@pytest.mark.parametrize("seed", range(3))
def test_clip_cov(seed: int) -> None:
    inputs, case = VERL["seeds"][seed]["inputs"], VERL["seeds"][seed]["entropy"]["clip_cov"]
    advantages = np.repeat(np.array(inputs["advantage"]), LENGTHS.numpy())
    values, bounds = covariances(advantages, flat(inputs["logp"])), (case["clip_cov_lb"], case["clip_cov_ub"])
    dropped = clip_cov_tokens(values, case["clip_cov_ratio"], bounds, np.random.default_rng(0))
    assert 0 < dropped.mean() == pytest.approx(case["dropped"])
    kept_BT = torch.ones_like(MASK_BT)
    kept_BT[MASK_BT] = torch.from_numpy(~dropped)
    ours = with_clip(OBJECTIVES["bnpo"], case["low"], case["high"])
    loss, gradient_BT = loss_and_gradient(ours, inputs, kept_M=kept_BT.flatten())
    torch.testing.assert_close(loss, tensor(case["loss"]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient_BT, tensor(case["gradient"]), atol=1e-8, rtol=1e-6)
    some = VERL["seeds"][seed]["entropy"]["clip_cov_some"]
    fewer = clip_cov_tokens(values, some["clip_cov_ratio"], bounds, np.random.default_rng(0))
    assert fewer.mean() == pytest.approx(some["dropped"])
    assert not (fewer & ~dropped).any()


@pytest.mark.parametrize("seed", range(3))
def test_kl_cov(seed: int) -> None:
    inputs, case = VERL["seeds"][seed]["inputs"], VERL["seeds"][seed]["entropy"]["kl_cov"]
    advantages = np.repeat(np.array(inputs["advantage"]), LENGTHS.numpy())
    selected = kl_cov_tokens(covariances(advantages, flat(inputs["logp"])), case["kl_cov_ratio"])
    assert selected.sum() == int(0.2 * 25)
    anchor_BT = torch.zeros(8, 5, dtype=torch.float64)
    anchor_BT[MASK_BT] = torch.from_numpy(selected * case["ppo_kl_coef"])
    unclipped = replace(OBJECTIVES["bnpo"], surrogate=Unclipped())
    loss, gradient_BT = loss_and_gradient(unclipped, inputs, anchor_M=anchor_BT.flatten())
    torch.testing.assert_close(loss, tensor(case["loss"]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient_BT, tensor(case["gradient"]), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("name", list(VERL["graded"]))
def test_advantages(name: str) -> None:
    case = VERL["graded"][name]
    rewards_PG, lengths_PG = tensor(case["rewards"]).view(2, 4), LENGTHS.view(2, 4).double()

    def same(ours_PG: Tensor, theirs: list[float]) -> None:
        torch.testing.assert_close(ours_PG, tensor(theirs).view(2, 4), atol=1e-6, rtol=1e-6)

    same(outcome_advantages(rewards_PG, "length_weighted", "none", 1e-6, lengths_PG=lengths_PG), case["opo"])
    same(outcome_advantages(rewards_PG, "best_of_others", "none", 1e-6), case["pass_at_k_unscaled"])
    same(outcome_advantages(rewards_PG, "best_of_others", "group", 1e-6), case["pass_at_k"])


def test_gpg_counts_groups_with_signal_and_verl_counts_rewards_that_are_not_zero() -> None:
    """α of the paper is the number of samples over those with a gradient. verl divides by the count of nonzero rewards instead,
    which is the same if and only if the silent groups are those with reward 0."""
    same, other = VERL["graded"]["one_silent"], VERL["graded"]["binary"]
    ours = [outcome_advantages(tensor(case["rewards"]).view(2, 4), "mean", "signal_share", 1e-6) for case in (same, other)]
    torch.testing.assert_close(ours[0].flatten(), tensor(same["gpg"]), atol=1e-6, rtol=1e-6)
    centred = outcome_advantages(tensor(other["rewards"]).view(2, 4), "mean", "none", 1e-6)
    torch.testing.assert_close(ours[1], centred)  # both groups have signal: α = 1
    torch.testing.assert_close(8 / 3 * centred.flatten(), tensor(other["gpg"]))  # three of eight rewards are not 0


def test_gdpo_differs_from_verl_only_in_the_second_normalisation() -> None:
    """verl's is over tokens, TRL's and the paper's over completions, so the two are the same up to a shift and a factor."""
    rewards_APG = torch.stack([tensor(VERL["graded"][name]["rewards"]).view(2, 4) for name in ("binary", "graded")])
    ours = decoupled_advantages(rewards_APG, VERL["gdpo"]["weights"], 1e-6).flatten()
    theirs = tensor(VERL["gdpo"]["advantages"])
    fit = torch.linalg.lstsq(torch.stack([ours, torch.ones(8, dtype=torch.float64)], 1), theirs[:, None]).solution
    torch.testing.assert_close(fit[0] * ours + fit[1], theirs, atol=1e-5, rtol=1e-5)
    weighted_mean = (theirs * LENGTHS).sum() / LENGTHS.sum()
    assert abs(float(weighted_mean)) < 1e-5
    assert abs(float(ours.mean())) < 1e-9


@pytest.mark.parametrize("name", ["tis", "seq_tis", "icepop", "geo_rs"])
@pytest.mark.parametrize("seed", range(3))
def test_corrections(name: CorrectionName, seed: int) -> None:
    inputs, case = VERL["seeds"][seed]["inputs"], VERL["seeds"][seed]["corrections"][name]
    sampler = tensor(case.get("sampler", inputs["sampler"]))
    weights_M = correction_weights(tensor(inputs["old"]).flatten(), sampler.flatten(), ROWS, CORRECTIONS[name])
    ours_BT, theirs_BT = ROWS.mask(weights_M).view(8, 5), tensor(case["weights"])
    if name == "geo_rs":
        assert set(theirs_BT[MASK_BT].tolist()) == {0.0, 1.0}
    torch.testing.assert_close(ours_BT, theirs_BT, atol=1e-6, rtol=1e-6)
