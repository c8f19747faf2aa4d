"""Seconds of a step by phase: its FLOPs and bytes divided by the device's rates.

A token costs 2 FLOPs per weight that it is multiplied with in a forward pass and 4 in a backward pass (2 if weights are frozen,
as with LoRA); checkpointing adds a forward pass. Attention costs 4·H·d FLOPs per token and key. A decode step reads weights and
KV cache once. The fraction of the rates that is reached is in hardware.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from oncurve.plan import hardware
from oncurve.plan.hardware import Efficiency, Gpu
from oncurve.plan.job import Job
from oncurve.plan.memory import checkpointed_layers, kv_bytes, layer_bytes, slots_in_flight, uses_fused_kernels
from oncurve.plan.model_shape import ModelShape

MEMORY_PASSES = {"fused": (1.7, 3.1), "modules": (7.5, 12.5)}
"""How often a layer's saved activations are read or written between its matrix products, (forward, backward). Counted kernel by
kernel for the fused kernels; measured by bench/plan_check.py for transformers' modules, whose every small operation reads and
writes."""
ADAPTER_FACTOR = 3.0
"""Factor on the bytes that LoRA moves in the fused kernels. Calibrated by one measurement (bench/results/step.json), in which
its kernels still loaded two bytes at a time."""
ADAM_BYTES = 46
"""Bytes moved per trained parameter in an update: gradients converted and their norm measured; masters, moments and weights
read and written."""
CONJUGATE_STEPS = 10
"""Fisher products of a natural gradient, each about as expensive as an update's passes."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of a step by phase."""

    phases: dict[str, float]
    samples: int

    @property
    def step(self) -> float:
        return sum(self.phases.values())

    @property
    def samples_per_day(self) -> float:
        return 86400 / self.step * self.samples


@dataclass(frozen=True, slots=True)
class Rates:
    """A device's achievable rates."""

    gpu: Gpu
    precision: str = "bfloat16"

    @property
    def of(self) -> Efficiency:
        return hardware.CPU_EFFICIENCY if self.gpu.is_cpu else hardware.GPU_EFFICIENCY

    @property
    def flops(self) -> float:
        return (self.gpu.float32 if self.precision == "float32" else self.gpu.flops) * self.of.matrix_rate

    @property
    def bytes(self) -> float:
        return self.gpu.bandwidth * self.of.bandwidth


def seconds_of(job: Job) -> Seconds:
    """Every phase of the job's step."""
    rates, does = Rates(job.gpu, job.precision), job.does
    phases: dict[str, float] = {}
    if does.samples:
        phases["sample"] = sample_seconds(job, rates)
        phases["score"] = job.rows * rates.of.completion_seconds
    if job.reward_model:
        phases["score"] += pass_seconds(job.reward_model, job, rates, backward=False)
    if job.has_reference:
        swaps = job.reference_on_cpu and job.holds_reference  # three transfers: policy and reference are swapped
        moved = 3 * job.dtype_bytes * job.shape.parameters / rates.of.host_link if swaps else 0
        phases["reference"] = pass_seconds(job.shape, job, rates, backward=False) + moved
    if job.teacher:
        moved = job.dtype_bytes * job.teacher.parameters / rates.of.host_link if job.teacher_on_cpu else 0
        phases["teacher"] = pass_seconds(job.teacher, job, rates, backward=False) + moved
    phases["update"] = _update(job, rates)
    critic = job.critic_shape
    if critic:
        update = pass_seconds(critic, job, rates, backward=True, head=False)
        phases["critic"] = pass_seconds(critic, job, rates, backward=False, head=False) + job.updates * update
    phases["optimiser"] = _optimiser(job, rates)
    phases["between GPUs"] = _communication(job, rates)
    phases["rest"] = rates.of.step_seconds
    return Seconds({name: value for name, value in phases.items() if value > 0}, job.samples)


def _update(job: Job, rates: Rates) -> float:
    old_logps = pass_seconds(job.shape, job, rates, backward=False) if job.minibatches > 1 else 0.0
    passes = job.updates * (1 + (CONJUGATE_STEPS if job.does.curvature else 0))
    return old_logps + passes * pass_seconds(job.shape, job, rates, backward=True)


def pass_seconds(shape: ModelShape, job: Job, rates: Rates, *, backward: bool, head: bool = True) -> float:
    """One pass of a model over a step's tokens, each prompt once; with ``backward``, forward and backward."""
    tokens, frozen = job.step_tokens, job.lora_rank is not None
    recomputed = checkpointed_layers(shape, job) / shape.layers if backward else 0.0
    times = 1.0 + ((1.0 if frozen else 2.0) if backward else 0.0) + recomputed
    products = 2 * shape.multiplied * tokens * times
    if head:
        # The backward pass has one more product if the head itself is trained.
        products += 2 * shape.head_parameters * job.rows * job.mean_tokens * (1 + ((1 if frozen else 2) if backward else 0))
    attention = shape.layers_with_cache * 4 * shape.q_width * _attended_pairs(job) * (1 + (2.5 if backward else 0) + recomputed)
    forward_passes, backward_passes = MEMORY_PASSES["fused" if uses_fused_kernels(shape, job) else "modules"]
    passes = forward_passes * (1 + recomputed) + (backward_passes if backward else 0)
    traffic = shape.layers * tokens * (layer_bytes(shape, job) * passes + _adapter_bytes(shape, job, backward, recomputed))
    of = rates.of
    busy = (
        products / (rates.flops * of.products) + attention / (rates.flops * of.attention) + traffic / (rates.bytes * of.traffic)
    )
    packs = max(float(job.minibatches), tokens / job.tokens_per_pack)
    return max(busy, packs * shape.layers * of.layer_seconds * (3 if backward else 1))


