"""A run with LoRA: small checkpoints, exact resume in time slices, a merged model and a separate adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from oncurve.errors import RecipeError
from oncurve.models import lora
from oncurve.operations.run_model import export, load_run
from oncurve.operations.verify import verify
from oncurve.recipe.schema.model import Model
from oncurve.runs.checkpoints.listing import RunTarget, find_checkpoint
from oncurve.runs.folder import RunFolder
from oncurve.training import start
from oncurve.training.start import begin, fork, resume, task_for
from oncurve.training.trainer import TimeUp
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


def test_qlora_over_experts_is_refused_in_new_runs_and_continues_in_runs_of_an_earlier_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = policy(alphabet="0123456789+=<>/abcdefghijklmnopqrstuvwxyz ,:")
    small.save(tmp_path / "base")
    settings = AutoConfig.for_model(
        "qwen3_moe", vocab_size=small.model.config.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=32,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path / "base")
    change = [f"model.source={tmp_path / 'base'}", "model.quantise=nf4", "model.lora.rank=2", "model.device=cpu"]
    config = recipe(*change, "task.heldout=3", "sft.steps=2", "sft.save_every=1", "grpo.steps=1")
    with pytest.raises(RecipeError, match=r"not in linear modules.*layers\.0\.mlp\.experts\."):
        begin(config, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(start, "check_quantised", lambda *_: None)  # as an earlier release
    with pytest.raises(TimeUp):
        begin(config, out=tmp_path / "run", minutes=1e-9)
    monkeypatch.undo()
    run = resume(RunFolder(tmp_path / "run"))
    assert run.state().current_status == "finished"
    assert lora.quantised_modules(load_run(run, find_checkpoint(run, "sft-1")).model)
    assert fork(run, 1, [], stage="sft", out=tmp_path / "fork").state().current_status == "finished"
