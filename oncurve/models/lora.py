"""LoRA by peft: small trained matrices beside frozen weights. W' = W + s·B·A, s = α/r, or α/√r (rsLoRA).

The adapter is put into the transformers model itself, so sampler and learner go through its modules as ever, adapter on, or
read its matrices where they lie (gpu_lora.py). A is drawn from the run's seed and B is 0, so a fresh adapter changes no bit of
what the model says. Sources: LoRA, Hu et al. 2021; rsLoRA, Kalajdzievski 2023; DoRA, Liu et al. 2024; QLoRA, Dettmers et al.
2023. The only file that imports peft.
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
from safetensors import SafetensorError
from torch import Tensor, nn

from oncurve.errors import MissingPackage, ModelError, pip_install
from oncurve.recipe.schema.model import Lora

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "oncurve-base.json"
ALL_LINEAR = "all-linear"


def is_attached(model: nn.Module) -> bool:
    """Whether a model carries an adapter."""
    return bool(getattr(model, "peft_config", None))


@dataclass(frozen=True, slots=True)
class Adapter:
    """Plain LoRA of one linear layer, y += scale · (x Aᵀ) Bᵀ: the parameters themselves, and whose they are."""

    layer: Any
    a: nn.Parameter
    b: nn.Parameter
    scale: float

    @property
    def on(self) -> bool:
        return not self.layer.disable_adapters


def adapter_of(layer: Any) -> Adapter | None:
    """The adapter of a layer that ``is_plain``; None of one that has none."""
    if not _is_layer(layer):
        return None
    return Adapter(layer, layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"])


def base_linear(layer: Any) -> nn.Linear:
    """The linear layer itself, or the one within an adapted layer."""
    linear: nn.Linear = layer.base_layer if _is_layer(layer) else layer
    return linear


def is_plain(layer: Any) -> bool:
    """Whether a layer is linear, with no adapter or with plain LoRA: no DoRA, no dropout, no quantised weight."""
    if not _is_layer(layer):
        return type(layer) is nn.Linear
    base = layer.base_layer
    if type(base) is not nn.Linear or list(layer.lora_A) != ["default"] or list(layer.active_adapters) != ["default"]:
        return False
    a, b = layer.lora_A["default"], layer.lora_B["default"]
    odd = (
        layer.merged or layer.lora_variant or layer.fan_in_fan_out or not isinstance(layer.lora_dropout["default"], nn.Identity)
    )
    return not odd and b.bias is None and a.weight.dtype == b.weight.dtype == base.weight.dtype


def attach(model: Any, settings: Lora, seed: int, base: str) -> None:
    """Puts a fresh adapter into the model and freezes all else. The precision is the model's own."""
    peft = _peft("model.lora")
    targets = ALL_LINEAR if settings.targets == (ALL_LINEAR,) else list(settings.targets)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=settings.rank, lora_alpha=settings.alpha, target_modules=targets,
        use_rslora=settings.rslora, use_dora=settings.dora, base_model_name_or_path=base,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(model, config, "model.lora.targets", ", ".join(settings.targets))


