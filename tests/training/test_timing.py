"""Seconds by phase, and the FLOPs of an update's formulas."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.training.stages.dpo import DpoLoop
from oncurve.training.stages.sft import SftLoop
from oncurve.training.start import task_for
from oncurve.training.timing import DevicePhases, matmul_rate, model_flops
from tests.faults.cases import SFT, recipe
from tests.models.architectures import tokenizer
from tests.models.test_experts import mixture
from tests.training.builders import policy
from tests.training.stages import test_dpo


def test_phases_add_up_and_the_rest_is_idle() -> None:
    phases = DevicePhases(torch.device("cpu"))
    for _ in range(2):
        with phases("forward"):
            time.sleep(0.02)
    time.sleep(0.03)
    seconds = phases.seconds()
    assert set(seconds) == {"forward", "idle"}
    assert seconds["forward"] >= 0.04
    assert seconds["idle"] >= 0.03


def test_flops_by_hand() -> None:
    """One layer of 32 with 2 heads of 16, 1 key head, MLP 48, vocabulary 19; prompt of 3, completions of 2 and 4 tokens.

    A token is multiplied with 32·32 (q) + 2·32·16 (k, v) + 32·32 (out) + 3·32·48 (MLP) weights. Fed are 3 + 1 + 3 tokens,
    predicted 6. Pairs of query and key: 6 in the prompt, 1·3 + 1 and 3·3 + 6 in the completions.
    """
    model = policy()
    ids = np.arange(3, 7, dtype=np.int64)
    pack = build_pack([PrefixGroup(ids[:3], (ids[:2], ids), (0, 1))], model.device)
    assert pack.scores == 6 + 4 + 15
    weights = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    forward = 2 * (7 * weights + 6 * 32 * 19) + 4 * 32 * 25
    assert model_flops(model, [pack], forward=1, backward=0) == forward
    assert model_flops(model, [pack, pack], forward=2, backward=1) == 2 * (2 * forward + 2 * forward)


def test_flops_of_experts_are_those_that_a_token_takes() -> None:
    """As torch counts them in the model's own forward, whose attention it does not count."""
    model = Policy(mixture("qwen3_moe"), tokenizer())
    ids = np.arange(3, 12, dtype=np.int64)
    pack = build_pack([PrefixGroup(ids[:1], (ids,), (0,))], model.device)
    plain = mixture("qwen3_moe")
    plain.set_experts_implementation("eager")  # torch does not count those of other implementations
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        plain.model(torch.tensor(ids)[None], use_cache=False)
    heads, _, head_size = model.attention_sizes
    attention = 4 * heads * head_size * model.model.config.num_hidden_layers * pack.scores
    head = 2 * 9 * model.head.weight_VD.numel()
    assert model_flops(model, [pack], forward=1, backward=0) - attention - head == counted.get_total_flops()


def test_the_matmul_rate_is_measured_once_and_changes_no_random_number() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    rate = matmul_rate(torch.device("cpu"), torch.float32)
    assert rate > 1e8
    assert matmul_rate(torch.device("cpu"), torch.float32) == rate
    assert torch.equal(torch.get_rng_state(), before)


def test_every_stage_that_updates_reports_utilisation() -> None:
    """Tokens per second, MFU and peak memory are metrics of sft and dpo too."""
    config = recipe(SFT)
    chosen: Any = config.stages[0]
    written = SftLoop(chosen, 0, task_for(config, chosen), policy(alphabet="0123456789+=<>/abcdefghijklmnopqrstuvwxyz "))
    compared = DpoLoop(test_dpo.stage(batch_size=6), 0, policy(), test_dpo.PAIRS)
    for loop in (written, compared):
        metrics = loop.step(1).metrics
        assert all(metrics[name] > 0 for name in ("tokens_per_s", "update_tflops", "mfu", "memory_mib"))
