"""Environments of gymnasium by id, such as `gymnasium:FrozenLake-v1`. They have one tool, `act`; observations are texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from oncurve.errors import MissingPackage, RecipeError, pip_install

MAX_DIGITS = 4
"""Digits after the point of an observed number."""


def gymnasium_class(id: str, where: str, options: Mapping[str, Any]) -> type:
    """A class of environments by TRL's contract. Raises an error, which names ``where``, if the model could not act in them."""
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        because = "environments of gymnasium are an optional extra"
        raise MissingPackage(where, "gymnasium is not installed", because=because, fix=pip_install("gymnasium")) from error
    try:
        first = gymnasium.make(id, **options)
    except Exception as error:  # gymnasium's own errors, and what an environment's own packages raise
        because = " ".join(str(error).split())[:200]
        fix = "name an id of gymnasium.registry" + (f", and correct {where}_options" if options else "")
        raise RecipeError(where, f"gymnasium:{id}", because=because, fix=fix) from error
    space = first.action_space
    if not isinstance(space, gymnasium.spaces.Discrete):
        because = f"its actions are {type(space).__name__}, and the tool `act` takes the number of an action"
        raise RecipeError(where, f"gymnasium:{id}", because=because, fix="use an environment with discrete actions")
    lowest, highest = int(space.start), int(space.start + space.n - 1)
    first.close()

    class GymnasiumEnvironment:
        has_group_seed = True
        """Without a column `seed`, all completions of a group play the same episode."""

        def reset(self, seed: int, **columns: Any) -> str:
            """Begins an episode. The row's column `seed` determines it."""
            self.environment, self.reward, self.is_over = gymnasium.make(id, **options), 0.0, False
            observation, _ = self.environment.reset(seed=seed, options=columns.get("options"))
            return f" {observation_text(observation)}"

        def act(self, action: int) -> str:
            if self.is_over:
                raise ValueError("the episode is over")
            if not lowest <= action <= highest:
                raise ValueError(f"action must be from {lowest} to {highest}")
            observation, reward, is_terminated, is_truncated, _ = self.environment.step(action)
            self.reward += float(reward)
            self.is_over = bool(is_terminated or is_truncated)
            if self.is_over:
                self.environment.close()
            return f"{observation_text(observation)}; reward {float(reward):g}" + ("; over" if self.is_over else "")

        def get_reward(self) -> float:
            """The sum of the rewards."""
            return self.reward

    GymnasiumEnvironment.act.__doc__ = f"""
        Act in {id}.

        Args:
            action: The number of the action, from {lowest} to {highest}.

        Returns:
            What is observed, and the reward.
        """
    GymnasiumEnvironment.__name__ = id
    return GymnasiumEnvironment


def observation_text(observation: Any) -> str:
    """An observation as JSON, with rounded numbers. A string is returned unchanged."""
    return observation if isinstance(observation, str) else json.dumps(_plain(observation))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays, and the numbers in them
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return round(value, MAX_DIGITS) if isinstance(value, float) else value
