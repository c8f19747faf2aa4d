"""The reward `reasoning_gym`: answers are scored by our own checks, else by the package's scorer inside of the sandbox.

The package's scorers are not safe: some execute the answer (`__import__("os").system(…)`), some never return (`9**9**9`), some
accept one and the same answer to every problem. `reasoning_gym_scorer` keeps them from executing anything, the sandbox limits
their time, and families whose scorer accepts too much have our own checks (`reasoning_gym_checks`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group, Prompt
from oncurve.rewards.base import Result, Score, missing_column, not_applicable, score_concurrently
from oncurve.rewards.sandbox.sandbox import Limits, Sandbox, find_sandbox
from oncurve.rewards.verifiers.answer import short
from oncurve.rewards.verifiers.answer_extraction import Take, answer_in
from oncurve.rewards.verifiers.reasoning_gym_checks import CHECKS, equal

MAX_LENGTH = 5000
"""Characters of an answer; a longer one is wrong."""
SCORER = Path(__file__).with_name("reasoning_gym_scorer.py").read_text("utf-8")
"""The program that runs the package's scorer in the sandbox."""


class GymRewardOptions(Section):
    """1 for the right answer to a problem of the task `reasoning_gym`, else 0."""

    take: Take = "tag"
    """Where the answer is read from: `tag`, `boxed`, `hashes`, `number`, or `any`, the first of these that is present."""
    partial: bool = False
    """Use the partial credit of the package's scorers for wrong answers; if false, they get 0."""
    seconds: PositiveFloat = 10.0
    """Time limit of a scorer; an answer that exceeds it is wrong."""
    memory_mb: PositiveInt = 4096
    """Address space of a scorer."""
    workers: PositiveInt | None = None
    """Scorers that run concurrently; unset: one per core, at most 8."""


@dataclass(frozen=True)
class ReasoningGymReward:
    """1 for the right answer, else 0. Does not apply to prompts of other tasks."""

    name: str
    weight: float
    options: GymRewardOptions = field(default_factory=GymRewardOptions)
    is_async: bool = field(default=True, init=False)

    @cached_property
    def sandbox(self) -> Sandbox:
        """Started for the first family without our own check, because importing the package takes long."""
        return find_sandbox(f"rewards.{self.name}", count=self.options.workers, package="reasoning_gym")

    def missing_columns(self, prompt: Prompt) -> str | None:
        return missing_column(prompt, "gym", "family")

    def score(self, group: Group) -> list[Result]:
        columns = group.prompt.columns
        if "gym" not in columns or "family" not in columns:
            return not_applicable(group, "the prompt is not of the task reasoning_gym")
        check = CHECKS.get(columns["family"], None if columns["gym"].get("scorer") else equal)
        count = 1 if check is not None else self.sandbox.workers.count
        return score_concurrently(group, lambda completion: self._score(completion, columns, check), count)

    def _score(self, completion: Completion, columns: Any, check: Any) -> Score:
        answer = answer_in(completion.text, self.options.take)
        if answer is None:
            return Score(0.0, "no answer found")
        if check is not None:
            right = len(answer) <= MAX_LENGTH and check(answer, columns)
            return Score(float(right), f"{short(answer)} is {'right' if right else 'not right'}")
        if len(answer) > MAX_LENGTH:
            return Score(0.0, f"{short(answer)} is too long")
        return self._run_package_scorer(answer, columns)

    def _run_package_scorer(self, answer: str, columns: Any) -> Score:
        problem = columns["gym"]
        job = {"family": columns["family"], "seed": problem["seed"], "index": problem["index"], "settings": problem["settings"]}
        limits = Limits(self.options.seconds, self.options.memory_mb << 20)
        stdin = json.dumps({**job, "answer": answer})
        outcome = self.sandbox.run({"kind": "program", "program": SCORER, "stdin": stdin}, limits)
        ended, output = outcome["ended"], outcome["output"].strip()
        if ended == "time":
            return Score(0.0, f"{short(answer)} takes more than {self.options.seconds:g} s to judge")
        if ended != "exit 0":
            raise RuntimeError(f"the scorer of {columns['family']} ended in {ended}: {outcome['errors'][-200:]}")
        value = float(json.loads(output.rpartition("\n")[2])["score"])
        counted = value if self.options.partial or value >= 1 else 0.0
        return Score(min(1.0, max(0.0, counted)), f"{short(answer)} scores {value:g}")
