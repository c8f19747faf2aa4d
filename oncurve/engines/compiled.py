"""Decoding on a CPU by one compiled function, where the machine has a C compiler and the model is of the Llama family.

decode.c is built once, in about a second, and kept in the user's cache under a name made of its source, the compiler and the
processor. Where there is no compiler, or the model, its precision or the sampling settings are others, torch decodes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from oncurve.engines.pool import Pool
from oncurve.models.fused import Block
from oncurve.models.policy import Policy
from oncurve.recipe.sections import Sampling
from oncurve.records import Floats, Ints

Work = TypeVar("Work")
SOURCE = Path(__file__).with_name("decode.c")
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno")
LANES = 16
"""Hidden and head sizes must be multiples of the widest vector, so that every sum is made of whole ones."""


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("before", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias", "between")),
        *((name, c_void_p) for name in ("gate_up", "down", "prompt_k", "prompt_v", "suffix_k", "suffix_v")),
        ("window", c_int64),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("layers", "D", "H", "K", "d", "I", "V")),
        *((name, c_float) for name in ("eps", "head_eps", "scale", "logit_scale", "softcap")),
        *((name, c_void_p) for name in ("words", "last", "head", "head_bias", "cos", "sin")),
        ("layer", POINTER(_Layer)),
        *((name, c_int64) for name in ("N", "R", "T", "min_new", "ends")),
        ("end_ids", c_void_p),
        ("temperature", c_float),
        *((name, c_void_p) for name in ("token", "suffix_length", "prompt_length", "uniform", "drawn", "logp")),
    ]


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """decode.c, compiled for this processor; None where that can't be done."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    try:
        return _declared(ctypes.CDLL(str(_built([*compiler.split(), native, *FLAGS]))))
    except (OSError, subprocess.SubprocessError):
        return None


def _built(command: list[str]) -> Path:
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True, timeout=60).stdout
    name = hashlib.sha256(b"\0".join([SOURCE.read_bytes(), version, " ".join(command).encode(), _processor()])).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oncurve"
    if not (folder / f"decode-{name}.so").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            made = Path(aside, "decode.so")
            subprocess.run([*command, str(SOURCE), "-o", str(made), "-lm"], capture_output=True, check=True, timeout=120)
            made.replace(folder / f"decode-{name}.so")
    return folder / f"decode-{name}.so"


def _processor() -> bytes:
    """What this processor can do: a cache that is shared between machines must not hand one the other's instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode() + platform.node().encode()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    found.panel.restype = c_int64
    found.pack.argtypes = (c_void_p, c_int64, c_int64, c_void_p)
    found.pack.restype = None
    found.decode.argtypes = (POINTER(_Model), c_void_p, c_int64, c_int64)
    found.decode.restype = c_int
    found.prefill.argtypes = (POINTER(_Model), c_int64, c_void_p, c_int64)
    found.prefill.restype = c_int
    return found


def can_decode(policy: Policy, how: Sampling) -> bool:
    """Whether the compiled function can: the family's fast path in float32 on a CPU, and no truncated distribution."""
    fused = policy.fused
    if fused is None or policy.device.type != "cpu" or policy.model.dtype != torch.float32:
        return False
    wide = [fused.head_size, policy.model.config.hidden_size, policy.model.config.intermediate_size]
    plain = how.top_k == 0 and how.top_p == 1 and how.min_p == 0
    return plain and all(size % LANES == 0 for size in wide) and library() is not None


class SlotState(NamedTuple):
    """What a decode step reads and brings up to date, by slot."""

    token_S: Tensor
    prompt_length_S: Tensor
    suffix_length_S: Tensor
    uniform_ST: Tensor


@lru_cache(maxsize=1)
def _workers(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="decode")