def _adapter_bytes(shape: ModelShape, job: Job, backward: bool, recomputed: float) -> float:
    """Bytes that LoRA moves in one layer, per token, in the fused kernels: the outputs of the matrix products are read and
    written once more; in the backward pass their gradients are read twice and their inputs once."""
    if job.lora_rank is None or not uses_fused_kernels(shape, job):
        return 0.0
    D, q, F = shape.width, shape.q_width, shape.mlp_width
    outputs, inputs = q + 2 * shape.kv_width + 2 * F + 2 * D, 2 * D + q + F
    moved = 2 * outputs * (1 + recomputed) + (2 * outputs + inputs + 4 * D if backward else 0)
    return ADAPTER_FACTOR * job.dtype_bytes * moved


def _attended_pairs(job: Job) -> float:
    """Token–key pairs of a step: prompts attend to themselves, completions to their prompt and themselves."""
    P, C = job.prompt_tokens, job.mean_tokens
    return job.rank_prompts * P * P / 2 + job.rows * C * (P + C / 2)


def sample_seconds(job: Job, rates: Rates) -> float:
    """Prefill of each prompt once, then decode steps until the last completion ends."""
    shape, of = job.shape, rates.of
    split = job.gpus if job.sharding == "full" else 1
    prompt = job.rank_prompts * job.prompt_tokens
    prefill = 2 * shape.multiplied * prompt / (rates.flops * of.products)
    passes = MEMORY_PASSES["fused" if uses_fused_kernels(shape, job) else "modules"][0]
    prefill += passes * shape.layers * layer_bytes(shape, job) * prompt / (rates.bytes * of.traffic)
    return prefill / split + decode_steps(job) * decode_seconds(job, rates)


def decode_steps(job: Job) -> float:
    """Decode steps until all completions have ended: slots are refilled, and the last completion runs to its end."""
    slots = slots_in_flight(job)
    return max(job.rows * job.mean_tokens / slots, float(job.new_tokens))


def decode_seconds(job: Job, rates: Rates) -> float:
    """One token for every slot: weights and KV cache read once, recurrent states read and written, and the fixed costs."""
    shape, b, of = job.shape, job.dtype_bytes, rates.of
    slots = slots_in_flight(job)
    cached = min(job.rank_prompts, slots) * job.prompt_tokens + slots * job.mean_tokens / 2
    read = b * (shape.multiplied_in_all + shape.head_parameters) + cached * kv_bytes(job) + slots * shape.vocabulary * 12
    read += 2 * slots * shape.state_bytes(b)
    flops = 2 * slots * (shape.multiplied + shape.head_parameters)
    split = job.gpus if job.sharding == "full" else 1
    busy = max(read / (rates.bytes * of.decode), flops / (rates.flops * of.products)) / split
    layer = of.decode_layer_seconds if uses_fused_kernels(shape, job) or job.gpu.is_cpu else of.decode_module_seconds
    layer += of.decode_adapter_seconds if job.lora_rank is not None and uses_fused_kernels(shape, job) else 0.0
    fetched = 0.0 if job.gather or job.gpus == 1 else b * shape.layers * shape.layer_parameters / (job.gpu.link * of.network)
    return busy + fetched + shape.layers * layer + of.decode_step_seconds


def _optimiser(job: Job, rates: Rates) -> float:
    updates = job.updates * job.minibatches
    critic = job.critic_shape
    trained = float(job.trained)
    if critic:
        trained += critic.parameters if job.lora_rank is None else critic.adapter_parameters(job.lora_rank)
    trained /= 1 if job.sharding == "none" else job.gpus
    if job.optimiser_on_cpu:
        return updates * trained * (2 * job.dtype_bytes / rates.of.host_link + ADAM_BYTES / rates.of.host_adam)
    return updates * trained * ADAM_BYTES / (rates.bytes * rates.of.optimiser)


def _communication(job: Job, rates: Rates) -> float:
    """A ring all-reduce of gradients, 2·(n − 1)/n of their bytes over each link; sharded weights are gathered for each pass."""
    n = job.gpus
    if n == 1:
        return 0.0
    link = job.gpu.link * rates.of.network
    ring = 2 * (n - 1) / n * job.dtype_bytes * job.trained * job.updates * job.minibatches
    passes = {"none": 0, "optimiser": 1, "full": 3 * job.updates * job.minibatches}[job.sharding]
    return (ring + passes * (n - 1) / n * job.dtype_bytes * job.shape.parameters) / link
