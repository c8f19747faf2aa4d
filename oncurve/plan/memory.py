"""Peak memory of each phase of a step, by part.

A model in training with Adam in mixed precision holds, per parameter, 2 bytes of weights, 4 of master weights, 8 of moments and
2 of gradients: 16 (Rajbhandari et al. 2020, section 3.1, with bfloat16 for float16). Here gradients are accumulated over packs
in float32, which makes 18. PPO's critic is a second such model. A natural gradient (the stage `trpo`) needs vectors, and tables
of distributions, instead of moments.

Activations are what the backward pass needs of a decoder layer, per token: see ``layer_bytes``. With checkpointing a layer
keeps only its input, and one layer at a time is recomputed.

In formulas, ``b`` is the bytes of the dtype; other letters as in model_shape.py and records.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import ceil

from oncurve.model_families import FUSED_FAMILIES
from oncurve.plan.job import Job
from oncurve.plan.model_shape import ModelShape

VECTOR_BYTES = 44
"""Bytes per trained parameter of a natural gradient: the gradient, five vectors of conjugate gradient, start and step of the
line search, two derivatives and a temporary, each in float32."""
TABLES = 8
"""Float32 tables of [tokens, vocabulary] that the second derivative keeps."""


def fisher_groups(groups: int, share: float) -> list[int]:
    """The indices of the groups on which a natural gradient measures curvature: this share of them, rounded up, evenly spaced.

    Example: ``fisher_groups(5, 0.6)`` is ``[0, 1, 3]``
    """
    return [int(i / share + ROUNDING) for i in range(max(1, ceil(share * groups - ROUNDING)))]


ROUNDING = 1e-9
"""0.1 × 30 groups are 3, and 0.3 / 0.1 is 3, although floats differ in the last bit."""


def table_bytes(groups: int, group_tokens: int, vocabulary: int, fisher_share: float) -> int:
    """Every token's distribution before the step, and the second derivative's tables of the groups with measured curvature."""
    return 4 * vocabulary * group_tokens * (groups + TABLES * len(fisher_groups(groups, fisher_share)))


def parameters_with_room(memory: int, tables: int) -> int:
    """The number of trained parameters for which a natural gradient fits into this memory, besides the model itself."""
    return max(0, (memory - tables) // VECTOR_BYTES)


PARTS = (
    "weights", "adapter", "master weights", "moments", "gradients", "activations", "lm head", "kv pool", "sampling",
    "reference", "teacher", "reward model", "critic", "cuda context",
)  # fmt: skip
"""The parts of the memory, in the order in which bars show them."""

CUDA_CONTEXT = 600 << 20
"""The driver's context and the libraries' workspaces, which torch does not count."""
RESERVE = 0.03
"""Fraction of the device left free, for fragmentation and other programs."""
PAGE_GPU, PAGE_CPU = 512, 64
"""Positions in a page of the KV cache."""
FP8_SCALE_BYTES = 4
"""Bytes of the scale of one key or value in a KV cache of FP8 numbers."""
ADAPTERS = 7
"""Linear layers of a decoder layer that have an adapter by default: all."""
SPARE = 0.9
"""Fraction of the free memory that activations may take with `checkpointing = "auto"`."""
HEAD_GPU = 132 * 16 * 151_936
"""Logits in a chunk of the learner's LM head on a GPU (but at least 1024 tokens), and HEAD_CPU on a CPU."""
HEAD_CPU = 1 << 22
HEAD_CPU_BYTES = 20
"""On a CPU, bytes per logit: the logit, its log-prob, probability and gradient, and a temporary."""
GRADIENT_BYTES = 4
"""Gradients are accumulated in float32."""
SAMPLED_LOGIT_BYTES_CPU = 24
"""On a CPU, bytes per logit of a decode step: logit, log-prob, probability, a float64 cumulative sum, and a temporary."""
INT8_MOMENT_BYTES = 2 * (1 + 4 / 128)
"""Two moments of one byte each, with a float32 scale per block of 128."""

