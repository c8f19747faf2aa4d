"""Loads the model of a recipe: the built-in tiny model, a Hugging Face folder, a hub id or a GGUF file, with LoRA adapters.

The built-in model: a small Qwen3 decoder with random weights, and a character tokenizer for the task's alphabet.

Checks before a model is loaded: is the Hugging Face Hub reachable, and is a model folder safe to open?

The hub's client would retry for 30 s, so an unreachable hub fails fast here. A model folder from elsewhere is untrusted data:
weights in pickles, and settings that make loading read files outside of the folder, are refused before anything is opened.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from oncurve.agents.tool_calls import CLOSE, OPEN
from oncurve.errors import MissingPackage, ModelError, OncurveError, RecipeError, pip_install
from oncurve.models import lora
from oncurve.models.chat_template import PROBE
from oncurve.models.loading import gguf, load
from oncurve.models.loading.local_models import check_exists
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import Model, TinyModel

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"


CHAT_TEMPLATE = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{ m.content }}{%- for call in m.tool_calls or [] -%}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%}{{ eos_token }}"
    "{%- else -%}{{ m.role }}: {{ m.content }}{{ '\\n' }}{%- endif -%}{%- endfor -%}"
)
"""The built-in tokenizer's chat template. It leaves out the schemas of tools, which would fill a tiny model's context;
demonstrations show how tools are called."""


def build_tokenizer(alphabet: str, *, chat: bool = False) -> PreTrainedTokenizerFast:
    """One token per character of ``alphabet`` and one per tag; any other character is ``<unk>``. ``chat``: with a chat template
    and the tags of tool calls."""
    tags = [*TAGS, *((OPEN, CLOSE) if chat else ())]
    words = [PAD, END, UNKNOWN, *tags, *sorted(set(alphabet))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    built = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, clean_up_tokenization_spaces=False
    )
    built.chat_template = CHAT_TEMPLATE if chat else None
    return built


def build_model(shape: TinyModel, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 decoder of the recipe's shape. Its weights depend only on ``seed``."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def load_policy(config: Model, *, alphabet: str | None, seed: int) -> Policy:
    """Load the model of a recipe on its device, in its precision, with its adapter.

    ``alphabet`` is what the tiny model's tokenizer must cover (None: printable ASCII). ``seed`` determines the initial weights
    of the tiny model and of a new adapter.
    """
    if config.source == "tiny":
        _check_tiny(config)
        tokenizer: PreTrainedTokenizerBase = build_tokenizer(
            alphabet or "".join(map(chr, range(32, 127))) + "\n", chat=config.tiny.chat
        )
        model: PreTrainedModel = build_model(config.tiny, tokenizer, seed)
        cast_parameters(model, getattr(torch, config.dtype))
    else:
        config = resolve_source(config)
        check_source(config.source)
        model, tokenizer = load_base(config)
    _check_template(config, tokenizer)
    if config.quantise is None:
        model.to(device=choose_device(config.device))
    else:
        lora.disable_weight_repacking(model)
    _apply_adapter(model, config, seed)
    policy = Policy(
        model, tokenizer, system_prompt=config.system_prompt, template_options=config.template_options, compiled=config.compiled
    )
    if config.compile_blocks:
        compile_blocks(policy.backbone)
    return policy


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Round the weights and leave the buffers, as transformers does when it loads a model: with frequencies of a rotary
    embedding in 16 bits, angles would be wrong by whole turns at far positions."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def load_adapter_over(base: Policy, config: Model) -> Policy:
    """Load a recipe's adapter over a loaded base. The new policy shares the base's weights and can't be trained."""
    model = base.shared_model()
    if config.adapter is not None:
        lora.load(model, Path(config.adapter))
    elif config.lora is not None:
        lora.attach(model, config.lora, 0, config.source)
    _check_template(config, base.tokenizer)
    return Policy(
        model, base.tokenizer, system_prompt=config.system_prompt, template_options=config.template_options, fused=False
    )


