"""Prefill and decode on the general path: one transformers cache per block of slots (see `oncurve.models.general_path`)."""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor

from oncurve.engines.base import SampleRequest
from oncurve.engines.native.kv_cache import KVCache
from oncurve.engines.native.torch_runner import PerSlotTorchRunner, TorchRunner
from oncurve.models.general_path import GeneralCache, forward_cached
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling


class GeneralRunner(TorchRunner):
    """Decodes each block of R slots as one batch of rows at the same position.

    A cache can't be rewound, so environments get rounds of one token: a turn's end is noticed before the next token is fed.
    """

    def __init__(self, policy: Policy, cache: KVCache, sampling: Sampling, round_tokens: int, *, forces: bool = False) -> None:
        super().__init__(policy, cache, sampling, 1 if forces else round_tokens, forces=forces)
        self._caches: dict[int, GeneralCache] = {}

    def _prefill_blocks(self, requests: abc.Mapping[int, tuple[int, SampleRequest]]) -> None:
        self._caches |= prefill(self.policy, requests, self.cache.block_slots)

    def _next_logits(self, at_S: Tensor) -> Tensor:
        return decode(self, self._caches)


class PerSlotGeneralRunner(PerSlotTorchRunner):
    """The general path for sessions: blocks of one slot, each with its own sampling settings."""

    def __init__(self, policy: Policy, slots: int, max_new_tokens: int) -> None:
        super().__init__(policy, slots, max_new_tokens)
        self._caches: dict[int, GeneralCache] = {}

    def _prefill_blocks(self, requests: abc.Mapping[int, tuple[int, SampleRequest]]) -> None:
        self._caches |= prefill(self.policy, requests, self.cache.block_slots)

    def _next_logits(self, at_S: Tensor) -> Tensor:
        return decode(self, self._caches)


def prefill(policy: Policy, requests: abc.Mapping[int, tuple[int, SampleRequest]], block_slots: int) -> dict[int, GeneralCache]:
    """By block, the cache of its request's prompt, all but the last token, repeated for the block's slots."""
    prompts: dict[int, GeneralCache] = {}
    caches = {}
    for block, (group, request) in requests.items():
        if group not in prompts:
            ids = torch.from_numpy(request.prompt_ids[:-1]).to(policy.device)[None]
            prompts[group] = forward_cached(policy.model, ids, GeneralCache())[1] if ids.shape[1] else GeneralCache()
        caches[block] = prompts[group].repeat(block_slots)
    return caches


def decode(runner: TorchRunner, caches: dict[int, GeneralCache]) -> Tensor:
    """One token of every block in which a sequence runs; their logits [S, V], 0 in the other slots."""
    R = runner.cache.block_slots
    logits_SV = torch.zeros(runner.slots, len(runner.head.weight_VD), device=runner.policy.device)
    for block, cache in caches.items():
        slots = slice(block * R, (block + 1) * R)
        if any(runner.sequence_in[slots]):
            logits_SV[slots], caches[block] = forward_cached(runner.policy.model, runner.token_S[slots, None], cache)
    return logits_SV
