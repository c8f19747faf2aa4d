from __future__ import annotations

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from oncurve.records import Aspect, Completion, EvalReport, Group, Prompt, ScoredCompletion, ScoredGroup
from oncurve.terminal.evaluation import (
    accuracy_table,
    eval_data,
    heldout_tables,
    interval_of,
    render_eval,
    reward_interval,
    wilson,
)


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


def test_an_estimate_is_not_shown_as_a_count() -> None:
    """Two problems, 1 and 0 of 4 right: pass@1 is 1/8, which is not a count of problems; pass@4 is one of two."""
    report = EvalReport("grpo", 0, 0.125, 2, {}, {"pass_at/1": 0.125, "pass_at/4": 0.5})
    rows = [line.split() for line in shown(render_eval(report, "x", 4))]
    assert [row[-1] for row in rows if row[:1] == ["pass@1"]] == ["–"]
    assert [row[-3:] for row in rows if row[:1] == ["pass@4"]] == [["1", "of", "2"]]


def test_the_table_has_the_last_measurement_of_each_stage() -> None:
    evals = [
        EvalReport("sft", 300, 0.4, 10, {"easy": (4, 10)}),
        EvalReport("grpo", 50, 0.6, 10, {"easy": (6, 10)}),
        EvalReport("grpo", 100, 0.9, 10, {"easy": (9, 10)}),
    ]
    table = accuracy_table(evals)
    assert [list(column.cells) for column in table.columns] == [["easy", "all"], ["40.0 %", "40.0 %"], ["90.0 %", "90.0 %"]]


def graded(*totals: float | None) -> ScoredGroup:
    empty = np.zeros(1, np.float32)
    one = Completion(np.zeros(1, np.int64), "", "end", empty, empty, empty, np.ones(1, bool))
    scored = tuple(ScoredCompletion(one, (Aspect("model", t, failure=None if t is not None else "broke"),)) for t in totals)
    return ScoredGroup(Group(Prompt(id="p", text="1"), np.zeros(1, np.int64), (one,) * len(totals)), scored)


def shown(part: RenderableType) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80).print(part)
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_without_a_verifiable_reward_the_measure_is_the_mean_reward() -> None:
    """Prompts' means 1, 3 and −1 have mean 1 and std 2: 1 ± 1.959964 · 2 / √3. Answers to one prompt are one trial."""
    groups = (graded(0.0, 2.0), graded(3.0, None), graded(-1.0, -1.0))
    report = EvalReport("grpo", 0, None, 3, {}, {"reward": 1.0, "length_mean": 5.0, "cut_share": 0.5}, groups)
    spread = 1.959964 * 2 / 3**0.5
    assert reward_interval(report) == pytest.approx((1 - spread, 1 + spread))
    data = eval_data(report, 2)
    assert data["accuracy"] is None
    assert data["interval"] is None
    assert data["reward"] == 1.0
    assert data["reward_interval"] == pytest.approx([1 - spread, 1 + spread])
    assert not [key for key in data if "pass" in key]
    assert json.loads(json.dumps(data)) == data
    assert shown(render_eval(report, "run-1 on hh, 3 held-out problems", 2)) == [
        "run-1 on hh, 3 held-out problems",
        "length 5.00 tokens · 50 % truncated · no accuracy: no verifiable reward",
        "",
        "reward 95 % interval answers",
        "mean 1.00 −1.26 – 3.26 6",
    ]
    assert reward_interval(EvalReport("grpo", 0, None, 1, {}, {"reward": 1.0}, groups[:1])) is None


def test_without_a_verifiable_reward_a_run_ends_with_its_reward_before_and_after() -> None:
    free = [EvalReport("grpo", step, None, 8, {}, {"reward": reward}) for step, reward in ((0, -1.5), (10, 0.1), (20, 0.25))]
    ((table, _),) = [heldout_tables(free)]
    assert shown(table) == ["held-out reward before grpo after grpo", "mean −1.50 0.25"]
    both = heldout_tables([EvalReport("sft", 3, 0.5, 8, {}), *free])
    assert shown(both[0])[0] == "held-out accuracy after sft"
    assert shown(both[2]) == shown(table)
    assert heldout_tables([]) == []


@pytest.mark.parametrize("columns", [80, 120])
def test_many_stages_are_named_in_full(columns: int) -> None:
    names = ("cold_start", "reasoning", "own_best", "everything")
    out = io.StringIO()
    Console(file=out, width=columns).print(accuracy_table([EvalReport(name, 1, 1.0, 4, {}) for name in names]))
    assert all(name in out.getvalue() for name in names)
    assert out.getvalue().count("100.0 %") == 4
    assert "…" not in out.getvalue()
