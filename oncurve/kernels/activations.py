"""Activations of an MLP, in float32, as functions that kernels inline."""
# ruff: noqa: RET505 (Triton compiles the branches of a chain, not what follows a return)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(x, NAME: tl.constexpr):
    if NAME == "silu":
        return x / (1.0 + tl.exp(-x))
    elif NAME == "gelu_tanh":  # ½(1 + tanh z) is the sigmoid of 2z
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "relu":
        return tl.maximum(x, 0.0)
    else:
        tl.static_assert(NAME == "relu_squared")
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
