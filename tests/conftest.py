"""What every test shares."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():  # read when a kernel is defined: without a GPU, kernels run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ["ONCURVE_CACHE"] = tempfile.mkdtemp(prefix="oncurve-tests-")  # so do remembered self-checks
os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp(prefix="oncurve-tests-")  # records of trust stay out of the user's own
# A job in a shell's background ignores Ctrl-C, and so would every program that a test starts there.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tensors here are tiny: more threads would only wait for each other, and bits may depend on their number. A run in this
    process sets a number of its own."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def fast_interpreter() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        with contextlib.suppress(ImportError):  # Triton is not there on every system
            from tests.fast_interpreter import speed_up

            speed_up()


@pytest.hookimpl(optionalhook=True)  # where pytest-xdist is not installed, tests still run, one by one
def pytest_xdist_auto_num_workers() -> int:
    """Three workers for two cores, because a quarter of their time is spent waiting for other processes; and never so many that
    their copies of torch fill a laptop's memory."""
    cores = os.cpu_count() or 1
    return min(cores + cores // 2, 8)


COMPILED = ("tests/kernels/", "tests/models/llama/test_cuda_lora.py")
"""Tests of kernels run in Triton's interpreter, and compiled where there is a GPU: they are tests for a GPU there."""
FIRST, LAST = ("tests/cluster/", "tests/studio/", "tests/e2e/", "tests/version1/"), "tests/distributed/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no worker is left alone with it at the end. Processes of a cluster and those of
    ranks have time limits, and are kept apart."""
    for item in items:
        if torch.cuda.is_available() and item.nodeid.startswith(COMPILED):
            item.add_marker(pytest.mark.gpu)
    items.sort(key=lambda item: 0 if item.nodeid.startswith(FIRST) else 2 if item.nodeid.startswith(LAST) else 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file stay together, and share what they made; so do all that need a Ray cluster, of which one is enough."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "tests/cluster" if nodeid.startswith("tests/cluster/") else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems
    return Together(config, log)
