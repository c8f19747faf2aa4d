"""One token of the gated delta rule for every slot, in place: each state is read once and written once.

    S ← S · exp(g);    S ← S + k ⊗ β (v − kᵀS);    out = qᵀS / √dk

Yang et al. 2024, "Gated Delta Networks". q and k are normalised as in transformers, x / √(Σx² + 1e-6), all in float32.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 32
"""Columns of a state that one program holds."""


@triton.jit
def _step(q, k, v, g, beta, state, active, out, H, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
          NORMALISE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    key = tl.arange(0, DK)
    if tl.load(active + row // H) != 0:
        q_K = tl.load(q + row * DK + key).to(tl.float32)
        k_K = tl.load(k + row * DK + key).to(tl.float32)
        if NORMALISE:
            q_K = q_K / tl.sqrt(tl.sum(q_K * q_K) + 1e-6)
            k_K = k_K / tl.sqrt(tl.sum(k_K * k_K) + 1e-6)
        v_V = tl.load(v + row * DV + column).to(tl.float32)
        place = (row * DK + key)[:, None] * DV + column[None, :]
        s_KV = tl.load(state + place) * tl.exp(tl.load(g + row).to(tl.float32))
        delta_V = (v_V - tl.sum(s_KV * k_K[:, None], 0)) * tl.load(beta + row).to(tl.float32)
        s_KV += k_K[:, None] * delta_V[None, :]
        tl.store(state + place, s_KV)
        tl.store(out + row * DV + column, tl.sum(s_KV * q_K[:, None], 0) / tl.sqrt(DK * 1.0))
    else:
        tl.store(out + row * DV + column, tl.zeros([BV], tl.float32))


def can_step(state_SHKV: Tensor) -> bool:
    """Whether the kernel fits a state: float32, contiguous, head sizes that are powers of two and at least 16."""
    sizes = state_SHKV.shape[2:]
    fits = all(size >= 16 and size & (size - 1) == 0 for size in sizes)
    return fits and state_SHKV.dtype == torch.float32 and state_SHKV.is_contiguous()


def delta_rule_step(
    q_SHK: Tensor, k_SHK: Tensor, v_SHV: Tensor, g_SH: Tensor, beta_SH: Tensor, state_SHKV: Tensor, active_S: Tensor,
    normalise: bool,
) -> Tensor:  # fmt: skip
    """The output of one token for every slot, [S, H, dv] in v's dtype. States of active slots are updated in place."""
    S, H, DK, DV = state_SHKV.shape
    out = torch.empty((S, H, DV), dtype=torch.float32, device=v_SHV.device)
    inputs = [x.contiguous() for x in (q_SHK, k_SHK, v_SHV, g_SH, beta_SH)]
    columns = min(COLUMNS, DV)
    _step[(S * H, DV // columns)](*inputs, state_SHKV, active_S, out, H, DK=DK, DV=DV, BV=columns, NORMALISE=normalise)
    return out.to(v_SHV.dtype)
