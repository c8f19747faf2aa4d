"""The decoder layers over a pack by C functions (backbone.c), forward and backward: the learner's path on a CPU.

Each thread takes complete groups from the first layer to the last. The assignment of groups to threads depends only on their
lengths and the number of threads, and the threads' gradients are added in thread order, so the same pack gives the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.models.device_memory import free_memory
from oncurve.models.llama.c_build import LANES, address_of, load_library, pack_weight, run_in_threads
from oncurve.models.lora import Adapter

if TYPE_CHECKING:
    from oncurve.models.llama.fused import Block, FusedBackbone, FusedLinear


class _PackLayer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "post_attention_norm", "q_norm", "k_norm", "qkv_bias", "out_bias")),
        *((name, c_void_p) for name in ("qkv", "out", "gate_up", "down", "qkv_t", "out_t", "gate_up_t", "down_t")),
    ]


class _PackModel(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "D", "H", "K", "d", "I", "tokens")),
        *((name, c_float) for name in ("eps", "head_eps", "scale")),
        *((name, c_void_p) for name in ("cos", "sin", "position")),
        ("layer", POINTER(_PackLayer)),
        ("saved", c_void_p),
    ]


class _PackGroup(ctypes.Structure):
    _fields_ = [("first", c_int64), ("prompt", c_int64), ("completions", c_int64), ("length", c_void_p)]


GroupLayout = tuple[int, int, tuple[int, ...]]
"""A group's first token, the length of its prompt, and the lengths of its completions."""


def can_run_c(model: PreTrainedModel, fused: FusedBackbone) -> bool:
    """Whether the C functions support a Llama-like model: float32 on a CPU, sizes in full SIMD vectors, and a compiler."""
    sizes = (fused.embedding.embedding_dim, fused.blocks[0].down.weight.shape[1], fused.head_size)
    is_aligned = all(size % LANES == 0 for size in sizes)
    return is_aligned and model.dtype == torch.float32 and model.device.type == "cpu" and load_library() is not None


_FREE: list[Tensor] = []
"""The memory of the last pass, for reuse: page faults on fresh memory cost a fifth of a small model's forward pass."""


def _take_memory(size: int) -> Tensor:
    """Memory for ``size`` numbers. A size that does not fit is refused: Linux would grant it, and kill the process later."""
    memory = _FREE.pop() if _FREE else torch.empty(0)
    if len(memory) >= size:
        return memory
    del memory
    free = free_memory()
    if size * torch.float32.itemsize > free:
        raise torch.OutOfMemoryError(f"a pack's activations need {size * torch.float32.itemsize:,} bytes, {free:,} are free")
    return torch.empty(size)