class CompiledDecoder:
    """The compiled function with the weights, pool and state of one call of ``sample``; weights are packed once per call."""

    def __init__(self, policy: Policy, pool: Pool, how: Sampling, state: SlotState) -> None:
        found = library()
        assert found is not None
        assert policy.fused is not None
        self.library, self.fused, self.head, self.pool = found, policy.fused, policy.head, pool
        self.threads = torch.get_num_threads()
        self.kept: list[object] = [state]  # what C holds addresses of
        self.layers = (_Layer * len(self.fused.blocks))()
        for number, (layer, block) in enumerate(zip(self.layers, self.fused.blocks, strict=True)):
            self._fill(number, layer, block)
        self.model = self._model(how, policy.end_ids, state)

    def prefill(self, seats: Sequence[tuple[int, int]], prompt_ids: Mapping[int, Ints]) -> None:
        """Prompts, all but their last tokens, into the blocks they are seated at: (block, number of the prompt)."""
        longest = max(len(prompt_ids[g]) - 1 for _, g in seats)
        if not longest:
            return
        for number, layer in enumerate(self.layers):  # a longer prompt may move them
            layer.prompt_k, layer.prompt_v = (x.data_ptr() for x in self.pool.make_prompts(number, longest, *self._like()))
        firsts = {g: block for block, g in reversed(seats)}
        self._side_by_side(lambda seat: self._prefill(seat[1], prompt_ids[seat[0]]), list(firsts.items()))
        for block, g in seats:
            if block != firsts[g]:
                self.pool.copy_prompt(firsts[g], block)

    def _prefill(self, block: int, ids: Ints) -> int:
        return int(self.library.prefill(self.model, block, ids.ctypes.data, len(ids) - 1))

    def decode(self, slots: Ints, steps: int) -> tuple[Ints, Floats]:
        """Up to ``steps`` tokens for each slot: tokens [steps, S] and their three log-probs [steps, S, 3]."""
        drawn, logp = np.zeros((steps, self.pool.slots), np.int64), np.zeros((steps, self.pool.slots, 3), np.float32)
        self.model.drawn, self.model.logp = drawn.ctypes.data, logp.ctypes.data
        shares = [part.copy() for part in np.array_split(slots, self.threads) if len(part)]
        self._side_by_side(lambda part: self._decode(part, steps), shares)
        return drawn, logp

    def _decode(self, slots: Ints, steps: int) -> int:
        return int(self.library.decode(self.model, slots.ctypes.data, len(slots), steps))

    def _side_by_side(self, call: Callable[[Work], int], parts: Sequence[Work]) -> None:
        """The calls leave Python, so that threads run side by side."""
        if any(_workers(self.threads).map(call, parts)):
            raise MemoryError("no memory for decoding")

    def _like(self) -> tuple[Tensor, Tensor]:
        """Keys and values of one position, for their shape and type."""
        like = self.head.weight_VD.new_empty(self.fused.kv_heads, self.fused.head_size)
        return like, like

    def _model(self, how: Sampling, end_ids: tuple[int, ...], state: SlotState) -> _Model:
        fused, head, pool, first = self.fused, self.head, self.pool, self.fused.blocks[0]
        last, ends = fused.backbone.norm, np.asarray(end_ids, np.int64)
        self.kept.append(ends)
        return _Model(
            layers=len(fused.blocks), D=head.weight_VD.shape[1], H=fused.heads, K=fused.kv_heads, d=fused.head_size,
            I=first.down.in_features, V=head.weight_VD.shape[0],
            eps=last.variance_epsilon, head_eps=0.0 if first.q_norm is None else first.q_norm.variance_epsilon,
            scale=fused.scale, logit_scale=head.scale, softcap=head.softcap or 0.0,
            words=_at(fused.backbone.embed_tokens.weight), last=_at(last.weight), head=self._packed(head.weight_VD),
            head_bias=_at(head.bias_V), cos=_at(fused.cos), sin=_at(fused.sin), layer=self.layers,
            N=pool.blocks, R=pool.rows, T=how.max_new_tokens, min_new=how.min_new_tokens,
            ends=len(ends), end_ids=ends.ctypes.data, temperature=how.temperature,
            token=_at(state.token_S), suffix_length=_at(state.suffix_length_S), prompt_length=_at(state.prompt_length_S),
            uniform=_at(state.uniform_ST),
        )  # fmt: skip

    def _fill(self, number: int, layer: _Layer, block: Block) -> None:
        self.pool.make_suffixes(number, *self._like())
        layer.suffix_k, layer.suffix_v = (x.data_ptr() for x in self.pool.suffixes[number])
        layer.before, layer.between = _at(block.before.weight), _at(block.between.weight)
        layer.qkv, layer.qkv_bias = self._packed(block.qkv.weight), _at(block.qkv.bias)
        layer.q_norm, layer.k_norm = (None if x is None else _at(x.weight) for x in (block.q_norm, block.k_norm))
        layer.out, layer.out_bias = self._packed(block.out.weight), _at(block.out.bias)
        layer.gate_up, layer.down = self._packed(block.gate_up.weight), self._packed(block.down.weight)
        layer.window = block.window or 0

    def _packed(self, weight: Tensor) -> int:
        columns, rows = weight.shape
        panel = int(self.library.panel())
        packed = torch.empty(-(-columns // panel) * panel * rows)
        self.kept += [weight, packed]
        self.library.pack(_at(weight), columns, rows, packed.data_ptr())
        return packed.data_ptr()


def _at(x: Tensor | None) -> int | None:
    if x is None:
        return None
    assert x.is_contiguous()
    assert x.device.type == "cpu"
    return x.data_ptr()
