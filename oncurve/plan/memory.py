"""What a natural gradient (the stage `trpo`) keeps beside the model, and how large a model leaves room for it.

Memory by part at the worst moment of each phase of a step.

A model in training with Adam in mixed precision holds, per parameter, 2 bytes of weights, 4 of master weights, 8 of moments and
2 of gradients: 16 (Rajbhandari et al. 2020, section 3.1, with bfloat16 for float16). Here gradients are summed over packs in
float32, which makes 18; and PPO's critic is such a model of its own.

Activations are what the backward pass needs of a decoder layer, per token: see ``layer_bytes``. With checkpointing a layer
keeps its input, and one layer at a time is computed again.

Legend: as in shapes.py; ``b`` bytes of the dtype, ``N`` tokens of a pack, ``M`` predicted ones, ``S`` slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import ceil

from oncurve.model_families import FUSED_FAMILIES
from oncurve.plan.job import Job
from oncurve.plan.model_shape import ModelShape

VECTOR_BYTES = 44
"""Per trained parameter: gradient, the five vectors of conjugate gradient, start and step of the search, two derivatives and
one on its way, each in float32."""
TABLES = 8
"""Float32 tables of [tokens, vocabulary] that a second derivative keeps."""


def table_bytes(tokens: int, vocabulary: int, fisher_share: float) -> int:
    """Every token's distribution before the step, and the second derivative's tables of the tokens that it is measured on."""
    return 4 * vocabulary * (tokens + TABLES * ceil(fisher_share * tokens))


def parameters_with_room(memory: int, tables: int) -> int:
    """How many trained parameters so much memory has room for, beside the model itself."""
    return max(0, (memory - tables) // VECTOR_BYTES)


PARTS = (
    "weights", "adapter", "master weights", "moments", "gradients", "activations", "lm head", "kv pool", "sampling",
    "reference", "reward model", "critic", "cuda context",
)  # fmt: skip
"""In the order of the bars: what stays first, what comes and goes after."""

CUDA_CONTEXT = 600 << 20
"""The driver's context and libraries' workspaces, outside what torch counts as its own."""
RESERVE = 0.03
"""Share of the device left free: fragments between blocks, and what other programs take."""
PAGE_GPU, PAGE_CPU = 512, 64
"""Keys lie in pages of so many positions."""
ADAPTERS = 7
"""Linear layers of a decoder layer that an adapter has by default: all."""
SPARE = 0.9
"""Share of the free memory that activations may take where checkpointing is chosen by it."""
HEAD_GPU = 132 * 16 * 151_936
"""Logits of a chunk of the learner's LM head on a GPU, at least 1024 rows; on a CPU, HEAD_CPU."""
HEAD_CPU = 1 << 22
HEAD_CPU_BYTES = 20
"""On a CPU, bytes of each logit: itself, log-prob, probability, gradient, and one more in passing."""
GRADIENT_BYTES = 4
"""Sums of gradients over packs, in float32."""
SAMPLED_LOGIT_BYTES_CPU = 24
"""On a CPU, bytes of each logit of a decode step: itself, log-prob, probability, their float64 running sum, and in passing."""
INT8_MOMENT_BYTES = 2 * (1 + 4 / 128)
"""Two moments of one byte, with a float32 scale for each block of 128."""

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


def memory_limit(job: Job) -> int:
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
        "gradients": _gradients(job.trained, job),
        "sampling": _sampling(job) if job.does.samples else 0,
        "reference": b * shape.parameters / _full(job) if job.holds_reference and not job.reference_on_cpu else 0,
        "reward model": b * job.reward_model.parameters if job.reward_model else 0,
        "critic": critic_bytes(critic, job) if critic else 0,
        "cuda context": 0 if job.gpu.is_cpu else CUDA_CONTEXT,
    }


def _full(job: Job) -> int:
    return job.gpus if job.sharding == "full" else 1


def _split(job: Job) -> int:
    return 1 if job.sharding == "none" else job.gpus


def _weights(shape: ModelShape, job: Job) -> float:
    """Weights of a model, linear layers quantised where asked; fully sharded, a share and two layers gathered at a time."""
    whole: float = job.dtype_bytes * shape.parameters
    if job.quantise is not None:
        whole -= (job.dtype_bytes - QUANTISED_BYTES[job.quantise]) * shape.multiplied_in_all
    return whole if _full(job) == 1 else whole / job.gpus + 2 * job.dtype_bytes * shape.layer_parameters / job.tensor


def _gathered(job: Job) -> float:
    """Weights that were shared out, brought together for sampling: beside a rank's own share of them; or both ends alone.
    Where layers are split, the rank's part of each is there too."""
    if _full(job) == 1:
        return 0
    shape = job.shape
    layers = shape.layers * shape.layer_parameters
    part = layers / job.tensor if job.tensor > 1 else 0
    return job.dtype_bytes * (shape.parameters + part if job.gather else shape.parameters - layers)


