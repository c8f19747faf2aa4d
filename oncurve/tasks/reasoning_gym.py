"""Problems of reasoning-gym: 106 families that are made, not stored, each with settings of its own.

Problems are made in a worker process, from (seed, index) alone. Answers are graded by the reward `reasoning_gym`: never by the
package's own scorers outside of a sandbox, as some of them execute what a model wrote.
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
"""What making one problem may take; the slowest families need a few."""
_TURNS = 1000
"""Tries at a training problem that is not held out."""


class ReasoningGymOptions(Section):
    """Options of the task `reasoning_gym`."""

    families: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of families, such as `chain_sum` and `sudoku`; all are asked equally often."""
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By family: settings of its own, usually how hard its problems are (`settings.chain_sum = { max_terms = 3 }`)."""
    problems: PositiveInt = 10_000
    """Different problems of each family to train on; they come again, in another order, when all were asked."""
    instruction: str = INSTRUCTION
    """Put after each question. Empty: nothing."""
    chat: bool = True
    """Send the question as a user's message through the chat template; else as plain text, to be gone on with."""
    system: str | None = None
    """A system message before each question; needs `chat`."""


class ReasoningGymTask:
    """The task. A training problem whose question is held out is replaced by another one of its family."""

    alphabet = None
    examples: Sequence[Example] = ()
    default_rewards = (sections.Reward(type="reasoning_gym", name="answer"),)

    def __init__(self, config: sections.Task, options: ReasoningGymOptions) -> None:
        if find_spec("reasoning_gym") is None:
            because = "the task `reasoning_gym` asks its problems"
            raise MissingPackage("task.type", "reasoning-gym is not installed", because=because, fix=pip_install("gym"))
        self._seed, self._options, self._heldout_size = config.seed, options, config.heldout
        known = _maker().ask({}, SECONDS)
        for family in (*options.families, *options.settings):
            if family not in known:
                raise no_such("task.families", "family", family, known)
        for number in range(len(options.families)):
            self._prompt("train", number)  # settings that are none are found out here, not in mid-run

    @property
    def train_size(self) -> int:
        return self._options.problems * len(self._options.families)

    @cached_property
    def heldout(self) -> Sequence[Prompt]:
        kept = (self._prompt("heldout", index) for index in range(self._heldout_size))
        return tuple({prompt.shown: prompt for prompt in kept}.values())

    def train_prompt(self, index: int) -> Prompt:
        prompt, turn = self._prompt("train", index), 1
        while prompt.shown in self._heldout_texts:
            prompt, turn = self._prompt(f"train-{turn}", index), turn + 1
            if turn > _TURNS:
                because = f"the family of problem {index} has too few different problems"
                raise RecipeError("task.heldout", self._heldout_size, because=because, fix="hold out fewer, or set it harder")
        return prompt

    @cached_property
    def _heldout_texts(self) -> frozenset[str]:
        return frozenset(prompt.shown for prompt in self.heldout)

    def _prompt(self, purpose: str, index: int) -> Prompt:
        place, number = divmod(index, len(self._options.families))
        family = self._options.families[number]
        settings, seed = self._options.settings.get(family, {}), derive_seed(self._seed, f"reasoning_gym/{purpose}") % (1 << 31)
        made = self._generate(family, seed, settings, place)
        asked = "\n".join(filter(None, (made["question"], self._options.instruction)))
        again = {"seed": seed, "index": place, "settings": settings, "scorer": made["scorer"]}
        columns = {**made["kept"], "family": family, "difficulty": family, "gym": again}
        name = f"reasoning_gym/{family}/{purpose}/{place}"
        if not self._options.chat:
            return Prompt(name, asked, None, columns)
        system = () if self._options.system is None else ({"role": "system", "content": self._options.system},)
        return Prompt(name, None, (*system, {"role": "user", "content": asked}), columns)

    def _generate(self, family: str, seed: int, settings: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            return _problem(family, seed, json.dumps(settings), index)
        except WorkerFailedError as error:
            where, because = f"task.settings.{family}", f"reasoning-gym says: {error}"
            raise RecipeError(where, settings, because=because, fix="mend these settings") from None


@lru_cache(maxsize=20_000)
def _problem(family: str, seed: int, settings: str, index: int) -> dict[str, Any]:
    made: dict[str, Any] = _maker().ask({"family": family, "seed": seed, "settings": settings, "index": index}, SECONDS)
    return made


@shared
def _maker() -> Workers:
    return python_workers("oncurve.tasks.reasoning_gym_worker", 1)
