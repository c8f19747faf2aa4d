"""Sessions: slots that stay open while requests come and go. Tokens are streamed, settings differ by request, any can be
cancelled.

`oncurve serve` drives one. With the same seed a completion is the same whatever else is queued: decoding always runs over all
slots at one fixed shape.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from oncurve import kernels
from oncurve.engines.base import SampleKey, SampleRequest
from oncurve.engines.native.general_runner import PerSlotGeneralRunner
from oncurve.engines.native.scheduler import RoundResult, Scheduler, TopTokens
from oncurve.engines.native.sequence import Sequence
from oncurve.engines.native.torch_runner import PerSlotTorchRunner
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Ints, Prompt, StopReason

SERVED = Prompt("serve", text="")
"""Stands for the prompt of every served request: its random numbers depend on the seed and the sample's index alone."""
TOP = 20
"""At most this many of the likeliest tokens can be reported at each position."""


def served_request(prompt_ids: Ints, samples: int, sampling: Sampling, seed: int, top: int = 0) -> SampleRequest:
    """A request by its tokens, as the endpoint makes them."""
    return SampleRequest(SERVED, prompt_ids, samples, sampling, SampleKey(seed, 0), top)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of a request's completion, with its log-prob at temperature 1; ``stop`` is set on the last token."""

    request: int
    sample: int
    token_id: int
    logp: float
    top: TopTokens
    stop: StopReason | None


class Session(Scheduler):
    """A scheduler that hands tokens out as they are sampled and forgets a request once it is complete."""

    @property
    def max_new_tokens(self) -> int:
        """The longest completion that a request may ask for."""
        return self.runner.max_new_tokens

    @property
    def context(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        return self.runner.context

    @torch.inference_mode()
    def step(self) -> list[SampledToken]:
        """Admit what waits, launch a round and return the tokens of the oldest. An empty list may mean that some are in
        flight."""
        self._sampled: list[SampledToken] = []
        self._admit()
        self._advance()
        return self._sampled

    def cancel(self, number: int) -> None:
        """End a request, waiting or running. A request that is complete, or was cancelled before, is ignored."""
        if number not in self.requests:
            return
        self.waiting = deque(sequence for sequence in self.waiting if sequence.group != number)
        for slot, sequence in enumerate(self.running):
            if sequence is not None and sequence.group == number:
                self._release_slot(slot)
        self._end_group(number)

    def warm_up(self) -> None:
        """Compile, capture and prefill once, so that the first request does not wait for it."""
        self.submit(served_request(torch.zeros(2, dtype=torch.long).numpy(), 1, Sampling(max_new_tokens=2), seed=0))
        while self.requests:
            self.step()

    def close(self) -> None:
        """Release the KV cache."""
        self.runner.close()

    def _stream(
        self, slot: int, sequence: Sequence, start: int, end: int, stop: StopReason | None, result: RoundResult
    ) -> None:
        """A preempted sequence samples the same tokens again: those that were handed out before are not repeated."""
        top = min(sequence.request.top, self.policy.head.weight_VD.shape[0])
        for position in range(max(start, sequence.streamed), end):
            self._sampled.append(
                SampledToken(
                    sequence.group,
                    sequence.sample,
                    int(self.token_ST[slot, position]),
                    float(self.logp_ST3[slot, position, 2]),
                    result.top(slot, position, top) if top else (),
                    stop if position == end - 1 else None,
                )
            )
        sequence.streamed = max(sequence.streamed, end)

    def _end_group(self, group: int) -> None:
        super()._end_group(group)
        del self.requests[group], self.sequences[group], self.unfinished[group]


def open_session(policy: Policy, slots: int, max_new_tokens: int) -> Session:
    """A session with CUDA graphs if there is a GPU with Triton and the model allows it, else with torch; checked."""
    from oncurve.engines.native.sampler_check import check_session  # it drives a session

    session = _build_session(policy, slots, max_new_tokens)
    check_session(session)
    return session


def _build_session(policy: Policy, slots: int, max_new_tokens: int) -> Session:
    if policy.general_reason is not None:
        return Session(policy, PerSlotGeneralRunner(policy, slots, max_new_tokens))
    if kernels.can_run_kernels(policy.device) and not policy.check.own_head:
        from oncurve.engines.cuda.per_slot import PerSlotCudaRunner  # Triton may be missing if there is no GPU

        runner = PerSlotCudaRunner.open(policy, slots, max_new_tokens)
        if runner is not None:
            session = Session(policy, runner)
            session.warm_up()
            return session
    return torch_session(policy, slots, max_new_tokens)


def torch_session(policy: Policy, slots: int, max_new_tokens: int) -> Session:
    """A session that torch decodes."""
    return Session(policy, PerSlotTorchRunner(policy, slots, max_new_tokens))
