"""Which path each model family takes. Needs no torch, so the planner and `oncurve models` start quickly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FUSED_FAMILIES = {"llama": "LlamaModel", "mistral": "MistralModel", "qwen2": "Qwen2Model", "qwen3": "Qwen3Model"}
"""The Llama family: `model_type` of a config and the class of its backbone in transformers.

`oncurve.models.llama` runs these by fused modules and C functions on a CPU and by Triton kernels on a GPU, and the planner
counts their activations accordingly.
"""

FAMILY_TABLE = Path(__file__).with_name("model_families.tsv")
"""Written and checked by tests/models/test_every_family.py, which runs a tiny model of every family."""

PATHS = {
    "fast": "fast path: our attention, and fused modules in learner and sampler",
    "attention": "our attention: a group's completions share their prompt; plain decoders have a fused decode step on a GPU",
    "general": "general path: transformers' own forward and cache, slower but equally exact",
    "uncached": "general path without a cache: every token runs the complete sequence again, which is very slow",
    "refused": "refused: it can't be trained",
    "unknown": "unknown family: which path it takes is found out when it is opened",
}


@dataclass(frozen=True, slots=True)
class FamilyPath:
    """The path of a family, a key of PATHS, and why it is not a faster one."""

    path: str
    reason: str = ""


@cache
def family_paths() -> Mapping[str, FamilyPath]:
    """By `model_type`: what the family's tiny model did, in the version of transformers that the tests ran with."""
    rows = (line.split("\t") for line in FAMILY_TABLE.read_text(encoding="utf-8").splitlines())
    return {family: FamilyPath(path, reason) for family, path, reason in rows}


def expected_path(config: Mapping[str, Any]) -> FamilyPath:
    """The path that a model with this config.json will take, as far as its family determines it."""
    if (path := family_paths().get(str(config.get("model_type")))) is not None:
        return path
    inputs = [name for name in ("vision", "audio") if config.get(f"{name}_config") is not None]
    if inputs and "auto_map" not in config:  # else its own code decides
        return FamilyPath("refused", f"{' and '.join(inputs)} input: only text can be trained on")
    return FamilyPath("unknown")
