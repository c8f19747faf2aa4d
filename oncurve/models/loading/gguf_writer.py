"""Writes a model as a GGUF file for llama.cpp and Ollama: float16, or quantised to 8 or 4 bits; with a Modelfile for Ollama.

Only what llama.cpp computes in the same way is written. A family, a rope scaling, a sliding window or a tokenizer that the
file could not describe is refused: the model would load and generate other text.

Types of tensors, as llama.cpp's own quantiser chooses them: vectors are float32. With q4_k_m, matrices are Q4_K; the head (or
the tied embedding), and the value and down projections of the first and last eighth and of every third layer between them, are
Q6_K. If the length of rows is not a multiple of 256, Q5_0 and Q8_0 take their place, and if it is not one of 32, float16.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from oncurve.errors import MissingPackage, ModelError, pip_install
from oncurve.models.chat_template import PROBE, apply_chat_template
from oncurve.models.loading.gguf import ROPE_FACTORS, llama3_factors
from oncurve.models.loading.k_quants import SUPER_BLOCK, quantise_q4_k, quantise_q6_k
from oncurve.models.policy import Policy

GgufType = Literal["f16", "q8_0", "q4_k_m"]
GGUF_TYPES: tuple[GgufType, ...] = get_args(GgufType)
FILE_TYPES: dict[GgufType, int] = {"f16": 1, "q8_0": 7, "q4_k_m": 15}
"""`general.file_type`, as llama.cpp numbers them."""
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""model_type of transformers, and the architecture of llama.cpp that computes the same."""
ROTATED = {"llama"}
"""Architectures whose rope pairs neighbouring elements, while transformers pairs the halves of a head."""
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {f"{WORDS}\\p{{N}}{REST}": "qwen2", f"{WORDS}\\p{{N}}{{1,3}}{REST}": "llama-bpe"}
"""Regular expressions that split text before BPE, and llama.cpp's name for each."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
CHAT_TEMPLATES = {
    "<|im_start|>": (
        "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n",
        ("<|im_end|>",),
    ),
    "<|start_header_id|>": (
        "{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>{{ end }}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ("<|eot_id|>",),
    ),
}
"""A text that identifies a chat template, and the same template in Ollama's language with the texts that end a turn."""


