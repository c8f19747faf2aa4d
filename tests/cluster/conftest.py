"""A Ray cluster of three nodes and a head on this machine, for the tests of this folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

SMALL: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 << 20}
HEAD = {**SMALL, "num_cpus": 0, "include_dashboard": False}
"""No actor runs on the head, so that every node with actors can be killed."""
SOON = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""A dead node is noticed within a few seconds."""
NORMAL_PRIORITY = {"worker_niceness": 0}
"""By default Ray lowers its workers' priority, and other tests would starve them."""


@pytest.fixture(scope="package")
def ray_folder() -> Iterator[str]:
    """A temporary folder for the cluster's sockets, whose paths must be short, and logs."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    before = os.environ.get("RAY_TMPDIR")
    os.environ["RAY_TMPDIR"] = folder
    yield folder
    if before is None:
        del os.environ["RAY_TMPDIR"]
    else:
        os.environ["RAY_TMPDIR"] = before
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="package")
def cluster(ray_folder: str) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={**HEAD, "_system_config": {**SOON, **NORMAL_PRIORITY}}, shutdown_at_exit=True
    )
    try:
        for _ in range(3):
            cluster.add_node(**SMALL)
        yield cluster
    finally:
        cluster.shutdown()
