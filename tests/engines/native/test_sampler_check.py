"""The sampler is compared with the model's own forward when an engine or a session is opened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oncurve.engines.native import kv_cache, sampler_check
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.native.general_runner import GeneralRunner
from oncurve.engines.native.kv_cache import DecodeLayout
from oncurve.engines.native.sampler_check import check_sampler
from oncurve.engines.native.session import open_session
from oncurve.errors import ModelError, RecipeError
from oncurve.models.attention_interface import ScoreRule
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine
from tests.models.architectures import ARCHITECTURES, make_model, tokenizer
from tests.models.tiny_families import tiny_model


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONCURVE_CACHE", str(tmp_path))
    return tmp_path


def policies() -> list[Any]:
    return [*ARCHITECTURES, "mamba2", "gptj", "falcon"]


def policy(name: str, dtype: torch.dtype = torch.float32) -> Policy:
    model = make_model(name) if name in ARCHITECTURES else tiny_model(name)
    return Policy(model.to(dtype), tokenizer())


@pytest.mark.parametrize("name", policies())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_runner_has_the_log_probs_of_the_plain_forward(name: str, dtype: torch.dtype) -> None:
    engine = NativeEngine(policy(name, dtype), Engine())
    check_sampler(engine)
    check = engine.policy.check
    assert check.sampler_difference is not None
    assert check.sampler_difference < (1e-5 if dtype == torch.float32 else check.tolerance)
    assert ", of the sampler by " in engine.log_lines[-1]
    path = engine.log_lines[-1].rpartition("; it runs on: ")[2]
    is_fused = engine.policy.fast_backbone is not None
    assert path.startswith("fast path" if is_fused else ("the model's own modules", "general path"))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gptj"])
def test_a_session_too(name: str) -> None:
    session = open_session(policy(name), 2, 8)
    assert session.policy.check.sampler_difference is not None
    assert session.policy.check.sampler_difference < 1e-5


def test_a_sampler_that_ignores_the_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = DecodeLayout.attend

    def without_window(self: DecodeLayout, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        return attend(self, layer, q, k, v, replace(rule, window=None))

    opened = policy("gemma2")
    monkeypatch.setattr(DecodeLayout, "attend", without_window)
    with pytest.raises(ModelError, match="the sampler's log-probs differ"):
        check_sampler(NativeEngine(opened, Engine()))


def test_a_sampler_that_mixes_its_slots_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    next_logits = GeneralRunner._next_logits
    monkeypatch.setattr(GeneralRunner, "_next_logits", lambda self, at_S: next_logits(self, at_S).roll(1, 0))
    with pytest.raises(ModelError, match="the sampler's log-probs differ"):
        check_sampler(NativeEngine(policy("gptj"), Engine()))


FP8 = Engine(kv_dtype="fp8")


def test_an_fp8_cache_is_checked_apart_from_the_runner() -> None:
    """The runner by the usual tolerance, and its rounding by a wider one."""
    engine = NativeEngine(policy("qwen3"), FP8)
    check_sampler(engine)
    difference = engine.policy.check.sampler_difference
    assert difference is not None
    assert difference < 1e-5
    assert engine.fp8_difference is not None
    assert engine.policy.check.tolerance < engine.fp8_difference < sampler_check.MAX_FP8_DIFFERENCE
    assert f"differ from the model's own by {engine.fp8_difference:.1e} nats; torch decodes" in engine.log_lines[0]


def test_an_fp8_cache_hides_no_wrong_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = DecodeLayout.attend

    def shifted(self: DecodeLayout, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        return attend(self, layer, q, k, v, replace(rule, scale=1.01 * rule.scale))

    opened = policy("qwen3")
    monkeypatch.setattr(DecodeLayout, "attend", shifted)
    with pytest.raises(ModelError, match="the sampler's log-probs differ"):
        check_sampler(NativeEngine(opened, FP8))


def test_a_model_that_needs_more_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "rounded_to_fp8", lambda x: x.sign())
    with pytest.raises(ModelError, match=r'with an FP8 KV cache.*\n.*\n.*engine\.kv_dtype = "auto"'):
        check_sampler(NativeEngine(policy("qwen3"), FP8))


def test_the_general_path_has_no_fp8_cache() -> None:
    with pytest.raises(RecipeError, match="decodes with transformers' own KV cache") as caught:
        NativeEngine(policy("gptj"), FP8)
    assert caught.value.where == "engine.kv_dtype"


def test_the_result_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    first = policy("llama")
    check_sampler(NativeEngine(first, Engine()))
    monkeypatch.setattr(sampler_check, "_plain_difference", lambda *_: pytest.fail("sampled again"))
    second = policy("llama")
    check_sampler(NativeEngine(second, Engine()))
    assert second.check.sampler_difference == first.check.sampler_difference


def test_the_log_says_why_a_model_runs_its_own_modules() -> None:
    model = make_model("llama")
    model.base_model.layers[0].mlp.scale = nn.Parameter(torch.ones(1))
    (line,) = NativeEngine(Policy(model, tokenizer()), Engine()).log_lines
    assert "own modules (parameters besides linear layers and norms (layers.0.mlp.scale)); a group's completions" in line
