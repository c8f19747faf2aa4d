"""Every random number of a run: a pure function of what it is for, never of what was drawn before it.

Two derivations, both fixed for all time (golden values in tests/test_rng.py; a changed bit would change every stored run):

    philox_generator    tasks, prompt order, environments    Philox keyed by (seed, purpose), its counter set to an index
    sampling_uniforms   token sampling                       SplitMix64 chained over (seed, step, prompt, sample, position)

Because nothing is a stream that is consumed in order, step 900 can be computed without steps 1 to 899, and a completion's
tokens do not depend on its batch, slot, rank or engine. The CUDA kernels compute the same uniforms from `signed_sampling_key`
(oncurve/kernels/sampling.py).
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""2⁶⁴ divided by the golden ratio: SplitMix64's increment."""


def philox_generator(seed: int, purpose: str, index: int = 0) -> np.random.Generator:
    """The generator for entry ``index`` (below 2¹²⁸) of the stream (seed, purpose).

    The key is a hash, so that neighbouring seeds and purposes share nothing. The index fills the upper half of Philox's 256-bit
    counter: each index has 2¹²⁸ numbers before it would run into the next, and entry one million costs no more than the first.

    Example: ``philox_generator(0, "arithmetic/train", 17).integers(1000, size=3)`` is always ``[267, 410, 31]``
    """
    key = np.frombuffer(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest(), dtype="<u8")
    high, low = divmod(index, 1 << 64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, low, high], dtype=np.uint64)))


def derive_seed(seed: int, purpose: str) -> int:
    """A 63-bit seed derived from (seed, purpose), for code that takes a seed rather than a generator.

    Example: ``derive_seed(0, "prompts")`` is always ``1873575692739677540``
    """
    return int(philox_generator(seed, purpose).integers(1 << 63))


def sampling_uniforms(seed: int, step: int, prompt_id: str, sample: int, count: int) -> NDArray[np.float64]:
    """The uniforms in [0, 1) by which one completion samples its first ``count`` tokens; one per position, of 53 bits each.

    SplitMix64 (Steele, Lea and Flood, 2014): position i is the mixed state ``key + (i + 1)·golden``.

    Example: ``sampling_uniforms(0, 1, "arithmetic/1+2", 0, 2)`` is always ``[0.8088354928200925, 0.9317888937744907]``
    """
    key = sampling_key(seed, step, prompt_id, sample)
    with np.errstate(over="ignore"):
        state = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    uniforms: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniforms


def sampling_key(seed: int, step: int, prompt_id: str, sample: int) -> int:
    """The 64-bit key of one completion: its coordinates mixed one after the other; the prompt enters by a hash of its id."""
    prompt = int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "little")
    key = 0
    for coordinate in (seed, step, prompt, sample):
        key = _splitmix64((key + _GOLDEN) & _MASK ^ coordinate & _MASK)
    return key


def signed_sampling_key(seed: int, step: int, prompt_id: str, sample: int) -> int:
    """`sampling_key` as an int64 with the same bits, for torch tensors, which have no uint64 arithmetic."""
    key = sampling_key(seed, step, prompt_id, sample)
    return key - (1 << 64) if key >> 63 else key


def _splitmix64(state: int) -> int:
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
    return state ^ (state >> 31)
