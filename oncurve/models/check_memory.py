"""Remembers what the self-check found, so that opening the same model again costs almost nothing.

A result is stored in the user's cache folder under a key of everything that it depends on: the weights (a few values of every
tensor), names, shapes and dtypes of tensors (so adapters and quantisation too), the model's config and code, the device, our
code that runs models, and the versions of torch, transformers and Oncurve. If any of them changes, the model is checked again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import oncurve
from oncurve.models.loading.local_models import cache_folder

SAMPLED = 16
"""Values of each tensor that enter the key."""
SOURCES = ("models", "engines", "kernels")
"""Packages whose code decides how a model is run."""


def key_of(model: PreTrainedModel, *extra: str) -> str:
    """The key under which a model's check is stored. ``extra`` names what else the check depends on."""
    device = model.device
    parts = [
        *extra,
        f"{type(model).__module__}.{type(model).__qualname__} {_code_hash(type(model))}",
        model.config.to_json_string(use_diff=False),
        str({name: str(config) for name, config in getattr(model, "peft_config", {}).items()}),
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {platform.machine()}",
        f"torch {torch.__version__}, transformers {transformers.__version__}, oncurve {oncurve.__version__} {_source_hash()}",
    ]
    tensors = dict(model.named_parameters())
    parts += [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in tensors.items()]
    values = torch.cat([_sample_values(p) for p in tensors.values()]).cpu()
    return hashlib.sha256("\n".join(parts).encode() + values.numpy().tobytes()).hexdigest()[:32]


def recall(key: str) -> dict[str, Any] | None:
    """The result that is stored under a key; None if there is none, or if its file is damaged."""
    try:
        found = json.loads(_file_of(key).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def remember(key: str, found: dict[str, Any]) -> None:
    """Store a result. A cache folder that can't be written to means that the next check runs again."""
    file = _file_of(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{platform.node()}-{id(found)}.partial")
        partial.write_text(json.dumps(found), encoding="utf-8")
        partial.replace(file)
    except OSError:
        return


def _file_of(key: str) -> Path:
    return cache_folder() / "self_checks" / f"{key}.json"


def _sample_values(tensor: Tensor) -> Tensor:
    """Values at equal distances, as float32."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLED)][: SAMPLED + 1].float()


def _code_hash(kind: type[PreTrainedModel]) -> str:
    """A digest of the file that defines a model: a model with code of its own may change the code and keep its weights."""
    try:
        file = inspect.getsourcefile(kind)
        return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except (TypeError, OSError):  # defined in no file
        return ""


@cache
def _source_hash() -> str:
    """A digest of our code that runs models: an edited checkout still has the version of the last release."""
    root = Path(oncurve.__file__).parent
    files = sorted(file for name in SOURCES for file in (root / name).rglob("*") if file.suffix in (".py", ".c", ".h"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
