"""What an engine is, what it is asked for, and which one samples for a recipe.

Three classes implement `Engine`: `NativeEngine` decodes in this process, `VllmEngine` in a vLLM process, and `RemoteEngine`
(cluster) in sampler processes on other nodes. `AgentEngine` (agent_programs) wraps one of them to run agents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

import numpy as np
import torch

from oncurve.errors import ModelError
from oncurve.models.policy import Policy
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Draft, Sampling
from oncurve.recipe.schema.sections import Engine as EngineSettings
from oncurve.records import Bools, Episode, Floats, Group, Ints, Prompt, StopReason

SLOTS_CPU, SLOTS_GPU = 128, 512
"""The most completions decoded at once if the recipe sets no number."""
MAX_WIDTH = 8
"""The most rows of a completion in a step: its last token and 7 drafted ones."""
MAX_EARLIER = 4
"""Drafts for a prompt are looked for in at most this many answers from earlier calls."""
MAX_REMEMBERED = 16_000_000
"""The most tokens of all answers that are kept for drafts in later calls: 64 MB."""
MAX_ROWS_CPU, MAX_ROWS_GPU = 32, 512
"""With drafts a step has at most this many rows: about as many as the device computes while it reads the weights."""


@dataclass(frozen=True, slots=True)
class SampleKey:
    """The seed and step from which, with a prompt's id and a sample's index, all random numbers of a completion follow.

    Samples are numbered from ``first``. A group that is extended later thus gets the random numbers of a group that was sampled
    at the full size at once.
    """

    seed: int
    step: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class BegunCompletion:
    """What an earlier call has sampled of a completion: its tokens, their three log-probs [T, 3], the weights that sampled them
    as in `Completion.versions`, and why it ended, if it did."""

    token_ids: Ints
    logps: Floats
    versions: tuple[tuple[int, int], ...] = ()
    stop: StopReason | None = None


class TokenConstraint(Protocol):
    """Which tokens a completion may have next. The engine calls ``accept`` with every sampled token."""

    error: str | None
    """Why the completion can't continue; None if it can. If set, all tokens are allowed, and samples must not be used."""

    def allowed(self) -> Bools:
        """Whether each token of the vocabulary may come next, [V]."""

    def accept(self, token_id: int) -> None:
        """This token was sampled."""


class Grammar(Protocol):
    """The texts that completions may have."""

    def start(self) -> TokenConstraint:
        """The constraint of a new completion."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """``samples`` completions of one prompt. ``top``: how many of the likeliest tokens to report at each position.
    ``episodes``: each completion's conversation, if the prompt has an environment. ``earlier``: answers to the prompt from
    earlier calls, in which drafts may be looked for. ``begun``: what each completion has so far, if it continues.

    A request of a session may continue the prompts of earlier ones. ``parts`` are the lengths of those prompts: this one is
    prefilled part by part, and parts that are still in the KV cache are not computed again. The bits are the same either way.
    None: the runner chooses parts that follow from the prompt alone, or prefills it at once. ``grammar``: the texts that
    completions may have; a session takes it if its ``can_constrain`` is true.

    Example: ``SampleRequest(prompt, policy.encode(prompt), samples=8, sampling=Sampling(), key=SampleKey(seed=0, step=1))``
    """

    prompt: Prompt
    prompt_ids: Ints
    samples: int
    sampling: Sampling
    key: SampleKey
    top: int = 0
    episodes: tuple[Episode, ...] = ()
    earlier: tuple[Ints, ...] = ()
    parts: tuple[int, ...] | None = None
    begun: tuple[BegunCompletion, ...] = ()
    grammar: Grammar | None = None

    def continues(self, request: SampleRequest) -> bool:
        """Whether this request's prompt begins with the other request's prompt, and both are prefilled in the same parts."""
        if self.parts is None or request.parts is None:
            return False
        length, parts = len(request.prompt_ids), request.parts
        return self.parts[: len(parts) + 1] == (*parts, length) and np.array_equal(self.prompt_ids[:length], request.prompt_ids)

    @property
    def longest_context(self) -> int:
        """The most tokens of a sequence's context: those of the prompt, and of the conversation if the chat template rewrites
        it."""
        return len(self.prompt_ids) + (self.sampling.max_new_tokens if self.prompt.history == "template" else 0)

    def close(self) -> None:
        """Its episodes are not needed any more."""
        for episode in self.episodes:
            episode.close()


@dataclass(frozen=True, slots=True)
class PassCounts:
    """What forward passes of a sampler have done: ``rows`` computed (a row is one token), ``drafted`` tokens, how many of those
    were ``accepted``, and ``passes``, counted once per sequence. A pass samples one token of each sequence, and one more for
    each drafted token that it accepts. For prompts that continue earlier ones: tokens that were ``prefilled``, and those that
    were ``kept`` in the KV cache."""

    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    prefilled: int = 0
    kept: int = 0

    def __add__(self, other: PassCounts) -> PassCounts:
        return PassCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: PassCounts) -> PassCounts:
        return PassCounts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def metrics(self) -> dict[str, float]:
        """As `oncurve.runs.metrics` explains them; empty if nothing was counted."""
        prompt_tokens = self.prefilled + self.kept
        kept = {"kv_reuse": self.kept / prompt_tokens} if prompt_tokens else {}
        if not self.passes:
            return kept
        tokens = self.passes + self.accepted
        accepted = {"draft_accepted": self.accepted / self.drafted} if self.drafted else {}
        return {"tokens_per_pass": tokens / self.passes, "tokens_per_row": tokens / self.rows, **accepted, **kept}


class WeightSource(Protocol):
    """Puts new weights into the policy while completions are sampled."""

    @property
    def version(self) -> int:
        """The number of updates that the policy's current weights have had."""

    def __call__(self) -> bool:
        """Load new weights if there are any; called between two decode rounds. Returns whether the weights changed."""


