"""What a run and its vLLM process say to each other: plain records, pickled through a pipe between processes of one user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from oncurve.recipe.schema.sections import Sampling
from oncurve.records import StopReason

SCRATCH = "oncurve-vllm-"
"""How the folders begin that weights come through."""

Logprobs = Literal["raw_logprobs", "processed_logprobs"]
"""Which log-probs vLLM tells: of the model's own distribution, or of the one that was drawn from. Settled when it starts."""


@dataclass(frozen=True, slots=True)
class Start:
    """Load the model in ``folder``. Answered by Ready."""

    folder: str
    scratch: str
    """The folder that weights come through, made for this: where the run is killed, nobody else is left to remove it."""
    dtype: str
    slots: int
    logprobs: Logprobs
    lora_rank: int
    sleeps: bool
    gpu_share: float
    """Of the GPU's whole memory, what vLLM may take, weights included."""
    cpu_kv_bytes: int
    """On a CPU, what keys and values of all slots could want."""
    tensor: int = 1
    """Processes that split the layers between them."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Go on from ``token_ids``: one completion, or one turn of it."""

    key: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int | None
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    eos_ids: tuple[int, ...]
    counts_tokens: bool
    """Whether a push of weights on the way should say how many tokens are there."""


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Answered by Answers until all are; in between by Working."""

    requests: tuple[TurnRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget all that was asked."""


@dataclass(frozen=True, slots=True)
class FromFile:
    """Load all weights from a safetensors file, in shared memory where there is room."""

    path: str


@dataclass(frozen=True, slots=True)
class FromGpu:
    """Load all weights from the learner's own memory on the same GPU: by name, how torch opens a tensor of another process."""

    handles: Mapping[str, tuple[Any, tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class Adapter:
    """Sample with this LoRA adapter from now on, in place of the one before."""

    folder: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give GPU memory back: 1 keeps the weights in the CPU's memory, 2 forgets them."""

    level: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Take memory again for some of: weights, kv_cache."""

    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """With the most tokens that a prompt and its completion may have."""

    context: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens drawn, the end token among them, and one log-prob for each."""

    key: str
    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    stop: StopReason


@dataclass(frozen=True, slots=True)
class Answers:
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Working:
    """A sign of life."""


@dataclass(frozen=True, slots=True)
class Done:
    """What was asked is done; with the tokens written by then, where requests are counted."""

    written: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """What was asked raised this; the process ends."""

    kind: str
    message: str
