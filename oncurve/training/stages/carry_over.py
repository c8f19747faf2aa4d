"""`grpo.carry_over`: groups that are unfinished when a step ends continue in the next step, with its weights.

A step queues the groups that were carried over to it, then its own prompts. It ends as soon as all but ``carry_over`` of them
are complete. The last step completes all groups, so every prompt is trained on once. Which groups are complete first depends
only on the weights, the seed and the engine's settings, never on a clock, so a resumed run carries over the same tokens.

A group keeps the random numbers of the step that began it. Before it continues, its tokens are prefilled again with the new
weights, so its KV cache always belongs to the current weights. The tokens keep the log-probs of the weights that sampled them,
and the learner's importance weight corrects for the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from oncurve.engines.base import BegunCompletion, Engine, SampleKey, SampleRequest, encode_prompts
from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import RecipeError
from oncurve.recipe.schema.stages import Grpo
from oncurve.records import Group, Prompt, StopReason
from oncurve.tasks.base import Task
from oncurve.tasks.prompt_order import prompts_for_step

STOPS: tuple[StopReason, ...] = get_args(StopReason)


@dataclass(frozen=True, slots=True)
class BegunGroup:
    """A group that a step has begun: prompt number ``index`` of step ``step``, with the random numbers of ``seed``."""

    seed: int
    step: int
    index: int
    completions: tuple[BegunCompletion, ...] = ()


class CarryOver:
    """The groups that a stage carries over from one step to the next."""

    def __init__(self, stage: Grpo, task: Task) -> None:
        self.stage, self.task = stage, task
        self.groups: list[BegunGroup] = []
        """Those that the next step continues: if a step fails, it begins again with the same ones."""
        self.unfinished: list[BegunGroup] = []
        """Those of the current step, which become ``groups`` when it is complete."""

    def sample(self, engine: Engine, n: int, seed: int, on_group: Callable[[int, Group], None]) -> list[Group]:
        """The groups that are complete when step n is full, oldest first; the others are carried over."""
        assert isinstance(engine, NativeEngine), "the recipe is checked"
        started = [*self.groups, *(BegunGroup(seed, n, index) for index in range(self.stage.prompts_per_step))]
        prompts = [self._prompt(group) for group in started]
        prompt_ids = encode_prompts(engine.policy, prompts, self.stage.sampling)
        requests = [
            SampleRequest(
                prompt,
                ids,
                self.stage.group_size,
                self.stage.sampling,
                SampleKey(group.seed, group.step),
                begun=group.completions,
            )
            for prompt, ids, group in zip(prompts, prompt_ids, started, strict=True)
        ]
        enough = len(requests) if n == self.stage.steps else len(requests) - self.stage.carry_over
        groups, begun = engine.sample_until(requests, enough, n - 1, on_group)
        self.unfinished = [
            BegunGroup(group.seed, group.step, group.index, begun[number])
            for number, group in enumerate(started)
            if number in begun
        ]
        return [groups[number] for number in sorted(groups)]

    def _prompt(self, group: BegunGroup) -> Prompt:
        return prompts_for_step(self.task, group.seed, group.step - 1, self.stage.prompts_per_step)[group.index]

    def state(self) -> dict[str, Tensor]:
        """The groups as tensors: seed, step and index of each group; length and stop reason (−1: none) of each completion; all
        tokens and log-probs; and for each change of the weights within a completion (completion, first token, version)."""
        completions = [completion for group in self.groups for completion in group.completions]
        versions = [(i, *version) for i, completion in enumerate(completions) for version in completion.versions]
        ends = [(len(c.token_ids), -1 if c.stop is None else STOPS.index(c.stop)) for c in completions]
        return {
            "groups": torch.tensor([(group.seed, group.step, group.index) for group in self.groups]),
            "completions": torch.tensor(ends),
            "tokens": torch.from_numpy(np.concatenate([c.token_ids for c in completions])),
            "logps": torch.from_numpy(np.concatenate([c.logps for c in completions])),
            "versions": torch.tensor(versions, dtype=torch.long).view(-1, 3),
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        tokens, logps = tensors["tokens"].numpy(), tensors["logps"].numpy()
        ends = [(int(length), int(stop)) for length, stop in tensors["completions"].tolist()]
        first = [0, *accumulate(length for length, _ in ends)]
        versions: list[list[tuple[int, int]]] = [[] for _ in ends]
        for completion, at, version in tensors["versions"].tolist():
            versions[completion].append((at, version))
        completions = [
            BegunCompletion(
                tokens[first[i] : first[i] + length].copy(), logps[first[i] : first[i] + length].copy(), tuple(versions[i]),
                None if stop < 0 else STOPS[stop],
            )
            for i, (length, stop) in enumerate(ends)
        ]  # fmt: skip
        size = len(completions) // max(len(tensors["groups"]), 1)
        self.groups = [
            BegunGroup(seed, step, index, tuple(completions[g * size : (g + 1) * size]))
            for g, (seed, step, index) in enumerate(tensors["groups"].tolist())
        ]


def check_carry_over(stage: Grpo, prompts: Sequence[Prompt]) -> None:
    """Raises an OncurveError if answers are conversations, which can't be interrupted."""
    if stage.carry_over and any(prompt.environment is not None or prompt.agent is not None for prompt in prompts):
        raise RecipeError(
            f"{stage.label}.carry_over",
            stage.carry_over,
            because="the task has an environment, and a conversation with it can't wait for the next step",
            fix="remove it, or use a task without an environment",
        )
