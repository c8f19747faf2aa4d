"""Random draws that are a pure function of what they are for.

A stream is keyed by (seed, purpose) and entered at `index`: Philox is counter-based, so draw number a million costs no more
than the first, and no draw depends on how many others were made before it.
"""

from __future__ import annotations

import hashlib

import numpy as np

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