class ReplyStore(Protocol):
    """Replies from outside that belong to the current step, by key. What is put there survives the process."""

    def get(self, key: str) -> str | None: ...

    def add(self, key: str, reply: str) -> None: ...


class Engine(Protocol):
    """Samples groups of completions from a policy."""

    policy: Policy
    settings: EngineSettings
    weight_source: WeightSource | None
    """If set, new weights may arrive while completions are sampled; each completion then records its versions."""
    counts: PassCounts
    """Of all passes so far; 0 if the engine does not count them."""
    answers: dict[str, tuple[Ints, ...]]
    """By prompt id, its latest answers, in which drafts are looked for. The prompt sampled last comes last. Bits do not depend
    on them."""
    replies: ReplyStore | None
    """If set, what environments answer is stored there, and finished episodes are replayed from it."""
    records_routing: bool
    """Whether groups have the experts that each token took (``Completion.routing``): for models with experts."""
    shares_weights: bool
    """Whether the engine samples with the very tensors that the learner updates."""

    @property
    def log_lines(self) -> tuple[str, ...]:
        """What the run's log should say about how this engine samples."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: SampleKey,
        on_group: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        """Sample ``group_size`` completions of each prompt. ``on_group`` gets a prompt's index and group once it is
        complete."""

    def close(self) -> None:
        """Release what the engine holds besides the policy."""


def build_engine(policy: Policy, recipe: Recipe) -> Engine:
    """Build the engine that ``scale.engine`` names, with the policy's weights. The caller closes it."""
    if recipe.scale.engine == "vllm":
        from oncurve.engines.vllm.engine import VllmEngine  # the engines import this module

        return VllmEngine(policy, recipe.engine, recipe.scale)
    from oncurve.engines.native.engine import NativeEngine
    from oncurve.engines.native.sampler_check import check_sampler

    engine = NativeEngine(policy, recipe.engine)
    check_sampler(engine)
    return engine


def check_engine(recipe: Recipe) -> None:
    """Refuse an engine that is not installed, and settings that it does not support, before a model is loaded."""
    if recipe.scale.engine != "vllm":
        return
    from oncurve.engines.vllm.engine import check_model, check_sampling, check_vllm

    check_model(recipe.model)
    for stage in recipe.rollout_stages:
        check_sampling(stage.sampling, f"{stage.label}.sampling")
    check_vllm()


def slots_for(engine: Engine, completions: int) -> int:
    """The number of these completions that the engine decodes at once."""
    return engine.settings.slots or default_slots(engine.policy.device, completions)


def default_slots(device: torch.device, completions: int) -> int:
    """Slots for steps of this many completions: all at once, up to the device's limit."""
    return min(max(completions, 1), SLOTS_GPU if device.type == "cuda" else SLOTS_CPU)


def draft_width(draft: Draft, slots: int, device: torch.device) -> int:
    """Rows of a slot in each step: 1 without drafts, else as many as the device's limit allows. It is a function of recorded
    settings alone, because steps of other shapes round differently. `auto` counts as no drafts, because rows that are not
    accepted cost time. This does not concern the C functions: their bits do not depend on the number of rows."""
    return 1 if draft in ("off", "auto") else min(MAX_WIDTH, max(1, max_rows(device) // slots))


def max_rows(device: torch.device) -> int:
    """The most rows of all slots in a step with drafts."""
    return MAX_ROWS_GPU if device.type == "cuda" else MAX_ROWS_CPU


def encode_prompts(policy: Policy, prompts: Sequence[Prompt], sampling: Sampling) -> list[Ints]:
    """The prompts' tokens. Raises ModelError if a prompt and its completion would not fit the model's positions."""
    assert all(prompt.agent is None for prompt in prompts), "agents are run by AgentEngine"
    prompt_ids = [policy.encode(p) for p in prompts]
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        if len(ids) + sampling.max_new_tokens > policy.max_positions:
            raise ModelError(
                prompt.id,
                f"a prompt of {len(ids)} tokens with max_new_tokens = {sampling.max_new_tokens}",
                because=f"the model has {policy.max_positions} positions",
                fix="shorten the prompt, lower sampling.max_new_tokens, or use a model with a longer context",
            )
    return prompt_ids
