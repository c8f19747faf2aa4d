"""Tensor parallelism by transformers' own plan: the ranks of a group split each decoder layer between them.

The plan gives each linear layer of a decoder layer a style. `colwise`: each rank holds some of the outputs (in attention,
complete heads). `rowwise`: each rank holds some of the inputs, and the partial results are summed over the group. Everything
between the two is computed for the local part only. A per-head norm (`replicated_with_grad_allreduce`) is replicated and applied
to the local heads; its gradient is summed once per update (`all_reduce_replicated_grads`). If a plan needs complete outputs, they
are gathered (`colwise_gather_output`) and split again (`rowwise_split_input`). Embedding, head and the other norms are
replicated, and every rank of the group computes the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from oncurve.errors import ModelError, RecipeError
from oncurve.models.parallel.dtensor import Collective, is_shard
from oncurve.models.policy import Policy

COLUMNS, ROWS = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
PARTIAL = "replicated_with_grad_allreduce"
WHOLE = "use scale.tensor = 1: FSDP2 shares the model out by itself"

Styles = list[dict[str, str]]
"""For each layer: the modules in it that the plan names, and how each is held."""


def tp_styles(policy: Policy, layers: nn.ModuleList, size: int) -> Styles:
    """The model's plan for a group of so many ranks, if it has one that can be followed."""
    model = type(policy.model).__name__
    plan: dict[str, str] = getattr(policy.model.config.get_text_config(), "base_model_tp_plan", None) or {}
    named = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), style) for name, style in plan.items()]
    found: Styles = []
    for i, layer in enumerate(layers):
        names = [name for name, _ in layer.named_modules() if name] + [name for name, _ in layer.named_parameters()]
        matched = ((name, pattern, style) for name in names for pattern, style in named)
        found.append({name: style for name, pattern, style in matched if pattern.fullmatch(f"layers.{i}.{name}")})
        _check_styles(model, layer, found[-1])
    if not any(found):
        raise ModelError(
            model, "can't be split over ranks", because="transformers has no tensor-parallel plan for its layers", fix=WHOLE
        )
    most = math.gcd(*(count for layer, styles in zip(layers, found, strict=True) for count in _counts(layer, styles)))
    if most % size:
        raise RecipeError(
            "scale.tensor",
            size,
            because=f"{model}'s heads, key heads and widths are cut into as many parts; their common divisor is {most}",
            fix=f"use a divisor of {most}" if most > 1 else WHOLE,
        )
    return found


def _check_styles(model: str, layer: nn.Module, styles: dict[str, str]) -> None:
    """Everything in the plan is a linear layer or a norm that we know how to hold, and nothing is missing in it."""
    for name, style in styles.items():
        parameter, module = name in dict(layer.named_parameters()), dict(layer.named_modules()).get(name)
        if parameter or style not in (*COLUMNS, *ROWS, PARTIAL) or (style != PARTIAL and not isinstance(module, nn.Linear)):
            raise ModelError(
                model, f"a plan that holds '{name}' by '{style}'", because="only linear layers and norms are split", fix=WHOLE
            )
    for parent in {name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"}:
        for name, _ in layer.get_submodule(parent).named_parameters():
            if f"{parent}.{name}".rpartition(".")[0] not in styles:
                because = "beside it outputs are split, and what it sees of them is not said"
                raise ModelError(model, f"a plan without '{parent}.{name}'", because=because, fix=WHOLE)


def _counts(layer: nn.Module, styles: dict[str, str]) -> Iterator[int]:
    """What must be divided: heads, where a layer's outputs are heads, and else its width."""
    for name, style in styles.items():
        module, parent = layer.get_submodule(name), layer.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Linear):
            wide = module.out_features if style in COLUMNS else module.in_features
            yield wide // int(getattr(parent, "head_dim", None) or 1) if style in ("colwise", "rowwise") else wide


