"""The native engine: samples in this process with the learner's own weights and continuous batching (`scheduler`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oncurve import kernels
from oncurve.engines.base import (
    MAX_EARLIER,
    MAX_REMEMBERED,
    SLOTS_GPU,
    BegunCompletion,
    PassCounts,
    ReplyStore,
    SampleKey,
    SampleRequest,
    WeightSource,
    draft_width,
    max_rows,
    slots_for,
)
from oncurve.engines.native.c_decoder import CRunner, can_decode
from oncurve.engines.native.general_runner import GeneralRunner
from oncurve.engines.native.kv_cache import KVCache, idle_blocks, slots_per_block
from oncurve.engines.native.scheduler import Runner, Scheduler
from oncurve.engines.native.sequence import begun_completions
from oncurve.engines.native.torch_runner import TorchRunner
from oncurve.engines.native.turns import PureEpisode, build_requests
from oncurve.errors import RecipeError
from oncurve.models import recurrent_layers
from oncurve.models.llama.c_build import has_bfloat16, load_library
from oncurve.models.parallel.dtensor import is_dtensor
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine as EngineSettings
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Completion, Group, Ints, Prompt

if TYPE_CHECKING:
    from oncurve.engines.cuda.graph_decoder import GraphDecoder


NOTHING = BegunCompletion(np.zeros(0, np.int64), np.zeros((0, 3), np.float32))
"""A completion that has not begun."""


@dataclass(frozen=True, slots=True)
class FixedWeights:
    """A `WeightSource` that never has new weights: completions record the version that sampled them."""

    version: int

    def __call__(self) -> bool:
        return False


class NativeEngine:
    """Samples groups of completions from a policy."""

    shares_weights = True

    def __init__(self, policy: Policy, settings: EngineSettings) -> None:
        if settings.kv_dtype == "fp8" and policy.general_reason is not None:
            raise RecipeError(
                "engine.kv_dtype", "fp8",
                because=f"{type(policy.model).__name__} decodes with transformers' own KV cache ({policy.general_reason})",
                fix='use "auto"',
            )  # fmt: skip
        self.policy, self.settings = policy, settings
        self.allows_c = True
        self.fp8_difference: float | None = None
        """How far the self-check found the log-probs sampled with an FP8 KV cache from the model's own, in nats."""
        self.weight_source: WeightSource | None = None
        self.counts = PassCounts()
        self.answers: dict[str, tuple[Ints, ...]] = {}
        self.replies: ReplyStore | None = None
        self.records_routing = False

    @property
    def log_lines(self) -> tuple[str, ...]:
        """Lines for the log: whether drafts are used, if the recipe asks for them; a warning, if sampling is slower here than
        it could be; and the result of the self-check and the time that it took."""
        drafts = () if self.settings.draft in ("auto", "off") else (self._draft_line(),)
        fp8 = (self._fp8_line(),) if self.settings.kv_dtype == "fp8" else ()
        return (*drafts, *fp8, *self._speed_lines())

    @property
    def uses_c(self) -> bool:
        """Whether C decodes, where it supports the sampling settings. It keeps keys and values in float32."""
        return self.allows_c and self.policy.uses_c and self.settings.kv_dtype == "auto"

    def _fp8_line(self) -> str:
        off = self.fp8_difference
        by = "" if off is None else f": sampled log-probs differ from the model's own by {off:.1e} nats"
        no_gain = "; torch decodes, which rounds in the same way and saves neither memory nor time"
        return f"KV cache in FP8{by}{no_gain if self.graph_decoder is None else ''}"

    def _draft_line(self) -> str:
        slots = slots_for(self, SLOTS_GPU)
        if self.uses_c:
            other = f"in torch (agents, environments, truncated sampling) at least {self._draft_width(slots)} rows per slot"
            return f"drafts: C verifies them in rows that a pass has to spare; {other}"
        if reason := self._reason_for_no_drafts(slots):
            return f"no drafts, because {reason}"
        none = ", but none while routing_replay or balance_loss record experts" if self.policy.routed_layers else ""
        return f"drafts: {self._draft_width(slots)} rows per slot{none}"

    def _reason_for_no_drafts(self, slots: int) -> str | None:
        """Why CUDA graphs or torch compute a single row of each slot; None if they compute more."""
        if recurrent_layers.is_attached(self.policy.model):
            return "the model has recurrent layers, whose state can't be taken back from a token that is not accepted"
        if self.policy.general_reason is not None:
            return "transformers' own forward decodes the model, one token at a time"
        if self.policy.device.type != "cpu" and self._torch_decodes:
            return "torch decodes on the GPU, and would wait for each draft"
        if self._draft_width(slots) == 1:
            most = max_rows(self.policy.device)
            return f"a step computes {most} rows, and there are {slots} slots: set engine.slots = {most // 2} or less"
        return None

    @property
    def _torch_decodes(self) -> bool:
        """With sharded weights it is not known before they are gathered, as building a decoder runs the model."""
        are_shards = is_dtensor(next(self.policy.model.parameters()))
        return self.policy.layer_by_layer or (not are_shards and self.graph_decoder is None)

    def _draft_width(self, slots: int) -> int:
        return draft_width(self.settings.draft, slots, self.policy.device)

    def _speed_lines(self) -> tuple[str, ...]:
        is_fused = self.policy.fast_backbone is not None or self.policy.fused_weights is not None
        check = self.policy.check.log_line(is_fused=is_fused, module_reason=self.policy.module_reason)
        dtype = self.policy.model.dtype
        if self.policy.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16):
            name, is_native = str(dtype).removeprefix("torch."), dtype == torch.bfloat16 and has_bfloat16()
            costs = [
                *(["the C functions, several times faster, are for float32"] if self.policy.fast_backbone is not None else []),
                *([] if is_native else [f"this processor emulates {name}, which is several times slower than float32"]),
            ]
            if costs:
                return (f'{name} on a CPU is slow: {"; ".join(costs)}; set model.dtype = "float32"', check)
        if self.policy.device.type == "cpu" and self.policy.fast_backbone is not None and load_library() is None:
            return ("no C compiler was found: torch decodes, several times slower for a small model", check)
        if self.policy.device.type == "cuda" and not kernels.can_run_kernels(self.policy.device):
            return ("Triton is not installed: torch decodes, several times slower on a GPU", check)
        return (check,)

    def close(self) -> None:
        """Nothing to release: the KV cache is freed after each call."""

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
        requests = self._with_earlier(build_requests(self.policy, prompts, group_size, sampling, key, self.replies))
        groups: dict[int, Group] = {}
        try:
            # Under FSDP the weights gathered here must be such that a gradient can go through them later.
            with torch.inference_mode(not self.policy.layer_by_layer), torch.no_grad():
                for indices in split_by_environment(prompts):
                    batch = [requests[index] for index in indices]
                    runner = self.build_runner(batch)
                    with closing(
                        Scheduler(self.policy, runner, batch, self.weight_source, self.replies).completions()
                    ) as rounds:
                        for number, completions in rounds:
                            index = indices[number]
                            request, routing = requests[index], runner.prompt_routing(number)
                            groups[index] = Group(request.prompt, request.prompt_ids, completions, routing)
                            if on_group is not None:
                                on_group(index, groups[index])
                    self.counts += runner.counts
        finally:  # after an error, also those whose turn did not come
            for request in requests:
                request.close()
        self._remember(list(groups.values()))
        return [groups[index] for index in range(len(prompts))]

    def sample_until(
        self,
        requests: Sequence[SampleRequest],
        enough: int,
        version: int,
        on_group: Callable[[int, Group], None] | None = None,
    ) -> tuple[dict[int, Group], dict[int, tuple[BegunCompletion, ...]]]:
        """Sample until ``enough`` of the requests are complete, the first ones first. Returns their groups by the request's
        number, and what the others have so far; a later call continues them if they are its ``begun``. ``version``: the updates
        that the policy's weights have had."""
        requests = self._with_earlier(requests)
        groups: dict[int, Group] = {}
        begun: dict[int, tuple[BegunCompletion, ...]] = {}

        def add(number: int, completions: tuple[Completion, ...]) -> None:
            groups[number] = Group(requests[number].prompt, requests[number].prompt_ids, completions)
            if on_group is not None:
                on_group(number, groups[number])

        for number, request in enumerate(requests):
            if request.begun and all(completion.stop is not None for completion in request.begun):
                begun[number] = request.begun
        for number in list(begun)[:enough]:
            add(number, begun_completions(self.policy, requests[number]))
            del begun[number]
        numbers = [number for number in range(len(requests)) if number not in groups and number not in begun]
        if len(groups) == enough:  # all of them were carried over complete
            return groups, begun | {n: requests[n].begun or (NOTHING,) * requests[n].samples for n in numbers}
        with torch.inference_mode(not self.policy.layer_by_layer), torch.no_grad():
            batch = [requests[number] for number in numbers]
            runner = self.build_runner(batch)
            scheduler = Scheduler(self.policy, runner, batch, FixedWeights(version))
            with closing(scheduler.completions()) as rounds:
                while len(groups) < enough:
                    index, completions = next(rounds)
                    add(numbers[index], completions)
                begun |= {number: scheduler.progress(index) for index, number in enumerate(numbers) if number not in groups}
            self.counts += runner.counts
        self._remember(list(groups.values()))
        return groups, begun

    def _with_earlier(self, requests: Sequence[SampleRequest]) -> list[SampleRequest]:
        """Requests with earlier answers to their prompts."""
        if not self._uses_answers:
            return list(requests)
        return [replace(request, earlier=self.answers.get(request.prompt.id, ())) for request in requests]

    @property
    def _uses_answers(self) -> bool:
        """Whether drafts are looked for in earlier answers to the same prompt."""
        return self.settings.draft == "group" or (self.settings.draft == "auto" and self.uses_c)

    def _remember(self, groups: Sequence[Group]) -> None:
        """Keep some answers to each prompt, and forget the oldest beyond MAX_REMEMBERED tokens. Bits do not depend on them."""
        if not self._uses_answers:
            return
        for group in groups:
            self.answers.pop(group.prompt.id, None)
            self.answers[group.prompt.id] = tuple(c.token_ids.astype(np.int32) for c in group.completions[:MAX_EARLIER])
        tokens = sum(len(answer) for answers in self.answers.values() for answer in answers)
        while tokens > MAX_REMEMBERED:
            tokens -= sum(map(len, self.answers.pop(next(iter(self.answers)))))

    @cached_property
    def graph_decoder(self) -> GraphDecoder | None:
        """Decodes with CUDA graphs and our kernels, on a GPU that has Triton; None: torch decodes."""
        if (
            self.policy.general_reason is not None
            or self.policy.check.own_head
            or self.policy.layer_by_layer
            or not kernels.can_run_kernels(self.policy.device)
        ):
            return None
        from oncurve.engines.cuda.graph_decoder import GraphDecoder  # Triton may be missing if there is no GPU

        return GraphDecoder.build(self.policy, self.settings)

    def build_runner(self, requests: Sequence[SampleRequest]) -> Runner:
        """CUDA graphs if there are any, else transformers on the general path, C if it supports model and settings, or torch.

        C can't force tokens, so torch decodes for environments. C can continue what an earlier call has begun.
        """
        sampling, group_size = requests[0].sampling, requests[0].samples
        slots = slots_for(self, len(requests) * group_size)
        episodes, by_template = requests[0].episodes, requests[0].prompt.history == "template"
        forces, records = bool(episodes) or any(request.begun for request in requests), self.records_routing
        # A recurrent state can't be rewound: neither to before a drafted token, nor, as rounds run ahead, to the end of a turn.
        # Drafts are looked for in the texts of requests. If the chat template writes the history, there are none: a sequence
        # with a context of its own belongs to no request. If experts are recorded, there are none either: the experts of
        # rejected rows would have to be left out.
        has_states = recurrent_layers.is_attached(self.policy.model)
        can_draft = self._reason_for_no_drafts(slots) is None and not by_template and not records
        width = self._draft_width(slots) if can_draft else 1
        if self.graph_decoder is not None and not (forces and has_states):
            from oncurve.engines.cuda.runner import CudaRunner

            # As rounds run ahead, the host would not know which weights have sampled an accepted token.
            width = width if self.weight_source is None else 1
            return CudaRunner.build(self.graph_decoder, requests, slots, width, records_routing=records)
        # On the general path the slots of a block advance together, so a slot that may be parked needs a block of its own. So
        # does a slot whose context may be rewritten, as it no longer shares the group's prompt.
        can_park = bool(episodes) and not isinstance(episodes[0], PureEpisode)
        is_alone = by_template or (can_park and self.policy.general_reason is not None)
        R = 1 if is_alone else slots_per_block(group_size)
        blocks = max(1, slots // R)
        check_every = min(self.settings.check_every, sampling.max_new_tokens)
        if self.policy.general_reason is not None:
            cache = KVCache(blocks, R, sampling.max_new_tokens)
            return GeneralRunner(self.policy, cache, sampling, check_every, forces=forces, records_routing=records)
        if not episodes and self.uses_c and can_decode(self.policy, sampling):
            cache = KVCache(blocks, R, sampling.max_new_tokens)
            return CRunner(self.policy, cache, sampling, check_every, self.settings.draft)
        is_fp8 = self.settings.kv_dtype == "fp8"
        cache = KVCache(blocks, R, sampling.max_new_tokens + width - 1, idle_blocks(blocks, R, width), is_fp8=is_fp8)
        drafts: dict[str, Any] = {"width": width, "draft": self.settings.draft}
        return TorchRunner(self.policy, cache, sampling, check_every, forces=forces, records_routing=records, **drafts)


def split_by_environment(prompts: Sequence[Prompt]) -> list[list[int]]:
    """The indices of prompts, split by whether they have an environment and by their history. Different runners may decode the
    parts, and a prompt's completions must not depend on which others are sampled with it."""
    kinds = [(p.environment is not None, p.history) for p in prompts]
    return [[i for i, kind in enumerate(kinds) if kind == of] for of in dict.fromkeys(sorted(kinds, key=lambda k: k[0]))]
