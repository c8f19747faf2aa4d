"""The shape of a decoder, and the parameters, KV cache bytes and FLOPs that follow from it.

Parameters of a layer: q, k, v and o of attention, gate, up and down of the MLP (or of each expert, with a router), and its
norms. Counts equal those of transformers' modules (a test builds them on the meta device). Biases and extra norms follow from
the family, which `config.json` names. The modules of a family that is not in `FAMILIES` are built on the meta device and
counted, and one token runs through them to see what they cache. So hybrids, latent attention and shared experts have their true
size.

In formulas, ``F`` is the width of the MLP and ``L`` the number of layers; other letters as in records.py.
"""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oncurve.errors import ModelError
from oncurve.recipe.schema.model import TinyModel

log = logging.getLogger("oncurve.plan")


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
    """Layers with a KV cache, if not all have one: the others are recurrent, or have no state."""
    counted_kv: int | None = None
    """Numbers that a token adds to the KV cache of all layers, if one token ran through transformers' modules."""
    state_numbers: int = 0
    """Numbers in the states of all recurrent layers for one sequence, in the precision of the weights."""
    float32_state_numbers: int = 0
    """Those that are in float32 whatever the precision of the weights, as the matrices of linear attention are."""
    counted_layer: float | None = None
    """Parameters of a layer on average, if transformers' modules were counted."""
    counted_widths: float | None = None
    """Inputs and outputs of a layer's linear modules on average, if they were counted."""
    counted_idle: int | None = None
    """Parameters of all layers' experts that a token does not take, if they were counted: some layers may have no experts."""
    counted_linear: int | None = None
    """Weights of all layers' linear modules, if they were counted."""
    counted_embeddings: int = 0
    """Those of the layers' parameters that are embeddings, if they were counted: Gemma 3n has an embedding for every layer."""

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

    @property
    def linear_parameters(self) -> int:
        """Weights of all layers' linear modules, which bitsandbytes can quantise. Experts are not among them: those of a layer
        are one tensor."""
        if self.counted_linear is not None:
            return self.counted_linear
        if not self.experts:
            return self.multiplied_in_all
        return self.layers * sum(a * b for a, b in self.attention_matrices)

    @property
    def unquantised_share(self) -> float:
        """Fraction of the layers' parameters that are not weights of linear modules. Embeddings, which are looked up, do not
        count."""
        return 1 - self.linear_parameters / (self.layers * self.layer_parameters - self.counted_embeddings)

    @property
    def can_be_quantised(self) -> bool:
        return self.unquantised_share <= 0.5

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA on every linear layer: rank · (in + out) each."""
        widths: float = sum(a + b for a, b in self.attention_matrices)
        widths += sum(a + b for a, b in self.mlp_matrices) * max(self.experts, 1)
        return round(self.layers * rank * (widths if self.counted_widths is None else self.counted_widths))

    def kv_bytes(self, dtype_bytes: int) -> int:
        """KV cache of one token in all layers."""
        numbers = 2 * self.layers_with_cache * self.kv_width if self.counted_kv is None else self.counted_kv
        return numbers * dtype_bytes

    @property
    def layers_with_cache(self) -> int:
        return self.layers if self.attention_layers is None else self.attention_layers

    def state_bytes(self, dtype_bytes: int) -> int:
        """States of all recurrent layers for one sequence, whatever its length."""
        return self.state_numbers * dtype_bytes + 4 * self.float32_state_numbers


def tiny_shape(tiny: TinyModel, vocabulary: int) -> ModelShape:
    """The built-in model: a Qwen3 decoder whose vocabulary comes from the task's characters."""
    return ModelShape(
        "tiny", tiny.layers, tiny.width, tiny.heads, tiny.kv_heads, tiny.head_size, tiny.mlp_width, vocabulary, tiny.context,
        tied=True, family="qwen3",
    )  # fmt: skip


REQUIRED_KEYS = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")
"""The first three are needed even if transformers' modules are counted; Mamba does not have the others."""


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a `config.json` describes. Multimodal models have it in `text_config`.

    If the file does not say everything, or says it under the names of its family, transformers' class of the family completes
    it, as when the model is loaded: GPT-2 has `n_embd`, LFM2 lists `full_attn_idxs`, and a `text_config` has no defaults.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        tied = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}
        config = {**tied, **text}
    family = str(config.get("model_type", "llama"))
    has_all = all(_is_positive_int(config.get(key)) for key in (*REQUIRED_KEYS, "num_key_value_heads"))
    if family in FAMILIES and has_all and not isinstance(text, Mapping):
        return _shape_of_keys(config, name, family)
    with _quiet_transformers():
        return _completed_shape(config, name, family)


