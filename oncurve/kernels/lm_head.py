"""Log-prob, entropy and log-sum-exp of a chunk of logits, and their derivative: one pass over each row, in float32.

For z = softcap(scale · (logit + bias)) / temperature: lse(z), z of the target, H = lse − Σ p·z. Backward, with gradients g of
the log-prob and h of the entropy: dz = g·(1_target − p) − h·p·(log p + H), times dz/d(logit). ``C`` are the rows of a chunk.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
LEAST = tl.constexpr(-1e30)
"""Stands for −∞ if that would be multiplied by 0 or subtracted from itself."""


@triton.jit
def _shaped(raw, scale, softcap, inv_temperature, SOFTCAP: tl.constexpr):
    """z of a raw logit, and its derivative dz/d(raw)."""
    z = raw * scale
    if SOFTCAP:
        t = 1.0 - 2.0 / (tl.exp(2.0 * z / softcap) + 1.0)  # tanh
        z = softcap * t
        slope = (1.0 - t * t) * scale * inv_temperature
    else:
        slope = scale * inv_temperature
    return z * inv_temperature, slope


@triton.jit
def _z(logits, bias, at, scale, softcap, inv_temperature, V: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """z of some elements of a row; −∞ past its end."""
    raw = tl.load(logits + at, mask=at < V, other=0.0).to(tl.float32)
    if BIAS:
        raw += tl.load(bias + at, mask=at < V, other=0.0).to(tl.float32)
    z, _ = _shaped(raw, scale, softcap, inv_temperature, SOFTCAP)
    return tl.where(at < V, z, float("-inf"))


@triton.jit
def _head_forward(logits, bias, target, logp, entropy, lse, stride, scale, softcap, inv_temperature,
             V: tl.constexpr, B: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    m = tl.full([B], float("-inf"), tl.float32)
    total = tl.zeros([B], tl.float32)
    mean = tl.zeros([B], tl.float32)
    for first in range(0, V, 4 * B):
        # Four blocks at a time: the sums are scaled to a new maximum once for all of them.
        at = first + tl.arange(0, B)
        z0 = _z(logits, bias, at, scale, softcap, inv_temperature, V, BIAS, SOFTCAP)
        z1 = _z(logits, bias, at + B, scale, softcap, inv_temperature, V, BIAS, SOFTCAP)
        z2 = _z(logits, bias, at + 2 * B, scale, softcap, inv_temperature, V, BIAS, SOFTCAP)
        z3 = _z(logits, bias, at + 3 * B, scale, softcap, inv_temperature, V, BIAS, SOFTCAP)
        new = tl.maximum(m, tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3)))
        base = tl.maximum(new, LEAST)  # a lane past the vocabulary's end has no maximum yet
        shrink = tl.exp(m - base)
        e0, e1, e2, e3 = tl.exp(z0 - base), tl.exp(z1 - base), tl.exp(z2 - base), tl.exp(z3 - base)
        total = total * shrink + ((e0 + e1) + (e2 + e3))
        low0, low1, low2, low3 = tl.maximum(z0, LEAST), tl.maximum(z1, LEAST), tl.maximum(z2, LEAST), tl.maximum(z3, LEAST)
        mean = mean * shrink + ((e0 * low0 + e1 * low1) + (e2 * low2 + e3 * low3))
        m = new
    top = tl.max(m, 0)
    shrink = tl.exp(m - top)
    row_total = tl.sum(total * shrink, 0)
    row_lse = top + tl.log(row_total)
    chosen = tl.load(target + row)
    raw = tl.load(logits + chosen).to(tl.float32)
    if BIAS:
        raw += tl.load(bias + chosen).to(tl.float32)
    z, _ = _shaped(raw, scale, softcap, inv_temperature, SOFTCAP)
    tl.store(lse + row, row_lse)
    tl.store(logp + row, z - row_lse)
    tl.store(entropy + row, row_lse - tl.sum(mean * shrink, 0) / row_total)


@triton.jit
def _head_backward(logits, bias, target, entropy, lse, g_logp, g_entropy, out, stride, stride_out, scale, softcap,
              inv_temperature, V: tl.constexpr, B: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY:
              tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    raw = tl.load(logits + row * stride + at, mask=at < V, other=0.0).to(tl.float32)
    if BIAS:
        raw += tl.load(bias + at, mask=at < V, other=0.0).to(tl.float32)
    z, slope = _shaped(raw, scale, softcap, inv_temperature, SOFTCAP)
    logp = z - tl.load(lse + row)
    p = tl.exp(logp)
    g = tl.load(g_logp + row)
    grad = tl.where(at == tl.load(target + row), g, 0.0) - g * p
    if ENTROPY:
        grad -= tl.load(g_entropy + row) * p * (logp + tl.load(entropy + row))
    tl.store(out + row * stride_out + at, (grad * slope).to(out.dtype.element_ty), mask=at < V)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The head's settings, from which z (see the top of this file) follows for each logit."""

    scale: float
    softcap: float | None
    temperature: float
    bias_V: Tensor | None

    @property
    def numbers(self) -> tuple[float, float, float]:
        return self.scale, self.softcap or 1.0, 1.0 / self.temperature

    @property
    def flags(self) -> dict[str, bool]:
        return {"BIAS": self.bias_V is not None, "SOFTCAP": self.softcap is not None}


def statistics(logits_CV: Tensor, target_C: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of the target, entropy, log-sum-exp) of each row, in float32."""
    C, V = logits_CV.shape
    logp, entropy, lse = torch.empty(3, C, device=logits_CV.device)
    bias = logits_CV if shape.bias_V is None else shape.bias_V
    _head_forward[(C,)](
        logits_CV, bias, target_C, logp, entropy, lse, logits_CV.stride(0), *shape.numbers,
        V=V, B=BLOCK, num_warps=16, **shape.flags,
    )  # fmt: skip
    return logp, entropy, lse


def gradient(
    logits_CV: Tensor, target_C: Tensor, shape: HeadShape, known: tuple[Tensor, Tensor],
    g_logp_C: Tensor, g_entropy_C: Tensor | None, out_CV: Tensor,
) -> None:  # fmt: skip
    """Write the gradient of the raw logits into ``out_CV``, which may be the logits themselves. ``known``: entropy and lse."""
    C, V = logits_CV.shape
    bias = logits_CV if shape.bias_V is None else shape.bias_V
    _head_backward[(C, triton.cdiv(V, BLOCK))](
        logits_CV, bias, target_C, *known, g_logp_C, g_logp_C if g_entropy_C is None else g_entropy_C, out_CV,
        logits_CV.stride(0), out_CV.stride(0), *shape.numbers,
        V=V, B=BLOCK, num_warps=4, ENTROPY=g_entropy_C is not None, **shape.flags,
    )  # fmt: skip
