"""float16 weights: the loss scale, gradients against float32, and what an overflow does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from oncurve.errors import RecipeError
from oncurve.recipe.schema.sections import Optimiser as Settings
from oncurve.runs.database.reader import RunReader
from oncurve.training.learner.learner import Learner
from oncurve.training.learner.optimiser import LossScaler, Optimiser
from oncurve.training.stages.grpo import grpo_learner_settings
from oncurve.training.start import begin
from tests.training.builders import apart, graded_group, gradient, policy, recipe, snapshot, stage
from tests.training.stages.test_iterative_grpo import in_slices

SMALL_GRADIENTS = 1e-5
"""Advantages of this size have gradients that float16 can't represent without a scale."""


def test_the_scale_follows_torchs_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executed beside `torch.amp.GradScaler`, with gradients that overflow here and there."""
    monkeypatch.setattr(LossScaler, "GROWTH_INTERVAL", 3)
    model = nn.Linear(2, 2, bias=False).half()
    ours = Optimiser(model, Settings(learning_rate=1e-9), updates=20)
    weight = nn.Parameter(torch.ones(2, 2))
    theirs, adam = torch.amp.GradScaler("cpu", growth_interval=3), torch.optim.AdamW([weight], lr=0.0)
    assert ours.scaler is not None
    for step, overflows in enumerate([True, True, *[False] * 7, True, *[False] * 4]):
        ours.zero_grad()
        adam.zero_grad()
        factor = float("inf") if overflows else 1e-3
        ours.scaled(model.weight.float().sum() * factor).backward()  # type: ignore[no-untyped-call]
        ours.add_autograd_grads()
        theirs.scale((weight * factor).sum()).backward()  # type: ignore[no-untyped-call]
        theirs.step(adam)
        theirs.update()
        update = ours.step()
        assert update.skipped == overflows
        assert ours.scaler.scale == theirs.get_scale(), step
        if not overflows:
            assert update.grad_norm == pytest.approx(2e-3, rel=1e-3), "unscaled before it is clipped and reported"


def small_gradient(dtype: str, *, scales: bool = True) -> torch.Tensor:
    group = graded_group(np.random.default_rng(0), 5, (6, 4, 7))
    group = type(group)(group.scored, tuple(a * np.float32(SMALL_GRADIENTS) for a in group.advantages), group.graded)
    learner = Learner(policy(dtype=dtype), grpo_learner_settings(stage()))
    if not scales:
        learner.optimiser.scaler = None
    learner.update([group])
    if dtype == "float32":
        return gradient(learner.policy.model)
    return torch.cat([m.grad.flatten() for m in learner.optimiser.masters if m.grad is not None])


def test_gradients_are_those_of_float32() -> None:
    exact = small_gradient("float32")
    assert apart(small_gradient("float16"), exact) < 0.01
    assert apart(small_gradient("float16", scales=False), exact) > 0.1, "these gradients need no scale"


def test_an_overflow_skips_the_update_and_halves_the_scale() -> None:
    learner = Learner(policy(dtype="float16"), grpo_learner_settings(stage(optimiser={"learning_rate": 0.1})))
    scaler = learner.optimiser.scaler
    assert scaler is not None
    scaler.scale, before = 2.0**40, snapshot(learner.policy.model)
    metrics = learner.update([graded_group(np.random.default_rng(0), 5, (6, 4))]).metrics
    assert (metrics["skipped_updates"], metrics["loss_scale"], scaler.scale) == (1.0, 2.0**40, 2.0**39)
    assert torch.equal(snapshot(learner.policy.model), before)
    scaler.scale = 2.0**10
    assert learner.update([graded_group(np.random.default_rng(0), 5, (6, 4))]).metrics["skipped_updates"] == 0
    assert not torch.equal(snapshot(learner.policy.model), before)


def test_a_run_resumes_to_the_same_bits_with_its_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossScaler, "GROWTH_INTERVAL", 2)
    config = recipe("model.dtype=float16", "task.heldout=3", "grpo.save_every=1", "grpo.steps=3")
    full, sliced = begin(config, out=tmp_path / "whole"), in_slices(config, tmp_path / "sliced")
    with RunReader.open(full.path) as one, RunReader.open(sliced.path) as other:
        assert one.fingerprint() == other.fingerprint()
        scales = [one.metrics_of("grpo", step)["loss_scale"] for step in (1, 2, 3)]
    assert len(set(scales)) > 1, "the scale has changed during the run"
    assert (full.model / "model.safetensors").read_bytes() == (sliced.model / "model.safetensors").read_bytes()


@pytest.mark.parametrize("change", ["scale.shard=full", "ppo.critic.trunk=shared"])
def test_what_has_no_scale_is_refused(change: str) -> None:
    sets = ["model.dtype=float16", change] + (["stages.1.type=ppo"] if change.startswith("ppo") else ["scale.ranks=2"])
    with pytest.raises(RecipeError, match="scale"):
        recipe(*sets)
