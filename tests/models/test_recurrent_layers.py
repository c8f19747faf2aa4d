"""Hybrid models through our contexts: a state per slot, and one prompt's state for all completions of its group."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.nemotron_h import modeling_nemotron_h

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.native.session import served_request, torch_session
from oncurve.models import recurrent_layers
from oncurve.models.fisher import vocab_logps
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.models.recurrent_layers import RecurrentLayer
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Prompt
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.training.stages.grpo import GrpoLoop
from tests.engines.native.plain import next_logits
from tests.engines.native.test_parked_slots import SlowEcho, mixed
from tests.engines.native.test_turns import Echo
from tests.models.architectures import tokenizer
from tests.models.test_attention_interface import build, with_larger_weights
from tests.training.builders import PROMPTS, digits, stage

DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LAYERS = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 8}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**LAYERS, **DELTA_NET, **EXPERTS},
    "qwen3_5_text": {**LAYERS, **DELTA_NET},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "head_dim": 8,
    },
}
ROUNDING = 2e-4
"""Delta-nets normalise queries and keys in float32: for short random vectors this enlarges differences of 1e-6."""
SAMPLING = Sampling(max_new_tokens=12, min_new_tokens=4)
TEXTS = ("a", "hello", "the quick brown fox jumps over")


def hybrid(family: str) -> PreTrainedModel:
    return with_larger_weights(build(family, **HYBRIDS[family]))


def open_hybrid(family: str) -> Policy:
    policy = Policy(hybrid(family), tokenizer())
    assert policy.general_reason is None
    assert recurrent_layers.is_attached(policy.model)
    return policy


def plain_logps(model: PreTrainedModel, prompt_ids: np.ndarray, token_ids: np.ndarray) -> Tensor:
    logps = next_logits(model, prompt_ids, token_ids).log_softmax(-1)
    return logps.gather(1, torch.from_numpy(token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("family", HYBRIDS)
def test_sampled_logps_are_those_of_a_plain_forward(family: str) -> None:
    """Prompts of one token, of one bucket and of several; every slot is used more than once."""
    prompts = [Prompt(id=text, text=text) for text in TEXTS]
    groups = NativeEngine(open_hybrid(family), Engine(slots=4)).sample(prompts, 4, SAMPLING, SampleKey(0, 1))
    plain = hybrid(family)
    for group in groups:
        for completion in group.completions:
            expected = plain_logps(plain, group.prompt_ids, completion.token_ids)
            np.testing.assert_allclose(completion.logps, expected.numpy(), atol=ROUNDING)


@pytest.mark.parametrize("family", HYBRIDS)
def test_completions_do_not_depend_on_what_else_is_queued(family: str) -> None:
    engine = NativeEngine(open_hybrid(family), Engine(slots=4))
    prompts = [Prompt(id=text, text=text) for text in TEXTS]
    together = engine.sample(prompts, 4, SAMPLING, SampleKey(0, 1))
    for i, prompt in enumerate(prompts):
        (alone,) = engine.sample([prompt], 4, SAMPLING, SampleKey(0, 1))
        for one, other in zip(together[i].completions, alone.completions, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.logps, other.logps)


@pytest.mark.parametrize("family", HYBRIDS)
def test_gradients_flow_through_the_state_of_a_shared_prompt(family: str) -> None:
    policy, plain = open_hybrid(family), hybrid(family)
    rng = np.random.default_rng(0)
    groups = [
        PrefixGroup(rng.integers(3, 20, 3), tuple(rng.integers(3, 20, n) for n in (1, 5, 3)), (0, 1, 2)),
        PrefixGroup(rng.integers(3, 20, 9), tuple(rng.integers(3, 20, n) for n in (4, 7)), (3, 4)),
    ]
    pack = build_pack(groups, policy.device)
    weight = torch.linspace(-1, 1, len(pack.target_M))
    (policy.pack_logps(pack)[0] * weight).sum().backward()  # type: ignore[no-untyped-call]
    rows = [torch.from_numpy(np.concatenate((g.prompt_ids, ids))) for g in groups for ids in g.completion_ids]
    prompts = [len(g.prompt_ids) for g in groups for _ in g.completion_ids]
    logps = []
    for row, prompt in zip(rows, prompts, strict=True):
        logits = plain(input_ids=row[None], use_cache=False).logits[0, prompt - 1 : -1]
        logps.append(logits.float().log_softmax(-1).gather(1, row[prompt:, None])[:, 0])
    (torch.cat(logps) * weight).sum().backward()  # type: ignore[no-untyped-call]
    total = sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None) ** 0.5
    for (name, ours), theirs in zip(policy.model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
        else:
            assert ours.grad is not None, name
            assert (ours.grad - theirs.grad).norm() < 1e-4 * theirs.grad.norm() + 1e-6 * total, name


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "mamba2", "nemotron_h"])
def test_an_environment_replies_within_the_state(family: str, is_slow: bool) -> None:
    """A slow one parks its slot: the others advance, and its state stays as it is."""
    policy, calls = open_hybrid(family), ("a", "b", "c", "d")
    prompt = Prompt(id="p", text="hello", environment=SlowEcho(mixed, calls=calls) if is_slow else Echo(calls=calls))
    (group,) = NativeEngine(policy, Engine(slots=4)).sample([prompt], 4, Sampling(max_new_tokens=30), SampleKey(0, 1))
    assert any(not c.loss_mask.all() for c in group.completions)
    plain = hybrid(family)
    for completion in group.completions:
        mask_T = completion.loss_mask
        expected = plain_logps(plain, group.prompt_ids, completion.token_ids).numpy()
        np.testing.assert_allclose(completion.logps[mask_T], expected[mask_T], atol=ROUNDING)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_a_session_serves_a_hybrid(family: str) -> None:
    policy = open_hybrid(family)
    session = torch_session(policy, slots=2, max_new_tokens=8)
    ids = [policy.encode(Prompt(id=text, text=text)) for text in TEXTS]
    for prompt_ids in ids:
        session.submit(served_request(prompt_ids, 1, Sampling(max_new_tokens=8, min_new_tokens=8), seed=0))
    tokens: dict[int, list[tuple[int, float]]] = {}
    while session.requests:
        for token in session.step():
            tokens.setdefault(token.request, []).append((token.token_id, token.logp))
    plain = hybrid(family)
    for request, sampled in tokens.items():
        token_ids, logps = np.array([t for t, _ in sampled]), [logp for _, logp in sampled]
        np.testing.assert_allclose(logps, plain_logps(plain, ids[request], token_ids).numpy(), atol=ROUNDING)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_a_grpo_step_learns_from_what_was_sampled(family: str) -> None:
    options = stage(sampling={"max_new_tokens": 8}, optimiser={"learning_rate": 1e-3})
    engine = NativeEngine(open_hybrid(family), Engine(slots=16))
    metrics = GrpoLoop(options, 0, PROMPTS, engine, RewardMix([FunctionReward(digits, "f")])).step(1).metrics
    assert 0 < metrics["mismatch_max"] < 5 * ROUNDING
    assert metrics["grad_norm"] > 0


def test_a_copy_runs_its_own_weights() -> None:
    policy = open_hybrid("qwen3_next")
    ids = np.arange(3, 9)
    pack = build_pack([PrefixGroup(ids[:2], (ids[2:4], ids[4:]), (0, 1))], policy.device)
    twin, before = policy.copy(), policy.pack_logps(pack)[0].detach()
    with torch.no_grad():
        for module in twin.model.modules():
            if isinstance(module, RecurrentLayer):
                module.out_proj.weight.mul_(2)  # type: ignore[union-attr, operator]
    assert not torch.allclose(twin.pack_logps(pack)[0], before)
    torch.testing.assert_close(policy.pack_logps(pack)[0], before, rtol=0, atol=0)


def test_fisher_products_see_the_state() -> None:
    policy = open_hybrid("qwen3_next")
    ids = np.arange(3, 14)
    pack = build_pack([PrefixGroup(ids[:4], (ids[4:7], ids[7:]), (0, 1))], policy.device)
    logp_MV = vocab_logps(policy, pack, 1.0)
    expected_M, _ = policy.pack_logps(pack)
    torch.testing.assert_close(logp_MV.gather(1, pack.target_M[:, None])[:, 0], expected_M, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "mamba2"])
def test_gradients_of_completions_with_one_input(family: str) -> None:
    """For a single token and a state, Mamba 2 has a form that overwrites the state, and no gradient."""
    policy, ids = open_hybrid(family), np.arange(3, 9)
    pack = build_pack([PrefixGroup(ids[:3], (ids[3:5], ids[4:6]), (0, 1))], policy.device)
    policy.pack_logps(pack)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None or p.grad.isfinite().all() for p in policy.model.parameters())


def test_sixteen_bits_hide_no_difference_between_a_sequence_and_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers decodes Nemotron-H without the limit of its step size: outputs differ by 1 %, as by rounding to bfloat16."""
    monkeypatch.setenv("ONCURVE_CACHE", str(tmp_path))
    limited = Policy(hybrid("nemotron_h").to(torch.bfloat16), tokenizer())
    assert limited.general_reason is None
    step = modeling_nemotron_h.mamba2_selective_state_update
    monkeypatch.setattr(modeling_nemotron_h, "mamba2_selective_state_update", step.plain_rule)
    monkeypatch.setattr(recurrent_layers, "_limit_steps", lambda modeling: None)
    monkeypatch.setenv("ONCURVE_CACHE", str(tmp_path / "empty"))
    unlimited = Policy(hybrid("nemotron_h").to(torch.bfloat16), tokenizer())
    assert "token by token" in (unlimited.general_reason or "")


def test_a_layer_whose_state_is_wrong_takes_another_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose decoding differs from its forward must not be sampled through our contexts."""
    monkeypatch.setenv("ONCURVE_CACHE", str(tmp_path))  # the right layer's check may be remembered
    model = hybrid("qwen3_next")
    right = recurrent_layers.LayerState.update_conv_state

    def forgets(self: Any, conv_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        inputs = right(self, conv_states, *arguments, **options)
        self.conv_states = {index: torch.zeros_like(x) for index, x in self.conv_states.items()}
        return inputs

    monkeypatch.setattr(recurrent_layers.LayerState, "update_conv_state", forgets)
    policy = Policy(copy.deepcopy(model), tokenizer())
    assert policy.general_reason is not None
    assert "token by token" in policy.general_reason
