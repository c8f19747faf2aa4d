"""The native engine for requests that come and go: token by token, each with settings of its own, and any can be taken back.

On a GPU that has Triton captured graphs decode (cuda_serving.py), elsewhere plain torch, as here: the same slots, pool and
prefill as in training (native.py), with three differences. Slots are not shared in blocks, as requests have few completions
each. A prompt is prefilled by itself, so that a short one does not pay for a batch. A token is drawn for each set of slots with
the same settings. Decoding still runs at one fixed shape, so that with the same seed a completion is the same whatever else is
queued.

Legend: ``S`` slots, ``V`` vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from oncurve import kernels
from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import BlockRequest, Row, Scheduler
from oncurve.engines.native.kv_cache import KVCache
from oncurve.engines.token_sampling import SampledTokens, sample_tokens
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Ints, Prompt, StopReason

NAME = "serve"
"""Stands for the prompt's name in the random numbers: they hang on the seed and the completion's place alone."""
TOP = 20
"""Most likeliest tokens that can be told at each place."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A prompt, how many completions of it are wanted, and how they are drawn. ``top``: likeliest tokens told at each place."""

    prompt_ids: Ints
    samples: int
    how: Sampling
    seed: int
    top: int = 0


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One drawn token of a request's completion, with its log-prob at temperature 1; ``stop`` is set on the last."""

    request: int
    sample: int
    token_id: int
    logp: float
    top: tuple[tuple[int, float], ...]
    stop: StopReason | None


class Session(Protocol):
    """Slots that are kept open, one request after the other.

    ``limit`` is the longest completion that a request may ask for, ``context`` the most tokens that prompt and completion may
    have together, ``asks`` the requests that have not ended, ``waiting`` the completions that have no slot yet, and ``row_in``
    has None for every slot that is free.
    """

    limit: int
    context: int
    asks: dict[int, SampleRequest]

    @property
    def row_in(self) -> Sequence[object | None]: ...

    @property
    def waiting(self) -> Sized: ...

    def submit(self, ask: SampleRequest) -> int:
        """Queues a request and returns its number. Its completions are decoded as slots become free."""

    def cancel(self, number: int) -> None:
        """Takes a request back, waiting or running; one that has ended is not known any more, and that is no error."""

    def step(self) -> list[SampledToken]:
        """Decodes on, and returns tokens in the order in which they were drawn; none may mean that some are on their way."""

    def close(self) -> None:
        """Gives back what the session holds."""


def open_session(policy: Policy, slots: int, limit: int) -> Session:
    """By captured graphs where there is a GPU with Triton and the model allows it, else by torch."""
    if kernels.can_run_kernels(policy.device):
        from oncurve.engines.cuda.session import CudaSession  # Triton is there only where a GPU is

        session = CudaSession.over(policy, slots, limit)
        if session is not None:
            session.warm()
            return session
    return TorchSession(policy, slots, limit)


class TorchSession(Scheduler):
    """A session that plain torch decodes."""

    prefill_tokens = 0
    row_in: list[Row | None]

    def __init__(self, policy: Policy, slots: int, limit: int) -> None:
        super().__init__(policy, Sampling(max_new_tokens=limit), KVCache(slots, 1, limit), SampleKey(0, 0), [], [], 1)
        self.limit, self.context = limit, policy.max_positions
        self.asks: dict[int, SampleRequest] = {}
        self._numbers = count()
        self._tops: dict[int, tuple[tuple[int, float], ...]] = {}

    def close(self) -> None:
        """Nothing is held that does not go with the session."""

    def submit(self, ask: SampleRequest) -> int:
        number = next(self._numbers)
        self.asks[number] = ask
        self.prompts[number], self.prompt_ids[number] = Prompt(NAME, text=""), ask.prompt_ids
        self.rows[number] = [Row(number, sample) for sample in range(ask.samples)]
        self.waiting.extend(BlockRequest(number, range(sample, sample + 1)) for sample in range(ask.samples))
        return number

    def cancel(self, number: int) -> None:
        if number not in self.asks:
            return
        self.waiting = deque(job for job in self.waiting if job.group != number)
        for slot, job in enumerate(self.running):
            if job is not None and job.group == number:
                self.running[slot] = self.row_in[slot] = None
        self._forget(number)

    @torch.inference_mode()
    def step(self) -> list[SampledToken]:
        """Seats what waits and decodes one token for every completion that has a slot."""
        self._admit()
        seated = [(slot, row) for slot, row in enumerate(self.row_in) if row is not None]
        if not seated:
            return []
        self._tops = {}
        self._append_tokens([self._decode()])
        self._clear_idle()
        told = [self._token(slot, row) for slot, row in seated]
        for number in {token.request for token in told if token.stop is not None}:
            if all(row.stop is not None for row in self.rows[number]):
                self._forget(number)
        return told

    def how_of(self, group: int) -> Sampling:
        return self.asks[group].how

    def draws_of(self, group: int) -> SampleKey:
        return SampleKey(self.asks[group].seed, 0)

    def _draw(self, logits_SV: Tensor, at_S: Tensor) -> SampledTokens:
        uniform_S = self.uniform_ST[self.slot_S, at_S]
        token_S = torch.zeros_like(self.token_S)
        logp_S = torch.zeros(self.pool.slots, device=logits_SV.device)
        for how, slots in self._by_settings():
            own_SV = logits_SV[slots]
            part = sample_tokens(own_SV, uniform_S[slots], how, self._barred(own_SV, at_S[slots], how))
            token_S[slots], logp_S[slots] = part.token_S, part.raw_logp_S.to(logp_S.dtype)
        for slot, row in enumerate(self.row_in):
            if row is not None and (top := self.asks[row.group].top):
                best = logits_SV[slot].log_softmax(-1).topk(min(top, logits_SV.shape[1]))
                self._tops[slot] = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return SampledTokens(token_S, logp_S, logp_S, logp_S)

    def _by_settings(self) -> Iterator[tuple[Sampling, Tensor]]:
        found: dict[tuple[float, ...], tuple[Sampling, list[int]]] = {}
        for slot, row in enumerate(self.row_in):
            if row is not None:
                how = self.how_of(row.group)
                settings = (how.temperature, how.top_p, how.top_k, how.min_p, how.min_new_tokens)
                found.setdefault(settings, (how, []))[1].append(slot)
        for how, slots in found.values():
            yield how, torch.tensor(slots, device=self.token_S.device)

    def _clear_idle(self) -> None:
        """Free slots go on decoding; at length 0 they reach the fewest pages."""
        idle_S = torch.tensor([row is None for row in self.row_in], device=self.token_S.device)
        self.prompt_length_S.masked_fill_(idle_S, 0)
        self.suffix_length_S.masked_fill_(idle_S, 0)

    def _token(self, slot: int, row: Row) -> SampledToken:
        return SampledToken(row.group, row.sample, row.token_ids[-1], row.logps[-1][2], self._tops.get(slot, ()), row.stop)

    def _forget(self, number: int) -> None:
        del self.asks[number], self.prompts[number], self.prompt_ids[number], self.rows[number]
