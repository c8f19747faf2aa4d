"""Loading a model: the built-in tiny one, a folder in Hugging Face format, a hub id, a GGUF file, and LoRA adapters on top."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from oncurve.errors import MissingPackage, ModelError, OncurveError, RecipeError, pip_install
from oncurve.models import lora
from oncurve.models.loading import checks, gguf
from oncurve.models.loading.tiny import build_model, build_tokenizer
from oncurve.models.policy import MARK, Policy
from oncurve.models.torch_compile import compile_blocks
from oncurve.recipe.schema.model import Model


def load_policy(config: Model, *, alphabet: str | None, seed: int) -> Policy:
    """The model a recipe names, on its device and in its precision, with its adapter.

    ``alphabet`` is what the tiny model's tokenizer must know (None: printable ASCII); ``seed`` decides the first weights of the
    tiny model and of a fresh adapter.
    """
    if config.source == "tiny":
        _check_tiny(config)
        tokenizer: PreTrainedTokenizerBase = build_tokenizer(alphabet or "".join(map(chr, range(32, 127))) + "\n")
        model: PreTrainedModel = build_model(config.tiny, tokenizer, seed)
    else:
        config = resolve_source(config)
        check_source(config.source)
        model, tokenizer = load_base(config)
        _check_template(config, tokenizer)
    if config.quantise is None:
        model.to(device=choose_device(config.device), dtype=getattr(torch, config.dtype))
    else:
        lora.disable_weight_repacking(model)
    _adapt(model, config, seed)
    policy = Policy(
        model, tokenizer, system_prompt=config.system_prompt, template_options=config.template_options, compiled=config.compiled
    )
    if config.compile_blocks:
        compile_blocks(policy.backbone)
    return policy


def loading_message(config: Model) -> str:
    """What is about to be loaded, for those who wait."""
    once = ": a GGUF file is de-quantised the first time, which takes a minute or two" if gguf.is_gguf(config.source) else ""
    return f"loading {config.source}{once}"


def resolve_source(config: Model) -> Model:
    """A GGUF file as the folder it was converted to, an adapter's folder as its base with the adapter on top."""
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
        raise ModelError("model.device", "cuda", because="this machine shows no CUDA GPU", fix="use device = 'auto' or 'cpu'")
    return torch.device(name)


def load_base(config: Model) -> tuple[Any, Any]:
    """A folder or hub id as a causal language model and its tokenizer; code that lies in the folder runs only if trusted."""
    trust = config.trust_remote_code
    try:
        settings = AutoConfig.from_pretrained(config.source, trust_remote_code=trust)
        if not trust and getattr(settings, "auto_map", None):
            raise ModelError(
                config.source, "a model that brings its own code", because="code from a model folder runs with your rights",
                fix="set model.trust_remote_code = true if you trust it",
            )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(config.source, trust_remote_code=trust)
        model = AutoModelForCausalLM.from_pretrained(
            config.source, dtype=getattr(torch, config.dtype), trust_remote_code=trust, use_safetensors=True, **_bits(config)
        )
    except (OncurveError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged folder makes its readers raise errors of every kind
        raise ModelError(
            config.source,
            "can't be loaded as a causal language model",
            because=f"{str(error).strip().partition(chr(10))[0]} ({type(error).__name__})",
            fix="name a folder in Hugging Face format, a .gguf file, or a hub id that is cached or can be reached",
        ) from error
    return model, tokenizer


def _bits(config: Model) -> dict[str, Any]:
    """QLoRA's base: matrices in 4-bit normal floats, their scales quantised too, or in 8 bits; products in `model.dtype`."""
    if config.quantise is None:
        return {}
    if config.lora is None:
        raise RecipeError(
            "model.quantise",
            config.quantise,
            because="weights of 4 or 8 bits can't be trained themselves",
            fix="set model.lora",
        )
    if config.lora.dora:
        raise RecipeError(
            "model.lora.dora", "true", because="DoRA needs the lengths of columns that 4 or 8 bits do not keep",
            fix="leave out dora or quantise",
        )  # fmt: skip
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingPackage(
            "model.quantise", "bitsandbytes is not installed", because="it holds weights in 4 and 8 bits",
            fix=pip_install("qlora"),
        )  # fmt: skip
    from transformers import BitsAndBytesConfig

    precise = getattr(torch, config.dtype)
    if config.quantise == "int8":
        how = BitsAndBytesConfig(load_in_8bit=True)
    else:
        how = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=precise
        )
    return {"quantization_config": how, "device_map": {"": choose_device(config.device)}}