def _state(trained: int, job: Job) -> dict[str, float]:
    """Master weights and moments of the parameters that move."""
    if job.does.curvature:  # vectors in the moments' place
        return {"moments": (VECTOR_BYTES - GRADIENT_BYTES) * trained / _split(job)}
    if job.optimiser_on_cpu:
        return {}
    per = 8 if job.moments == "float32" else INT8_MOMENT_BYTES
    return {"master weights": _masters(trained, job), "moments": per * trained / _split(job)}


def _masters(trained: int, job: Job) -> float:
    """Float32 copies, where the weights themselves are of lower precision."""
    return 0 if job.precision == "float32" else 4 * trained / _split(job)


def _gradients(trained: int, job: Job) -> float:
    """Kept from step to step, like all of the optimiser's state. Ranks share them out only with the weights."""
    return GRADIENT_BYTES * trained / _full(job)


def _trained(shape: ModelShape, job: Job) -> int:
    return shape.parameters if job.lora_rank is None else shape.adapter_parameters(job.lora_rank)


def critic_bytes(critic: ModelShape, job: Job) -> float:
    """A critic in training: its weights, and master weights, moments and gradients of what it trains."""
    trained = _trained(critic, job)
    extra = 0 if job.lora_rank is None else job.dtype_bytes * trained
    return _weights(critic, job) + extra + sum(_state(trained, job).values()) + _gradients(trained, job)


def _host(job: Job) -> int:
    """What the job puts into the CPU's memory."""
    per = 4 + (8 if job.moments == "float32" else INT8_MOMENT_BYTES)
    optimiser = per * job.trained / _split(job) if job.optimiser_on_cpu else 0
    # For the reference's pass the policy's weights wait there too: the two change places.
    reference = 2 * job.dtype_bytes * job.shape.parameters if job.holds_reference and job.reference_on_cpu else 0
    return math.ceil(optimiser + reference)


def _phases(job: Job) -> dict[str, dict[str, float]]:
    """What each phase adds to what stands."""
    does = job.does
    phases: dict[str, dict[str, float]] = {}
    if does.samples:
        phases["sample"] = {"kv pool": kv_pool(job), "weights": _weights(job.shape, job) + _gathered(job)}
    if job.reward_model:
        phases["score"] = {"activations": forward_bytes(job.reward_model, job)}
    if job.has_reference:
        phases["reference"] = {"activations": forward_bytes(job.shape, job), "lm head": _head_chunk(job, backward=False)}
    phases["update"] = {
        "activations": activation_bytes(job.shape, job),
        "lm head": curvature_tables(job) if does.curvature else _head_chunk(job, backward=True),
    }
    critic = job.critic_shape
    if critic:
        held = critic_bytes(critic, job)
        phases["critic update"] = {"activations": activation_bytes(critic, job), "critic": held + _passing(critic, job)}
    phases["optimiser"] = (
        {} if uses_fused_kernels(job.shape, job) else {"gradients": _gradients(job.trained, job) + _absorbed(job.trained, job)}
    )
    if critic:
        phases["optimiser"]["critic"] = held + (0 if uses_fused_kernels(critic, job) else _absorbed(_trained(critic, job), job))
    return phases


def curvature_tables(job: Job) -> int:
    """Whole distributions of a step's tokens, where a natural gradient is solved for."""
    return table_bytes(job.rows * job.new_tokens, job.shape.vocabulary, job.fisher_share)


def _passing(critic: ModelShape, job: Job) -> float:
    """Gradients in the weights' own precision, as autograd has them between packs; in float32 they are the sums themselves, and
    our own kernels add to the sums."""
    return (
        0
        if job.precision == "float32" or uses_fused_kernels(critic, job)
        else job.dtype_bytes * _trained(critic, job) / _full(job)
    )


def _absorbed(trained: int, job: Job) -> float:
    """Autograd's gradients on their way into the sums: themselves, and once more in float32."""
    return 0 if job.precision == "float32" else (job.dtype_bytes + 4) * trained / _full(job)


def kv_pool(job: Job) -> float:
    """Keys and values in pages: all that the step could use, or the share of the free memory that the pool may take.

    A completion with its prompt is the least: less would not sample at all.
    """
    wanted = job.rank_prompts * page_bytes(job, job.prompt_tokens) + _slots(job) * page_bytes(job, job.new_tokens)
    if job.gpu.is_cpu:
        return wanted
    free = job.gpu.memory - sum(_standing(job).values()) - _gathered(job)
    least = page_bytes(job, job.prompt_tokens) + page_bytes(job, job.new_tokens)
    if free <= least:  # it does not fit: told with all that it wants
        return wanted
    return max(min(wanted, job.pool_share * free), least)


def page_bytes(job: Job, tokens: int) -> float:
    """Keys and values of a stretch of tokens, in whole pages."""
    page = PAGE_CPU if job.gpu.is_cpu else PAGE_GPU
    return math.ceil(tokens / page) * page * job.shape.kv_bytes(job.dtype_bytes)


