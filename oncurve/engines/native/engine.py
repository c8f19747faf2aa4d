"""The native engine: samples in this process with the learner's own weights and continuous batching (`scheduler`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from oncurve import kernels
from oncurve.engines.base import SampleKey, SampleRequest, WeightSource, encode_prompts, slots_for
from oncurve.engines.native.c_decoder import CRunner, can_decode
from oncurve.engines.native.general_runner import GeneralRunner
from oncurve.engines.native.kv_cache import KVCache, slots_per_block
from oncurve.engines.native.scheduler import Runner, Scheduler
from oncurve.engines.native.torch_runner import TorchRunner
from oncurve.models import recurrent_layers
from oncurve.models.llama.c_build import has_bfloat16, load_library
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine as EngineSettings
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Group, Prompt

if TYPE_CHECKING:
    from oncurve.engines.cuda.graph_decoder import GraphDecoder


class NativeEngine:
    """Samples groups of completions from a policy."""

    shares_weights = True

    def __init__(self, policy: Policy, settings: EngineSettings) -> None:
        self.policy, self.settings = policy, settings
        self.weight_source: WeightSource | None = None

    @property
    def log_lines(self) -> tuple[str, ...]:
        """What the self-check found and cost, after a warning if sampling is slower here than it could be."""
        check = self.policy.check.log_line
        if self.policy.device.type == "cpu" and self.policy.model.dtype == torch.bfloat16:
            costs = [
                *(["the C functions, several times faster, are for float32"] if self.policy.fast_backbone is not None else []),
                *([] if has_bfloat16() else ["this processor emulates bfloat16, which is several times slower than float32"]),
            ]
            if costs:
                return (f'bfloat16 on a CPU is slow: {"; ".join(costs)}; set model.dtype = "float32"', check)
        if self.policy.device.type == "cpu" and self.policy.fast_backbone is not None and load_library() is None:
            return ("no C compiler was found: torch decodes, several times slower for a small model", check)
        if self.policy.device.type == "cuda" and not kernels.can_run_kernels(self.policy.device):
            return ("Triton is not installed: torch decodes, several times slower on a GPU", check)
        return (check,)

    def close(self) -> None:
        """Nothing to release: the KV cache goes with each call."""

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
        prompt_ids = encode_prompts(self.policy, prompts, sampling)
        requests = [SampleRequest(p, ids, group_size, sampling, key) for p, ids in zip(prompts, prompt_ids, strict=True)]
        groups: dict[int, Group] = {}
        # Under FSDP the weights gathered here must be such that a gradient can go through them later.
        with torch.inference_mode(not self.policy.layer_by_layer), torch.no_grad():
            for indices in split_by_environment(prompts):
                batch = [requests[index] for index in indices]
                scheduler = Scheduler(self.policy, self.build_runner(batch), batch, self.weight_source)
                for number, completions in scheduler.completions():
                    index = indices[number]
                    groups[index] = Group(prompts[index], prompt_ids[index], completions)
                    if on_group is not None:
                        on_group(index, groups[index])
        return [groups[index] for index in range(len(prompts))]

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
        """CUDA graphs if there are any, else C if it supports the model and the settings, else torch.

        C forces no tokens: torch decodes for environments.
        """
        sampling, group_size = requests[0].sampling, requests[0].samples
        slots = slots_for(self, len(requests) * group_size)
        forces = requests[0].prompt.environment is not None
        # Rounds run ahead of the host, and a recurrent state can't be taken back when an environment replies.
        if self.graph_decoder is not None and not (forces and recurrent_layers.is_attached(self.policy.model)):
            from oncurve.engines.cuda.runner import CudaRunner

            return CudaRunner.build(self.graph_decoder, requests, slots)
        R = slots_per_block(group_size)
        cache = KVCache(max(1, slots // R), R, sampling.max_new_tokens)
        check_every = min(self.settings.check_every, sampling.max_new_tokens)
        if self.policy.general_reason is not None:
            return GeneralRunner(self.policy, cache, sampling, check_every, forces=forces)
        if not forces and can_decode(self.policy, sampling):
            return CRunner(self.policy, cache, sampling, check_every)
        return TorchRunner(self.policy, cache, sampling, check_every, forces=forces)


def split_by_environment(prompts: Sequence[Prompt]) -> list[list[int]]:
    """The indices of prompts without and with an environment. These may be decoded by different runners, and a prompt's
    completions must not depend on which others are sampled with it."""
    parts = [[i for i, p in enumerate(prompts) if (p.environment is None) == plain] for plain in (True, False)]
    return [part for part in parts if part]
