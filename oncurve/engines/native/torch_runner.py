"""Prefill and decode by plain torch, through the model's own modules. It runs anywhere, and the C runner builds on it.

A prompt is prefilled once for a block of R slots, without its last token. That token is the first input of each sequence, so
the first sampled token comes from a decode step like all others. Shapes are fixed: decoding always has S slots of W rows,
whatever is queued, drafted or accepted, and prefill has the length of the prompt's bucket. So a completion's bits depend on
neither the queue nor the drafts.
"""

from __future__ import annotations

from collections import abc
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2CLS

from oncurve.engines.base import PassCounts, SampleRequest
from oncurve.engines.native.drafts import Drafter
from oncurve.engines.native.kv_cache import (
    PAGE,
    DecodeLayout,
    KVCache,
    PrefillLayout,
    PromptPartLayout,
    ReplyLayout,
    RoundedLayout,
    idle_blocks,
)
from oncurve.engines.native.scheduler import RoundResult, TopTokens
from oncurve.engines.native.sequence import Sequence
from oncurve.engines.token_sampling import SampledTokens, sample_tokens
from oncurve.errors import ModelError
from oncurve.models import experts, recurrent_layers
from oncurve.models.attention_interface import AttentionContext
from oncurve.models.experts import RoutingPass
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Draft, Sampling
from oncurve.records import Floats, Ints, Routing
from oncurve.rng import sampling_uniforms

BUCKET = 16
"""Prompts are prefilled at lengths rounded up to this."""
PREFILL_TOKENS = 1024
"""Prompts of one bucket are prefilled together up to about this many tokens."""
PROMPT_PART = 128
"""Tokens of a served prompt that are prefilled at once, between two decode steps."""
NOT_FORCED = -1
LONGEST_FORCED = 32
"""Replies of up to this many tokens are forced, one in each decode step. Longer ones are prefilled in one pass. The rule
depends on the reply alone, because the two round differently."""
ACTIVATIONS = {kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()}
"""The classes of transformers' activation functions, which are computed element by element."""
VECTORS, PART = 64, 1 << 14
"""A part of a tensor has a multiple of VECTORS elements (two vectors), and at most PART: torch does not divide so few."""


@dataclass(frozen=True, slots=True)
class HostRound:
    """A round's tokens [C, S] and log-probs [C, S, 3]; ``count_S``: how many of them each slot has, by default all. ``tops``:
    by slot and position, the likeliest tokens. If experts are recorded: those of the round, and those of replies that were
    prefilled before it."""

    token_CS: Ints
    logp_CS3: Floats
    count_S: Ints | None = None
    tops: abc.Mapping[tuple[int, int], TopTokens] = field(default_factory=dict)
    routing_CSE: Routing | None = None
    replies: abc.Sequence[tuple[int, int, Routing]] = ()

    def wait(self) -> None:
        """Everything is there."""

    def read(self, slots_n: Ints, start_n: Ints) -> tuple[Ints, Floats, Ints]:
        counts_n = np.full(len(slots_n), len(self.token_CS)) if self.count_S is None else self.count_S[slots_n]
        return self.token_CS[:, slots_n].T, self.logp_CS3[:, slots_n].transpose(1, 0, 2), counts_n

    def top(self, slot: int, position: int, most: int) -> TopTokens:
        return self.tops[slot, position][:most]

    def routing(self, slots_n: Ints, start_n: Ints) -> Routing | None:
        return None if self.routing_CSE is None else self.routing_CSE[:, slots_n].transpose(1, 0, 2)

    def reply_routing(self) -> abc.Sequence[tuple[int, int, Routing]]:
        return self.replies


