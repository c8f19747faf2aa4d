"""Loading: chat templates and their oddities, switches, system prompts, and messages for what can't be loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oncurve.errors import ModelError, RecipeError
from oncurve.models.loading.load import ModelSummary, load_policy
from oncurve.recipe.schema.model import Model, TinyModel
from oncurve.records import Prompt

SMALL = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=48, context=64)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
DROPS = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
REFUSES = "{% for m in messages if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endfor %}"
THINKS = PLAIN + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
ASKED = Prompt(id="p", messages=({"role": "user", "content": "1+2"},))


def saved(folder: Path, template: str | None) -> str:
    policy = load_policy(Model(tiny=SMALL), alphabet="0123456789+=[]usrynassitembf.B ", seed=0)
    policy.tokenizer.chat_template = template
    policy.save(folder)
    return str(folder)


def text_of(config: Model, prompt: Prompt = ASKED) -> str:
    policy = load_policy(config, alphabet=None, seed=0)
    return str(policy.tokenizer.decode(policy.encode(prompt)))


def test_system_prompts_go_before_prompts_that_have_none(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", PLAIN)
    assert text_of(Model(source=source)) == "[user]1+2[assistant]"
    assert text_of(Model(source=source, system_prompt="Be brief")).startswith("[system]Be brief[user]1+2")
    own = Prompt(id="p", messages=({"role": "system", "content": "am"}, {"role": "user", "content": "1"}))
    assert text_of(Model(source=source, system_prompt="Be brief"), own) == "[system]am[user]1[assistant]"


@pytest.mark.parametrize(("template", "why"), [(DROPS, "drops system messages"), (REFUSES, "System role not supported")])
def test_a_template_without_the_system_role(template: str, why: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "m", template)
    with pytest.raises(RecipeError, match=why):
        load_policy(Model(source=source, system_prompt="Be brief"), alphabet=None, seed=0)


def test_a_role_that_the_template_refuses_is_told_with_the_prompt(tmp_path: Path) -> None:
    policy = load_policy(Model(source=saved(tmp_path / "m", REFUSES)), alphabet=None, seed=0)
    with pytest.raises(ModelError, match="System role not supported") as told:
        policy.encode(Prompt(id="file.jsonl/7", messages=({"role": "system", "content": "a"},)))
    assert told.value.where == "file.jsonl/7"


def test_thinking_switches(tmp_path: Path) -> None:
    source = saved(tmp_path / "m", THINKS)
    assert text_of(Model(source=source)).endswith("[assistant]")
    assert text_of(Model(source=source, template_options={"enable_thinking": False})).endswith("<think></think>")
    with pytest.raises(RecipeError, match="does not read it"):
        load_policy(Model(source=source, template_options={"thinking": False}), alphabet=None, seed=0)


def test_what_was_found(tmp_path: Path) -> None:
    found = ModelSummary.of(load_policy(Model(source=saved(tmp_path / "m", PLAIN)), alphabet=None, seed=0))
    assert (found.architecture, found.context, found.template, found.ends) == ("Qwen3ForCausalLM", 64, True, ("<end>",))
    assert found.trained == found.parameters
    assert "Qwen3ForCausalLM" in str(found)


@pytest.mark.parametrize(
    ("source", "words"),
    [("./nothing", "no such folder"), ("a/b/c/d", "no such folder"), ("none.gguf", "no such file")],
)
def test_what_is_not_there(source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=words):
        load_policy(Model(source=source), alphabet=None, seed=0)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"without config\.json \(it holds notes\.txt\)"):
        load_policy(Model(source=str(tmp_path)), alphabet=None, seed=0)


def test_weights_in_a_pickle_are_not_opened(tmp_path: Path) -> None:
    source = Path(saved(tmp_path / "m", PLAIN))
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(ModelError, match="weights in pytorch_model") as told:
        load_policy(Model(source=str(source)), alphabet=None, seed=0)
    assert "pickle" in str(told.value)
    assert "save_pretrained" in str(told.value)


def test_a_name_that_no_hub_can_be_asked_for_is_told_at_once(tmp_path: Path) -> None:
    """A process of its own: whether there is a hub is read from the environment once. `.invalid` never has an address."""
    command = [sys.executable, "-m", "oncurve", "chat", "Nobody/Nothing"]
    away = {"HF_ENDPOINT": "https://hub.invalid", "HF_HOME": str(tmp_path)}
    plain = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    told = subprocess.run(command, env=plain | away, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert told.returncode == 2
    assert told.stderr.startswith("error Nobody/Nothing: no such folder")
    assert "hub.invalid can't be reached" in " ".join(told.stderr.split())
    assert "Retrying" not in told.stderr + told.stdout


def test_packages_that_are_asked_for_and_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    gone = {"bitsandbytes", "gguf"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in gone else real(name, *rest))
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(20))
    asked: list[dict[str, Any]] = [
        {"source": str(tmp_path / "m.gguf")},
        {"source": saved(tmp_path / "m", None), "quantise": "nf4", "lora": {"rank": 2}},
    ]
    for config, extra in zip(asked, ("gguf", "qlora"), strict=True):
        with pytest.raises(Exception, match=rf"oncurve\[{extra}\]"):
            load_policy(Model.model_validate(config), alphabet=None, seed=0)
