"""Tensor parallelism by transformers' own plan: the ranks of a group split each decoder layer between them.

The plan gives each linear layer of a decoder layer a style. `colwise`: each rank holds some of the outputs (in attention,
complete heads). `rowwise`: each rank holds some of the inputs, and the partial results are all-reduced over the group.
Everything between the two is computed for the local part only. A per-head norm (`replicated_with_grad_allreduce`) is replicated
and applied to the local heads, and its gradient is all-reduced once per update (`all_reduce_replicated_grads`). If a plan needs
complete outputs, they are gathered (`colwise_gather_output`) and split again (`rowwise_split_input`). Embedding, head and the
other norms are replicated, and every rank of the group computes the same.
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
from oncurve.models.parallel.dtensor import Collective, is_dtensor
from oncurve.models.policy import Policy

COLUMNS, ROWS = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
REPLICATED = "replicated_with_grad_allreduce"
NO_TENSOR_PARALLEL = "use scale.tensor = 1: FSDP2 alone shards the model"

Styles = list[dict[str, str]]
"""Per layer: the style of each module that the plan names."""


def tp_styles(policy: Policy, layers: nn.ModuleList, size: int) -> Styles:
    """The styles of the model's plan, checked for a group of ``size`` ranks."""
    model = type(policy.model).__name__
    plan: dict[str, str] = getattr(policy.model.config.get_text_config(), "base_model_tp_plan", None) or {}
    patterns = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), style) for name, style in plan.items()]
    by_layer: Styles = []
    for i, layer in enumerate(layers):
        names = [name for name, _ in layer.named_modules() if name] + [name for name, _ in layer.named_parameters()]
        matched = ((name, pattern, style) for name in names for pattern, style in patterns)
        by_layer.append({name: style for name, pattern, style in matched if pattern.fullmatch(f"layers.{i}.{name}")})
        _check_styles(model, layer, by_layer[-1])
    if not any(by_layer):
        raise ModelError(
            model,
            "can't be split over ranks",
            because="transformers has no tensor-parallel plan for it",
            fix=NO_TENSOR_PARALLEL,
        )
    divisor = math.gcd(*(n for layer, styles in zip(layers, by_layer, strict=True) for n in _split_sizes(layer, styles)))
    if divisor % size:
        raise RecipeError(
            "scale.tensor",
            size,
            because=f"it must divide {model}'s heads, KV heads and widths, whose greatest common divisor is {divisor}",
            fix=f"use a divisor of {divisor}" if divisor > 1 else NO_TENSOR_PARALLEL,
        )
    return by_layer


def _check_styles(model: str, layer: nn.Module, styles: dict[str, str]) -> None:
    """Refuse a plan with modules or styles that are not implemented, or one that leaves out parameters of a split module."""
    for name, style in styles.items():
        is_parameter, module = name in dict(layer.named_parameters()), dict(layer.named_modules()).get(name)
        is_known = style == REPLICATED or (style in (*COLUMNS, *ROWS) and isinstance(module, nn.Linear))
        if is_parameter or not is_known:
            raise ModelError(
                model,
                f"a plan that splits '{name}' by '{style}'",
                because="only linear layers and norms are supported",
                fix=NO_TENSOR_PARALLEL,
            )
    for parent in {name.rpartition(".")[0] for name, style in styles.items() if style == "colwise"}:
        for name, _ in layer.get_submodule(parent).named_parameters():
            if f"{parent}.{name}".rpartition(".")[0] not in styles:
                because = "other layers of its module are split, and the plan does not say how it is applied"
                raise ModelError(model, f"a plan without '{parent}.{name}'", because=because, fix=NO_TENSOR_PARALLEL)


def _split_sizes(layer: nn.Module, styles: dict[str, str]) -> Iterator[int]:
    """The sizes that the group must divide: the number of heads in attention, otherwise the width."""
    for name, style in styles.items():
        module, parent = layer.get_submodule(name), layer.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Linear):
            width = module.out_features if style in COLUMNS else module.in_features
            yield width // int(getattr(parent, "head_dim", None) or 1) if style in ("colwise", "rowwise") else width


