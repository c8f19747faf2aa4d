"""The learner's weights on their way to vLLM, under the names of a Hugging Face checkpoint: vLLM's own loader fuses, ties,
splits and repacks them.

On one GPU vLLM reads the learner's tensors where they lie (CUDA IPC); from GPU to GPU they are broadcast (NCCL); elsewhere they
go through a safetensors file in shared memory. Under LoRA only the adapter goes.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers.core_model_loading import revert_weight_conversion

from oncurve.engines.vllm_messages import SCRATCH, FromFile, FromGpu, FromGroup, Join
from oncurve.errors import EngineError
from oncurve.models.policy import Policy

MEMORY = Path("/dev/shm")


def named_weights(policy: Policy) -> dict[str, Tensor]:
    """All weights, but for an adapter's, as a checkpoint names them; tied ones once, a sharded one whole."""
    found = {
        name.replace(".base_layer.", "."): p.detach() for name, p in policy.model.named_parameters() if ".lora_" not in name
    }
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in found.items()}
    return dict(revert_weight_conversion(policy.model, whole))


def room_for(size: int) -> Path:
    """A new folder in shared memory, or on the disk where that has too little room."""
    fits = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 1.1 * size
    return Path(tempfile.mkdtemp(prefix=SCRATCH, dir=MEMORY if fits else None))


def size_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


@contextmanager
def in_file(tensors: Mapping[str, Tensor], folder: Path) -> Iterator[FromFile]:
    """A file that is there as long as the body runs."""
    file = folder / "weights.safetensors"
    try:
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, file)
        yield FromFile(str(file))
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def on_gpu(tensors: Mapping[str, Tensor]) -> Iterator[FromGpu]:
    """Handles that are good as long as the body runs: what had to be copied to lie in one piece is held until then."""
    held = {name: t.contiguous() for name, t in tensors.items()}
    torch.cuda.synchronize()
    try:
        yield FromGpu({name: reduce_tensor(t) for name, t in held.items()})  # type: ignore[no-untyped-call]
    finally:
        del held
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def write_model(policy: Policy, folder: Path) -> None:
    """What vLLM starts from: config, tokenizer and the weights as they are now, without an adapter."""
    config = copy.deepcopy(policy.model.config)
    config.architectures = [type(policy.model).__name__]  # a model made from nothing does not say it
    config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    save_file(
        {name: t.cpu().contiguous() for name, t in named_weights(policy).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def manifest(tensors: Mapping[str, Tensor]) -> FromGroup:
    """What a receiver must know before a broadcast."""
    return FromGroup(tuple((name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()))


class Broadcast:
    """The learner's seat, rank 0, in the group that its weights are broadcast over. Making one waits until all have joined."""

    def __init__(self, where: Join, device: torch.device, limit_s: float) -> None:
        from oncurve.engines.vllm_worker import group_of  # vLLM's: both sides must speak the same NCCL

        self.where, self.limit_s = where, limit_s
        self.group = group_of(where, 0, device)

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """In the order of `manifest`, which every receiver must have been given before."""
        stream, sent = torch.cuda.current_stream(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        for tensor in tensors.values():
            self.group.broadcast(tensor.contiguous(), src=0, stream=stream)
        sent.record(stream)
        ends = time.monotonic() + self.limit_s
        # NCCL itself would wait forever for a receiver that is gone.
        while not sent.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > ends:
                raise EngineError(
                    f"{self.where.address}:{self.where.port}",
                    f"weights were not taken within {self.limit_s:g} s",
                    because=f"one of {self.where.world_size - 1} vLLM workers is gone or late",
                    fix="look at the samplers' logs, then go on with: oncurve train --resume RUN",
                )
            time.sleep(0.001)
