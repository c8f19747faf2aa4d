"""Compiles norms and MLPs with torch.compile, for families without kernels of ours.

Only the learner uses the compiled form: a decode step has few tokens and is captured as a CUDA graph, in which nothing may be
compiled. A class's ``forward`` is compiled once for all layers, with dynamic sizes. Attention is left alone, and so are layers
with experts, whose path depends on the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn


def compile_blocks(backbone: nn.Module) -> int:
    """Give each layer's norms and MLP a compiled form for training. Returns the number of modules."""
    modules = [child for layer in getattr(backbone, "layers", ()) for child in layer.children() if _is_compilable(child)]
    for module in modules:
        module.forward = partial(_forward, module)
    return len(modules)


def _is_compilable(module: nn.Module) -> bool:
    """Whether a module is a norm or an MLP without experts."""
    name = type(module).__name__.lower()
    return "norm" in name or ("mlp" in name and not any(hasattr(module, part) for part in ("experts", "router")))


@cache
def _compile(forward: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(forward, dynamic=True)
    return compiled


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compiled if gradients are enabled. The module is an argument, so a copy of the model uses its own weights."""
    forward = type(module).forward
    return (_compile(forward) if torch.is_grad_enabled() else forward)(module, *args, **kwargs)
