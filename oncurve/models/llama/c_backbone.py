"""The decoder layers over a pack by compiled functions (backbone.c), with their derivative: for the learner on a CPU.

Threads take whole groups, from the first layer to the last. Which groups are whose follows from their lengths and the number of
threads alone, and the threads' gradients are added in their order: the same pack gives the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.models.llama.c_build import LANES, address, library, packed, side_by_side


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("before", "between", "q_norm", "k_norm", "qkv_bias", "out_bias")),
        *((name, c_void_p) for name in ("qkv", "out", "gate_up", "down", "qkv_t", "out_t", "gate_up_t", "down_t")),
    ]


class _Backbone(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "D", "H", "K", "d", "I", "tokens")),
        *((name, c_float) for name in ("eps", "head_eps", "scale")),
        *((name, c_void_p) for name in ("cos", "sin", "position")),
        ("layer", POINTER(_Layer)),
        ("kept", c_void_p),
    ]


class _Group(ctypes.Structure):
    _fields_ = [("first", c_int64), ("prompt", c_int64), ("completions", c_int64), ("length", c_void_p)]


Members = tuple[int, int, tuple[int, ...]]
"""A group's first token, its prompt's length, and the lengths of its completions."""


def can_run(model: PreTrainedModel) -> bool:
    """Whether the compiled functions can serve a model of the family: float32 on a CPU, whole vectors, and a compiler."""
    config, head_size = model.config, model.base_model.layers[0].self_attn.head_dim
    whole = all(size % LANES == 0 for size in (config.hidden_size, config.intermediate_size, head_size))
    return whole and model.dtype == torch.float32 and model.device.type == "cpu" and library() is not None


_FREE: list[Tensor] = []
"""The memory of the last pass: fresh memory costs a fifth of a small model's forward pass, as its pages come one by one."""


def _taken(size: int) -> Tensor:
    kept = _FREE.pop() if _FREE else torch.empty(0)
    return kept if len(kept) >= size else torch.empty(size)


