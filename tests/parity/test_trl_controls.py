"""TRL's newer losses and controls: gmpo, vespo, luspo, off-policy sequence mask, per-reward normalisation, corrections, kto."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.experimental.gmpo import GMPOTrainer
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from oncurve.algos.advantages import decoupled_advantages
from oncurve.algos.entropy_controls import AdaptiveBonus, high_entropy_tokens
from oncurve.algos.objectives import OBJECTIVES, with_clip
from oncurve.algos.packed_rows import PackedRows
from oncurve.algos.preference_losses import kto
from oncurve.algos.ratios import correction_weights, off_policy_mask
from oncurve.models.reference import Reference
from oncurve.objective_specs import CORRECTIONS, CorrectionName
from tests.parity.test_trl_dpo import outputs
from tests.parity.test_trl_loss import MASK_BT, PLAIN, Case, compare
from tests.parity.trl_oracle import GRPO_ARGS, GRPO_FIELDS, _alone, _bare, _batch, _score, grpo_loss
from tests.training.builders import policy

ROWS = PackedRows.of(torch.arange(6).repeat_interleave(5), MASK_BT.flatten().bool(), 6, torch.float32)
VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("perturbed", [False, True])
def test_vespo(perturbed: bool, beta: float) -> None:
    for seed in range(3):
        case = Case.random(seed, perturbed=perturbed)
        compare(case, OBJECTIVES["vespo"], replace(PLAIN, beta=beta), loss_type="vespo", args=VESPO)


def test_luspo_with_its_own_range() -> None:
    options: dict[str, Any] = {"loss_type": "luspo", "importance_sampling_level": "sequence"}
    for seed in range(3):
        case = Case.random(seed, perturbed=True)
        compare(case, OBJECTIVES["luspo"], PLAIN, epsilon_low=3e-4, epsilon_high=4e-4, **options)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("seed", range(3))
def test_gmpo(seed: int, beta: float) -> None:
    case, low, high = Case.random(seed, perturbed=True), 0.05, 0.1
    fields = GRPO_FIELDS | {"epsilon_low": low, "epsilon_high": high, "beta": beta}
    trainer = _bare(GMPOTrainer, GRPO_ARGS, fields)
    leaf_BT = case.logp_BT.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (leaf_BT, torch.zeros_like(leaf_BT), None)
    tensors = {"advantages": case.advantage_B, "old_per_token_logps": case.old_BT, "ref_per_token_logps": case.ref_BT}
    theirs = trainer._compute_loss(None, _batch(MASK_BT, **tensors))
    outputs = with_clip(OBJECTIVES["gmpo"], low, high).loss(case.inputs(leaf_BT, case.entropy_BT), replace(PLAIN, beta=beta))
    assert outputs.clipped_M.any()
    # An empty completion has no token to carry its constant −A/B, which TRL counts: no gradient either way.
    empty = (case.advantage_B * (MASK_BT.sum(1) == 0)).sum() / len(MASK_BT)
    torch.testing.assert_close(outputs.loss - empty, theirs, atol=1e-6, rtol=1e-6)
    ours_BT, theirs_BT = (torch.autograd.grad(loss, leaf_BT)[0] for loss in (outputs.loss, theirs))
    torch.testing.assert_close(ours_BT, theirs_BT, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_off_policy_sequence_mask(seed: int) -> None:
    """In TRL's own loss: the same loss and gradient as with the mask as our weight."""
    case, limit = Case.random(seed, perturbed=True), 0.05
    assert case.old_BT is not None
    leaf_BT = case.logp_BT.clone().requires_grad_()
    theirs = grpo_loss(leaf_BT, case.advantage_B, MASK_BT, old_BT=case.old_BT, off_policy_mask_threshold=limit)
    advantage_M = case.advantage_B.repeat_interleave(5)
    weight_M = off_policy_mask(case.logp_BT.flatten(), case.old_BT.flatten(), advantage_M, ROWS, limit)
    inputs = replace(case.inputs(leaf_BT, case.entropy_BT), weight_M=weight_M, logp_ref_M=None)
    ours = OBJECTIVES["grpo"].loss(inputs, PLAIN).loss
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    grads = [torch.autograd.grad(loss, leaf_BT)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-6)


def test_the_off_policy_mask_drops_something() -> None:
    cases = [Case.random(seed, perturbed=True) for seed in range(5)]
    masks = [
        off_policy_mask(c.logp_BT.flatten(), c.old_BT.flatten(), c.advantage_B.repeat_interleave(5), ROWS, 0.05)  # type: ignore[union-attr]
        for c in cases
    ]
    assert any(bool((mask == 0).any()) for mask in masks)


