"""Every objective that TRL has too: same loss, same gradient, to 1e-6 in float32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from oncurve.algos.objectives import OBJECTIVES, LossInputs, LossSettings, Objective, with_clip
from oncurve.algos.ratios import sequence_mean_ratio, sequence_product_ratio, token_ratio
from oncurve.algos.reductions import LossDenominators, mean_of_completion_means, mean_of_completion_sums
from oncurve.algos.surrogates import Cispo, Clipped
from tests.parity.trl_oracle import grpo_loss, rloo_loss

BUDGET = 10
LOW, HIGH = 0.1, 0.25
MASK_BT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 0, 0]])
PLAIN = LossSettings(beta=0.0, kl_estimator="k3", ratio_weighted_kl=False, entropy_bonus=0.0)

# TRL's loss types on the left. Ours have the same reduction and ratio, with the clip range of the test.
SHARED = {
    "grpo": with_clip(OBJECTIVES["grpo"], LOW, HIGH),
    "bnpo": with_clip(OBJECTIVES["bnpo"], LOW, HIGH),
    "dr_grpo": with_clip(OBJECTIVES["dr_grpo"], LOW, HIGH),
    "dapo": with_clip(OBJECTIVES["dapo"], LOW, HIGH),
    "luspo": Objective(token_ratio, Clipped(LOW, HIGH), mean_of_completion_sums),
    "cispo": OBJECTIVES["cispo"],
    "sapo": OBJECTIVES["sapo"],
}
LEVELS = {"token": token_ratio, "sequence": sequence_mean_ratio}


@dataclass(frozen=True)
class Case:
    """A padded batch as TRL sees it; ours is the same tokens packed flat, padding left in to be masked."""

    logp_BT: Tensor
    old_BT: Tensor | None
    ref_BT: Tensor
    advantage_B: Tensor
    entropy_BT: Tensor
    weight_BT: Tensor

    @classmethod
    def random(cls, seed: int, *, perturbed: bool) -> Case:
        generator = torch.Generator().manual_seed(seed)
        shape = MASK_BT.shape

        def noise(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        logp_BT = -noise(*shape).abs() - 0.1
        old_BT, ref_BT = logp_BT + 0.3 * noise(*shape), logp_BT + 0.3 * noise(*shape)
        weight_BT = noise(*shape).abs()
        return cls(logp_BT, old_BT if perturbed else None, ref_BT, noise(shape[0]), noise(*shape).abs(), weight_BT)

    def inputs(self, logp_BT: Tensor, entropy_BT: Tensor) -> LossInputs:
        rows, width = MASK_BT.shape
        old_BT = logp_BT.detach() if self.old_BT is None else self.old_BT
        return LossInputs(
            logp_new_M=logp_BT.flatten(),
            logp_old_M=old_BT.flatten(),
            advantage_M=self.advantage_B.repeat_interleave(width),
            mask_M=MASK_BT.flatten().bool(),
            row_M=torch.arange(rows).repeat_interleave(width),
            rows=rows,
            totals=LossDenominators(rows, int(MASK_BT.sum()), BUDGET),
            logp_ref_M=self.ref_BT.flatten(),
            entropy_M=entropy_BT.flatten(),
        )


def compare(case: Case, ours: Objective, settings: LossSettings, *, weighted: bool = False, **trl: Any) -> None:
    """Loss and gradient, in the log-probs and in the entropies."""
    results: dict[str, list[Tensor]] = {}
    for side in ("ours", "trl"):
        leaves = case.logp_BT.clone().requires_grad_(), case.entropy_BT.clone().requires_grad_()
        if side == "trl":
            theirs: dict[str, Any] = {
                "old_BT": case.old_BT,
                "ref_BT": case.ref_BT,
                "weight_BT": case.weight_BT if weighted else None,
            }
            known = {"beta": settings.beta, "epsilon_low": LOW, "epsilon_high": HIGH, "max_completion_length": BUDGET}
            terms = {"entropy_BT": leaves[1], "entropy_coef": settings.entropy_bonus}
            loss = grpo_loss(leaves[0], case.advantage_B, MASK_BT, **(theirs | terms | known | trl))
        else:
            inputs = case.inputs(*leaves)
            inputs = replace(inputs, weight_M=case.weight_BT.flatten()) if weighted else inputs
            loss = ours.loss(inputs, settings).loss
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        filled = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True)]
        results[side] = [loss.detach(), *filled]
    torch.testing.assert_close(results["ours"], results["trl"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("perturbed", [False, True])
@pytest.mark.parametrize(("kind", "level"), list(product(SHARED, LEVELS)))
def test_loss_and_gradient(kind: str, level: str, perturbed: bool, beta: float) -> None:
    ours = replace(SHARED[kind], ratio=LEVELS[level])
    trl: dict[str, Any] = {"loss_type": kind, "importance_sampling_level": level}
    if kind == "cispo":
        ours, trl["epsilon_high"] = replace(ours, surrogate=Cispo(1.0, 0.2)), 1.2
    for seed in range(3):
        compare(Case.random(seed, perturbed=perturbed), ours, replace(PLAIN, beta=beta), **trl)


@pytest.mark.parametrize("level", LEVELS)
def test_two_sided_clip(level: str) -> None:
    ours = replace(with_clip(OBJECTIVES["grpo"], LOW, HIGH, 1.3), ratio=LEVELS[level])
    for seed in range(5):
        trl: dict[str, Any] = {"loss_type": "grpo", "importance_sampling_level": level, "args": {"delta": 1.3}}
        compare(Case.random(seed, perturbed=True), ours, PLAIN, **trl)


@pytest.mark.parametrize(("kind", "level"), list(product(("grpo", "dapo", "cispo"), LEVELS)))
def test_kl_weighted_by_the_ratio(kind: str, level: str) -> None:
    ours = replace(SHARED[kind], ratio=LEVELS[level])
    trl: dict[str, Any] = {"loss_type": kind, "importance_sampling_level": level, "args": {"use_bias_correction_kl": True}}
    trl |= {"epsilon_high": 5.0} if kind == "cispo" else {}
    compare(Case.random(0, perturbed=True), ours, replace(PLAIN, beta=0.04, ratio_weighted_kl=True), **trl)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo"])
def test_entropy_bonus(kind: str) -> None:
    compare(Case.random(0, perturbed=True), SHARED[kind], replace(PLAIN, beta=0.04, entropy_bonus=0.02), loss_type=kind)


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_importance_weights(kind: str) -> None:
    compare(Case.random(0, perturbed=True), SHARED[kind], replace(PLAIN, beta=0.04), weighted=True, loss_type=kind)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo_with_its_own_range(name: str) -> None:
    """GSPO is TRL's sequence level; GSPO-token has the same loss and gradient while a sequence has one advantage."""
    trl: dict[str, Any] = {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
    }
    for seed, perturbed in product(range(3), (False, True)):
        compare(Case.random(seed, perturbed=perturbed), OBJECTIVES[name], replace(PLAIN, beta=0.04), **trl)