def _in_whole_vectors(function: abc.Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """Applies an activation function on a CPU in parts. One thread computes a part, and a part's length is a multiple of the
    vector width.

    Otherwise torch would divide the tensor between threads at any place. It computes the elements at the end of a thread's part
    that do not fill a vector with another formula, which rounds differently, so a completion's bits would depend on its slot.
    """
    if value.numel() <= PART and value.numel() % VECTORS == 0:
        return function(value)
    padded = functional.pad(value.flatten(), (0, -value.numel() % VECTORS))
    return torch.cat([function(part) for part in torch.split(padded, PART)])[: value.numel()].view(value.shape)


class TorchRunner:
    """Decodes all slots with the same sampling settings."""

    rounds_ahead = 0
    can_constrain = False
    prefill_tokens = PREFILL_TOKENS
    longest_forced = LONGEST_FORCED

    def __init__(
        self,
        policy: Policy,
        cache: KVCache,
        sampling: Sampling,
        round_tokens: int,
        *,
        forces: bool = False,
        records_routing: bool = False,
        width: int = 1,
        draft: Draft = "off",
    ) -> None:
        """``forces``: whether environments reply, so that tokens may be forced. ``width``: rows of a slot, above 1 for drafts;
        the cache then has room for ``width`` − 1 more tokens."""
        self.records_routing = records_routing
        self.policy, self.cache, self.sampling, self.head, self.width = policy, cache, sampling, policy.head, width
        self.slots, self.max_new_tokens, self.context = cache.slots, sampling.max_new_tokens, policy.max_positions
        S, T, device = self.slots, self.max_new_tokens, policy.device
        self.sequence_in: list[Sequence | None] = [None] * S
        self.token_S = torch.zeros(S, dtype=torch.long, device=device)
        self.prompt_length_S = torch.zeros(S, dtype=torch.long, device=device)
        self.suffix_length_S = torch.zeros(S, dtype=torch.long, device=device)
        self.uniform_ST = torch.zeros(S, T, dtype=torch.float64, device=device)
        self.forced_ST = torch.full((S, T), NOT_FORCED, dtype=torch.long, device=device) if forces else None
        self.slot_R = torch.arange(S, device=device).repeat_interleave(width)
        self.offset_W = torch.arange(width, device=device)
        self.drafted_SW = torch.zeros(S, width - 1, dtype=torch.long, device=device)
        """The tokens of each slot's further rows."""
        self.drafter = Drafter(self.sequence_in, width, draft, policy.eos_ids) if width > 1 else None
        self.eos_ids = torch.tensor(policy.eos_ids, device=device)
        # A recurrent state can't be taken back: an environment must reply before anything is decoded after its call.
        self._keeps_states = forces and recurrent_layers.is_attached(policy.model)
        self._round_tokens = 1 if self._keeps_states else round_tokens
        modules = policy.backbone.modules() if device.type == "cpu" else ()
        activations = [module for module in modules if type(module) in ACTIVATIONS]
        self._activations = [(module, partial(_in_whole_vectors, module.forward)) for module in activations]
        """Modules that a pass of the sampler on a CPU computes in another way; none on a GPU."""
        self._live: abc.Sequence[int] = ()
        """The slots that the current round decodes, and a mask of them."""
        self._live_S = torch.zeros(S, dtype=torch.bool, device=device)
        self._new: dict[int, Sequence] = {}
        """By slot, sequences whose prompt is not prefilled yet."""
        self._replies: dict[int, tuple[int, list[int]]] = {}
        """By slot, inputs that the next round prefills, and where in the suffix they start."""
        self._updates: dict[int, tuple[int, int, int]] = {}
        """By slot, token, prompt length and suffix length to set before the next round."""
        self._routing_NE = torch.zeros(0, 0, dtype=torch.int16)
        """The experts of the last pass, if they are recorded."""
        self._prompt_routing: dict[int, Routing] = {}
        self._reply_routing: list[tuple[int, int, Routing]] = []

    @property
    def counts(self) -> PassCounts:
        return PassCounts() if self.drafter is None else self.drafter.counts

    # Slots.

    def free_slots(self, running: abc.Sequence[Sequence | None], waiting: abc.Sequence[Sequence]) -> abc.Iterator[int]:
        """The slots of blocks in which nothing runs. All slots of a block take sequences of one prompt."""
        R = self.cache.block_slots
        for first in range(0, self.cache.usable_slots, R):
            if not any(running[first : first + R]):
                for slot in range(first, first + R):
                    in_block = running[first]
                    if waiting and (in_block is None or waiting[0].group == in_block.group):
                        yield slot

    def can_admit(self, waiting: abc.Sequence[Sequence], *, idle: bool) -> bool:
        return True

    def assign(self, slot: int, sequence: Sequence) -> None:
        ids = sequence.request.prompt_ids
        self.sequence_in[slot] = self._new[slot] = sequence
        self._updates[slot] = (int(ids[-1]), len(ids) - 1, 0)
        if self.forced_ST is not None:
            self.forced_ST[slot] = NOT_FORCED
        if self.drafter is not None:
            self.drafter.start(slot, sequence)

    def park(self, slot: int) -> None:
        """Nothing to do. A parked slot still takes part in decode steps; what it stores is overwritten when it is resumed, and
        neither its position nor its recurrent states advance."""

    def resume(self, slot: int, sequence: Sequence, position: int, last_token: int, forced: abc.Sequence[int]) -> int:
        assert self.forced_ST is not None
        prefilled = prefilled_tokens(forced, self.longest_forced)
        if prefilled:
            self._replies[slot] = (position, [last_token, *forced[: prefilled - 1]])
            last_token = forced[prefilled - 1]
        ids = torch.tensor(forced[prefilled:], dtype=torch.long, device=self.forced_ST.device)
        self.forced_ST[slot, position + prefilled : position + len(forced)] = ids
        self._updates[slot] = (last_token, len(sequence.request.prompt_ids) - 1, position + prefilled)
        if self.drafter is not None:
            self.drafter.start(slot, sequence, position, forced[:prefilled])
        return prefilled

    def release(self, slot: int) -> None:
        """A free slot continues to decode at length 0."""
        self.sequence_in[slot] = None
        self._new.pop(slot, None)
        self._replies.pop(slot, None)
        self._updates[slot] = (0, 0, 0)

    def release_prompt(self, group: int) -> None:
        """Forgets the drafts of a group. The prompt itself stays in its block until the next one overwrites it."""
        if self.drafter is not None:
            self.drafter.forget(group)

    def prompt_routing(self, group: int) -> Routing | None:
        if not self.records_routing:
            return None
        return self._prompt_routing.pop(group, np.zeros((0, self._routing_NE.shape[1]), np.int16))

    def reserve(self, slot: int, tokens: int) -> bool:
        return True

    def no_room(self) -> ModelError:
        raise NotImplementedError("every slot has its memory")

    def round_tokens(self, live: int) -> int:
        return self._round_tokens

    def weights_changed(self) -> None:
        """Nothing to do: the modules read the policy's parameters."""

    def begin_to_close(self) -> None:
        """Nothing to do: the KV cache is freed with the runner."""

    def close(self) -> None:
        """Nothing to do: the KV cache is freed with the runner."""

    # Prefill.

    @property
    def prefilling(self) -> abc.Collection[int]:
        return self._new.keys()

    def prefill(self) -> None:
        if not self._new:
            return
        self._set_uniforms(self._new)
        blocks = {slot // self.cache.block_slots: sequence for slot, sequence in self._new.items()}
        self._prefill_blocks({block: (sequence.group, sequence.request) for block, sequence in blocks.items()})
        self._new = {}

    def _set_uniforms(self, new: abc.Mapping[int, Sequence]) -> None:
        """Sets the random numbers of new sequences, given by slot."""
        if not new:
            return
        number_nT = np.zeros((len(new), self.max_new_tokens))
        for i, sequence in enumerate(new.values()):
            request, count = sequence.request, sequence.request.sampling.max_new_tokens
            number_nT[i, :count] = sampling_uniforms(
                request.key.seed, request.key.step, request.prompt.id, sequence.sample, count
            )
        device = self.uniform_ST.device
        self.uniform_ST.index_copy_(0, torch.tensor(list(new), device=device), torch.from_numpy(number_nT).to(device))

    def _prefill_blocks(self, requests: abc.Mapping[int, tuple[int, SampleRequest]]) -> None:
        """Prefills prompts into their blocks, without their last tokens. ``requests`` maps a block to (group, request)."""
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
            self._hidden(torch.from_numpy(ids).to(device), positions.expand(size, -1), layout)
            if self.records_routing:
                routing = self._routing_NE.view(size, length, -1).cpu().numpy()
                self._prompt_routing |= {g: routing[i, : len(prompts[g]) - 1].copy() for i, g in enumerate(batch)}

    def _hidden(self, ids: Tensor, positions: Tensor, layout: AttentionContext) -> Tensor:
        """Hidden states of a forward pass. A token's bits do not depend on the other tokens of the batch."""
        with self._recorded_pass():
            return self.policy.hidden(ids, positions, RoundedLayout(layout) if self.cache.is_fp8 else layout)

    @contextmanager
    def _recorded_pass(self) -> abc.Iterator[None]:
        routing = RoutingPass(fixed_shapes=True, records=self.records_routing)
        for module, forward in self._activations:
            vars(module)["forward"] = forward
        try:
            with experts.routed(routing):
                yield
        finally:
            for module, _ in self._activations:
                del vars(module)["forward"]
        if self.records_routing:
            self._routing_NE = routing.chosen_NE

    # Decode.

    def decode(self, live: abc.Sequence[int], tokens: int) -> RoundResult:
        self._live, is_live = live, torch.zeros(self.slots, dtype=torch.bool)
        is_live[list(live)] = True
        self._live_S = is_live.to(self.policy.device)
        self._apply_updates()
        self._prefill_replies()
        if self.drafter is not None:
            return self._decode_drafted(self.drafter, tokens)
        steps, routing = [], []
        for _ in range(tokens):
            steps.append(self._decode_step())
            routing.append(self._routing_NE)
        token_CS = torch.stack([step.token_S for step in steps])
        logp_CS3 = torch.stack([torch.stack((step.logp_S, step.sampled_logp_S, step.raw_logp_S), -1) for step in steps])
        result = HostRound(token_CS.cpu().numpy(), logp_CS3.float().cpu().numpy())
        if self.records_routing:
            result = replace(result, routing_CSE=torch.stack(routing).cpu().numpy(), replies=self._reply_routing)
            self._reply_routing = []
        return result

    def _decode_drafted(self, drafter: Drafter, steps: int) -> RoundResult:
        """Steps of W rows for each slot. Rows that are not accepted have stored keys and values beyond the slot's text, which
        are overwritten before anything attends to them."""
        S, W = self.slots, self.width
        token_CS, logp_CS3 = np.zeros((steps * W, S), np.int64), np.zeros((steps * W, S, 3), np.float32)
        count_S = np.zeros(S, np.int64)
        forced_ST = None if self.forced_ST is None else self.forced_ST.numpy()
        for _ in range(steps):
            draft_SW = drafter.propose(self._live, forced_ST)
            self.drafted_SW = torch.from_numpy(draft_SW.clip(min=0))
            sampled = self._sample_rows()
            sampled_SW = sampled.token_S.view(S, W).numpy()
            logp_R3 = torch.stack((sampled.logp_S, sampled.sampled_logp_S, sampled.raw_logp_S), -1)
            logp_SW3 = logp_R3.view(S, W, 3).float().numpy()
            taken_S = drafter.accept(self._live, draft_SW, sampled_SW, forced_ST)
            for slot in np.flatnonzero(taken_S):
                taken, new = taken_S[slot], slice(count_S[slot], count_S[slot] + taken_S[slot])
                token_CS[new, slot], logp_CS3[new, slot] = sampled_SW[slot, :taken], logp_SW3[slot, :taken]
                self.token_S[slot] = int(sampled_SW[slot, taken - 1])
            count_S += taken_S
            self.suffix_length_S = (self.suffix_length_S + torch.from_numpy(taken_S)).clamp(max=self.max_new_tokens - 1)
        return HostRound(token_CS, logp_CS3, count_S)

    def _prefill_replies(self) -> None:
        device = self.policy.device
        for slot, (start, inputs) in self._replies.items():
            sequence = self.sequence_in[slot]
            assert sequence is not None
            prompt = len(sequence.request.prompt_ids) - 1
            layout = ReplyLayout(self.cache, slot, prompt, start, len(inputs))
            positions = torch.arange(prompt + start, prompt + start + len(inputs), device=device)
            self._hidden(torch.tensor([inputs], device=device), positions[None], layout)
            if self.records_routing:
                self._reply_routing.append((slot, start, self._routing_NE.cpu().numpy()))
        self._replies = {}

    def _apply_updates(self) -> None:
        """Writes the slots' new values in place, because the C decoder holds the tensors' addresses."""
        if not self._updates:
            return
        device = self.token_S.device
        slots, values = torch.tensor(list(self._updates)), torch.tensor(list(self._updates.values())).T
        for target, value in zip((self.token_S, self.prompt_length_S, self.suffix_length_S), values, strict=True):
            target.index_copy_(0, slots.to(device), value.to(device))
        self._updates = {}

    def _decode_step(self) -> SampledTokens:
        """One token for every slot. Free and parked slots decode too, but their tokens are not read. Their positions do not
        advance, because every slot reads as many pages as the longest one needs."""
        sampled = self._sample_rows()
        self.token_S = sampled.token_S
        self.suffix_length_S = (self.suffix_length_S + self._live_S).clamp(max=self.max_new_tokens - 1)
        return sampled

    def _sample_rows(self) -> SampledTokens:
        """A token for each of the W rows of every slot, [S · W], each with the uniform number of its position."""
        at_S = self.suffix_length_S
        at_R = (at_S[:, None] + self.offset_W).flatten()
        sampled = self._sample(self._next_logits(at_S), at_R)
        if self.forced_ST is not None:
            forced_R = self.forced_ST[self.slot_R, self._stored(at_R)]
            sampled = replace(sampled, token_S=torch.where(forced_R == NOT_FORCED, sampled.token_S, forced_R))
        return sampled

    def _stored(self, at_R: Tensor) -> Tensor:
        """Positions as indices of tensors that have one entry per new token. Rows beyond the last are never read."""
        return at_R.clamp(max=self.max_new_tokens - 1)

    def _next_logits(self, at_S: Tensor) -> Tensor:
        """The logits [S · W, V] after each slot's last token, stored at position ``at_S``, and after its drafted tokens."""
        at_SW = at_S[:, None] + self.offset_W
        prompt_pages = -(-int(self.prompt_length_S.max()) // PAGE)
        suffix_pages = int(at_SW.max()) // PAGE + 1
        live_S = self._live_S if self._keeps_states else None  # None: the states of all slots may advance, as none is parked
        layout = DecodeLayout(self.cache, self.prompt_length_S, at_SW, prompt_pages, suffix_pages, live_S)
        token_SW = torch.cat((self.token_S[:, None], self.drafted_SW), 1)
        position_SW = (self.prompt_length_S[:, None] + at_SW).clamp(max=self.context - 1)
        return self.head.logits(self._hidden(token_SW, position_SW, layout).flatten(0, 1))

    def _sample(self, logits_RV: Tensor, at_R: Tensor) -> SampledTokens:
        banned_RV = self._banned(logits_RV, at_R, self.sampling)
        return sample_tokens(logits_RV, self.uniform_ST[self.slot_R, self._stored(at_R)], self.sampling, banned_RV)

    def _banned(self, logits_RV: Tensor, at_R: Tensor, sampling: Sampling) -> Tensor | None:
        """A mask of the end tokens in rows that are shorter than the minimum length; None if there is no minimum."""
        if not sampling.min_new_tokens:
            return None
        banned_RV = torch.zeros(logits_RV.shape, dtype=torch.bool, device=logits_RV.device)
        banned_RV[:, self.eos_ids] = (at_R < sampling.min_new_tokens)[:, None]
        return banned_RV


def prefilled_tokens(forced: abc.Sequence[int], longest_forced: int) -> int:
    """How many tokens of a reply are prefilled: none of a short one, else all but the last, which a decode step forces."""
    return len(forced) - 1 if len(forced) > longest_forced else 0


class PerSlotTorchRunner(TorchRunner):
    """Decodes slots that each have their own sampling settings, one token per round: for sessions.

    Blocks have one slot each, as requests have few completions. A prompt is prefilled by itself, so that a short one does not
    pay for a batch. Slots with equal settings are sampled together, and slots with a constraint separately from
    those without, so that the others' bits stay the same.

    A prompt is prefilled in parts, about one in each round, so a long prompt delays the running slots only briefly. The parts
    depend on the request alone. A slot keeps its prompt until another one overwrites it, and a prompt that begins with the same
    parts copies them. Bits do not depend on what is stored: a part is always computed in the same shape.
    """

    prefill_tokens = 0
    can_constrain = True

    def __init__(self, policy: Policy, slots: int, max_new_tokens: int, *, width: int = 1) -> None:
        sampling = Sampling(max_new_tokens=max_new_tokens)
        cache = KVCache(slots, 1, max_new_tokens + width - 1, idle_blocks(slots, 1, width))
        super().__init__(policy, cache, sampling, round_tokens=1, width=width, draft="own")
        self._tops: dict[tuple[int, int], TopTokens] = {}
        self._counts = PassCounts()
        # Decoding advances a recurrent state and a cache of transformers: the prompt's own is gone.
        self._keeps_prompts = policy.general_reason is None and not recurrent_layers.is_attached(policy.model)
        self._prompts: dict[int, tuple[SampleRequest, int]] = {}
        """By slot, the request whose prompt it stores, and how many of its tokens, which is always the end of a part."""
        self._begun: set[int] = set()
        """Slots whose new prompt has been prefilled in part."""
        self._releases = count()
        self._released: dict[int, int] = {}
        """By slot, when it was last released."""

    @property
    def counts(self) -> PassCounts:
        return super().counts + self._counts

    def free_slots(self, running: abc.Sequence[Sequence | None], waiting: abc.Sequence[Sequence]) -> abc.Iterator[int]:
        """The slot whose prompt is continued, else one without a prompt, else the one that was released first."""
        free = [slot for slot in range(self.cache.usable_slots) if running[slot] is None]
        while free and waiting:
            ids = waiting[0].request.prompt_ids
            lengths = {slot: len(self._prompts[slot][0].prompt_ids) if slot in self._prompts else 0 for slot in free}
            continued = [s for s in free if s in self._prompts and _begins_with(ids, self._prompts[s][0].prompt_ids)]
            unused = [slot for slot in free if slot not in self._prompts]
            oldest = min(free, key=lambda slot: self._released.get(slot, -1))
            slot = max(continued, key=lambda slot: lengths[slot], default=unused[0] if unused else oldest)
            free.remove(slot)
            yield slot

    def assign(self, slot: int, sequence: Sequence) -> None:
        super().assign(slot, sequence)
        if self._keeps_prompts:
            self._updates[slot] = (0, 0, 0)  # until its prompt is complete

    def release(self, slot: int) -> None:
        self._begun.discard(slot)
        self._released[slot] = next(self._releases)
        super().release(slot)

    def prefill(self) -> None:
        """Prefills about PROMPT_PART tokens of the prompts that are not complete, in turn."""
        if not self._keeps_prompts:
            super().prefill()
            return
        self._set_uniforms({slot: sequence for slot, sequence in self._new.items() if slot not in self._begun})
        left = PROMPT_PART
        while left > 0:
            slot = next((slot for slot in self._new if not self._waits(slot)), None)
            if slot is None:
                break
            left -= self._prefill_next(slot)

    def _waits(self, slot: int) -> bool:
        """Whether another slot is prefilling the prompt of the same request. Once that is complete, it is copied."""
        group = self._new[slot].group
        return any(other != slot and other in self._begun and s.group == group for other, s in self._new.items())

    def _prefill_next(self, slot: int) -> int:
        """Prefills the next part of a slot's prompt and returns the number of its tokens."""
        sequence = self._new.pop(slot)
        request, ids = sequence.request, sequence.request.prompt_ids
        if slot not in self._begun:
            self._copy_shared(slot, request)
        start = self._prompts[slot][1]
        end = next((end for end in _part_ends(request) if end > start), start)
        stored = max(start - 1, 0)
        if end > start and not stored:
            self._prefill_blocks({slot: (0, replace(request, prompt_ids=ids[:end]))})
        elif end > start:
            positions = torch.arange(stored, end - 1, device=self.policy.device)
            layout = PromptPartLayout(self.cache, slot, stored, len(positions))
            inputs = torch.from_numpy(ids[stored : end - 1].copy()).to(self.policy.device)
            self._hidden(inputs[None], positions[None], layout)
        self._prompts[slot] = (request, end)
        if end == len(ids):
            self._begun.discard(slot)
            self._updates[slot] = (int(ids[-1]), len(ids) - 1, 0)
        else:
            self._new[slot] = sequence  # behind the others
        return end - start

    def _copy_shared(self, slot: int, request: SampleRequest) -> None:
        """Copies the parts of a slot's new prompt that another slot stores already, if there are any."""
        shared = {other: _shared_tokens(request, *prompt) for other, prompt in self._prompts.items()}
        source = max(shared, key=lambda other: (shared[other], other == slot), default=slot)
        tokens = shared.get(source, 0)
        if tokens and source != slot:
            self.cache.copy_prompt(source, slot)
        self._prompts[slot] = (request, tokens)
        self._begun.add(slot)
        kept = max(tokens - 1, 0)
        self._counts += PassCounts(prefilled=len(request.prompt_ids) - 1 - kept, kept=kept)

    def decode(self, live: abc.Sequence[int], tokens: int) -> RoundResult:
        result = super().decode(live, tokens)
        assert isinstance(result, HostRound)
        return replace(result, tops=self._tops)

    def _sample(self, logits_RV: Tensor, at_R: Tensor) -> SampledTokens:
        uniform_R = self.uniform_ST[self.slot_R, self._stored(at_R)]
        token_R = torch.zeros_like(self.slot_R)
        logp_3R = torch.zeros(3, len(token_R), device=logits_RV.device)
        for (sampling, is_constrained), slots in self._slots_by_sampling().items():
            rows_n = (torch.tensor(slots, device=logits_RV.device)[:, None] * self.width + self.offset_W).flatten()
            part_nV = logits_RV[rows_n]
            banned_nV = self._banned(part_nV, at_R[rows_n], sampling)
            if is_constrained:
                outside_nV = self._outside_grammar(slots, part_nV)
                banned_nV = outside_nV if banned_nV is None else banned_nV | outside_nV
            sampled = sample_tokens(part_nV, uniform_R[rows_n], sampling, banned_nV)
            token_R[rows_n] = sampled.token_S
            logp_3R[:, rows_n] = torch.stack((sampled.logp_S, sampled.sampled_logp_S, sampled.raw_logp_S)).to(logp_3R.dtype)
        self._tops = {
            (slot, int(at_R[row])): _top_tokens(logits_RV[row], sequence.request.top)
            for slot, sequence in self._live_sequences()
            if sequence.request.top
            for row in range(slot * self.width, (slot + 1) * self.width)
        }
        for slot, sequence in self._live_sequences():
            if sequence.constraint is not None:
                sequence.constraint.accept(int(token_R[slot * self.width]))
        return SampledTokens(token_R, *logp_3R)

    def _slots_by_sampling(self) -> dict[tuple[Sampling, bool], list[int]]:
        """Slots with the same settings, with or without a constraint."""
        slots: dict[tuple[Sampling, bool], list[int]] = {}
        for slot, sequence in self._live_sequences():
            slots.setdefault((sequence.request.sampling, sequence.constraint is not None), []).append(slot)
        return slots

    def _live_sequences(self) -> list[tuple[int, Sequence]]:
        return [(slot, s) for slot, s in enumerate(self.sequence_in) if s is not None and slot in self._live]

    def _outside_grammar(self, slots: abc.Sequence[int], logits_nV: Tensor) -> Tensor:
        """The tokens that these slots' constraints do not allow now. Only a slot's first row is read: nothing is drafted."""
        banned_nV = torch.zeros(logits_nV.shape, dtype=torch.bool)
        for i, slot in enumerate(slots):
            sequence = self.sequence_in[slot]
            assert sequence is not None
            assert sequence.constraint is not None
            banned_nV[i * self.width] = torch.from_numpy(~sequence.constraint.allowed())
        return banned_nV.to(logits_nV.device)


def _part_ends(request: SampleRequest) -> tuple[int, ...]:
    """The end of each part of a served prompt that is prefilled in parts: as the request says, or every PROMPT_PART tokens."""
    length = len(request.prompt_ids)
    parts = tuple(range(PROMPT_PART, length, PROMPT_PART)) if request.parts is None else request.parts
    return (*parts, length)


def _shared_tokens(request: SampleRequest, other: SampleRequest, stored: int) -> int:
    """How many tokens at the start of a prompt are in parts that another prompt, with ``stored`` cached tokens, has too."""
    shared = 0
    for end, other_end in zip(_part_ends(request), _part_ends(other), strict=False):
        is_same = np.array_equal(request.prompt_ids[shared:end], other.prompt_ids[shared:end])
        if end != other_end or end > stored or not is_same:
            break
        shared = end
    return shared


def _begins_with(ids: Ints, others: Ints) -> bool:
    return np.array_equal(ids[: len(others)], others)


def _top_tokens(logits_V: Tensor, most: int) -> TopTokens:
    best = logits_V.log_softmax(-1).topk(min(most, len(logits_V)))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
