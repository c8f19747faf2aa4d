"""Runs in a notebook: data frames, HTML, the live chart, the studio inline; and the notebooks of examples/ themselves."""

from __future__ import annotations

import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import oncurve
from oncurve.errors import MissingPackage
from oncurve.notebook import GroupList, MetricCurve

ROOT = Path(__file__).parents[1]
ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(6)]


def writes_tags(completion: str) -> float:
    """Text that HTML would read as a tag must be shown as text."""
    return float("<" in completion) + 0.1 * len(completion)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> oncurve.Run:
    return oncurve.train(
        model="tiny",
        prompts=ROWS,
        rewards=[writes_tags],
        steps=3,
        group_size=4,
        prompts_per_step=4,
        sampling={"max_new_tokens": 3},
        quiet=True,
        out=tmp_path_factory.mktemp("runs") / "<b>run",
    )


def test_a_curve_is_a_list_and_a_series(run: oncurve.Run) -> None:
    curve = run.metrics("reward")
    assert [step for step, _ in curve] == [1, 2, 3]
    series = curve.to_pandas()
    assert series.index.name == "step"
    assert list(series.items()) == list(curve)
    assert "<svg" in curve._repr_html_()
    assert "no values" in run.metrics("teacher_divergence")._repr_html_()


def test_all_metrics_are_one_table(run: oncurve.Run) -> None:
    table = run.metrics()
    frame = table.to_pandas()
    assert list(frame.index) == [1, 2, 3]
    assert list(frame["reward"]) == [value for _, value in run.metrics("reward")]
    assert {"reward", "entropy", "loss", "reward/writes_tags"} <= set(frame.columns)
    assert table._repr_html_().count("<svg") > 5


def test_groups_are_a_tuple_and_a_frame(run: oncurve.Run) -> None:
    groups = run.groups(step=2)
    assert isinstance(groups, tuple)
    frame = groups.to_pandas()
    assert len(frame) == 16
    assert set(frame["prompt"]) <= {row["prompt"] for row in ROWS}
    assert (frame["reward"] == frame["reward/writes_tags"]).all()
    assert frame.groupby("group")["advantage"].sum().abs().max() < 1e-4
    texts = [scored.completion.text for group in groups for scored in group.scored.scored]
    assert list(frame["text"]) == texts


def test_html_shows_a_models_text_as_text(run: oncurve.Run) -> None:
    html = run._repr_html_()
    assert "<b>run" not in html
    assert "&lt;b&gt;run" in html
    shown = run.groups(step=1)._repr_html_()
    for group in run.groups(step=1)[:3]:
        assert not any(s.completion.text in shown for s in group.scored.scored if "<" in s.completion.text)


def test_without_pandas_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackage, match="notebook"):
        MetricCurve("reward", [(1, 0.5)]).to_pandas()
    with pytest.raises(MissingPackage):
        GroupList().to_pandas()


def test_the_studio_runs_inline_and_only_for_pages_of_this_machine(run: oncurve.Run) -> None:
    frame = run.studio()
    try:
        address = frame.address.partition("#")[0]
        with urllib.request.urlopen(address, timeout=30) as response:
            policy = response.headers["content-security-policy"]
        assert "frame-ancestors http://127.0.0.1:* http://localhost:*" in policy
        assert f'src="{address}#/runs?run=%3Cb%3Erun"' in frame._repr_html_()
    finally:
        frame.close()
    assert not frame.thread.is_alive()


NOTEBOOKS = ("first_run", "own_reward_and_data", "lora", "agent", "read_a_run")


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell runs; cells assert their results."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "notebooks are stored without outputs"
    done = NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs: list[Any] = [output for cell in done.cells for output in cell.get("outputs", [])]
    html = "".join("".join(output["data"].get("text/html", "")) for output in outputs if "data" in output)
    assert "IProgress" not in "".join(output.get("text", "") for output in outputs)  # a warning of tqdm
    if name != "read_a_run":  # trained with a live chart
        assert "<svg" in html
        assert "finished" in html
    if name == "first_run":
        assert "<iframe" in html


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.ipynb")} == set(NOTEBOOKS)
