"""Loading: chat templates, their options and system prompts, and messages for what can't be loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from oncurve.errors import MissingPackage, ModelError, RecipeError
from oncurve.model_families import expected_path
from oncurve.models.heads.classifier import build_classifier
from oncurve.models.loading.load import ModelSummary, load_policy
from oncurve.recipe.schema.model import Model, TinyModel
from oncurve.records import Prompt
from tests.models.tiny_families import tiny_model

SMALL = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=48, context=64)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
DROPS = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
REFUSES = "{% for m in messages if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endfor %}"
THINKS = PLAIN + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
PROMPT = Prompt(id="p", messages=({"role": "user", "content": "1+2"},))


def saved(folder: Path, template: str | None) -> str:
    policy = load_policy(Model(tiny=SMALL), alphabet="0123456789+=[]usrynassitembf.B ", seed=0)
    policy.tokenizer.chat_template = template
    policy.save(folder)
    return str(folder)


def text_of(config: Model, prompt: Prompt = PROMPT) -> str:
    policy = load_policy(config, alphabet=None, seed=0)
    return str(policy.tokenizer.decode(policy.encode(prompt)))


def test_the_system_prompt_is_added_to_prompts_without_one(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", PLAIN)
    assert text_of(Model(source=source)) == "[user]1+2[assistant]"
    assert text_of(Model(source=source, system_prompt="Be brief")).startswith("[system]Be brief[user]1+2")
    prompt = Prompt(id="p", messages=({"role": "system", "content": "am"}, {"role": "user", "content": "1"}))
    assert text_of(Model(source=source, system_prompt="Be brief"), prompt) == "[system]am[user]1[assistant]"


@pytest.mark.parametrize(("template", "why"), [(DROPS, "drops system messages"), (REFUSES, "System role not supported")])
def test_a_template_without_the_system_role(template: str, why: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", template)
    with pytest.raises(RecipeError, match=why):
        load_policy(Model(source=source, system_prompt="Be brief"), alphabet=None, seed=0)


def test_a_role_that_the_template_refuses_is_an_error_naming_the_prompt(tmp_path: Path) -> None:
    policy = load_policy(Model(source=saved(tmp_path / "m", REFUSES)), alphabet=None, seed=0)
    with pytest.raises(ModelError, match="System role not supported") as caught:
        policy.encode(Prompt(id="file.jsonl/7", messages=({"role": "system", "content": "a"},)))
    assert caught.value.where == "file.jsonl/7"


def test_template_options(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", THINKS)
    assert text_of(Model(source=source)).endswith("[assistant]")
    assert text_of(Model(source=source, template_options={"enable_thinking": False})).endswith("<think></think>")
    with pytest.raises(RecipeError, match="does not read it"):
        load_policy(Model(source=source, template_options={"thinking": False}), alphabet=None, seed=0)


def test_the_summary_of_a_loaded_model(tmp_path: Path) -> None:
    summary = ModelSummary.of(load_policy(Model(source=saved(tmp_path / "m", PLAIN)), alphabet=None, seed=0))
    assert (summary.architecture, summary.context, summary.template, summary.ends) == ("Qwen3ForCausalLM", 64, True, ("<end>",))
    assert summary.trained == summary.parameters
    assert "Qwen3ForCausalLM" in str(summary)


@pytest.mark.parametrize(
    ("source", "message"),
    [("./nothing", "no such folder"), ("a/b/c/d", "no such folder"), ("none.gguf", "no such file")],
)
def test_a_missing_source_is_refused(source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_policy(Model(source=source), alphabet=None, seed=0)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"without config\.json \(it holds notes\.txt\)"):
        load_policy(Model(source=str(tmp_path)), alphabet=None, seed=0)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("qwen2_vl", r"a model with vision input \(qwen2_vl\)"),
        ("llava", r"a model with vision input \(llava\)"),
        ("qwen2_audio", r"a model with audio input \(qwen2_audio\)"),
        ("t5", "a model of type t5"),
        ("vit", "a model of type vit"),
    ],
)
def test_a_model_that_is_no_decoder_of_text_is_refused(family: str, message: str, tmp_path: Path) -> None:
    source = Path(saved(tmp_path / "m", PLAIN))
    AutoConfig.for_model(family).save_pretrained(source)
    assert expected_path(json.loads((source / "config.json").read_text())).path in ("refused", "unknown")
    with pytest.raises(ModelError, match=message) as caught:
        load_policy(Model(source=str(source)), alphabet=None, seed=0)
    assert "AutoModel" not in caught.value.because


def test_weights_in_a_pickle_are_not_opened(tmp_path: Path) -> None:
    source = Path(saved(tmp_path / "m", PLAIN))
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(ModelError, match="weights in pytorch_model") as caught:
        load_policy(Model(source=str(source)), alphabet=None, seed=0)
    assert "pickle" in str(caught.value)
    assert "save_pretrained" in str(caught.value)


def test_an_unreachable_hub_fails_fast(tmp_path: Path) -> None:
    """In a subprocess, because the hub's client reads the environment once. `.invalid` never resolves."""
    command = [sys.executable, "-m", "oncurve", "chat", "Nobody/Nothing"]
    away = {"HF_ENDPOINT": "https://hub.invalid", "HF_HOME": str(tmp_path)}
    plain = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    result = subprocess.run(command, env=plain | away, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error Nobody/Nothing: no such folder")
    assert "hub.invalid can't be reached" in " ".join(result.stderr.split())
    assert "Retrying" not in result.stderr + result.stdout


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    gone: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in gone else real(name, *rest))
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(20))
    file: dict[str, Any] = {"source": str(tmp_path / "m.gguf")}
    quantised: dict[str, Any] = {"source": saved(tmp_path / "m", None), "quantise": "nf4", "lora": {"rank": 2}}
    for package, extra, config in (
        ("gguf", "gguf", file),
        ("accelerate", "gguf", file),
        ("bitsandbytes", "qlora", quantised),
    ):
        gone.clear()
        gone.add(package)
        with pytest.raises(MissingPackage, match=rf"{package} is not installed[^$]*oncurve\[{extra}\]"):
            load_policy(Model.model_validate(config), alphabet=None, seed=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "deepseek_v3"])