def loading_message(config: Model) -> str:
    """The log line to print before loading."""
    note = ": the first time, a GGUF file is dequantised, which takes a minute or two" if gguf.is_gguf(config.source) else ""
    return f"loading {config.source}{note}"


def resolve_source(config: Model) -> Model:
    """Replace a GGUF file by its converted folder, and an adapter's folder by its base with the adapter."""
    base = lora.adapter_base(Path(config.source))
    if base is not None:
        config = config.model_copy(update={"source": base, "adapter": config.adapter or config.source})
    if gguf.is_gguf(config.source):
        config = config.model_copy(update={"source": str(gguf.convert_to_cache(Path(config.source), config.dtype))})
    return config


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device", "cuda", because="this machine has no CUDA GPU", fix="use device = 'auto' or 'cpu'")
    return torch.device(name)


def load_base(config: Model) -> tuple[Any, Any]:
    """Load a folder or hub id as a causal language model with its tokenizer. Code in the folder runs only if trusted."""
    trust = config.trust_remote_code
    try:
        settings = AutoConfig.from_pretrained(config.source, trust_remote_code=trust)
        if not trust and getattr(settings, "auto_map", None):
            raise ModelError(
                config.source, "a model with its own code", because="code from a model folder runs with your permissions",
                fix="set model.trust_remote_code = true if you trust it",
            )  # fmt: skip
        if not trust:
            _check_is_causal(config.source, settings)
        load.check_settings(config.source, settings)
        tokenizer = AutoTokenizer.from_pretrained(config.source, trust_remote_code=trust)
        model, report = AutoModelForCausalLM.from_pretrained(
            config.source,
            dtype=getattr(torch, config.dtype),
            trust_remote_code=trust,
            use_safetensors=True,
            output_loading_info=True,
            **_quantisation_options(config),
        )
    except (OncurveError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged folder can raise any kind of error
        raise ModelError(
            config.source,
            "can't be loaded as a causal language model",
            because=f"{str(error).strip().partition(chr(10))[0]} ({type(error).__name__})",
            fix="use a folder in Hugging Face format, a .gguf file, or a hub id that is cached or reachable",
        ) from error
    load.check_complete(config.source, report["missing_keys"])
    load.check_finite(config.source, model)
    load.check_end_tokens(config.source, model)
    return model, tokenizer


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # a damaged folder can raise any kind of error
        raise ModelError(
            source,
            "its tokenizer can't be loaded",
            because=f"{str(error).strip().partition(chr(10))[0]} ({type(error).__name__})",
            fix="use a folder in Hugging Face format, or a hub id that is cached or reachable",
        ) from error
    return tokenizer


def _check_is_causal(source: str, settings: PreTrainedConfig) -> None:
    """Refuse a model that transformers has no causal language model for: other modalities, encoders, encoder-decoders."""
    if type(settings) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    modalities = [name for name in ("vision", "audio") if getattr(settings, f"{name}_config", None) is not None]
    if modalities:
        what = f"a model with {' and '.join(modalities)} input ({settings.model_type})"
        because, fix = "only text can be trained on", "use a model of text only, such as the language model that it is built on"
    else:
        what, because = f"a model of type {settings.model_type}", "transformers has no causal language model of this type"
        fix = "use a decoder, which AutoModelForCausalLM can load"
    raise ModelError(source, what, because=because, fix=fix)


def _quantisation_options(config: Model) -> dict[str, Any]:
    """QLoRA's base: 4-bit NormalFloat with double quantisation, or 8 bits; matrix products in `model.dtype`."""
    if config.quantise is None:
        return {}
    if config.lora is None:
        raise RecipeError(
            "model.quantise",
            config.quantise,
            because="4- and 8-bit weights can't be trained",
            fix="set model.lora",
        )
    if config.lora.dora:
        raise RecipeError(
            "model.lora.dora", "true", because="DoRA needs exact column norms, which 4- and 8-bit weights do not have",
            fix="remove dora or quantise",
        )  # fmt: skip
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingPackage(
            "model.quantise", "bitsandbytes is not installed", because="4- and 8-bit weights need it",
            fix=pip_install("qlora"),
        )  # fmt: skip
    from transformers import BitsAndBytesConfig

    if config.quantise == "int8":
        quantisation = BitsAndBytesConfig(load_in_8bit=True)
    else:
        quantisation = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, config.dtype),
        )
    return {"quantization_config": quantisation, "device_map": {"": choose_device(config.device)}}


