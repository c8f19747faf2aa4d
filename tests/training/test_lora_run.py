"""A run with LoRA: small checkpoints, exact resume in time slices, a merged model and a separate adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oncurve.models import lora
from oncurve.operations.run_model import export, load_run
from oncurve.operations.verify import verify
from oncurve.recipe.schema.model import Model
from oncurve.runs.checkpoints.listing import RunTarget
from oncurve.training.start import begin, task_for
from tests.training.builders import policy, recipe
from tests.training.stages.test_iterative_grpo import in_slices


def test_a_run_with_an_adapter_ends_in_the_same_bits_and_exports_a_plain_model(tmp_path: Path) -> None:
    means = ("grpo.kl.beta=0.1", "grpo.kl.refresh_every=1", "grpo.kl.refresh_mix=0.3", "grpo.entropy.target=9")
    config = recipe("model.lora.rank=2", *means, "grpo.entropy.top_share=0.5", "task.heldout=3", "grpo.save_every=2")
    full, sliced = begin(config, out=tmp_path / "whole"), in_slices(config, tmp_path / "sliced")
    one, other = (load_file(run.model / "model.safetensors") for run in (full, sliced))
    assert all(torch.equal(one[name], other[name]) for name in one)
    kept = load_file(full.checkpoints / "grpo-000004" / "model.safetensors")
    assert kept
    assert all("lora_" in name for name in kept)
    assert sum(t.numel() for t in kept.values()) < sum(t.numel() for t in one.values()) / 4
    saved = load_file(full.path / "adapter" / lora.WEIGHTS)
    assert sum(t.numel() for t in saved.values()) == sum(t.numel() for t in kept.values())
    assert not lora.is_attached(load_run(full).model)
    export(RunTarget(full), tmp_path / "plain")
    assert torch.equal(load_file(tmp_path / "plain" / "model.safetensors")["model.norm.weight"], one["model.norm.weight"])
    assert Model(source=str(tmp_path / "plain")).lora is None


def test_verify_accepts_a_run_that_started_from_an_adapter(tmp_path: Path) -> None:
    """Its model is a plain one and is checked as such: the adapter that it started from belongs to another base."""
    short = ("model.lora.rank=2", "task.heldout=3", "sft.steps=1", "grpo.steps=1")
    first = begin(recipe(*short), out=tmp_path / "first")
    second = begin(recipe(*short, f"model.adapter={first.path / 'adapter'}"), out=tmp_path / "second")
    plain = f"{sum(p.numel() for p in policy(alphabet=alphabet()).model.parameters()):,} parameters"
    for run in (first, second):
        result = {check.name: check for check in verify(run)}
        assert result["model"].mark == "ok", result["model"]
        assert plain in result["model"].message


def alphabet() -> str:
    config = recipe()
    return task_for(config, config.stages[0]).alphabet or ""


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_run_over_a_quantised_base_ends_in_the_same_bits_and_exports_a_plain_model(kind: str, tmp_path: Path) -> None:
    policy(alphabet="0123456789+=<>/abcdefghijklmnopqrstuvwxyz ,:").save(tmp_path / "base")
    change = [f"model.source={tmp_path / 'base'}", f"model.quantise={kind}", "model.lora.rank=2", "model.device=cpu"]
    config = recipe(*change, "grpo.kl.beta=0.1", "task.heldout=3", "grpo.save_every=2")
    full, sliced = begin(config, out=tmp_path / "whole"), in_slices(config, tmp_path / "sliced")
    one, other = (load_file(run.model / "model.safetensors") for run in (full, sliced))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {t.dtype for t in one.values()} == {torch.float32}
    assert all("lora_" in name for name in load_file(full.checkpoints / "grpo-000004" / "model.safetensors"))
    assert not lora.is_attached(load_run(full).model)
