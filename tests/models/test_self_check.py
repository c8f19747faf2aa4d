"""The self-check: tolerance by precision, what it remembers, and what it never lets pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from oncurve.errors import ModelError
from oncurve.models import check_memory, self_check
from oncurve.models.general_path import Decoding
from oncurve.models.policy import Policy
from oncurve.models.self_check import SelfCheck
from tests.models.architectures import adapted, make_model, tokenizer
from tests.models.test_attention_interface import build, with_larger_weights
from tests.models.tiny_families import tiny_model

MAMBA2 = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty memory."""
    monkeypatch.setenv("ONCURVE_CACHE", str(tmp_path))
    return tmp_path / "self_checks"


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next", "lfm2", "jamba", "falcon", "llama", "mixtral"])
def test_models_in_bfloat16_are_run_and_their_tolerance_covers_rounding(family: str, memory: Path) -> None:
    """A recurrence and its chunked form round differently; the tolerance follows the model's own sensitivity to rounding."""
    rounded = tiny_model(family).to(torch.bfloat16)
    exact = tiny_model(family)
    exact.load_state_dict(rounded.state_dict())
    check = Policy(rounded, tokenizer()).check
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        logps = [
            m.set_attn_implementation("eager") or m(input_ids=ids).logits.float().log_softmax(-1) for m in (rounded, exact)
        ]
    assert check.conclusive
    assert check.difference <= check.tolerance
    assert float((logps[0] - logps[1]).abs().mean()) < check.tolerance < 1.0
    assert Policy(exact, tokenizer()).check.tolerance < 1e-3


def test_a_remembered_check_runs_nothing(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def models() -> list[PreTrainedModel]:
        return [make_model("gemma2"), *(with_larger_weights(build(name)) for name in ("mamba", "openai-gpt"))]

    first = [Policy(m, tokenizer()).check for m in models()]
    assert [c.general_reason is None for c in first] == [True, False, False]
    assert first[2].decoding is Decoding.COMPLETE
    assert not any(c.is_remembered for c in first)
    monkeypatch.setattr(self_check, "attention_problem", lambda *_: pytest.fail("the model was checked again"))
    again = [
        Policy(m, tokenizer())
        for m in (make_model("gemma2"), with_larger_weights(build("mamba")), with_larger_weights(build("openai-gpt")))
    ]
    for policy, check in zip(again, first, strict=True):
        assert replace(policy.check, seconds=0.0, is_remembered=False) == replace(check, seconds=0.0)
        assert policy.check.is_remembered
        assert "cached result" in policy.check.log_line(is_fused=False)


def _other_weight(model: PreTrainedModel) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)


@pytest.mark.parametrize(
    "change",
    [_other_weight, lambda m: m.to(torch.bfloat16), lambda m: adapted(m), lambda m: setattr(m.config, "sliding_window", 9)],
    ids=["weights", "dtype", "adapter", "config"],
)
def test_whatever_changes_the_numbers_is_checked_again(memory: Path, change: Any) -> None:
    Policy(make_model("gemma2"), tokenizer())
    model = make_model("gemma2")
    change(model)
    assert not Policy(model, tokenizer()).check.is_remembered


@pytest.mark.parametrize("what", ["torch", "transformers", "oncurve"])
def test_another_version_is_checked_again(memory: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    Policy(make_model("gemma2"), tokenizer())
    monkeypatch.setattr(getattr(check_memory, what), "__version__", "0.0.1")
    assert not Policy(make_model("gemma2"), tokenizer()).check.is_remembered


def test_another_class_with_the_same_weights_is_checked_again(memory: Path) -> None:
    """A model that brings its own code can change it without changing its weights."""
    Policy(make_model("gemma2"), tokenizer())
    model = make_model("gemma2")
    model.__class__ = type("Gemma2WithItsOwnCode", (type(model),), {})
    assert not Policy(model, tokenizer()).check.is_remembered


@pytest.mark.parametrize("damage", ["", "[1]", "{}", '{"decoding": "guess"}', '{"decoding": "cache", "more": 1}'])
def test_a_damaged_memory_is_checked_again(memory: Path, damage: str) -> None:
    Policy(make_model("gemma2"), tokenizer())
    (file,) = memory.iterdir()
    file.write_text(damage)
    assert not Policy(make_model("gemma2"), tokenizer()).check.is_remembered
    assert json.loads(file.read_text())["general_reason"] is None


def test_a_cache_folder_that_can_not_be_written_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONCURVE_CACHE", str(tmp_path / "file"))
    assert Policy(make_model("gemma2"), tokenizer()).check.tolerance > 0


def test_an_inconclusive_check_says_so_again(memory: Path) -> None:
    def uniform() -> PreTrainedModel:
        model = build("llama")
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1e-4)
        return model

    for _ in range(2):
        check = Policy(uniform(), tokenizer()).check
        assert not check.conclusive
        assert "inconclusive" in check.log_line(is_fused=True)
    assert not Policy(uniform(), tokenizer()).copy().check.conclusive


def test_a_copy_keeps_the_check(memory: Path) -> None:
    for model in (make_model("gemma2"), with_larger_weights(build("mamba2", **MAMBA2)), with_larger_weights(build("falcon"))):
        policy = Policy(model, tokenizer())
        assert policy.copy().check == policy.check
        assert policy.copy().model.config._attn_implementation == policy.model.config._attn_implementation


def test_a_forward_that_changes_its_own_weights_is_refused(memory: Path) -> None:
    """RWKV divides weights in place in its first forward in evaluation mode; a saved model would be divided again."""
    assert Policy(with_larger_weights(build("rwkv", rescale_every=0)), tokenizer()).general_reason is not None
    with pytest.raises(ModelError, match="changes its own weights"):
        Policy(with_larger_weights(build("rwkv", rescale_every=1)), tokenizer())


def test_a_model_without_gradients_in_evaluation_mode_is_refused(memory: Path) -> None:
    with pytest.raises(ModelError, match="backward fails"):
        Policy(tiny_model("reformer"), tokenizer())


def test_the_key_covers_every_tensor() -> None:
    model = make_model("llama")
    keys = {check_memory.key_of(model)}
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.flatten()[0] += 1.0
        keys.add(check_memory.key_of(model))
    assert len(keys) == 1 + len(list(model.parameters()))
    assert check_memory.key_of(model) == check_memory.key_of(model)


def test_a_check_survives_json() -> None:
    check = SelfCheck(general_reason="r", decoding=Decoding.COMPLETE, own_head=True, difference=1e-6, tolerance=1e-4)
    assert SelfCheck.from_json(json.loads(json.dumps(check.to_json()))) == check
