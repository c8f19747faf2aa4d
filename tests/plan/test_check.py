"""bench/plan_check.py on a CPU with small shapes: what it plans, measures, reports and writes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from oncurve.plan.hardware import GIB, GPUS, find_gpu
from oncurve.plan.model_table import find_shape

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """Imported as when it runs as a script, with its own folder on sys.path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("plan_check")


def test_eight_settings_cover_sizes_algorithms_and_lengths(bench: ModuleType) -> None:
    settings = bench.SETTINGS
    assert len(settings) == 8
    sizes = [find_shape(s.model).parameters for s in settings]
    assert min(sizes) < 0.2e9
    assert max(sizes) > 3.9e9
    assert {s.algorithm for s in settings} == {"grpo", "ppo"}
    assert {s.lora for s in settings} == {True, False}
    assert len({(s.prompt_tokens, s.new_tokens) for s in settings}) == 2


def test_every_setting_is_planned_to_fit_an_h200(bench: ModuleType) -> None:
    for setting in bench.SETTINGS:
        planned = bench.planned(setting, setting.job(GPUS["H200"], tiny=False))
        assert planned.planned_memory < 130 * GIB, setting.name
        assert planned.planned_seconds < 40, setting.name


def test_what_holds_and_what_does_not(bench: ModuleType) -> None:
    base = bench.Checked("x", 100, {"update": 100}, 10.0, {"update": 10.0})
    assert base.holds is None
    assert replace(base, measured_memory=95, measured_seconds=9.0).holds is True
    assert replace(base, measured_memory=85, measured_seconds=9.0).holds is False
    assert replace(base, measured_memory=95, measured_seconds=7.0).holds is False
    assert replace(base, measured_memory=95, measured_seconds=9.0, said="broken").holds is None


def test_an_unsupported_stage_is_reported(bench: ModuleType) -> None:
    setting = replace(bench.SETTINGS[0], algorithm="rloo")  # an objective, not a stage
    row = bench.check(setting, find_gpu("cpu"), tiny=True)
    assert row.said == "there is no stage 'rloo' yet"
    assert "there is no stage 'rloo' yet" in bench.table([row])


def test_a_failing_run_is_reported(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench, "build", broken)
    row = bench.check(bench.SETTINGS[0], find_gpu("cpu"), tiny=True)
    assert row.said == "RuntimeError: out of memory"
    assert row.holds is None


@pytest.mark.parametrize("name", ["0.1B grpo full", "0.6B ppo full"])
def test_small_shapes_run(bench: ModuleType, name: str) -> None:
    setting = next(s for s in bench.SETTINGS if s.name == name)
    row = bench.check(setting, find_gpu("cpu"), tiny=True, steps=1)
    assert row.said is None
    assert row.measured_seconds > 0
    assert {"sample", "update"} <= set(row.measured_seconds_by_phase)
    assert row.measured_memory is None


def test_prompts_and_completions_have_exactly_the_planned_length(bench: ModuleType) -> None:
    job = bench.SETTINGS[0].job(find_gpu("cpu"), tiny=True)
    loop = bench.build(job, 1, bench.Meter(on_gpu=False))
    groups = loop.sample(1)
    assert {len(g.prompt_ids) for g in groups} == {job.prompt_tokens}
    assert {len(c.token_ids) for g in groups for c in g.completions} == {job.new_tokens}


@pytest.mark.slow
def test_results_are_written(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measured", lambda plan, job, steps: replace(plan, measured_seconds=plan.planned_seconds))
    out = tmp_path / "check.json"
    assert bench.main(["--device", "cpu", "--tiny", "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert len(data["settings"]) == 8
    assert data["settings"][0]["time_off"] == 0.0


def test_the_meter_counts_what_the_kv_cache_maps(bench: ModuleType) -> None:
    class Range:
        mapped = 0

    class Cache:
        range = Range()

        def open(self, pages: int, share: float) -> int:
            self.range.mapped = pages * 10
            return pages

    cache, meter = Cache(), bench.Meter(on_gpu=True)
    meter.watch(cache)
    assert cache.open(7, 0.8) == 7
    assert meter.mapped == 70


def test_settings_beyond_the_time_limit_are_reported(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measured", lambda plan, job, steps: replace(plan, measured_seconds=plan.planned_seconds))
    out = tmp_path / "check.json"
    assert bench.main(["--device", "cpu", "--tiny", "--seconds", "-1", "--out", str(out)]) == 1
    assert all("time was up" in row["said"] for row in json.loads(out.read_text())["settings"])


@pytest.mark.slow
def test_a_changed_plan_is_compared_with_stored_measurements(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measured", lambda plan, job, steps: replace(plan, measured_seconds=2 * plan.planned_seconds))
    out = tmp_path / "check.json"
    assert bench.main(["--device", "cpu", "--tiny", "--out", str(out)]) == 1
    plain = bench.seconds_of
    monkeypatch.setattr(bench, "seconds_of", lambda job: replace(plain(job), phases={"update": 2 * plain(job).step}))
    assert bench.main(["--again", "--out", str(out)]) == 0
    assert all(row["holds"] for row in json.loads(out.read_text())["settings"])
