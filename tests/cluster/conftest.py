"""A Ray cluster of three nodes and a head on this machine, made for the tests of this folder and gone with them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

SMALL: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 << 20}
HEAD = {**SMALL, "num_cpus": 0, "include_dashboard": False}
"""No actor is placed there: each of the other nodes can be killed."""
SOON = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""A node that is gone is missed within a few seconds."""
AS_EAGER = {"worker_niceness": 0}
"""Ray's workers stand back behind everything else of a machine unless told otherwise: behind other tests, here."""


@pytest.fixture(scope="package")
def ray_folder() -> Iterator[str]:
    """A place of the cluster's own for its sockets and logs; their paths must be short."""
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

    made = Cluster(initialize_head=True, head_node_args={**HEAD, "_system_config": {**SOON, **AS_EAGER}}, shutdown_at_exit=True)
    try:
        for _ in range(3):
            made.add_node(**SMALL)
        yield made
    finally:
        made.shutdown()
