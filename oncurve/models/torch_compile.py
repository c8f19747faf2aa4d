"""Norms and gated units compiled by torch, for families that have no kernels of ours.

Only the learner goes through them: a sampler's step has few tokens, and is captured as a graph, where nothing may be compiled.
What is compiled is a class's ``forward``, once for all layers, with sizes left open. Attention stays as it is, and so do layers
of experts, whose path depends on the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn


def compile_blocks(backbone: nn.Module) -> int:
    """Puts the compiled form beside the plain one in each layer; how many modules got it."""
    found = [child for layer in getattr(backbone, "layers", ()) for child in layer.children() if _is_plain(child)]
    for child in found:
        child.forward = partial(_either, child)
    return len(found)


def _is_plain(child: nn.Module) -> bool:
    """A norm, or a unit of linear layers: no attention, no experts."""
    name = type(child).__name__.lower()
    return "norm" in name or ("mlp" in name and not any(hasattr(child, part) for part in ("experts", "router")))


@cache
def _quick(forward: Callable[..., Any]) -> Callable[..., Any]:
    quick: Callable[..., Any] = torch.compile(forward, dynamic=True)
    return quick


def _either(module: nn.Module, *given: Any, **named: Any) -> Any:
    """The module is an argument, so that a copy of the model has its own."""
    forward = type(module).forward
    return (_quick(forward) if torch.is_grad_enabled() else forward)(module, *given, **named)
