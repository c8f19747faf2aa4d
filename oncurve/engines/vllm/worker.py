"""vLLM itself, in its own process behind a pipe. The only file that imports vllm.

`oncurve.engines.vllm.engine` starts it as a separate process, because vLLM changes the thread counts, seeds and loggers of its
process. vLLM starts no process of its own, so a push of weights is a plain call, and steps follow each other in the same order
each time. Only with tensor parallelism (`scale.vllm_tensor`) it starts one process per part; these end with this one.

Written against vLLM 0.26 to 0.32, of which it uses ``LLM``, its engine's ``add_request``, ``step`` and ``add_lora``, ``sleep``
and ``wake_up``, and the workers' ``reload_weights``, which handles fused, tied and repacked weights.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from oncurve.engines.vllm.messages import (
    SCRATCH,
    Abort,
    Answer,
    Answers,
    Done,
    Failed,
    FromFile,
    FromGpu,
    LoadAdapter,
    Ready,
    Sleep,
    Start,
    TurnBatch,
    TurnRequest,
    Wake,
    Working,
)
from oncurve.records import StopReason

HEARTBEAT_S = 0.25
"""Seconds between two heartbeats while tokens are sampled."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The LoRA ranks that vLLM supports."""


class VllmServer:
    """Handles the messages of one pipe, in order, between two steps of the engine.

    A thread reads them as they come: if both sides waited for the other to read, neither would continue.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.scratch: Path | None = None
        self.llm: Any = None
        self.adapter: Any = None
        self.outputs: dict[str, PartialOutput] = {}
        self.last_sent = 0.0

    def serve(self) -> None:
        """Run until the process is ended. An error is reported and ends it, as its state is unknown then."""
        threading.Thread(target=self._read, daemon=True).start()
        try:
            while True:
                if not self.outputs or not self.inbox.empty():
                    self._handle(self.inbox.get())
                else:
                    self._step()
        except BaseException as error:
            traceback.print_exc()
            self._send(Failed(type(error).__name__, str(error)))
            exit_now(1)

    def _read(self) -> None:
        try:
            while True:
                self.inbox.put(self.connection.recv())
        except (EOFError, OSError):
            self._remove_scratch()
            exit_now(0)

    def exit_with(self, parent: int) -> None:
        """Exit when the parent is gone: it may be killed while another of its children holds the pipe open."""
        while os.getppid() == parent:
            time.sleep(0.5)
        self._remove_scratch()
        exit_now(1)

    def _remove_scratch(self) -> None:
        """Remove the folder through which weights are pushed, and nothing else."""
        if self.scratch is not None and self.scratch.is_absolute() and self.scratch.name.startswith(SCRATCH):
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _send(self, message: object) -> None:
        self.connection.send(message)
        self.last_sent = time.monotonic()

    def _handle(self, message: object) -> None:
        match message:
            case Start():
                self.scratch = Path(message.scratch)
                self.llm = _open(message)
                self._send(Ready(self.llm.model_config.max_model_len))
            case TurnBatch():
                self._add_requests(message)
            case Abort():
                self.llm.llm_engine.abort_request(list(self.outputs))
                self.outputs.clear()
                self._send(Done())
            case FromFile() | FromGpu():
                self.llm.collective_rpc("oncurve_load", args=(message,))
                self._weights_changed()
            case LoadAdapter():
                self._load_adapter(message)
                self._weights_changed()
            case Sleep():
                self.llm.sleep(level=message.level)
                self._send(Done())
            case Wake():
                self.llm.wake_up(tags=list(message.parts))
                self._send(Done())

    def _weights_changed(self) -> None:
        """Drop the KV cache of the previous weights; that of requests in flight is recomputed."""
        self.llm.reset_prefix_cache(reset_running_requests=bool(self.outputs))
        self._send(Done({key: len(output.token_ids) for key, output in self.outputs.items()}))

    def _load_adapter(self, message: LoadAdapter) -> None:
        """Replace the adapter under the same number: requests in flight continue with it."""
        from vllm.lora.request import LoRARequest

        self.llm.llm_engine.add_lora(LoRARequest("adapter", 1, message.folder, load_inplace=True))
        self.adapter = LoRARequest("adapter", 1, message.folder)

    def _add_requests(self, batch: TurnBatch) -> None:
        for request in batch.requests:
            self.outputs[request.key] = PartialOutput()
            self.llm.llm_engine.add_request(
                request.key, {"prompt_token_ids": list(request.token_ids)}, _parameters(request), lora_request=self.adapter
            )

    def _step(self) -> None:
        """Sample one token for each running request, and send the requests that have ended. If none has, and nothing was sent
        for a while, send a heartbeat."""
        ended = []
        for output in self.llm.llm_engine.step():
            (new,) = output.outputs
            partial = self.outputs[output.request_id]
            partial.add(new)
            if output.finished:
                del self.outputs[output.request_id]
                ended.append(Answer(output.request_id, tuple(partial.token_ids), tuple(partial.logps), _stop_reason(new)))
        if ended:
            self._send(Answers(tuple(ended)))
        elif time.monotonic() - self.last_sent > HEARTBEAT_S:
            self._send(Working())


@dataclass
class PartialOutput:
    """The tokens of a request that vLLM has returned: all at its end, or step by step if they are counted."""

    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    def add(self, new: Any) -> None:
        self.token_ids += new.token_ids
        self.logps += [float(at[token].logprob) for at, token in zip(new.logprobs, new.token_ids, strict=True)]


def _open(start: Start) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    cpu = bool(current_platform.is_cpu())
    options: dict[str, Any] = {
        "model": start.folder,
        "dtype": start.dtype,
        "max_model_len": -1,  # the model's context, or what memory has room for
        "max_num_seqs": start.slots,
        "logprobs_mode": start.logprobs,
        "generation_config": "vllm",  # sampling settings come from the recipe, not from the model's folder
        "worker_extension_cls": "oncurve.engines.vllm.worker.WeightReceiver",
        "disable_log_stats": True,
        "enforce_eager": cpu,
    }
    if start.tensor > 1:
        options |= {"tensor_parallel_size": start.tensor, "distributed_executor_backend": "mp"}
    if start.lora_rank:
        max_rank = next((r for r in LORA_RANKS if r >= start.lora_rank), LORA_RANKS[-1])
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank}
    if not cpu:
        options |= {"enable_sleep_mode": start.sleeps, "gpu_memory_utilization": start.gpu_fraction}
    elif "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        options["kv_cache_memory_bytes"] = _cpu_kv_bytes(start)
    return LLM(**options)


def _cpu_kv_bytes(start: Start) -> int:
    """Bytes of each part's KV cache on a CPU: for all slots, but at most a fraction of the free memory."""
    import psutil

    free = int(psutil.virtual_memory().available * start.gpu_fraction / 2)
    return max(min(start.cpu_kv_bytes, free) // start.tensor, 64 << 20)


def _parameters(request: TurnRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p, seed=request.seed,
        max_tokens=request.max_tokens, min_tokens=request.min_tokens, stop=list(request.stop), include_stop_str_in_output=True,
        stop_token_ids=list(request.eos_ids), ignore_eos=True, logprobs=0, detokenize=bool(request.stop),
        output_kind=RequestOutputKind.DELTA if request.counts_tokens else RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip


def _stop_reason(output: Any) -> StopReason:
    if output.finish_reason == "length":
        return "length"
    if output.finish_reason != "stop":
        raise RuntimeError(f"vLLM ended a completion for an unknown reason: {output.finish_reason}")
    return "stop_string" if isinstance(output.stop_reason, str) else "end"


class WeightReceiver:
    """Extension of vLLM's worker: it loads weights in the ways that we push them."""

    def oncurve_load(self, source: FromFile | FromGpu) -> None:
        worker: Any = self
        worker.reload_weights(weights_iterator=self.oncurve_tensors(source))
        if worker.device.type == "cpu":
            _repack(worker.model_runner.model)
        else:
            torch.accelerator.synchronize()  # from here on the learner may change the tensors

    def oncurve_tensors(self, source: FromFile | FromGpu) -> Iterator[tuple[str, torch.Tensor]]:
        match source:
            case FromFile(path):
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118  (no mapping)
                        yield name, file.get_tensor(name)
            case FromGpu(handles):
                for name, (rebuild, arguments) in handles.items():
                    here = list(arguments)
                    here[6] = 0  # the learner's GPU is the first that this process sees
                    yield name, rebuild(*here)


def _repack(model: torch.nn.Module) -> None:
    """Pack the LM head again after a weight push. On a CPU vLLM decodes with a packed copy, which it makes when it loads the
    head. If the head is tied to the embedding, that copy would keep the old weights."""
    for module in model.modules():
        layer: Any = module
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            layer.quant_method.process_weights_after_loading(layer)


def exit_now(code: int) -> None:
    """Exit at once: vLLM's own shutdown takes many seconds, and there is nothing to save."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides what Ctrl-C means
    server = VllmServer(Connection(int(sys.argv[1])))
    threading.Thread(target=server.exit_with, args=(int(sys.argv[2]),), daemon=True).start()
    server.serve()


if __name__ == "__main__":
    main()
