"""Prefill and decode by plain torch, through the model's own modules. It runs anywhere, and the C runner builds on it.

A prompt is prefilled once for a block of R slots, all but its last token; that token is each sequence's first input, so that
the first sampled token comes from a decode step like all others. Decoding runs at fixed shapes, S slots whatever is queued, and
prefill at the shape of the prompt's length bucket: a completion's bits depend on nothing else.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from oncurve.engines.base import SampleRequest
from oncurve.engines.native.kv_cache import PAGE, DecodeLayout, KVCache, PrefillLayout, ReplyLayout
from oncurve.engines.native.scheduler import RoundResult, TopTokens
from oncurve.engines.native.sequence import Sequence
from oncurve.engines.token_sampling import SampledTokens, sample_tokens
from oncurve.errors import ModelError
from oncurve.models import recurrent_layers
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Floats, Ints
from oncurve.rng import sampling_uniforms

BUCKET = 16
"""Prompts are prefilled at lengths rounded up to this."""
PREFILL_TOKENS = 1024
"""Prompts of one bucket are prefilled together up to about this many tokens."""
NOT_FORCED = -1
LONGEST_FORCED = 32
"""Replies of up to this many tokens are forced, one in each decode step. Longer ones are prefilled in one pass. The rule
depends on the reply alone, because the two round differently."""


@dataclass(frozen=True, slots=True)
class HostRound:
    """A round's tokens [C, S] and log-probs [C, S, 3]; ``tops``: by slot, the likeliest tokens of a round of one token."""

    token_CS: Ints
    logp_CS3: Floats
    tops: abc.Mapping[int, TopTokens] = field(default_factory=dict)

    def wait(self) -> None:
        """Everything is there."""

    def read(self, slots_n: Ints, position_nC: Ints) -> tuple[Ints, Floats]:
        return self.token_CS[:, slots_n].T, self.logp_CS3[:, slots_n].transpose(1, 0, 2)

    def top(self, slot: int, position: int, most: int) -> TopTokens:
        return self.tops[slot][:most]


