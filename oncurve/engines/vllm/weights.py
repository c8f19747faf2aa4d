"""Pushing the learner's weights to vLLM, under the names of a Hugging Face checkpoint: vLLM's own loader fuses, ties, splits
and repacks them.

On a GPU vLLM reads the policy's tensors in place (CUDA IPC); on a CPU they go through a safetensors file in shared memory.
Under LoRA only the adapter is pushed.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers.core_model_loading import revert_weight_conversion

from oncurve.engines.vllm.messages import SCRATCH, FromFile, FromGpu
from oncurve.models.policy import Policy

MEMORY = Path("/dev/shm")


def named_weights(policy: Policy) -> dict[str, Tensor]:
    """All weights but an adapter's, by their checkpoint names; tied weights once, sharded ones gathered."""
    weights = {
        name.replace(".base_layer.", "."): p.detach() for name, p in policy.model.named_parameters() if ".lora_" not in name
    }
    full = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in weights.items()}
    return dict(revert_weight_conversion(policy.model, full))


def create_scratch_folder(size: int) -> Path:
    """A new folder in shared memory, or on disk if shared memory has too little room."""
    fits = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 1.1 * size
    return Path(tempfile.mkdtemp(prefix=SCRATCH, dir=MEMORY if fits else None))


def size_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


@contextmanager
def via_shared_memory(tensors: Mapping[str, Tensor], folder: Path) -> Iterator[FromFile]:
    """A file that exists while the body runs."""
    file = folder / "weights.safetensors"
    try:
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, file)
        yield FromFile(str(file))
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def via_cuda_ipc(tensors: Mapping[str, Tensor]) -> Iterator[FromGpu]:
    """Handles that are valid while the body runs: copies of non-contiguous tensors are kept until then."""
    contiguous = {name: t.contiguous() for name, t in tensors.items()}
    torch.cuda.synchronize()
    try:
        yield FromGpu({name: reduce_tensor(t) for name, t in contiguous.items()})  # type: ignore[no-untyped-call]
    finally:
        del contiguous
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def write_model(policy: Policy, folder: Path) -> None:
    """Write what vLLM starts from: config, tokenizer and the present weights, without an adapter."""
    config = copy.deepcopy(policy.model.config)
    config.architectures = [type(policy.model).__name__]  # a model built from a config does not have them
    config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    save_file(
        {name: t.cpu().contiguous() for name, t in named_weights(policy).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
