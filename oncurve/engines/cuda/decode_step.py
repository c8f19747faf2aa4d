"""One token for every slot, or several with drafts: the complete decode step as kernels and matrix products, which never waits
for the host.

There are two ways through the layers: over the fused weights of ``models/llama/fused.py`` if the model's blocks could be
described (six kernels of ours and four products per layer; four more kernels if all layers have adapters), and through the
modules of any other decoder, whose attention goes through the attention interface. Both read the learner's parameters in place,
so after an optimiser update the next step uses the new weights, captured graph or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oncurve.engines import token_sampling
from oncurve.engines.cuda.paged_kv_cache import KVShape
from oncurve.kernels import sampling as kernels
from oncurve.kernels.decode_attention import LaunchShape, PageTables, PartialSoftmax, attend
from oncurve.kernels.decode_layers import (
    HeadNorms,
    NormRule,
    RopeTables,
    activate_unit,
    add,
    add_norm,
    embed_norm,
    rotate_store,
    store,
)
from oncurve.kernels.decode_matmul import block_for, gated_product, product
from oncurve.kernels.drafting import DraftState, accept_and_draft
from oncurve.kernels.launch import pdl_options
from oncurve.models.attention_interface import ScoreRule
from oncurve.models.heads.lm_head import Head
from oncurve.models.llama.block_description import BlockDescription, Mlp, Norm, Rope
from oncurve.models.llama.fused import Block, FusedLinear, FusedWeights
from oncurve.models.policy import Policy
from oncurve.models.recurrent_layers import RunLayer, stepping_in_place
from oncurve.recipe.schema.sections import Draft, Sampling


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """The sizes of a set of buffers; ``forced_tokens``: positions at which an environment's tokens can be forced, 0 if none
    are. ``width``: rows of a slot in a step, one for its last token and one for each drafted token. ``texts`` and
    ``text_width`` are the number and length of the texts in which drafts are looked for; ``sources`` of them belong to a slot's
    request. ``experts``: how many experts a token takes in all layers together, 0 if they are not recorded."""

    slots: int
    members: int
    prompt_pages: int
    suffix_pages: int
    ring: int
    forced_tokens: int = 0
    width: int = 1
    texts: int = 0
    text_width: int = 0
    sources: int = 0
    experts: int = 0

    def are_enough_for(self, needed: BufferSizes) -> bool:
        """Whether buffers of these sizes serve a call of the same kind."""
        names = ("prompt_pages", "suffix_pages", "forced_tokens", "texts", "text_width", "sources")
        return all(getattr(self, name) >= getattr(needed, name) for name in names)


class DecodeBuffers:
    """What a step reads and writes besides weights and KV cache: tensors whose addresses never change."""

    def __init__(self, sizes: BufferSizes, shape: KVShape, vocabulary: int, device: torch.device) -> None:
        S, W, parts = sizes.slots, sizes.width, sizes.prompt_pages + sizes.suffix_pages
        rows = S * W

        def ints(*size: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(size, fill, dtype=dtype, device=device)

        def floats(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float32, device=device)

        self.sizes = sizes
        self.tables = PageTables(
            ints(S, sizes.members, fill=-1),
            ints(S, sizes.prompt_pages),
            ints(rows, sizes.suffix_pages),
            ints(S * sizes.suffix_pages, fill=-1),
            ints(rows),
            ints(rows, fill=-1),
            W,
        )
        # With drafts a step samples for each row and then accepts, so the rings and forced tokens are in the draft state.
        ring, forced = (sizes.ring, sizes.forced_tokens) if W == 1 else (1, 0)
        self.slots = kernels.Slots(
            ints(rows, dtype=torch.long), self.tables.suffix_length, ints(rows), ints(rows, dtype=torch.long), ints(ring, rows),
            floats(ring, 3, rows), ints(rows, forced, fill=-1),
        )  # fmt: skip
        self.drafts: DraftState | None = None
        if W > 1:
            self.drafts = DraftState.empty(
                S, W, sizes.ring, sizes.texts, sizes.text_width, sizes.sources, sizes.forced_tokens, device
            )
        H, d = shape.heads, shape.head_size
        self.parts = PartialSoftmax(floats(parts, rows, H, d), floats(parts, rows, H), floats(parts, rows, H))
        self.is_end_V = ints(vocabulary, dtype=torch.int8)
        self.row_of_layer = shape.row_of_layer
        self.states = {layer: one.map(lambda x: x.new_zeros(S, *x.shape[1:])) for layer, one in shape.states.items()}
        """By recurrent layer, the state of every slot."""
        self.routing = ints(sizes.ring, S, sizes.experts, dtype=torch.int16)
        """A ring of the experts that each slot's inputs took, if they are recorded."""

    def store_routing(self, chosen_SE: Tensor) -> None:
        """Called before a step samples. Idle slots keep what they have, as the host may not have read it yet."""
        at_S, (ring, S, E) = self.tables.suffix_length, self.routing.shape
        row_S = at_S.clamp(min=0) % ring * S + torch.arange(S, device=at_S.device)
        rows = self.routing.view(ring * S, E)
        rows.index_copy_(0, row_S.long(), torch.where((at_S >= 0)[:, None], chosen_SE, rows[row_S.long()]))

    def clear(self, eos_ids: tuple[int, ...]) -> None:
        """Make every slot idle, and mark the end tokens."""
        self.tables.suffix_length.fill_(-1)
        self.slots.forced.fill_(-1)
        if self.drafts is not None:
            self.drafts.position.fill_(-1)
            self.drafts.forced.fill_(-1)
            self.drafts.counts.zero_()
        self.is_end_V.zero_()
        self.is_end_V[torch.tensor(eos_ids, dtype=torch.long, device=self.is_end_V.device)] = 1