class TensorGroup:
    """A tensor group, as one of its ranks sees it."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, exchange: Collective) -> None:
        self.mesh, self.device, self.exchange = mesh, device, exchange
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self._entered: tuple[Tensor, Tensor] | None = None

    def split(self, layer: nn.Module, styles: dict[str, str]) -> None:
        """A layer's weights become this rank's part of them, and its linear layers work with the group's others."""
        for name, style in styles.items():
            module = layer.get_submodule(name)
            if not isinstance(module, nn.Linear):
                continue
            module.weight = self._own(module.weight, 0 if style in COLUMNS else 1)
            if style in COLUMNS and module.bias is not None:
                module.bias = self._own(module.bias, 0)
            module.forward = partial(_linear, module, style, self)  # type: ignore[method-assign]

    def _own(self, weight: Tensor, dim: int) -> nn.Parameter:
        own = weight.detach().chunk(self.size, dim)[self.rank].clone(memory_format=torch.contiguous_format).to(self.device)
        return nn.Parameter(DTensor.from_local(own, self.mesh, [Shard(dim)], run_check=False), weight.requires_grad)

    def copy_to(self, x: Tensor) -> Tensor:
        """What all ranks have, for layers of which each has a part. Its gradient is the sum of what they find: once for all
        layers that it goes into."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._entered is None or self._entered[0] is not x:
            out: Tensor = _Enter.apply(x, self)  # type: ignore[no-untyped-call]
            self._entered = (x, out)
        return self._entered[1]

    def reduce_from(self, x: Tensor) -> Tensor:
        self._entered = None
        out: Tensor = _Add.apply(x, self)  # type: ignore[no-untyped-call]
        return out

    def sum(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def gather_from(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    def scatter_to(self, x: Tensor) -> Tensor:
        return x.chunk(self.size, -1)[self.rank]


def _linear(module: nn.Linear, style: str, ranks: TensorGroup, x: Tensor) -> Tensor:
    weight: Any = module.weight
    bias: Any = module.bias
    if not is_shard(weight):  # gathered for sampling: each rank by itself
        return functional.linear(x, weight, bias)
    if style in COLUMNS:
        own = functional.linear(ranks.copy_to(x), weight.to_local(), None if bias is None else bias.to_local())
        return own if style == "colwise" else _Join.apply(own, ranks)  # type: ignore[no-untyped-call]
    x = x if style == "rowwise" else _Cut.apply(x, ranks)  # type: ignore[no-untyped-call]
    total = ranks.reduce_from(functional.linear(x, weight.to_local()))
    return total if bias is None else total + bias


BACK = "a pass back through split layers"


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):  # type: ignore[no-untyped-def]
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        with ctx.ranks.exchange(BACK):
            return ctx.ranks.sum(grad), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):  # type: ignore[no-untyped-def]
        return ranks.sum(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):  # type: ignore[no-untyped-def]
        ctx.ranks = ranks
        return ranks.gather_from(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return ctx.ranks.scatter_to(grad), None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):  # type: ignore[no-untyped-def]
        ctx.ranks = ranks
        return ranks.scatter_to(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        with ctx.ranks.exchange(BACK):
            return ctx.ranks.gather_from(grad), None


@torch.no_grad()
def all_reduce_replicated_grads(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Of weights that are whole on every rank of a group, and have seen its part of the heads: the sum, in place."""
    partial_over: list[tuple[Tensor, TensorGroup]] = [
        (gradient, weight.partial_over)
        for weight, gradient in zip(weights, gradients, strict=True)
        if hasattr(weight, "partial_over")
    ]
    if not partial_over:
        return
    ranks = partial_over[0][1]
    with ranks.exchange("adding up gradients of split layers"):
        total = ranks.sum(torch.cat([gradient for gradient, _ in partial_over]))
    parts = torch.split(total, [gradient.numel() for gradient, _ in partial_over])
    for (gradient, _), part in zip(partial_over, parts, strict=True):
        gradient.copy_(part)
