"""The report: one self-contained file, in which text written by a model stays text."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from oncurve.errors import OncurveError
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
from oncurve.studio.report import chart, report_html, ticks, title_of
from tests.studio.samples import HOSTILE, eval_report, make_free_run, make_run, step_report


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    return report_html(make_run(tmp_path_factory.mktemp("runs"), "sums"))


def test_it_has_curves_groups_and_the_recipe(report: str) -> None:
    assert report.count("<svg") == 13
    assert "Best groups of the last 4 steps" in report
    assert "Worst groups" in report
    assert "[[stages]]" in report
    assert "50.0 %" in report


def test_without_a_verifiable_reward_it_has_the_held_out_reward(tmp_path: Path, report: str) -> None:
    free = report_html(make_free_run(tmp_path, "talk"))
    assert "<h2>Held-out reward</h2>" in free
    assert "<td>grpo 0</td><td>−1.25</td>" in free
    assert "<td>grpo 4</td><td>0.50</td>" in free
    assert "Held-out accuracy" not in free
    assert "Held-out reward" not in report


def test_it_fetches_nothing_and_runs_nothing(report: str) -> None:
    parser = Elements()
    parser.feed(report)
    assert not {"script", "img", "link", "iframe", "object"} & {tag for tag, _ in parser.seen}
    assert not [attrs for _, attrs in parser.seen if {"src", "href", "onerror", "onclick"} & set(attrs)]
    assert HOSTILE not in report
    assert "&lt;img src=x" in report


def test_a_run_without_a_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, "young", steps=0)
    assert "young" in report_html(run)


def test_a_broken_run_is_an_error_not_half_a_report(runs_dir: Path) -> None:
    with pytest.raises(OncurveError):
        report_html(RunFolder(runs_dir / "torn"))


def test_ticks_are_round() -> None:
    assert ticks(0.0, 1.0) == [0.0, 0.5, 1.0]
    assert ticks(0.0, 100.0, 5) == [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    assert ticks(3.0, 3.0) == [3.0]


def test_titles_and_numbers_are_those_of_people() -> None:
    assert [title_of(name) for name in ("kl", "no_signal_share", "clip_share", "memory_mib", "sample_tokens_per_s")] == [
        "KL to the reference",
        "Groups without signal",
        "Clip fraction",
        "Memory MiB",
        "Sample tokens per second",
    ]
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", chart("no_signal_share", [(1, 0.0), (2, 0.5), (3, 1.0)]))
    assert texts == ["0 %", "50 %", "100 %", "1", "2", "3"]


def test_a_chart_passes_over_what_is_no_number() -> None:
    charts = chart("loss", [(1, 1.0), (2, float("nan")), (3, 2.0)])
    line = re.search(r'points="([^"]+)"', charts)
    assert line is not None
    assert len(line[1].split()) == 2
    assert "no value" in chart("loss", [(1, float("nan"))])
    assert "polyline" in chart("flat", [(1, 0.5)])


def test_the_summary_comes_first_and_the_rest_unfolds(tmp_path: Path) -> None:
    """Results, verdicts and main curves before the first fold; no curve twice; entropy is that of everything sampled."""
    run = make_run(tmp_path, "run", steps=0, finished=False)
    with RunWriter.open(run.path) as store:
        for step in (1, 2, 3):
            report = step_report(step)
            store.record_step(replace(report, metrics={**report.metrics, "sampled_entropy": 0.25}))
        store.record_eval(eval_report(3, 0.75))
        store.record_event("warning", "grpo 2: entropy is low. Raise it", stage="grpo", step=2)
    text = report_html(run)
    summary, _, rest = text.partition("<details")
    assert "Best held-out accuracy <b>75.0 %</b> of 2 prompts at grpo 3, from 50.0 % at grpo 0" in summary
    assert "entropy is low." in summary
    assert "Raise it" in summary
    assert 1 <= summary.count("<svg") <= 7
    assert "title='sampled_entropy'" in summary
    assert "title='entropy'" in rest
    titles = re.findall(r"<h3 title='([^']+)'", text)
    assert len(titles) == len(set(titles))
    assert all(part in rest for part in ("All evaluations", "All curves of grpo", "Best groups", "[[stages]]"))
