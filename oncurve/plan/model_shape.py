"""The shape of a decoder, and the parameters, KV cache bytes and FLOPs that follow from it.

Parameters of a layer: q, k, v and o of attention, gate, up and down of the MLP (or of each expert, with a router), and its
norms. Counts equal those of transformers' modules (a test builds them on the meta device). Biases and extra norms follow from
the family, which `config.json` names. The modules of a family that is not in `FAMILIES` are built on the meta device and
counted, so hybrids, latent attention and shared experts have their true size.

In formulas, ``F`` is the width of the MLP and ``L`` the number of layers; other letters as in records.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    attention_layers: int | None = None
    """Layers with a KV cache, if not all have one: the others are recurrent."""
    counted_layer: float | None = None
    """Parameters of a layer on average, if transformers' modules were counted."""
    counted_widths: float | None = None
    """Inputs and outputs of a layer's linear modules on average, if they were counted."""
    counted_idle: int | None = None
    """Parameters of all layers' experts that a token does not take, if they were counted: some layers may have no experts."""

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
    def layer_parameters(self) -> float:
        if self.counted_layer is not None:
            return self.counted_layer
        mlp = sum(a * b for a, b in self.mlp_matrices) * max(self.experts, 1) + self.width * self.experts
        return sum(a * b for a, b in self.attention_matrices) + mlp + self.small_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters of the LM head; if it is tied, those of the embeddings."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        return round(self.layers * self.layer_parameters) + self.width + self.head_parameters * (1 if self.tied else 2)

    @property
    def idle_parameters(self) -> int:
        """Those of the experts that a token does not take."""
        if not self.experts:
            return 0
        idle = self.layers * (self.experts - self.experts_active) * sum(a * b for a, b in self.mlp_matrices)
        return idle if self.counted_idle is None else self.counted_idle

    @property
    def active_parameters(self) -> int:
        """Those that a token uses: all, unless there are experts."""
        return self.parameters - self.idle_parameters

    @property
    def multiplied(self) -> int:
        """Weights of the backbone that a token is multiplied with, at 2 FLOPs each."""
        return self.multiplied_in_all - self.idle_parameters

    @property
    def multiplied_in_all(self) -> int:
        """Weights of the backbone that a batch of tokens reads, those of every expert included."""
        return round(self.layers * (self.layer_parameters - self.small_parameters))

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA on every linear layer: rank · (in + out) each."""
        widths: float = sum(a + b for a, b in self.attention_matrices)
        widths += sum(a + b for a, b in self.mlp_matrices) * max(self.experts, 1)
        return round(self.layers * rank * (widths if self.counted_widths is None else self.counted_widths))

    def kv_bytes(self, dtype_bytes: int) -> int:
        """KV cache of one token in all layers."""
        layers = self.layers if self.attention_layers is None else self.attention_layers
        return 2 * layers * self.kv_width * dtype_bytes


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
    experts, active = expert_counts(config)
    shape = ModelShape(
        name=name,
        layers=int(config["num_hidden_layers"]),
        width=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=_head_size(config, heads),
        mlp_width=int((config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        context=int(config.get("max_position_embeddings") or 0),
        tied=FAMILIES.get(family, LLAMA).tied if tied is None else bool(tied),
        family=family,
        experts=experts,
        experts_active=active,
        attention_bias=bool(config.get("attention_bias")),
        mlp_bias=bool(config.get("mlp_bias")),
        attention_layers=_attention_layers(config),
    )
    return shape if family in FAMILIES else _with_counts(shape, config)


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
"""The names that configs have for the experts of a layer, and for those that a token takes."""


def expert_counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """The experts of a layer, and those of them that a token takes; 0 for a model without experts."""
    return _first_int(config, EXPERTS), _first_int(config, ACTIVE_EXPERTS)


def _first_int(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """0 if the config has none of them; some list a number for each layer."""
    value = next((config[name] for name in names if config.get(name)), 0)
    return int(value[0] if isinstance(value, Sequence) else value)


def _head_size(config: Mapping[str, Any], heads: int) -> int:
    """Of a key in the KV cache. Latent attention stores keys and values of all heads, at the width of a query."""
    if config.get("kv_lora_rank") and config.get("qk_nope_head_dim"):
        return int(config["qk_nope_head_dim"]) + int(config.get("qk_rope_head_dim") or 0)
    return int(config.get("head_dim") or config["hidden_size"] // heads)


def _attention_layers(config: Mapping[str, Any]) -> int | None:
    """Layers with a KV cache, of a config that lists the types of its layers; None if all have one."""
    types = config.get("layer_types")
    if not isinstance(types, Sequence) or len(types) != config["num_hidden_layers"]:
        return None
    count = sum("attention" in str(kind) and "linear" not in str(kind) for kind in types)
    return None if count == len(types) else count


def _with_counts(shape: ModelShape, config: Mapping[str, Any]) -> ModelShape:
    """The shape with the counts of transformers' modules; unchanged if transformers does not know the family."""
    import torch  # takes seconds, and most models are in the table
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        model.tie_weights()
    except Exception:  # whatever a family's own code raises for a config that it can't read
        return shape
    counts = {id(p): p.numel() for p in model.parameters()}
    embeddings = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None}
    layers = sum(count for key, count in counts.items() if key not in embeddings) - shape.width
    widths = sum(
        m.in_features + m.out_features
        for m in model.modules()
        if isinstance(m, torch.nn.Linear) and id(m.weight) not in embeddings
    )
    tied = len(embeddings) == 1
    of_experts = sum(
        p.numel()
        for m in model.modules()
        for p in m.parameters(recurse=False)
        if p.dim() == 3 and p.shape[0] == shape.experts  # every expert's matrix in one tensor
    )
    idle = of_experts * (shape.experts - shape.experts_active) // max(shape.experts, 1)
    return replace(
        shape, tied=tied, counted_layer=layers / shape.layers, counted_widths=widths / shape.layers, counted_idle=idle
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
