"""Model shapes by name: from a table of well-known models, a folder or `config.json`, or the Hugging Face cache."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from oncurve.errors import ModelError, closest
from oncurve.plan.model_shape import ModelShape, read_config


def _qwen3(name: str, layers: int, width: int, heads: int, mlp: int, *, tied: bool) -> ModelShape:
    return ModelShape(f"Qwen/Qwen3-{name}", layers, width, heads, 8, 128, mlp, 151_936, 40_960, tied, "qwen3")


def _qwen25(name: str, layers: int, width: int, heads: int, kv: int, mlp: int, *, tied: bool) -> ModelShape:
    vocabulary = 151_936 if tied else 152_064
    return ModelShape(
        f"Qwen/Qwen2.5-{name}", layers, width, heads, kv, 128 if width > 1000 else 64, mlp, vocabulary, 32_768, tied, "qwen2"
    )


def _llama3(name: str, layers: int, width: int, heads: int, head_size: int, mlp: int, *, tied: bool) -> ModelShape:
    return ModelShape(f"meta-llama/{name}", layers, width, heads, 8, head_size, mlp, 128_256, 131_072, tied)


def _llama2(name: str, layers: int, width: int, heads: int, kv: int, mlp: int) -> ModelShape:
    return ModelShape(name, layers, width, heads, kv, 128, mlp, 32_000, 4_096, tied=False)


def _smol(name: str, layers: int, width: int, heads: int, kv: int, mlp: int) -> ModelShape:
    return ModelShape(f"HuggingFaceTB/SmolLM2-{name}", layers, width, heads, kv, 64, mlp, 49_152, 8_192, tied=True)


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _qwen3("0.6B", 28, 1024, 16, 3072, tied=True),
        _qwen3("1.7B", 28, 2048, 16, 6144, tied=True),
        _qwen3("4B", 36, 2560, 32, 9728, tied=True),
        _qwen3("8B", 36, 4096, 32, 12288, tied=False),
        _qwen3("14B", 40, 5120, 40, 17408, tied=False),
        _qwen3("32B", 64, 5120, 64, 25600, tied=False),
        _qwen25("0.5B", 24, 896, 14, 2, 4864, tied=True),
        _qwen25("1.5B", 28, 1536, 12, 2, 8960, tied=True),
        _qwen25("3B", 36, 2048, 16, 2, 11008, tied=True),
        _qwen25("7B", 28, 3584, 28, 4, 18944, tied=False),
        _qwen25("14B", 48, 5120, 40, 8, 13824, tied=False),
        _qwen25("32B", 64, 5120, 40, 8, 27648, tied=False),
        _qwen25("72B", 80, 8192, 64, 8, 29568, tied=False),
        _llama3("Llama-3.2-1B", 16, 2048, 32, 64, 8192, tied=True),
        _llama3("Llama-3.2-3B", 28, 3072, 24, 128, 8192, tied=True),
        _llama3("Llama-3.1-8B", 32, 4096, 32, 128, 14336, tied=False),
        _llama3("Llama-3.1-70B", 80, 8192, 64, 128, 28672, tied=False),
        ModelShape("mistralai/Mistral-7B-v0.3", 32, 4096, 32, 8, 128, 14336, 32_768, 32_768, False, "mistral"),
        _smol("135M", 30, 576, 9, 3, 1536),
        _smol("360M", 32, 960, 15, 5, 2560),
        _smol("1.7B", 24, 2048, 32, 32, 8192),
        ModelShape("google/gemma-2-2b", 26, 2304, 8, 4, 256, 9216, 256_000, 8_192, True, "gemma2"),
        ModelShape("google/gemma-2-9b", 42, 3584, 16, 8, 256, 14336, 256_000, 8_192, True, "gemma2"),
        ModelShape("google/gemma-2-27b", 46, 4608, 32, 16, 128, 36864, 256_000, 8_192, True, "gemma2"),
        ModelShape("google/gemma-3-270m", 18, 640, 4, 1, 256, 2048, 262_144, 32_768, True, "gemma3_text"),
        ModelShape("google/gemma-3-1b", 26, 1152, 4, 1, 256, 6912, 262_144, 32_768, True, "gemma3_text"),
        _llama2("7B", 32, 4096, 32, 32, 11008),
        _llama2("13B", 40, 5120, 40, 40, 13824),
        _llama2("70B", 80, 8192, 64, 8, 28672),
    )
}
"""Shapes from the publishers' config.json. The generic 7B, 13B and 70B are those of Llama 2."""

SUFFIXES = ("-instruct", "-base", "-it", "-chat", "-pt")
"""Suffixes of names that change the weights but not the shape."""


def find_shape(name: str) -> ModelShape:
    """The shape of a model: by name, with or without owner and suffix; by folder or config file; or from the HF cache."""
    path = Path(name).expanduser()
    if path.is_file() or (path / "config.json").is_file():
        return read_config(path if path.is_file() else path / "config.json", name)
    shape = _shape_in_table(name)
    if shape is not None:
        return shape
    cached = _cached_config(name)
    if cached is not None:
        return read_config(cached, name)
    close = closest_names(name, MODELS)
    raise ModelError(
        name,
        "unknown model",
        because="it is not in the table, not a folder, and not in the Hugging Face cache",
        fix=f"use {' or '.join(close)}, or the model's folder or config.json",
    )


def _shape_in_table(name: str) -> ModelShape | None:
    return next((shape for known, shape in MODELS.items() if _short(known) == _short(name)), None)


def _short(name: str) -> str:
    """The name without owner and suffix, in lower case: `Qwen/Qwen3-8B-Base` and `qwen3-8b` are one shape."""
    short = name.lower().rpartition("/")[2].replace("meta-llama-", "llama-")
    for suffix in SUFFIXES:
        short = short.removesuffix(suffix)
    return short


def closest_names(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names closest to a word; the first few if none is close."""
    full = {_short(name): name for name in known}
    stems: dict[str, str] = {}
    for short, name in full.items():
        stems.setdefault(short.partition("-")[0], name)  # H100 for H100-80GB
    names = stems | full
    matches = closest(_short(word), names, 2 * count, cutoff=0.3)
    return list(dict.fromkeys(names[short] for short in matches))[:count] or list(full.values())[:count]


def hub_folder() -> Path:
    """The cache folder of huggingface_hub."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def _cached_config(name: str) -> Path | None:
    """The config of a model that was downloaded before; nothing is fetched."""
    configs = sorted((hub_folder() / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return configs[-1] if configs else None