def check_quantised(config: Model, policy: Policy | None) -> None:
    """Refuse a model if most weights of its layers would stay in 16 bits; only new runs are checked. bitsandbytes quantises
    linear modules only, and transformers holds all experts of a layer in one tensor. Embeddings do not count: they are looked
    up."""
    if config.quantise is None or policy is None:
        return
    model = policy.model
    quantised = lora.quantised_modules(model)
    linear = sum(module.in_features * module.out_features for module in quantised)
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    skipped = [*quantised, *embeddings, model.get_output_embeddings()]
    of_skipped = {id(p) for module in skipped if module is not None for p in module.parameters()}
    others = {name: p.numel() for name, p in model.named_parameters() if not p.requires_grad and id(p) not in of_skipped}
    if linear < sum(others.values()):
        share = sum(others.values()) / (linear + sum(others.values()))
        raise RecipeError(
            "model.quantise",
            config.quantise,
            because=f"{100 * share:.0f} % of the weights of its layers are not in linear modules, which are all that "
            f"bitsandbytes quantises: the largest is {max(others, key=lambda name: others[name]).replace('.base_layer', '')}",
            fix="remove model.quantise; in a mixture of experts the weights stay in 16 bits",
        )


def _check_tiny(config: Model) -> None:
    if config.quantise is not None:
        raise RecipeError(
            "model.quantise", config.quantise, because="the built-in model starts with random weights",
            fix="remove it, or set model.source to a pretrained model",
        )  # fmt: skip


def _apply_adapter(model: Any, config: Model, seed: int) -> None:
    """Load a saved `adapter`, and merge it unless `lora` is set, which trains it further. Without one, add `lora` if set."""
    if config.adapter is not None:
        lora.load(model, Path(config.adapter))
        if config.lora is None:
            lora.merge(model)
    elif config.lora is not None:
        lora.attach(model, config.lora, seed, config.source)


def check_source(source: str) -> None:
    """Refuse a source that can't be a model, before transformers opens it."""
    _check_path(source)
    load.check_folder(source)
    load.check_hub_reachable(source)


def _check_path(source: str) -> None:
    """Treat what looks like a path as one: a typo must not be sent to the hub as a name."""
    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        content = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
        raise ModelError(
            source,
            f"a folder without config.json (it holds {content})",
            because="that file describes the model",
            fix="use a folder in Hugging Face format, such as RUN/model, or a run",
        )
    if folder.is_file():
        raise ModelError(
            source,
            "a file that is not GGUF",
            because="a model is a folder with weights, settings and tokenizer, or one .gguf file",
            fix="run `oncurve models` to list the models on this machine",
        )
    check_exists(source)


