"""Losses on preference pairs: DPO and its variants for a policy, Bradley–Terry for a reward model, and its calibration.

The policy losses take log-probs summed over a completion, those of the reference, and the lengths, and return one loss per
pair, or per completion for kto. With h(y) = log π_θ(y) − log π_ref(y), c the chosen and r the rejected completion:

    dpo     −log σ(β (h(c) − h(r)))                      (Rafailov et al. 2023, arXiv 2305.18290, eq. 7)
    ipo     (h(c)/|c| − h(r)/|r| − 1/(2β))²              (Azar et al. 2023, arXiv 2310.12036, eq. 17)
    simpo   −log σ(β (log π(c)/|c| − log π(r)/|r|) − γ)  (Meng et al. 2024, arXiv 2405.14734, eq. 6): no reference
    kto     λ_c (1 − σ(β (h(c) − z))), λ_r (1 − σ(β (z − h(r))))    (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8)

ipo uses mean log-ratios per token, as TRL does on the advice of IPO's authors. γ is the margin of simpo. kto grades each
completion by itself: c is desirable, r undesirable, with weights λ. z estimates the KL to the reference: the mean of h over
completions that are paired with prompts of others, at least 0, without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

PairLoss = Literal["dpo", "ipo", "simpo"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """B pairs: summed log-probs under policy and reference, and lengths in tokens. The reference is None for simpo."""

    chosen_B: Tensor
    rejected_B: Tensor
    chosen_length_B: Tensor
    rejected_length_B: Tensor
    chosen_ref_B: Tensor | None = None
    rejected_ref_B: Tensor | None = None

    @property
    def ratio_B(self) -> tuple[Tensor, Tensor]:
        """h of the chosen and of the rejected completion; without a reference the log-probs themselves."""
        if self.chosen_ref_B is None or self.rejected_ref_B is None:
            return self.chosen_B, self.rejected_B
        return self.chosen_B - self.chosen_ref_B, self.rejected_B - self.rejected_ref_B

    @property
    def mean_ratio_B(self) -> tuple[Tensor, Tensor]:
        chosen_B, rejected_B = self.ratio_B
        return chosen_B / self.chosen_length_B.clamp(min=1), rejected_B / self.rejected_length_B.clamp(min=1)


def dpo(pairs: Pairs, beta: float, margin: float) -> Tensor:
    chosen_B, rejected_B = pairs.ratio_B
    return -functional.logsigmoid(beta * (chosen_B - rejected_B))


def ipo(pairs: Pairs, beta: float, margin: float) -> Tensor:
    chosen_B, rejected_B = pairs.mean_ratio_B
    return (chosen_B - rejected_B - 1 / (2 * beta)).square()


def simpo(pairs: Pairs, beta: float, margin: float) -> Tensor:
    chosen_B, rejected_B = pairs.mean_ratio_B
    return -functional.logsigmoid(beta * (chosen_B - rejected_B) - margin)


def kto(ratio_R: Tensor, is_desirable_R: Tensor, kl: float, beta: float, weights: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """The loss of each completion from its log-ratio h. ``weights`` are λ of desirable and of undesirable completions, ``kl``
    is z."""
    gain_R = torch.where(is_desirable_R, ratio_R - kl, kl - ratio_R)
    desirable, undesirable = weights
    weight_R = torch.full_like(ratio_R, undesirable).masked_fill(is_desirable_R, desirable)
    return weight_R * (1 - torch.sigmoid(beta * gain_R))


PAIR_LOSSES: Mapping[PairLoss, Callable[[Pairs, float, float], Tensor]] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
}
"""(pairs, β, γ) → loss of each pair."""


def bradley_terry(chosen_BA: Tensor, rejected_BA: Tensor, sign_BA: Tensor, margin_B: Tensor) -> Tensor:
    """−log σ(s·(r_chosen − r_rejected) − m) of each pair and aspect, 0 for aspects without a preference (s = 0). [B, A]

    P(chosen ≻ rejected) = σ(r_chosen − r_rejected) (Bradley and Terry 1952; Ouyang et al. 2022). s is 1 if the chosen
    completion is better in this aspect, −1 if the rejected one is. The margin m demands a larger difference for strong
    preferences (Llama 2, Touvron et al. 2023).
    """
    loss_BA = -functional.logsigmoid(sign_BA * (chosen_BA - rejected_BA) - margin_B[:, None])
    return loss_BA * sign_BA.abs()


def calibration_error(probability_B: Tensor, bins: int = 10) -> float:
    """Expected calibration error of the probabilities assigned to the true preferences (Guo et al. 2017).

    The confidence of a pair is max(p, 1 − p), and it is right if p > ½ (a tie is half right). Over equal bins of confidence
    from ½ to 1: Σ (fraction of pairs) · |fraction right − mean confidence|. 0 is perfect.
    """
    confidence_B = torch.maximum(probability_B, 1 - probability_B).double()
    right_B = (probability_B > 0.5).double() + 0.5 * (probability_B == 0.5).double()
    bin_B = ((confidence_B - 0.5) * 2 * bins).long().clamp(0, bins - 1)
    gaps = [
        float((right_B[bin_B == b].mean() - confidence_B[bin_B == b].mean()).abs() * (bin_B == b).double().mean())
        for b in sorted(set(bin_B.tolist()))
    ]
    return sum(gaps)
