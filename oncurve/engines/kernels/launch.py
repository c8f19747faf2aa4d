"""How the kernels of a decode step follow each other.

On Hopper and later a kernel may be launched while the one before it is still running (programmatic dependent launch): its
programs take their places and wait, at their first line, for what the one before has written. A step is some three
hundred short kernels, and this hides a part of the time between them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

HOPPER = 9


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Options of a launch on this device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < HOPPER:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
