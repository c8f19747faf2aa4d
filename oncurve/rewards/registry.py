"""The rewards that a recipe can name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oncurve.plugins import Registry, check_instance
from oncurve.recipe.defaults import mixed_tasks, rewards_for_stage, task_for_stage
from oncurve.recipe.error_messages import read_section
from oncurve.recipe.schema import sections
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import RolloutStage, Stage
from oncurve.rewards.base import Reward, RewardType
from oncurve.rewards.episode_reward import EnvironmentOptions, EnvironmentReward, ReportedOptions, ReportedReward
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.models.judge import JudgeOptions, JudgeReward
from oncurve.rewards.models.process import ProcessOptions, ProcessReward
from oncurve.rewards.models.reward_model import RewardModelOptions, RewardModelReward
from oncurve.rewards.python_function import PythonOptions, python_reward
from oncurve.rewards.style.format import FormatOptions, FormatReward
from oncurve.rewards.style.json_schema import JsonOptions, JsonReward
from oncurve.rewards.style.language import LanguageOptions, LanguageReward
from oncurve.rewards.style.length import (
    CosineOptions,
    CosineReward,
    LengthOptions,
    LengthReward,
    OverlongOptions,
    OverlongReward,
    RepetitionOptions,
    RepetitionReward,
)
from oncurve.rewards.verifiers.answer import AnswerOptions, AnswerReward
from oncurve.rewards.verifiers.code import CodeOptions, CodeReward
from oncurve.rewards.verifiers.math import MathOptions, MathReward
from oncurve.rewards.verifiers.puzzles import (
    ColumnsOptions,
    ColumnsReward,
    CountdownReward,
    CountdownRewardOptions,
    GuessReward,
    GuessRewardOptions,
)
from oncurve.rewards.verifiers.reasoning_gym import GymRewardOptions, ReasoningGymReward

REWARDS: Registry[RewardType] = Registry(
    "reward",
    {
        "answer": RewardType(AnswerOptions, AnswerReward, is_verifiable=True),
        "math": RewardType(MathOptions, MathReward, is_verifiable=True),
        "code": RewardType(CodeOptions, CodeReward, is_verifiable=True),
        "format": RewardType(FormatOptions, FormatReward),
        "countdown": RewardType(CountdownRewardOptions, CountdownReward, is_verifiable=True),
        "columns": RewardType(ColumnsOptions, ColumnsReward, is_verifiable=True),
        "guess": RewardType(GuessRewardOptions, GuessReward, is_verifiable=True),
        "reasoning_gym": RewardType(GymRewardOptions, ReasoningGymReward, is_verifiable=True),
        "json": RewardType(JsonOptions, JsonReward),
        "language": RewardType(LanguageOptions, LanguageReward),
        "cosine": RewardType(CosineOptions, CosineReward, length_limit_option="limit"),
        "repetition": RewardType(RepetitionOptions, RepetitionReward),
        "overlong": RewardType(OverlongOptions, OverlongReward, length_limit_option="limit"),
        "length": RewardType(LengthOptions, LengthReward),
        "process": RewardType(ProcessOptions, ProcessReward),
        "model": RewardType(RewardModelOptions, RewardModelReward),
        "judge": RewardType(JudgeOptions, JudgeReward),
        "python": RewardType(PythonOptions, python_reward, is_user_code=True),
        "reported": RewardType(ReportedOptions, ReportedReward, is_user_code=True),
        "environment": RewardType(EnvironmentOptions, EnvironmentReward, is_user_code=True),
    },
    check_instance(RewardType),
)
"""Every reward by its `type` in a recipe. A new one is a module with its options and its class, and a row here."""


DefaultRewards = Callable[[], Sequence[sections.Reward]]
"""Returns the task's default rewards. Called only if they are needed: building a task may read a large file."""


