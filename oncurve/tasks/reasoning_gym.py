"""The task `reasoning_gym`: 106 families of generated problems, each with its own settings.

A worker process generates problems from (seed, index) only. The reward `reasoning_gym` scores answers, and runs the package's
scorers only inside of a sandbox, because some of them execute what a model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from oncurve.errors import MissingPackage, RecipeError, no_such, pip_install
from oncurve.recipe.schema import sections
from oncurve.recipe.schema.base import Section
from oncurve.records import Example, Prompt
from oncurve.rng import derive_seed
from oncurve.workers.pool import WorkerFailedError, Workers, python_workers, shared

INSTRUCTION = "Think first, then give the final answer, and nothing else, in <answer></answer>."
SECONDS = 120.0
"""Time limit of generating one problem; the slowest families need a few seconds."""
_MAX_TRIES = 1000
"""Tries at a training problem that is not held out."""


class ReasoningGymOptions(Section):
    """Generated problems of 106 families (reasoning-gym)."""

    families: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of families, such as `chain_sum` and `sudoku`; each is used equally often."""
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings by family, usually for the difficulty (`settings.chain_sum = { max_terms = 3 }`)."""
    problems: PositiveInt = 10_000
    """Training problems of each family; after all were used, they are repeated in another order."""
    instruction: str = INSTRUCTION
    """Appended to each question; may be empty."""
    chat: bool = True
    """Send the question as a user message through the chat template; if false, as plain text to continue."""
    system: str | None = None
    """A system message before each question; needs `chat`."""


class ReasoningGymTask:
    """A training problem whose question is in the held-out split is replaced by another one of its family."""

    alphabet = None
    examples: Sequence[Example] = ()
    default_rewards = (sections.Reward(type="reasoning_gym", name="answer"),)

    def __init__(self, config: sections.Task, options: ReasoningGymOptions) -> None:
        if find_spec("reasoning_gym") is None:
            because = "the task `reasoning_gym` generates problems with it"
            raise MissingPackage("task.type", "reasoning-gym is not installed", because=because, fix=pip_install("gym"))
        self._seed, self._options, self._heldout_size = config.seed, options, config.heldout
        known = _worker().ask({}, SECONDS)
        for family in (*options.families, *options.settings):
            if family not in known:
                raise no_such("task.families", "family", family, known)
        for number in range(len(options.families)):
            self._prompt("train", number)  # raises here, not in the middle of a run, if settings are invalid

    @property
    def train_size(self) -> int:
        return self._options.problems * len(self._options.families)

    @cached_property
    def heldout(self) -> Sequence[Prompt]:
        prompts = (self._prompt("heldout", index) for index in range(self._heldout_size))
        return tuple({prompt.shown: prompt for prompt in prompts}.values())

    def train_prompt(self, index: int) -> Prompt:
        prompt, tries = self._prompt("train", index), 1
        while prompt.shown in self._heldout_texts:
            prompt, tries = self._prompt(f"train-{tries}", index), tries + 1
            if tries > _MAX_TRIES:
                because = f"the family of problem {index} has too few different problems"
                fix = "hold out fewer, or raise its difficulty in task.settings"
                raise RecipeError("task.heldout", self._heldout_size, because=because, fix=fix)
        return prompt

    @cached_property
    def _heldout_texts(self) -> frozenset[str]:
        return frozenset(prompt.shown for prompt in self.heldout)

    def _prompt(self, purpose: str, index: int) -> Prompt:
        family_index, family_number = divmod(index, len(self._options.families))
        family = self._options.families[family_number]
        settings, seed = self._options.settings.get(family, {}), derive_seed(self._seed, f"reasoning_gym/{purpose}") % (1 << 31)
        problem = self._generate(family, seed, settings, family_index)
        question = "\n".join(filter(None, (problem["question"], self._options.instruction)))
        source = {"seed": seed, "index": family_index, "settings": settings, "scorer": problem["scorer"]}
        columns = {**problem["columns"], "family": family, "difficulty": family, "gym": source}
        prompt_id = f"reasoning_gym/{family}/{purpose}/{family_index}"
        if not self._options.chat:
            return Prompt(prompt_id, question, None, columns)
        system = () if self._options.system is None else ({"role": "system", "content": self._options.system},)
        return Prompt(prompt_id, None, (*system, {"role": "user", "content": question}), columns)

    def _generate(self, family: str, seed: int, settings: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            return _problem(family, seed, json.dumps(settings), index)
        except WorkerFailedError as error:
            where, because = f"task.settings.{family}", f"reasoning-gym says: {error}"
            raise RecipeError(where, settings, because=because, fix="correct these settings") from None


@lru_cache(maxsize=20_000)
def _problem(family: str, seed: int, settings: str, index: int) -> dict[str, Any]:
    job = {"family": family, "seed": seed, "settings": settings, "index": index}
    problem: dict[str, Any] = _worker().ask(job, SECONDS)
    return problem


@shared
def _worker() -> Workers:
    return python_workers("oncurve.tasks.reasoning_gym_worker", 1)
