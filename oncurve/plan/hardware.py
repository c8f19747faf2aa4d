"""GPUs by name (memory, FLOP/s, bandwidth, links), and the efficiency with which Oncurve uses them.

Memory is what the driver reports, in GiB. Rates are the vendors' figures for dense bfloat16 (float16 on a T4, which has no
bfloat16). `GPU_EFFICIENCY` and `CPU_EFFICIENCY` say which fraction of them is reached in practice. On an H200 about 790 of 989
TFLOP/s and 4.3 of 4.8 TB/s were measured with large matrices and copies. The other fractions are relative to those achievable
rates, for the work that the learner and the engine do; `bench/plan_check.py` compares plans with measurements.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

from oncurve.errors import RecipeError
from oncurve.plan.model_table import closest_names


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of a device's rates, and fixed costs in seconds."""

    matrix_rate: float
    """Fraction of the vendor's matrix rate, with large square matrices."""
    bandwidth: float
    """Fraction of the vendor's memory bandwidth, with large copies."""
    products: float
    """Fraction of the achievable matrix rate, in the learner's matrix products over packed tokens."""
    attention: float
    """Fraction of the achievable matrix rate, in the learner's attention, whose tiles are small."""
    traffic: float
    """Fraction of the achievable bandwidth, in norms, rotary embeddings and SwiGLU, each a separate kernel."""
    decode: float
    """Fraction of the achievable bandwidth, in a decode step that reads weights and KV cache once."""
    optimiser: float
    """Fraction of the achievable bandwidth, in the optimiser's pass over its state."""
    decode_layer_seconds: float
    """Fixed cost of a layer in a decode step: a sequence of kernels too small to fill the device."""
    decode_module_seconds: float
    """The same if transformers' modules run the layer: other families, and adapters on quantised weights."""
    decode_adapter_seconds: float
    """What LoRA adds to a layer in the engine's kernels: four launches, and products that start later."""
    decode_step_seconds: float
    """Fixed cost of a decode step that does not depend on the number of layers, such as token sampling."""
    layer_seconds: float
    """Fixed cost of a layer in the learner's forward pass (launching its kernels); twice that in the backward pass."""
    step_seconds: float
    """Fixed cost of a step: queue, packing, metrics."""
    completion_seconds: float
    """Decoding a completion's text, scoring it by a verifiable reward, recording it."""
    host_link: float
    """Bytes per second between the device and pinned CPU memory."""
    host_adam: float
    """Bytes per second of an Adam step on the CPU."""
    network: float
    """Fraction of the link between GPUs, in all-reduces of gradients."""


GPU_EFFICIENCY = Efficiency(
    matrix_rate=0.80,
    bandwidth=0.90,
    products=0.75,
    attention=0.30,
    traffic=0.75,
    decode=0.75,
    optimiser=0.80,
    decode_layer_seconds=30e-6,
    decode_module_seconds=215e-6,
    decode_adapter_seconds=20e-6,
    decode_step_seconds=150e-6,
    layer_seconds=400e-6,
    step_seconds=0.05,
    completion_seconds=0.2e-3,
    host_link=20e9,
    host_adam=20e9,
    network=0.7,
)
# Calibrated by bench/results/step_cpu.json: a tiny model on the C path, on two cores. Activations between matrix products stay
# in caches there, which are faster than main memory: hence fractions above 1.
CPU_EFFICIENCY = Efficiency(
    matrix_rate=0.8,
    bandwidth=0.8,
    products=0.85,
    attention=0.9,
    traffic=10.0,
    decode=0.7,
    optimiser=1.5,
    decode_layer_seconds=60e-6,
    decode_module_seconds=60e-6,
    decode_adapter_seconds=0.0,
    decode_step_seconds=50e-6,
    layer_seconds=100e-6,
    step_seconds=1e-3,
    completion_seconds=0.05e-3,
    host_link=20e9,
    host_adam=20e9,
    network=0.5,
)


GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. Rates are per second; ``link`` is bytes per second between GPUs of one machine. ``float32`` is the rate
    without TF32: float32 weights are not rounded."""

    name: str
    memory: int
    flops: float
    float32: float
    bandwidth: float
    link: float
    is_cpu: bool = False


def _gpu(name: str, gib: float, tflops: float, float32: float, gbytes: float, link_gbytes: float) -> Gpu:
    return Gpu(name, int(gib * GIB), tflops * 1e12, float32 * 1e12, gbytes * 1e9, link_gbytes * 1e9)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("H100-80GB", 79.6, 989, 67, 3350, 450),
        _gpu("H200", 140.4, 989, 67, 4800, 450),
        _gpu("B200", 179.1, 2250, 75, 8000, 900),
        _gpu("A100-40GB", 39.6, 312, 19.5, 1555, 300),
        _gpu("A100-80GB", 79.6, 312, 19.5, 2039, 300),
        _gpu("L40S", 45.0, 362, 91.6, 864, 32),
        _gpu("RTX4090", 24.0, 165, 82.6, 1008, 32),
        _gpu("RTX3090", 24.0, 71, 35.6, 936, 32),
        _gpu("A10G", 22.5, 70, 31.2, 600, 32),
        _gpu("T4", 15.0, 65, 8.1, 320, 16),
        _gpu("MI300X", 192.0, 1307, 163, 5300, 448),
    )
}
CPU = "cpu"
CPU_CORE_FLOPS, CPU_BANDWIDTH = 100e9, 20e9
"""Float32 FLOP/s of one core (two FMAs of 8 lanes per cycle at 3 GHz), and the memory bandwidth of a small machine."""


def this_cpu(threads: int | None = None) -> Gpu:
    """This machine's CPU and memory; with ``threads``, that number of its cores."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = min(threads or math.inf, os.cpu_count() or 1)
    rate = CPU_CORE_FLOPS * cores
    return Gpu(CPU, memory, rate, rate, CPU_BANDWIDTH, CPU_BANDWIDTH, is_cpu=True)


def find_gpu(name: str) -> Gpu:
    """A GPU by its name in the table, in any spelling, or by the driver's name (`NVIDIA H100 80GB HBM3`)."""
    if name.lower() == CPU:
        return this_cpu()
    gpu = gpu_of_driver(name)
    if gpu is None:
        raise RecipeError(
            "--gpu",
            name,
            because="known GPUs are "
            + ", ".join(f"{gpu.name} ({gpu.memory / GIB:.0f} GiB)" for gpu in GPUS.values())
            + ", and cpu",
            fix=f"use {' or '.join(closest_names(name, GPUS, 2))} if you mean it, else one with the memory of your GPU or less",
        )
    return gpu


def gpu_of_driver(name: str, memory: int | None = None) -> Gpu | None:
    """The table's entry for a driver's name. If several match (A100), the one with the closest memory, else the smallest."""
    normal = _normalised(name)
    matches = [gpu for key, gpu in GPUS.items() if _normalised(key) == normal]
    if not matches:
        matches = [
            gpu
            for key, gpu in GPUS.items()
            if re.search(rf"(^|[^a-z0-9]){key.split('-')[0].lower()}([^a-z0-9]|$)", _without_prefix_space(name))
        ]
    size = re.search(r"(\d+)\s*gb", name.lower())
    target = memory or (int(size[1]) * GIB if size else 0)
    return min(matches, key=lambda gpu: abs(gpu.memory - target), default=None)


def _normalised(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia", "").replace("geforce", "").replace("amd", ""))


def _without_prefix_space(name: str) -> str:
    """A driver's name with RTX and its number joined as in the table: `geforce rtx4090` for `GeForce RTX 4090`."""
    return re.sub(r"rtx (\d)", r"rtx\1", name.lower())