class PagedDecode:
    """Attention of a decode step, for models that run through their own modules."""

    def __init__(self, buffers: DecodeBuffers, cache: Tensor, launch: LaunchShape) -> None:
        self.buffers, self.cache, self.launch = buffers, cache, launch
        self.end_S = buffers.tables.suffix_length + 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        tables, layer = self.buffers.tables, self.buffers.row_of_layer[layer]
        store(k, v, self.cache, layer, tables.suffix_page, tables.suffix_length, self.end_S)
        out = attend(
            q[:, :, 0].contiguous(), self.cache, layer, tables, self.launch, self.buffers.parts,
            rule.scale, rule.window, rule.softcap, sinks_H=rule.sinks_H,
        )  # fmt: skip
        return out[:, None]

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        """Stores the new states in place. Idle slots keep theirs, so a step in which every slot is idle changes nothing."""
        stored = self.buffers.states[layer]
        runs_S = self.buffers.tables.suffix_length >= 0
        with stepping_in_place(runs_S):
            out, after = run(hidden, stored)
        for target, new in zip(stored.tensors, after.tensors, strict=True):
            if new is target:  # a kernel has updated it
                continue
            torch.where(runs_S.view(-1, *[1] * (new.dim() - 1)), new.to(target.dtype), target, out=target)
        return out


class FusedStep:
    """The decode step of described blocks over the fused weights of ``models/llama/fused.py``."""

    def __init__(self, weights: FusedWeights, positions: int, device: torch.device) -> None:
        self.weights = weights
        decoder = weights.description
        self.ropes: dict[Rope, RopeTables] = {}
        for rope in {block.rope for block in decoder.blocks if block.rope is not None}:
            self.ropes[rope] = RopeTables(*decoder.angles(rope, positions, device), rope.is_interleaved)

    def hidden(self, buffers: DecodeBuffers, cache: Tensor, launch: LaunchShape) -> Tensor:
        """The last hidden state of every slot's newest token, [S, D]."""
        decoder, tables, blocks = self.weights.description, buffers.tables, self.weights.blocks
        words = decoder.embedding.weight
        residual = torch.empty((len(buffers.slots.token), words.shape[1]), dtype=torch.float32, device=words.device)
        norms = [*(_rule(block.description.input_norm) for block in blocks), _rule(decoder.final_norm)]
        h = embed_norm(buffers.slots.token, words, norms[0], residual, decoder.embedding_scale)
        for i, block in enumerate(blocks):
            form = block.description
            qkv = _linear(h, block.qkv)
            rope = None if form.rope is None else self.ropes[form.rope]
            q = rotate_store(
                qkv, cache, i, tables.suffix_page, tables.prompt_length, tables.suffix_length, rope, _head_norms(form),
                words.dtype,
            )  # fmt: skip
            a = attend(q, cache, i, tables, launch, buffers.parts, form.scale, form.window, form.softcap)
            o = _linear(a.flatten(1), block.out)
            after, scale = _rule(form.attention_norm), form.residual_scale
            if form.is_parallel:
                add(o, residual, after=after, scale=scale)
            else:
                h = add_norm(o, _rule(form.mlp_norm), residual, words.dtype, after=after, scale=scale)
            h = _mlp(h, block)
            h = add_norm(h, norms[i + 1], residual, words.dtype, after=_rule(form.output_norm), scale=scale)
        return h


def _rule(norm: Norm | None) -> NormRule | None:
    return None if norm is None else NormRule(norm.weight, norm.eps, norm.bias, norm.is_centred, norm.offset == 1)