def _check_template(config: Model, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse options that the chat template does not read: they would silently have no effect."""
    template = tokenizer.chat_template
    for name in config.template_options:
        if not isinstance(template, str) or not re.search(rf"\b{re.escape(name)}\b", template):
            raise RecipeError(
                f"model.template_options.{name}",
                config.template_options[name],
                because=f"the chat template of {config.source} does not read it" if template else "there is no chat template",
                fix="remove it, or use a model whose template has this option",
            )
    if config.system_prompt and template:
        _check_system_prompt(config, tokenizer)


def _check_system_prompt(config: Model, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a system prompt that the chat template rejects or silently drops."""
    messages = [{"role": "system", "content": PROBE}, {"role": "user", "content": "?"}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **config.template_options))
        reason = None if PROBE in text else "it drops system messages"
    except Exception as error:  # a template is a program by the model's author and may raise anything
        reason = f"{type(error).__name__}: {str(error)[:200]}"
    if reason is not None:
        raise RecipeError(
            "model.system_prompt",
            config.system_prompt,
            because=f"the chat template of {config.source} can't write it: {reason}",
            fix="put the text into the question (task.instruction or task.prompt_template), or use another model",
        )


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A loaded model, as printed when a run starts."""

    architecture: str
    parameters: int
    trained: int
    dtype: str
    device: str
    context: int
    template: bool
    ends: tuple[str, ...]

    @classmethod
    def of(cls, policy: Policy) -> ModelSummary:
        model, tokenizer = policy.model, policy.tokenizer
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        return cls(
            architecture=type(model).__name__,
            parameters=sum(size for size, _ in sizes),
            trained=sum(size for size, is_trained in sizes if is_trained),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(policy.device),
            context=policy.max_positions,
            template=bool(tokenizer.chat_template),
            ends=tuple(str(tokenizer.convert_ids_to_tokens(i)) for i in policy.eos_ids),
        )

    def __str__(self) -> str:
        trained = "" if self.trained == self.parameters else f", {self.trained:,} of them trained (LoRA)"
        return (
            f"{self.architecture}, {self.parameters:,} parameters{trained}, {self.dtype} on {self.device}, "
            f"{self.context:,} positions, {'chat template' if self.template else 'no chat template'}, ends with "
            f"{' or '.join(self.ends)}"
        )


def compile_blocks(backbone: nn.Module) -> int:
    """Compile each layer's norms and MLP with torch.compile, for families without our own kernels.

    Returns the number of modules. Only the learner uses the compiled form: a decode step has few tokens and is captured as a
    CUDA graph, in which nothing may be compiled. A class's ``forward`` is compiled once for all layers, with dynamic sizes.
    Attention is left alone, and so are layers with experts, whose path depends on the tokens.
    """
    modules = [child for layer in getattr(backbone, "layers", ()) for child in layer.children() if _is_compilable(child)]
    for module in modules:
        module.forward = partial(_compiled_forward, module)
    return len(modules)


def _is_compilable(module: nn.Module) -> bool:
    """Whether a module is a norm or an MLP without experts."""
    name = type(module).__name__.lower()
    return "norm" in name or ("mlp" in name and not any(hasattr(module, part) for part in ("experts", "router")))


@cache
def _compile(forward: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(forward, dynamic=True)
    return compiled


def _compiled_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compiled if gradients are enabled. The module is an argument, so a copy of the model uses its own weights."""
    forward = type(module).forward
    return (_compile(forward) if torch.is_grad_enabled() else forward)(module, *args, **kwargs)


def check_hub_reachable(source: str) -> None:
    """Refuse a name that is neither a folder nor cached if the hub's host name does not resolve.

    Skipped behind a proxy, because the proxy resolves names.
    """
    if Path(source).exists() or constants.HF_HUB_OFFLINE or getproxies() or _is_cached(source):
        return
    host = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ModelError(
            source,
            "no such folder, and no such model in the Hugging Face cache",
            because=f"{host} can't be reached to download it ({error.strerror or error})",
            fix="check the name or path: `oncurve models` lists the models on this machine, those of runs too",
        ) from None


def _is_cached(source: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(source, "config.json"), str)
    except HFValidationError:  # not a valid hub name: loading reports it
        return True


SETTINGS = ("tokenizer_config.json", "config.json", "generation_config.json")
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def check_folder(source: str) -> None:
    """Refuse pickled weights, and settings that name a file outside of the folder: its content would enter the vocabulary."""
    folder = Path(source)
    _check_files(folder)
    _check_weights(folder)
    for name in SETTINGS if folder.is_dir() else ():
        for key, value in _read_settings(folder / name).items():
            if key.endswith("_file") and isinstance(value, str) and _is_outside(value):
                raise ModelError(
                    f"{folder / name}: {key}",
                    value,
                    because="it points outside of the model's folder",
                    fix="remove the key, or use a file name within the folder",
                )