def write_gguf(policy: Policy, file: Path, kind: GgufType, name: str) -> None:
    """Writes the policy's weights and tokenizer. Nothing is left behind if the model can't be described."""
    gguf = _import_gguf(file)
    config = policy.model.config
    architecture = _check_model(config)
    tokens = _tokenizer_fields(policy.tokenizer, config)
    partial = file.with_name(f".writing-{file.name}")
    try:
        writer = gguf.GGUFWriter(partial, architecture)
        writer.add_name(name)
        writer.add_file_type(FILE_TYPES[kind])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _add_shape(writer, config)
        _add_tokenizer(writer, tokens, policy.tokenizer)
        for tensor_name, values, tensor_type in _tensors(gguf, policy, architecture, kind):
            writer.add_tensor(tensor_name, values, raw_dtype=tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


def write_modelfile(policy: Policy, gguf_file: Path, system_prompt: str | None) -> Path:
    """The file for `ollama create NAME -f FILE`, next to the GGUF file. Without a ``system_prompt`` it has the chat template's
    default, if there is one."""
    template = policy.tokenizer.chat_template
    lines = [f"FROM ./{gguf_file.name}"]
    if template is None:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    else:
        known = next((found for mark, found in CHAT_TEMPLATES.items() if mark in template), None)
        if known is not None:
            lines.append(f'TEMPLATE """{known[0]}"""')
            lines += [f"PARAMETER stop {json.dumps(stop)}" for stop in known[1]]
        else:
            lines.append(
                "# Ollama looks for a template that matches the one in the file; check it with: ollama show --template"
            )
    if system_prompt:
        if re.search(r'"""[ \t]*\n', system_prompt.strip()):
            raise ModelError(
                "model.system_prompt",
                'a line that ends with """',
                because="a Modelfile ends its system prompt there",
                fix="the GGUF file is complete: give your client the system prompt, or take the quotes out of it",
            )
        lines.append(f'SYSTEM """{system_prompt.strip()}"""')
    else:
        default = default_system_prompt(policy)
        lines += [] if default is None else [f'SYSTEM """{default}"""']
    path = gguf_file.with_suffix(".Modelfile")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def default_system_prompt(policy: Policy) -> str | None:
    """The system message that the chat template writes if a chat has none, which Ollama's template doesn't know.

    None if there is none, and if the template writes anything else when it gets this text as a system message."""
    tokenizer = policy.tokenizer
    if tokenizer.chat_template is None or "strftime_now" in str(tokenizer.chat_template):  # such a text changes with the date
        return None

    def render(system: str | None) -> str:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": "Hello"})
        options = {"tokenize": False, "add_generation_prompt": True, **policy.template_options}
        return str(apply_chat_template(tokenizer, messages, "GGUF", **options))

    try:
        alone = render(None)
        before, _, after = render(PROBE).partition(PROBE)
        if not after or not alone.startswith(before) or not alone.endswith(after):
            return None
        text = alone[len(before) : len(alone) - len(after)].strip()
        return text if text and '"""' not in text and render(text) == alone else None
    except ModelError:
        return None


def _import_gguf(file: Path) -> Any:
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise MissingPackage(
            str(file), "gguf is not installed", because="writing GGUF files needs it", fix=pip_install("gguf")
        ) from error


def _refuse(what: str, because: str) -> ModelError:
    fix = "export a folder instead (oncurve export RUN DIR), and convert it with llama.cpp's convert_hf_to_gguf.py"
    return ModelError("GGUF", what, because=because, fix=fix)


def _check_model(config: Any) -> str:
    """The architecture's name; raises ModelError if the file could not describe the model."""
    if config.model_type not in ARCHITECTURES:
        raise _refuse(f"a model of type {config.model_type}", f"these are written: {', '.join(ARCHITECTURES)}")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or (config.model_type == "mistral" and config.sliding_window is not None):
        raise _refuse("a model with a sliding window", "llama.cpp would attend to the complete context")
    rope = config.rope_parameters["rope_type"]
    if rope not in ("default", "linear", "llama3"):
        raise _refuse(f"rope scaling '{rope}'", "only models without scaling, or with that of linear or llama3, are written")
    if config.hidden_act != "silu":
        raise _refuse(f"the activation {config.hidden_act}", "llama.cpp computes SiLU for this family")
    if config.model_type == "qwen3" and config.attention_bias:
        raise _refuse("Qwen3 with attention_bias", "llama.cpp has no biases for this family")
    return ARCHITECTURES[config.model_type]


def _add_shape(writer: Any, config: Any) -> None:
    head_size, rope = _head_size(config), config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(importlib.import_module("gguf").RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _tensors(gguf: Any, policy: Policy, architecture: str, kind: GgufType) -> Iterator[tuple[str, Any, Any]]:
    """(name, values, type) of each tensor in llama.cpp's order of dimensions and with its rope."""
    config = policy.model.config
    kinds = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    weights: dict[str, Tensor] = policy.merged_model().state_dict()
    tied, rope = config.tie_word_embeddings, config.rope_parameters
    if rope["rope_type"] == "llama3":
        yield ROPE_FACTORS, llama3_factors(rope, rope["rope_theta"], _head_size(config)), gguf.GGMLQuantizationType.F32
    for key, tensor in weights.items():
        if tied and key == "lm_head.weight":
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise _refuse(f"the tensor {key}", f"the architecture '{architecture}' has none of this name")
        values = tensor.detach().to("cpu", torch.float32)
        if architecture in ROTATED and ".self_attn." in key:
            values = _rotate(values, key, config)
        yield name, *_encode(gguf, name, values.numpy(), kind, config, tied)


def _rotate(values: Tensor, key: str, config: Any) -> Tensor:
    """Reorders the rows of a head from halves to neighbouring pairs, in query and key projections."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
    if heads is None:
        return values
    rest = values.shape[1:]
    return values.view(heads, 2, -1, *rest).transpose(1, 2).reshape(values.shape)


def _encode(gguf: Any, name: str, values: np.ndarray[Any, Any], kind: GgufType, config: Any, tied: bool) -> tuple[Any, Any]:
    """(encoded values, type)."""
    types = gguf.GGMLQuantizationType
    if not np.isfinite(values).all():
        raise _refuse(f"{name} with NaN or infinity", "the model is damaged")
    if values.ndim == 1:
        return values, types.F32
    if kind == "f16":
        return _quantise(gguf, name, values, types.F16)
    if kind == "q8_0":
        return _quantise(gguf, name, values, types.Q8_0 if values.shape[1] % 32 == 0 else types.F16)
    tensor_type = types.Q6_K if _gets_more_bits(name, config.num_hidden_layers, tied) else types.Q4_K
    if values.shape[1] % SUPER_BLOCK:
        tensor_type = types.F16 if values.shape[1] % 32 else types.Q8_0 if tensor_type == types.Q6_K else types.Q5_0
    return _quantise(gguf, name, values, tensor_type)


def _gets_more_bits(name: str, layers: int, tied: bool) -> bool:
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return True
    if not name.endswith(("attn_v.weight", "ffn_down.weight")):
        return False
    layer, edge = int(name.split(".")[1]), layers // 8
    return layer < edge or layer >= 7 * layers // 8 or (layer - edge) % 3 == 2


def _quantise(gguf: Any, name: str, values: np.ndarray[Any, Any], tensor_type: Any) -> tuple[Any, Any]:
    types = gguf.GGMLQuantizationType
    quantisers: dict[Any, Callable[[Any], Any]] = {types.Q4_K: quantise_q4_k, types.Q6_K: quantise_q6_k}
    if tensor_type == types.F16:
        if np.abs(values).max(initial=0) > np.finfo(np.float16).max:
            raise _refuse(f"{name} with values above {np.finfo(np.float16).max:.0f}", "float16 can't hold them")
        return values.astype(np.float16), tensor_type
    if tensor_type not in quantisers:
        return gguf.quants.quantize(values, tensor_type), tensor_type
    return quantisers[tensor_type](values).reshape(values.shape[0], -1), tensor_type


def _tokenizer_fields(tokenizer: Any, config: Any) -> dict[str, Any]:
    """Tokens, types, merges and the pre-tokenizer's name; raises ModelError if llama.cpp would split text differently."""
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    normalizer = data["normalizer"] and data["normalizer"]["type"]
    if normalizer not in (None, "NFC"):  # texts that are not in NFC are rare, and llama.cpp takes them as they are
        raise _refuse(f"a tokenizer with the normalizer {normalizer}", "llama.cpp takes texts as they are")
    added = {entry["id"]: entry for entry in data["added_tokens"]}
    vocabulary = {index: token for token, index in tokenizer.get_vocab().items()}
    if data["model"]["type"] == "WordLevel" and all(len(token) == 1 or i in added for i, token in vocabulary.items()):
        texts, merges, pre = _characters(vocabulary, added)
    elif data["model"]["type"] == "BPE" and not data["model"].get("byte_fallback"):
        texts, pre = vocabulary, _pre_tokenizer_name(data["pre_tokenizer"])
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    else:
        raise _refuse(
            f"a tokenizer of type {data['model']['type']}", "only byte-level BPE, and one token per character, are written"
        )
    count = max(config.vocab_size, max(vocabulary) + 1)
    types = [
        UNUSED if i not in texts else (CONTROL if added[i]["special"] else USER_DEFINED) if i in added else NORMAL
        for i in range(count)
    ]
    return {"tokens": [texts.get(i, f"[PAD{i}]") for i in range(count)], "types": types, "merges": merges, "pre": pre}


def _characters(vocabulary: dict[int, str], added: dict[int, Any]) -> tuple[dict[int, str], list[str], str]:
    """One token per character as BPE over bytes: a character of several bytes gets the merges that build it."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    texts, merges = {}, []
    for index, token in vocabulary.items():
        spelled = "".join(letters[byte] for byte in token.encode())
        texts[index] = token if index in added else spelled
        if index not in added:
            merges += [f"{spelled[:end]} {spelled[end]}" for end in range(1, len(spelled))]
    # llama.cpp refuses a file without merges: this one joins two NUL characters, which no text contains.
    return texts, list(dict.fromkeys(merges)) or [f"{letters[0]} {letters[0]}"], "gpt-2"


def _pre_tokenizer_name(settings: dict[str, Any]) -> str:
    """llama.cpp's name for the way in which text is split before BPE."""
    steps = settings["pretokenizers"] if settings["type"] == "Sequence" else [settings]
    kinds = [step["type"] for step in steps]
    if any(step.get("add_prefix_space") for step in steps):
        raise _refuse("a tokenizer that puts a space before texts", "llama.cpp does not do it with BPE")
    if kinds == ["ByteLevel"] and steps[0]["use_regex"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1]["use_regex"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        regex = steps[0]["pattern"].get("Regex")
        if regex in SPLITS:
            return SPLITS[regex]
    raise _refuse("this pre-tokenizer", f"llama.cpp's name for it is not known here: {json.dumps(settings)[:200]}")


def _add_tokenizer(writer: Any, fields: dict[str, Any], tokenizer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields["pre"])
    writer.add_token_list(fields["tokens"])
    writer.add_token_types(fields["types"])
    writer.add_token_merges(fields["merges"])
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id])
    for add, index in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
    ):
        if index is not None:
            add(index)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