class CBackbonePass:
    """One pass over a pack: the current weights in packed form, and the activations saved for the backward pass."""

    def __init__(self, fused: FusedBackbone, position_N: Tensor, groups: Sequence[GroupLayout]) -> None:
        library = load_library()
        assert library is not None
        self.library, self.fused, self.position_N = library, fused, position_N.contiguous()
        self.packed: list[Tensor] = []  # kept alive: C has their addresses
        self.layers = (_PackLayer * len(fused.blocks))(*(self._layer(block) for block in fused.blocks))
        self.shares = _split_over_threads(groups, torch.get_num_threads())
        self.model = self._model()
        library.saved_size.restype = library.gradient_size.restype = c_int64
        self.saved = _take_memory(len(fused.blocks) * library.saved_size(ctypes.byref(self.model)))
        self.model.saved = self.saved.data_ptr()

    def release(self) -> None:
        """Give the memory to the next pass, after the backward pass or if there is none."""
        _FREE[:] = [max([*_FREE, self.saved], key=len)]
        self.saved = torch.empty(0)

    def _model(self) -> _PackModel:
        fused, first = self.fused, self.fused.blocks[0]
        return _PackModel(
            layers=len(fused.blocks), D=first.out.columns, H=fused.heads, K=fused.kv_heads, d=fused.head_size,
            I=first.down.weight.shape[1], tokens=len(self.position_N), eps=first.input_norm.eps,
            head_eps=0.0 if first.q_norm is None else first.q_norm.eps, scale=fused.scale,
            cos=address_of(fused.cos), sin=address_of(fused.sin), position=address_of(self.position_N), layer=self.layers,
        )  # fmt: skip

    def _layer(self, block: Block) -> _PackLayer:
        layer = _PackLayer(
            input_norm=address_of(block.input_norm.weight), post_attention_norm=address_of(block.mlp_norm.weight),
            q_norm=None if block.q_norm is None else address_of(block.q_norm.weight),
            k_norm=None if block.k_norm is None else address_of(block.k_norm.weight),
            qkv_bias=address_of(block.qkv.bias), out_bias=address_of(block.out.bias),
        )  # fmt: skip
        layers = {"qkv": block.qkv, "out": block.out, "gate_up": block.gate_up, "down": block.down}
        with torch.no_grad():
            weights = {name: linear.merged() for name, linear in layers.items()}
        for name, weight in weights.items():
            packed, packed_t = pack_weight(weight), pack_weight(weight, transposed=True)
            self.packed += (packed, packed_t)
            setattr(layer, name, packed.data_ptr())
            setattr(layer, f"{name}_t", packed_t.data_ptr())
        return layer

    def forward(self, x_ND: Tensor) -> Tensor:
        x_ND = x_ND.contiguous()
        out_ND = torch.empty_like(x_ND)
        run_in_threads(lambda share: self._call("forward", share, address_of(x_ND), address_of(out_ND)), self.shares)
        return out_ND

    @torch.no_grad()
    def backward(self, grad_ND: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """The gradient of the input, and of each parameter in the order of ``layer_parameters``."""
        assert len(self.saved), "a pass has one backward"
        grad_ND = grad_ND.contiguous()
        input_grad_ND = torch.empty_like(grad_ND)
        size = len(self.layers) * self.library.gradient_size(ctypes.byref(self.model))
        by_thread = torch.zeros(len(self.shares), size)
        work = list(zip(self.shares, by_thread, strict=True))
        run_in_threads(
            lambda w: self._call("backward", w[0], address_of(grad_ND), address_of(input_grad_ND), address_of(w[1])), work
        )
        total = by_thread[0]
        for gradient in by_thread[1:]:
            total = total + gradient
        by_layer = zip(self.fused.blocks, total.chunk(len(self.layers)), strict=True)
        return input_grad_ND, [part for block, flat in by_layer for part in self._split(block, flat)]

    def _call(self, name: str, share: _ThreadShare, *addresses: int | None) -> int:
        groups, count = share.groups, c_int64(len(share.groups))
        return int(getattr(self.library, name)(ctypes.byref(self.model), groups, count, *map(c_void_p, addresses)))

    def _split(self, block: Block, flat: Tensor) -> Iterator[Tensor | None]:
        """One layer's gradients, stored in the order of `Gradients` in backbone.c, as those of the module's own parameters."""
        D, d = block.input_norm.weight.numel(), self.fused.head_size
        qkv, out, gate_up, down = (linear.weight for linear in _linears(block))
        sizes = [D, qkv.numel(), len(qkv), d, d, out.numel(), D, D, gate_up.numel(), down.numel()]
        input_norm, d_qkv, qkv_bias, q_norm, k_norm, d_out, out_bias, mlp_norm, d_gate_up, d_down = torch.split(flat, sizes)
        yield from (input_norm, mlp_norm)
        yield from (q_norm, k_norm) if block.q_norm is not None else ()
        biases = (qkv_bias, out_bias, None, None)
        for linear, weight, bias in zip(_linears(block), (d_qkv, d_out, d_gate_up, d_down), biases, strict=True):
            parts = torch.split(weight.view_as(linear.weight), linear.sizes)
            yield from parts
            yield from torch.split(bias, linear.sizes) if bias is not None and linear.bias is not None else ()
            for grad_OI, adapter in zip(parts, linear.adapters, strict=True):
                yield from () if adapter is None else _adapter_gradients(adapter, grad_OI)


def _linears(block: Block) -> tuple[FusedLinear, FusedLinear, FusedLinear, FusedLinear]:
    return block.qkv, block.out, block.gate_up, block.down


def _adapter_gradients(adapter: Adapter, grad_OI: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of A and B, from the gradient g of W + s·B·A: dA = s·Bᵀg, dB = s·g·Aᵀ."""
    if not adapter.is_enabled:
        return None, None
    return adapter.scale * (adapter.b.T @ grad_OI), adapter.scale * (grad_OI @ adapter.a.T)


def layer_parameters(fused: FusedBackbone) -> Iterator[Tensor]:
    """The parameters of all layers, in the order in which ``CBackbonePass.backward`` returns their gradients."""
    for block in fused.blocks:
        yield from (block.input_norm.weight, block.mlp_norm.weight)
        yield from (norm.weight for norm in (block.q_norm, block.k_norm) if norm is not None)
        for linear in _linears(block):
            yield from (part.weight for part in linear.parts)
            yield from (part.bias for part in linear.parts if part.bias is not None)
            for adapter in linear.adapters:
                yield from () if adapter is None else (adapter.a, adapter.b)


class _CLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND, run: CBackbonePass, *_):  # type: ignore[no-untyped-def]
        ctx.run = run
        return run.forward(x_ND)

    @staticmethod
    def backward(ctx, grad_ND):  # type: ignore[no-untyped-def]
        input_grad_ND, gradients = ctx.run.backward(grad_ND)
        ctx.run.release()
        return (input_grad_ND, None, *gradients)


def run_layers(fused: FusedBackbone, x_ND: Tensor, position_N: Tensor, groups: Sequence[GroupLayout]) -> Tensor:
    """All decoder layers over the tokens of a pack."""
    run = CBackbonePass(fused, position_N, groups)
    if not torch.is_grad_enabled():
        out_ND = run.forward(x_ND)
        run.release()
        return out_ND
    out: Tensor = _CLayers.apply(x_ND, run, *layer_parameters(fused))  # type: ignore[no-untyped-call]
    return out


class _ThreadShare:
    """The groups of one thread, as C reads them."""

    def __init__(self, groups: Sequence[GroupLayout]) -> None:
        self.lengths = [np.asarray(lengths, np.int64) for _, _, lengths in groups]  # kept alive: C has their addresses
        self.groups = (_PackGroup * len(groups))(*(
            _PackGroup(first, prompt, len(lengths), array.ctypes.data)
            for (first, prompt, lengths), array in zip(groups, self.lengths, strict=True)
        ))  # fmt: skip


def _split_over_threads(groups: Sequence[GroupLayout], threads: int) -> list[_ThreadShare]:
    """Consecutive groups for each thread, with nearly equal numbers of tokens."""
    ends = np.cumsum([prompt + sum(lengths) for _, prompt, lengths in groups])
    middles = ends - np.diff(ends, prepend=0) / 2
    owner = np.minimum((middles * threads // ends[-1]).astype(int), threads - 1)
    return [
        _ThreadShare([g for g, thread in zip(groups, owner, strict=True) if thread == t]) for t in sorted(set(owner.tolist()))
    ]
