"""Asynchronous runs: samplers write ahead, by at most as many updates as the recipe allows, and go on with new weights."""

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
STEPS, MOST = 40, 2
LONG = {**GRPO, "steps": STEPS, "save_every": 10, "eval_every": 15, "sampling": {"max_new_tokens": 40, "min_new_tokens": 24}}


def test_samplers_run_ahead_and_no_token_is_older_than_allowed(cluster: Any, tmp_path: Path) -> None:
    """And a sampler is killed on the way: what it had begun is begun again, by weights that are at least as new."""
    asked = recipe(LONG, rewards=[PATIENT, FORMAT], engine={"check_every": 1}, scale={"samplers": 2, "max_staleness": MOST})
    started = Started.begin(tmp_path / "ray", asked, cluster.address)
    started.until(12)
    started.kill("sampler-1")
    started.end()
    each_group_once(started.run, STEPS, 3)
    ages, mixed = [], 0
    with RunReader.open(started.run.path) as store:
        for step in range(1, STEPS + 1):
            report, versions = store.step("grpo", step), store.versions("grpo", step)
            of_step = [step - 1 - version for spans in versions.values() for _, version in spans]
            assert len(versions) == 3 * 4, "every completion says which weights wrote it"
            assert report.metrics["staleness_max"] == max(of_step)
            assert 0 <= report.metrics["staleness"] <= MOST
            ages += of_step
            mixed += sum(len(spans) > 1 for spans in versions.values())
            for kept in (store.group("grpo", step, place) for place in range(3)):
                assert all(np.isfinite(c.logps).all() for c in kept.graded.group.completions)
    assert max(ages) <= MOST
    assert max(ages) > 0, "nothing was written ahead"
    assert mixed > 0, "no completion was kept over an update"
    stage = load_recipe(started.run.recipe).stages[0]
    assert getattr(stage, "importance_cap", None) == 2.0