class TorchRunner:
    """Decodes all slots with the same sampling settings."""

    rounds_ahead = 0
    prefill_tokens = PREFILL_TOKENS
    longest_forced = LONGEST_FORCED

    def __init__(self, policy: Policy, cache: KVCache, sampling: Sampling, round_tokens: int, *, forces: bool = False) -> None:
        """``forces``: whether environments reply, so that tokens may be forced."""
        self.policy, self.cache, self.sampling, self.head = policy, cache, sampling, policy.head
        self.slots, self.max_new_tokens, self.context = cache.slots, sampling.max_new_tokens, policy.max_positions
        S, T, device = self.slots, self.max_new_tokens, policy.device
        self.sequence_in: list[Sequence | None] = [None] * S
        self.token_S = torch.zeros(S, dtype=torch.long, device=device)
        self.prompt_length_S = torch.zeros(S, dtype=torch.long, device=device)
        self.suffix_length_S = torch.zeros(S, dtype=torch.long, device=device)
        self.uniform_ST = torch.zeros(S, T, dtype=torch.float64, device=device)
        self.forced_ST = torch.full((S, T), NOT_FORCED, dtype=torch.long, device=device) if forces else None
        self.slot_S = torch.arange(S, device=device)
        self.eos_ids = torch.tensor(policy.eos_ids, device=device)
        # A recurrent state can't be taken back: an environment must reply before anything is decoded after its call.
        self._round_tokens = 1 if forces and recurrent_layers.is_attached(policy.model) else round_tokens
        self._new: dict[int, Sequence] = {}
        """By slot, sequences whose prompt is not prefilled yet."""
        self._replies: dict[int, tuple[int, list[int]]] = {}
        """By slot, inputs that the next round prefills, and where in the suffix they start."""
        self._updates: dict[int, tuple[int, int, int]] = {}
        """By slot, token, prompt length and suffix length to set before the next round."""

    # Slots.

    def free_slots(self, running: abc.Sequence[Sequence | None]) -> list[int]:
        """The slots of blocks in which nothing runs."""
        R = self.cache.block_slots
        return [
            slot for first in range(0, self.slots, R) if not any(running[first : first + R]) for slot in range(first, first + R)
        ]

    def can_admit(self, waiting: abc.Sequence[Sequence], *, idle: bool) -> bool:
        return True

    def assign(self, slot: int, sequence: Sequence) -> None:
        ids = sequence.request.prompt_ids
        self.sequence_in[slot] = self._new[slot] = sequence
        self._updates[slot] = (int(ids[-1]), len(ids) - 1, 0)
        if self.forced_ST is not None:
            self.forced_ST[slot] = NOT_FORCED

    def resume(self, slot: int, sequence: Sequence, position: int, last_token: int, forced: abc.Sequence[int]) -> int:
        assert self.forced_ST is not None
        prefilled = prefilled_tokens(forced, self.longest_forced)
        if prefilled:
            self._replies[slot] = (position, [last_token, *forced[: prefilled - 1]])
            last_token = forced[prefilled - 1]
        ids = torch.tensor(forced[prefilled:], dtype=torch.long, device=self.forced_ST.device)
        self.forced_ST[slot, position + prefilled : position + len(forced)] = ids
        self._updates[slot] = (last_token, len(sequence.request.prompt_ids) - 1, position + prefilled)
        return prefilled

    def release(self, slot: int) -> None:
        """A free slot continues to decode; at length 0 it reads the fewest pages."""
        self.sequence_in[slot] = None
        self._new.pop(slot, None)
        self._replies.pop(slot, None)
        self._updates[slot] = (0, 0, 0)

    def release_prompt(self, group: int) -> None:
        """A block's prompt is overwritten by the next."""

    def reserve(self, slot: int, tokens: int) -> bool:
        return True

    def no_room(self) -> ModelError:
        raise NotImplementedError("every slot has its memory")

    def round_tokens(self, live: int) -> int:
        return self._round_tokens

    def weights_changed(self) -> None:
        """The modules read the policy's parameters."""

    def begin_to_close(self) -> None:
        """The cache goes with the runner."""

    def close(self) -> None:
        """The cache goes with the runner."""

    # Prefill.

    def prefill(self) -> None:
        if not self._new:
            return
        number_nT = np.zeros((len(self._new), self.max_new_tokens))
        for i, sequence in enumerate(self._new.values()):
            request, count = sequence.request, sequence.request.sampling.max_new_tokens
            number_nT[i, :count] = sampling_uniforms(
                request.key.seed, request.key.step, request.prompt.id, sequence.sample, count
            )
        device = self.uniform_ST.device
        self.uniform_ST.index_copy_(0, torch.tensor(list(self._new), device=device), torch.from_numpy(number_nT).to(device))
        blocks = {slot // self.cache.block_slots: sequence for slot, sequence in self._new.items()}
        self._prefill_blocks({block: (sequence.group, sequence.request) for block, sequence in blocks.items()})
        self._new = {}

    def _prefill_blocks(self, requests: abc.Mapping[int, tuple[int, SampleRequest]]) -> None:
        """Prompts, all but their last tokens, into their blocks: by block, the number of a request and the request."""
        prompts = {group: request.prompt_ids for group, request in requests.values()}
        buckets: dict[int, list[tuple[int, int]]] = {}
        for block, (group, _) in requests.items():
            buckets.setdefault(-(-(len(prompts[group]) - 1) // BUCKET) * BUCKET, []).append((block, group))
        for length, blocks in buckets.items():
            if length:
                self._prefill_bucket(length, blocks, prompts)
            else:
                self.cache.clear_states([block for block, _ in blocks])

    def _prefill_bucket(self, length: int, blocks: list[tuple[int, int]], prompts: abc.Mapping[int, Ints]) -> None:
        """Prompts of one bucket in batches of one shape: which prompts share a batch changes no bit."""
        size = max(1, self.prefill_tokens // length)
        groups = list(dict.fromkeys(group for _, group in blocks))
        device = self.policy.device
        positions = torch.arange(length, device=device)
        for start in range(0, len(groups), size):
            batch = groups[start : start + size]
            ids = np.zeros((size, length), np.int64)
            for i, group in enumerate(batch):
                ids[i, : len(prompts[group]) - 1] = prompts[group][:-1]
            pairs = [(batch.index(group), block) for block, group in blocks if group in batch]
            sources, targets = (torch.tensor(x, device=device) for x in zip(*pairs, strict=True))
            layout = PrefillLayout(self.cache, sources, targets, positions, [len(prompts[group]) - 1 for group in batch])
            self.policy.hidden(torch.from_numpy(ids).to(device), positions.expand(size, -1), layout)

    # Decode.

    def decode(self, live: abc.Sequence[int], tokens: int) -> RoundResult:
        self._apply_updates()
        self._prefill_replies()
        steps = [self._decode_step() for _ in range(tokens)]
        token_CS = torch.stack([step.token_S for step in steps])
        logp_CS3 = torch.stack([torch.stack((step.logp_S, step.sampled_logp_S, step.raw_logp_S), -1) for step in steps])
        return HostRound(token_CS.cpu().numpy(), logp_CS3.float().cpu().numpy())

    def _prefill_replies(self) -> None:
        device = self.policy.device
        for slot, (start, inputs) in self._replies.items():
            sequence = self.sequence_in[slot]
            assert sequence is not None
            prompt = len(sequence.request.prompt_ids) - 1
            layout = ReplyLayout(self.cache, slot, prompt, start, len(inputs))
            positions = torch.arange(prompt + start, prompt + start + len(inputs), device=device)
            self.policy.hidden(torch.tensor([inputs], device=device), positions[None], layout)
        self._replies = {}

    def _apply_updates(self) -> None:
        """In place: the C decoder holds the tensors' addresses."""
        if not self._updates:
            return
        device = self.token_S.device
        slots, values = torch.tensor(list(self._updates)), torch.tensor(list(self._updates.values())).T
        for target, value in zip((self.token_S, self.prompt_length_S, self.suffix_length_S), values, strict=True):
            target.index_copy_(0, slots.to(device), value.to(device))
        self._updates = {}

    def _decode_step(self) -> SampledTokens:
        """One token for every slot; free slots decode too, and are not read."""
        at_S = self.suffix_length_S
        sampled = self._sample(self._next_logits(at_S), at_S)
        if self.forced_ST is not None:
            forced_S = self.forced_ST[self.slot_S, at_S]
            sampled = replace(sampled, token_S=torch.where(forced_S == NOT_FORCED, sampled.token_S, forced_S))
        self.token_S = sampled.token_S
        self.suffix_length_S = (at_S + 1).clamp(max=self.max_new_tokens - 1)
        return sampled

    def _next_logits(self, at_S: Tensor) -> Tensor:
        """The logits that follow each slot's last token, [S, V]; the token is stored at ``at_S``."""
        prompt_pages = -(-int(self.prompt_length_S.max()) // PAGE)
        suffix_pages = int(at_S.max()) // PAGE + 1
        layout = DecodeLayout(self.cache, self.prompt_length_S, at_S, prompt_pages, suffix_pages)
        hidden = self.policy.hidden(self.token_S[:, None], (self.prompt_length_S + at_S)[:, None], layout)[:, 0]
        return self.head.logits(hidden)

    def _sample(self, logits_SV: Tensor, at_S: Tensor) -> SampledTokens:
        banned_SV = self._banned(logits_SV, at_S, self.sampling)
        return sample_tokens(logits_SV, self.uniform_ST[self.slot_S, at_S], self.sampling, banned_SV)

    def _banned(self, logits_SV: Tensor, at_S: Tensor, sampling: Sampling) -> Tensor | None:
        """End tokens, before the minimum length."""
        if not sampling.min_new_tokens:
            return None
        banned_SV = torch.zeros(logits_SV.shape, dtype=torch.bool, device=logits_SV.device)
        banned_SV[:, self.eos_ids] = (at_S < sampling.min_new_tokens)[:, None]
        return banned_SV


def prefilled_tokens(forced: abc.Sequence[int], longest_forced: int) -> int:
    """How many tokens of a reply are prefilled: none of a short one, else all but the last, which a decode step forces."""
    return len(forced) - 1 if len(forced) > longest_forced else 0


class PerSlotTorchRunner(TorchRunner):
    """Decodes slots with sampling settings of their own, one token a round; for sessions.

    Blocks have one slot each, as requests have few completions. A prompt is prefilled by itself, so that a short one does not
    pay for a batch. Tokens are sampled for each set of slots with equal settings.
    """

    prefill_tokens = 0

    def __init__(self, policy: Policy, slots: int, max_new_tokens: int) -> None:
        sampling = Sampling(max_new_tokens=max_new_tokens)
        super().__init__(policy, KVCache(slots, 1, max_new_tokens), sampling, round_tokens=1)
        self._tops: dict[int, TopTokens] = {}

    def decode(self, live: abc.Sequence[int], tokens: int) -> RoundResult:
        result = super().decode(live, tokens)
        assert isinstance(result, HostRound)
        return replace(result, tops=self._tops)

    def _sample(self, logits_SV: Tensor, at_S: Tensor) -> SampledTokens:
        uniform_S = self.uniform_ST[self.slot_S, at_S]
        token_S = torch.zeros_like(self.token_S)
        logp_S = torch.zeros(self.slots, device=logits_SV.device)
        for sampling, slots in self._slots_by_sampling().items():
            at = torch.tensor(slots, device=logits_SV.device)
            part_SV = logits_SV[at]
            sampled = sample_tokens(part_SV, uniform_S[at], sampling, self._banned(part_SV, at_S[at], sampling))
            token_S[at], logp_S[at] = sampled.token_S, sampled.raw_logp_S.to(logp_S.dtype)
        self._tops = {
            slot: _top_tokens(logits_SV[slot], sequence.request.top)
            for slot, sequence in enumerate(self.sequence_in)
            if sequence is not None and sequence.request.top
        }
        return SampledTokens(token_S, logp_S, logp_S, logp_S)

    def _slots_by_sampling(self) -> dict[Sampling, list[int]]:
        slots: dict[Sampling, list[int]] = {}
        for slot, sequence in enumerate(self.sequence_in):
            if sequence is not None:
                slots.setdefault(sequence.request.sampling, []).append(slot)
        return slots


def _top_tokens(logits_V: Tensor, most: int) -> TopTokens:
    best = logits_V.log_softmax(-1).topk(min(most, len(logits_V)))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
