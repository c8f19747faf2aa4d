"""One token for every slot: the complete decode step as kernels and matrix products, which never waits for the host.

There are two ways through the layers: the Llama family's own, over the fused weights of ``models/llama/fused.py`` (five kernels
of ours and four products per layer; four more kernels if all layers have adapters), and any other decoder's modules, whose
attention goes through the attention interface. Both read the learner's parameters in place, so the next step uses an
optimiser's update, captured graph or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oncurve.engines import token_sampling
from oncurve.engines.cuda.paged_kv_cache import KVShape
from oncurve.kernels import sampling as kernels
from oncurve.kernels.decode_attention import LaunchShape, PageTables, PartialSoftmax, attend
from oncurve.kernels.decode_layers import add_norm, embed_norm, rotate_store, silu_mul, store
from oncurve.kernels.decode_matmul import block_for, gated_product, product
from oncurve.kernels.launch import pdl_options
from oncurve.models.heads.lm_head import Head
from oncurve.models.llama.cuda_lora import JointLora
from oncurve.models.llama.fused import FusedBackbone
from oncurve.models.policy import Policy
from oncurve.models.recurrent_layers import RunLayer
from oncurve.recipe.schema.sections import Sampling


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """The sizes of a set of buffers; ``forced_tokens``: positions at which an environment's tokens can be forced, 0 if none
    is."""

    slots: int
    members: int
    prompt_pages: int
    suffix_pages: int
    ring: int
    forced_tokens: int = 0


class DecodeBuffers:
    """What a step reads and writes besides weights and KV cache: tensors whose addresses never change."""

    def __init__(self, sizes: BufferSizes, shape: KVShape, vocabulary: int, device: torch.device) -> None:
        S, parts = sizes.slots, sizes.prompt_pages + sizes.suffix_pages

        def ints(*size: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(size, fill, dtype=dtype, device=device)

        def floats(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float32, device=device)

        self.sizes = sizes
        self.tables = PageTables(
            ints(S, sizes.members, fill=-1),
            ints(S, sizes.prompt_pages),
            ints(S, sizes.suffix_pages),
            ints(S * sizes.suffix_pages, fill=-1),
            ints(S),
            ints(S, fill=-1),
        )
        self.slots = kernels.Slots(
            ints(S, dtype=torch.long), self.tables.suffix_length, ints(S), ints(S, dtype=torch.long), ints(sizes.ring, S),
            floats(sizes.ring, 3, S), ints(S, sizes.forced_tokens, fill=-1),
        )  # fmt: skip
        H, d = shape.heads, shape.head_size
        self.parts = PartialSoftmax(floats(parts, S, H, d), floats(parts, S, H), floats(parts, S, H))
        self.is_end_V = ints(vocabulary, dtype=torch.int8)
        self.row_of_layer = shape.row_of_layer
        self.states = {layer: one.map(lambda x: x.new_zeros(S, *x.shape[1:])) for layer, one in shape.states.items()}
        """By recurrent layer, the state of every slot."""

    def clear(self, eos_ids: tuple[int, ...]) -> None:
        """Make every slot idle, and mark the end tokens."""
        self.tables.suffix_length.fill_(-1)
        self.slots.forced.fill_(-1)
        self.is_end_V.zero_()
        self.is_end_V[torch.tensor(eos_ids, dtype=torch.long, device=self.is_end_V.device)] = 1


class PagedDecode:
    """Attention of a decode step, for models that run through their own modules."""

    def __init__(self, buffers: DecodeBuffers, cache: Tensor, launch: LaunchShape) -> None:
        self.buffers, self.cache, self.launch = buffers, cache, launch
        self.end_S = buffers.tables.suffix_length + 1

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        tables, layer = self.buffers.tables, self.buffers.row_of_layer[layer]
        store(k, v, self.cache, layer, tables.suffix_page, tables.suffix_length, self.end_S)
        out = attend(
            q[:, :, 0].contiguous(), self.cache, layer, tables, self.launch, self.buffers.parts, scale, window, softcap
        )
        return out[:, None]

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        """The states of idle slots stay as they are, so that a step with every slot idle changes nothing."""
        stored = self.buffers.states[layer]
        out, after = run(hidden, stored)
        runs_S = self.buffers.tables.suffix_length >= 0
        for target, new in zip(stored.tensors, after.tensors, strict=True):
            torch.where(runs_S.view(-1, *[1] * (new.dim() - 1)), new.to(target.dtype), target, out=target)
        return out


class FusedStep:
    """The Llama family's decode step over the fused weights of ``models/llama/fused.py``."""

    def __init__(self, decoder: FusedBackbone, device: torch.device) -> None:
        self.decoder = decoder
        backbone = decoder.backbone
        positions = torch.arange(backbone.config.max_position_embeddings, device=device)[None]
        cos, sin = backbone.rotary_emb(torch.zeros(1, device=device), positions)  # in float32
        half = decoder.head_size // 2
        self.rotations = (cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous())

    def hidden(self, buffers: DecodeBuffers, cache: Tensor, launch: LaunchShape) -> Tensor:
        """The last hidden state of every slot's newest token, [S, D]."""
        decoder, tables = self.decoder, buffers.tables
        words, last, blocks = decoder.backbone.embed_tokens.weight, decoder.backbone.norm, decoder.blocks
        first = blocks[0].input_norm
        residual = torch.empty((len(buffers.slots.token), words.shape[1]), dtype=torch.float32, device=words.device)
        h = embed_norm(buffers.slots.token, words, first.weight, first.variance_epsilon, residual)
        for i, block in enumerate(blocks):
            norms = (
                (block.q_norm.weight, block.k_norm.weight) if block.q_norm is not None and block.k_norm is not None else None
            )
            eps = block.q_norm.variance_epsilon if block.q_norm is not None else 0.0
            qkv = _linear(h, block.qkv.weight, block.qkv.bias, block.qkv.lora)
            q = rotate_store(
                qkv, cache, i, tables.suffix_page, tables.prompt_length, tables.suffix_length, self.rotations, norms, eps
            )
            a = attend(q, cache, i, tables, launch, buffers.parts, decoder.scale, block.window, None)
            o = _linear(a.flatten(1), block.out.weight, block.out.bias, block.out_lora)
            h = add_norm(o, block.post_attention_norm.weight, block.post_attention_norm.variance_epsilon, residual)
            h = _gated(h, block.gate_up.weight, block.gate_up.lora)
            h = _linear(h, block.down.weight, None, block.down_lora)
            following = blocks[i + 1].input_norm if i + 1 < len(blocks) else last
            h = add_norm(h, following.weight, following.variance_epsilon, residual)
        return h


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, lora: JointLora | None) -> Tensor:
    """x·Wᵀ + b, or its float32 parts [parts, S, outputs], which the next kernel sums."""
    block = None if lora else block_for(x, len(weight))
    return _torch_linear(x, weight, bias, lora) if block is None else product(x, weight, bias, block)


