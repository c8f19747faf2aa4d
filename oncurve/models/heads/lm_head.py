"""The LM head in chunks: log-prob and entropy of each token without a [tokens × vocabulary] tensor.

For logits z (after the model's own scaling and soft cap, divided by the temperature): logp = z_y − lse(z), and H = lse(z) − Σ
p·z. The backward pass recomputes the logits of each chunk if there are several: d logp/dz = 1_y − p and
dH/dz = −p·(log p + H).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from oncurve import kernels
from oncurve.models.gradient_buffers import GradAccumulator

CPU_CHUNK_LOGITS = 1 << 22
"""Logits held at once on a CPU: 16 MiB in float32, about the size of its caches."""
GPU_CHUNK_LOGITS = 132 * 16 * 151_936
"""Logits held at once on a GPU: 1.2 GiB in float32. With Qwen's vocabulary that is 2112 tokens: in a model of width 1024, the
gradient of their hidden states then has a 128 × 128 tile for every multiprocessor of an H200."""


@dataclass(frozen=True, slots=True)
class Head:
    """From the last hidden state to logits: softcap · tanh(scale · (W h + b) / softcap), or ``own`` if the model does more."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    own: Callable[[Tensor], Tensor] | None = None
    """The model's own head, from hidden states [M, D] to logits [M, V] (see `own_logits`)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits at temperature 1, in at least float32."""
        if self.own is not None:
            return self.own(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1).float()
        z = nn.functional.linear(hidden.to(self.weight_VD.dtype), self.weight_VD, self.bias_V)
        z = z if z.dtype == torch.float64 else z.float()
        z = z if self.scale == 1.0 else z * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