def test_16_bit_weights_keep_what_transformers_keeps_in_float32(family: str, dtype: str, tmp_path: Path) -> None:
    """With frequencies of the rotary embedding in bfloat16, angles at position 400 are off by up to a radian."""
    policy_tokenizer = load_policy(Model(tiny=SMALL), alphabet="0123456789", seed=0).tokenizer
    policy_tokenizer.save_pretrained(tmp_path)
    tiny_model(family).save_pretrained(tmp_path)
    policy = load_policy(Model(source=str(tmp_path), dtype=dtype, device="cpu"), alphabet=None, seed=0)  # type: ignore[arg-type]
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    for (name, ours), (_, theirs) in zip(
        [*policy.model.named_parameters(), *policy.model.named_buffers()],
        [*own.named_parameters(), *own.named_buffers()],
        strict=True,
    ):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name


def test_the_built_in_model_in_16_bits_has_frequencies_in_float32() -> None:
    full, rounded = (
        load_policy(Model(tiny=SMALL, dtype=d, device="cpu"), alphabet="01", seed=0) for d in ("float32", "bfloat16")
    )
    assert all(p.dtype == torch.bfloat16 for p in rounded.model.parameters())
    for (name, one), (_, other) in zip(full.model.named_buffers(), rounded.model.named_buffers(), strict=True):
        assert torch.equal(one, other), name
    classifier = build_classifier(rounded, ("reward",), 0, by_token=False)
    for (name, one), (_, other) in zip(full.model.model.named_buffers(), classifier.model.named_buffers(), strict=True):
        assert torch.equal(one, other), name
