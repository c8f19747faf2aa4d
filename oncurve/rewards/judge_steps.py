"""A judge as the source of step rewards: one question for all steps of a completion, one score for each.

    r_k = (s_k − low) / (high − low)

The steps are fenced like everything that a judge reads (`judge`); a reply with another number of scores is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from oncurve.recipe.sections import Section
from oncurve.records import Prompt
from oncurve.rewards.function import finished
from oncurve.rewards.judge import JudgeOptions, client_for, parsed, request, share
from oncurve.rewards.judge_client import JudgeReplyError

SHAPE = (
    '{{"scores": [a number from {low:g} to {high:g} for each of the {count} steps, in order], "reason": "one sentence"}}. '
    "Judge each step by itself: is it right, given the question and the steps before it?"
)


class _Steps(Section):
    scores: tuple[float, ...]
    reason: str = ""


class StepJudge:
    """Asks about the steps of one completion at a time."""

    def __init__(self, options: JudgeOptions, where: str) -> None:
        self.options, self._client = options, client_for(options, where)

    def score(self, prompt: Prompt, steps: Sequence[str]) -> list[float]:
        """One reward per step; raises what keeps the judge from answering."""
        if not steps:
            return []
        titles = [f"Step {n}" for n in range(1, len(steps) + 1)]
        shape = SHAPE.format(low=self.options.scale[0], high=self.options.scale[1], count=len(steps))
        asked = request(self.options, prompt, titles, steps, shape)
        (scores,) = finished([self._client.ask(asked, lambda reply: self._read(reply, len(steps)))])
        if isinstance(scores, BaseException):
            raise scores
        return list(scores)

    def _read(self, reply: str, count: int) -> list[float]:
        scores = parsed(_Steps, reply).scores
        if len(scores) != count:
            raise JudgeReplyError(f"the judge scored {len(scores)} steps of {count}")
        return [share(score, self.options.scale) for score in scores]
