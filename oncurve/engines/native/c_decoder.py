"""Decoding on a CPU by C functions (``models/llama/decode.c``), for the Llama family in float32.

Torch decodes if there is no compiler, if the model or its dtype is another, or if the sampling settings truncate.
"""

from __future__ import annotations

import ctypes
from collections import abc
from ctypes import POINTER, c_float, c_int64, c_void_p
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oncurve.engines.base import SampleRequest
from oncurve.engines.native.kv_cache import KVCache
from oncurve.engines.native.scheduler import RoundResult
from oncurve.engines.native.torch_runner import HostRound, TorchRunner
from oncurve.models.llama.c_build import address_of, load_library, pack_weight, run_in_threads
from oncurve.models.llama.fused import Block
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Floats, Ints


class _DecoderLayer(ctypes.Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias", "post_attention_norm")
        ),
        *((name, c_void_p) for name in ("gate_up", "down", "prompt_k", "prompt_v", "suffix_k", "suffix_v")),
        ("window", c_int64),
    ]


class _DecoderModel(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "D", "H", "K", "d", "I", "V")),
        *((name, c_float) for name in ("eps", "head_eps", "scale", "logit_scale", "softcap")),
        *((name, c_void_p) for name in ("embedding", "final_norm", "head", "head_bias", "cos", "sin")),
        ("layer", POINTER(_DecoderLayer)),
        *((name, c_int64) for name in ("N", "R", "T", "min_new", "eos_count")),
        ("eos_ids", c_void_p),
        ("temperature", c_float),
        *((name, c_void_p) for name in ("token", "suffix_length", "prompt_length", "uniform", "sampled", "logp")),
    ]


def can_decode(policy: Policy, sampling: Sampling) -> bool:
    """Whether the C functions support the policy and the sampling settings: they do not truncate."""
    return policy.uses_c and not sampling.truncates


class SlotState(NamedTuple):
    """The state of each slot, which a decode step reads and updates in place."""

    token_S: Tensor
    prompt_length_S: Tensor
    suffix_length_S: Tensor
    uniform_ST: Tensor


