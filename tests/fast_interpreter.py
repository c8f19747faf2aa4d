"""Makes Triton's interpreter faster, with the same results: it repeats work whenever a kernel calls a function. And adds what
it lacks: sums through a TMA descriptor."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter


def speed_up() -> None:
    builder: Any = interpreter.interpreter_builder
    # Overflows of integers are computed and then ignored, since the interpreter's assertions are off.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _with_cache(interpreter._get_np_dtype)
    interpreter._patch_lang = _PatchedOnce(interpreter._patch_lang)
    if not hasattr(builder, "create_descriptor_reduce"):
        type(builder).create_descriptor_reduce = _reduce


def _reduce(builder: Any, kind: Any, desc: Any, value: Any, offsets: list[Any]) -> Any:
    assert kind == ir.DESCRIPTOR_REDUCE_KIND.ADD
    pointers, mask = desc.materialize_pointers(offsets)
    within = interpreter.TensorHandle(mask, tl.int1)
    return builder.create_atomic_rmw(ir.ATOMIC_OP.FADD, pointers, value, within, ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU)


def multiply_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes products of tiles round as on a GPU: an element's bits don't depend on its row. numpy's products of float32 do."""

    def dot(builder: Any, a: Any, b: Any, c: Any, *_: Any) -> Any:
        product = a.data.astype(np.float64) @ b.data.astype(np.float64) + c.data
        return interpreter.TensorHandle(product.astype(c.data.dtype), c.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def _with_cache(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    cached = functools.cache(np_dtype)

    def find(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np_dtype(element) if isinstance(element, tl.pointer_type) else cached(element)

    return find


class _PatchedOnce:
    """Replaces `_patch_lang`, which a kernel calls, and again each function that it calls: it replaces the functions of
    `triton.language` by interpreted ones. While a kernel runs, each module needs that once."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self.patch, self.patched = patch, set[str]()

    def __call__(self, fn: Any) -> Any:
        found = {value.__name__ for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)}
        if found and found <= self.patched:
            return None  # only a kernel, which patches first, uses the result
        scope, is_kernel = self.patch(fn), not self.patched
        self.patched |= found
        if is_kernel:
            scope.restore = functools.partial(self._restore, scope.restore)
        return scope

    def _restore(self, restore: Callable[[], None]) -> None:
        self.patched.clear()
        restore()
