"""Model families with fast paths of our own. Imports nothing, so the planner can read it without torch."""

from __future__ import annotations

FUSED_FAMILIES = {"llama": "LlamaModel", "mistral": "MistralModel", "qwen2": "Qwen2Model", "qwen3": "Qwen3Model"}
"""The Llama family: `model_type` of a config and the class of its backbone in transformers.

`oncurve.models.llama` runs these by fused modules and C functions on a CPU and by Triton kernels on a GPU, and the planner
counts their activations accordingly.
"""