QUANTISED_BYTES = {"nf4": 0.5 + 4 / 64, "int8": 1.0}
"""Bytes of a quantised weight; in 4 bits with a float32 scale per block of 64."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The peak of one phase of a step, in bytes by part."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Memory:
    """The device memory of each phase of a step, and the bytes that the run keeps in CPU memory (``host``)."""

    phases: tuple[Phase, ...]
    host: int

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


def memory_limit(job: Job) -> int:
    """The part of the device's memory that a plan may use."""
    return int(job.gpu.memory * (1 - RESERVE))


def memory_of(job: Job) -> Memory:
    """Every phase of the job's step."""
    resident = _resident(job)
    phases = [Phase(name, _ordered({**resident, **extra})) for name, extra in _phases(job).items()]
    return Memory(tuple(phases), _host(job))


def _ordered(parts: dict[str, float]) -> dict[str, int]:
    return {name: math.ceil(parts[name]) for name in PARTS if parts.get(name)}


def _resident(job: Job) -> dict[str, float]:
    """What is in memory in every phase."""
    b, shape = job.dtype_bytes, job.shape
    critic = job.critic_shape
    return {
        "weights": _weights(shape, job),
        "adapter": b * job.adapters,
        **_state(job.trained, job),
        "gradients": _gradients(job.trained, job),
        "sampling": _sampling(job) if job.does.samples else 0,
        "reference": job.reference_bytes * shape.parameters / _weight_shards(job)
        if job.holds_reference and not job.reference_on_cpu
        else 0,
        "teacher": _teacher(job),
        "reward model": b * job.reward_model.parameters if job.reward_model else 0,
        "critic": critic_bytes(critic, job) if critic else 0,
        "cuda context": 0 if job.gpu.is_cpu else CUDA_CONTEXT,
    }


def _teacher(job: Job) -> float:
    """A teacher's weights, which are not sharded (only its head's if the others are in CPU memory), and the hidden states from
    which it predicts the step's tokens."""
    shape = job.teacher
    if shape is None:
        return 0
    weights = shape.vocabulary * shape.width if job.teacher_on_cpu else shape.parameters
    return job.dtype_bytes * (weights + job.rows * job.new_tokens * shape.width)


def _weight_shards(job: Job) -> int:
    return job.gpus if job.sharding == "full" else 1


def _optimiser_shards(job: Job) -> int:
    return 1 if job.sharding == "none" else job.gpus


def _weights(shape: ModelShape, job: Job) -> float:
    """A model's weights, with quantised linear layers if set. Fully sharded: a shard, and two gathered layers at a time."""
    total: float = job.dtype_bytes * shape.parameters
    if job.quantise is not None:
        total -= (job.dtype_bytes - QUANTISED_BYTES[job.quantise]) * shape.linear_parameters
    return total if _weight_shards(job) == 1 else total / job.gpus + 2 * job.dtype_bytes * shape.layer_parameters / job.tensor


def _gathered_weights(job: Job) -> float:
    """Sharded weights gathered for sampling, in addition to the shard; without `gather` only embedding and head.

    With tensor parallelism the rank's part of each layer is there too.
    """
    if _weight_shards(job) == 1:
        return 0
    shape = job.shape
    layers = shape.layers * shape.layer_parameters
    part = layers / job.tensor if job.tensor > 1 else 0
    return job.dtype_bytes * (shape.parameters + part if job.gather else shape.parameters - layers)


def _state(trained: int, job: Job) -> dict[str, float]:
    """Master weights and moments of the trained parameters."""
    if job.does.curvature:  # vectors instead of moments
        return {"moments": (VECTOR_BYTES - GRADIENT_BYTES) * trained / _optimiser_shards(job)}
    if job.optimiser_on_cpu:
        return {}
    per = 8 if job.moments == "float32" else INT8_MOMENT_BYTES
    return {"master weights": _masters(trained, job), "moments": per * trained / _optimiser_shards(job)}