def _completed_shape(config: Mapping[str, Any], name: str, family: str) -> ModelShape:
    """The shape of a config with the defaults and names of its family, by transformers' modules if there is no formula."""
    settings = _settings(config)
    model = None if settings is None or family in FAMILIES else _modules(settings)
    if settings is not None:
        config = {key: _value(settings, key) for key in KEYS}
    if model is not None:
        return _with_counts(_shape_of_keys(config, name, family, REQUIRED_KEYS[:3]), model)
    shape = _shape_of_keys(config, name, family)
    if family not in FAMILIES:
        log.warning("%s: transformers can't build a model of type %s; its layers are counted as those of a Llama", name, family)
    return shape


def _shape_of_keys(config: Mapping[str, Any], name: str, family: str, required: Sequence[str] = REQUIRED_KEYS) -> ModelShape:
    """The shape by the config's numbers alone; 0 for those that it lacks and that are not required."""
    missing = [key for key in required if not _is_positive_int(config.get(key))]
    if missing:
        raise ModelError(
            name,
            f"its config lacks {', '.join(missing)}",
            because="parameters and activations are computed from these numbers",
            fix="use the config.json of a decoder (Llama, Qwen, Mistral, Gemma, Phi-3, OLMo 2, Granite …)",
        )
    heads = _int(config.get("num_attention_heads"))
    tied = config.get("tie_word_embeddings")
    experts, active = expert_counts(config)
    return ModelShape(
        name=name,
        layers=int(config["num_hidden_layers"]),
        width=int(config["hidden_size"]),
        heads=heads,
        kv_heads=_int(config.get("num_key_value_heads")) or heads,
        head_size=_head_size(config, heads),
        mlp_width=(_int(config.get("moe_intermediate_size")) if experts else 0) or _int(config.get("intermediate_size")),
        vocabulary=int(config["vocab_size"]),
        context=_int(config.get("max_position_embeddings")),
        tied=FAMILIES.get(family, LLAMA).tied if tied is None else bool(tied),
        family=family,
        experts=experts,
        experts_active=active,
        attention_bias=bool(config.get("attention_bias")),
        mlp_bias=bool(config.get("mlp_bias")),
        attention_layers=_attention_layers(config),
    )


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
"""The names that configs have for the experts of a layer, and for those that a token takes."""
KEYS = (
    *REQUIRED_KEYS, *EXPERTS, *ACTIVE_EXPERTS, "num_key_value_heads", "head_dim", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "moe_intermediate_size", "max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "layer_types",
)  # fmt: skip
"""The keys that are read here."""


def expert_counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """The experts of a layer, and those of them that a token takes; 0 for a model without experts."""
    return _first_int(config, EXPERTS), _first_int(config, ACTIVE_EXPERTS)