def _head_norms(block: BlockDescription) -> HeadNorms | None:
    q, k = block.q_norm, block.k_norm
    return None if q is None or k is None else HeadNorms(q.weight, k.weight, q.eps, q.offset == 1)


def _linear(x: Tensor, layer: FusedLinear) -> Tensor:
    """x·Wᵀ + b, or its float32 parts [parts, S, outputs], which the next kernel sums."""
    block = None if layer.lora else block_for(x, len(layer.weight))
    return _torch_linear(x, layer) if block is None else product(x, layer.weight, layer.bias, block)


def _mlp(x: Tensor, block: Block) -> Tensor:
    """The MLP: [S, D], or its float32 parts. One that is not described runs as a module."""
    mlp = block.description.mlp
    if not isinstance(mlp, Mlp):
        out = mlp(x[None])
        hidden: Tensor = out[0] if isinstance(out, tuple) else out  # a tuple also has the router's logits
        return hidden.reshape(x.shape).contiguous()
    layer = block.gate_up
    fits = mlp.is_gated and layer.bias is None and not layer.lora
    tiles = block_for(x, len(layer.weight) // 2, gated=True) if fits else None
    if tiles is not None:
        value = gated_product(x, layer.weight, tiles, mlp.activation)
    else:
        value = activate_unit(_torch_linear(x, layer), mlp.activation, gated=mlp.is_gated)
    return _linear(value, block.down)


def _torch_linear(x: Tensor, layer: FusedLinear) -> Tensor:
    if not layer.lora:
        return torch.nn.functional.linear(x, layer.weight, layer.bias)
    return layer.lora.product(x, layer.bias, pdl_options(x.device))[0]


class ModuleStep:
    """The step of any other decoder, through transformers' own modules."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def hidden(self, buffers: DecodeBuffers, cache: Tensor, launch: LaunchShape) -> Tensor:
        tables = buffers.tables
        positions = (tables.prompt_length + tables.suffix_length.clamp(min=0)).long()
        return self.policy.hidden(buffers.slots.token[:, None], positions[:, None], PagedDecode(buffers, cache, launch))[:, 0]


def build_step(policy: Policy) -> FusedStep | ModuleStep:
    """The fused step if the model's weights are fused, else the step through its modules."""
    weights = policy.fast_backbone or policy.fused_weights
    return ModuleStep(policy) if weights is None else FusedStep(weights, policy.max_positions, policy.device)


def compare_steps(policy: Policy, shape: KVShape) -> bool:
    """Whether the fused step gives the hidden states of the model's modules, for a few tokens of two sequences."""
    device, tokens = policy.device, 2
    generator = torch.Generator().manual_seed(0)
    ids_TS = torch.randint(policy.head.weight_VD.shape[0], (tokens, 2), generator=generator).to(device)
    hidden: list[Tensor] = []
    for step in (build_step(policy), ModuleStep(policy)):
        buffers = DecodeBuffers(BufferSizes(2, 1, 1, 1, 1), shape, 1, device)
        buffers.tables.suffix_page.copy_(torch.arange(2, device=device)[:, None])
        pages = torch.zeros(shape.pages_shape(2), dtype=shape.stored_dtype, device=device)
        for position in range(tokens):
            buffers.tables.suffix_length.fill_(position)
            buffers.slots.token.copy_(ids_TS[position])
            last_SD = step.hidden(buffers, pages, LaunchShape(1, 1, 1))
        hidden.append(last_SD.float())
    ours_SD, theirs_SD = hidden
    tolerance = 1e-3 if shape.dtype == torch.float32 else 0.1  # a wrong block is off by about 1
    return float((ours_SD - theirs_SD).norm()) <= tolerance * float(theirs_SD.norm())


def sample_step(head: Head, hidden_SD: Tensor, buffers: DecodeBuffers, sampling: Sampling, draft: Draft) -> None:
    """Sample a token for every row that is not idle, accept what was drafted, and draft the next step's rows."""
    _sample_rows(head, hidden_SD, buffers, sampling)
    if buffers.drafts is not None:
        accept_rows(buffers, buffers.drafts, own=draft == "own")


def accept_rows(buffers: DecodeBuffers, drafts: DraftState, *, own: bool) -> None:
    """Accept the drafted tokens that equal the sampled ones, and draft the next step's rows. All rows must have sampled.

    ``own``: look for drafts only in the prompt and in the completion itself, not in the other texts of the group.
    """
    rows = buffers.slots
    accept_and_draft(rows.token, rows.suffix_length, rows.sampled, rows.logps, drafts, buffers.is_end_V, own=own)


def _sample_rows(head: Head, hidden_SD: Tensor, buffers: DecodeBuffers, sampling: Sampling) -> None:
    """Truncated distributions are sampled with torch's sort, others with our kernels."""
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
