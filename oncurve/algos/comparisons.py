"""Learning what is preferred: the Bradley–Terry loss of a reward model, and whether its confidence can be believed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def bradley_terry(chosen_NH: Tensor, rejected_NH: Tensor, sign_NH: Tensor, margin_N: Tensor) -> Tensor:
    """−log σ(s·(r_chosen − r_rejected) − m) of each pair and head, 0 where the head has no say (s = 0). [N, H]

    P(chosen ≻ rejected) = σ(r_chosen − r_rejected) (Bradley and Terry 1952; Ouyang et al. 2022). s is 1 where the chosen one
    is the better in this head, −1 where the rejected one is. The margin m asks for a greater distance where the preference
    was a strong one (Llama 2, Touvron et al. 2023).
    """
    loss_NH = -functional.logsigmoid(sign_NH * (chosen_NH - rejected_NH) - margin_N[:, None])
    return loss_NH * sign_NH.abs()


def calibration_error(probability_N: Tensor, bins: int = 10) -> float:
    """Expected calibration error of the probabilities given to what was really preferred (Guo et al. 2017).

    A pair's confidence is max(p, 1 − p) and it is right where p > ½ (a tie is half right). Over equal bins of confidence from
    ½ to 1: Σ (share of pairs) · |share right − mean confidence|. 0 is perfect.
    """
    confidence_N = torch.maximum(probability_N, 1 - probability_N).double()
    right_N = (probability_N > 0.5).double() + 0.5 * (probability_N == 0.5).double()
    bin_N = ((confidence_N - 0.5) * 2 * bins).long().clamp(0, bins - 1)
    gaps = [
        float((right_N[bin_N == b].mean() - confidence_N[bin_N == b].mean()).abs() * (bin_N == b).double().mean())
        for b in sorted(set(bin_N.tolist()))
    ]
    return sum(gaps)