def _masters(trained: int, job: Job) -> float:
    """Float32 copies, if the weights have lower precision."""
    return 0 if job.precision == "float32" else 4 * trained / _optimiser_shards(job)


def _gradients(trained: int, job: Job) -> float:
    """Kept from step to step, like the optimiser's state; sharded only together with the weights."""
    return GRADIENT_BYTES * trained / _weight_shards(job)


def _trained(shape: ModelShape, job: Job) -> int:
    return shape.parameters if job.lora_rank is None else shape.adapter_parameters(job.lora_rank)


def critic_bytes(critic: ModelShape, job: Job) -> float:
    """A critic in training: its weights, and the master weights, moments and gradients of its trained parameters."""
    trained = _trained(critic, job)
    extra = 0 if job.lora_rank is None else job.dtype_bytes * trained
    return _weights(critic, job) + extra + sum(_state(trained, job).values()) + _gradients(trained, job)


def _host(job: Job) -> int:
    """Bytes in CPU memory."""
    per = 4 + (8 if job.moments == "float32" else INT8_MOMENT_BYTES)
    optimiser = per * job.trained / _optimiser_shards(job) if job.optimiser_on_cpu else 0
    # During the reference's pass the policy's weights are there too: the two are swapped.
    swapped = job.holds_reference and job.reference_on_cpu
    reference = (job.dtype_bytes + job.reference_bytes) * job.shape.parameters if swapped else 0
    teacher = job.dtype_bytes * job.teacher.parameters if job.teacher and job.teacher_on_cpu else 0
    return math.ceil(optimiser + reference + teacher)


def _phases(job: Job) -> dict[str, dict[str, float]]:
    """What each phase adds to the resident parts."""
    does = job.does
    phases: dict[str, dict[str, float]] = {}
    if does.samples:
        phases["sample"] = {"kv pool": kv_pool(job), "weights": _weights(job.shape, job) + _gathered_weights(job)}
    if job.reward_model:
        phases["score"] = {"activations": forward_bytes(job.reward_model, job)}
    if job.has_reference:
        phases["reference"] = {"activations": forward_bytes(job.shape, job), "lm head": _head_chunk(job, backward=False)}
    if job.teacher:
        moved = job.dtype_bytes * job.teacher.parameters if job.teacher_on_cpu else 0
        phases["teacher"] = {"activations": forward_bytes(job.teacher, job), "teacher": _teacher(job) + moved}
    phases["update"] = _update_peak(job)
    critic = job.critic_shape
    if critic:
        resident = critic_bytes(critic, job)
        gradients = _temporary_gradients(critic, job)
        phases["critic update"] = {"activations": activation_bytes(critic, job), "critic": resident + gradients}
    phases["optimiser"] = (
        {}
        if uses_fused_kernels(job.shape, job)
        else {"gradients": _gradients(job.trained, job) + _accumulating(job.trained, job)}
    )
    if critic:
        phases["optimiser"]["critic"] = resident + (
            0 if uses_fused_kernels(critic, job) else _accumulating(_trained(critic, job), job)
        )
    return phases


def _update_peak(job: Job) -> dict[str, float]:
    """The larger of two peaks: the LM head's chunk of logits at the end of the forward pass, or a layer's gradients."""
    if job.does.curvature:
        return {"activations": activation_bytes(job.shape, job), "lm head": curvature_tables(job)}
    saved = _saved_bytes(job.shape, job)
    head = {"activations": saved + _around_head(job.shape, job), "lm head": _head_chunk(job, backward=True)}
    layers = {"activations": saved + _around_layers(job.shape, job)}
    return max(head, layers, key=lambda parts: sum(parts.values()))


def curvature_tables(job: Job) -> int:
    """The distributions of a step's tokens that a natural gradient needs."""
    return table_bytes(job.rank_prompts, job.sequences * job.new_tokens, job.shape.vocabulary, job.fisher_share)


