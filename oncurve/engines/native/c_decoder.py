"""Decoding on a CPU by C functions (``models/llama/decode.c``), for the Llama family in float32.

Completions of a block with the same text so far are computed once, and the spare rows of a pass verify drafts. Torch decodes if
there is no compiler, for other model families or dtypes, and if the sampling settings truncate.
"""

from __future__ import annotations

import ctypes
from collections import abc
from ctypes import POINTER, c_float, c_int64, c_void_p
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oncurve.engines.base import MAX_EARLIER, PassCounts, SampleRequest
from oncurve.engines.native.kv_cache import KVCache
from oncurve.engines.native.scheduler import RoundResult
from oncurve.engines.native.sequence import Sequence
from oncurve.engines.native.torch_runner import HostRound, TorchRunner
from oncurve.models.llama.c_build import address_of, load_library, pack_weight, run_in_threads
from oncurve.models.llama.fused import Block
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Draft, Sampling
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
        *((name, c_void_p) for name in ("storage", "text", "text_length", "prompt")),
        *((name, c_int64) for name in ("P", "sources", "min_rows")),
        *((name, c_void_p) for name in ("earlier", "earlier_length")),
        ("E", c_int64),
    ]


MAX_MATCH = 8
"""The most tokens that a draft is looked up by, as in ``decode.c``."""
SOURCES: dict[Draft, int] = {"off": 0, "own": 1, "group": 2, "auto": 2}
"""Where drafts may come from, as ``decode.c`` numbers it."""
TRIAL, USEFUL = 64, 0.25
"""`auto` stops drafting in a call of ``sample`` if, after this many drafted tokens, a smaller share was accepted: a spare row
costs its attention."""
MIN_ROWS = 0
"""A pass may have this many rows even if its texts need fewer. It can always fill its last tile."""


def can_decode(policy: Policy, sampling: Sampling) -> bool:
    """Whether the C functions support the policy and the sampling settings; they can't truncate."""
    return policy.uses_c and not sampling.truncates


class SlotState(NamedTuple):
    """The state of each slot, which a decode step reads and updates in place."""

    token_S: Tensor
    prompt_length_S: Tensor
    suffix_length_S: Tensor
    uniform_ST: Tensor


class SlotTexts:
    """What each slot has sampled, for drafts, and which slots share the KV cache of a text."""

    def __init__(self, cache: KVCache, max_new_tokens: int) -> None:
        self.block_slots = cache.block_slots
        self.storage_S: Ints = np.arange(cache.slots)
        """The slot that stores the keys and values of this slot's text."""
        self.text_ST: Ints = np.zeros((cache.slots, MAX_MATCH + max_new_tokens), np.int64)
        """The prompt's last tokens, padded with −1 at the front, and what the slot has sampled."""
        self.length_S: Ints = np.zeros(cache.slots, np.int64)
        self.prompt_NP: Ints = np.zeros((cache.blocks, 0), np.int64)
        self.earlier_NET: Ints = np.zeros((cache.blocks, MAX_EARLIER, MAX_MATCH + max_new_tokens), np.int64)
        """As ``text_ST``, answers to a block's prompt from earlier calls."""
        self.earlier_length_NE: Ints = np.zeros((cache.blocks, MAX_EARLIER), np.int64)

    def start(self, slot: int, prompt_ids: Ints) -> None:
        """A sequence starts in a slot: the slots of a block start with the same, empty text."""
        block = slot // self.block_slots
        if len(prompt_ids) > self.prompt_NP.shape[1]:
            wider = np.zeros((len(self.prompt_NP), len(prompt_ids)), np.int64)
            wider[:, : self.prompt_NP.shape[1]] = self.prompt_NP
            self.prompt_NP = wider
        self.prompt_NP[block, : len(prompt_ids)] = prompt_ids
        last = prompt_ids[-MAX_MATCH:]
        self.text_ST[slot, : MAX_MATCH - len(last)] = -1
        self.text_ST[slot, MAX_MATCH - len(last) : MAX_MATCH] = last
        self.storage_S[slot], self.length_S[slot] = block * self.block_slots, 0

    def set_earlier(self, slot: int, answers: abc.Sequence[Ints]) -> None:
        """Earlier answers to the prompt of a slot that has started."""
        block, most = slot // self.block_slots, self.text_ST.shape[1] - MAX_MATCH
        self.earlier_length_NE[block] = 0
        for number, answer in enumerate(answers[:MAX_EARLIER]):
            ids = answer[:most]
            self.earlier_NET[block, number, :MAX_MATCH] = self.text_ST[slot, :MAX_MATCH]
            self.earlier_NET[block, number, MAX_MATCH : MAX_MATCH + len(ids)] = ids
            self.earlier_length_NE[block, number] = len(ids)

    def set_lengths(self, slots_n: Ints, length_n: Ints) -> None:
        """So many tokens of these slots may be read for drafts."""
        self.length_S[slots_n] = length_n


