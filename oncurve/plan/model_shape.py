"""The shape of a decoder, and the parameters, KV cache bytes and FLOPs that follow from it.

Parameters of a layer: q, k, v and o of attention, gate, up and down of the MLP (or of each expert, with a router), and its
norms. Counts equal those of transformers' modules (a test builds them on the meta device). Biases and extra norms follow from
the family, which `config.json` names.

In formulas, ``F`` is the width of the MLP and ``L`` the number of layers; other letters as in records.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncurve.errors import ModelError
from oncurve.recipe.schema.model import TinyModel


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of decoders differs from the plain Llama layer."""

    qkv_bias: bool = False
    norms: int = 2
    head_norm: bool = False
    """A norm over each head of q and k, of `d` weights."""
    wide_norm: bool = False
    """A norm over all heads of q, and one over all of k."""
    tied: bool = False
    """The default of `tie_word_embeddings` if a config leaves it out."""


LLAMA = Family()
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "phi3": LLAMA,
    "granite": Family(tied=True),
    "smollm3": Family(tied=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(head_norm=True),
    "qwen3_moe": Family(head_norm=True),
    "olmo2": Family(wide_norm=True),
    "gemma": Family(tied=True),
    "gemma2": Family(norms=4, tied=True),
    "gemma3_text": Family(norms=4, head_norm=True, tied=True),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's dimensions."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    vocabulary: int
    context: int
    tied: bool
    family: str = "llama"
    experts: int = 0
    """Experts of each MLP; 0 for a plain MLP."""
    experts_active: int = 0
    """Experts per token."""
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def kind(self) -> Family:
        return FAMILIES.get(self.family, LLAMA)

    @property
    def q_width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def attention_matrices(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of q, k, v and o."""
        D, q, kv = self.width, self.q_width, self.kv_width
        return ((D, q), (D, kv), (D, kv), (q, D))

    @property
    def mlp_matrices(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of gate, up and down; of one expert if there are several."""
        return ((self.width, self.mlp_width), (self.width, self.mlp_width), (self.mlp_width, self.width))

    @property
    def small_parameters(self) -> int:
        """Norms and biases of one layer."""
        bias = self.attention_bias or self.kind.qkv_bias
        out = self.kind.norms * self.width
        out += (self.q_width + 2 * self.kv_width) * bias + self.width * self.attention_bias
        out += (2 * self.mlp_width + self.width) * self.mlp_bias
        out += 2 * self.head_size * self.kind.head_norm + (self.q_width + self.kv_width) * self.kind.wide_norm
        return out

    @property
    def layer_parameters(self) -> int:
        mlp = sum(a * b for a, b in self.mlp_matrices) * max(self.experts, 1) + self.width * self.experts
        return sum(a * b for a, b in self.attention_matrices) + mlp + self.small_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters of the LM head; if it is tied, those of the embeddings."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.width + self.head_parameters * (1 if self.tied else 2)

    @property
    def multiplied(self) -> int:
        """Weights of the backbone that a token is multiplied with, at 2 FLOPs each."""
        active = self.experts_active if self.experts else 1
        mlp = sum(a * b for a, b in self.mlp_matrices) * active + self.width * self.experts
        return self.layers * (sum(a * b for a, b in self.attention_matrices) + mlp)

    @property
    def multiplied_in_all(self) -> int:
        """Weights of the backbone that a batch of tokens reads, those of every expert included."""
        mlp = sum(a * b for a, b in self.mlp_matrices) * max(self.experts, 1) + self.width * self.experts
        return self.layers * (sum(a * b for a, b in self.attention_matrices) + mlp)

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA on every linear layer: rank · (in + out) each."""
        widths = sum(a + b for a, b in self.attention_matrices) + sum(a + b for a, b in self.mlp_matrices) * max(
            self.experts, 1
        )
        return self.layers * rank * widths

    def kv_bytes(self, dtype_bytes: int) -> int:
        """KV cache of one token in all layers."""
        return 2 * self.layers * self.kv_width * dtype_bytes


def tiny_shape(tiny: TinyModel, vocabulary: int) -> ModelShape:
    """The built-in model: a Qwen3 decoder whose vocabulary comes from the task's characters."""
    return ModelShape(
        "tiny", tiny.layers, tiny.width, tiny.heads, tiny.kv_heads, tiny.head_size, tiny.mlp_width, vocabulary, tiny.context,
        tied=True, family="qwen3",
    )  # fmt: skip


REQUIRED_KEYS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a `config.json` describes. Multimodal models have it in `text_config`."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **text}
    missing = [key for key in REQUIRED_KEYS if not _is_positive_int(config.get(key))]
    if missing:
        raise ModelError(
            name,
            f"its config lacks {', '.join(missing)}",
            because="parameters and activations are computed from these numbers",
            fix="use the config.json of a decoder (Llama, Qwen, Mistral, Gemma, Phi-3, OLMo 2, Granite …)",
        )
    heads, family = int(config["num_attention_heads"]), str(config.get("model_type", "llama"))
    tied = config.get("tie_word_embeddings")
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    return ModelShape(
        name=name,
        layers=int(config["num_hidden_layers"]),
        width=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or config["hidden_size"] // heads),
        mlp_width=int((config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        context=int(config.get("max_position_embeddings") or 0),
        tied=FAMILIES.get(family, LLAMA).tied if tied is None else bool(tied),
        family=family,
        experts=experts,
        experts_active=int(config.get("num_experts_per_tok") or 0),
        attention_bias=bool(config.get("attention_bias")),
        mlp_bias=bool(config.get("mlp_bias")),
    )


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_config(path: Path, name: str) -> ModelShape:
    """Reads the shape from a config file."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            str(path), "can't be read as a model's config", because=str(error), fix="use a config.json in Hugging Face format"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(
            str(path), f"holds a {type(config).__name__}", because="a config is a JSON object",
            fix="use a config.json in Hugging Face format",
        )  # fmt: skip
    return shape_of_config(config, name)