def _temporary_gradients(critic: ModelShape, job: Job) -> float:
    """Autograd's gradients in the weights' precision, before they are accumulated.

    In float32 they are the accumulators themselves, and the fused kernels add to the accumulators directly.
    """
    if job.precision == "float32" or uses_fused_kernels(critic, job):
        return 0
    return job.dtype_bytes * _trained(critic, job) / _weight_shards(job)


def _accumulating(trained: int, job: Job) -> float:
    """Autograd's gradients while they are accumulated: in the weights' precision, and a copy in float32."""
    return 0 if job.precision == "float32" else (job.dtype_bytes + 4) * trained / _weight_shards(job)


def kv_pool(job: Job) -> float:
    """The KV cache in pages: all that the step could use, or at most ``pool_share`` of the free memory."""
    useful, minimum = _useful_kv(job), min_kv_pool(job)
    free = job.gpu.memory - sum(_resident(job).values()) - _gathered_weights(job)
    if job.gpu.is_cpu or free <= minimum:  # it does not fit: the plan then shows all that it could use
        return useful
    return max(min(useful, job.pool_share * free), minimum)


def min_kv_pool(job: Job) -> float:
    """The smallest KV cache: one completion with its prompt. On a CPU the KV cache does not depend on the free memory."""
    return _useful_kv(job) if job.gpu.is_cpu else page_bytes(job, job.prompt_tokens) + page_bytes(job, job.new_tokens)


def _useful_kv(job: Job) -> float:
    """The KV cache with which no completion waits for another."""
    return job.rank_prompts * page_bytes(job, job.prompt_tokens) + _slots(job) * page_bytes(job, job.new_tokens)


def page_bytes(job: Job, tokens: int) -> float:
    """KV cache of a sequence of tokens, in complete pages."""
    page = PAGE_CPU if job.gpu.is_cpu else PAGE_GPU
    return math.ceil(tokens / page) * page * kv_bytes(job)


def kv_bytes(job: Job) -> float:
    """KV cache of one token in all layers. With FP8 on a GPU a number takes a byte, and each key and value a scale."""
    if job.kv_dtype == "fp8" and not job.gpu.is_cpu:
        return job.shape.kv_bytes(1) * (1 + FP8_SCALE_BYTES / job.shape.head_size)
    return job.shape.kv_bytes(job.dtype_bytes)


def slots_in_flight(job: Job) -> int:
    """Completions decoded at once: limited by the slots, and by the room that prompts leave in the KV cache."""
    room, of_completion = kv_pool(job) - job.rank_prompts * page_bytes(job, job.prompt_tokens), page_bytes(job, job.new_tokens)
    return max(1, min(_slots(job), int(room / of_completion))) if of_completion else _slots(job)


def _slots(job: Job) -> int:
    return min(job.rows, job.slots)


def _sampling(job: Job) -> float:
    """A decode step's logits, the states of recurrent layers and, on a GPU, the partial attention results per page; CUDA graphs
    keep all of them allocated."""
    S, shape = _slots(job), job.shape
    states = S * shape.state_bytes(job.dtype_bytes)
    if job.gpu.is_cpu:
        return states + S * shape.vocabulary * SAMPLED_LOGIT_BYTES_CPU
    pages = math.ceil(job.prompt_tokens / PAGE_GPU) + math.ceil(job.new_tokens / PAGE_GPU)
    return states + 4 * S * (shape.vocabulary + pages * shape.q_width)


