"""GGUF files: what is written is what `oncurve models convert` and the package gguf read back; what can't be described is
refused.

bench/gguf_llama_cpp.py compares with llama.cpp itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from oncurve.errors import ModelError
from oncurve.models.loading import gguf as gguf_reader
from oncurve.models.loading.gguf_writer import SPLITS, GgufType, write_gguf, write_modelfile
from oncurve.models.loading.k_quants import quantise_q4_k, quantise_q6_k
from oncurve.models.policy import Policy

TYPES = gguf.GGMLQuantizationType
TEXT = ["the quick brown fox jumps over the lazy dog 12 345", "a+b=c; x = 7", "naïve café – déjà vu"]


def a_tokenizer(pre: Any = None) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|im_start|>", "<|im_end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")


SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def a_model(family: str = "llama", tied: bool = False, **changes: Any) -> Any:
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    torch.manual_seed(0)
    model = model_class(config_class(**SHAPE | {"tie_word_embeddings": tied} | changes))
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data = torch.randn_like(parameter)
    return model.eval()


def a_policy(family: str = "llama", tied: bool = False, **changes: Any) -> Policy:
    split = pre_tokenizers.Split(Regex(next(regex for regex, name in SPLITS.items() if name == "qwen2")), "isolated")
    as_qwen = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return Policy(a_model(family, tied, **changes), a_tokenizer(as_qwen if family.startswith("qwen") else None))


def tensors_of(file: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("family", "tied", "changes"),
    [
        ("llama", False, {}),
        ("llama", True, {}),
        ("qwen2", False, {}),
        ("qwen3", False, {"head_dim": 32}),
        ("llama", False, {"attention_bias": True, "mlp_bias": True}),
        ("llama", False, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("llama", False, {"rope_parameters": LLAMA3}),
    ],
)
def test_a_float16_file_read_back_is_the_same_model(family: str, tied: bool, changes: dict[str, Any], tmp_path: Path) -> None:
    """The logits of a model whose weights were rounded to float16, and the same tokens for the same text."""
    policy = a_policy(family, tied, **changes)
    write_gguf(policy, tmp_path / "model.gguf", "f16", "mine")
    gguf_reader.convert(tmp_path / "model.gguf", tmp_path / "folder", "float32")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert max(again.generation_config.eos_token_id) < again.config.vocab_size
    same = a_model(family, tied, **changes)
    for parameter in same.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.half().float()
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, same(tokens).logits, atol=1e-5, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    for text in TEXT:
        assert tokenizer(text).input_ids == policy.tokenizer(text).input_ids


@pytest.mark.parametrize(
    ("quantise", "kind", "error"), [(quantise_q4_k, TYPES.Q4_K, 0.075), (quantise_q6_k, TYPES.Q6_K, 0.019)]
)
def test_k_quants_have_the_layout_that_others_read(quantise: Any, kind: Any, error: float) -> None:
    """The package's dequantiser returns the weights, to the accuracy of the bits; Q4_0, with one scale per 32, has 0.086."""
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal((32, 512)) * np.exp(rng.standard_normal((32, 1)))).astype(np.float32)
    back = gguf.quants.dequantize(quantise(weights).reshape(32, -1), kind)
    relative = np.sqrt(((back - weights) ** 2).sum() / (weights**2).sum())
    assert relative < error
    assert gguf.quants.dequantize(quantise(np.zeros((1, 256), np.float32)), kind).any() == np.False_


@pytest.mark.parametrize(("quantise", "kind"), [(quantise_q4_k, TYPES.Q4_K), (quantise_q6_k, TYPES.Q6_K)])
@pytest.mark.parametrize("sign", [1, -1])
def test_weights_on_the_grid_come_back_exactly(quantise: Any, kind: Any, sign: int) -> None:
    """Levels that the format can represent exactly: 16 equal steps for Q4_K, 63 symmetric ones for Q6_K."""
    levels = np.arange(256, dtype=np.float32) % 16 if kind == TYPES.Q4_K else np.arange(256, dtype=np.float32) % 16 * 4 - 32
    back = gguf.quants.dequantize(quantise((sign * levels)[None]), kind)
    np.testing.assert_allclose(back[0], sign * levels, rtol=0, atol=0.02)


def test_types_of_a_quantised_file(tmp_path: Path) -> None:
    policy = a_policy(tied=True, num_hidden_layers=8)
    for kind in ("q8_0", "q4_k_m"):
        write_gguf(policy, tmp_path / f"{kind}.gguf", kind, "mine")
    eight, four = (tensors_of(tmp_path / f"{kind}.gguf") for kind in ("q8_0", "q4_k_m"))
    assert {t.tensor_type for t in eight.values()} == {TYPES.Q8_0, TYPES.F32}
    assert "output.weight" not in four
    assert four["token_embd.weight"].tensor_type == TYPES.Q6_K  # tied: it is the head
    assert four["blk.0.attn_q.weight"].tensor_type == TYPES.Q4_K
    downs = [four[f"blk.{layer}.ffn_down.weight"].tensor_type for layer in range(8)]
    assert [kind == TYPES.Q6_K for kind in downs] == [True, False, False, True, False, False, True, True]
    assert four["blk.0.attn_norm.weight"].tensor_type == TYPES.F32
    sizes = {kind: (tmp_path / f"{kind}.gguf").stat().st_size for kind in ("q8_0", "q4_k_m")}
    assert sizes["q4_k_m"] < 0.75 * sizes["q8_0"]


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_a_quantised_file_read_back_is_close(kind: GgufType, tmp_path: Path) -> None:
    policy = a_policy()
    write_gguf(policy, tmp_path / "model.gguf", kind, "mine")
    gguf_reader.convert(tmp_path / "model.gguf", tmp_path / "folder", "float32")
    from transformers import AutoModelForCausalLM

    again = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "folder").named_parameters())
    for name, weight in policy.model.named_parameters():
        relative = (again[name] - weight).norm() / weight.norm()
        assert relative < (0.01 if kind == "q8_0" else 0.08), name


