"""Checks before a model is loaded: is the Hugging Face Hub reachable, and is a model folder safe to open?

The hub's client would retry for 30 s, so an unreachable hub fails fast here. A model folder from elsewhere is untrusted data:
weights in pickles, and settings that make loading read files outside of the folder, are refused before anything is opened.
"""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedConfig, PreTrainedModel

from oncurve.errors import ModelError


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
            fix="check the path, or run `oncurve models` to list the models on this machine",
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
    """A settings file; empty if it can't be read, which loading reports."""
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
