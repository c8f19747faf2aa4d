"""Hybrid models on a real GPU: states of slots in captured graphs, log-probs against a plain forward, and a GRPO step."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.training.stages.grpo import GrpoLoop
from tests.engines.native.plain import prompt_of
from tests.models.architectures import tokenizer
from tests.models.test_recurrent_layers import hybrid
from tests.training.builders import PROMPTS, digits, stage

pytestmark = pytest.mark.gpu

LENGTHS = (1, 3, 64, 65, 200)
SAMPLING = Sampling(max_new_tokens=24, min_new_tokens=24)


def engine_of(family: str, dtype: torch.dtype) -> NativeEngine:
    policy = Policy(hybrid(family).to("cuda", dtype), tokenizer())
    assert policy.general_reason is None, policy.general_reason
    return NativeEngine(policy, Engine(slots=6))


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sampled_logps_are_those_of_a_plain_forward(family: str, dtype: torch.dtype) -> None:
    """Against a float32 forward with the same weights: as close as the model's own forward in this precision."""
    engine = engine_of(family, dtype)
    groups = engine.sample([prompt_of(n) for n in LENGTHS], 4, SAMPLING, SampleKey(0, 1))
    assert engine.graph_decoder is not None
    assert engine.graph_decoder.graphs or family == "qwen3_next", "decoded without CUDA graphs"
    plain, exact = (copy.deepcopy(engine.policy.model).to(precision) for precision in (dtype, torch.float32))
    ours, theirs = [], []
    for group in groups:
        for completion in group.completions:
            expected = logps_of(exact, group.prompt_ids, completion.token_ids)
            ours.append(np.abs(completion.logps - expected))
            theirs.append(np.abs(logps_of(plain, group.prompt_ids, completion.token_ids) - expected))
    assert np.concatenate(ours).mean() < 2 * np.concatenate(theirs).mean() + 1e-5
    assert dtype == torch.bfloat16 or np.concatenate(ours).max() < 1e-3


@torch.no_grad()
def logps_of(model: PreTrainedModel, prompt_ids: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    model.set_attn_implementation("eager")
    ids = torch.tensor([[*prompt_ids.tolist(), *token_ids.tolist()]], device="cuda")
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float()
    logps: np.ndarray = logits.log_softmax(-1).gather(1, ids[0, len(prompt_ids) :, None])[:, 0].cpu().numpy()
    return logps


def test_completions_do_not_depend_on_what_else_is_queued() -> None:
    engine = engine_of("qwen3_5_text", torch.bfloat16)
    together = engine.sample([prompt_of(n) for n in LENGTHS], 4, SAMPLING, SampleKey(0, 1))
    for i, length in enumerate(LENGTHS):
        (alone,) = engine.sample([prompt_of(length)], 4, SAMPLING, SampleKey(0, 1))
        for one, other in zip(together[i].completions, alone.completions, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.logps, other.logps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grpo_step_learns_from_what_was_sampled(dtype: torch.dtype) -> None:
    options = stage(sampling={"max_new_tokens": 8}, optimiser={"learning_rate": 1e-3})
    loop = GrpoLoop(options, 0, PROMPTS, engine_of("qwen3_5_text", dtype), RewardMix([FunctionReward(digits, "f")]))
    metrics = loop.step(1).metrics
    assert metrics["mismatch_kl"] < (1e-6 if dtype == torch.float32 else 0.01)
    assert metrics["grad_norm"] > 0
