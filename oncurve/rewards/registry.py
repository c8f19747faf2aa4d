"""The rewards that a recipe can name."""

from __future__ import annotations

from collections.abc import Sequence

from oncurve.errors import no_such
from oncurve.recipe import sections
from oncurve.recipe.problems import read_section
from oncurve.rewards.answer import AnswerOptions, AnswerReward
from oncurve.rewards.base import Reward, RewardType
from oncurve.rewards.code import CodeOptions, CodeReward
from oncurve.rewards.columns import ColumnsOptions, ColumnsReward
from oncurve.rewards.countdown import CountdownReward, CountdownRewardOptions
from oncurve.rewards.format import FormatOptions, FormatReward
from oncurve.rewards.function import PythonOptions, python_reward
from oncurve.rewards.guess import GuessReward, GuessRewardOptions
from oncurve.rewards.gym import GymReward, GymRewardOptions
from oncurve.rewards.json_form import JsonOptions, JsonReward
from oncurve.rewards.judge import JudgeOptions, JudgeReward
from oncurve.rewards.language import LanguageOptions, LanguageReward
from oncurve.rewards.learned import LearnedOptions, LearnedReward
from oncurve.rewards.length import (
    CosineOptions,
    CosineReward,
    LengthOptions,
    LengthReward,
    OverlongOptions,
    OverlongReward,
    RepetitionOptions,
    RepetitionReward,
)
from oncurve.rewards.math import MathOptions, MathReward
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.process import ProcessOptions, ProcessReward

REWARDS: dict[str, RewardType] = {
    "answer": RewardType(AnswerOptions, AnswerReward, is_rule=True),
    "math": RewardType(MathOptions, MathReward, is_rule=True),
    "code": RewardType(CodeOptions, CodeReward, is_rule=True),
    "format": RewardType(FormatOptions, FormatReward),
    "countdown": RewardType(CountdownRewardOptions, CountdownReward, is_rule=True),
    "columns": RewardType(ColumnsOptions, ColumnsReward, is_rule=True),
    "guess": RewardType(GuessRewardOptions, GuessReward, is_rule=True),
    "reasoning_gym": RewardType(GymRewardOptions, GymReward, is_rule=True),
    "json": RewardType(JsonOptions, JsonReward),
    "language": RewardType(LanguageOptions, LanguageReward),
    "cosine": RewardType(CosineOptions, CosineReward),
    "repetition": RewardType(RepetitionOptions, RepetitionReward),
    "overlong": RewardType(OverlongOptions, OverlongReward),
    "length": RewardType(LengthOptions, LengthReward),
    "process": RewardType(ProcessOptions, ProcessReward),
    "model": RewardType(LearnedOptions, LearnedReward),
    "judge": RewardType(JudgeOptions, JudgeReward),
    "python": RewardType(PythonOptions, python_reward),
}


def build_rewards(configs: Sequence[sections.Reward], *, max_new_tokens: int | None = None) -> RewardMix:
    """The rewards of a recipe or stage. `max_new_tokens` is the stage's length limit, for rewards that measure against it."""
    rules = [config.label for config in configs if decides(config)]
    return RewardMix([build_reward(config, max_new_tokens) for config in configs], rules)


def build_reward(config: sections.Reward, max_new_tokens: int | None = None) -> Reward:
    """One reward; its options are checked against its own schema, under `rewards.NAME.key`."""
    where = f"rewards.{config.label}"
    kind = REWARDS.get(config.type)
    if kind is None:
        raise no_such(f"{where}.type", "reward", config.type, REWARDS)
    own = {"limit": max_new_tokens} if config.type in ("overlong", "cosine") and max_new_tokens is not None else {}
    return kind.build(config.label, config.weight, read_section(kind.options, {**own, **config.options}, where))


def is_rule(config: sections.Reward) -> bool:
    kind = REWARDS.get(config.type)
    return kind is not None and kind.is_rule


def decides(config: sections.Reward) -> bool:
    """Whether it can say what counts as solved: a rule, a function of the user's own, or what is named `answer`."""
    return config.label == "answer" or (config.weight > 0 and (is_rule(config) or config.type == "python"))
