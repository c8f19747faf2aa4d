"""What every test shares."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():  # read when a kernel is defined: without a GPU, kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ["ONCURVE_CACHE"] = tempfile.mkdtemp(prefix="oncurve-tests-")  # so do remembered self-checks
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="oncurve-tests-")  # records of trust stay out of the user's own


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors here are tiny: more threads would only wait for each other, and bits may depend on their number."""
    torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is not installed, tests still run, one by one
def pytest_xdist_auto_num_workers() -> int:
    """A worker for each core, and never so many that their copies of torch fill a laptop's memory."""
    return min(os.cpu_count() or 1, 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file stay together, and share what they made; so do all that need a Ray cluster, of which one is enough."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "tests/cluster" if nodeid.startswith("tests/cluster/") else nodeid.partition("::")[0]

    return Together(config, log)
