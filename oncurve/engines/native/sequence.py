"""Stop strings: whether what was written last holds one of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oncurve.models.policy import Policy
from oncurve.records import Ints

SPARE = 4
"""Tokens that are read beyond a string's bytes: the first ones may begin amid a character."""


def ends_with_stop(policy: Policy, token_ids: Ints | Sequence[int], strings: Sequence[str], more: int = 0) -> bool:
    """Whether the end of a text has one of these, or had it up to ``more`` tokens ago. A token is at least one byte, so as many
    of them as the longest string has bytes can hold any."""
    longest = max(len(s.encode()) for s in strings)
    text = policy.decode(np.asarray(token_ids[-(longest + SPARE + more) :], np.int64))
    return any(s in text for s in strings)
