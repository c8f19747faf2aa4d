"""Which prompts to sample next, by how often the policy has solved them: `[grpo.curriculum]`.

A group teaches something only if its completions differ. With pass rate p, that is most likely at p = 1/2, so prompts are
sampled in proportion to p(1 − p), the variance of a solved-or-not reward, or by pools of hard, medium and easy prompts. A share
of each step goes to prompts that have not been sampled yet. They have no pass rate of their own; if the task has levels of
difficulty, they are chosen by the pass rate of their level, so that difficulty rises as levels are solved.

The prompts of a step are a pure function of (seed, step, pass rates), and the pass rates are part of a checkpoint. So a
resumed, forked or replayed run samples the same prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oncurve.errors import DataError
from oncurve.recipe.schema.stages import Curriculum
from oncurve.records import Prompt
from oncurve.rng import derive_seed, philox_generator
from oncurve.tasks.base import Task
from oncurve.tasks.data.file_task import read_rows
from oncurve.tasks.prompt_order import prompt_stream, shuffled_indices, with_repeat_id
from oncurve.tasks.task_mix import COLUMN as TASK_COLUMN
from oncurve.tasks.task_mix import TaskMix

LEVEL_MEMORY = 0.9
"""Each new prompt of a level multiplies the weight of the level's earlier results by this."""
MAX_TRIES = 64
"""Unseen prompts looked at for each one needed."""


@dataclass
class PassRate:
    """Solved and sampled completions; earlier ones count less with each new result."""

    solved: float = 0.0
    sampled: float = 0.0

    def add(self, solved: float, sampled: float, memory: float) -> None:
        self.solved, self.sampled = memory * self.solved + solved, memory * self.sampled + sampled

    def estimate(self, prior: float = 0.5) -> float:
        """The pass rate; ``prior`` counts as one completion, so that no rate is exactly 0 or 1."""
        return (self.solved + prior) / (self.sampled + 1.0)


@dataclass
class KnownPrompt:
    """A prompt and its pass rate. ``step`` and ``index`` locate it in the task: an endless task has a stream per step."""

    prompt: Prompt
    step: int
    index: int
    rate: PassRate = field(default_factory=PassRate)


@dataclass(frozen=True, slots=True)
class GroupResult:
    """How many of a group's completions solved its prompt."""

    prompt: Prompt
    solved: int
    sampled: int


