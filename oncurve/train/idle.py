"""Passes over nothing: where ranks share out weights, every pass is one of all, and one with fewer packs takes part so."""

from __future__ import annotations

from collections.abc import Callable

from oncurve.models.packing import Pack, blank_pack
from oncurve.models.policy import Policy


def idle(policy: Policy, passes: int, measure: Callable[[Pack], object] | None = None) -> None:
    """So many passes beside those of other ranks. ``measure`` is what these do; unset: there and back, with a gradient of 0."""
    for _ in range(passes):
        pack = blank_pack(policy.device)
        if measure is not None:
            measure(pack)
        else:
            (0.0 * policy.pack_logps(pack)[0].sum()).backward()  # type: ignore[no-untyped-call]