def trl_decoupled(rewards_PGA: Tensor, weights: list[float]) -> Tensor:
    """GRPOTrainer's advantages with `normalize_then_sum`."""
    ids = [[1]] * rewards_PGA[..., 0].numel()
    generated: tuple[Any, ...] = (ids, ids, None, ["x"] * len(ids), None, {}, None, None)
    fields: dict[str, Any] = {
        "scale_rewards": "group",
        "multi_objective_aggregation": "normalize_then_sum",
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "num_iterations": 1,
        "use_vllm": False,
        "beta": 0.0,
        "reward_weights": torch.tensor(weights),
        "reward_funcs": [None] * len(weights),
        "reward_func_names": [f"reward{i}" for i in range(len(weights))],
    }
    args = {"steps_per_generation": 1, "gradient_accumulation_steps": 1}
    return _score(GRPOTrainer, rewards_PGA, generated, args, **fields)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_top_entropy_tokens(seed: int, share: float) -> None:
    """TRL's loss with `top_entropy_quantile`: the tokens that its own mask keeps, in loss and gradient."""
    case = Case.random(seed, perturbed=True)
    leaf_BT, mask_BT = case.logp_BT.clone().requires_grad_(), MASK_BT.bool()
    entropy_BT = case.entropy_BT.abs()
    padded = {"gather": _alone, "pad_across_processes": _alone}
    theirs = grpo_loss(
        leaf_BT, case.advantage_B, MASK_BT, old_BT=case.old_BT, entropy_BT=entropy_BT, top_entropy_quantile=share,
        accelerator=SimpleNamespace(num_processes=1, sync_gradients=True, reduce=_alone, **padded),
    )  # fmt: skip
    kept_BT = torch.zeros_like(mask_BT)
    kept_BT[mask_BT] = torch.from_numpy(high_entropy_tokens(entropy_BT[mask_BT].numpy(), share))
    assert 0 < int(kept_BT.sum()) < int(mask_BT.sum())
    inputs = replace(case.inputs(leaf_BT, entropy_BT), kept_M=kept_BT.flatten(), logp_ref_M=None)
    ours = OBJECTIVES["grpo"].loss(inputs, PLAIN).loss
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    grads = [torch.autograd.grad(loss, leaf_BT)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-6)


def test_adaptive_entropy_bonus() -> None:
    """TRL's trainer over nine batches of other entropies: the same coefficient and the same loss at each."""
    options: dict[str, Any] = {
        "entropy_target": 0.5,
        "entropy_coef_delta": 0.02,
        "entropy_coef_min": 0.0,
        "entropy_coef_max": 0.07,
    }
    fields = GRPO_FIELDS | {"use_adaptive_entropy": True, "entropy_coef": 0.03, "_last_world_entropy": math.inf}
    trainer = _bare(GRPOTrainer, GRPO_ARGS | options, fields | {"_entropy_window_stats": None, "_entropy_bonus_enabled": True})
    bonus, case = AdaptiveBonus(0.5, 0.02, 0.07, 0.03), Case.random(0, perturbed=False)
    applied = []
    for mean in (0.4, 0.6, 0.5, 0.3, 0.2, 0.1, 0.9, 0.8, 0.4):
        entropy_BT = torch.full_like(case.logp_BT, mean)
        trainer._get_per_token_logps_and_entropies = lambda *args, e=entropy_BT, **kwargs: (case.logp_BT, e, None)
        theirs = trainer._compute_loss(None, _batch(MASK_BT, advantages=case.advantage_B))
        settings = replace(PLAIN, entropy_bonus=bonus.applied)
        inputs = replace(case.inputs(case.logp_BT, entropy_BT), logp_ref_M=None)
        torch.testing.assert_close(OBJECTIVES["grpo"].loss(inputs, settings).loss, theirs, atol=1e-6, rtol=1e-6)
        applied.append(bonus.applied)
        bonus = bonus.observe(mean)
        assert bonus.bonus == pytest.approx(trainer.entropy_coef)
    assert len(set(applied)) > 2
    assert max(applied) == pytest.approx(0.07)


def test_a_mixed_reference_is_trls() -> None:
    """`sync_ref_model` with `ref_model_mixup_alpha`: TRL's own callback on a copy of the reference's weights."""
    target = policy(1)
    reference, theirs = Reference(target), target.copy()
    for seed in (2, 3, 4):
        update = policy(seed)
        reference.refresh(update, 0.6)
        SyncRefModelCallback._sync_target_model(update.model, theirs.model, 0.6)
    for name, weight in theirs.model.named_parameters():
        torch.testing.assert_close(reference.state()[name], weight.detach(), atol=1e-6, rtol=1e-6)


NAN = math.nan
TWO_REWARDS = [
    ([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]], [[10.0, 3.0, -7.0, 2.0], [0.1, 0.2, 0.3, 0.4]]),
    ([[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0]], [[1.0, 0.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0]]),
    ([[1.0, NAN, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]], [[1.0, 0.5, 2.0, 3.0], [5.0, 4.0, NAN, 5.0]]),
]


