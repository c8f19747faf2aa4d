"""Sampling on the general path: the same completions whatever is queued, environments, sessions, and a GRPO step."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import ModelError
from oncurve.models.fisher import vocab_logps
from oncurve.models.loading.load import build_tokenizer
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.parallel.fsdp import ShardedPolicy
from oncurve.models.policy import Policy
from oncurve.operations.replay import replay
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Prompt
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.training.stages.grpo import GrpoLoop
from oncurve.training.start import begin
from tests.engines.native.plain import next_logits
from tests.engines.native.test_parked_slots import SlowEcho, mixed
from tests.engines.native.test_turns import Echo
from tests.models.architectures import tokenizer
from tests.models.test_attention_interface import GENERAL, build, with_larger_weights
from tests.training.builders import PROMPTS, digits, recipe, stage
from tests.training.stages.test_iterative_grpo import in_slices

FAMILIES = ("mamba", "bloom", "gptj")
SAMPLING = Sampling(max_new_tokens=20, min_new_tokens=4)


def policy(family: str) -> Policy:
    made = Policy(with_larger_weights(build(family, **GENERAL[family])), tokenizer())
    assert made.general_reason is not None
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_completions_do_not_depend_on_what_else_is_queued(family: str) -> None:
    engine = NativeEngine(policy(family), Engine(slots=4))
    prompts = [Prompt(id=str(i), text="abc" * (i + 1)) for i in range(3)]
    together = engine.sample(prompts, 4, SAMPLING, SampleKey(0, 1))
    alone = engine.sample(prompts[1:2], 4, SAMPLING, SampleKey(0, 1))
    for one, other in zip(together[1].completions, alone[0].completions, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logps, other.logps)


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_environment_replies_within_the_cache(family: str, is_slow: bool) -> None:
    """Every sampled token has the log-prob of a plain forward over all that was written before it, replies included."""
    calls = ("a", "b", "c", "d")
    environment = SlowEcho(mixed, calls=calls) if is_slow else Echo(calls=calls)
    opened = policy(family)
    prompt = Prompt(id="p", text="hello", environment=environment)
    group = NativeEngine(opened, Engine(slots=4)).sample([prompt], 4, Sampling(max_new_tokens=30), SampleKey(0, 1))[0]
    assert any(not c.loss_mask.all() for c in group.completions)
    for completion in group.completions:
        logits_TV = next_logits(opened.model, group.prompt_ids, completion.token_ids)
        expected_T = logits_TV.log_softmax(-1).gather(1, torch.from_numpy(completion.token_ids)[:, None])[:, 0]
        mask_T = completion.loss_mask
        np.testing.assert_allclose(completion.logps[mask_T], expected_T.numpy()[mask_T], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_grpo_step_learns_from_what_was_sampled(family: str) -> None:
    options = stage(sampling={"max_new_tokens": 8}, optimiser={"learning_rate": 1e-3})
    loop = GrpoLoop(
        options, 0, PROMPTS, NativeEngine(policy(family), Engine(slots=16)), RewardMix([FunctionReward(digits, "f")])
    )
    metrics = loop.step(1).metrics
    assert 0 < metrics["mismatch_max"] < 1e-4
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("family", ["bloom", "openai-gpt"])
def test_the_prompt_is_computed_once_for_a_group(family: str) -> None:
    """Then one token per step and block, or the complete row where the cache can't be used."""
    opened = Policy(with_larger_weights(build(family)), tokenizer())
    shapes: list[tuple[int, ...]] = []
    opened.backbone.register_forward_pre_hook(
        lambda _, args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    NativeEngine(opened, Engine(slots=8)).sample(
        [Prompt(id="p", text="abcdefgh")], 8, Sampling(max_new_tokens=6, min_new_tokens=6), SampleKey(0, 1)
    )
    prompt, *steps = shapes
    assert prompt == (1, 7)
    assert all(rows == 8 for rows, _ in steps)
    tokens = [length for _, length in steps[:6]]
    assert tokens == ([1] * 6 if family == "bloom" else list(range(8, 14)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["falcon", "mamba", "xlstm", "openai-gpt"])
def test_a_run_ends_in_the_same_bits_if_it_is_stopped_and_replays(family: str, tmp_path: Path) -> None:
    tokens = build_tokenizer("0123456789+=")
    shape = {"vocab_size": len(tokens)} | GENERAL.get(family, {})
    model = with_larger_weights(build(family, **shape))
    model.save_pretrained(tmp_path / "model")
    tokens.save_pretrained(tmp_path / "model")
    config = recipe(f"model.source={tmp_path / 'model'}", "grpo.save_every=2", "grpo.optimiser.learning_rate=0.001")
    full, sliced = begin(config, out=tmp_path / "full"), in_slices(config, tmp_path / "sliced")
    one, other = (load_file(run.model / "model.safetensors") for run in (full, sliced))
    assert all(torch.equal(one[name], other[name]) for name in one)
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert any(not torch.equal(one[name], start[name]) for name in one)
    for step in (1, 4):
        assert replay(full, None, step, 0).differences == []


def test_a_pass_through_our_attention_is_refused() -> None:
    """TRPO's Fisher products need one; the model's own layers would ignore our context and mix the completions of a pack."""
    ids = np.arange(3, 9)
    opened = policy("gptj")
    pack = build_pack([PrefixGroup(ids[:2], (ids[2:4], ids[4:]), (0, 1))], opened.device)
    with pytest.raises(ModelError, match="a pass through our attention"):
        vocab_logps(opened, pack, 1.0)


def test_it_is_not_sharded() -> None:
    with pytest.raises(ModelError, match="can't be sharded by FSDP2"):
        ShardedPolicy(policy("gptj"), torch.device("cpu"), lambda name: nullcontext(), offload=False, gather=True, tensor=1)
