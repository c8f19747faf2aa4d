"""Prefill and decode on the general path: one transformers cache per block of slots (see `oncurve.models.general_path`)."""

from __future__ import annotations

import sys
from collections import abc
from functools import cached_property

import torch
from torch import Tensor

from oncurve.engines.base import SampleRequest
from oncurve.engines.native.kv_cache import KVCache
from oncurve.engines.native.torch_runner import PerSlotTorchRunner, TorchRunner
from oncurve.models.general_path import GeneralCache, extend
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling


class _GeneralDecoding(TorchRunner):
    """Decodes each block of R slots as one batch of rows at the same position, so no slot can prefill a reply by itself."""

    longest_forced = sys.maxsize

    @cached_property
    def _caches(self) -> dict[int, GeneralCache]:
        """By block."""
        return {}

    def _prefill_blocks(self, requests: abc.Mapping[int, tuple[int, SampleRequest]]) -> None:
        """Compute a prompt once, all but its last token, and repeat its cache for the slots of each of its blocks."""
        prompts: dict[int, GeneralCache] = {}
        for block, (group, request) in requests.items():
            if group not in prompts:
                ids = torch.from_numpy(request.prompt_ids[:-1]).to(self.policy.device)[None]
                empty = GeneralCache.empty(self.policy.device)
                prompts[group] = self._extend(empty, ids)[1] if ids.shape[1] else empty
                if self.records_routing and ids.shape[1]:
                    self._prompt_routing[group] = self._routing_NE.cpu().numpy()
            self._caches[block] = prompts[group].repeat(self.cache.block_slots)

    def _extend(self, cache: GeneralCache, ids_RT: Tensor) -> tuple[Tensor, GeneralCache]:
        with self._recorded_pass():
            return extend(self.policy.backbone, cache, ids_RT, self.policy.check.decoding)

    def _next_logits(self, at_S: Tensor) -> Tensor:
        """The logits of all slots in blocks with a live slot; 0 elsewhere. A slot that can be parked has its own block."""
        R = self.cache.block_slots
        logits_SV = torch.zeros(self.slots, len(self.head.weight_VD), device=self.policy.device)
        routing: dict[int, Tensor] = {}
        for block, cache in self._caches.items():
            slots = slice(block * R, (block + 1) * R)
            if any(slots.start <= slot < slots.stop for slot in self._live):
                hidden_RD, self._caches[block] = self._extend(cache, self.token_S[slots, None])
                logits_SV[slots] = self.head.logits(hidden_RD)
                routing[block] = (
                    self._routing_NE.view(R, -1, self._routing_NE.shape[1])[:, -1] if self.records_routing else self._routing_NE
                )
        if self.records_routing:
            empty = torch.zeros_like(next(iter(routing.values())))
            self._routing_NE = torch.cat([routing.get(block, empty) for block in range(self.cache.blocks)])
        return logits_SV


class GeneralRunner(_GeneralDecoding):
    """All slots with the same sampling settings.

    A cache can't be rewound, so environments get rounds of one token: a turn's end is noticed before the next token is fed.
    """

    def __init__(
        self,
        policy: Policy,
        cache: KVCache,
        sampling: Sampling,
        round_tokens: int,
        *,
        forces: bool = False,
        records_routing: bool = False,
    ) -> None:
        tokens = 1 if forces else round_tokens
        super().__init__(policy, cache, sampling, tokens, forces=forces, records_routing=records_routing)


class PerSlotGeneralRunner(_GeneralDecoding, PerSlotTorchRunner):
    """For sessions: blocks of one slot, each with its own sampling settings."""
