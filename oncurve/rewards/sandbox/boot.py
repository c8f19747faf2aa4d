"""Starts a zygote by this file's path. Of our code, a sandbox can read only this folder, so empty modules replace its parent
packages."""

from __future__ import annotations

import sys
import types
from pathlib import Path

if __name__ == "__main__":
    for name in ("oncurve", "oncurve.rewards", "oncurve.rewards.sandbox"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["oncurve.rewards.sandbox"].__path__ = [str(Path(__file__).parent)]
    from oncurve.rewards.sandbox.zygote import main

    main(sys.argv[1])