def _check_tiny(config: Model) -> None:
    if config.quantise is not None:
        raise RecipeError(
            "model.quantise", config.quantise, because="the built-in model begins with weights that mean nothing yet",
            fix="leave it out, or name a pretrained model in model.source",
        )  # fmt: skip


def _adapt(model: Any, config: Model, seed: int) -> None:
    """A saved adapter, trained on where `lora` is set and merged where not; or a fresh one."""
    if config.adapter is not None:
        lora.load(model, Path(config.adapter))
        if config.lora is None:
            lora.merge(model)
    elif config.lora is not None:
        lora.attach(model, config.lora, seed, config.source)


def check_source(source: str) -> None:
    """Refuses what can't be a model, before any reader of models opens it."""
    _check_path(source)
    checks.check_folder(source)
    checks.check_hub_reachable(source)


def _check_path(source: str) -> None:
    """What looks like a path is one: a slip must not be sent to a hub as a name."""
    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
        raise ModelError(
            source,
            f"a folder without config.json (it holds {found})",
            because="that file says what the model is",
            fix="name a folder in Hugging Face format, such as RUN/model, or a run",
        )
    if folder.is_file():
        raise ModelError(
            source,
            "a file, and no GGUF file",
            because="a model is a folder with its weights, settings and tokenizer, or one file that ends in .gguf",
            fix="name such a folder or file: `oncurve models` lists those on this machine",
        )
    if not folder.exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ModelError(source, "no such folder", because="it looks like a path", fix="check the path; a hub id is OWNER/NAME")


def _check_template(config: Model, tokenizer: PreTrainedTokenizerBase) -> None:
    """A switch that the template does not know would be dropped without a word."""
    template = tokenizer.chat_template
    for name in config.template_options:
        if not isinstance(template, str) or not re.search(rf"\b{re.escape(name)}\b", template):
            raise RecipeError(
                f"model.template_options.{name}",
                config.template_options[name],
                because=f"the chat template of {config.source} does not read it" if template else "there is no chat template",
                fix="leave it out, or use a model whose template has this switch",
            )
    if config.system_prompt and template:
        _check_system(config, tokenizer)


def _check_system(config: Model, tokenizer: PreTrainedTokenizerBase) -> None:
    """A template may refuse a system message, or leave it out without a word."""
    messages = [{"role": "system", "content": MARK}, {"role": "user", "content": "?"}]
    try:
        written = str(tokenizer.apply_chat_template(messages, tokenize=False, **config.template_options))
        why = None if MARK in written else "it leaves system messages out"
    except Exception as error:  # a template is a program of the model's maker, and may raise anything
        why = f"{type(error).__name__}: {str(error)[:200]}"
    if why is not None:
        raise RecipeError(
            "model.system_prompt",
            config.system_prompt,
            because=f"the chat template of {config.source} can't write it: {why}",
            fix="put the words into the question (task.instruction or task.prompt_template), or use another model",
        )


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What loading found, as it is told before a run."""

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
        model, known = policy.model, policy.tokenizer
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        return cls(
            architecture=type(model).__name__,
            parameters=sum(size for size, _ in sizes),
            trained=sum(size for size, moves in sizes if moves),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(policy.device),
            context=policy.max_positions,
            template=bool(known.chat_template),
            ends=tuple(str(known.convert_ids_to_tokens(i)) for i in policy.eos_ids),
        )

    def __str__(self) -> str:
        share = "" if self.trained == self.parameters else f", {self.trained / 1e6:.3g}M of them trained (LoRA)"
        return (
            f"{self.architecture}, {self.parameters / 1e6:,.4g}M parameters{share}, {self.dtype} on {self.device}, "
            f"{self.context:,} positions, {'chat template' if self.template else 'no chat template'}, ends with "
            f"{' or '.join(self.ends)}"
        )