def test_per_token_advantages() -> None:
    generator = torch.Generator().manual_seed(1)
    advantage_BT = torch.randn(MASK_BT.shape, generator=generator)
    case = Case.random(1, perturbed=True)
    for kind, level in product(("grpo", "dapo", "sapo"), LEVELS):
        leaf_BT = case.logp_BT.clone().requires_grad_()
        options: dict[str, Any] = {
            "epsilon_low": LOW,
            "epsilon_high": HIGH,
            "loss_type": kind,
            "importance_sampling_level": level,
        }
        theirs = grpo_loss(leaf_BT, advantage_BT, MASK_BT, old_BT=case.old_BT, **options)
        inputs = replace(case.inputs(leaf_BT, case.entropy_BT), advantage_M=advantage_BT.flatten())
        ours = replace(SHARED[kind], ratio=LEVELS[level]).loss(inputs, PLAIN).loss
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
        grads = [torch.autograd.grad(loss, leaf_BT)[0] for loss in (ours, theirs)]
        torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["rloo", "grpo_sequence"])
@pytest.mark.parametrize("perturbed", [False, True])
def test_rloo(name: str, perturbed: bool) -> None:
    objective = OBJECTIVES[name]
    assert objective == Objective(sequence_product_ratio, Clipped(0.2, 0.2), mean_of_completion_means)
    for seed in range(5):
        case = Case.random(seed, perturbed=perturbed)
        leaf_BT = case.logp_BT.clone().requires_grad_()
        old_BT = case.logp_BT if case.old_BT is None else case.old_BT
        theirs = rloo_loss(leaf_BT, old_BT, case.advantage_B, MASK_BT, low=0.2, high=0.2)
        ours = objective.loss(case.inputs(leaf_BT, case.entropy_BT), PLAIN).loss
        # An empty completion has no token to carry its constant −A/B, which TRL counts: no gradient either way.
        empty = (case.advantage_B * (MASK_BT.sum(1) == 0)).sum() / len(MASK_BT)
        torch.testing.assert_close(ours - empty, theirs, atol=1e-6, rtol=1e-6)
        grads = [torch.autograd.grad(loss, leaf_BT)[0] for loss in (ours, theirs)]
        torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "sapo", "dapo", "bnpo", "cispo"])
def test_completions_left_out_count_in_trls_denominator_and_not_in_ours(kind: str) -> None:
    """Row 3 is masked, as a truncated completion is. Means over completions are 6/5 of TRL's, means over tokens the same."""
    case, ours = Case.random(0, perturbed=True), SHARED[kind]
    trl: dict[str, Any] = {"loss_type": kind, "epsilon_low": LOW, "epsilon_high": HIGH, "max_completion_length": BUDGET}
    if kind == "cispo":
        ours, trl["epsilon_high"] = replace(ours, surrogate=Cispo(1.0, 0.2)), 1.2
    left_out = ~MASK_BT.any(1)
    assert left_out.tolist() == [False, False, False, True, False, False]
    inputs = case.inputs(case.logp_BT, case.entropy_BT)
    graded = replace(inputs, totals=LossDenominators(int((~left_out).sum()), inputs.totals.tokens, BUDGET))
    theirs = grpo_loss(case.logp_BT, case.advantage_B, MASK_BT, old_BT=case.old_BT, ref_BT=case.ref_BT, **trl)
    factor = 1.0 if kind in ("dapo", "bnpo", "cispo") else 6 / 5
    torch.testing.assert_close(ours.loss(graded, PLAIN).loss, factor * theirs, atol=1e-6, rtol=1e-6)
