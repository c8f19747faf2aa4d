"""vLLM itself, in a process of its own that is asked through a pipe. The only file that imports vllm.

It is started by `oncurve.engines.vllm.process`: vLLM changes thread counts, seeds and loggers of the process that it lives in.
Here it runs without a further process, so that a push of weights is a plain call, and steps follow each other in the same order
each time; only where layers are split (`scale.vllm_tensor`) vLLM starts one for each part, which end with this one.

Written against vLLM 0.26 to 0.32, of which it uses ``LLM``, its engine's ``add_request``, ``step`` and ``add_lora``, ``sleep``
and ``wake_up``, and the workers' ``reload_weights``, which knows fused, tied and repacked weights.
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
    Adapter,
    Answer,
    Answers,
    Done,
    Failed,
    FromFile,
    FromGpu,
    Ready,
    SampleBatch,
    Sleep,
    Start,
    TurnRequest,
    Wake,
    Working,
)
from oncurve.records import StopReason

BEAT = 0.25
"""Seconds between two signs of life while tokens are sampled."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM makes room for."""


class VllmServer:
    """Answers the messages of one pipe, in order, between two steps of the engine.

    A thread reads them as they come: two sides that both wait to be read would wait forever.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.scratch: Path | None = None
        self.llm: Any = None
        self.adapter: Any = None
        self.written: dict[str, PartialOutput] = {}
        self.told = 0.0

    def serve(self) -> None:
        """Until the process is ended. What goes wrong is told, and ends it: its state is not known then."""
        threading.Thread(target=self._read, daemon=True).start()
        try:
            while True:
                if not self.written or not self.inbox.empty():
                    self._handle(self.inbox.get())
                else:
                    self._step()
        except BaseException as error:
            traceback.print_exc()
            self._say(Failed(type(error).__name__, str(error)))
            leave(1)

    def _read(self) -> None:
        try:
            while True:
                self.inbox.put(self.connection.recv())
        except (EOFError, OSError):
            self._clean()
            leave(0)

    def leave_with(self, parent: int) -> None:
        """Whoever asks may be killed at any moment, and another of its children hold the pipe open."""
        while os.getppid() == parent:
            time.sleep(0.5)
        self._clean()
        leave(1)

    def _clean(self) -> None:
        """Removes the folder that weights come through; none but one of our making."""
        if self.scratch is not None and self.scratch.is_absolute() and self.scratch.name.startswith(SCRATCH):
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _say(self, message: object) -> None:
        self.connection.send(message)
        self.told = time.monotonic()

    def _handle(self, message: object) -> None:
        match message:
            case Start():
                self.scratch = Path(message.scratch)
                self.llm = _open(message)
                self._say(Ready(self.llm.model_config.max_model_len))
            case SampleBatch():
                self._take(message)
            case Abort():
                self.llm.llm_engine.abort_request(list(self.written))
                self.written.clear()
                self._say(Done())
            case FromFile() | FromGpu():
                self.llm.collective_rpc("oncurve_load", args=(message,))
                self._changed()
            case Adapter():
                self._put_on(message)
                self._changed()
            case Sleep():
                self.llm.sleep(level=message.level)
                self._say(Done())
            case Wake():
                self.llm.wake_up(tags=list(message.parts))
                self._say(Done())

    def _changed(self) -> None:
        """Keys and values that other weights gave must not be found again; those of requests on their way are computed anew."""
        self.llm.reset_prefix_cache(reset_running_requests=bool(self.written))
        self._say(Done({key: len(one.token_ids) for key, one in self.written.items()}))

    def _put_on(self, message: Adapter) -> None:
        """In place of the one before, under the same number: requests on their way go on with it."""
        from vllm.lora.request import LoRARequest

        self.llm.llm_engine.add_lora(LoRARequest("adapter", 1, message.folder, load_inplace=True))
        self.adapter = LoRARequest("adapter", 1, message.folder)

    def _take(self, ask: SampleBatch) -> None:
        for request in ask.requests:
            self.written[request.key] = PartialOutput()
            self.llm.llm_engine.add_request(
                request.key, {"prompt_token_ids": list(request.token_ids)}, _parameters(request), lora_request=self.adapter
            )

    def _step(self) -> None:
        """One token more for what is running; says what has ended, or now and then that it lives."""
        ended = []
        for output in self.llm.llm_engine.step():
            (one,) = output.outputs
            written = self.written[output.request_id]
            written.add(one)
            if output.finished:
                del self.written[output.request_id]
                ended.append(Answer(output.request_id, tuple(written.token_ids), tuple(written.logps), _why(one)))
        if ended:
            self._say(Answers(tuple(ended)))
        elif time.monotonic() - self.told > BEAT:
            self._say(Working())


@dataclass
class PartialOutput:
    """What is there of a request, as far as vLLM has told: all of it at the end, or token by token where it is counted."""

    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    def add(self, one: Any) -> None:
        self.token_ids += one.token_ids
        self.logps += [float(at[token].logprob) for at, token in zip(one.logprobs, one.token_ids, strict=True)]


def _open(start: Start) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    cpu = bool(current_platform.is_cpu())
    options: dict[str, Any] = {
        "model": start.folder,
        "dtype": start.dtype,
        "max_model_len": -1,  # the model's, or what memory has room for
        "max_num_seqs": start.slots,
        "logprobs_mode": start.logprobs,
        "generation_config": "vllm",  # what the recipe says, and not the model's folder
        "worker_extension_cls": "oncurve.engines.vllm.worker.WeightReceiver",
        "disable_log_stats": True,
        "enforce_eager": cpu,
    }
    if start.tensor > 1:
        options |= {"tensor_parallel_size": start.tensor, "distributed_executor_backend": "mp"}
    if start.lora_rank:
        room = next((r for r in RANKS if r >= start.lora_rank), RANKS[-1])
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
    if not cpu:
        options |= {"enable_sleep_mode": start.sleeps, "gpu_memory_utilization": start.gpu_share}
    elif "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        options["kv_cache_memory_bytes"] = _cpu_room(start)
    return LLM(**options)


def _cpu_room(start: Start) -> int:
    """Bytes of each part for keys and values on a CPU: what all slots could want, within a share of the memory that is free."""
    import psutil

    free = int(psutil.virtual_memory().available * start.gpu_share / 2)
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


def _why(one: Any) -> StopReason:
    if one.finish_reason == "length":
        return "length"
    if one.finish_reason != "stop":
        raise RuntimeError(f"vLLM ended a completion for another reason than we know: {one.finish_reason}")
    return "stop_string" if isinstance(one.stop_reason, str) else "end"


class WeightReceiver:
    """What vLLM's worker can do beside its own: take weights in the ways that we push them."""

    def oncurve_load(self, source: FromFile | FromGpu) -> None:
        worker: Any = self
        worker.reload_weights(weights_iterator=self.oncurve_tensors(source))
        if worker.device.type == "cpu":
            _repack(worker.model_runner.model)
        else:
            torch.accelerator.synchronize()  # from here on the learner may change what was read

    def oncurve_tensors(self, source: FromFile | FromGpu) -> Iterator[tuple[str, torch.Tensor]]:
        match source:
            case FromFile(path):
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118  (no mapping)
                        yield name, file.get_tensor(name)
            case FromGpu(handles):
                for name, (rebuild, arguments) in handles.items():
                    here = list(arguments)
                    here[6] = 0  # the learner's GPU is the first of those that this process sees
                    yield name, rebuild(*here)


def _repack(model: torch.nn.Module) -> None:
    """On a CPU vLLM packs a head's weights when it loads them; of a head tied to the embedding it would keep the old ones."""
    for module in model.modules():
        layer: Any = module
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            layer.quant_method.process_weights_after_loading(layer)


def leave(code: int) -> None:
    """At once: vLLM's own way out takes many seconds, and there is nothing to save."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides what Ctrl-C means
    host = VllmServer(Connection(int(sys.argv[1])))
    threading.Thread(target=host.leave_with, args=(int(sys.argv[2]),), daemon=True).start()
    host.serve()


if __name__ == "__main__":
    main()
