"""Divergences between the distributions of a student p and a teacher q at one token, and their gradients in p's logits.

    forward_kl   KL(q‖p) = Σ q (log q − log p)
    reverse_kl   KL(p‖q) = Σ p (log p − log q)
    jsd          β KL(q‖m) + (1 − β) KL(p‖m), with m = β q + (1 − β) p

jsd is the generalised Jensen–Shannon divergence of GKD (Agarwal et al. 2023, arXiv 2306.13649, eq. 1), without rescaling: it
tends to 0 for β → 0 and β → 1, where TRL switches to the forward and the reverse KL. The sum runs over the vocabulary or, if an
endpoint returns only its most likely tokens, over those and one bucket for all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oncurve.objective_specs import DivergenceName

NO_PROBABILITY = -1e4
"""A log-prob whose probability is 0 in float32 and whose differences are finite."""


def token_divergence(student: Tensor, teacher: Tensor, name: DivergenceName, beta: float) -> Tensor:
    """The divergence of each token, from log-probs [..., V] that are normalised in the last axis."""
    if name == "forward_kl":
        return _kl(teacher, student)
    if name == "reverse_kl":
        return _kl(student, teacher)
    mixture = _mixture(student, teacher, beta)
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def logit_gradient(student: Tensor, teacher: Tensor, name: DivergenceName, beta: float) -> Tensor:
    """The gradient of `token_divergence` in the student's logits, [..., V].

    forward_kl: p − q. The others have a derivative g in p, and p (g − Σ p g) in the logits: g = log p − log q for reverse_kl,
    (1 − β)(log p − log m) for jsd. Constants in g cancel.
    """
    p = student.exp()
    if name == "forward_kl":
        return p - teacher.exp()
    slope = student - teacher if name == "reverse_kl" else (1 - beta) * (student - _mixture(student, teacher, beta))
    slope = slope.masked_fill(p == 0, 0.0)
    return p * (slope - (p * slope).sum(-1, keepdim=True))


def support_divergence(student: Tensor, teacher: Tensor, valid: Tensor, name: DivergenceName, beta: float) -> Tensor:
    """The divergence over some tokens of the vocabulary, [..., k], and a bucket for all others (TRL's `loss_add_tail`).

    ``valid`` marks the entries that count. It is a lower bound of the divergence over the complete vocabulary. Autograd
    computes its gradient.
    """
    return token_divergence(_with_tail(student, valid), _with_tail(teacher, valid), name, beta)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Σ p (log p − log q); terms with p = 0 are 0."""
    terms = p.exp() * (p - q)
    return terms.masked_fill(p == -torch.inf, 0.0).sum(-1)


def _mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    weight = torch.tensor(beta, dtype=student.dtype, device=student.device)
    return torch.logaddexp(student + torch.log1p(-weight), teacher + torch.log(weight))


def _with_tail(logps: Tensor, valid: Tensor) -> Tensor:
    """The log-probs of the valid entries (the others have probability 0), and log(1 − their sum) as one more entry.

    The sum is kept 1e-7 below 1 in log-space, as in TRL: rounding may push it above.
    """
    kept = logps.masked_fill(~valid, NO_PROBABILITY)
    total = torch.logsumexp(kept, -1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([kept, torch.log(-torch.expm1(total))], -1)
