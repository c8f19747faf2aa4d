"""The LM head for distillation: a divergence between policy and teacher at each token, without a [tokens × vocabulary] tensor.

Each chunk of tokens goes through both heads; the backward pass recomputes it. The same pass returns what the policy gradient
needs of the policy's head: the log-prob of each target and the entropy. The formulas are in algos/divergences.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from oncurve.algos.divergences import logit_gradient, token_divergence
from oncurve.models.heads.lm_head import Head, HeadGradient, at_temperature, gpu_chunk_tokens, vocabulary_chunks
from oncurve.objective_specs import DivergenceName

TEMPORARIES = 4
"""At once this many times as many tensors of a chunk's size exist as in the plain head: chunks are smaller by this factor."""


@dataclass(frozen=True, slots=True)
class TeacherStates:
    """A teacher's head, and the hidden state from which it predicts each token, [M, D]."""

    head: Head
    hidden_MD: Tensor


@dataclass(frozen=True, slots=True)
class DivergenceSettings:
    """Which divergence, between distributions at which temperature. ``beta`` is jsd's."""

    name: DivergenceName
    beta: float = 0.5
    temperature: float = 1.0


def token_divergences(
    head: Head, hidden_MD: Tensor, target_M: Tensor, teacher: TeacherStates, settings: DivergenceSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """(divergence from the teacher, log-prob of each target, entropy), each [M], in at least float32, and differentiable.

    If one head has more logits than the other, only those that both have are compared: the rest are padding of a vocabulary.
    """
    hidden_MD = hidden_MD.to(head.weight_VD.dtype)
    if head.own is not None:
        return _by_autograd(head, hidden_MD, target_M, teacher, settings)
    out: tuple[Tensor, Tensor, Tensor] = _DivergenceHead.apply(
        hidden_MD, head.weight_VD, head.bias_V, target_M, head, teacher, settings
    )  # type: ignore[no-untyped-call]
    return out


def support_logps(
    head: Head, hidden_MD: Tensor, target_M: Tensor, ids_MK: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs of a few tokens at each position [M, k], log-prob of each target, entropy), differentiable."""
    hidden_MD = hidden_MD.to(head.weight_VD.dtype)

    def chunk(hidden: Tensor, target: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logps = at_temperature(head.logits(hidden), temperature).log_softmax(-1)
        return logps.gather(1, ids), logps.gather(1, target[:, None])[:, 0], -torch.linalg.vecdot(logps.exp(), logps)

    rows = _chunks(len(hidden_MD), head.weight_VD)
    parts = [checkpoint(chunk, hidden_MD[r], target_M[r], ids_MK[r], use_reentrant=False) for r in rows]
    support, logps, entropies = (torch.cat(values) for values in zip(*parts, strict=True))
    return support, logps, entropies


@torch.no_grad()
def most_likely(head: Head, hidden_MD: Tensor, target_M: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of each target [M], the ``count`` largest log-probs [M, k], their tokens [M, k]), at temperature 1."""
    parts = []
    for rows in _chunks(len(hidden_MD), head.weight_VD):
        logps = head.logits(hidden_MD[rows].to(head.weight_VD.dtype)).log_softmax(-1)
        top = logps.topk(min(count, logps.shape[-1]))
        parts.append((logps.gather(1, target_M[rows, None])[:, 0], top.values, top.indices))
    logps_M, top_MK, ids_MK = (torch.cat(values) for values in zip(*parts, strict=True))
    return logps_M, top_MK, ids_MK


def _chunks(rows: int, weight_VD: Tensor) -> list[slice]:
    vocabulary = len(weight_VD)
    if weight_VD.device.type != "cuda":
        return vocabulary_chunks(rows, TEMPORARIES * vocabulary)
    size = gpu_chunk_tokens(vocabulary) // TEMPORARIES
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)] or [slice(0, 0)]


def _teacher_logps(teacher: TeacherStates, rows: slice, vocabulary: int, temperature: float) -> Tensor:
    """The teacher's log-probs over the logits that both have."""
    head = teacher.head
    logits = head.logits(teacher.hidden_MD[rows].to(head.weight_VD.dtype)).detach()
    return at_temperature(logits[:, :vocabulary], temperature).log_softmax(-1)


