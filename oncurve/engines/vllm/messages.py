"""Messages between a run and its vLLM process: plain records, pickled through a pipe between processes of one user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from oncurve.recipe.schema.sections import Sampling
from oncurve.records import StopReason

SCRATCH = "oncurve-vllm-"
"""Prefix of the folders through which weights are pushed."""

Logprobs = Literal["raw_logprobs", "processed_logprobs"]
"""Which log-probs vLLM reports: of the model's own distribution, or of the one that was sampled from. Fixed when it starts."""


@dataclass(frozen=True, slots=True)
class Start:
    """Load the model in ``folder``. The reply is Ready."""

    folder: str
    scratch: str
    """The folder through which weights are pushed. The vLLM process removes it too, in case the run is killed."""
    dtype: str
    slots: int
    logprobs: Logprobs
    lora_rank: int
    sleeps: bool
    gpu_fraction: float
    """The fraction of the GPU's memory that vLLM may use, weights included."""
    cpu_kv_bytes: int
    """On a CPU, the size of the KV cache; the worker allocates less if there is too little free memory."""
    tensor: int = 1
    """Tensor-parallel size."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Continue ``token_ids``: one completion, or one turn of it."""

    key: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int | None
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    eos_ids: tuple[int, ...]
    counts_tokens: bool
    """Whether the reply to a push of weights reports how many tokens this request has."""


@dataclass(frozen=True, slots=True)
class TurnBatch:
    """Requests to sample. The replies are Answers until all have ended, and Working in between."""

    requests: tuple[TurnRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Cancel all requests."""


@dataclass(frozen=True, slots=True)
class FromFile:
    """Load all weights from a safetensors file, which is in shared memory if there is room."""

    path: str


@dataclass(frozen=True, slots=True)
class FromGpu:
    """Load all weights from the learner's memory on the same GPU: by name, how torch opens a tensor of another process (CUDA
    IPC)."""

    handles: Mapping[str, tuple[Any, tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Sample with this LoRA adapter from now on, in place of the one before."""

    folder: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """Release GPU memory: level 1 keeps the weights in CPU memory, level 2 drops them."""

    level: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Allocate memory again for some of: weights, kv_cache."""

    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """vLLM has started. ``context``: the most tokens that a prompt and its completion may have."""

    context: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A request's tokens, the end token included, with one log-prob each."""

    key: str
    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    stop: StopReason


@dataclass(frozen=True, slots=True)
class Answers:
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Working:
    """Heartbeat while tokens are sampled."""


@dataclass(frozen=True, slots=True)
class Done:
    """The message was carried out. ``written``: tokens so far, by request, for requests that count them."""

    written: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """The message raised this error; the process ends."""

    kind: str
    message: str