def _check_files(folder: Path) -> None:
    """Refuse FIFOs and devices: reading one could block forever."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelError(
                str(path), "neither a file nor a folder", because="a model is read from files", fix="remove it, or replace it"
            )


def _check_weights(folder: Path) -> None:
    """Only safetensors are read: opening a pickle runs the code in it."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        raise ModelError(
            str(folder),
            f"weights in {pickles[0]}, and no .safetensors file",
            because="the file is a pickle, and opening a pickle runs the code in it",
            fix="if you trust it, convert it once in Python: transformers.AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(NEW), and its AutoTokenizer likewise; NEW holds safetensors",
        )


def _read_settings(path: Path) -> dict[str, Any]:
    """The content of a settings file, or an empty dict if it can't be read; loading the model then reports the error."""
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def check_settings(source: str, settings: PreTrainedConfig) -> None:
    """Refuse settings with which a model loads and then computes nothing, or can't be trained."""
    quantisation = getattr(settings, "quantization_config", None)
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
    if isinstance(quantisation, dict) and (str(method).startswith("bitsandbytes") or "load_in_4bit" in quantisation):
        raise ModelError(
            source,
            "weights that are quantised already (bitsandbytes)",
            because="Oncurve trains full weights, or quantises them itself",
            fix="use the model that they were made from; model.quantise with model.lora quantises it when it is loaded",
        )
    values: list[tuple[str, Any]] = list(settings.to_dict().items())
    while values:
        key, value = values.pop()
        if isinstance(value, dict):
            values += [(f"{key}.{name}", inside) for name, inside in value.items()]
        name = key.rpartition(".")[2]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_wrong_eps = is_number and name.endswith(("_eps", "_epsilon")) and not 0 <= value < 1
        is_wrong_size = name in SIZES and value is not None and not (isinstance(value, int) and value >= 1)
        if is_wrong_size or is_wrong_eps or (is_number and math.isnan(value)):
            raise ModelError(
                f"{source}: {key}",
                value,
                because="it must be 1 or more" if is_wrong_size else "with it the model computes no finite numbers",
                fix="correct it in config.json: the model's original repository has the right value",
            )


def check_end_tokens(source: str, model: PreTrainedModel) -> None:
    ends = getattr(model.generation_config, "eos_token_id", None)
    for token in ends if isinstance(ends, list | tuple) else [ends]:
        if token is not None and type(token) is not int:
            raise ModelError(
                f"{source}: eos_token_id", repr(token), because="an end token is the number of a token",
                fix="correct it in generation_config.json",
            )  # fmt: skip


def check_complete(source: str, missing: Iterable[str]) -> None:
    """Refuse a folder that lacks weights: transformers would put random ones in their place."""
    names = sorted(missing)
    if names:
        raise ModelError(
            source,
            f"its weights lack {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else ""),
            because="they would start from random values",
            fix="download the files again; a complete folder has all of the model's weights",
        )


def check_finite(source: str, model: PreTrainedModel) -> None:
    """Refuse weights with NaN or infinity: every log-prob would be NaN."""
    for name, p in model.named_parameters():
        if p.is_floating_point() and p.numel() and not p.is_meta:
            low, high = torch.aminmax(p.detach())
            if not (math.isfinite(low) and math.isfinite(high)):
                raise ModelError(
                    source,
                    f"its weight {name} has values that are not finite",
                    because="every log-prob of the model would be NaN",
                    fix="download the files again, or use an earlier checkpoint if you trained it",
                )


def _is_outside(name: str) -> bool:
    return Path(name).is_absolute() or ".." in Path(name).parts or name.startswith("~")
