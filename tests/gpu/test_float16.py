"""float16 on a real GPU: log-probs of sampler and learner, gradients, and the loss scale in runs of the trainer."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Group, Prompt
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.runs.database.reader import RunReader
from oncurve.training.learner.learner import Learner
from oncurve.training.learner.optimiser import LossScaler
from oncurve.training.stages.grpo import GrpoLoop, grpo_learner_settings
from oncurve.training.start import begin
from tests.engines.native.plain import next_logits, prompt_of
from tests.models.architectures import make_model, tokenizer
from tests.training.builders import PROMPTS, apart, digits, graded_group, policy, recipe, snapshot, stage
from tests.training.learner.test_float16 import SMALL_GRADIENTS

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FAMILIES = ["llama", "qwen3", "gemma2"]
"""Two with fast paths, and one whose learner runs its own modules."""
LENGTHS = (1, 3, 64, 65, 300)
SAMPLING = Sampling(temperature=0.8, max_new_tokens=60)


def engine_of(family: str) -> NativeEngine:
    """With half of the weights' usual size, as in the other tests in 16 bits, so that rounding is not multiplied."""
    model = make_model(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "embed" not in name:
                parameter.mul_(0.5)
    return NativeEngine(Policy(model.to(DEVICE, torch.float16), tokenizer()), Engine(slots=8))


def logps_of(model: torch.nn.Module, group: Group, index: int) -> Tensor:
    """Of one completion, by a plain forward of the model at the sampler's temperature."""
    token_ids = group.completions[index].token_ids
    logps_TV = (next_logits(model, group.prompt_ids, token_ids) / SAMPLING.temperature).log_softmax(-1)
    return logps_TV.gather(1, torch.from_numpy(token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logps_are_those_of_a_float32_forward(family: str) -> None:
    """Within 0.003 on average, an eighth of what bfloat16 is allowed: float16 has three more bits."""
    engine = engine_of(family)
    exact = copy.deepcopy(engine.policy.model).float().cpu()
    exact.set_attn_implementation("eager")
    groups = engine.sample([prompt_of(n) for n in LENGTHS], 3, SAMPLING, SampleKey(0, 1))
    assert engine.graph_decoder is None or engine.graph_decoder.use_cuda_graphs
    assert DEVICE == "cpu" or engine.graph_decoder is not None
    found = [
        (torch.from_numpy(completion.logps) - logps_of(exact, group, index)).abs()
        for group in groups
        for index, completion in enumerate(group.completions)
    ]
    assert float(torch.cat(found).mean()) < 0.003
    assert float(torch.cat(found).max()) < 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_learner_computes_what_was_sampled(family: str) -> None:
    config = stage(sampling={"max_new_tokens": 12}, optimiser={"learning_rate": 1e-5})
    loop = GrpoLoop(config, 0, PROMPTS, engine_of(family), RewardMix([FunctionReward(digits, "f")]))
    metrics = loop.step(1).metrics
    assert abs(metrics["mismatch_kl"]) < 1e-3
    assert metrics["mismatch_max"] < 0.1
    assert metrics["loss_scale"] == LossScaler.FIRST
    assert metrics["skipped_updates"] == 0
    assert 0 < metrics["grad_norm"] < math.inf


def gradient_of(dtype: str, device: str, size: float, *, scales: bool = True) -> Tensor:
    """Of the master weights after one update, with advantages of this size."""
    group = graded_group(np.random.default_rng(0), 5, (6, 4, 7))
    group = type(group)(group.scored, tuple(a * np.float32(size) for a in group.advantages), group.graded)
    learner = Learner(policy(dtype=dtype, device=device), grpo_learner_settings(stage()))
    if not scales:
        learner.optimiser.scaler = None
    learner.update([group])
    pairs = zip(learner.optimiser.weights, learner.optimiser.masters, strict=True)
    return torch.cat(
        [(torch.zeros_like(w, dtype=torch.float32) if m.grad is None else m.grad).flatten().cpu() for w, m in pairs]
    )


@pytest.mark.parametrize("size", [1.0, SMALL_GRADIENTS])
def test_gradients_are_those_of_float32(size: float) -> None:
    exact = gradient_of("float32", "cpu", size)
    assert apart(gradient_of("float16", DEVICE, size), exact) < 0.02
    if size == SMALL_GRADIENTS:
        assert apart(gradient_of("float16", DEVICE, size, scales=False), exact) > 0.05, "these gradients need no scale"


def test_an_overflow_skips_the_update_and_halves_the_scale() -> None:
    options = grpo_learner_settings(stage(optimiser={"learning_rate": 0.1}))
    learner = Learner(policy(dtype="float16", device=DEVICE), options)
    scaler = learner.optimiser.scaler
    assert scaler is not None
    scaler.scale, before = 2.0**40, snapshot(learner.policy.model)
    metrics = learner.update([graded_group(np.random.default_rng(0), 5, (6, 4))]).metrics
    assert (metrics["skipped_updates"], metrics["loss_scale"], scaler.scale) == (1.0, 2.0**40, 2.0**39)
    assert torch.equal(snapshot(learner.policy.model), before)
    scaler.scale = 2.0**10
    assert learner.update([graded_group(np.random.default_rng(0), 5, (6, 4))]).metrics["skipped_updates"] == 0
    assert not torch.equal(snapshot(learner.policy.model), before)


def metrics_of_run(folder: Path, *sets: str) -> list[dict[str, float]]:
    """The metrics of each grpo step of a run in float16."""
    config = recipe("model.dtype=float16", f"model.device={DEVICE}", "task.heldout=3", "grpo.sampling.max_new_tokens=12", *sets)
    with RunReader.open(begin(config, out=folder).path) as run:
        return [dict(run.metrics_of("grpo", step)) for step in range(1, 5)]


def test_a_run_trains_with_a_scaled_loss(tmp_path: Path) -> None:
    steps = metrics_of_run(tmp_path / "run")
    assert [m["loss_scale"] for m in steps] == [LossScaler.FIRST] * 4
    assert all(m["skipped_updates"] == 0 for m in steps)
    assert all(abs(m["mismatch_kl"]) < 1e-3 and math.isfinite(m["loss"]) for m in steps)
    assert any(m["grad_norm"] > 0 for m in steps)


def test_overflows_in_a_run_halve_the_scale_until_an_update_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossScaler, "FIRST", 2.0**40)
    steps = metrics_of_run(tmp_path / "overflows")
    scale = 2.0**40
    for metrics in steps:
        if "loss_scale" not in metrics:  # no group had a signal: no update
            continue
        assert metrics["loss_scale"] == scale
        assert metrics["skipped_updates"] == 1
        scale /= 2
    assert scale < 2.0**40


@pytest.mark.parametrize("family", ["llama"])
def test_a_prompt_alone_has_the_same_bits(family: str) -> None:
    engine = engine_of(family)
    together = engine.sample([prompt_of(n) for n in LENGTHS], 3, SAMPLING, SampleKey(0, 1))
    for length, group in zip(LENGTHS, together, strict=True):
        prompts: list[Prompt] = [prompt_of(length)]
        (alone,) = engine.sample(prompts, 3, SAMPLING, SampleKey(0, 1))
        for one, other in zip(group.completions, alone.completions, strict=True):
            assert one.token_ids.tobytes() == other.token_ids.tobytes()
            assert one.logps.tobytes() == other.logps.tobytes()