def _first_int(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """0 if the config has none of them; some list a number for each layer."""
    value = next((config[name] for name in names if config.get(name)), 0)
    return int(value[0] if isinstance(value, Sequence) else value)


def _head_size(config: Mapping[str, Any], heads: int) -> int:
    """The size of a key in the KV cache. Latent attention stores keys and values of all heads, at the width of a query."""
    if _is_latent(config):
        return int(config["qk_nope_head_dim"]) + int(config.get("qk_rope_head_dim") or 0)
    return _int(config.get("head_dim")) or (int(config["hidden_size"]) // heads if heads else 0)


def _is_latent(config: Mapping[str, Any]) -> bool:
    return bool(config.get("kv_lora_rank") and config.get("qk_nope_head_dim"))


def _attention_layers(config: Mapping[str, Any]) -> int | None:
    """Layers with a KV cache, of a config that lists the types of its layers; None if all have one."""
    types = config.get("layer_types")
    if not isinstance(types, Sequence) or len(types) != config["num_hidden_layers"]:
        return None
    count = sum("attention" in str(kind) and "linear" not in str(kind) for kind in types)
    return None if count == len(types) else count


def _settings(config: Mapping[str, Any]) -> Any:
    """The config as transformers completes it; None if transformers does not know the family, or can't read the config."""
    from transformers import AutoConfig

    def decoded(value: dict[str, Any]) -> Any:  # transformers writes infinity as {"__float__": "Infinity"}
        return float(value["__float__"]) if value.keys() == {"__float__"} else value

    try:
        return AutoConfig.for_model(**json.loads(json.dumps(config), object_hook=decoded))
    except Exception:  # whatever a family's own code raises
        return None


def _value(settings: Any, key: str) -> Any:
    """None if transformers' config lacks it, or raises because layers differ in it (`head_dim` of Gemma 4)."""
    try:
        return getattr(settings, key, None)
    except Exception:  # the exception's class exists in newer versions of transformers only
        return None


def _modules(settings: Any) -> Any:
    """transformers' modules without memory, in 16 bits; None if transformers has no causal language model of the family."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            # Other attention implementations read the mask, which has no values on the meta device.
            model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16, attn_implementation="eager")
        model.tie_weights()
    except Exception:  # whatever a family's own code raises for a config that it can't read
        return None
    return model.eval()


def _with_counts(shape: ModelShape, model: Any) -> ModelShape:
    """The shape with the counts of transformers' modules, and with what they cache."""
    import torch
    from transformers.pytorch_utils import Conv1D

    counts = {id(p): p.numel() for p in model.parameters()}
    embeddings = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None}
    layers = sum(count for key, count in counts.items() if key not in embeddings) - shape.width
    of_layers = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)} - embeddings
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D) and id(m.weight) not in embeddings]
    of_experts = sum(
        p.numel()
        for m in model.modules()
        for p in m.parameters(recurse=False)
        if p.dim() == 3 and p.shape[0] == shape.experts  # every expert's matrix in one tensor
    )
    if not of_experts:  # the config has a number of experts, and no layer has any
        shape = replace(shape, experts=0, experts_active=0, mlp_width=_int(_value(model.config, "intermediate_size")))
    return replace(
        _with_cache(shape, model),
        mlp_width=shape.mlp_width or max((max(weight.shape) for weight in linear), default=0),
        tied=len(embeddings) == 1,
        counted_layer=layers / shape.layers,
        counted_widths=sum(sum(weight.shape) for weight in linear) / shape.layers,
        counted_idle=of_experts * (shape.experts - shape.experts_active) // max(shape.experts, 1),
        counted_linear=sum(weight.numel() for weight in linear),
        counted_embeddings=sum(counts[key] for key in of_layers),
    )


def _with_cache(shape: ModelShape, model: Any) -> ModelShape:
    """The shape with what one token leaves in transformers' cache; unchanged if the model has another cache, or none."""
    import torch
    from transformers import DynamicCache

    names = inspect.signature(type(model).forward).parameters
    try:
        cache = DynamicCache(config=model.config)
        argument = {name: cache for name in ("past_key_values", "cache_params") if name in names}
        with torch.device("meta"), torch.no_grad():
            model(input_ids=torch.zeros((1, 1), dtype=torch.long), use_cache=True, **argument)
    except Exception:  # whatever a family's own code raises without memory
        return shape
    keys = [layer.keys for layer in cache.layers if getattr(layer, "keys", None) is not None]
    states = [
        state
        for layer in cache.layers
        for kind in ("conv_states", "recurrent_states")
        for state in getattr(layer, kind, {}).values()
        if state is not None
    ]
    if not keys and not states:
        return shape
    if keys and not _is_latent(model.config.to_dict()):  # latent attention is cached as transformers expands it
        sizes = [(key.shape[1], key.shape[3]) for key in keys]
        kv_heads, head_size = sizes[0]
        shape = replace(shape, kv_heads=kv_heads, head_size=head_size, counted_kv=sum(2 * heads * d for heads, d in sizes))
    in_float32 = sum(state.numel() for state in states if state.dtype == torch.float32)
    return replace(
        shape,
        attention_layers=None if len(keys) == shape.layers else len(keys),
        state_numbers=sum(state.numel() for state in states) - in_float32,
        float32_state_numbers=in_float32,
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """transformers warns about slower kernels and old names of keys, which do not matter to a plan."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(before)


def _int(value: object) -> int:
    """A config's number; 0 if it has none, or one for each layer."""
    return value if isinstance(value, int) else 0


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
