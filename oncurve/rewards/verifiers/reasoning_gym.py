"""Answers to problems of reasoning-gym: by checks of our own, else by the package's scorer inside the sandbox.

Its scorers are not safe: some execute the answer (`__import__("os").system(…)`), some never end (`9**9**9`). In the sandbox
neither does harm; but a scorer that executes an answer can be told by it what to say. So answers that call what a program needs
are wrong before a scorer sees them, and families with checks of our own (`gym_checks`) never come there.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group
from oncurve.rewards.base import Result, Score, not_applicable, score_concurrently
from oncurve.rewards.sandbox.sandbox import Limits, Sandbox, find_sandbox
from oncurve.rewards.verifiers.answer import short
from oncurve.rewards.verifiers.answer_extraction import Take, answer_in
from oncurve.rewards.verifiers.reasoning_gym_checks import CHECKS, equal

LONGEST = 5000
_CODE = re.compile(
    r"__|\blambda\b[^\n]*:|\b(?:eval|exec|compile|open|print|exit|quit|globals|locals|vars|dir|getattr|setattr|delattr|hasattr"
    r"|breakpoint|input|type|object|super|help|memoryview|sympify|S|N|parse_expr|lambdify|preview|source)\s*\("
)
"""What no answer to a puzzle has, and a text that wants to choose its own score needs."""

SCORER = """
import json, sys
import reasoning_gym
job = json.loads(sys.stdin.read())
answer = job.pop("answer")
data = reasoning_gym.create_dataset(job["family"], seed=job["seed"], **job["settings"])
entry = data[job["index"]]
score = data.score_answer(answer, entry)
print(json.dumps({"score": float(score)}))
"""


class GymRewardOptions(Section):
    """Options of the reward `reasoning_gym`."""

    take: Take = "tag"
    """Where the answer is written: `tag`, `boxed`, `hashes`, `number`, or `any`, the first of these that is there."""
    partial: bool = False
    """Count what the package's own scorers give for answers that are not right; off: such answers get 0."""
    seconds: PositiveFloat = 10.0
    """Time limit of one scorer; an answer that takes longer is wrong."""
    memory_mb: PositiveInt = 4096
    """Address space of a scorer."""
    workers: PositiveInt | None = None
    """Scorers that run at once; unset: one per core, at most 8."""


@dataclass(frozen=True)
class ReasoningGymReward:
    """1 for a right answer, else 0. Does not apply to prompts that are not of the task `reasoning_gym`."""

    name: str
    weight: float
    options: GymRewardOptions = field(default_factory=GymRewardOptions)
    is_async: bool = field(default=True, init=False)

    @cached_property
    def sandbox(self) -> Sandbox:
        """Started when the first family without a check of our own comes up: it imports much."""
        return find_sandbox(f"rewards.{self.name}", count=self.options.workers, package="reasoning_gym")

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
            right = len(answer) <= LONGEST and check(answer, columns)
            return Score(float(right), f"{short(answer)} is {'right' if right else 'not right'}")
        if len(answer) > LONGEST or _CODE.search(answer):
            return Score(0.0, f"{short(answer)} is too long, or a program")
        return self._by_its_scorer(answer, columns)

    def _by_its_scorer(self, answer: str, columns: Any) -> Score:
        asked = columns["gym"]
        job = {"family": columns["family"], "seed": asked["seed"], "index": asked["index"], "settings": asked["settings"]}
        limits = Limits(self.options.seconds, self.options.memory_mb << 20)
        told = json.dumps({**job, "answer": answer})
        seen = self.sandbox.run({"kind": "program", "program": SCORER, "stdin": told}, limits)
        if seen["ended"] == "time":
            return Score(0.0, f"{short(answer)} takes more than {self.options.seconds:g} s to judge")
        if seen["ended"] != "exit 0":
            raise RuntimeError(f"the scorer of {columns['family']} ended in {seen['ended']}: {seen['output'].strip()[-200:]}")
        value = float(json.loads(seen["output"].strip().rpartition("\n")[2])["score"])
        counted = value if self.options.partial or value >= 1 else 0.0
        return Score(min(1.0, max(0.0, counted)), f"{short(answer)} scores {value:g}")
