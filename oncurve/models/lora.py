"""LoRA by peft: small trained matrices next to frozen weights. W' = W + s·B·A, s = α/r, or α/√r (rsLoRA).

peft injects the adapter into the transformers model, so sampler and learner run its modules with the adapter enabled, or read
its matrices directly (llama/cuda_lora.py). A is initialised from the run's seed and B is 0, so a new adapter does not change
the model's output. Sources: LoRA, Hu et al. 2021; rsLoRA, Kalajdzievski 2023; DoRA, Liu et al. 2024; QLoRA, Dettmers et al.
2023. This is the only module that imports peft.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oncurve.errors import MissingPackage, ModelError, pip_install
from oncurve.recipe.schema.model import Lora

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "oncurve-base.json"
ALL_LINEAR = "all-linear"
FINGERPRINT = "oncurve_base"
"""The attribute in which a model with an adapter stores the fingerprint of its base. Some adapters (PiSSA, OLoRA …) change the
base's weights when they are added."""


def is_attached(model: nn.Module) -> bool:
    """Whether a model has an adapter."""
    return bool(getattr(model, "peft_config", None))


@dataclass(frozen=True, slots=True)
class Adapter:
    """Plain LoRA of one linear layer: y += scale · (x Aᵀ) Bᵀ. ``layer`` is peft's module, ``a`` and ``b`` its parameters."""

    layer: Any
    a: nn.Parameter
    b: nn.Parameter
    scale: float

    @property
    def is_enabled(self) -> bool:
        return not self.layer.disable_adapters


