"""One check of `oncurve verify` or `oncurve doctor`, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OPTIONAL_CHECK = "optional parts"
"""The name of doctor's checks of optional packages: a note names a missing feature and the command that installs it."""
CheckStatus = Literal["ok", "note", "wrong"]


@dataclass(frozen=True, slots=True)
class Check:
    """``ok``: as it should be; ``note``: worth knowing, nothing is broken; ``wrong``: must be fixed."""

    name: str
    mark: CheckStatus
    message: str