def _head_chunk(job: Job, *, backward: bool) -> float:
    """Logits of one chunk in float32, and in the backward pass their gradient in the weights' precision."""
    V = job.shape.vocabulary
    if job.gpu.is_cpu:
        return min(max(HEAD_CPU // V, 1), job.pack_predicted) * V * HEAD_CPU_BYTES
    tokens = min(max(1024, HEAD_GPU // V // 64 * 64), job.pack_predicted)
    return tokens * V * (4 + (job.dtype_bytes if backward and job.dtype_bytes < 4 else 0))


def uses_fused_kernels(shape: ModelShape, job: Job) -> bool:
    """Whether the fused kernels run the layers: on a GPU, for plain layers of the Llama family, with or without plain LoRA, but
    not with quantised or fully sharded weights."""
    is_plain = shape.family in FUSED_FAMILIES and not shape.mlp_bias and not shape.experts
    return is_plain and job.quantise is None and not job.gpu.is_cpu and job.sharding != "full"


def layer_bytes(shape: ModelShape, job: Job, parts: int = 1) -> int:
    """Bytes that the backward pass needs of one layer, per token. Tensor parallelism divides inner activations by ``parts``.

    With the fused kernels: two residual sums, the joint product of q, k and v, attention's output and log-sum-exp, the joint
    product of gate and up, and x Aᵀ of every adapter. With autograd: a norm keeps its input in float32, the normalised input
    (if its weight is trained) and its output, which the following products share; attention keeps q, k, v, its output and
    log-sum-exp; norms over heads keep what norms keep; the MLP keeps gate, silu(gate), up and their product.
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
    """Peak activations of a pack in its backward pass, with the gradients of one layer."""
    return _saved_bytes(shape, job) + _around_layers(shape, job)


def _saved_bytes(shape: ModelShape, job: Job) -> float:
    """What all layers save of a pack for its backward pass."""
    layer, recomputed = layer_bytes(shape, job, job.tensor), checkpointed_layers(shape, job)
    inputs = recomputed * job.dtype_bytes * shape.width
    return job.pack_tokens * min((shape.layers - recomputed) * layer + inputs, shape.layers * layer)


def _around_head(shape: ModelShape, job: Job) -> float:
    """Bytes of the last hidden states and their norm, and of the hidden states of predicted tokens and their gradient."""
    return job.dtype_bytes * shape.width * (3 * job.pack_tokens + 2 * job.pack_predicted)


def _around_layers(shape: ModelShape, job: Job) -> float:
    """One layer's gradients, and its activations if they are recomputed."""
    F = shape.mlp_width * max(shape.experts_active, 1)
    recomputed = layer_bytes(shape, job, job.tensor) if checkpointed_layers(shape, job) else 0
    return job.pack_tokens * (job.dtype_bytes * (4 * F + 4 * shape.width) + recomputed)


def checkpointed_layers(shape: ModelShape, job: Job) -> int:
    """Checkpointed layers: all, none, or with `auto` as few as fit into the free memory."""
    if job.checkpointing != "auto" or job.gpu.is_cpu:
        return shape.layers if job.checkpointing == "on" else 0
    # As the learner counts: embedding and head, one layer's gradients, and a chunk of logits.
    F = shape.mlp_width * max(shape.experts_active, 1)
    around = job.pack_tokens * job.dtype_bytes * (4 * F + 8 * shape.width) + _head_chunk(job, backward=True)
    free = SPARE * max(0.0, job.gpu.memory - sum(_resident(job).values()) - around)
    saved, inputs = job.pack_tokens * layer_bytes(shape, job, job.tensor), job.pack_tokens * job.dtype_bytes * shape.width
    excess = shape.layers * saved - free
    # A checkpointed layer is recomputed in the backward pass: room for one layer's activations on top.
    return 0 if excess <= 0 else min(shape.layers, math.ceil((excess + saved) / (saved - inputs)))


def forward_bytes(shape: ModelShape, job: Job) -> float:
    """A forward pass without gradient: one layer's tensors at a time."""
    b, D = job.dtype_bytes, shape.width
    F = shape.mlp_width * max(shape.experts_active, 1)
    return job.pack_tokens * b * (3 * D + max(3 * F, 3 * (shape.q_width + shape.kv_width))) + job.pack_predicted * b * D
