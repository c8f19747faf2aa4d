"""One rule turns labels into preferences, for the studio, for `oncurve pairs --people` and for training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from oncurve.algos.advantages import grade
from oncurve.errors import RunError
from oncurve.records import Prompt, ScoredGroup, StepReport
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.feedback import (
    FILE,
    Dispute,
    Ranking,
    add_label,
    preference_lines,
    read_labels,
    read_preferences,
    training_preferences,
)
from oncurve.runs.step_notes import collect_notes
from tests.studio.samples import eval_report, scored, step_report

CHAT = Prompt("chat/1", messages=({"role": "user", "content": "1+2?"},))
TEXT = Prompt("text/1", text="1+2=")
RANKING = {"type": "ranking", "stage": "grpo", "step": 1, "group": 0}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunWriter]:
    """Step 1 of `grpo`: completions 0 to 3 of group 0 have total rewards 1.1, 1.0, 0.1 and 0. And an evaluation."""
    with RunWriter.create(tmp_path) as store:
        store.begin_stage("grpo", "grpo", 0, 4)
        store.record_step(step_report(1))
        store.record_eval(eval_report(1, 0.5))
        yield store


def write(run: Path, *lines: object) -> None:
    (run / FILE).write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))


def test_training_learns_from_the_same_preferences_as_the_export(store: RunWriter, tmp_path: Path) -> None:
    """A ranking of four decides six pairs; a dispute of the last one (0, should be 0.5) sets it over one and under two."""
    write(tmp_path, {**RANKING, "tiers": [[3], [2], [1], [0]]})
    add_label(tmp_path, store, Dispute(stage="grpo", step=1, group=0, completion=3, reward=0.5))
    preferences = training_preferences(tmp_path, store, "grpo", until=1)
    assert [preference.agrees for preference in preferences] == [False] * 6 + [True, True, False]
    assert preferences == read_preferences(tmp_path, store)
    assert preference_lines(preferences).count("\n") == 9


def test_training_sees_its_own_stage_up_to_its_step_and_never_the_held_out_split(store: RunWriter, tmp_path: Path) -> None:
    write(tmp_path, {**RANKING, "tiers": [[0], [1]]}, {**RANKING, "kind": "eval", "tiers": [[0]]})
    assert len(training_preferences(tmp_path, store, "grpo", until=1)) == 1
    assert training_preferences(tmp_path, store, "grpo", until=0) == []
    assert training_preferences(tmp_path, store, "sft", until=1) == []
    write(tmp_path, {**RANKING, "kind": "eval", "tiers": [[0]]})
    assert len(read_labels(tmp_path)) == 1
    assert training_preferences(tmp_path, store, "grpo", until=1) == []


def test_a_line_that_is_no_label_is_skipped_and_noted(store: RunWriter, tmp_path: Path) -> None:
    write(tmp_path, {**RANKING, "tiers": [[0], [1]]}, {"type": "ranking", "stage": "grpo"}, '{"stage": "grpo", "st')
    with collect_notes() as notes:
        assert len(training_preferences(tmp_path, store, "grpo", until=1)) == 1
    assert [note.kind for note in notes] == ["people", "people"]
    assert '{"stage": "grpo", "st' in notes[1].message


def test_a_label_about_a_completion_that_is_not_there_decides_nothing(store: RunWriter, tmp_path: Path) -> None:
    write(tmp_path, {**RANKING, "tiers": [[0], [9]]}, {**RANKING, "group": 77, "tiers": [[0], [1]]})
    assert training_preferences(tmp_path, store, "grpo", until=1) == []
    with pytest.raises(RunError, match="4 completions were recorded there"):
        add_label(tmp_path, store, Ranking(stage="grpo", step=1, group=0, tiers=[[0], [9]]))


def with_texts(better: str, worse: str, prompt: Prompt = TEXT) -> StepReport:
    """A step whose first group has these two texts."""
    group = scored(prompt, ("right", "wrong"), 1)
    both = zip(group.scored, (better, worse), strict=True)
    rows = tuple(replace(one, completion=replace(one.completion, text=text)) for one, text in both)
    new = ScoredGroup(replace(group.group, completions=tuple(one.completion for one in rows)), rows)
    (graded,) = grade([new], baseline="mean", scale="group", eps=1e-4, mask_cut=False)
    return StepReport("grpo", 1, {}, {}, (graded,), ((None, None),))


@pytest.mark.parametrize(("better", "worse", "count"), [("3", " 3\n", 0), ("3", " ", 0), ("", "3", 0), ("3", "4", 1)])
def test_blank_and_equal_texts_make_no_pair(tmp_path: Path, better: str, worse: str, count: int) -> None:
    with RunWriter.create(tmp_path) as store:
        store.begin_stage("grpo", "grpo", 0, 4)
        store.record_step(with_texts(better, worse))
        write(tmp_path, {**RANKING, "tiers": [[0], [1]]})
        assert len(read_preferences(tmp_path, store)) == count


def test_a_chat_prompt_stays_a_list_of_messages(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path) as store:
        store.begin_stage("grpo", "grpo", 0, 4)
        store.record_step(with_texts("3", "4", CHAT))
        write(tmp_path, {**RANKING, "tiers": [[0], [1]]})
        row = json.loads(preference_lines(read_preferences(tmp_path, store)))
    assert row == {"prompt": [{"role": "user", "content": "1+2?"}], "chosen": "3", "rejected": "4"}


def test_the_last_label_of_a_subject_holds_and_may_withdraw_it(store: RunWriter, tmp_path: Path) -> None:
    write(tmp_path, {**RANKING, "tiers": [[0], [1]]}, {**RANKING, "tiers": [[1], [0]]})
    assert [preference.agrees for preference in read_preferences(tmp_path, store)] == [False]
    write(tmp_path, {**RANKING, "tiers": [[0], [1]]}, {**RANKING, "tiers": []})
    assert read_labels(tmp_path) == []
