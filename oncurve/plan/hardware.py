"""What of a device's rates is reached: the one table of efficiencies, with where each number comes from.

`REACHED` and the H200 belong together: about 790 of 989 TFLOP/s and 4.3 of 4.8 TB/s were measured there with large matrices and
copies. The other shares are of those reachable rates, and of the work as this learner and this engine do it;
`bench/plan_check.py` prints planned beside measured.

GPUs by name: memory, matrix rate, bandwidth, and the links between them.

Memory is what the driver reports, in GiB; rates are the makers' figures for dense bfloat16 (float16 on a T4, which has no
bfloat16). What of them is reached in practice is in `efficiency.py`.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

from oncurve.errors import RecipeError
from oncurve.plan.model_table import nearest


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a device's rates, and the seconds that no rate explains."""

    matrix_rate: float
    """Of the maker's matrix rate, with large square matrices."""
    bandwidth: float
    """Of the maker's memory bandwidth, with long copies."""
    products: float
    """Of the reachable matrix rate, in the learner's products over packed tokens."""
    attention: float
    """Of the reachable matrix rate, in the learner's attention, whose parts are small."""
    traffic: float
    """Of the reachable bandwidth, in norms, rotary embeddings and gated units, each a kernel of its own."""
    decode: float
    """Of the reachable bandwidth, in a decode step that reads weights, keys and values once."""
    optimiser: float
    """Of the reachable bandwidth, in the optimiser's pass over its state."""
    decode_layer_seconds: float
    """A layer's fixed part of a decode step: kernels too small to fill the device, one after the other."""
    decode_module_seconds: float
    """The same where transformers' own modules run the layer: other families, and adapters beside quantised weights."""
    decode_adapter_seconds: float
    """What LoRA adds to a layer where the engine's own kernels run it: four launches, and products that begin late."""
    decode_step_seconds: float
    """Sampling, bookkeeping and the rest of a decode step that does not depend on the model's depth."""
    layer_seconds: float
    """A layer's fixed part of a forward pass in the learner, twice that backward: the launch of its kernels."""
    step_seconds: float
    """What a step costs apart from its tokens: the queue, packing, metrics."""
    completion_seconds: float
    """Decoding a completion's text, scoring it by rules, recording it."""
    host_link: float
    """Bytes per second between the device and the CPU's memory, pinned."""
    host_adam: float
    """Bytes per second of an Adam step on the CPU."""
    network: float
    """Of the link between GPUs, in reductions of gradients."""


GPU = Efficiency(
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
# Calibrated by bench/results/step_cpu.json: a tiny model through the compiled functions, on two cores. What lies between
# products stays in caches there, which are faster than the memory that shares are given of.
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
    """One device. Rates are per second; ``link`` is bytes per second from one GPU to its neighbours in the same machine.
    ``float32`` is the rate of products that are really in float32: weights of that type are not rounded to be faster."""

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
"""Float32 of one present-day core (two products of 8 and sums in a cycle, at 3 GHz), and a small machine's memory bandwidth."""


def this_cpu(threads: int | None = None) -> Gpu:
    """The machine's own processor and memory; ``threads`` of it, where a recipe says how many."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = min(threads or math.inf, os.cpu_count() or 1)
    rate = CPU_CORE_FLOPS * cores
    return Gpu(CPU, memory, rate, rate, CPU_BANDWIDTH, CPU_BANDWIDTH, is_cpu=True)


def find_gpu(name: str) -> Gpu:
    """By the table's name, however it is written, or by what a driver calls the device (`NVIDIA H100 80GB HBM3`)."""
    if name.lower() == CPU:
        return this_cpu()
    gpu = gpu_of_driver(name)
    if gpu is None:
        raise RecipeError(
            "--gpu",
            name,
            because=f"the GPUs known are {', '.join(GPUS)}, and cpu",
            fix=f"name {' or '.join(nearest(name, GPUS, 2))}, or one with the same memory",
        )
    return gpu


def gpu_of_driver(name: str, memory: int | None = None) -> Gpu | None:
    """The table's entry for a name; where it fits several (A100), the one whose memory is nearest, else the smallest."""
    said = _letters(name)
    found = [gpu for key, gpu in GPUS.items() if _letters(key) == said]
    if not found:
        found = [
            gpu
            for key, gpu in GPUS.items()
            if re.search(rf"(^|[^a-z0-9]){key.split('-')[0].lower()}([^a-z0-9]|$)", spaced(name))
        ]
    size = re.search(r"(\d+)\s*gb", name.lower())
    wanted = memory or (int(size[1]) * GIB if size else 0)
    return min(found, key=lambda gpu: abs(gpu.memory - wanted), default=None)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia", "").replace("geforce", "").replace("amd", ""))


def spaced(name: str) -> str:
    """A driver's name with the maker's prefixes joined as the table has them: `GeForce RTX 4090` gives `rtx4090`."""
    return re.sub(r"rtx (\d)", r"rtx\1", name.lower())