@pytest.mark.parametrize("rewards", TWO_REWARDS)
def test_per_reward_normalisation(rewards: tuple[list[list[float]], list[list[float]]]) -> None:
    rewards_APG, weights = torch.tensor(rewards), [1.0, 0.3]
    theirs_PG = trl_decoupled(rewards_APG.permute(1, 2, 0), weights)
    torch.testing.assert_close(decoupled_advantages(rewards_APG, weights, 1e-4), theirs_PG, atol=1e-6, rtol=1e-6)


TRL_MODES: dict[CorrectionName, tuple[str, float | None, float]] = {
    "tis": ("token_truncate", None, 2.0),
    "seq_tis": ("sequence_truncate", None, 2.0),
    "mis": ("token_mask", None, 3.0),
    "seq_mis": ("sequence_mask", None, 3.0),
    "icepop": ("token_mask", 0.5, 5.0),
}


@pytest.mark.parametrize("name", TRL_MODES)
@pytest.mark.parametrize("seed", range(3))
def test_corrections(name: CorrectionName, seed: int) -> None:
    """The ratios that TRL's generate-and-score computes for its loss."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 3, 1, 4, 2, 5]
    mask_BT = torch.arange(5) < torch.tensor(lengths)[:, None]
    old_BT = -torch.rand(6, 5, generator=generator) * 2
    sampler_BT = old_BT + 0.6 * torch.randn(6, 5, generator=generator)
    mode, low, high = TRL_MODES[name]
    rows = PackedRows.of(torch.arange(6).repeat_interleave(5), mask_BT.flatten(), 6, torch.float32)
    weights_M = correction_weights(old_BT.flatten(), sampler_BT.flatten(), rows, CORRECTIONS[name])
    theirs_BT = trl_importance_ratios(old_BT, sampler_BT, lengths, mode, low, high)
    torch.testing.assert_close(rows.mask(weights_M).view(6, 5), theirs_BT * mask_BT, atol=1e-6, rtol=1e-6)


def trl_importance_ratios(
    old_BT: Tensor, sampler_BT: Tensor, lengths: list[int], mode: str, low: float | None, high: float
) -> Tensor:
    sampled = [row[:length].tolist() for row, length in zip(sampler_BT, lengths, strict=True)]
    ids = [[1] * length for length in lengths]
    generated: tuple[Any, ...] = ([[1]] * 6, ids, None, ["x"] * 6, sampled, {}, None, None)
    fields: dict[str, Any] = {
        "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize",
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "num_iterations": 1,
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
        "beta": 0.0,
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (old_BT, None, None),
    }
    args = {"steps_per_generation": 1, "gradient_accumulation_steps": 1}
    output = _score(GRPOTrainer, torch.zeros(2, 3), generated, args, key="importance_sampling_ratio", **fields)
    return output.expand(6, 5)


@pytest.mark.parametrize("seed", range(5))
def test_kto(seed: int) -> None:
    """Eight completions, three of them desirable, behind other prompts as TRL's KL batch; loss and gradient."""
    dice = torch.Generator().manual_seed(seed)
    beta = (0.05, 0.1, 0.5, 1.0, 2.0)[seed]
    mask = torch.zeros(8, 6, dtype=torch.int64)
    mask[:, 1:] = 1
    logps = (-2 * torch.rand(8, 5, generator=dice, dtype=torch.float64)).requires_grad_()
    reference, kl_logps, kl_reference = (-5 - 2 * torch.rand(8, generator=dice, dtype=torch.float64) for _ in range(3))
    kl_logps = kl_logps + 0.5
    ids = torch.ones_like(mask)
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": ids,
        "completion_mask": mask,
        "KL_input_ids": 2 * ids,
        "KL_attention_mask": ids,
        "KL_completion_mask": mask,
        "label": torch.tensor([True] * 3 + [False] * 5),
        "ref_logps": reference,
        "ref_KL_logps": kl_reference,
    }
    fields = {
        "calculate_KL": True,
        "precompute_ref_logps": True,
        "loss_type": "kto",
        "beta": beta,
        "desirable_weight": 1.6,
        "undesirable_weight": 0.9,
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    trainer = _bare(KTOTrainer, {}, fields)
    trainer.accelerator.gather_for_metrics = _alone

    def model(input_ids: Tensor, **_: Any) -> Any:
        is_mismatched = bool((input_ids == 2).all())
        return outputs(kl_logps[:, None].expand(8, 5) / 5 if is_mismatched else logps)

    theirs = trainer._compute_loss(model, inputs, False)
    kl = max(float((kl_logps - kl_reference).mean()), 0.0)
    assert kl > 0
    ours = kto(logps.sum(1) - reference, inputs["label"], kl, beta, (1.6, 0.9)).mean()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-10)
    expected, gradient = (torch.autograd.grad(loss, logps)[0] for loss in (theirs, ours))
    assert torch.allclose(gradient, expected, atol=1e-12)
