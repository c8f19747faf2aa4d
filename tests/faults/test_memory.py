"""Out of memory: the step is repeated over smaller packs, its gradient is the same, and the log says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.models.llama import c_backbone
from oncurve.models.packing import Pack
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.runs.database.reader import RunReader
from oncurve.runs.step_notes import collect_notes
from oncurve.training.learner.learner import Learner
from oncurve.training.learner.oom_retry import OutOfMemory, retry_on_oom, sample_with_retry
from oncurve.training.stages.grpo import grpo_learner_settings
from oncurve.training.start import begin
from tests.faults.cases import GRPO, SFT, recipe
from tests.training.builders import PROMPTS, apart, graded_group, gradient, policy, snapshot, stage


class SmallGpu:
    """A device on which a pack of more than ``room`` tokens does not fit: in the forward or in the backward pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int, backward: bool = False) -> None:
        self.refused = 0
        real = Policy.pack_hidden

        def pack_hidden(mine: Policy, pack: Pack) -> torch.Tensor:
            if pack.tokens <= room:
                return real(mine, pack)
            if not backward or not torch.is_grad_enabled():
                self.refuse()
            hidden_MD = real(mine, pack)
            hidden_MD.register_hook(lambda _: self.refuse())  # type: ignore[no-untyped-call]
            return hidden_MD

        monkeypatch.setattr("oncurve.models.self_check.attention_problem", lambda *_: None)  # it needs memory too
        monkeypatch.setattr(Policy, "pack_hidden", pack_hidden)

    def refuse(self) -> None:
        self.refused += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("options", [{}, {"minibatches": 2, "updates_per_step": 2}, {"kl": {"beta": 0.1}}], ids=str)
def test_the_same_gradient_from_packs_of_half_the_size(
    options: dict[str, Any], backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    groups = [graded_group(rng, 6, [9, 7, 8, 5], name=str(i)) for i in range(4)]
    full = Learner(policy(), grpo_learner_settings(stage(**options)))
    expected = full.update(groups)
    monkeypatch.setattr("oncurve.training.learner.oom_retry.release_memory", lambda: None)
    gpu = SmallGpu(monkeypatch, room=30, backward=backward)
    small = Learner(policy(), grpo_learner_settings(stage(**options)))
    with collect_notes() as notes:
        result = small.update(groups)
    assert gpu.refused
    assert apart(gradient(small.policy.model), gradient(full.policy.model)) < 1e-5
    assert notes[0].kind == "memory"
    assert "retrying with tokens_per_pack" in notes[0].message
    for name in ("loss", "entropy", "ratio_mean", "grad_norm", "mismatch_kl"):
        assert result.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4, abs=1e-7), name
    assert small.tokens_per_pack <= 30, "later steps begin with what was enough"
    refused = gpu.refused
    small.update(groups)
    assert gpu.refused == refused


def test_a_pack_that_does_not_fit_a_cpu_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux kills the process: a pretrained model's activations of one large pack are larger than most memories."""
    rng = np.random.default_rng(0)
    groups = [graded_group(rng, 6, [9, 7, 8, 5], name=str(i)) for i in range(4)]
    monkeypatch.setattr(c_backbone, "_FREE", [])
    full, small = (Learner(policy(), grpo_learner_settings(stage())) for _ in range(2))
    assert full.policy.uses_c
    full.update(groups)
    needed = c_backbone._FREE.pop().nbytes
    monkeypatch.setattr(c_backbone, "free_memory", lambda: needed // 2)
    with collect_notes() as notes:
        small.update(groups)
    assert "out of memory (a pack's activations need" in notes[0].message
    assert apart(gradient(small.policy.model), gradient(full.policy.model)) < 1e-5


def test_torchs_allocator_for_cpus_is_understood() -> None:
    def attempt(budget: int) -> int:
        return len(torch.empty(1 << 50 if budget > 4 else 1))

    assert retry_on_oom(attempt, 16, min_budget=1, name="tokens_per_pack") == (1, 4)


def test_a_complete_run_continues_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe({**SFT, "steps": 2, "eval_every": 0}, {**GRPO, "steps": 2, "eval_every": 0})
    full = begin(config, out=tmp_path / "whole")
    monkeypatch.setattr("oncurve.training.learner.oom_retry.release_memory", lambda: None)
    SmallGpu(monkeypatch, room=40)
    small = begin(config, out=tmp_path / "small")
    with RunReader.open(small.path) as store, RunReader.open(full.path) as plain:
        assert {e.stage for e in store.events("memory")} == {"sft", "grpo"}
        for one, other in zip(store.metric("loss", "grpo"), plain.metric("loss", "grpo"), strict=True):
            assert one[1] == pytest.approx(other[1], abs=1e-6)


def test_a_single_completion_that_does_not_fit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    monkeypatch.setattr("oncurve.training.learner.oom_retry.release_memory", lambda: None)
    SmallGpu(monkeypatch, room=3)
    learner = Learner(policy(), grpo_learner_settings(stage()))
    before = snapshot(learner.policy.model)
    with pytest.raises(OutOfMemory, match=r"out of memory at \d+(.|\n)*2.00 GiB(.|\n)*max_new_tokens"):
        learner.update([graded_group(rng, 6, [9, 7], name="a")])
    assert torch.equal(snapshot(learner.policy.model), before)


def test_fewer_slots_give_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [PROMPTS.train_prompt(i) for i in range(6)]
    sampling, key = Sampling(max_new_tokens=6), SampleKey(0, 1)
    engine = NativeEngine(policy(), Engine(slots=24))
    expected = engine.sample(prompts, 4, sampling, key)
    real = NativeEngine.sample

    def cramped(mine: NativeEngine, *arguments: Any) -> Any:
        if (mine.settings.slots or 0) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(mine, *arguments)

    monkeypatch.setattr(NativeEngine, "sample", cramped)
    monkeypatch.setattr("oncurve.training.learner.oom_retry.release_memory", lambda: None)
    with collect_notes() as notes:
        result = sample_with_retry(engine, prompts, 4, sampling, key)
    texts = [[[c.text for c in g.completions] for g in groups] for groups in (expected, result)]
    assert texts[0] == texts[1]
    assert engine.settings.slots == 6
    assert [n.message.rpartition(" = ")[2] for n in notes] == ["12", "6"]


def test_halving_ends_at_the_least() -> None:
    tried: list[int] = []

    def attempt(budget: int) -> None:
        tried.append(budget)
        raise torch.OutOfMemoryError("no")

    with pytest.raises(OutOfMemory):
        retry_on_oom(attempt, 100, min_budget=30, name="tokens")
    assert tried == [100, 50, 30]