def build_stage_rewards(recipe: Recipe, stage: Stage, default_rewards: DefaultRewards) -> RewardMix:
    """Every reward that grades a stage's completions, ready to score."""
    configs, tasks = stage_reward_configs(recipe, stage, default_rewards), mixed_tasks(task_for_stage(recipe, stage))
    return build_rewards(configs, max_new_tokens=stage.max_new_tokens, tasks=tasks)


def stage_reward_configs(recipe: Recipe, stage: Stage, default_rewards: DefaultRewards) -> tuple[sections.Reward, ...]:
    """Which rewards grade a stage's completions, in training and wherever the stage is graded again.

    - The stage's own rewards, else the recipe's. A stage that does not sample is only measured on held-out prompts, by
      the recipe's rewards or, if it has none, by the task's default rewards.
    - A verifiable reward of weight 0 if none of these defines accuracy.
    - `overlong`, if the stage sets it.
    """
    rollout = stage if isinstance(stage, RolloutStage) else None
    configs = (recipe.rewards or tuple(default_rewards())) if rollout is None else rewards_for_stage(recipe, rollout)
    if configs and not any(map(can_define_accuracy, configs)):
        configs = (*configs, *_accuracy_reward(recipe, stage, default_rewards))
    if rollout is not None and rollout.overlong is not None:
        overlong = {"type": "overlong", "weight": rollout.overlong.weight, "buffer": rollout.overlong.buffer}
        configs = (*configs, sections.Reward.model_validate(overlong))
    return configs


def _accuracy_reward(recipe: Recipe, stage: Stage, default_rewards: DefaultRewards) -> tuple[sections.Reward, ...]:
    """A verifiable reward (weight 0) for reporting accuracy if the stage has none: the recipe's, else the task's, else none.

    The default reward of the task `file` is not used here. It is only a guess, made if the user's file has a column `answer`,
    and a run that a judge grades must not report an accuracy that nobody asked for.
    """
    own_file = task_for_stage(recipe, stage).type == "file"
    for configs in (lambda: recipe.rewards, (lambda: ()) if own_file else default_rewards):
        verifiable = [c for c in configs() if c.label == "answer" or is_verifiable(c)]
        if verifiable:
            best = min(verifiable, key=lambda c: c.label != "answer")
            return (best.model_copy(update={"name": "answer", "weight": 0.0}),)
    return ()


def build_rewards(
    configs: Sequence[sections.Reward], *, max_new_tokens: int | None = None, tasks: Sequence[str] = ()
) -> RewardMix:
    """The rewards of a recipe or stage. ``max_new_tokens`` is the stage's length limit, for rewards that depend on it;
    ``tasks`` are the names of a mix of tasks."""
    accuracy = [config.label for config in configs if can_define_accuracy(config)]
    task_of = {config.label: config.task for config in configs if config.task is not None}
    return RewardMix([build_reward(config, max_new_tokens) for config in configs], accuracy, task_of, tasks)


def build_reward(config: sections.Reward, max_new_tokens: int | None = None) -> Reward:
    """One reward. Its options are validated by its own schema, and errors name them as `rewards.NAME.key`."""
    where = f"rewards.{config.label}"
    kind = REWARDS.find(config.type, f"{where}.type")
    defaults = {}
    if kind.length_limit_option is not None and max_new_tokens is not None:
        defaults[kind.length_limit_option] = max_new_tokens
    return kind.build(config.label, config.weight, read_section(kind.options, {**defaults, **config.options}, where))


def is_verifiable(config: sections.Reward) -> bool:
    """Whether a score of 1 means that the answer is correct."""
    return config.type in REWARDS and REWARDS[config.type].is_verifiable


def can_define_accuracy(config: sections.Reward) -> bool:
    """Whether accuracy may be measured by this reward: it is verifiable, a function of the user's, or named `answer`."""
    is_user_code = config.type in REWARDS and REWARDS[config.type].is_user_code
    return config.label == "answer" or (config.weight > 0 and (is_verifiable(config) or is_user_code))
