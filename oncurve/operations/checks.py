"""Something that was looked at, and how it stands: what `oncurve verify` and `oncurve doctor` are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CheckStatus = Literal["ok", "note", "wrong"]


@dataclass(frozen=True, slots=True)
class Check:
    """``ok``: as it should be; ``note``: worth knowing, nothing is broken; ``wrong``: mend it."""

    name: str
    mark: CheckStatus
    message: str