def _gated(x: Tensor, gate_up: Tensor, lora: JointLora | None) -> Tensor:
    """silu(gate)·up, [S, I]."""
    block = None if lora else block_for(x, len(gate_up) // 2, gated=True)
    return silu_mul(_torch_linear(x, gate_up, None, lora)) if block is None else gated_product(x, gate_up, block)


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, lora: JointLora | None) -> Tensor:
    if not lora:
        return torch.nn.functional.linear(x, weight, bias)
    return lora.product(x, bias, pdl_options(x.device))[0]


class ModuleStep:
    """The step of any other decoder, through transformers' own modules."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def hidden(self, buffers: DecodeBuffers, cache: Tensor, launch: LaunchShape) -> Tensor:
        tables = buffers.tables
        positions = (tables.prompt_length + tables.suffix_length.clamp(min=0)).long()
        return self.policy.hidden(buffers.slots.token[:, None], positions[:, None], PagedDecode(buffers, cache, launch))[:, 0]


def build_step(policy: Policy) -> FusedStep | ModuleStep:
    """The fused step if the policy has a fast backbone, else the step through the model's modules."""
    return ModuleStep(policy) if policy.fast_backbone is None else FusedStep(policy.fast_backbone, policy.device)


def sample_step(head: Head, hidden_SD: Tensor, buffers: DecodeBuffers, sampling: Sampling) -> None:
    """Sample a token for every slot that is not idle: from truncated distributions with torch's sort, else with our kernels."""
    if sampling.temperature == 0 or not sampling.truncates:
        rule = kernels.SamplingRule(sampling.temperature, sampling.min_new_tokens, head.scale, head.softcap)
        kernels.sample_tokens(product_logits(head, hidden_SD), buffers.slots, buffers.is_end_V, rule)
        return
    logits_SV, banned_SV = head.logits(hidden_SD), None
    if sampling.min_new_tokens:
        before_min_length_S = buffers.tables.suffix_length < sampling.min_new_tokens
        banned_SV = before_min_length_S[:, None] & (buffers.is_end_V != 0)
    sampled = token_sampling.sample_tokens(logits_SV, kernels.uniforms(buffers.slots), sampling, banned_SV)
    logps = torch.stack((sampled.logp_S, sampled.sampled_logp_S, sampled.raw_logp_S)).float()
    kernels.write_tokens(sampled.token_S, logps, buffers.slots, buffers.is_end_V, sampling.min_new_tokens)


def product_logits(head: Head, hidden_SD: Tensor) -> Tensor:
    """W h + b in float32: the product's accumulators, not rounded to 16 bits."""
    if hidden_SD.dtype == torch.float32 or hidden_SD.device.type != "cuda":
        return torch.nn.functional.linear(hidden_SD, head.weight_VD, head.bias_V).float()
    logits = torch.mm(hidden_SD, head.weight_VD.t(), out_dtype=torch.float32)
    return logits if head.bias_V is None else logits.add_(head.bias_V)