class PromptSelector:
    """Selects each step's prompts, and records their results."""

    def __init__(self, settings: Curriculum, task: Task, seed: int) -> None:
        self.settings, self.task, self.seed = settings, task, seed
        self.known: dict[str, KnownPrompt] = {}
        self.levels: dict[str, PassRate] = {}
        self._offered: dict[str, KnownPrompt] = {}
        """The prompts of the current step by id. A prompt that is repeated within the step has several ids."""

    def select(self, step: int, count: int, *, round: int = 0) -> list[Prompt]:
        """The ``count`` prompts of a step, all with different ids. Rounds 1, 2 … give prompts that the step has not used."""
        if round == 0:
            self._offered = {}
        fresh_count = max(int(self.settings.unseen * count + 0.5), count - len(self.known))
        unseen = (known for known in self._unseen(step, fresh_count * (round + 1)) if known.prompt.id not in self._offered)
        fresh = list(islice(unseen, fresh_count))
        rest = (known for known in self._weighted_order(step) if known.prompt.id not in self._offered)
        selected = [*fresh, *islice(rest, count - len(fresh))]
        for known_prompt in selected:
            self._offered[known_prompt.prompt.id] = known_prompt
        prompts = [known_prompt.prompt for known_prompt in selected]
        return prompts if round else prompts + self._repetitions(selected, count - len(prompts))

    def record(self, results: Iterable[GroupResult]) -> None:
        """Adds a step's results. Levels count only prompts that were sampled for the first time: others were selected by their
        pass rate, and would make every level look half solved. A group without any result changes nothing."""
        for result in results:
            if not result.sampled:
                continue
            known = self._offered[result.prompt.id]
            level = known.prompt.difficulty
            if known.prompt.id not in self.known:
                self.known[known.prompt.id] = known
                if level is not None:
                    self.levels.setdefault(level, PassRate()).add(result.solved, result.sampled, LEVEL_MEMORY)
            known.rate.add(result.solved, result.sampled, self.settings.memory)

    def add_estimates(self, results: Iterable[GroupResult]) -> None:
        """Takes first estimates, such as those of `oncurve probe`. An endless task has new prompts in every step, so only the
        pass rates of its difficulty levels are used."""
        index_of = {} if self.task.train_size is None else {p.id: i for i, p in enumerate(_all_prompts(self.task))}
        for result in results:
            if result.prompt.difficulty is not None:
                self.levels.setdefault(result.prompt.difficulty, PassRate()).add(result.solved, result.sampled, LEVEL_MEMORY)
            if result.prompt.id in index_of:
                known = self._locate(0, index_of[result.prompt.id])
                known.rate.add(result.solved, result.sampled, self.settings.memory)
                self.known[result.prompt.id] = known

    def estimate(self, known: KnownPrompt) -> float:
        """A prompt's pass rate. With few results it is close to that of its level."""
        return known.rate.estimate(self._level_rate(known.prompt.difficulty))

    def state(self) -> dict[str, NDArray[np.generic]]:
        """The arrays to save in a checkpoint. They have one row for each known prompt, or one for each level, in order."""
        known, levels = list(self.known.values()), list(self.levels.values())
        names = "\0".join(self.levels).encode()
        return {
            "places": np.array([(k.step, k.index) for k in known], np.int64).reshape(-1, 2),
            "rates": np.array([(k.rate.solved, k.rate.sampled) for k in known], np.float64).reshape(-1, 2),
            "level_names": np.frombuffer(names, np.uint8).copy(),
            "level_rates": np.array([(rate.solved, rate.sampled) for rate in levels], np.float64).reshape(-1, 2),
            "seed": np.frombuffer(str(self.seed).encode(), np.uint8).copy(),
        }

    def load_state(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        names = state["level_names"].tobytes().decode().split("\0") if len(state["level_names"]) else []
        self.levels = {name: PassRate(*map(float, row)) for name, row in zip(names, state["level_rates"], strict=True)}
        self.known = {}
        if self.task.train_size is None and state["seed"].tobytes().decode() != str(self.seed):
            return  # a fork with another seed: its stream has other prompts at these places
        for (step, index), row in zip(state["places"].tolist(), state["rates"], strict=True):
            known = self._locate(step, index)
            known.rate = PassRate(*map(float, row))
            self.known[known.prompt.id] = known

    def _locate(self, step: int, index: int) -> KnownPrompt:
        if self.task.train_size is not None:
            return KnownPrompt(self.task.train_prompt(index), step, index)
        return KnownPrompt(next(prompt_stream(self.task, self.seed, step, index)), step, index)

    def _level_rate(self, level: str | None) -> float:
        return 0.5 if level is None or level not in self.levels else self.levels[level].estimate()

    def _weight(self, rate: float) -> float:
        if self.settings.pools is None:
            return rate * (1.0 - rate)
        low, high = self.settings.medium
        hard, medium, easy = self.settings.pools
        return hard if rate < low else easy if rate > high else medium

    def _weighted_order(self, step: int) -> Iterator[KnownPrompt]:
        """All known prompts in random order, those of higher weight earlier: draws without replacement in proportion to the
        weight, as the order of −log(u)/weight (Efraimidis and Spirakis 2006). Prompts of weight 0 come last."""
        known = list(self.known.values())
        weights = np.array([self._weight(self.estimate(k)) for k in known], np.float64)
        uniforms = 1.0 - philox_generator(self.seed, "curriculum/known", step).random(len(known))
        with np.errstate(divide="ignore"):
            keys = np.where(weights > 0, -np.log(uniforms) / np.where(weights > 0, weights, 1.0), np.inf)
        return (known[int(i)] for i in np.argsort(keys, kind="stable"))

    def _unseen(self, step: int, count: int) -> Iterator[KnownPrompt]:
        """Prompts that were never sampled. Each is accepted with a probability proportional to the weight of its level; if
        fewer than ``count`` are accepted, rejected ones fill the rest."""
        dice = philox_generator(self.seed, "curriculum/unseen", step)
        weight_of = {level: self._weight(rate.estimate()) for level, rate in self.levels.items()}
        largest = max((*weight_of.values(), self._weight(0.5)))
        refused: list[KnownPrompt] = []
        for candidate in self._candidates(step, MAX_TRIES * count):
            level = candidate.prompt.difficulty
            weight = self._weight(0.5) if level is None else weight_of.get(level, largest)
            if dice.random() * largest < weight:
                yield candidate
            else:
                refused.append(candidate)
        yield from refused

    def _candidates(self, step: int, limit: int) -> Iterator[KnownPrompt]:
        """Prompts that are not known, each once: a finite task's in one shuffled order, an endless one's from the stream of the
        step. About ``limit`` of them are looked at."""
        if self.task.train_size is not None:
            prompts = (KnownPrompt(self.task.train_prompt(i), 0, i) for i in shuffled_indices(self.seed, self.task.train_size))
            yield from islice((known for known in prompts if known.prompt.id not in self.known), limit)
            return
        ids: set[str] = set()
        for index, prompt in enumerate(islice(prompt_stream(self.task, self.seed, step), limit)):
            if prompt.id not in self.known and prompt.id not in ids:
                ids.add(prompt.id)
                yield KnownPrompt(prompt, step, index)

    def _repetitions(self, selected: Sequence[KnownPrompt], missing: int) -> list[Prompt]:
        """A task with fewer prompts than a step needs repeats them under other ids, as it does without a curriculum."""
        repeated = []
        for i in range(missing):
            repeat, position = divmod(i, len(selected))
            known = selected[position]
            prompt = with_repeat_id(known.prompt, repeat + 1)
            self._offered[prompt.id] = known
            repeated.append(prompt)
        return repeated


class MixSelector:
    """The selectors of a mix of tasks, one for each: the shares stay, and each task's prompts are selected among themselves."""

    def __init__(self, settings: Curriculum, mix: TaskMix, seed: int) -> None:
        self.mix = mix
        self.selectors = {p.name: PromptSelector(settings, p, derive_seed(seed, f"mix/{p.name}")) for p in mix.parts}

    @property
    def known(self) -> dict[str, KnownPrompt]:
        return {prompt_id: known for selector in self.selectors.values() for prompt_id, known in selector.known.items()}

    @property
    def levels(self) -> dict[str, PassRate]:
        return {level: rate for selector in self.selectors.values() for level, rate in selector.levels.items()}

    def select(self, step: int, count: int, *, round: int = 0) -> list[Prompt]:
        ranges = zip(self.selectors.values(), self.mix.ranges(step, count), strict=True)
        return [p for selector, (first, end) in ranges for p in selector.select(step, end - first, round=round)]

    def record(self, results: Iterable[GroupResult]) -> None:
        for result in results:
            self.selectors[result.prompt.columns[TASK_COLUMN]].record([result])

    def add_estimates(self, results: Iterable[GroupResult]) -> None:
        rows = list(results)
        for name, selector in self.selectors.items():
            selector.add_estimates(result for result in rows if result.prompt.id.startswith(f"{name}/"))

    def state(self) -> dict[str, NDArray[np.generic]]:
        return {f"{name}/{key}": a for name, selector in self.selectors.items() for key, a in selector.state().items()}

    def load_state(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        for name, selector in self.selectors.items():
            own = {key.removeprefix(f"{name}/"): array for key, array in state.items() if key.startswith(f"{name}/")}
            if own:  # a fork may add a task to the mix
                selector.load_state(own)


Selector = PromptSelector | MixSelector


def build_selector(settings: Curriculum, task: Task, seed: int) -> Selector:
    """The selector of a stage at its start, with the first estimates that the recipe names."""
    selector = MixSelector(settings, task, seed) if isinstance(task, TaskMix) else PromptSelector(settings, task, seed)
    if settings.estimates is not None:
        selector.add_estimates(read_estimates(Path(settings.estimates)))
    return selector


def _all_prompts(task: Task) -> Iterator[Prompt]:
    return (task.train_prompt(index) for index in range(task.train_size or 0))


def read_estimates(path: Path) -> list[GroupResult]:
    """The first pass rates in a file, one prompt per row, as `estimate_row` writes them."""
    results = []
    for line, row in read_rows(path, "grpo.curriculum.estimates"):
        prompt_id, level, solved, sampled = (row.get(key) for key in ("id", "difficulty", "solved", "sampled"))
        counts = isinstance(solved, int) and isinstance(sampled, int) and 0 <= solved <= sampled
        if not (isinstance(prompt_id, str) and (level is None or isinstance(level, str)) and counts):
            raise DataError(
                f"{path}:{line}",
                str(dict(row))[:120],
                because="a row needs the prompt's `id`, and how many of `sampled` completions were `solved`",
                fix="write the file with: oncurve probe RECIPE --estimates FILE",
            )
        prompt = Prompt(prompt_id, columns={} if level is None else {"difficulty": level})
        results.append(GroupResult(prompt, solved, sampled))  # type: ignore[arg-type]
    return results


def estimate_row(result: GroupResult) -> dict[str, str | int | None]:
    """A result as a row of a file of estimates."""
    prompt = result.prompt
    return {"id": prompt.id, "difficulty": prompt.difficulty, "solved": result.solved, "sampled": result.sampled}
