"""The losses of Tinker's `forward_backward`, each a sum over the tokens of one sequence.

With log-probs ℓ of the targets, log-probs q of the policy that sampled them, advantages A and the ratio r = exp(ℓ − q):

    cross_entropy         −Σ w·ℓ
    importance_sampling   −Σ r·A
    ppo                   −Σ min(r·A, clip(r, low, high)·A)            Schulman et al. 2017
    cispo                 −Σ sg[clip(r, low, high)]·ℓ·A                MiniMax 2025
    dro                   −Σ (ℓ·A − β/2·(ℓ − q)²)                      Richemond et al. 2024
    gspo                  ppo with s_t in place of r                   Zheng et al. 2025, GSPO-token

For gspo s_t = sg[s]·exp(ℓ_t − sg[ℓ_t]) and s = exp(mean of ℓ − q over the tokens of ``sequence_ratio_mask``). sg stops the
gradient. Thresholds bound the ratio itself: 0.8 and 1.2, not 0.2. Formulas, inputs and defaults are those of Tinker's
documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

LossFunction = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]
"""(log-probs of the targets [N], inputs [N], settings) → the loss."""


def cross_entropy(logps: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    return -(inputs["weights"] * logps).sum()


def importance_sampling(logps: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    return -(_ratio(logps, inputs) * inputs["advantages"]).sum()


def ppo(logps: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    return _clipped(_ratio(logps, inputs), inputs, settings)


def cispo(logps: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    weight = _clip(_ratio(logps, inputs), settings).detach()
    return -(weight * logps * inputs["advantages"]).sum()


def dro(logps: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    distance = (logps - inputs["logprobs"]).square()
    return -(logps * inputs["advantages"] - 0.5 * settings["beta"] * distance).sum()


def gspo(logps: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    in_ratio = inputs["sequence_ratio_mask"] != 0
    mean = (logps.detach() - inputs["logprobs"])[in_ratio].mean()
    return _clipped(torch.exp(mean + logps - logps.detach()), inputs, settings)


def _ratio(logps: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(logps - inputs["logprobs"])


def _clip(ratio: Tensor, settings: Mapping[str, float]) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


def _clipped(ratio: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, settings) * advantages).sum()


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, the inputs that it needs besides ``target_tokens``, and its settings with their defaults. None: a setting that a
    request must give."""

    compute: LossFunction
    inputs: tuple[str, ...]
    settings: Mapping[str, float | None] = field(default_factory=dict)


SAMPLED = ("logprobs", "advantages")
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",)),
    "importance_sampling": Loss(importance_sampling, SAMPLED),
    "ppo": Loss(ppo, SAMPLED, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Loss(cispo, SAMPLED, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Loss(dro, SAMPLED, {"beta": None}),
    "gspo": Loss(gspo, (*SAMPLED, "sequence_ratio_mask"), {"clip_low_threshold": None, "clip_high_threshold": None}),
}