class TensorGroup:
    """A tensor group, as seen by one of its ranks. The four operations have Megatron's names."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, collective: Collective) -> None:
        self.mesh, self.device, self.collective = mesh, device, collective
        self.group, self.rank, self.size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self._copied: tuple[Tensor, Tensor] | None = None
        """The last input of ``copy_to`` and its output, which all layers of that input share."""

    def split(self, layer: nn.Module, styles: dict[str, str]) -> None:
        """Replace a layer's weights by this rank's part of them, and its linear layers' forward by the parallel one."""
        for name, style in styles.items():
            module = layer.get_submodule(name)
            if not isinstance(module, nn.Linear):
                continue
            module.weight = self._shard(module.weight, 0 if style in COLUMNS else 1)
            if style in COLUMNS and module.bias is not None:
                module.bias = self._shard(module.bias, 0)
            module.forward = partial(_linear, module, style, self)  # type: ignore[method-assign]

    def _shard(self, weight: Tensor, dim: int) -> nn.Parameter:
        local = weight.detach().chunk(self.size, dim)[self.rank].clone(memory_format=torch.contiguous_format).to(self.device)
        return nn.Parameter(DTensor.from_local(local, self.mesh, [Shard(dim)], run_check=False), weight.requires_grad)

    def copy_to(self, x: Tensor) -> Tensor:
        """A replicated input for split layers. Its gradient is all-reduced once for all layers that share the input."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._copied is None or self._copied[0] is not x:
            out: Tensor = _CopyToGroup.apply(x, self)  # type: ignore[no-untyped-call]
            self._copied = (x, out)
        return self._copied[1]

    def reduce_from(self, x: Tensor) -> Tensor:
        self._copied = None
        out: Tensor = _ReduceFromGroup.apply(x, self)  # type: ignore[no-untyped-call]
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def gather_from(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    def scatter_to(self, x: Tensor) -> Tensor:
        return x.chunk(self.size, -1)[self.rank]


def _linear(module: nn.Linear, style: str, group: TensorGroup, x: Tensor) -> Tensor:
    weight: Any = module.weight
    bias: Any = module.bias
    if not is_dtensor(weight):  # gathered for sampling: no communication
        return functional.linear(x, weight, bias)
    if style in COLUMNS:
        local = functional.linear(group.copy_to(x), weight.to_local(), None if bias is None else bias.to_local())
        return local if style == "colwise" else _GatherFromGroup.apply(local, group)  # type: ignore[no-untyped-call]
    x = x if style == "rowwise" else _ScatterToGroup.apply(x, group)  # type: ignore[no-untyped-call]
    total = group.reduce_from(functional.linear(x, weight.to_local()))
    return total if bias is None else total + bias


BACKWARD = "backward through tensor-parallel layers"


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        with ctx.group.collective(BACKWARD):
            return ctx.group.all_reduce(grad), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        return group.all_reduce(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return group.gather_from(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return ctx.group.scatter_to(grad), None


class _ScatterToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return group.scatter_to(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        with ctx.group.collective(BACKWARD):
            return ctx.group.gather_from(grad), None


@torch.no_grad()
def gather_parts(weight: Any) -> Tensor:
    """The full weight, from the parts of a tensor group's ranks. See `fsdp.gather_full_tensor` for why not `full_tensor`."""
    local, mesh = weight.to_local().contiguous(), weight.device_mesh
    parts = [torch.empty_like(local) for _ in range(mesh.size())]
    dist.all_gather(parts, local, group=mesh.get_group())
    return torch.cat(parts, weight.placements[0].dim)


@torch.no_grad()
def all_reduce_replicated_grads(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """All-reduce, in place, the gradients of weights that are replicated in a group and applied to each rank's own heads."""
    replicated: list[tuple[Tensor, TensorGroup]] = [
        (gradient, weight.tensor_group)
        for weight, gradient in zip(weights, gradients, strict=True)
        if hasattr(weight, "tensor_group")
    ]
    if not replicated:
        return
    group = replicated[0][1]
    with group.collective("all-reduce of replicated gradients"):
        total = group.all_reduce(torch.cat([gradient for gradient, _ in replicated]))
    parts = torch.split(total, [gradient.numel() for gradient, _ in replicated])
    for (gradient, _), part in zip(replicated, parts, strict=True):
        gradient.copy_(part)