def _shared(logps: Tensor, vocabulary: int) -> Tensor:
    """The student's distribution over the logits that both have."""
    return logps if logps.shape[-1] == vocabulary else logps[:, :vocabulary].log_softmax(-1)


def _vocabulary(head: Head, teacher: TeacherStates) -> int:
    return min(len(head.weight_VD), len(teacher.head.weight_VD))


def _by_autograd(
    head: Head, hidden_MD: Tensor, target_M: Tensor, teacher: TeacherStates, settings: DivergenceSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by autograd, for heads that are more than one linear layer."""
    vocabulary = _vocabulary(head, teacher)

    def chunk(hidden: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        logps = at_temperature(head.logits(hidden), settings.temperature).log_softmax(-1)
        theirs = _teacher_logps(teacher, rows, vocabulary, settings.temperature)
        divergence = token_divergence(_shared(logps, vocabulary), theirs, settings.name, settings.beta)
        return divergence, logps.gather(1, target_M[rows, None])[:, 0], -torch.linalg.vecdot(logps.exp(), logps)

    rows = _chunks(len(hidden_MD), head.weight_VD)
    parts = [checkpoint(chunk, hidden_MD[r], r, use_reentrant=False) for r in rows]
    divergences, logps, entropies = (torch.cat(values) for values in zip(*parts, strict=True))
    return divergences, logps, entropies


class _DivergenceHead(torch.autograd.Function):
    """`token_divergences` for a linear head. The weight's gradient is summed over chunks in float32."""

    @staticmethod
    def forward(ctx, hidden_MD, weight_VD, bias_V, target_M, head: Head, teacher: TeacherStates, settings: DivergenceSettings):  # type: ignore[no-untyped-def]
        vocabulary = _vocabulary(head, teacher)
        divergences, logps, entropies = [], [], []
        for rows in _chunks(len(hidden_MD), weight_VD):
            ours = at_temperature(head.logits(hidden_MD[rows]), settings.temperature).log_softmax(-1)
            theirs = _teacher_logps(teacher, rows, vocabulary, settings.temperature)
            divergences.append(token_divergence(_shared(ours, vocabulary), theirs, settings.name, settings.beta))
            logps.append(ours.gather(1, target_M[rows, None])[:, 0])
            entropies.append(-torch.linalg.vecdot(ours.exp(), ours))
        entropy_M = torch.cat(entropies)
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V, target_M, entropy_M)
        ctx.head, ctx.teacher, ctx.settings = head, teacher, settings
        return torch.cat(divergences), torch.cat(logps), entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_divergence_M, grad_logp_M, grad_entropy_M):  # type: ignore[no-untyped-def]
        hidden_MD, weight_VD, bias_V, target_M, entropy_M = ctx.saved_tensors
        head, teacher, settings = ctx.head, ctx.teacher, ctx.settings
        vocabulary, with_entropy = _vocabulary(head, teacher), bool(grad_entropy_M.any())
        total = HeadGradient(
            head, settings.temperature, hidden_MD, weight_VD, bias_V, ctx.needs_input_grad[:3], entropy_M.dtype
        )
        for rows in _chunks(len(hidden_MD), weight_VD):
            z = head.logits(hidden_MD[rows])
            ours = at_temperature(z, settings.temperature).log_softmax(-1)
            p = ours.exp()
            grad = p * -grad_logp_M[rows, None]
            grad.scatter_add_(1, target_M[rows, None], grad_logp_M[rows, None])
            if with_entropy:
                grad -= grad_entropy_M[rows, None] * p * (ours.nan_to_num(neginf=0.0) + entropy_M[rows, None])
            theirs = _teacher_logps(teacher, rows, vocabulary, settings.temperature)
            slope = logit_gradient(_shared(ours, vocabulary), theirs, settings.name, settings.beta)
            grad[:, :vocabulary] += grad_divergence_M[rows, None] * slope
            total.add(rows, grad, z)
        return *total.results(), None, None, None, None
