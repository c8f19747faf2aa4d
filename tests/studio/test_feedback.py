"""The HTTP API of labels: they are stored in the run's folder, the last one holds, and they become pairs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncurve.runs.feedback import FILE
from tests.studio.samples import HOSTILE, TEXTS, make_run
from tests.studio.serving import Served, served

WHERE = {"stage": "grpo", "step": 1, "kind": "train", "group": 0}


@pytest.fixture
def studio_with_run(tmp_path: Path) -> Iterator[Served]:
    make_run(tmp_path, "mine", steps=1)
    with served(tmp_path) as result:
        yield result


def label(studio_with_run: Served, **data: object) -> dict[str, object]:
    answer = studio_with_run.ask("/api/runs/mine/feedback", body={**WHERE, **data})
    assert answer.status == 200, answer.body
    result: dict[str, object] = answer.json
    return result


def test_a_ranking_becomes_pairs_and_is_held_against_the_reward(studio_with_run: Served) -> None:
    """Totals are 1.1, 1.0, 0.1, 0: a person ranks 1 over 0 (the reward does not) and both over the tier of 2 and 3."""
    data = label(studio_with_run, type="ranking", tiers=[[1], [0], [2, 3]])
    assert {key: data[key] for key in ("pairs", "agree", "disagree", "undecided")} == {
        "pairs": 5, "agree": 4, "disagree": 1, "undecided": 0,
    }  # fmt: skip
    lines = studio_with_run.ask("/api/runs/mine/pairs.jsonl").body.decode().splitlines()
    assert json.loads(lines[0]) == {"prompt": "1+2=", "chosen": TEXTS["plain"], "rejected": TEXTS["right"]}
    assert len(lines) == 5


def test_the_last_label_holds_and_can_be_taken_back(studio_with_run: Served) -> None:
    label(studio_with_run, type="ranking", tiers=[[0], [1]])
    assert label(studio_with_run, type="ranking", tiers=[[1], [0]])["disagree"] == 1
    assert label(studio_with_run, type="ranking", tiers=[])["labels"] == []
    assert len((studio_with_run.runs_dir / "mine" / FILE).read_text().splitlines()) == 3


def test_a_dispute_sets_a_completion_against_the_others(studio_with_run: Served) -> None:
    """Completion 3 got 0 and should have had 2: above all others, against the reward in each of the three pairs."""
    data = label(studio_with_run, type="dispute", completion=3, reward=2.0, note="it is art")
    assert (data["pairs"], data["disagree"]) == (3, 3)
    first = json.loads(studio_with_run.ask("/api/runs/mine/pairs.jsonl").body.decode().splitlines()[0])
    assert first["chosen"] == HOSTILE
    assert label(studio_with_run, type="dispute", completion=3, reward=None)["pairs"] == 0


@pytest.mark.parametrize(
    "data",
    [
        {"type": "ranking", "tiers": [[0], [9]]},
        {"type": "ranking", "tiers": [[0], [0]]},
        {"type": "ranking", "tiers": [[-1]]},
        {"type": "dispute", "completion": 4, "reward": 1.0},
        {"type": "dispute", "completion": 0, "reward": "much"},
        {"type": "dispute", "completion": 0, "reward": 1.0, "group": 99},
        {"type": "odd"},
        {},
    ],
)
def test_a_label_of_nothing_is_refused(studio_with_run: Served, data: dict[str, object]) -> None:
    assert studio_with_run.ask("/api/runs/mine/feedback", body={**WHERE, **data}).status in (404, 422)
    assert not (studio_with_run.runs_dir / "mine" / FILE).exists()


def test_lines_that_are_no_labels_are_skipped(studio_with_run: Served) -> None:
    label(studio_with_run, type="ranking", tiers=[[0], [1]])
    with (studio_with_run.runs_dir / "mine" / FILE).open("ab") as file:
        file.write(b'not json\n[1]\n{"type": "ranking"}\n\xff\n')
    assert studio_with_run.ask("/api/runs/mine/feedback").json["pairs"] == 1


def test_how_far_people_agree(studio_with_run: Served) -> None:
    """Three people rank: of 3 × 3 shared pairs, by hand, 5 agree. Two of the 18 verdicts are a tie."""
    for rater, tiers in (("ann", [[0], [1], [2]]), ("bob", [[0], [2], [1]]), ("cy", [[0, 1], [2], [3]])):
        data = label(studio_with_run, type="ranking", rater=rater, tiers=tiers)
    # ann–bob: 01 yes, 02 yes, 12 no. ann–cy: 01 no (a tie), 02 yes, 12 yes. bob–cy: 01 no, 02 yes, 12 no.
    ties = 2 / 18  # cy's tie counts against each of the two others
    chance = ties**2 + 2 * ((1 - ties) / 2) ** 2
    expected = {"raters": 3, "pairs": 9, "agreed": 5, "kappa": pytest.approx((5 / 9 - chance) / (1 - chance))}
    assert data["raters"] == expected
    assert len(data["labels"]) == 3  # type: ignore[arg-type]
    replaced = label(studio_with_run, type="ranking", rater="bob", tiers=[[0], [1], [2]])
    assert replaced["raters"]["agreed"] == 7  # type: ignore[index]
    assert len(replaced["labels"]) == 3  # type: ignore[arg-type]
