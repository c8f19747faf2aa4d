"""Asynchronous runs: samplers work ahead by at most `max_staleness` updates, and continue with new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oncurve.recipe.load import load_recipe
from oncurve.runs.database.reader import RunReader
from tests.cluster.started import Started, each_group_once
from tests.faults.cases import FORMAT, GRPO, PATIENT, recipe

pytestmark = pytest.mark.slow
STEPS, MAX_STALENESS = 40, 2
LONG = {**GRPO, "steps": STEPS, "save_every": 10, "eval_every": 15, "sampling": {"max_new_tokens": 40, "min_new_tokens": 24}}


def test_samplers_run_ahead_and_no_token_is_older_than_allowed(cluster: Any, tmp_path: Path) -> None:
    """One sampler is killed: its groups are started again, with weights that are at least as new."""
    run = recipe(
        LONG, rewards=[PATIENT, FORMAT], engine={"check_every": 1}, scale={"samplers": 2, "max_staleness": MAX_STALENESS}
    )
    started = Started.begin(tmp_path / "ray", run, cluster.address)
    started.until(12)
    started.kill("sampler-1")
    started.end()
    each_group_once(started.run, STEPS, 3)
    ages, mixed = [], 0
    with RunReader.open(started.run.path) as store:
        for step in range(1, STEPS + 1):
            report, versions = store.step("grpo", step), store.versions("grpo", step)
            of_step = [step - 1 - version for spans in versions.values() for _, version in spans]
            assert len(versions) == 3 * 4, "every completion records the versions of its weights"
            assert report.metrics["staleness_max"] == max(of_step)
            assert 0 <= report.metrics["staleness"] <= MAX_STALENESS
            ages += of_step
            mixed += sum(len(spans) > 1 for spans in versions.values())
            for stored in (store.group("grpo", step, position) for position in range(3)):
                assert all(np.isfinite(c.logps).all() for c in stored.graded.group.completions)
    assert max(ages) <= MAX_STALENESS
    assert max(ages) > 0, "nothing was prefetched"
    assert mixed > 0, "no completion spans an update"
    stage = load_recipe(started.run.recipe).stages[0]
    assert getattr(stage, "importance_cap", None) == 2.0
