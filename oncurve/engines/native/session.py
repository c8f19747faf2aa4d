"""Sessions: slots that stay open while requests come and go. Tokens are streamed, settings differ by request, and any
request can be cancelled.

`oncurve serve` drives one. With the same seed a completion is the same whatever else is queued: decoding always runs over all
slots at one fixed shape.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from oncurve import kernels
from oncurve.engines.base import SampleKey, SampleRequest, draft_width
from oncurve.engines.native.general_runner import PerSlotGeneralRunner
from oncurve.engines.native.scheduler import RoundResult, Scheduler, TopTokens
from oncurve.engines.native.sequence import Sequence
from oncurve.engines.native.torch_runner import PerSlotTorchRunner
from oncurve.models import recurrent_layers
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Draft, Sampling
from oncurve.records import Ints, Prompt, StopReason

SERVED = Prompt("serve", text="")
"""Stands for the prompt of every served request: its random numbers depend on the seed and the sample's index alone."""
TOP = 20
"""At most this many of the likeliest tokens can be reported at each position."""


def served_request(prompt_ids: Ints, samples: int, sampling: Sampling, seed: int, top: int = 0) -> SampleRequest:
    """A request for a prompt that is given as tokens, as the endpoint builds it."""
    return SampleRequest(SERVED, prompt_ids, samples, sampling, SampleKey(seed, 0), top)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of a request's completion, with its log-prob at temperature 1; ``stop`` is set on the last token.

    ``sampling_logps`` are those at the request's temperature, and as sampled (truncated).
    """

    request: int
    sample: int
    token_id: int
    logp: float
    top: TopTokens
    stop: StopReason | None
    sampling_logps: tuple[float, float] = (0.0, 0.0)


class Session(Scheduler):
    """A scheduler that hands tokens out as they are sampled and forgets a request once it is complete.

    The weights must not change while it is open, as its runner keeps prompts in the KV cache. A served model never changes, and
    agents of a run have a new session in every step.
    """

    @property
    def max_new_tokens(self) -> int:
        """The longest completion that a request may ask for."""
        return self.runner.max_new_tokens

    @property
    def context(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        return self.runner.context

    @property
    def can_constrain(self) -> bool:
        """Whether requests may have a grammar."""
        return self.runner.can_constrain

    @torch.inference_mode()
    def step(self) -> list[SampledToken]:
        """Admit what waits, launch a round and return the tokens of the oldest. An empty list may mean that some are in
        flight. Requests that can't continue are cancelled, and are in ``failures`` until the next step."""
        self._sampled: list[SampledToken] = []
        self.failures: dict[int, str] = {}
        """By the number of a request, why its completions could not continue."""
        self._admit()
        self._advance()
        for number in self.failures:
            self.cancel(number)
        return [token for token in self._sampled if token.request not in self.failures]

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
        """Hand out the new tokens of a slot. A preempted sequence samples its tokens again; they are handed out once."""
        if sequence.constraint is not None and sequence.constraint.error is not None:
            self.failures[sequence.group] = sequence.constraint.error
        top = min(sequence.request.top, self.policy.head.weight_VD.shape[0])
        for position in range(max(start, sequence.streamed), end):
            logp, sampled_logp, raw_logp = self.logp_ST3[slot, position].tolist()
            self._sampled.append(
                SampledToken(
                    sequence.group,
                    sequence.sample,
                    int(self.token_ST[slot, position]),
                    raw_logp,
                    result.top(slot, position, top) if top else (),
                    stop if position == end - 1 else None,
                    (logp, sampled_logp),
                )
            )
        sequence.streamed = max(sequence.streamed, end)

    def _end_group(self, group: int) -> None:
        super()._end_group(group)
        del self.requests[group], self.sequences[group], self.unfinished[group]


def open_session(policy: Policy, slots: int, max_new_tokens: int, draft: Draft = "off") -> Session:
    """Open and check a session. It uses CUDA graphs if there is a GPU with Triton and the model allows it, else torch."""
    from oncurve.engines.native.sampler_check import check_session  # it drives a session

    session = _build_session(policy, slots, max_new_tokens, draft)
    check_session(session)
    return session


def _build_session(policy: Policy, slots: int, max_new_tokens: int, draft: Draft) -> Session:
    if policy.general_reason is not None:
        return Session(policy, PerSlotGeneralRunner(policy, slots, max_new_tokens))
    if kernels.can_run_kernels(policy.device) and not policy.check.own_head:
        from oncurve.engines.cuda.per_slot import PerSlotCudaRunner  # Triton may be missing if there is no GPU

        runner = PerSlotCudaRunner.open(policy, slots, max_new_tokens, session_width(policy, slots, draft))
        if runner is not None:
            session = Session(policy, runner)
            session.warm_up()
            return session
    return torch_session(policy, slots, max_new_tokens, draft)


def torch_session(policy: Policy, slots: int, max_new_tokens: int, draft: Draft = "off") -> Session:
    """A session that torch decodes. Drafts come from a request's prompt and its own text."""
    width = session_width(policy, slots, draft) if policy.device.type == "cpu" else 1
    return Session(policy, PerSlotTorchRunner(policy, slots, max_new_tokens, width=width))


def session_width(policy: Policy, slots: int, draft: Draft) -> int:
    """Rows of a slot; 1 if the model has recurrent states, which can't be taken back."""
    return 1 if recurrent_layers.is_attached(policy.model) else draft_width(draft, slots, policy.device)
