"""Random numbers as a pure function of (seed, step, prompt, sample, position): bet 3.

A completion's uniforms do not depend on what is batched beside it, on slots, ranks or engines. The mixer is SplitMix64
(Steele, Lea and Flood, 2014), chained over the coordinates; the prompt enters by a hash of its id.

Random draws that are a pure function of what they are for.

A stream is keyed by (seed, purpose) and entered at `index`: Philox is counter-based, so draw number a million costs no more
than the first, and no draw depends on how many others were made before it.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def uniforms(seed: int, step: int, prompt_id: str, sample: int, count: int) -> NDArray[np.float64]:
    """``count`` numbers in [0, 1), one per token position, each from 53 bits."""
    key = row_key(seed, step, prompt_id, sample)
    with np.errstate(over="ignore"):
        state = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    out: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return out


def row_key(seed: int, step: int, prompt_id: str, sample: int) -> int:
    """One 64-bit key per completion."""
    prompt = int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "little")
    key = 0
    for coordinate in (seed, step, prompt, sample):
        key = _mix((key + _GOLDEN) & _MASK ^ coordinate & _MASK)
    return key


def signed_key(seed: int, step: int, prompt_id: str, sample: int) -> int:
    """The same bits as a tensor of int64 holds them."""
    key = row_key(seed, step, prompt_id, sample)
    return key - (1 << 64) if key >> 63 else key


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


_WORD = 1 << 64


def generator(seed: int, purpose: str, index: int = 0) -> np.random.Generator:
    """The generator at place `index` (below 2¹²⁸) of the stream (seed, purpose).

    The key is a hash, so that neighbouring seeds and purposes share nothing. The index fills the upper half of Philox's 256-bit
    counter: each place has 2¹²⁸ numbers of its own before it would run into the next.
    """
    key = np.frombuffer(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest(), dtype="<u8")
    high, low = divmod(index, _WORD)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, low, high], dtype=np.uint64)))


def word(seed: int, purpose: str) -> int:
    """One 63-bit number that stands for (seed, purpose)."""
    return int(generator(seed, purpose).integers(1 << 63))