def adapter_of(layer: Any) -> Adapter | None:
    """The adapter of a layer for which ``is_plain`` holds, or None."""
    if not _is_adapted(layer):
        return None
    return Adapter(layer, layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"])


def base_linear(layer: Any) -> nn.Linear:
    """The linear layer itself, or the one that an adapter wraps."""
    linear: nn.Linear = layer.base_layer if _is_adapted(layer) else layer
    return linear


def is_plain(layer: Any) -> bool:
    """Whether a layer is linear with no adapter or plain LoRA: no DoRA, dropout, LoRA bias or quantised weight."""
    if not _is_adapted(layer):
        return type(layer) is nn.Linear
    base = layer.base_layer
    if type(base) is not nn.Linear or list(layer.lora_A) != ["default"] or list(layer.active_adapters) != ["default"]:
        return False
    a, b = layer.lora_A["default"], layer.lora_B["default"]
    is_special = (
        layer.merged or layer.lora_variant or layer.fan_in_fan_out or not isinstance(layer.lora_dropout["default"], nn.Identity)
    )
    return not is_special and b.bias is None and a.weight.dtype == b.weight.dtype == base.weight.dtype


def attach(model: Any, settings: Lora, seed: int, base: str) -> None:
    """Add a new adapter to the model, in its precision, and freeze everything else."""
    peft = _import_peft("model.lora")
    targets = ALL_LINEAR if settings.targets == (ALL_LINEAR,) else list(settings.targets)
    if base != "tiny" and Path(base).exists():
        base = str(Path(base).resolve())  # the adapter is used from other folders too
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=settings.rank, lora_alpha=settings.alpha, target_modules=targets,
        exclude_modules=_not_really_linear(model) if targets == ALL_LINEAR else None,
        use_rslora=settings.rslora, use_dora=settings.dora, base_model_name_or_path=base,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(model, config, "model.lora.targets", ", ".join(settings.targets))


def _not_really_linear(model: nn.Module) -> list[str] | None:
    """Layers of a family's own nn.Linear subclasses, such as the router of Llama 4: their output is no plain matrix product."""
    named = model.named_modules()
    return [
        name for name, m in named if isinstance(m, nn.Linear) and type(m).__module__.startswith("transformers.models")
    ] or None


def load(model: Any, folder: Path) -> None:
    """Add a saved adapter to the model, with the rank, targets and weights of its folder."""
    peft = _import_peft("model.adapter")
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise ModelError(
            str(folder), "not a LoRA adapter", because=f"{CONFIG} or {WEIGHTS} is missing", fix="give a folder saved by peft"
        )
    try:
        config = peft.PeftConfig.from_pretrained(folder)
        tensors = peft.load_peft_weights(str(folder), device="cpu")
    except Exception as error:  # a damaged folder can raise any kind of error
        raise _unreadable(folder, error) from error
    if not isinstance(config, peft.LoraConfig):
        raise ModelError(
            str(folder), f"an adapter of type {config.peft_type}", because="only LoRA is supported", fix="use a LoRA adapter"
        )
    _check_base(model, folder)
    config.inference_mode = False
    try:
        _inject(model, config, str(folder), "its targets")
    except TypeError as error:  # a setting of the adapter has the wrong type
        raise _unreadable(folder, error) from error
    _check_supported(model, config, folder)
    _copy_weights(model, tensors, folder)


def _check_supported(model: nn.Module, config: Any, folder: Path) -> None:
    """Refuse an adapter that is more than LoRA's matrices: the rest would be missing in passes, in training or in an export, or
    (biases) change the base that others share."""
    names = ["modules_to_save", "trainable_token_indices", "alora_invocation_tokens", "layer_replication", "bias"]
    bases = [layer.get_base_layer() for layer in _adapted_layers(model)]
    is_quantised = any(map(_is_quantised, bases))
    names += ["use_dora"] if is_quantised else []
    names += ["lora_bias"] if is_quantised or any(getattr(base, "bias", None) is None for base in bases) else []
    wrong = next((name for name in names if getattr(config, name, None) not in (None, False, "none", [], {})), None)
    if wrong is not None:
        raise ModelError(
            str(folder),
            f"an adapter with {wrong}",
            because="only LoRA's matrices can be trained and merged here",
            fix="merge it with peft (PeftModel.merge_and_unload), save the result, and set model.source to it",
        )


def _unreadable(folder: Path, error: Exception) -> ModelError:
    because = f"{str(error).strip().partition(chr(10))[0]} ({type(error).__name__})"
    return ModelError(str(folder), "the adapter can't be read", because=because, fix="save it again")


def adapter_base(folder: Path) -> str | None:
    """The base model named in an adapter's folder; None if the folder has no adapter."""
    if not (folder / CONFIG).is_file():
        return None
    base = _read_json(folder / CONFIG).get("base_model_name_or_path")
    if not base:
        raise ModelError(
            str(folder), "an adapter without a base model", because="base_model_name_or_path is empty",
            fix="set model.source to the base and model.adapter to this folder",
        )  # fmt: skip
    return str(base)


def can_share_base(folder: Path) -> bool:
    """Whether a saved adapter can be used over a base that others use too. Some initialisations (PiSSA, OLoRA …) change the
    base's weights, and DoRA merges itself into a copy of them in each pass to know its norms."""
    config = _read_json(folder / CONFIG)
    return config.get("init_lora_weights", True) in (True, False, "gaussian") and not config.get("use_dora")


def is_linear(model: nn.Module) -> bool:
    """Whether all adapters are on linear layers, which only read the base. (Those on experts replace weights in each pass.)"""
    return all(isinstance(layer.base_layer, nn.Linear) for layer in _adapted_layers(model))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        fix = "save or download the adapter again"
        raise ModelError(str(file), "can't be read", because=str(error), fix=fix) from error
    return data if isinstance(data, dict) else {}


def save(model: Any, folder: Path) -> None:
    """Write the adapter in peft's format, which vLLM loads too, and a fingerprint of its base."""
    peft = _import_peft("model.lora")
    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"]
    config.save_pretrained(folder)
    tensors = {
        f"base_model.model.{name}": t.contiguous()
        for name, t in peft.get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    from safetensors.torch import save_file

    save_file({name: t.detach().cpu() for name, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(folder.stat().st_mode & 0o666)  # safetensors makes its files readable by their owner only
    (folder / BASE).write_text(json.dumps({"fingerprint": getattr(model, FINGERPRINT)}, indent=2) + "\n")


def disable_weight_repacking(model: nn.Module) -> None:
    """Keep gradients flowing through 4-bit layers of bitsandbytes on a CPU.

    On some CPUs they repack their weights at the first pass without gradient into a form through which no gradient flows,
    silently.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010


def adapter_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's parameters by name."""
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def is_zero(model: nn.Module) -> bool:
    """Whether the adapter changes nothing: every B is 0. (DoRA's magnitudes then equal those of the weights.)"""
    return not any(bool(p.any()) for name, p in model.named_parameters() if "lora_B" in name)


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Within this context the model is its base model."""
    layers = list(_adapted_layers(model))
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge_copy(model: Any) -> Any:
    """A plain model: a copy on the CPU with the adapter merged into its weights."""
    for module in model.modules():  # modules may keep a result of their last pass (RecurrentGemma), which can't be copied
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                setattr(module, name, value.detach())
    merged = copy.deepcopy(model)
    merge(merged)
    return merged.to("cpu")


@torch.no_grad()
def merge(model: Any) -> None:
    """Merge the adapter into the model's weights, in place, and remove it."""
    for name, layer in [(n, m) for n, m in model.named_modules() if _is_adapted(m)]:
        base = layer.get_base_layer()
        if _is_quantised(base):
            delta = layer.get_delta_weight("default")
            base = _dequantise(base, delta.dtype)
            base.weight.add_(delta)
        else:
            layer.merge(safe_merge=True)
        if not name.endswith(
            ".base_layer"
        ):  # nested in another adapted layer if an adapter has two matrices of the same experts
            _replace(model, name, base)
    for name, module in [(n, m) for n, m in model.named_modules() if _is_quantised(m)]:
        _replace(model, name, _dequantise(module, model.dtype))
    _remove_quantiser(model)
    model.peft_config = {}
    model._hf_peft_config_loaded = False
    model.requires_grad_(True)


def _replace(model: Any, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def quantised_modules(model: nn.Module) -> list[Any]:
    """The linear modules that bitsandbytes has quantised."""
    return [module for module in model.modules() if _is_quantised(module)]


def _is_quantised(module: nn.Module) -> bool:
    return type(module).__name__ in ("Linear4bit", "Linear8bitLt") and not _is_adapted(module)


def _dequantise(module: Any, dtype: torch.dtype) -> nn.Linear:
    """A 4- or 8-bit linear layer as a plain one, with the values that the adapter was trained with, not the original ones."""
    from peft.utils.integrations import dequantize_module_weight

    module.state_dict()  # restores the layout that bitsandbytes changes on a CPU
    weight = dequantize_module_weight(module).detach().to(dtype)
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None, device=weight.device, dtype=dtype)
    plain.weight.copy_(weight)
    if module.bias is not None:
        plain.bias.copy_(module.bias)
    return plain


def _remove_quantiser(model: Any) -> None:
    """A model with a quantiser can't be moved or saved as a plain one."""
    vars(model.config).pop("quantization_config", None)
    for name in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized"):
        vars(model).pop(name, None)


def fingerprint(model: nn.Module) -> str:
    """A digest of the base's weights that identifies an adapter's base; the same in float32 and bfloat16."""
    digest = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        if "lora_" not in name and p.is_floating_point():
            digest.update(p.detach().flatten()[:64].float().cpu().bfloat16().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _check_base(model: Any, folder: Path) -> None:
    if not (folder / BASE).is_file():
        return
    if _read_json(folder / BASE).get("fingerprint") != fingerprint(model):
        raise ModelError(
            str(folder),
            "an adapter for another base",
            because="it was trained on a base with other weights than this model",
            fix=f"set model.source to its base ({adapter_base(folder)})",
        )


def _inject(model: Any, config: Any, where: str, targets: str) -> None:
    peft = _import_peft(where)
    setattr(model, FINGERPRINT, fingerprint(model))
    head = model.get_output_embeddings()
    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*tie_word_embeddings")  # such a target is an error, below
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        usable = sorted(name for name in linear if f"'{name}'" not in str(error))  # Mamba's out_proj can't have an adapter
        raise ModelError(
            where, targets, because=str(error).strip().partition("\n")[0], fix=f"choose from: {', '.join(usable)}"
        ) from error
    if _is_adapted(model.get_output_embeddings()) or _is_adapted(model.get_input_embeddings()):
        raise ModelError(
            where, targets, because="sampler and learner use the embedding and the head as plain matrices",
            fix="leave the embedding and the head out of the targets",
        )  # fmt: skip
    model.peft_config = {"default": config}
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)


@torch.no_grad()
def _copy_weights(model: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Copy saved weights into a new adapter. Raises ModelError if a name or shape does not match, because the saved adapter
    then belongs to another base model, or if a value is not finite."""
    peft = _import_peft("model.adapter")
    saved = {name.removeprefix("base_model.model."): t for name, t in tensors.items()}
    new = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    wrong = next((n for n in {**new, **saved} if n not in new or n not in saved or new[n].shape != saved[n].shape), None)
    if wrong is not None:
        shapes = [tuple(side[wrong].shape) if wrong in side else "nothing" for side in (saved, new)]
        raise ModelError(
            str(folder),
            "an adapter for another base",
            because=f"{wrong} has shape {shapes[0]} in the adapter, and {shapes[1]} in this model",
            fix=f"set model.source to its base ({adapter_base(folder)})",
        )
    for name, tensor in saved.items():
        if not bool(tensor.isfinite().all()):
            because = f"{name} has values that are not finite"
            raise ModelError(str(folder), "the adapter can't be used", because=because, fix="use an earlier checkpoint")
        new[name].copy_(tensor)


def _adapted_layers(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if _is_adapted(module))


def _is_adapted(module: nn.Module | None) -> bool:
    return hasattr(module, "lora_A")


def _import_peft(where: str) -> Any:
    try:
        import peft
    except ImportError:
        raise MissingPackage(where, "peft is not installed", because="LoRA needs it", fix=pip_install("lora")) from None
    return peft
