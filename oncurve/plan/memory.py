"""Memory by part at the worst moment of each phase of a step.

A model in training with Adam in mixed precision holds, per parameter, 2 bytes of weights, 4 of master weights, 8 of moments and
2 of gradients: 16 (Rajbhandari et al. 2020, section 3.1, with bfloat16 for float16). PPO's critic is such a model of its own.

Activations are what autograd keeps of a decoder layer, per token: see ``layer_bytes``. With checkpointing a layer keeps its
input, and one layer at a time is computed again.

Legend: as in shapes.py; ``b`` bytes of the dtype, ``N`` tokens of a pack, ``M`` predicted ones, ``S`` slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from oncurve.plan.job import Job
from oncurve.plan.shapes import Shape

PARTS = (
    "weights", "adapter", "master weights", "moments", "gradients", "activations", "lm head", "kv pool", "sampling",
    "reference", "reward model", "critic", "cuda context",
)  # fmt: skip
"""In the order of the bars: what stays first, what comes and goes after."""

CUDA_CONTEXT = 600 << 20
"""The driver's context and libraries' workspaces, outside what torch counts as its own."""
RESERVE = 0.03
"""Share of the device left free: fragments between blocks, and what other programs take."""
PAGE = 64
"""Keys lie in pages of so many positions."""
HEAD_CHUNK = 1 << 22
"""Logits of the learner's LM head that are held at once."""
HEAD_CHUNK_BYTES = 22
"""Bytes of each of them: in the model's precision, in float32, log-probs, probabilities, gradient, and that rounded back."""
SAMPLED_LOGIT_BYTES = 22
"""Bytes of each logit of a decode step: two precisions, log-probs, probabilities, their float64 running sum."""
INT8_MOMENT_BYTES = 2 * (1 + 4 / 256)
"""Two moments of one byte, with a float32 scale for each block of 256."""

QUANTISED_BYTES = {"nf4": 0.5 + 4 / 64, "int8": 1.0}
"""Bytes of a quantised weight, with a float32 scale for each block of 64 in 4 bits."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a step at its worst moment, in bytes by part."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Memory:
    """All phases of a step on one device, and what lies in the CPU's memory instead."""

    phases: tuple[Phase, ...]
    host: int

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


def limit(job: Job) -> int:
    """What a plan may fill of the device."""
    return int(job.gpu.memory * (1 - RESERVE))


def memory_of(job: Job) -> Memory:
    """Every phase of the job's step."""
    standing = _standing(job)
    phases = [Phase(name, _ordered({**standing, **extra})) for name, extra in _phases(job).items()]
    return Memory(tuple(phases), _host(job))


def _ordered(parts: dict[str, float]) -> dict[str, int]:
    return {name: math.ceil(parts[name]) for name in PARTS if parts.get(name)}


def _standing(job: Job) -> dict[str, float]:
    """What is there in every phase."""
    b, shape = job.dtype_bytes, job.shape
    critic = job.critic_shape
    return {
        "weights": _weights(shape, job),
        "adapter": b * job.adapters,
        **_state(job.trained, job),
        "reference": b * shape.parameters / _full(job) if job.holds_reference and not job.reference_on_cpu else 0,
        "reward model": b * job.reward_model.parameters if job.reward_model else 0,
        "critic": critic_bytes(critic, job) if critic else 0,
        "cuda context": 0 if job.gpu.is_cpu else CUDA_CONTEXT,
    }


def _full(job: Job) -> int:
    return job.gpus if job.sharding == "full" else 1


def _split(job: Job) -> int:
    return 1 if job.sharding == "none" else job.gpus


def _weights(shape: Shape, job: Job) -> float:
    """Weights of a model, linear layers quantised where asked; fully sharded, a share and two layers gathered at a time."""
    whole: float = job.dtype_bytes * shape.parameters
    if job.quantise is not None:
        whole -= (job.dtype_bytes - QUANTISED_BYTES[job.quantise]) * shape.multiplied_in_all
    return whole if _full(job) == 1 else whole / job.gpus + 2 * job.dtype_bytes * shape.layer_parameters


def _state(trained: int, job: Job) -> dict[str, float]:
    """Master weights and moments of the parameters that move."""
    if job.does.curvature:
        return {"master weights": _masters(trained, job), "moments": 4 * 4 * trained / _split(job)}
    if job.optimiser_on_cpu:
        return {}
    per = 8 if job.moments == "float32" else INT8_MOMENT_BYTES
    return {"master weights": _masters(trained, job), "moments": per * trained / _split(job)}


def _masters(trained: int, job: Job) -> float:
    """Float32 copies, where the weights themselves are of lower precision."""
    return 0 if job.dtype == "float32" else 4 * trained / _split(job)


def _gradients(trained: int, job: Job) -> float:
    return job.dtype_bytes * trained / _split(job)


def critic_bytes(critic: Shape, job: Job) -> float:
    """A critic in training: its weights, and master weights, moments and gradients of what it trains."""
    trained = critic.parameters if job.lora_rank is None else critic.adapter_parameters(job.lora_rank)
    extra = 0 if job.lora_rank is None else job.dtype_bytes * trained
    return _weights(critic, job) + extra + sum(_state(trained, job).values()) + _gradients(trained, job)


