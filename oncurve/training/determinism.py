"""`deterministic = true`: on a GPU, only algorithms that give the same bits each time; and what they cost, measured."""

from __future__ import annotations

import os
import time
from statistics import median

import numpy as np
import torch

from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
TRIES = 5
TOKENS = 256
"""Length of the completion on which the cost is measured, where the model can address as many."""


def enable_determinism(deterministic: bool, policy: Policy) -> str | None:
    """Sets torch for the run, and says what it means for this machine; None where there is nothing to say.

    On a CPU every algorithm that training uses is repeatable as it is. On a GPU some add in the order in which threads finish:
    those are exchanged, and cuBLAS gets a fixed workspace, which must be named before its first use.
    """
    on_gpu = policy.device.type == "cuda"
    if not deterministic or not on_gpu:
        return "deterministic: a CPU repeats every bit as it is" if deterministic else None
    os.environ.setdefault(WORKSPACE, ":4096:8")
    before = seconds_of_a_pass(policy)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    after = seconds_of_a_pass(policy)
    return f"deterministic algorithms: a forward and backward pass takes {after / before:.2f} × the time of one without them"


def seconds_of_a_pass(policy: Policy) -> float:
    """Median time of a forward and backward pass over one short sequence. Leaves no gradient behind."""
    size = policy.model.config.get_text_config().vocab_size
    ids = np.arange(min(TOKENS, policy.max_positions // 2), dtype=np.int64) % size
    pack = build_pack([PrefixGroup(ids[:8], (ids,), (0,))], policy.device)
    taken = []
    for _ in range(TRIES):
        begun = time.perf_counter()
        logp_M, _ = policy.pack_logps(pack)
        logp_M.sum().backward()  # type: ignore[no-untyped-call]
        if policy.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
        policy.model.zero_grad(set_to_none=True)
    return median(taken)
