"""Problems of reasoning-gym: 106 families that are made, not stored, each with settings of its own.

Problems are made in this process, from (seed, index) alone. Answers are graded by the reward `reasoning_gym`: never by the
package's own scorers outside of a sandbox, as some of them execute what a model wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from oncurve.errors import MissingPackage, RecipeError, no_such
from oncurve.recipe import sections
from oncurve.records import Example, Prompt
from oncurve.tasks.draws import word

INSTRUCTION = "Think first, then give the final answer, and nothing else, in <answer></answer>."
KEPT_COLUMNS = ("numbers", "target", "letters", "factors", "simplified_numerator", "simplified_denominator")
"""What our own checks of answers need of a problem's data."""


class GymOptions(sections.Section):
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


class Gym:
    """The task. A training problem whose question is held out is replaced by another one of its family."""

    alphabet = None
    examples: Sequence[Example] = ()
    usual_rewards = (sections.Reward(type="reasoning_gym", name="answer"),)

    def __init__(self, config: sections.Task, options: GymOptions) -> None:
        self._seed, self._options, self._heldout_size = config.seed, options, config.heldout
        package = _package()
        for family in (*options.families, *options.settings):
            if family not in package.factory.DATASETS:
                raise no_such("task.families", "family", family, sorted(package.factory.DATASETS))
        for family in options.families:
            self._family(family, "train")

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
            if turn > 1000:
                raise RecipeError(
                    "task.heldout",
                    self._heldout_size,
                    because=f"the family of problem {index} has too few different problems",
                    fix="hold out fewer, or set it harder",
                )
        return prompt

    @cached_property
    def _heldout_texts(self) -> frozenset[str]:
        return frozenset(prompt.shown for prompt in self.heldout)

    def _prompt(self, purpose: str, index: int) -> Prompt:
        place, number = divmod(index, len(self._options.families))
        family = self._options.families[number]
        entry = self._family(family, purpose)[place]
        asked = "\n".join(filter(None, (str(entry["question"]), self._options.instruction)))
        columns = {"answer": str(entry["answer"]), "family": family, "difficulty": family, **_kept(entry["metadata"])}
        made = {"seed": self._seed_of(purpose), "index": place, "settings": self._options.settings.get(family, {})}
        columns["gym"] = {**made, "scorer": self._has_scorer(family)}
        name = f"reasoning_gym/{family}/{purpose}/{place}"
        if not self._options.chat:
            return Prompt(name, asked, None, columns)
        system = () if self._options.system is None else ({"role": "system", "content": self._options.system},)
        return Prompt(name, None, (*system, {"role": "user", "content": asked}), columns)

    def _family(self, family: str, purpose: str) -> Any:
        settings = self._options.settings.get(family, {})
        try:
            return _dataset(family, self._seed_of(purpose), _frozen(settings))
        except (TypeError, ValueError, AssertionError) as error:
            because = f"reasoning-gym says: {error or type(error).__name__}"
            raise RecipeError(f"task.settings.{family}", settings, because=because, fix="mend these settings") from None

    def _has_scorer(self, family: str) -> bool:
        """Whether its answers are more than texts to be compared."""
        kinds = _package().factory.DATASETS
        return kinds[family][0].score_answer is not _package().dataset.ProceduralDataset.score_answer

    def _seed_of(self, purpose: str) -> int:
        return word(self._seed, f"reasoning_gym/{purpose}") % (1 << 31)


def _kept(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: data[name] for name in KEPT_COLUMNS if name in data}


def _frozen(value: Any) -> Any:
    """Settings as something that can be looked up; `_thawed` takes it back."""
    if isinstance(value, dict):
        return ("dict", tuple((key, _frozen(part)) for key, part in value.items()))
    return ("list", tuple(map(_frozen, value))) if isinstance(value, list | tuple) else ("value", value)


def _thawed(frozen: Any) -> Any:
    kind, value = frozen
    if kind == "dict":
        return {key: _thawed(part) for key, part in value}
    return [_thawed(part) for part in value] if kind == "list" else value


@lru_cache(maxsize=512)
def _dataset(family: str, seed: int, settings: Any) -> Any:
    return _package().create_dataset(family, seed=seed, **_thawed(settings))


@lru_cache(maxsize=1)
def _package() -> Any:
    try:
        return import_module("reasoning_gym")
    except ImportError as error:
        raise MissingPackage(
            "task.type", f"reasoning-gym can't be imported ({error})", because="the task `reasoning_gym` asks its problems",
            fix="pip install oncurve[gym]",
        ) from None  # fmt: skip
