"""The LM head in chunks: log-prob and entropy of each token without a [tokens × vocabulary] tensor.

For logits z (after the model's own scaling and soft cap, divided by the temperature): logp = z_y − lse(z), and H = lse(z) − Σ
p·z. The backward pass recomputes each chunk's logits: d logp/dz = 1_y − p and dH/dz = −p·(log p + H).
"""

from __future__ import annotations

from collections.abc import Callable
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
"""Logits held at once on a GPU: 1.2 GiB in float32. With Qwen's vocabulary that is 2112 tokens, whose weight gradient in a
model of
width 1024 has a 128 × 128 tile for every multiprocessor of an H200."""


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
    """Logits [M, V] by the model's own forward, in which the backbone returns these hidden states without being run.

    For heads with layers of their own (BERT's decoders, ModernBERT) or scales under other names than the usual ones.
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
    head: Head, hidden_MD: Tensor, target_M: Tensor, temperature: float = 1.0, accumulator: GradAccumulator | None = None
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
        logp_all = _scaled(head.logits(hidden), temperature).log_softmax(-1)
        return logp_all.gather(1, target[:, None])[:, 0], -torch.linalg.vecdot(logp_all.exp(), logp_all)

    rows = _chunks(len(hidden_MD), len(head.weight_VD))
    chunks = [checkpoint(chunk, hidden_MD[r], target_M[r], use_reentrant=False) for r in rows]
    logps, entropies = zip(*chunks, strict=True)
    return torch.cat(logps), torch.cat(entropies)


def _token_logps_cuda(
    head: Head, hidden_MD: Tensor, target_M: Tensor, temperature: float, accumulator: GradAccumulator | None
) -> tuple[Tensor, Tensor]:
    from oncurve.kernels.lm_head import HeadShape
    from oncurve.models.heads.lm_head_cuda import CudaHead  # needs Triton

    shape = HeadShape(head.scale, head.softcap, temperature, head.bias_V)
    out: tuple[Tensor, Tensor] = CudaHead.apply(hidden_MD, head.weight_VD, head.bias_V, target_M, shape, accumulator)  # type: ignore[no-untyped-call]
    return out


class _ChunkedHead(torch.autograd.Function):
    """With one chunk, its probabilities are saved for the backward pass; with several, each chunk is recomputed."""

    @staticmethod
    def forward(ctx, hidden_MD, weight_VD, bias_V, target_M, head: Head, temperature: float):  # type: ignore[no-untyped-def]
        chunks = _chunks(hidden_MD.shape[0], weight_VD.shape[0])
        logps, entropies, p = [], [], None
        for rows in chunks:
            logp_all = _scaled(head.logits(hidden_MD[rows]), temperature).log_softmax(-1)
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
        grad_hidden = torch.empty_like(hidden_MD)
        grad_weight, grad_bias = (
            torch.zeros_like(x, dtype=entropy_M.dtype) if ctx.needs_input_grad[i] else None
            for i, x in ((1, weight_VD), (2, bias_V))
        )
        for rows in _chunks(hidden_MD.shape[0], weight_VD.shape[0]):
            z = head.logits(hidden_MD[rows]) if saved is None else None
            p = saved if z is None else _scaled(z, temperature).softmax(-1)
            grad = p * -grad_logp_M[rows, None]
            grad.scatter_add_(1, target_M[rows, None], grad_logp_M[rows, None])
            if with_entropy:
                grad -= grad_entropy_M[rows, None] * p * (p.log().nan_to_num_(neginf=0.0) + entropy_M[rows, None])
            if head.scale != temperature:
                grad *= head.scale / temperature
            if head.softcap is not None:
                grad *= 1 - (z / head.softcap) ** 2
            low = grad.to(hidden_MD.dtype)
            grad_hidden[rows] = low @ weight_VD
            if grad_weight is not None:
                grad_weight += low.T @ hidden_MD[rows]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        weight, bias = (None if g is None else g.to(x.dtype) for g, x in ((grad_weight, weight_VD), (grad_bias, bias_V)))
        return grad_hidden, weight, bias, None, None, None


def _scaled(z: Tensor, temperature: float) -> Tensor:
    return z if temperature == 1 else z / temperature


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, CPU_CHUNK_LOGITS // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)] or [slice(0, 0)]