class CDecoder:
    """The C functions with the weights, cache and slots of one call of ``sample``. Weights are packed once per call."""

    def __init__(self, policy: Policy, cache: KVCache, sampling: Sampling, state: SlotState) -> None:
        library = load_library()
        assert library is not None
        assert policy.fast_backbone is not None
        self.library, self.fused, self.head, self.cache = library, policy.fast_backbone, policy.head, cache
        self.threads = torch.get_num_threads()
        self._referenced: list[object] = [state]  # C holds their addresses
        self.layers = (_DecoderLayer * len(self.fused.blocks))()
        for number, (layer, block) in enumerate(zip(self.layers, self.fused.blocks, strict=True)):
            self._fill(number, layer, block)
        self.model = self._model(sampling, policy.eos_ids, state)
        self.pack_weights()

    def pack_weights(self) -> None:
        """Pack the present weight matrices, with adapters merged, into the layout that the C products read."""
        self.packed: list[Tensor] = []  # C holds their addresses
        for layer, block in zip(self.layers, self.fused.blocks, strict=True):
            layer.qkv, layer.out = self._packed(block.qkv.merged()), self._packed(block.out.merged())
            layer.gate_up, layer.down = self._packed(block.gate_up.merged()), self._packed(block.down.merged())
        self.model.head = self._packed(self.head.weight_VD)

    def prefill(self, prompts_by_block: abc.Sequence[tuple[int, int]], prompt_ids: abc.Mapping[int, Ints]) -> None:
        """Prefill prompts, all but their last tokens, into blocks: (block, request number) each."""
        longest = max(len(prompt_ids[g]) - 1 for _, g in prompts_by_block)
        if not longest:
            return
        for number, layer in enumerate(self.layers):  # a longer prompt moves them
            layer.prompt_k, layer.prompt_v = (x.data_ptr() for x in self.cache.allocate_prompts(number, longest, *self._like()))
        first_blocks = {g: block for block, g in reversed(prompts_by_block)}
        run_in_threads(lambda item: self._prefill(item[1], prompt_ids[item[0]]), list(first_blocks.items()))
        for block, g in prompts_by_block:
            if block != first_blocks[g]:
                self.cache.copy_prompt(first_blocks[g], block)

    def _prefill(self, block: int, ids: Ints) -> int:
        return int(
            self.library.prefill(ctypes.byref(self.model), c_int64(block), c_void_p(ids.ctypes.data), c_int64(len(ids) - 1))
        )

    def decode(self, slots: Ints, steps: int) -> tuple[Ints, Floats]:
        """Up to ``steps`` tokens for each slot: tokens [steps, S] and their three log-probs [steps, S, 3]."""
        tokens, logps = np.zeros((steps, self.cache.slots), np.int64), np.zeros((steps, self.cache.slots, 3), np.float32)
        self.model.sampled, self.model.logp = tokens.ctypes.data, logps.ctypes.data
        shares = [part.copy() for part in np.array_split(slots, self.threads) if len(part)]
        run_in_threads(lambda part: self._decode(part, steps), shares)
        return tokens, logps

    def _decode(self, slots: Ints, steps: int) -> int:
        return int(
            self.library.decode(ctypes.byref(self.model), c_void_p(slots.ctypes.data), c_int64(len(slots)), c_int64(steps))
        )

    def _like(self) -> tuple[Tensor, Tensor]:
        """Keys and values of one position, for their shape and dtype."""
        like = self.head.weight_VD.new_empty(self.fused.kv_heads, self.fused.head_size)
        return like, like

    def _model(self, sampling: Sampling, end_ids: tuple[int, ...], state: SlotState) -> _DecoderModel:
        fused, head, cache, first = self.fused, self.head, self.cache, self.fused.blocks[0]
        last, ends = fused.final_norm, np.asarray(end_ids, np.int64)
        self._referenced.append(ends)
        return _DecoderModel(
            layers=len(fused.blocks), D=head.weight_VD.shape[1], H=fused.heads, K=fused.kv_heads, d=fused.head_size,
            I=first.down.weight.shape[1], V=head.weight_VD.shape[0],
            eps=last.eps, head_eps=0.0 if first.q_norm is None else first.q_norm.eps,
            scale=fused.scale, logit_scale=head.scale, softcap=head.softcap or 0.0,
            embedding=address_of(fused.embedding.weight), final_norm=address_of(last.weight),
            head_bias=address_of(head.bias_V), cos=address_of(fused.cos), sin=address_of(fused.sin), layer=self.layers,
            N=cache.blocks, R=cache.block_slots, T=sampling.max_new_tokens, min_new=sampling.min_new_tokens,
            eos_count=len(ends), eos_ids=ends.ctypes.data, temperature=sampling.temperature,
            token=address_of(state.token_S), suffix_length=address_of(state.suffix_length_S),
            prompt_length=address_of(state.prompt_length_S), uniform=address_of(state.uniform_ST),
        )  # fmt: skip

    def _fill(self, number: int, layer: _DecoderLayer, block: Block) -> None:
        self.cache.allocate_suffixes(number, *self._like())
        layer.suffix_k, layer.suffix_v = (x.data_ptr() for x in self.cache.suffixes[number])
        layer.input_norm, layer.post_attention_norm = (
            address_of(block.input_norm.weight),
            address_of(block.mlp_norm.weight),
        )
        layer.qkv_bias, layer.out_bias = address_of(block.qkv.bias), address_of(block.out.bias)
        layer.q_norm, layer.k_norm = (None if x is None else address_of(x.weight) for x in (block.q_norm, block.k_norm))
        layer.window = block.window or 0

    def _packed(self, weight: Tensor) -> int:
        out = pack_weight(weight)
        self.packed.append(out)
        return out.data_ptr()


class CRunner(TorchRunner):
    """Prefills and decodes with the C functions."""

    def __init__(self, policy: Policy, cache: KVCache, sampling: Sampling, round_tokens: int) -> None:
        super().__init__(policy, cache, sampling, round_tokens)
        state = SlotState(self.token_S, self.prompt_length_S, self.suffix_length_S, self.uniform_ST)
        self.decoder = CDecoder(policy, cache, sampling, state)

    def weights_changed(self) -> None:
        self.decoder.pack_weights()

    def _prefill_blocks(self, requests: abc.Mapping[int, tuple[int, SampleRequest]]) -> None:
        prompts = {group: request.prompt_ids for group, request in requests.values()}
        self.decoder.prefill([(block, group) for block, (group, _) in requests.items()], prompts)

    def decode(self, live: abc.Sequence[int], tokens: int) -> RoundResult:
        self._apply_updates()
        return HostRound(*self.decoder.decode(np.asarray(live, np.int64), tokens))
