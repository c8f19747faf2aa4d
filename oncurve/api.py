"""Oncurve from Python: `train`, `load_recipe`, and the handle of a run.

    oncurve.train(oncurve.load_recipe("arithmetic"))
    oncurve.train(model="tiny", prompts=["3+4=", "5+6="], rewards=[my_function], group_size=8)

Mistakes raise an `OncurveError`, which says where, what, why and how to mend it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from oncurve.distributed.rendezvous import joined_ranks, with_ranks
from oncurve.errors import RecipeError, RewardError, did_you_mean
from oncurve.recipe.load import load_recipe, parse_recipe
from oncurve.recipe.schema.base import Section
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Reward as RewardConfig
from oncurve.recipe.schema.stages import SAMPLED_TYPES, Grpo
from oncurve.recipe.validate import FROM_PYTHON
from oncurve.records import EvalReport, GradedGroup
from oncurve.rewards.base import Reward
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward, as_reward
from oncurve.rewards.registry import build_reward, is_verifiable
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder, Status
from oncurve.tasks.data.prompt_list import PromptList, Row
from oncurve.terminal.errors import print_error
from oncurve.terminal.live.display import LiveDisplay
from oncurve.terminal.live.summary import render_summary

if TYPE_CHECKING:
    from oncurve.models.policy import Policy

__all__ = ["Run", "load_recipe", "train"]

RewardLike = Callable[..., Any] | Reward | str | tuple[Callable[..., Any] | Reward | str, float]
"""A function, an object with name, weight and score, the type of a built-in reward, or one of these with a weight."""
Rewards = RewardMix | RewardLike | Sequence[RewardLike]
ModelLike = Any
"""`"tiny"`, a folder, a hub id, or a pair (model, tokenizer) of transformers' objects."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run on disk, while it trains or after."""

    folder: RunFolder

    @classmethod
    def open(cls, name_or_path: str | Path, runs_dir: str | Path = "runs") -> Run:
        return cls(RunFolder.open(name_or_path, Path(runs_dir)))

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def model_path(self) -> Path:
        """The final model, in Hugging Face format."""
        return self.folder.model

    @property
    def recipe(self) -> Recipe:
        return load_recipe(self.folder.recipe)

    @property
    def status(self) -> Status:
        return self.folder.state().current_status

    @property
    def evals(self) -> list[EvalReport]:
        """Every measurement on held-out prompts, in order."""
        with RunReader.open(self.path) as store:
            return store.evals()

    @property
    def accuracy(self) -> float | None:
        """The last held-out accuracy; None where nothing was held out, or no rule says what is right."""
        found = self.evals
        return found[-1].accuracy if found else None

    @property
    def heldout_reward(self) -> float | None:
        """The last mean reward on held-out prompts; None where nothing was held out."""
        found = self.evals
        return found[-1].reward if found else None

    def metrics(self, name: str, stage: str | None = None) -> list[tuple[int, float]]:
        """A metric's curve as (step, value), of a stage or of the last stage that logged it."""
        with RunReader.open(self.path) as store:
            stages = [stage] if stage is not None else [s.name for s in reversed(store.stages())]
            return next((curve for s in stages if (curve := store.metric(name, s))), [])

    def groups(self, step: int, stage: str | None = None) -> tuple[GradedGroup, ...]:
        """The groups of a step, of a stage or of the last that sampled."""
        with RunReader.open(self.path) as store:
            names = [s.name for s in store.stages() if s.type in SAMPLED_TYPES]
            name = stage or (names[-1] if names else "grpo")
            return tuple(store.step(name, step).groups)


