"""What a decoder's blocks compute, found by watching one forward pass of the model's own modules.

A block is described by where its norms are and what they compute, its linear layers, its activation, its rotary embedding, and
its scales. Nothing is looked up by the name of a family: hooks record which module reads which tensor, and norms and
activations are run on test inputs. A block in which anything is left unexplained is not described.

Two forms of a block are described. n₁ to n₄ are norms, each of which may be missing, and s is the residual scale:

    sequential    m = x + s·n₂(attention(n₁(x))),  y = m + s·n₄(mlp(n₃(m)))
    parallel      y = x + s·n₂(attention(n₁(x))) + s·n₄(mlp(n₁(x)))
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from oncurve.models import attention_interface
from oncurve.models.attention_interface import AttentionContext, ScoreRule
from oncurve.models.lora import base_linear, is_plain
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.recurrent_layers import RunLayer, running_in
from oncurve.models.self_check import FAILURES

PROBE_TOKENS = 12
CLOSE_32BIT, CLOSE_16BIT = 1e-4, 0.03
"""Relative differences up to which two tensors of a trace count as equal. A wrong explanation is off by 0.1 or more."""

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu_squared"]
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
}


class Undescribed(Exception):
    """A block computes something that a description can't express; the message says what."""


@dataclass(frozen=True, slots=True)
class Norm:
    """(x − mean if ``is_centred``) · (mean of its squares + eps)^−½ · (weight + offset) + bias, over the last dimension."""

    module: nn.Module
    eps: float
    is_centred: bool
    offset: float

    @property
    def weight(self) -> Tensor:
        """Read from the module on each access: the parameters may be moved."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.module, "bias", None)

    @property
    def is_plain_rms(self) -> bool:
        return not self.is_centred and self.offset == 0 and self.bias is None


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding of the first ``size`` numbers of a head, in pairs (i, i + size/2), or (2i, 2i + 1) if interleaved.

    ``arguments`` are what the model's rotary module takes besides a tensor and the positions.
    """

    size: int
    is_interleaved: bool
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(act(gate(x)) · up(x)), or down(act(up(x))) if it is not gated. Gate and up may be one layer, gate first."""

    gate_up: tuple[nn.Module, ...]
    is_gated: bool
    activation: Activation
    down: nn.Module


@dataclass(frozen=True, slots=True)
class BlockDescription:
    """One decoder block. Linear layers that read one input are listed together, in the order of their outputs."""

    input_norm: Norm | None
    attention_norm: Norm | None
    mlp_norm: Norm | None
    output_norm: Norm | None
    """The four norms: before and after attention, before and after the MLP."""
    is_parallel: bool
    qkv: tuple[nn.Module, ...]
    q_norm: Norm | None
    k_norm: Norm | None
    """Norms of q and k: over each head, or over all heads together if the weight is that wide."""
    rope: Rope | None
    scale: float
    window: int | None
    softcap: float | None
    out: nn.Module
    mlp: Mlp | nn.Module
    """A module if it is not described (experts): it runs as it is."""
    residual_scale: float

    def parameters(self) -> Iterator[nn.Parameter]:
        norms = (self.input_norm, self.attention_norm, self.mlp_norm, self.output_norm, self.q_norm, self.k_norm)
        mlp = (*self.mlp.gate_up, self.mlp.down) if isinstance(self.mlp, Mlp) else (self.mlp,)
        for module in (*self.qkv, self.out, *mlp, *(norm.module for norm in norms if norm is not None)):
            yield from module.parameters()

    @property
    def is_llama_like(self) -> bool:
        """Whether the learner's kernels and the C functions know this block: that of Llama, Mistral, Qwen 2 and Qwen 3."""
        norms = (self.input_norm, self.mlp_norm, self.q_norm, self.k_norm)
        return (
            self.input_norm is not None
            and self.mlp_norm is not None
            and self.attention_norm is None
            and self.output_norm is None
            and all(norm is None or norm.is_plain_rms for norm in norms)
            and not self.is_parallel
            and len(self.qkv) == 3
            and isinstance(self.mlp, Mlp)
            and len(self.mlp.gate_up) == 2
            and self.mlp.activation == "silu"
            and not any(base_linear(layer).bias is not None for layer in (*self.mlp.gate_up, self.mlp.down))
            and self.residual_scale == 1
            and self.softcap is None
        )


