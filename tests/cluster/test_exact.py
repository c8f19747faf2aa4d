"""A run on a cluster leaves the same bits as a single process, even if a sampler is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.started import Started, each_group_once, same_as_in_one_process
from tests.faults.cases import FORMAT, GRPO, HURRIED, recipe

STEPS = 60
RUN = recipe(
    {**GRPO, "steps": STEPS, "save_every": 10, "eval_every": 25},
    rewards=[HURRIED, FORMAT],
    scale={"samplers": 2, "reward_workers": 1},
)


@pytest.mark.slow
def test_a_run_whose_sampler_is_killed_ends_in_the_same_bits(cluster: Any, tmp_path: Path) -> None:
    """Each sampler writes half of the groups, and a worker computes rewards."""
    started = Started.begin(tmp_path / "ray", RUN, cluster.address)
    started.until(5)
    pid = started.kill("sampler-0")
    started.end()
    each_group_once(started.run, STEPS, 3)
    assert f"process {pid}) died" in " ".join(started.events())
    same_as_in_one_process(started.run, RUN, tmp_path / "plain")
