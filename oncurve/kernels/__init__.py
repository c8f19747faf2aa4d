"""Triton kernels: of the decode step, and of the learner (each a forward and the derivative that autograd would compute).

They run on a GPU, and in Triton's interpreter on a CPU, where tests compare them with float64. No kernel adds with atomics:
equal inputs give equal bits. Token counts are not specialised: a pack of a new length compiles nothing.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


@cache
def can_run_kernels(device: torch.device) -> bool:
    """Whether the device is a GPU and Triton is installed. If not, torch does the same work."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
