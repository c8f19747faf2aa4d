"""Writes small GGUF files with the gguf package: a two-layer Llama with a tied or untied head."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WORDS = ["<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "</s>", *map(chr, range(97, 123)), "Ġ", "ab", "cd"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
D, HEADS, FF, LAYERS = 32, 2, 48, 2


def write(
    path: Path, *, head: str = "requantised", architecture: str = "llama", rope_scaling: str | None = None
) -> dict[str, np.ndarray]:
    """``head``: `absent`, `requantised` (embedding with 4 % noise) or `untied`. With the ``rope_scaling`` `none` the file has
    factors of rope's frequencies. Returns the tensors as written."""
    generator = np.random.default_rng(0)
    file = gguf.GGUFWriter(str(path), architecture)
    _settings(file)
    tensors = {name: (0.2 * generator.standard_normal(shape)).astype(np.float32) for name, shape in _shapes().items()}
    embedding = tensors["token_embd.weight"]
    if rope_scaling is not None:
        file.add_rope_scaling_type(gguf.RopeScalingType(rope_scaling))
        tensors |= {} if rope_scaling != "none" else {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}
    if head == "requantised":
        tensors["output.weight"] = embedding + 0.04 * embedding.std() * generator.standard_normal(embedding.shape).astype(
            np.float32
        )
    elif head == "untied":
        tensors["output.weight"] = (0.2 * generator.standard_normal(embedding.shape)).astype(np.float32)
    for name, tensor in tensors.items():
        file.add_tensor(name, tensor)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return tensors


def _settings(file: gguf.GGUFWriter) -> None:
    file.add_context_length(64)
    file.add_embedding_length(D)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(FF)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(10000.0)
    file.add_vocab_size(len(WORDS))
    file.add_tokenizer_model("gpt2")
    file.add_token_list(WORDS)
    special = {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}
    file.add_token_types([gguf.TokenType.CONTROL if w in special else gguf.TokenType.NORMAL for w in WORDS])
    file.add_token_merges(["a b", "c d"])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_unk_token_id(0)
    file.add_chat_template(TEMPLATE)


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(WORDS), D), "output_norm.weight": (D,)}
    for i in range(LAYERS):
        block = f"blk.{i}."
        shapes |= {f"{block}{x}.weight": (D, D) for x in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {f"{block}ffn_gate.weight": (FF, D), f"{block}ffn_up.weight": (FF, D), f"{block}ffn_down.weight": (D, FF)}
        shapes |= {f"{block}attn_norm.weight": (D,), f"{block}ffn_norm.weight": (D,)}
    return shapes
