"""Compile every kernel launch of a training step for a GPU that need not be there, and report the shared memory of each.

python -m tests.kernels.compile_for "RTX 4090, L4"       a name of gpus.py; writes a line of JSON for each kernel

The launches are those of the product's own code, with tensors on a CPU: packs through learner and LM head, decode steps of
several kinds of models, and the matrix products of decoding. A launch is compiled with all its options but does not run, so
every result is 0.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is defined
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import oncurve.kernels
from oncurve.engines.base import SampleKey
from oncurve.engines.cuda import graph_decoder
from oncurve.engines.cuda.graph_decoder import GraphDecoder
from oncurve.engines.cuda.per_slot import PerSlotGraphDecoder
from oncurve.engines.native.turns import build_requests
from oncurve.kernels import decode_matmul, launch
from oncurve.kernels.decode_attention import LaunchShape
from oncurve.kernels.delta_rule import delta_rule_step
from oncurve.kernels.launch import Gpu
from oncurve.models.gradient_buffers import GradAccumulator
from oncurve.models.heads.lm_head import token_logps
from oncurve.models.llama.block_description import DecoderDescription, describe
from oncurve.models.llama.cuda_backbone import CudaBackbone
from oncurve.models.llama.fused import FusedWeights
from oncurve.models.packing import build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, KVDtype, Sampling
from tests.engines.native.plain import prompt_of
from tests.kernels.gpus import GPUS
from tests.kernels.test_learner_kernels import on_gpu, pack_of
from tests.models.architectures import adapted, make_model, tokenizer

Model = tuple[str, dict[str, int]]
SMALL_HEADS: Model = "qwen2", {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}
COMMON_HEADS: Model = "qwen3", {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
LARGE_HEADS: Model = "gemma2", {"hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
WIDE_NORMS: Model = "olmo2", {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16}
"""Families with the sizes on which tiles depend: Qwen2.5 0.5B, Qwen3 4B, Gemma 2 2B with its windows and soft caps, and OLMo 2
1B, whose norms of q and k are over all heads."""
SAMPLING = Sampling(max_new_tokens=400)


class CompiledFor:
    """Triton's driver for a GPU that is not there, and a record of what was compiled."""

    def __init__(self, gpu: Gpu) -> None:
        major, minor = gpu.capability
        self.target, self.what = GPUTarget("cuda", 10 * major + minor, 32), ""
        self.known: set[str] = set()

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def compile(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """In place of a launch."""
        compiled = RUN(kernel, *args, grid=grid, warmup=True, **options)
        if compiled.hash not in self.known:
            self.known.add(compiled.hash)
            row = {"kernel": kernel.__name__, "launch": self.what, "shared": compiled.metadata.shared}
            print(json.dumps(row), flush=True)
        return compiled


RUN = JITFunction.run


def build(model: Model, dtype: torch.dtype, **adapter: Any) -> Policy:
    """The policy as on a GPU: with the fast learner if the family has one, else with the fused decode step alone."""
    name, sizes = model
    plain = make_model(name, vocab_size=16384, intermediate_size=1024, **sizes)
    policy = Policy((adapted(plain, **adapter) if adapter else plain).to(dtype), tokenizer())
    policy.fast_backbone, described = None, describe(policy.model)
    assert isinstance(described, DecoderDescription)
    if CudaBackbone.supports(policy.model, described):
        policy.fast_backbone = CudaBackbone(policy.model, described)
    else:
        policy.fused_weights = FusedWeights(described)
    return policy


def learn(policy: Policy, keys: int) -> None:
    """Forward and backward of a pack, through the fast path if the model has one."""
    bundles = pack_of([(40, [30, 7]), (3, [12])])
    pack, attention = build_pack(bundles, policy.device), on_gpu(bundles)
    attention.mean_keys, attention.max_length = keys, 1 << 20
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    with policy.accumulate_into(None if policy.fast_backbone is None else GradAccumulator(trained)):
        hidden = policy.hidden(pack.input_ids, pack.position_ids, attention)[0]
        with mock.patch.object(oncurve.kernels, "can_run_kernels", return_value=True):
            logps, entropies = token_logps(policy.head, hidden, torch.zeros(len(hidden), dtype=torch.long))
        (logps.sum() + entropies.sum()).backward()  # type: ignore[no-untyped-call]


@torch.inference_mode()
def decode(policy: Policy, shape: LaunchShape, width: int = 1, kv_dtype: KVDtype = "auto") -> None:
    """A step with 8 completions of a prompt."""
    decoder = GraphDecoder.build(policy, Engine(kv_dtype=kv_dtype))
    assert decoder is not None
    requests = build_requests(policy, [prompt_of(9)], 8, SAMPLING, SampleKey(0, 1))
    decoder.prepare(requests, 16, width)
    decoder._step(shape, SAMPLING)


@torch.inference_mode()
def serve(policy: Policy, width: int) -> None:
    decoder = PerSlotGraphDecoder.build(policy, Engine())
    assert decoder is not None
    decoder.open(8, 64, width)
    decoder._step(LaunchShape(2, 1, 1), SAMPLING)


def multiply(gpu: Gpu, dtype: torch.dtype) -> None:
    """The matrix products of decoding, with the tiles that this GPU gets for a matrix that it would fill."""
    for rows, gated in ((256, False), (256, True), (64, False)):
        for outputs in range(64, 64 * 400, 64):
            x = torch.zeros(rows, 1024, dtype=dtype)
            block = decode_matmul.block_for(x, outputs, gated=gated)
            if block is not None:
                weight = torch.zeros(outputs * (1 + gated), 1024, dtype=dtype)
                if gated:
                    decode_matmul.gated_product(x, weight, block)
                else:
                    decode_matmul.product(x, weight, None, block)
                break


def launches(gpu: Gpu, record: CompiledFor) -> None:
    low = torch.bfloat16 if gpu.capability >= (8, 0) else torch.float16
    many = 4000 if gpu.is_hopper and gpu.has_room else 1000
    """Keys that a query attends to. Each order of magnitude has its own tiles, the largest only with TMA."""
    cases: list[tuple[Model, torch.dtype, Sequence[int], Sequence[int]]] = [
        (SMALL_HEADS, low, (1000,), ()),
        (COMMON_HEADS, low, sorted({100, 1000, many}), (1, 8)),
        (COMMON_HEADS, torch.float32, (100,), (1,)),
        (WIDE_NORMS, low, (), (1,)),
    ]
    if gpu.shared_memory < 96 << 10:  # a T4 has no room for float32, nor for 8 rows
        cases.append((LARGE_HEADS, low, (100,), (1,)))
    else:
        cases += [(LARGE_HEADS, dtype, (100,), (8,)) for dtype in (low, torch.float32)]
    for model, dtype, keys, wide in cases:
        policy, what = build(model, dtype), f"{model[0]}, {dtype}"
        for count in keys:
            record.what = f"learner, {what}, {count} keys"
            learn(policy, count)
        for width in wide:
            record.what = f"decoding, {what}, rows: {width}"
            decode(policy, LaunchShape(2, 1, 2, listed=16) if width > 1 else LaunchShape(2, 1, 1), width)
    policy = build(COMMON_HEADS, low)
    record.what = "FP8 KV cache"
    decode(policy, LaunchShape(2, 1, 1), kv_dtype="fp8")
    record.what = "serving"
    serve(policy, width=1)
    record.what = "LoRA"
    policy = build(COMMON_HEADS, low, rank=32)
    learn(policy, 1000)
    decode(policy, LaunchShape(2, 1, 1))
    record.what = "products"
    multiply(gpu, low)
    record.what = "delta rule"
    vectors, numbers, state = torch.zeros(8, 16, 128), torch.zeros(8, 16), torch.zeros(8, 16, 128, 128)
    active = torch.ones(8, dtype=torch.int32)
    delta_rule_step(vectors, vectors, vectors, numbers, numbers, state, active, normalise=True)


def main(name: str) -> None:
    gpu = GPUS[name]
    record = CompiledFor(gpu)
    driver.set_active(record)
    JITFunction.run = lambda kernel, *args, **options: record.compile(kernel, *args, **options)
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like  # type: ignore[assignment]  # no result is ever written
    own = launch.gpu_of
    for module in list(sys.modules.values()):
        if getattr(module, "gpu_of", None) is own:
            module.gpu_of = lambda device: gpu  # type: ignore[attr-defined]
    graph_decoder.compare_steps = lambda policy, shape: True  # type: ignore[attr-defined]
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("mm.dtype_out", lambda a, b, dtype, *, out: out, "CPU")  # type: ignore[no-untyped-call]  # torch has it on GPUs
    launches(gpu, record)


if __name__ == "__main__":
    main(sys.argv[1])
