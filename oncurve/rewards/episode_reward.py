"""Rewards of an episode: `environment`, from a stateful environment, and `reported`, from an agent program."""

from __future__ import annotations

from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group
from oncurve.rewards.base import Result, Score, score_each


class EnvironmentOptions(Section):
    """What the task's environment returns from `get_reward()` at the end of an episode, and from `get_turn_reward()` after each
    turn, if it has these methods. Rewards of turns are step rewards."""


class EnvironmentReward:
    def __init__(self, name: str, weight: float, options: EnvironmentOptions | None = None) -> None:
        self.name, self.weight = name, weight

    def score(self, group: Group) -> list[Result]:
        return score_each(group, self._score)

    def _score(self, completion: Completion) -> Score:
        if completion.episode is None:
            return Score(None, "there is no environment")
        turns = [(end - 1, o.reward) for _, end, o in completion.episode.turns if o.reward is not None]
        return Score(completion.episode.outcome.reward, steps=tuple(turns) or None)


class ReportedOptions(Section):
    """What an agent reports as its reward: the `reward` of its last line of output, or what it has sent to the endpoint."""


class ReportedReward:
    def __init__(self, name: str, weight: float, options: ReportedOptions) -> None:
        self.name, self.weight = name, weight

    def score(self, group: Group) -> list[Result]:
        return score_each(group, _reported)


def _reported(completion: Completion) -> Score:
    reward = None if completion.episode is None else completion.episode.outcome.reward
    if reward is None:
        ways = 'print {"reward": …} as the last line, return it, or POST it to $OPENAI_BASE_URL/reward'
        raise ValueError(f"the agent reported no reward: {ways}")
    return Score(reward)