class Pass:
    """One pass over a pack: the weights as they are now, packed, and what the way back needs."""

    def __init__(self, fused: Any, position_N: Tensor, members: Sequence[Members]) -> None:
        found = library()
        assert found is not None
        self.library, self.fused, self.position_N = found, fused, position_N.contiguous()
        self.held: list[object] = []  # what C holds addresses of
        self.layers = (_Layer * len(fused.blocks))(*(self._layer(block) for block in fused.blocks))
        self.shares = _shares(members, torch.get_num_threads())
        self.model = self._model()
        found.kept_size.restype = found.gradient_size.restype = c_int64
        self.kept = _taken(len(fused.blocks) * found.kept_size(ctypes.byref(self.model)))
        self.model.kept = self.kept.data_ptr()

    def release(self) -> None:
        """The way back is done, or not wanted: the next pass may use the memory."""
        _FREE[:] = [max([*_FREE, self.kept], key=len)]
        self.kept = torch.empty(0)

    def _model(self) -> _Backbone:
        fused, first = self.fused, self.fused.blocks[0]
        return _Backbone(
            layers=len(fused.blocks), D=first.out.out_features, H=fused.heads, K=fused.kv_heads, d=fused.head_size,
            I=first.down.in_features, tokens=len(self.position_N), eps=first.before.variance_epsilon,
            head_eps=0.0 if first.q_norm is None else first.q_norm.variance_epsilon, scale=fused.scale,
            cos=address(fused.cos), sin=address(fused.sin), position=address(self.position_N), layer=self.layers,
        )  # fmt: skip

    def _layer(self, block: Any) -> _Layer:
        layer = _Layer(
            before=address(block.before.weight), between=address(block.between.weight),
            q_norm=None if block.q_norm is None else address(block.q_norm.weight),
            k_norm=None if block.k_norm is None else address(block.k_norm.weight),
            qkv_bias=address(block.qkv.bias), out_bias=address(block.out.bias),
        )  # fmt: skip
        products = {
            "qkv": block.qkv.weight,
            "out": block.out.weight,
            "gate_up": block.gate_up.weight,
            "down": block.down.weight,
        }
        for name, weight in products.items():
            both = packed(weight), packed(weight, transposed=True)
            self.held += both
            setattr(layer, name, both[0].data_ptr())
            setattr(layer, f"{name}_t", both[1].data_ptr())
        return layer

    def forward(self, x_ND: Tensor) -> Tensor:
        x_ND = x_ND.contiguous()
        out_ND = torch.empty_like(x_ND)
        side_by_side(lambda share: self._call("forward", share, address(x_ND), address(out_ND)), self.shares)
        return out_ND

    def backward(self, grad_ND: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The gradient of what went in, and of each parameter in the order of ``parameters``."""
        assert len(self.kept), "a pass goes back once"
        grad_ND = grad_ND.contiguous()
        into_ND = torch.empty_like(grad_ND)
        size = len(self.layers) * self.library.gradient_size(ctypes.byref(self.model))
        own = torch.zeros(len(self.shares), size)
        work = list(zip(self.shares, own, strict=True))
        side_by_side(lambda w: self._call("backward", w[0], address(grad_ND), address(into_ND), address(w[1])), work)
        total = own[0]
        for more in own[1:]:
            total = total + more
        return into_ND, [part for block, flat in zip(self.fused.blocks, total.chunk(len(self.layers)), strict=True)
                         for part in self._split(block, flat)]  # fmt: skip

    def _call(self, name: str, share: _Share, *addresses: int | None) -> int:
        groups, count = share.groups, c_int64(len(share.groups))
        return int(getattr(self.library, name)(ctypes.byref(self.model), groups, count, *map(c_void_p, addresses)))

    def _split(self, block: Any, flat: Tensor) -> Iterator[Tensor]:
        """One layer's gradients in the order that backbone.c lays them, as those of the module's own parameters."""
        D, d, out = block.before.weight.numel(), self.fused.head_size, block.out.weight
        Q, both = len(block.qkv.weight), len(block.gate_up.weight)
        sizes = [D, Q * D, Q, d, d, out.numel(), D, D, both * D, block.down.weight.numel()]
        before, qkv, qkv_bias, q_norm, k_norm, to_out, out_bias, between, gate_up, down = torch.split(flat, sizes)
        yield before
        yield from torch.split(qkv.view(Q, D), block.qkv.sizes)
        yield from torch.split(qkv_bias, block.qkv.sizes) if block.qkv.bias is not None else ()
        yield from (q_norm, k_norm) if block.q_norm is not None else ()
        yield to_out.view_as(out)
        yield from (out_bias,) if block.out.bias is not None else ()
        yield between
        yield from torch.split(gate_up.view(both, D), block.gate_up.sizes)
        yield down.view_as(block.down.weight)


def parameters(fused: Any) -> Iterator[Tensor]:
    """The parameters of all layers, in the order in which ``Pass.backward`` gives their gradients."""
    for block in fused.blocks:
        yield block.before.weight
        yield from (part.weight for part in block.qkv.parts)
        yield from (part.bias for part in block.qkv.parts if part.bias is not None)
        yield from (norm.weight for norm in (block.q_norm, block.k_norm) if norm is not None)
        yield block.out.weight
        yield from (block.out.bias,) if block.out.bias is not None else ()
        yield block.between.weight
        yield from (part.weight for part in block.gate_up.parts)
        yield block.down.weight


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, over: Pass, *_):  # type: ignore[no-untyped-def]
        ctx.over = over
        return over.forward(x_ND)

    @staticmethod
    def backward(ctx, grad_ND):  # type: ignore[no-untyped-def]
        into_ND, gradients = ctx.over.backward(grad_ND)
        ctx.over.release()
        return (into_ND, None, *gradients)


def layers(fused: Any, x_ND: Tensor, position_N: Tensor, members: Sequence[Members]) -> Tensor:
    """All decoder layers over the tokens of a pack."""
    over = Pass(fused, position_N, members)
    if not torch.is_grad_enabled():
        out_ND = over.forward(x_ND)
        over.release()
        return out_ND
    out: Tensor = _Layers.apply(x_ND, over, *parameters(fused))  # type: ignore[no-untyped-call]
    return out


class _Share:
    """The groups of one thread, as C reads them."""

    def __init__(self, members: Sequence[Members]) -> None:
        self.lengths = [np.asarray(lengths, np.int64) for _, _, lengths in members]
        self.groups = (_Group * len(members))(*(
            _Group(first, prompt, len(lengths), array.ctypes.data)
            for (first, prompt, lengths), array in zip(members, self.lengths, strict=True)
        ))  # fmt: skip


def _shares(members: Sequence[Members], threads: int) -> list[_Share]:
    """Groups in order, cut where the tokens are nearly equal."""
    ends = np.cumsum([prompt + sum(lengths) for _, prompt, lengths in members])
    middles = ends - np.diff(ends, prepend=0) / 2
    owner = np.minimum((middles * threads // ends[-1]).astype(int), threads - 1)
    return [_Share([g for g, thread in zip(members, owner, strict=True) if thread == t]) for t in sorted(set(owner.tolist()))]
