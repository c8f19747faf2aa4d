"""One studio with one folder of runs for all of these tests. A test that writes to a run makes its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.studio.samples import make_broken, make_run
from tests.studio.serving import Served, served


@pytest.fixture(scope="session")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_broken(folder)
    make_run(folder, "sums-1")
    make_run(folder, "sums-2", steps=6, sets=("grpo.optimiser.learning_rate=0.001", "seed=7"))
    return folder


@pytest.fixture(scope="session")
def studio(runs_dir: Path) -> Iterator[Served]:
    with served(runs_dir) as studio_server:
        yield studio_server
