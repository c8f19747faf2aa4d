"""The reward `reported`: the number that a rollout reported itself."""

from __future__ import annotations

from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group
from oncurve.rewards.base import Result, Score, score_each


class ReportedOptions(Section):
    """What an agent reports as its reward: the `reward` of its last line of output, or what it has sent to the endpoint."""


class ReportedReward:
    def __init__(self, name: str, weight: float, options: ReportedOptions) -> None:
        self.name, self.weight = name, weight

    def score(self, group: Group) -> list[Result]:
        return score_each(group, _score)


def _score(completion: Completion) -> Score:
    reward = None if completion.episode is None else completion.episode.outcome.reward
    if reward is None:
        ways = 'print {"reward": …} as the last line, return it, or POST it to $OPENAI_BASE_URL/reward'
        raise ValueError(f"the agent reported no reward: {ways}")
    return Score(reward)
