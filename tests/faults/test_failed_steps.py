"""A step that fails: the run is saved as it was before the step, or not at all, and resumes to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oncurve.errors import RewardError
from oncurve.records import StepReport
from oncurve.runs.checkpoints.listing import list_checkpoints
from oncurve.runs.folder import RunFolder
from oncurve.training.listeners import Listener
from oncurve.training.start import begin, resume
from tests.faults import grading
from tests.faults.cases import FORMAT, GRPO, HERE, LEARNED, PAIRS, SFT, SHORT, recipe
from tests.faults.sameness import everything

BREAKABLE = {"type": "python", "name": "breakable", "function": f"{HERE}:breakable"}
SHORT_RUN = {**GRPO, "steps": 6, "save_every": 4, "eval_every": 0, "keep_checkpoints": 1, "max_failure_share": 0.1}
ITERATE = {"every": 2, "updates": 2, "batch_size": 4, "labeller": {"type": "python", "function": f"{HERE}:breakable"}}
CASES: dict[str, tuple[Any, int]] = {
    "carried over": (
        recipe({**SHORT_RUN, "carry_over": 1, "sampling": {"max_new_tokens": 24}}, rewards=[FORMAT, BREAKABLE]),
        2,
    ),
    "curriculum": (
        recipe(
            {**SHORT_RUN, "curriculum": {"unseen": 0.4}},
            task={"type": "arithmetic", "digits": 2, "heldout": 6},
            rewards=[{"type": "answer"}, BREAKABLE],
        ),
        2,
    ),
    "labeller": (
        recipe(
            {**SFT, "type": "reward_model", "data": str(PAIRS), "steps": 2, "eval_every": 0},
            {**SHORT_RUN, "kl": {"beta": 0.05}, "iterate": ITERATE},
            rewards=[LEARNED, SHORT],
        ),
        0,  # the labeller fails after the policy's update: half a step is not saved
    ),
}
"""A recipe, and the last step of grpo that is saved if its third step fails."""


class BreakAfterTwoSteps(Listener):
    def on_step(self, report: StepReport) -> None:
        grading.is_broken = (report.stage, report.step) == ("grpo", 2)


@pytest.mark.parametrize("name", CASES)
def test_a_run_whose_step_failed_resumes_to_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, saved = CASES[name]
    expected = begin(config, out=tmp_path / "expected")
    monkeypatch.setattr(grading, "is_broken", False)
    with pytest.raises(RewardError, match="could not be"):
        begin(config, out=tmp_path / "run", listeners=[BreakAfterTwoSteps()])
    run = RunFolder(tmp_path / "run")
    steps = [entry.step for entry in list_checkpoints(run.checkpoints) if entry.stage == "grpo"]
    assert max(steps, default=0) == saved
    grading.is_broken = False
    resume(run)
    assert everything(run) == everything(expected)