@dataclass(frozen=True, slots=True)
class DecoderDescription:
    """A decoder: its embedding and that embedding's scale, its blocks and its final norm."""

    embedding: nn.Embedding
    embedding_scale: float
    blocks: tuple[BlockDescription, ...]
    final_norm: Norm
    rotary: nn.Module | None
    heads: int
    kv_heads: int
    head_size: int

    @property
    def is_llama_like(self) -> bool:
        """Whether all blocks are like Llama's and share one rotary embedding and one attention scale. Windows may differ."""
        first = self.blocks[0]
        return (
            self.embedding_scale == 1
            and self.final_norm.is_plain_rms
            and all(
                block.is_llama_like
                and block.rope == first.rope == Rope(self.head_size, False)
                and block.scale == first.scale
                and (block.q_norm is None or block.q_norm.weight.numel() == self.head_size)
                for block in self.blocks
            )
        )

    def angles(self, rope: Rope, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of each pair at every position, [positions, size/2], in float32."""
        assert self.rotary is not None
        position_ids = torch.arange(positions, device=device)[None]
        cos, sin = self.rotary(torch.zeros(1, device=device), position_ids, *rope.arguments)
        return tuple(_angles_of_pairs(x[0].float()).contiguous() for x in (cos, sin))  # type: ignore[return-value]


# The trace.


@dataclass(slots=True)
class _Call:
    """One call of a module: what it read and what it wrote."""

    module: nn.Module
    input: Tensor
    output: Tensor


@dataclass(slots=True)
class _Attend:
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int | None
    softcap: float | None
    output: Tensor


@dataclass(slots=True)
class _LayerTrace:
    """The calls within one layer: those before attention, attention, those after it."""

    input: Tensor
    angles: tuple[Tensor, Tensor] | None
    before: list[_Call] = field(default_factory=list)
    attend: _Attend | None = None
    after: list[_Call] = field(default_factory=list)
    containers: list[_Call] = field(default_factory=list)
    """The calls of the layer's children that have children themselves, such as its MLP."""
    output: Tensor | None = None


class _TracedAttention:
    """Forwards to a pack's attention, and records what each layer asks of it."""

    def __init__(self, inner: AttentionContext, trace: _Trace) -> None:
        self.inner, self.trace = inner, trace

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        if rule.sinks_H is not None:
            raise Undescribed("attention sinks")
        out = self.inner.attend(layer, q, k, v, rule)
        if not self.trace.layers or self.trace.layers[-1].attend is not None:
            raise Undescribed("attention outside of its layer")
        self.trace.layers[-1].attend = _Attend(q, k, v, rule.scale, rule.window, rule.softcap, out)
        return out

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        raise Undescribed("a recurrent layer")


class _Trace:
    """Hooks on a model's layers and on the modules within them."""

    def __init__(self, backbone: nn.Module, layers: Sequence[nn.Module], embedding: nn.Module) -> None:
        self.backbone, self.modules, self.embedding = backbone, layers, embedding
        self.layers: list[_LayerTrace] = []
        self.rotations: list[tuple[nn.Module, tuple[Any, ...], tuple[Tensor, Tensor]]] = []
        self.outside: list[_Call] = []

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles = []
        inside = {module for layer in self.modules for module in layer.modules()}
        for layer in self.modules:
            handles.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(layer.register_forward_hook(self._leave))
            handles.extend(module.register_forward_hook(self._call) for module in _parts(layer))
            containers = [child for child in layer.children() if not is_plain(child) and list(child.children())]
            handles.extend(child.register_forward_hook(self._call_container, with_kwargs=True) for child in containers)
        for module in self.backbone.children():
            if module not in inside and module is not self.embedding and not isinstance(module, nn.ModuleList):
                handles.append(module.register_forward_hook(self._call_outside, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden = inputs[0] if inputs else options["hidden_states"]
        self.layers.append(_LayerTrace(hidden, options.get("position_embeddings")))

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.layers[-1].output = _first(output)

    def _call(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        layer = self.layers[-1]
        if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            (layer.before if layer.attend is None else layer.after).append(_Call(module, inputs[0], output))

    def _call_container(self, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        hidden = (*inputs, *options.values())
        if len(hidden) == 1 and isinstance(hidden[0], Tensor) and isinstance(_first(output), Tensor):
            self.layers[-1].containers.append(_Call(module, hidden[0], _first(output)))

    def _call_outside(self, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        if isinstance(output, tuple):
            self.rotations.append((module, (*inputs[2:], *_beyond_positions(inputs, options)), output))
        elif inputs and isinstance(output, Tensor):
            self.outside.append(_Call(module, inputs[0], output))


def _beyond_positions(inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments of a rotary module passed by name, besides its tensor and the positions."""
    return tuple(value for name, value in options.items() if name not in ("x", "hidden_states", "position_ids"))


def _parts(layer: nn.Module) -> Iterator[nn.Module]:
    """The modules of a layer that compute something: linear layers with their adapters, norms, activations."""
    for child in layer.children():
        if is_plain(child) or not list(child.children()):
            yield from () if isinstance(child, nn.Dropout | nn.Identity) else (child,)
        else:
            yield from _parts(child)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


# The description.


@torch.no_grad()
def describe(model: PreTrainedModel) -> DecoderDescription | str:
    """The description of a model that runs through our attention, or a text that says what can't be described."""
    present = model.config._attn_implementation
    model.set_attn_implementation(attention_interface.NAME)
    try:
        return _describe(model)
    except Undescribed as problem:
        return str(problem)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        return f"a forward that the trace breaks ({type(error).__name__})"
    finally:
        model.set_attn_implementation(present)


def _describe(model: PreTrainedModel) -> DecoderDescription:
    backbone = model.base_model
    count = model.config.get_text_config().num_hidden_layers
    stacks = [m for m in backbone.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    embedding = model.get_input_embeddings()
    if len(stacks) != 1 or not isinstance(embedding, nn.Embedding):
        raise Undescribed("layers that are not one list after an embedding")
    trace = _Trace(backbone, list(stacks[0]), embedding)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.num_embeddings, (PROBE_TOKENS,), generator=generator).numpy()
    pack = build_pack([PrefixGroup(ids[:1], (ids[1:],), (0,))], model.device)
    positions = _spread_positions(model, pack.input_ids.shape[1])
    with trace.hooks(), running_in(_TracedAttention(pack.attention, trace)):
        out = backbone(input_ids=pack.input_ids, position_ids=positions, use_cache=False).last_hidden_state
    if len(trace.layers) != count:
        raise Undescribed("layers that are not called once each")
    last = [call for call in trace.outside if call.output is out and _same(call.input, trace.layers[-1].output)]
    if len(trace.outside) != 1 or len(last) != 1:
        raise Undescribed("more than a norm after the last layer")
    for one, other in zip(trace.layers, trace.layers[1:], strict=False):
        if not _same(one.output, other.input):
            raise Undescribed("a step between two layers")
    blocks = [_Explanation(layer, trace).block() for layer in trace.layers]
    final_norm = _norm_of(last[0].module)
    known = {p for module in (embedding, final_norm.module) for p in module.parameters()}
    for block in blocks:
        known.update(block.parameters())
    unknown = [name for name, p in backbone.named_parameters() if p not in known]
    if unknown:  # their effect may be hidden by their current values
        raise Undescribed(f"parameters besides linear layers and norms ({unknown[0]})")
    shapes = {
        (layer.attend.q.shape[1], layer.attend.k.shape[1], layer.attend.q.shape[3]) for layer in trace.layers if layer.attend
    }
    if len(shapes) != 1:
        raise Undescribed("layers with different numbers of heads")
    rotary = {module for module, _, _ in trace.rotations}
    if len(rotary) > 1:
        raise Undescribed("several rotary embeddings")
    H, K, d = shapes.pop()
    raw = functional.embedding(pack.input_ids, embedding.weight)
    scale = _scale_between(raw, trace.layers[0].input, model.config)
    return DecoderDescription(embedding, scale, tuple(blocks), final_norm, next(iter(rotary), None), H, K, d)


def _spread_positions(model: PreTrainedModel, count: int) -> Tensor:
    """The first positions, and others up to the last one: some models scale queries from a certain position on."""
    last = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20) - 1
    near = count // 2
    far = torch.logspace(3, max(3.0, math.log2(last + 1)), count - near, base=2).round().long().clamp(max=last)
    return torch.cat((torch.arange(near), far))[None].to(model.device)


class _Explanation:
    """Explains every call of one layer; raises `Undescribed` if one is left over or a number differs."""

    def __init__(self, layer: _LayerTrace, trace: _Trace) -> None:
        self.trace, self.layer = trace, layer
        if layer.attend is None or layer.output is None:
            raise Undescribed("a layer without attention")
        self.attend, self.output = layer.attend, layer.output
        self.before, self.after = list(layer.before), list(layer.after)

    def block(self) -> BlockDescription:
        x, attend = self.layer.input, self.attend
        if not all(bool(call.output.any()) for call in (*self.before, *self.after) if is_plain(call.module)):
            raise Undescribed("weights of zero, with which the use of a linear layer's output can't be traced")
        qkv_calls = [call for call in self.before if is_plain(call.module)]
        if len(qkv_calls) not in (1, 3) or not all(_same(call.input, qkv_calls[0].input) for call in qkv_calls):
            raise Undescribed("queries, keys and values that are not linear functions of one input")
        self.before = [call for call in self.before if call not in qkv_calls]
        u = qkv_calls[0].input
        input_norm = self._take_norm(self.before, reads=x, writes=u)
        if input_norm is None and not _same(u, x):
            raise Undescribed("attention whose input is not a norm of the residual stream")
        q_norm, k_norm, rope = self._heads(qkv_calls)
        if self.before:
            raise Undescribed(f"a {type(self.before[0].module).__name__} before attention")
        attended = attend.output.reshape(*x.shape[:-1], -1)
        out = self._take_linear(attended)
        attention_norm, added = self._take_norm_after(out.output)
        attention = {
            "input_norm": input_norm, "attention_norm": attention_norm, "qkv": tuple(call.module for call in qkv_calls),
            "q_norm": q_norm, "k_norm": k_norm, "rope": rope, "scale": attend.scale, "window": attend.window,
            "softcap": attend.softcap, "out": out.module,
        }  # fmt: skip
        return self._with_mlp(x, u, added, attention, self._mlp(out.module))

    def _with_mlp(
        self, x: Tensor, u: Tensor, added: Tensor, attention: dict[str, Any], unit: tuple[Mlp | nn.Module, Tensor, Tensor]
    ) -> BlockDescription:
        mlp, m, written = unit
        config = self.trace.backbone.config
        if _same(m, u) and (attention["input_norm"] is not None or _same(m, x)):
            is_parallel, mlp_norm, middle = True, None, x
        else:
            norms = [call for call in self.after if _same(call.output, m)]
            middle = norms[0].input if norms else m
            mlp_norm = self._take_norm(self.after, reads=middle, writes=m)
            is_parallel = False
        output_norm, more = self._take_norm_after(written)
        if self.after:
            raise Undescribed(f"a {type(self.after[0].module).__name__} after attention")
        if is_parallel:
            scale = _residual_scale(x, (added, more), self.output, config)
        else:
            scale = _residual_scale(x, (added,), middle, config)
            if abs(_residual_scale(middle, (more,), self.output, config) - scale) > 1e-3 * abs(scale):
                raise Undescribed("two residual sums of different scales")
        return BlockDescription(
            **attention, is_parallel=is_parallel, mlp_norm=mlp_norm, output_norm=output_norm, mlp=mlp, residual_scale=scale
        )

    def _mlp(self, out: nn.Module) -> tuple[Mlp | nn.Module, Tensor, Tensor]:
        """(MLP, its input, its output). If the MLP can't be described, it is the only module of the layer besides attention."""
        try:
            return self._described_mlp()
        except Undescribed:
            others = [call for call in self.layer.containers if out not in call.module.modules()]
            if len(others) != 1:
                raise
        inside = set(others[0].module.modules())
        self.after = [call for call in self.after if call.module not in inside]
        return others[0].module, others[0].input, others[0].output

    def _described_mlp(self) -> tuple[Mlp, Tensor, Tensor]:
        linear = [call for call in self.after if is_plain(call.module)]
        acts = [call for call in self.after if not list(call.module.parameters())]
        if len(linear) not in (2, 3) or len(acts) != 1:
            raise Undescribed("an MLP of other than one activation and two or three linear layers")
        *ups, down = linear
        if not all(_same(call.input, ups[0].input) for call in ups):
            raise Undescribed("an MLP whose first layers read different inputs")
        gate_up, is_gated = self._unit(ups, acts[0], down)
        mlp = Mlp(gate_up, is_gated, _activation_of(acts[0].module), down.module)
        self.after = [call for call in self.after if call not in (*linear, acts[0])]
        return mlp, ups[0].input, down.output

    def _unit(self, ups: Sequence[_Call], act: _Call, down: _Call) -> tuple[tuple[nn.Module, ...], bool]:
        """The first layers of the MLP, gate before up, and whether there is a gate."""
        if len(ups) == 1 and _same(act.input, ups[0].output):
            if not _close(down.input, act.output):
                raise Undescribed("an MLP that does more than its activation")
            return (ups[0].module,), False
        if len(ups) == 1:
            gate, up = ups[0].output.chunk(2, -1)
        else:
            first = _same(act.input, ups[0].output)
            ups = ups if first else ups[::-1]
            gate, up = ups[0].output, ups[1].output
        if not _close(act.input, gate) or not _close(down.input, act.output * up):
            raise Undescribed("an MLP that is neither plain nor gated")
        return tuple(call.module for call in ups), True

    def _heads(self, calls: Sequence[_Call]) -> tuple[Norm | None, Norm | None, Rope | None]:
        """The norms of q and k and the rotary embedding: what is applied to the products before attention reads them."""
        attend = self.attend
        H, K, d = attend.q.shape[1], attend.k.shape[1], attend.q.shape[3]
        joint = torch.cat([call.output for call in calls], -1)
        if joint.shape[-1] != (H + 2 * K) * d:
            raise Undescribed("queries, keys and values of other sizes than attention's")
        q, k, v = torch.split(joint, [H * d, K * d, K * d], -1)
        if not _close(_by_head(v, d), attend.v):
            raise Undescribed("values that are not the product's")
        norms: list[Norm | None] = [None, None]
        if self.before:
            if len(self.before) != 2:
                raise Undescribed("a norm of q without one of k")
            for i, (call, product) in enumerate(zip(self.before, (q, k), strict=True)):
                norms[i] = norm = _norm_of(call.module)
                width = product.shape[-1]
                if not any(torch.equal(call.input.flatten(), y.flatten()) for y in (product, _by_head(product, d))):
                    # The outputs alone would not show this while the norm's weight is uniform.
                    raise Undescribed("a norm of q and k after the rotary embedding")
                if norm.is_centred or norm.bias is not None or norm.weight.numel() not in (d, width):
                    raise Undescribed("a norm of q and k that is no RMSNorm over a head or over all heads")
            if norms[0] is None or norms[1] is None or norms[0].eps != norms[1].eps or norms[0].offset != norms[1].offset:
                raise Undescribed("norms of q and k of different kinds")
            wide = [norm.weight.numel() != d for norm in norms if norm is not None]
            if len(set(wide)) != 1 and H * d != d and K * d != d:
                raise Undescribed("norms of q and k of different kinds")
            self.before = []
        q, k = (x if norm is None else _apply_norm(x, norm, d) for x, norm in zip((q, k), norms, strict=True))
        return norms[0], norms[1], self._rope(_by_head(q, d), _by_head(k, d))

    def _rope(self, q: Tensor, k: Tensor) -> Rope | None:
        attend = self.attend
        if _close(q, attend.q) and _close(k, attend.k):
            return None
        if self.layer.angles is None:
            raise Undescribed("positions that are not encoded by a rotary embedding")
        cos, sin = self.layer.angles
        arguments = [extra for _, extra, (c, _) in self.trace.rotations if c is cos]
        if len(arguments) != 1:
            raise Undescribed("a rotary embedding from elsewhere")
        pairs = [_angles_of_pairs(x[0].float()) for x in (cos, sin)]
        for is_interleaved in (False, True):
            rope = Rope(cos.shape[-1], is_interleaved, arguments[0])
            if all(_close(rotate(x, pairs[0], pairs[1], rope), y) for x, y in ((q, attend.q), (k, attend.k))):
                return rope
        raise Undescribed("a rotary embedding of another form")

    def _take_norm(self, calls: list[_Call], reads: Tensor, writes: Tensor) -> Norm | None:
        """The norm from one tensor to another, taken from the calls; None if there is none."""
        for call in calls:
            if _same(call.input, reads) and _same(call.output, writes) and not is_plain(call.module):
                calls.remove(call)
                return _norm_of(call.module)
        return None

    def _take_norm_after(self, tensor: Tensor) -> tuple[Norm | None, Tensor]:
        """A norm of this output, if there is one, and what is added to the residual stream."""
        for call in self.after:
            if _same(call.input, tensor) and not is_plain(call.module):
                self.after.remove(call)
                return _norm_of(call.module), call.output
        return None, tensor

    def _take_linear(self, reads: Tensor) -> _Call:
        for call in self.after:
            if is_plain(call.module) and call.input.shape == reads.shape and _same(call.input, reads):
                self.after.remove(call)
                return call
        raise Undescribed("an attention output that no linear layer reads")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: Rope) -> Tensor:
    """The rotary embedding of x [..., tokens, d] by the pairs' angles [tokens, size/2]."""
    turned, rest = x[..., : rope.size].float(), x[..., rope.size :]
    if rope.is_interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((out.to(x.dtype), rest), -1)


def _angles_of_pairs(table: Tensor) -> Tensor:
    """[..., size/2] of a table [..., size] that has each angle twice: in both halves, or side by side."""
    first, second = table.chunk(2, -1)
    if torch.equal(first, second):
        return first
    if torch.equal(table[..., 0::2], table[..., 1::2]):
        return table[..., 0::2]
    raise Undescribed("a rotary embedding with an angle for every number")


def _by_head(x: Tensor, d: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, d).transpose(1, 2)


def _apply_norm(x: Tensor, norm: Norm, d: int) -> Tensor:
    """An RMSNorm of q or k, [..., heads·d], over each head or over all."""
    wide = norm.weight.numel()
    y = x.float().view(*x.shape[:-1], -1, wide)
    y = y * (y.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * (norm.weight.float().flatten() + norm.offset)
    return y.view(x.shape).to(x.dtype)


def _norm_of(module: nn.Module) -> Norm:
    """What a module with a weight computes, tried on a copy with a random weight."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    bias = getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        raise Undescribed(f"a {type(module).__name__} that is no norm with one weight")
    trial: Any = copy.deepcopy(module).float()
    generator = torch.Generator().manual_seed(0)
    w, b, x = (torch.rand(weight.shape, generator=generator).to(weight.device) for _ in range(3))
    trial.weight.data.copy_(w)
    if bias is not None:
        trial.bias.data.copy_(b)
    for is_centred in (False, True):
        for offset in (0.0, 1.0):
            if all(
                _close(trial(y)[None], _expected_norm(y, w, eps, is_centred, offset, None if bias is None else b)[None])
                for y in (x, 1e-3 * x)  # the second shows eps
            ):
                return Norm(module, eps, is_centred, offset)
    raise Undescribed(f"a {type(module).__name__} that is neither RMSNorm nor LayerNorm")


def _expected_norm(x: Tensor, w: Tensor, eps: float, is_centred: bool, offset: float, bias: Tensor | None) -> Tensor:
    y = x - x.mean() if is_centred else x
    y = y * (y.square().mean() + eps).rsqrt() * (w + offset)
    return y if bias is None else y + bias


def _activation_of(module: nn.Module) -> Activation:
    device = torch.device("cpu")
    x = torch.linspace(-6, 6, 97, device=device)
    y = module(x)
    for name, function in ACTIVATIONS.items():
        if torch.allclose(y, function(x), rtol=1e-5, atol=1e-6):
            return name
    raise Undescribed(f"the activation {type(module).__name__}")


def _residual_scale(x: Tensor, terms: Sequence[Tensor], total: Tensor, config: Any) -> float:
    """s with total = x + s·(the sum of the terms): the only number of the config that gives these bits, else an estimate.

    An estimate needs terms that are not small beside x. In 16 bits those of a pretrained model often are: a few elements of its
    residual stream are thousands of times as large as the others.
    """
    exact = {s for s in _known_scales(config) if any(torch.equal(y, total) for y in _residual_sums(x, [t * s for t in terms]))}
    return exact.pop() if len(exact) == 1 else _scale_between(sum(terms[1:], terms[0]), total - x, config, x)


def _residual_sums(x: Tensor, terms: Sequence[Tensor]) -> Iterator[Tensor]:
    """x plus one or two terms, in every order of rounding."""
    for first, *rest in itertools.permutations((x, *terms)):
        yield sum(rest, first)


def _known_scales(config: Any) -> set[float]:
    return {1.0, *(float(v) for v in vars(config).values() if isinstance(v, float))}


def _scale_between(one: Tensor, other: Tensor, config: Any, beside: Tensor | None = None) -> float:
    """s with other = s·one. If s is 1 or a number of the config up to rounding, exactly that number is returned.

    ``beside``: the tensor that was subtracted to get ``other``, which therefore carries its rounding.
    """
    a, b = one.double().flatten(), other.double().flatten()
    size = float(a @ a)
    if size == 0:
        raise Undescribed("weights of zero, with which the scale of a residual sum can't be measured")
    scale = float(a @ b) / size
    noise = float(b.norm()) + (0.0 if beside is None else float(beside.double().norm()))
    if float((b - scale * a).norm()) > _tolerance(one) * noise:
        raise Undescribed("a residual sum of other terms")
    rounded = float(torch.tensor(scale, dtype=one.dtype))
    if torch.equal(one * rounded, other):  # Gemma rounds the scale of its embedding to the model's precision
        return rounded
    near = 1e-5 if one.dtype in (torch.float32, torch.float64) else 4e-3
    return min(
        (v for v in _known_scales(config) if abs(scale - v) <= near * abs(v)), key=lambda v: abs(scale - v), default=scale
    )


def _tolerance(x: Tensor) -> float:
    return CLOSE_32BIT if x.dtype in (torch.float32, torch.float64) else CLOSE_16BIT


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and (one is other or (one.shape == other.shape and torch.equal(one, other)))


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    apart = float((one.double() - other.double()).norm())
    return apart <= _tolerance(other) * float(other.double().norm()) + 1e-12