def _host(job: Job) -> int:
    """What the job puts into the CPU's memory."""
    per = 4 + (8 if job.moments == "float32" else INT8_MOMENT_BYTES)
    optimiser = per * job.trained / _split(job) if job.optimiser_on_cpu else 0
    reference = job.dtype_bytes * job.shape.parameters if job.holds_reference and job.reference_on_cpu else 0
    return math.ceil(optimiser + reference)


def _phases(job: Job) -> dict[str, dict[str, float]]:
    """What each phase adds to what stands."""
    does = job.does
    phases: dict[str, dict[str, float]] = {}
    if does.samples:
        phases["sample"] = {"kv pool": kv_pool(job), "sampling": _sampling(job)}
    if job.reward_model:
        phases["score"] = {"activations": forward_bytes(job.reward_model, job)}
    if job.has_reference:
        phases["reference"] = {"activations": forward_bytes(job.shape, job), "lm head": _head_chunk(job)} | _borrowed(job)
    phases["update"] = {
        "activations": activation_bytes(job.shape, job),
        "lm head": _head_chunk(job) + _head_gradient(job),
        "gradients": _gradients(job.trained, job) if job.packs > 1 else 0,
    }
    critic = job.critic_shape
    if critic:
        phases["critic update"] = {"activations": activation_bytes(critic, job)}
    phases["optimiser"] = {"gradients": _gradients(job.trained, job) * (1 + _rounded_up(job))}
    return phases


def _rounded_up(job: Job) -> float:
    """Gradients are turned into float32 for the optimiser, beside those of the weights' own precision."""
    return 0 if job.dtype == "float32" else 4 / job.dtype_bytes


def _borrowed(job: Job) -> dict[str, float]:
    """A reference that lives in the CPU's memory is brought over for its pass."""
    return (
        {"reference": job.dtype_bytes * job.shape.parameters / _full(job)}
        if job.holds_reference and job.reference_on_cpu
        else {}
    )


def kv_pool(job: Job) -> float:
    """Keys and values in pages: each prompt once, each completion up to its limit. Fully sharded, heads are split over GPUs."""
    slots = min(job.rows, job.slots)
    prompts = min(job.rank_prompts, slots) * _pages(job.prompt_tokens)
    return (prompts + slots * _pages(job.new_tokens)) * PAGE * job.shape.kv_bytes(job.dtype_bytes) / _full(job)


def _pages(tokens: int) -> int:
    return math.ceil(tokens / PAGE)


def _sampling(job: Job) -> float:
    """Logits of a decode step."""
    return min(job.rows, job.slots) * job.shape.vocabulary * SAMPLED_LOGIT_BYTES / _full(job)


def _head_chunk(job: Job) -> float:
    V = job.shape.vocabulary
    rows = min(max(HEAD_CHUNK // V, 1), job.pack_predicted)
    return rows * V * HEAD_CHUNK_BYTES


def _head_gradient(job: Job) -> float:
    """The head's gradient is summed over chunks in float32, with one chunk's share beside it. A frozen head has none."""
    if job.lora_rank is not None:
        return 0
    return job.shape.head_parameters * (4 + job.dtype_bytes)


def layer_bytes(shape: Shape, dtype_bytes: int) -> int:
    """What autograd keeps of one layer, per token.

    A norm keeps its input in float32, the normalised input and its output (which the products share). Attention keeps q, k, v
    and its output, and norms over heads what norms keep. The MLP keeps gate, silu(gate), up and their product.
    """
    b, D, F = dtype_bytes, shape.width, shape.mlp_width * max(shape.experts_active, 1)
    q, kv = shape.q_width, shape.kv_width
    up = 0 if b == 4 else 4  # a float32 input is its own copy
    norm = up + 2 * b
    norms = shape.kind.norms * norm * D
    heads = (up + b) * (q + kv) if shape.kind.head_norm or shape.kind.wide_norm else 0
    return norms + heads + b * (2 * q + 2 * kv) + 4 * shape.heads + 4 * b * F


def activation_bytes(shape: Shape, job: Job) -> float:
    """Activations of a pack at the worst moment of its backward pass, gradients in flight included."""
    b, N, D = job.dtype_bytes, job.pack_tokens, shape.width
    ends = N * (4 * b * D) + job.pack_predicted * 2 * b * D
    in_flight = N * b * (3 * shape.mlp_width * max(shape.experts_active, 1) + 4 * D)
    layer = layer_bytes(shape, b)
    kept = shape.layers * b * D + layer if job.checkpointing else shape.layers * layer
    return ends + in_flight + N * kept


def forward_bytes(shape: Shape, job: Job) -> float:
    """A pass without gradient: one layer's tensors at a time."""
    b, D = job.dtype_bytes, shape.width
    F = shape.mlp_width * max(shape.experts_active, 1)
    return job.pack_tokens * b * (6 * D + max(3 * F, 4 * (shape.q_width + shape.kv_width))) + job.pack_predicted * b * D