@dataclass
class _BackboneOutput(ModelOutput):  # type: ignore[misc]
    """A hidden state in place of a backbone's output; whatever else the model reads of it is None."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def own_logits(model: nn.Module, backbone: nn.Module, hidden_MD: Tensor) -> Tensor:
    """Logits [M, V], computed by the model's own forward. Its backbone is not run: it returns ``hidden_MD`` instead.

    Used if the head has more layers than one projection (BERT's decoders, ModernBERT), or a scale with an unusual name.
    """
    present = vars(backbone).get("forward")

    def forward(*_: Any, **__: Any) -> _BackboneOutput:
        return _BackboneOutput(last_hidden_state=hidden_MD[None])

    backbone.forward = forward
    try:
        ids = torch.zeros(1, len(hidden_MD), dtype=torch.long, device=hidden_MD.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    finally:
        if present is None:
            del backbone.forward
        else:
            backbone.forward = present
    return logits


def gpu_chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits are held at once on a GPU."""
    return max(1024, GPU_CHUNK_LOGITS // vocabulary // 64 * 64)


def head_chunk_tokens(weight_VD: Tensor) -> int:
    """Tokens whose logits the head holds at once on its device."""
    vocabulary = len(weight_VD)
    return gpu_chunk_tokens(vocabulary) if weight_VD.device.type == "cuda" else max(1, CPU_CHUNK_LOGITS // vocabulary)


def token_logps(
    head: Head,
    hidden_MD: Tensor,
    target_M: Tensor,
    temperature: float = 1.0,
    accumulator: GradAccumulator | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of its distribution), both [M], in at least float32, and differentiable.

    On a GPU the head's weight gradient is added to ``accumulator`` if there is one; otherwise it goes to autograd. Hidden
    states may be more precise than the head (Mamba keeps its residual stream in float32); they are rounded, as the model does.
    """
    hidden_MD = hidden_MD.to(head.weight_VD.dtype)
    if head.own is not None:
        return _token_logps_own(head, hidden_MD, target_M, temperature)
    if kernels.can_run_kernels(hidden_MD.device):
        return _token_logps_cuda(head, hidden_MD, target_M, temperature, accumulator)
    out: tuple[Tensor, Tensor] = _ChunkedHead.apply(hidden_MD, head.weight_VD, head.bias_V, target_M, head, temperature)  # type: ignore[no-untyped-call]
    return out


def _token_logps_own(head: Head, hidden_MD: Tensor, target_M: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """By autograd, which keeps no logits: the backward pass recomputes each chunk."""

    def chunk(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logp_all = at_temperature(head.logits(hidden), temperature).log_softmax(-1)
        return logp_all.gather(1, target[:, None])[:, 0], -torch.linalg.vecdot(logp_all.exp(), logp_all)

    rows = vocabulary_chunks(len(hidden_MD), len(head.weight_VD))
    chunks = [checkpoint(chunk, hidden_MD[r], target_M[r], use_reentrant=False) for r in rows]
    logps, entropies = zip(*chunks, strict=True)
    return torch.cat(logps), torch.cat(entropies)


@dataclass(frozen=True, slots=True)
class Truncation:
    """What top-k, top-p or min-p kept at each token: the log of its total probability and, if they were found, the tokens.

    ``ids_K`` holds the kept tokens of all positions end to end, ``count_M`` (on the host) how many each has; 0 if all were
    kept. They are found with the weights that sampled and stay the same while weights change: with the set S fixed, the ratio
    of π_new(a)/π_new(S) to π_old(a)/π_old(S) has mean 1 over samples; with a set that changes it does not.
    """

    log_mass_M: Tensor
    count_M: Tensor | None = None
    ids_K: Tensor | None = None

    def part(self, tokens: slice) -> Truncation:
        """The truncation of some of the tokens."""
        if self.count_M is None or self.ids_K is None:
            return Truncation(self.log_mass_M[tokens])
        first, size = int(self.count_M[: tokens.start].sum()), int(self.count_M[tokens].sum())
        return Truncation(self.log_mass_M[tokens], self.count_M[tokens], self.ids_K[first : first + size])

    @staticmethod
    def join(parts: Sequence[Truncation]) -> Truncation:
        """The truncation of several parts' tokens, one part after the other."""
        counts = [part.count_M for part in parts if part.count_M is not None]
        ids = [part.ids_K for part in parts if part.ids_K is not None]
        masses = torch.cat([part.log_mass_M for part in parts])
        return Truncation(masses, torch.cat(counts), torch.cat(ids)) if ids else Truncation(masses)

    def kept_mask(self, logp_MV: Tensor, target_M: Tensor) -> Tensor:
        """Which tokens were kept, [M, V]; by their mass if they are not known."""
        if self.count_M is None or self.ids_K is None:
            return kept_tokens(logp_MV, target_M, self.log_mass_M)
        row_K = torch.repeat_interleave(self.count_M.to(logp_MV.device), output_size=len(self.ids_K))
        kept_MV = (self.log_mass_M >= 0)[:, None].repeat(1, logp_MV.shape[1])
        kept_MV[row_K, self.ids_K.long()] = True
        return kept_MV


def truncated_logps(
    head: Head, hidden_MD: Tensor, target_M: Tensor, temperature: float, truncation: Truncation
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of each target, entropy, log-prob before truncation), each [M]: the first two are of the distribution that is
    renormalised over the tokens that truncated sampling kept. By autograd, chunk by chunk."""
    hidden_MD = hidden_MD.to(head.weight_VD.dtype)

    def chunk(hidden: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        target = target_M[rows]
        logp_all = at_temperature(head.logits(hidden), temperature).log_softmax(-1)
        untruncated = logp_all.gather(1, target[:, None])[:, 0]
        dropped = ~truncation.part(rows).kept_mask(logp_all.detach(), target)
        logp_all = logp_all.masked_fill(dropped, -torch.inf).log_softmax(-1)
        logp_target = logp_all.gather(1, target[:, None])[:, 0]
        entropy = -torch.linalg.vecdot(logp_all.exp(), logp_all.masked_fill(dropped, 0.0))
        return logp_target, entropy, untruncated

    rows = _truncated_chunks(head, len(hidden_MD))
    chunks = [checkpoint(chunk, hidden_MD[r], r, use_reentrant=False) for r in rows]
    logps, entropies, untruncated = (torch.cat(values) for values in zip(*chunks, strict=True))
    return logps, entropies, untruncated


@torch.no_grad()
def find_kept_tokens(
    head: Head, hidden_MD: Tensor, target_M: Tensor, temperature: float, log_mass_M: Tensor, truncate: Truncate
) -> Truncation:
    """The truncation with the tokens that were kept, found with the present weights. Where the sampler did not report the mass
    (NaN), ``truncate`` decides, and the mass is that of the present weights."""
    masses, counts, ids = [], [], []
    for rows in _truncated_chunks(head, len(hidden_MD)):
        logits = head.logits(hidden_MD[rows].to(head.weight_VD.dtype))
        logp, mass, target = at_temperature(logits, temperature).log_softmax(-1), log_mass_M[rows], target_M[rows]
        kept, unknown = kept_tokens(logp, target, mass), mass.isnan()
        if bool(unknown.any()):
            own = truncate(logp).isfinite().scatter(1, target[:, None], value=True)
            own_mass = logp.masked_fill(~own, -torch.inf).logsumexp(-1).clamp(max=0.0).masked_fill(own.all(-1), 0.0)
            kept, mass = torch.where(unknown[:, None], own, kept), torch.where(unknown, own_mass.to(mass.dtype), mass)
        kept &= (mass < 0)[:, None]
        masses.append(mass)
        counts.append(kept.sum(1).cpu())
        ids.append(kept.nonzero()[:, 1].to(torch.int32))
    return Truncation(torch.cat(masses), torch.cat(counts), torch.cat(ids))


Truncate = Callable[[Tensor], Tensor]
"""Log-probs [M, V] -> the same with −inf for the tokens that truncated sampling drops."""


def _truncated_chunks(head: Head, tokens: int) -> list[slice]:
    size = max(1, head_chunk_tokens(head.weight_VD) // TRUNCATED_SHARE)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)] or [slice(0, 0)]


TRUNCATED_SHARE = 8
"""Sorting a chunk's logits takes several times their memory, so chunks are smaller by this factor."""


@torch.no_grad()
def kept_tokens(logp_MV: Tensor, target_M: Tensor, log_mass_M: Tensor) -> Tensor:
    """Which tokens top-k, top-p or min-p kept, from the log of their total probability.

    All of them keep the likeliest tokens, so the kept set is the prefix of the sorted distribution whose mass is nearest to the
    recorded one. A token that is wrongly in or out then has less probability than the rounding between sampler and learner. A
    log-mass of 0 keeps all; the sampled token is always kept.
    """
    sorted_MV = logp_MV.sort(dim=-1, descending=True).values
    distance_MV = (sorted_MV.double().exp().cumsum(-1) - log_mass_M.double().exp()[:, None]).abs()
    cutoff_M = sorted_MV.gather(1, distance_MV.argmin(-1, keepdim=True))
    kept_MV = (logp_MV >= cutoff_M) | (log_mass_M >= 0)[:, None]
    return kept_MV.scatter(1, target_M[:, None], value=True)


def _token_logps_cuda(
    head: Head, hidden_MD: Tensor, target_M: Tensor, temperature: float, accumulator: GradAccumulator | None
) -> tuple[Tensor, Tensor]:
    from oncurve.kernels.lm_head import HeadShape
    from oncurve.models.heads.lm_head_cuda import CudaHead  # needs Triton

    shape = HeadShape(head.scale, head.softcap, temperature, head.bias_V)
    out: tuple[Tensor, Tensor] = CudaHead.apply(hidden_MD, head.weight_VD, head.bias_V, target_M, shape, accumulator)  # type: ignore[no-untyped-call]
    return out


class HeadGradient:
    """Gradients of a head's input, weight and bias, from those of its logits at a temperature, chunk by chunk.

    ``needed`` says which of the three are needed; that of the input is always computed. Sums over chunks have ``dtype``.
    """

    def __init__(
        self, head: Head, temperature: float, hidden_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None,
        needed: Sequence[bool], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.head, self.temperature = head, temperature
        self.hidden_MD, self.weight_VD, self.bias_V = hidden_MD, weight_VD, bias_V
        self.grad_hidden = torch.empty_like(hidden_MD)
        self.grad_weight = torch.zeros_like(weight_VD, dtype=dtype) if needed[1] else None
        self.grad_bias = torch.zeros_like(bias_V, dtype=dtype) if bias_V is not None and needed[2] else None

    def add(self, rows: slice, grad: Tensor, z: Tensor | None) -> None:
        """Add the rows of a chunk; ``grad`` is changed. ``z``: the head's logits, needed if it has a soft cap."""
        head = self.head
        if head.scale != self.temperature:
            grad *= head.scale / self.temperature
        if head.softcap is not None:
            assert z is not None
            grad *= 1 - (z / head.softcap) ** 2
        low = grad.to(self.hidden_MD.dtype)
        self.grad_hidden[rows] = low @ self.weight_VD
        if self.grad_weight is not None:
            self.grad_weight += low.T @ self.hidden_MD[rows]
        if self.grad_bias is not None:
            self.grad_bias += grad.sum(0)

    def results(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The gradients of the head's input, weight and bias, in the precision of each."""
        weight = None if self.grad_weight is None else self.grad_weight.to(self.weight_VD.dtype)
        bias = None if self.grad_bias is None or self.bias_V is None else self.grad_bias.to(self.bias_V.dtype)
        return self.grad_hidden, weight, bias


class _ChunkedHead(torch.autograd.Function):
    """With one chunk and no soft cap, the probabilities are saved for the backward pass; otherwise each chunk is recomputed."""

    @staticmethod
    def forward(ctx, hidden_MD, weight_VD, bias_V, target_M, head: Head, temperature: float):  # type: ignore[no-untyped-def]
        chunks = vocabulary_chunks(hidden_MD.shape[0], weight_VD.shape[0])
        logps, entropies, p = [], [], None
        for rows in chunks:
            logp_all = at_temperature(head.logits(hidden_MD[rows]), temperature).log_softmax(-1)
            p = logp_all.exp()
            logps.append(logp_all.gather(1, target_M[rows, None])[:, 0])
            entropies.append(-torch.linalg.vecdot(p, logp_all))
        logp_M, entropy_M = torch.cat(logps), torch.cat(entropies)
        saved = p if len(chunks) == 1 and head.softcap is None else None
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V, target_M, entropy_M, saved)
        ctx.head, ctx.temperature = head, temperature
        return logp_M, entropy_M

    @staticmethod
    def backward(ctx, grad_logp_M, grad_entropy_M):  # type: ignore[no-untyped-def]
        hidden_MD, weight_VD, bias_V, target_M, entropy_M, saved = ctx.saved_tensors
        head, temperature = ctx.head, ctx.temperature
        with_entropy = bool(grad_entropy_M.any())
        total = HeadGradient(head, temperature, hidden_MD, weight_VD, bias_V, ctx.needs_input_grad[:3], entropy_M.dtype)
        for rows in vocabulary_chunks(hidden_MD.shape[0], weight_VD.shape[0]):
            z = head.logits(hidden_MD[rows]) if saved is None else None
            p = saved if z is None else at_temperature(z, temperature).softmax(-1)
            grad = p * -grad_logp_M[rows, None]
            grad.scatter_add_(1, target_M[rows, None], grad_logp_M[rows, None])
            if with_entropy:
                grad -= grad_entropy_M[rows, None] * p * (p.log().nan_to_num_(neginf=0.0) + entropy_M[rows, None])
            total.add(rows, grad, z)
        return *total.results(), None, None, None


def at_temperature(z: Tensor, temperature: float) -> Tensor:
    """Logits divided by the temperature."""
    return z if temperature == 1 else z / temperature


def vocabulary_chunks(rows: int, vocabulary: int) -> list[slice]:
    """Rows in chunks whose logits fit into a CPU's caches; one empty chunk if there are none."""
    size = max(1, CPU_CHUNK_LOGITS // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)] or [slice(0, 0)]
