from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from oncurve.records import EvalReport
from oncurve.terminal.evaluation import accuracy_table, eval_data, interval_of, wilson


def test_wilson_by_hand() -> None:
    """8 of 10: z² = 3.84146; (0.8 + 0.192073 ± 1.959964 √(0.016 + 0.00960365)) / 1.384146."""
    assert wilson(0.8, 10) == pytest.approx((0.490157, 0.943320), abs=2e-5)
    assert wilson(0.0, 20)[0] == 0.0
    assert wilson(1.0, 20)[1] == 1.0
    assert wilson(0.5, 0) == (0.0, 1.0)


@given(st.integers(1, 500), st.data())
def test_wilson_holds_the_share_and_stays_within_0_and_1(count: int, data: st.DataObject) -> None:
    share = data.draw(st.integers(0, count)) / count
    low, high = wilson(share, count)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1


def test_several_answers_to_a_prompt_are_one_trial() -> None:
    assert interval_of(32, 40, 4) == wilson(0.8, 10)


def test_eval_as_data() -> None:
    report = EvalReport("grpo", 0, 0.75, 4, {"1 digit": (2, 2), "2 digits": (1, 2)}, {"reward": 0.8})
    data = eval_data(report, 1)
    assert data["accuracy"] == 0.75
    assert data["by_difficulty"]["2 digits"]["accuracy"] == 0.5
    assert data["metrics"] == {"reward": 0.8}


def test_the_table_has_the_last_measurement_of_each_stage() -> None:
    evals = [
        EvalReport("sft", 300, 0.4, 10, {"easy": (4, 10)}),
        EvalReport("grpo", 50, 0.6, 10, {"easy": (6, 10)}),
        EvalReport("grpo", 100, 0.9, 10, {"easy": (9, 10)}),
    ]
    table = accuracy_table(evals)
    assert [list(column.cells) for column in table.columns] == [["easy", "all"], ["40.0 %", "40.0 %"], ["90.0 %", "90.0 %"]]


@pytest.mark.parametrize("columns", [80, 120])
def test_many_stages_are_named_in_full(columns: int) -> None:
    names = ("cold_start", "reasoning", "own_best", "everything")
    out = io.StringIO()
    Console(file=out, width=columns).print(accuracy_table([EvalReport(name, 1, 1.0, 4, {}) for name in names]))
    assert all(name in out.getvalue() for name in names)
    assert out.getvalue().count("100.0 %") == 4
    assert "…" not in out.getvalue()
