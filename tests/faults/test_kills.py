"""SIGKILL at chosen moments of every stage type: the resumed run equals one that was never killed, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.folder import RunFolder
from oncurve.training.stages.table import STAGES
from oncurve.training.start import begin
from tests.faults import children
from tests.faults.cases import CASES
from tests.faults.sameness import everything

SAMPLED = [
    ("sampling", 2), ("scoring", 2), ("grading", 3), ("backward", 4), ("in an update", 3), ("before a commit", 2),
    ("in a commit", 2), ("after a commit", 3), ("amid a checkpoint's file", 2), ("between writing and renaming", 2),
    ("between renaming and pruning", 1), ("measuring", 1), ("writing the model", 1),
]  # fmt: skip
"""(moment, its call in that process): a later process is killed further on in the run."""
TAUGHT = [
    ("backward", 2), ("in an update", 3), ("in a commit", 2), ("amid a checkpoint's file", 1),
    ("between writing and renaming", 1), ("measuring", 1), ("writing the model", 1),
]  # fmt: skip
"""A stage without samples has fewer moments."""
MOMENTS_OF = {
    "sft": TAUGHT,
    "rejection sampling": [  # first what takes samples, then what imitates them
        ("sampling", 2),
        ("scoring", 2),
        ("before a commit", 2),
        ("in a commit", 2),
        ("amid a checkpoint's file", 1),
        ("between writing and renaming", 1),
        ("backward", 2),
        ("in an update", 2),
        ("measuring", 1),
        ("writing the model", 1),
    ],
    "dpo": TAUGHT,
    "without a verifiable reward": [("measuring", 1), ("sampling", 2), *SAMPLED],  # it is measured before its first step too
    "ppo": [m for m in SAMPLED if m[0] != "grading"],  # graded by its critic
    "trpo": [m for m in SAMPLED if m[0] not in ("backward", "in an update")],  # a natural gradient has no optimiser
}
QUICK = [
    ("backward", 4),
    ("in a commit", 1),
    ("amid a checkpoint's file", 2),
    ("between writing and renaming", 1),
    ("grading", 1),
]


def killed(path: Path, recipe: Recipe, moments: list[tuple[str, int]]) -> RunFolder:
    """The run, killed at each of the moments in turn and then finished."""
    for moment, call in moments:
        assert children.run(path, recipe, moment, call) == -9, f"it ended before it could be killed: {moment}"
        assert RunFolder(path).state().current_status == "interrupted"
    assert children.run(path, recipe) == 0
    return RunFolder(path)


def test_five_kills_in_one_run_change_no_bit(tmp_path: Path) -> None:
    run = killed(tmp_path / "killed", CASES["iterative"], QUICK)
    assert everything(run) == everything(begin(CASES["iterative"], out=tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kills_at_every_moment_of_every_stage_change_no_bit(case: str, tmp_path: Path) -> None:
    run = killed(tmp_path / "killed", CASES[case], MOMENTS_OF.get(case, SAMPLED))
    assert everything(run) == everything(begin(CASES[case], out=tmp_path / "whole"))


def test_every_stage_type_has_enough_kills() -> None:
    """At least fifty kills over all stages, besides the random ones of tests/e2e."""
    settings = {case: len(MOMENTS_OF.get(case, SAMPLED)) for case in CASES}
    assert sum(settings.values()) >= 50
    covered = {stage.type for case in CASES.values() for stage in case.stages}
    missing = {kind.model_fields["type"].default for kind in STAGES} - covered
    assert missing == {"training_free"}, "which asks an endpoint: test_kills_of_judges.py"
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    for case, count in settings.items():
        assert f"| {case} | {count} |" in page, f"docs/reliability.md does not say that '{case}' is killed {count} times"
    assert f"Together these are {sum(settings.values())} + 39" in page