def train(
    recipe: Recipe | None = None,
    *,
    model: ModelLike | None = None,
    prompts: Iterable[Row] | None = None,
    rewards: Rewards | None = None,
    heldout: Iterable[Row] = (),
    group_size: int | None = None,
    steps: int | None = None,
    name: str | None = None,
    seed: int | None = None,
    threads: int | None = None,
    out: str | Path | None = None,
    runs_dir: str | Path = "runs",
    resume: Run | str | Path | None = None,
    quiet: bool = False,
    **grpo_options: Any,
) -> Run:
    """Train a recipe; or, without one, a single grpo stage on ``prompts`` with ``rewards``.

    ``prompts`` are texts, lists of messages, or dicts with "prompt" and the columns that rewards need; ``rewards`` are
    functions, called as `f(completion, prompt, …columns)` or as TRL calls them. ``grpo_options`` are keys of a grpo stage, as
    ``optimiser={"learning_rate": 1e-3}``; what is unset is as in a recipe. ``model``, ``prompts`` and ``rewards`` stand in for
    a recipe's own where both are given. ``resume`` goes on with a run, with the same prompts and rewards as before. In a script
    that torchrun has started several times, every process comes here, and they train together.
    """
    from oncurve.terminal.errors import hush
    from oncurve.training import start

    hush()
    options = {"group_size": group_size, "steps": steps, **grpo_options}
    told = {key: value for key, value in options.items() if value is not None}
    mix = None if rewards is None else as_mix(rewards)
    task = None if prompts is None else PromptList.of(prompts, heldout)
    policy, source = _as_policy(model)
    began = time.monotonic()
    given: dict[str, Any] = {"task": task, "rewards": mix, "policy": policy}
    if resume is not None:
        _refuse_changes(told, "a run that goes on keeps its recipe", "leave it out")
        folder = resume.folder if isinstance(resume, Run) else RunFolder.open(resume, Path(runs_dir))
        asked = load_recipe(folder.recipe)
    else:
        around = {"name": name, "seed": seed, "threads": threads}
        asked = _recipe(recipe, told, task, mix, source, {key: value for key, value in around.items() if value is not None})
    asked = with_ranks(asked)
    with joined_ranks(asked, print_error) as world:
        given |= {
            "listeners": [LiveDisplay(Console(highlight=False))] if world.is_rank_zero and not quiet else [],
            "world": world,
        }
        if resume is not None:
            run = start.resume(folder, sets=[f"scale.ranks={world.size}"] if world.size > 1 else [], **given)
        else:
            run = start.begin(asked, runs_dir=Path(runs_dir), out=None if out is None else Path(out), **given)
    if world.is_rank_zero and not quiet:
        Console(highlight=False).print(render_summary(run, time.monotonic() - began))
    return Run(run)


def _recipe(
    recipe: Recipe | None,
    told: dict[str, Any],
    task: PromptList | None,
    mix: RewardMix | None,
    source: str | None,
    around: dict[str, Any],
) -> Recipe:
    """The recipe as it is, with the model that was named; or one made of the keywords."""
    if recipe is not None:
        _refuse_changes(told, "the recipe says it", 'change the recipe: load_recipe(FILE, ["grpo.group_size=16"])')
        changed = recipe.model_copy(update=around)
        return (
            changed
            if source is None
            else changed.model_copy(update={"model": recipe.model.model_copy(update={"source": source})})
        )
    if task is None or mix is None:
        missing = "prompts" if task is None else "rewards"
        raise RecipeError(
            missing,
            "missing",
            because="without a recipe, training needs prompts and rewards",
            fix="oncurve.train(model=…, prompts=[…], rewards=[f]), or give a recipe",
        )
    _check_options(told)
    # Texts in the prompts' columns stay where they are; the recipe says only that they came from Python.
    named = [{"type": "python", "name": r.name, "weight": float(r.weight), "function": _where(r)} for r in mix.rewards]
    model = {} if source is None else {"model": {"source": source}}
    data = {**around, **model, "task": {"type": FROM_PYTHON}, "rewards": named, "stages": [{"type": "grpo", **told}]}
    return parse_recipe(data)


def _refuse_changes(told: dict[str, Any], because: str, fix: str) -> None:
    for key, value in told.items():
        raise RecipeError(key, value, because=because, fix=fix)


