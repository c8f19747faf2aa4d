"""What of a device's rates is reached: the one table of efficiencies, with where each number comes from.

`REACHED` and the H200 belong together: about 790 of 989 TFLOP/s and 4.3 of 4.8 TB/s were measured there with large matrices and
copies. The other shares are of those reachable rates, and of the work as this learner and this engine do it;
`bench/plan_check.py` prints planned beside measured.
"""

from __future__ import annotations

from dataclasses import dataclass


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
CPU = Efficiency(
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