class CDecoder:
    """The C functions with the weights, cache and slots of one call of ``sample``. Weights are packed once per call."""

    def __init__(self, policy: Policy, cache: KVCache, sampling: Sampling, state: SlotState, draft: Draft) -> None:
        library = load_library()
        assert library is not None
        assert policy.fast_backbone is not None
        self.library, self.fused, self.head, self.cache = library, policy.fast_backbone, policy.head, cache
        self.threads = torch.get_num_threads()
        self.state, self.texts, self.draft = state, SlotTexts(cache, sampling.max_new_tokens), draft
        self.counts = PassCounts()
        self._referenced: list[object] = [state]  # C holds their addresses
        self.layers = (_DecoderLayer * len(self.fused.blocks))()
        for number, (layer, block) in enumerate(zip(self.layers, self.fused.blocks, strict=True)):
            self._fill(number, layer, block)
        self.model = self._model(sampling, policy.eos_ids, state)
        self.pack_weights()

    def pack_weights(self) -> None:
        """Pack the current weight matrices, with adapters merged, into the layout that the C products read."""
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

    def continue_texts(self, texts: abc.Mapping[int, Ints]) -> None:
        """Let slots that were just assigned continue texts of their own. By slot: the prompt's last token and the text, of
        which all but the last token are prefilled here. The slots of these blocks share no stored text, not even at first."""
        R, state = self.cache.block_slots, self.texts
        for block in {slot // R for slot in texts}:
            state.storage_S[block * R : (block + 1) * R] = np.arange(block * R, (block + 1) * R)
        for slot, ids in texts.items():
            state.text_ST[slot, MAX_MATCH : MAX_MATCH + len(ids) - 1] = ids[1:]
            state.length_S[slot] = len(ids) - 1
        run_in_threads(lambda item: self._prefill_text(*item), list(texts.items()))

    def _prefill_text(self, slot: int, ids: Ints) -> int:
        at, length = c_void_p(ids.ctypes.data), c_int64(len(ids) - 1)
        return int(self.library.prefill_text(ctypes.byref(self.model), c_int64(slot), at, length))

    def decode(self, slots: Ints, steps: int) -> tuple[Ints, Floats]:
        """Up to ``steps`` tokens for each slot: tokens [steps, S] and their three log-probs [steps, S, 3]."""
        tokens, logps = np.zeros((steps, self.cache.slots), np.int64), np.zeros((steps, self.cache.slots, 3), np.float32)
        self.model.sampled, self.model.logp = tokens.ctypes.data, logps.ctypes.data
        texts = self.texts
        self.model.prompt, self.model.P = texts.prompt_NP.ctypes.data, texts.prompt_NP.shape[1]
        counts_W4 = np.zeros((self.threads, 4), np.int64)
        run_in_threads(
            lambda item: self._decode(item[1], steps, counts_W4[item[0]]), list(enumerate(self._split_by_storage(slots)))
        )
        texts.set_lengths(slots, self.state.suffix_length_S.numpy()[slots])
        self.counts += PassCounts(*counts_W4.sum(0).tolist())
        if self.draft == "auto" and self.counts.drafted >= TRIAL and self.counts.accepted < USEFUL * self.counts.drafted:
            self.model.sources = SOURCES["off"]
        return tokens, logps

    def _split_by_storage(self, slots: Ints) -> list[Ints]:
        """The slots of each thread. Every thread gets about the same number of different texts, and slots with the same text go
        to the same thread."""
        storage_n = self.texts.storage_S[slots]
        parts = np.array_split(np.unique(storage_n), self.threads)
        return [slots[np.isin(storage_n, part)] for part in parts if len(part)]

    def _decode(self, slots: Ints, steps: int, counts_4: Ints) -> int:
        at, counts = c_void_p(slots.ctypes.data), c_void_p(counts_4.ctypes.data)
        return int(self.library.decode(ctypes.byref(self.model), at, c_int64(len(slots)), c_int64(steps), counts))

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
            storage=self.texts.storage_S.ctypes.data, text=self.texts.text_ST.ctypes.data,
            text_length=self.texts.length_S.ctypes.data, sources=SOURCES[self.draft], min_rows=MIN_ROWS,
            earlier=self.texts.earlier_NET.ctypes.data, earlier_length=self.texts.earlier_length_NE.ctypes.data, E=MAX_EARLIER,
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

    def __init__(self, policy: Policy, cache: KVCache, sampling: Sampling, round_tokens: int, draft: Draft = "auto") -> None:
        super().__init__(policy, cache, sampling, round_tokens)
        state = SlotState(self.token_S, self.prompt_length_S, self.suffix_length_S, self.uniform_ST)
        self.decoder = CDecoder(policy, cache, sampling, state, draft)
        self._texts: dict[int, Ints] = {}
        """By slot, a text that it continues: the prompt's last token and the text."""

    @property
    def counts(self) -> PassCounts:
        return self.decoder.counts

    def assign(self, slot: int, sequence: Sequence) -> None:
        super().assign(slot, sequence)
        self.decoder.texts.start(slot, sequence.request.prompt_ids)
        self.decoder.texts.set_earlier(slot, sequence.request.earlier)

    def resume(self, slot: int, sequence: Sequence, position: int, last_token: int, forced: abc.Sequence[int]) -> int:
        """Continue a completion that an earlier call has begun. The C decoder can't force tokens during a round, so it prefills
        all of ``forced`` before the next round."""
        assert position == 0, "environments are decoded by torch"
        self._texts[slot] = np.array([last_token, *forced], np.int64)
        self._updates[slot] = (forced[-1], len(sequence.request.prompt_ids) - 1, len(forced))
        return len(forced)

    def weights_changed(self) -> None:
        self.decoder.pack_weights()

    def _prefill_blocks(self, requests: abc.Mapping[int, tuple[int, SampleRequest]]) -> None:
        prompts = {group: request.prompt_ids for group, request in requests.values()}
        self.decoder.prefill([(block, group) for block, (group, _) in requests.items()], prompts)

    def decode(self, live: abc.Sequence[int], tokens: int) -> RoundResult:
        self._apply_updates()
        self.decoder.continue_texts(self._texts)
        self._texts = {}
        return HostRound(*self.decoder.decode(np.asarray(live, np.int64), tokens))
