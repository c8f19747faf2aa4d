"""Triton kernels of the learner, each a pair of plain functions: forward, and the derivative that autograd would compute.

They run on a GPU, and in Triton's interpreter on a CPU, where tests compare them with float64. No kernel adds with atomics:
equal inputs give equal bits. Numbers of tokens are plain arguments, not specialised: a pack of a new length compiles nothing.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


@cache
def can_run_kernels(device: torch.device) -> bool:
    """Whether they do: on a GPU, with Triton installed. Elsewhere torch does the same work."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
