"""`deterministic = true`: use only GPU algorithms that give the same bits each time, and measure what they cost."""

from __future__ import annotations

import os
import time
from statistics import median

import numpy as np
import torch

from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REPEATS = 5
TOKENS = 256
"""Length of the completion on which the cost is measured, or half of the model's positions if that is less."""


def enable_determinism(deterministic: bool, policy: Policy) -> str | None:
    """Configures torch. Returns a line for the run's log; None if there is nothing to log.

    On a CPU every algorithm that training uses is deterministic. On a GPU some sum in the order in which threads finish: those
    are replaced, and cuBLAS gets a fixed workspace, which must be set before its first use.
    """
    on_gpu = policy.device.type == "cuda"
    if not deterministic or not on_gpu:
        return "deterministic: on a CPU training always repeats bit for bit" if deterministic else None
    os.environ.setdefault(WORKSPACE, ":4096:8")
    before = measure_pass_seconds(policy)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    after = measure_pass_seconds(policy)
    return f"deterministic algorithms: a forward and backward pass takes {after / before:.2f} × as long as without them"


def measure_pass_seconds(policy: Policy) -> float:
    """Median seconds of a forward and backward pass over one short sequence. Clears its gradient."""
    size = policy.model.config.get_text_config().vocab_size
    ids = np.arange(min(TOKENS, policy.max_positions // 2), dtype=np.int64) % size
    pack = build_pack([PrefixGroup(ids[:8], (ids,), (0,))], policy.device)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        logp_M, _ = policy.pack_logps(pack)
        logp_M.sum().backward()  # type: ignore[no-untyped-call]
        if policy.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        policy.model.zero_grad(set_to_none=True)
    return median(seconds)