def slots_in_flight(job: Job) -> int:
    """Completions decoded at once: as many as there are slots, and as the pool has room for beside the prompts."""
    room = kv_pool(job) - job.rank_prompts * page_bytes(job, job.prompt_tokens)
    return max(1, min(_slots(job), int(room / page_bytes(job, job.new_tokens))))


def _slots(job: Job) -> int:
    return min(job.rows, job.slots)


def _sampling(job: Job) -> float:
    """A decode step's logits and, on a GPU, the parts of its attention page by page; captured graphs keep both."""
    S, shape = _slots(job), job.shape
    if job.gpu.is_cpu:
        return S * shape.vocabulary * SAMPLED_LOGIT_BYTES_CPU
    pages = math.ceil(job.prompt_tokens / PAGE_GPU) + math.ceil(job.new_tokens / PAGE_GPU)
    return 4 * S * (shape.vocabulary + pages * shape.q_width)


def _head_chunk(job: Job, *, backward: bool) -> float:
    """Logits of one chunk in float32, and backward their gradient in the weights' precision."""
    V = job.shape.vocabulary
    if job.gpu.is_cpu:
        return min(max(HEAD_CPU // V, 1), job.pack_predicted) * V * HEAD_CPU_BYTES
    rows = min(max(1024, HEAD_GPU // V // 64 * 64), job.pack_predicted)
    return rows * V * (4 + (job.dtype_bytes if backward and job.dtype_bytes < 4 else 0))


def uses_fused_kernels(shape: ModelShape, job: Job) -> bool:
    """Whether the learner's own kernels run the layers: on a GPU, for plain layers of the Llama family, with plain LoRA or
    without, but not beside quantised weights."""
    plain = shape.family in FUSED_FAMILIES and not shape.mlp_bias and not shape.experts
    return plain and job.quantise is None and not job.gpu.is_cpu and job.sharding != "full"


def layer_bytes(shape: ModelShape, job: Job, parts: int = 1) -> int:
    """What the backward pass needs of one layer, per token; of what lies between its split weights, one of so many ``parts``.

    Where the learner's own kernels run it: two residual sums, the joint product of q, k and v, attention's output and
    log-sum-exp, the joint product of gate and up, and x Aᵀ of every adapter. Where autograd does: a norm keeps its input in
    float32, what it normalised (for its own weight's sake, if that is trained) and its output, which the products share;
    attention keeps q, k, v, its output and log-sum-exp, norms over heads what norms keep; the MLP keeps gate, silu(gate), up
    and their product.
    """
    b, D, F = job.dtype_bytes, shape.width, shape.mlp_width * max(shape.experts_active, 1)
    q, kv = shape.q_width, shape.kv_width
    if uses_fused_kernels(shape, job):
        return b * (2 * D + 2 * q + 2 * kv + 2 * F + ADAPTERS * (job.lora_rank or 0)) + 4 * shape.heads
    normed = 4 + (b if job.lora_rank is None else 0)
    heads = normed * (q + kv) if shape.kind.head_norm or shape.kind.wide_norm else 0
    split = heads + b * (2 * q + 2 * kv) + 4 * shape.heads + 4 * b * F
    return shape.kind.norms * (normed + b) * D + split // parts


def activation_bytes(shape: ModelShape, job: Job) -> float:
    """Activations of a pack at the worst moment of its backward pass, gradients in flight included."""
    layer, again = layer_bytes(shape, job, job.tensor), layers_again(shape, job)
    kept = (shape.layers - again) * layer + again * job.dtype_bytes * shape.width + (layer if again else 0)
    return _around_layers(shape, job) + job.pack_tokens * min(kept, shape.layers * layer)


def _around_layers(shape: ModelShape, job: Job) -> float:
    """Both ends of the model, and one layer's gradients on their way."""
    b, N, D = job.dtype_bytes, job.pack_tokens, shape.width
    F = shape.mlp_width * max(shape.experts_active, 1)
    return 3 * N * b * D + 2 * job.pack_predicted * b * D + N * b * (4 * F + 3 * D)


def layers_again(shape: ModelShape, job: Job) -> int:
    """Layers whose activations are computed again: all, none, or the fewest that fit what the device has left."""
    if job.checkpointing != "auto" or job.gpu.is_cpu:
        return shape.layers if job.checkpointing == "on" else 0
    around = sum(_standing(job).values()) + _around_layers(shape, job) + _head_chunk(job, backward=True)
    free = SPARE * max(0.0, job.gpu.memory - around)
    each, least = job.pack_tokens * layer_bytes(shape, job, job.tensor), job.pack_tokens * job.dtype_bytes * shape.width
    over = shape.layers * each - free
    return 0 if over <= 0 else min(shape.layers, math.ceil(over / (each - least)))


def forward_bytes(shape: ModelShape, job: Job) -> float:
    """A pass without gradient: one layer's tensors at a time."""
    b, D = job.dtype_bytes, shape.width
    F = shape.mlp_width * max(shape.experts_active, 1)
    return job.pack_tokens * b * (3 * D + max(3 * F, 3 * (shape.q_width + shape.kv_width))) + job.pack_predicted * b * D