def _check_options(told: dict[str, Any]) -> None:
    """A keyword that is no key of a grpo stage: a slip of the pen, or a key of one of its sections."""
    known = set(Grpo.model_fields) - {"type", "task", "rewards"}
    sections = {
        key: kind
        for key, field in Grpo.model_fields.items()
        if isinstance(kind := field.annotation, type) and issubclass(kind, Section)
    }
    for key in told.keys() - known:
        inside = next((name for name, kind in sections.items() if key in kind.model_fields), None)
        fix = f"write {inside}={{{key!r}: …}}" if inside else "`oncurve recipe explain grpo` lists them all"
        raise RecipeError(
            key,
            "unknown keyword" + ("" if inside else did_you_mean(key, {*known, *KEYWORDS})),
            because="it is neither a keyword of oncurve.train nor a key of a grpo stage",
            fix=fix,
        )


KEYWORDS = ("recipe", "model", "prompts", "rewards", "heldout", "name", "seed", "threads", "out", "runs_dir", "resume", "quiet")


def as_mix(rewards: Rewards) -> RewardMix:
    """Rewards as Python code writes them, made one; functions of the same name are told apart by a number."""
    if isinstance(rewards, RewardMix):
        return rewards
    many = rewards if isinstance(rewards, list) or (isinstance(rewards, tuple) and not _weighted(rewards)) else [rewards]
    if not many:
        raise RewardError("rewards", "none", because="GRPO learns from rewards alone", fix="give at least one function")
    built: list[Reward] = []
    for reward in many:
        built.append(_renamed(_as_reward(reward), [other.name for other in built]))
    return RewardMix(built, [made.name for given, made in zip(many, built, strict=True) if _decides(given)])


def _decides(given: Any) -> bool:
    """Whether its 1 says that an answer is right: of a function and an object it is taken to; a name says what it is."""
    plain = given[0] if isinstance(given, tuple) else given
    return not isinstance(plain, str) or is_verifiable(RewardConfig(type=plain))


def _weighted(value: tuple[Any, ...]) -> bool:
    return len(value) == 2 and isinstance(value[1], int | float) and not isinstance(value[1], bool)


def _as_reward(reward: Any, weight: float | None = None) -> Reward:
    if isinstance(reward, tuple):
        if not _weighted(reward):
            raise RewardError("rewards", repr(reward), because="a pair is (reward, weight)", fix="for example (f, 0.5)")
        return _as_reward(reward[0], float(reward[1]))
    if isinstance(reward, str):
        return build_reward(RewardConfig(type=reward, weight=1.0 if weight is None else weight))
    made = as_reward(reward)
    if weight is None:
        return made
    return replace(made, weight=weight) if isinstance(made, FunctionReward) else _Reweighted(made, weight)


@dataclass(frozen=True, slots=True)
class _Reweighted:
    """A reward under another weight; all else is its own."""

    inner: Reward
    weight: float

    @property
    def name(self) -> str:
        return self.inner.name

    def score(self, group: Any) -> Any:
        return self.inner.score(group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _renamed(reward: Reward, taken: Sequence[str]) -> Reward:
    if not isinstance(reward, FunctionReward):
        return reward
    plain = "".join(c if c.isalnum() or c in "_-" else "" for c in reward.name) or "reward"
    name, number = plain, 1
    while name in taken:
        number += 1
        name = f"{plain}_{number}"
    return replace(reward, name=name)


def _where(reward: Reward) -> str:
    """Where a function was defined: for a person who reads the recipe later."""
    function = reward.function if isinstance(reward, FunctionReward) else type(reward)
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"


def _as_policy(model: ModelLike | None) -> tuple[Policy | None, str | None]:
    """(policy, source): one of them for what was given, none where the recipe says it."""
    if model is None or isinstance(model, str | Path):
        return None, None if model is None else str(model)
    from oncurve.models.policy import Policy

    if isinstance(model, Policy):
        return model, None
    if isinstance(model, tuple) and len(model) == 2:
        return Policy(model[0], model[1]), None
    raise RecipeError(
        "model",
        type(model).__name__,
        because="a model needs its tokenizer",
        fix='give a folder, a hub id, "tiny", or (model, tokenizer)',
    )