def test_rows_of_another_length_take_another_type(tmp_path: Path) -> None:
    policy = a_policy(hidden_size=96, intermediate_size=160, num_attention_heads=3, num_key_value_heads=3, head_dim=32)
    write_gguf(policy, tmp_path / "model.gguf", "q4_k_m", "mine")
    tensors = tensors_of(tmp_path / "model.gguf")
    assert tensors["blk.0.attn_q.weight"].tensor_type == TYPES.Q5_0
    assert tensors["output.weight"].tensor_type == TYPES.Q8_0


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_k_m"])
def test_float16_rows_that_overflow_are_refused(kind: GgufType, tmp_path: Path) -> None:
    """Rows whose length no block divides are float16, whichever type the file has."""
    policy = a_policy(hidden_size=48, intermediate_size=80, num_attention_heads=3, num_key_value_heads=3, head_dim=16)
    with torch.no_grad():
        policy.model.lm_head.weight[0, 0] = 70_000.0
    with pytest.raises(ModelError, match="float16"):
        write_gguf(policy, tmp_path / "model.gguf", kind, "mine")


def lowercase() -> PreTrainedTokenizerFast:
    tokenizer = a_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    cases = {
        "sliding window": a_policy("mistral", sliding_window=8),
        "yarn": a_policy(rope_parameters=yarn),
        "the activation gelu": a_policy(hidden_act="gelu"),
        "Qwen3 with attention_bias": a_policy("qwen3", attention_bias=True),
        "normalizer Lowercase": Policy(a_policy().model, lowercase()),
        "a space before texts": Policy(a_policy().model, a_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True))),
        "pre-tokenizer": Policy(
            a_policy().model, a_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        ),
    }
    for message, policy in cases.items():
        with pytest.raises(ModelError, match=message):
            write_gguf(policy, tmp_path / "model.gguf", "f16", "mine")
    broken = a_policy()
    with torch.no_grad():
        broken.model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="NaN"):
        write_gguf(broken, tmp_path / "model.gguf", "f16", "mine")
    assert list(tmp_path.iterdir()) == []


def test_splits_of_published_tokenizers_have_their_names(tmp_path: Path) -> None:
    from oncurve.models.loading.gguf_writer import _pre_tokenizer_name

    for regex, name in SPLITS.items():
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        byte_level = {"type": "ByteLevel", "use_regex": False}
        assert _pre_tokenizer_name({"type": "Sequence", "pretokenizers": [split, byte_level]}) == name
    digits = {"type": "Digits", "individual_digits": True}
    assert (
        _pre_tokenizer_name({"type": "Sequence", "pretokenizers": [digits, {"type": "ByteLevel", "use_regex": True}]})
        == "smollm"
    )


def test_a_modelfile_has_the_template_and_the_system_prompt(tmp_path: Path) -> None:
    policy = a_policy()
    plain = write_modelfile(policy, tmp_path / "plain.gguf", None).read_text()
    assert plain == 'FROM ./plain.gguf\nTEMPLATE """{{ .Prompt }}"""\n'
    policy.tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    chat = write_modelfile(policy, tmp_path / "chat.gguf", "Be brief.").read_text()
    assert "<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>" in chat
    assert 'PARAMETER stop "<|im_end|>"' in chat
    assert 'SYSTEM """Be brief."""' in chat
    with pytest.raises(ModelError, match='a line that ends with """'):
        write_modelfile(policy, tmp_path / "quotes.gguf", 'Write docstrings:\n"""Adds."""\nBe brief.')
    inside = write_modelfile(policy, tmp_path / "inside.gguf", 'Begin with """ and end.').read_text()
    assert inside.endswith('SYSTEM """Begin with """ and end."""\n')


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
DEFAULT = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are SmolLM.<|im_end|>\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (DEFAULT + TURNS, "You are SmolLM."),
        (TURNS, None),
        (DEFAULT.replace("SmolLM.", "SmolLM, on {{ strftime_now('%d %B') }}.") + TURNS, None),
        (DEFAULT + TURNS.replace("m.role }}\n", "m.role }}\n{% if m.role == 'system' %}Rules: {% endif %}"), None),
        ("{{ raise_exception('no system') if messages[0].role == 'system' }}" + DEFAULT + TURNS, None),
    ],
)
def test_a_modelfile_has_the_system_prompt_that_the_template_writes_by_itself(
    tmp_path: Path, template: str, expected: str | None
) -> None:
    policy = a_policy()
    policy.tokenizer.chat_template = template
    written = write_modelfile(policy, tmp_path / "default.gguf", None).read_text()
    assert written.partition("SYSTEM ")[2] == ("" if expected is None else f'"""{expected}"""\n')
    own = write_modelfile(policy, tmp_path / "own.gguf", "Be brief.").read_text()
    assert own.endswith('SYSTEM """Be brief."""\n')