def load(model: Any, folder: Path) -> None:
    """Puts a saved adapter into the model: its rank, targets and weights are the folder's."""
    peft = _peft("model.adapter")
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise ModelError(
            str(folder), "not a LoRA adapter", because=f"{CONFIG} or {WEIGHTS} is missing", fix="name a folder that peft saved"
        )
    try:
        config = peft.PeftConfig.from_pretrained(folder)
        tensors = peft.load_peft_weights(str(folder), device="cpu")
    except (ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ModelError(str(folder), "an adapter that can't be read", because=str(error), fix="save it again") from error
    if not isinstance(config, peft.LoraConfig):
        raise ModelError(
            str(folder), f"an adapter of kind {config.peft_type}", because="only LoRA is trained here", fix="use a LoRA adapter"
        )
    _check_base(model, folder)
    config.inference_mode = False
    _inject(model, config, str(folder), "its targets")
    _fill(model, tensors, folder)


def adapter_base(folder: Path) -> str | None:
    """The base model that an adapter's folder names; None where the folder holds no adapter."""
    if not (folder / CONFIG).is_file():
        return None
    named = _json(folder / CONFIG).get("base_model_name_or_path")
    if not named:
        raise ModelError(
            str(folder), "an adapter that names no base", because="base_model_name_or_path is empty",
            fix="set model.source to the base and model.adapter to this folder",
        )  # fmt: skip
    return str(named)


def _json(file: Path) -> dict[str, Any]:
    try:
        told = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        fix = "save the adapter again, or fetch it again"
        raise ModelError(str(file), "can't be read", because=str(error), fix=fix) from error
    return told if isinstance(told, dict) else {}


def save(model: Any, folder: Path) -> None:
    """The adapter alone, as peft and vLLM load it; beside it, what its base was."""
    peft = _peft("model.lora")
    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"]
    config.save_pretrained(folder)
    tensors = {
        f"base_model.model.{name}": t.contiguous()
        for name, t in peft.get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    from safetensors.torch import save_file

    save_file({name: t.detach().cpu() for name, t in tensors.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(folder.stat().st_mode & 0o666)  # safetensors makes its files for their owner alone
    (folder / BASE).write_text(json.dumps({"fingerprint": fingerprint(model)}, indent=2) + "\n")


def disable_weight_repacking(model: nn.Module) -> None:
    """On some CPUs a 4-bit layer of bitsandbytes repacks its weights at the first pass without gradient, into a form that
    none flows through any more, without a word; not here."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010


def adapter_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's own weights, by the names of the model's parameters."""
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def is_zero(model: nn.Module) -> bool:
    """Whether the adapter changes nothing yet: every B is 0. (DoRA's magnitudes then are those of the weights.)"""
    return not any(bool(p.any()) for name, p in model.named_parameters() if "lora_B" in name)


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Within, the model is its base."""
    layers = list(_layers(model))
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge_copy(model: Any) -> Any:
    """A copy on the CPU in which the adapter has become part of the weights: a plain model."""
    alone = copy.deepcopy(model)
    merge(alone)
    return alone.to("cpu")


@torch.no_grad()
def merge(model: Any) -> None:
    """The adapter becomes part of the model's weights, in place; what it was is gone."""
    for name, layer in [(n, m) for n, m in model.named_modules() if _is_layer(m)]:
        base = layer.get_base_layer()
        if _is_quantised(base):
            delta = layer.get_delta_weight("default")
            base = _unquantised(base, delta.dtype)
            base.weight.add_(delta)
        else:
            layer.merge(safe_merge=True)
        _replace(model, name, base)
    for name, module in [(n, m) for n, m in model.named_modules() if _is_quantised(m)]:
        _replace(model, name, _unquantised(module, model.dtype))
    _forget_quantiser(model)
    model.peft_config = {}
    model._hf_peft_config_loaded = False
    model.requires_grad_(True)


def _replace(model: Any, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def _is_quantised(module: nn.Module) -> bool:
    return type(module).__name__ in ("Linear4bit", "Linear8bitLt") and not _is_layer(module)


def _unquantised(module: Any, dtype: torch.dtype) -> nn.Linear:
    """A linear layer of 4 or 8 bits as a plain one: what the adapter was trained beside, and not the weights before they were
    quantised."""
    from peft.utils.integrations import dequantize_module_weight

    module.state_dict()  # puts back in order what bitsandbytes lays out otherwise for a CPU
    weight = dequantize_module_weight(module).detach().to(dtype)
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None, device=weight.device, dtype=dtype)
    plain.weight.copy_(weight)
    if module.bias is not None:
        plain.bias.copy_(module.bias)
    return plain


def _forget_quantiser(model: Any) -> None:
    """A model that carries one can't be moved or saved as a plain one."""
    vars(model.config).pop("quantization_config", None)
    for name in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized"):
        vars(model).pop(name, None)


def fingerprint(model: nn.Module) -> str:
    """A digest of the base's weights, coarse enough to be the same in float32 and bfloat16: whose adapter it is."""
    digest = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        if "lora_" not in name and p.is_floating_point():
            digest.update(p.detach().flatten()[:64].float().cpu().bfloat16().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _check_base(model: Any, folder: Path) -> None:
    if not (folder / BASE).is_file():
        return
    if _json(folder / BASE).get("fingerprint") != fingerprint(model):
        raise ModelError(
            str(folder),
            "an adapter for another base",
            because="the weights it was trained beside are not those of this model",
            fix=f"set model.source to its base ({adapter_base(folder)})",
        )


def _inject(model: Any, config: Any, where: str, targets: str) -> None:
    peft = _peft(where)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*tie_word_embeddings")  # such a target is refused below
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        head = model.get_output_embeddings()
        layers = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
        linear = sorted({name.rpartition(".")[2] for name, _ in layers})
        raise ModelError(
            where, targets, because=str(error).strip().partition("\n")[0], fix=f"name some of: {', '.join(linear)}"
        ) from error
    if _is_layer(model.get_output_embeddings()) or _is_layer(model.get_input_embeddings()):
        raise ModelError(
            where, targets, because="sampler and learner read the embedding and the head as plain matrices",
            fix="leave the embedding and the head out of the targets",
        )  # fmt: skip
    model.peft_config = {"default": config}
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)


@torch.no_grad()
def _fill(model: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """The saved weights into the adapter just made; a name or shape that does not fit means another base."""
    peft = _peft("model.adapter")
    plain = {name.removeprefix("base_model.model."): t for name, t in tensors.items()}
    mine = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    wrong = next((n for n in {**mine, **plain} if n not in mine or n not in plain or mine[n].shape != plain[n].shape), None)
    if wrong is not None:
        shapes = [tuple(side[wrong].shape) if wrong in side else "nothing" for side in (plain, mine)]
        raise ModelError(
            str(folder),
            "an adapter for another base",
            because=f"it holds {shapes[0]} for {wrong}, where this model has {shapes[1]}",
            fix=f"set model.source to its base ({adapter_base(folder)})",
        )
    for name, tensor in plain.items():
        mine[name].copy_(tensor)


def _layers(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if _is_layer(module))


def _is_layer(module: nn.Module | None) -> bool:
    return hasattr(module, "lora_A")


def _peft(where: str) -> Any:
    try:
        import peft
    except ImportError:
        raise MissingPackage(
            where, "peft is not installed", because="LoRA adapters are made with it", fix=pip_install("lora")
        ) from None
    return peft
