"""The Python API: `train`, `load_recipe` and `Run`.

    run = oncurve.train(oncurve.load_recipe("arithmetic"))
    run = oncurve.train(model="tiny", prompts=["3+4=", "5+6="], rewards=[my_function], group_size=8)
    print(run.accuracy, run.metrics("reward"))

A user error raises an `OncurveError`, which says where, what, why, and how to fix it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from inspect import signature
from io import IOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload
from urllib.parse import quote

from oncurve.agents.tool_environment import TOOL_TIMEOUT_S, ToolEnvironment
from oncurve.distributed.rendezvous import joined_ranks, with_ranks
from oncurve.errors import DataError, RecipeError, RewardError, RunError, did_you_mean
from oncurve.notebook import GroupList, MetricCurve, MetricTable, NotebookDisplay, StudioFrame
from oncurve.recipe.error_messages import read_section
from oncurve.recipe.load import load_recipe, parse_recipe
from oncurve.recipe.schema.base import Section
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Reward as RewardConfig
from oncurve.recipe.schema.stages import SAMPLED_TYPES, Grpo
from oncurve.recipe.trl.options import explain_trl_argument
from oncurve.recipe.validate import FROM_PYTHON
from oncurve.records import EvalReport, History
from oncurve.rewards.base import Reward
from oncurve.rewards.episode_reward import EnvironmentReward
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward, as_reward
from oncurve.rewards.registry import REWARDS, build_reward, is_verifiable
from oncurve.runs.checkpoints.listing import BestStep, best_of_run
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder, Status
from oncurve.runs.metrics import METRICS
from oncurve.tasks.data.prompt_list import PromptList, Row
from oncurve.tasks.environments import send_as_key
from oncurve.terminal.console import SafeConsole
from oncurve.terminal.errors import print_error
from oncurve.terminal.live.display import LiveDisplay
from oncurve.terminal.live.summary import render_summary
from oncurve.trust import load_recipe_of

if TYPE_CHECKING:
    from oncurve.models.policy import Policy
    from oncurve.training.listeners import Listener

__all__ = ["Run", "load_recipe", "train"]

RewardSource = Callable[..., Any] | Reward | str | Mapping[str, Any]
"""A function, an object with name, weight and score, the type of a built-in reward, or a dict as a recipe writes a reward."""
RewardLike = RewardSource | tuple[RewardSource, float]
"""A reward, or a pair (reward, weight)."""
Rewards = RewardMix | RewardLike | Sequence[RewardLike]
ModelLike = Any
"""`"tiny"`, a folder, a hub id, a GGUF file, a dict with the keys of `[model]`, or a pair (model, tokenizer) of transformers'
objects."""


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """A run on disk, while it trains or afterwards.

    Example:
        run = Run.open("arithmetic-1")
        run.status                        # "finished"
        run.accuracy                      # 0.99
        run.metrics("reward")[-1]         # (400, 2.03): step and value
        best = run.groups(step=400)[0].best_first[0]
    """

    folder: RunFolder

    @classmethod
    def open(cls, name_or_path: str | Path, runs_dir: str | Path = "runs") -> Run:
        """Opens a run by its name in ``runs_dir`` or by its path.

        Example: Run.open("arithmetic-1"), Run.open("/data/runs/arithmetic-1")
        """
        return cls(RunFolder.open(name_or_path, Path(runs_dir)))

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.status}>"

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def model_path(self) -> Path:
        """The folder of the final model, in Hugging Face format.

        Example: AutoModelForCausalLM.from_pretrained(run.model_path)
        """
        return self.folder.model

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe that the run trains."""
        return load_recipe_of(self.folder)

    @property
    def status(self) -> Status:
        """ "running", "interrupted", "finished" or "failed"."""
        return self.folder.state().current_status

    @property
    def evals(self) -> list[EvalReport]:
        """Every evaluation on held-out prompts, in order."""
        with RunReader.open(self.path) as store:
            return store.evals()

    @property
    def accuracy(self) -> float | None:
        """The last held-out accuracy; None if nothing was held out, or if there is no verifiable reward."""
        evals = self.evals
        return evals[-1].accuracy if evals else None

    @property
    def best(self) -> BestStep | None:
        """The step with the best held-out result, or with the best value of its stage's `keep_best`; None if there is none.
        ``oncurve export RUN@best`` writes its model if its checkpoint was kept.

        Example: run.best.step, run.best.value
        """
        return best_of_run(self.folder)

    @property
    def heldout_reward(self) -> float | None:
        """The last mean reward on held-out prompts; None if nothing was held out."""
        evals = self.evals
        return evals[-1].reward if evals else None

    @overload
    def metrics(self, name: str, stage: str | None = None) -> MetricCurve: ...

    @overload
    def metrics(self, name: None = None, stage: str | None = None) -> MetricTable: ...

    def metrics(self, name: str | None = None, stage: str | None = None) -> MetricCurve | MetricTable:
        """A metric's curve as (step, value), for ``stage``, or by default for the last stage that logged it. Without a name:
        every metric of that stage, or of the last one. `to_pandas()` makes a data frame of either, and a notebook shows charts.

        Example: run.metrics("reward"), run.metrics("loss", stage="sft"), run.metrics().to_pandas()
        """
        with RunReader.open(self.path) as store:
            stages = [stage] if stage is not None else [s.name for s in reversed(store.stages())]
            if name is None:
                by_stage = ((s, names) for s in stages if (names := store.metric_names(s)))
                last, names = next(by_stage, ("", []))
                return MetricTable((name, MetricCurve(name, store.metric(name, last))) for name in names)
            logged = {logged for s in stages for logged in store.metric_names(s)}
            if logged and name not in logged | METRICS.keys():
                raise RunError(
                    self.name,
                    f"no metric '{name}'{did_you_mean(name, [*logged, *METRICS])}",
                    because="no step has logged a metric of that name",
                    fix="run.metrics() lists the metrics that were logged",
                )
            return MetricCurve(name, next((curve for s in stages if (curve := store.metric(name, s))), []))

    def groups(self, step: int, stage: str | None = None) -> GroupList:
        """The groups of a step of ``stage``, or by default of the last stage that sampled: a tuple of GradedGroup.
        `to_pandas()` makes a data frame with a row for each completion, and a notebook shows tables.

        Example: [group.group.prompt.shown for group in run.groups(step=100) if group.has_signal]
        """
        with RunReader.open(self.path) as store:
            names = [s.name for s in store.stages() if s.type in SAMPLED_TYPES]
            name = stage or (names[-1] if names else "grpo")
            return GroupList(store.step(name, step).groups)

    def studio(self, height: int = 720) -> StudioFrame:
        """The studio, opened at this run, inline in a notebook. It runs until the kernel ends or you call `close()`.

        Example: run.studio()
        """
        folder = self.path.resolve()
        return StudioFrame(folder.parent, f"#/runs?run={quote(folder.name)}", height)

    def _repr_html_(self) -> str:
        return f"<b>{escape(self.name)}</b>, {self.status}{self.metrics()._repr_html_()}"


def train(
    recipe: Recipe | None = None,
    *,
    model: ModelLike | None = None,
    prompts: Iterable[Row] | None = None,
    rewards: Rewards | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    max_turns: int | None = None,
    tool_timeout_s: float = TOOL_TIMEOUT_S,
    history: History = "tokens",
    heldout: Iterable[Row] | None = None,
    lora: bool | Mapping[str, Any] | None = None,
    dtype: str | None = None,
    device: str | None = None,
    system_prompt: str | None = None,
    sinks: Sequence[str | Mapping[str, Any]] | None = None,
    callbacks: Sequence[Any] = (),
    evaluation: Mapping[str, Any] | None = None,
    group_size: int | None = None,
    steps: int | None = None,
    name: str | None = None,
    seed: int | None = None,
    threads: int | None = None,
    out: str | Path | None = None,
    runs_dir: str | Path = "runs",
    resume: Run | str | Path | None = None,
    accept_changes: bool = False,
    quiet: bool = False,
    **grpo_options: Any,
) -> Run:
    """Trains a recipe; or, without one, a single grpo stage on ``prompts`` with ``rewards``.

    ``prompts`` are texts, lists of messages, or dicts with "prompt" and the columns that rewards need. ``heldout`` are prompts
    of the same kind for evaluation. ``rewards`` are functions, called as `f(completion, prompt, …columns)` or as TRL calls
    them, names of built-in rewards, dicts with `type` and options as in a recipe, or pairs (reward, weight).

    ``tools`` are functions with type hints and docstrings that the model can call. ``environment_factory`` is a class whose
    instances have a state: each completion gets its own, `reset(**columns)` begins it, its other public methods are tools, and
    `get_reward()` scores it, so that ``rewards`` may be left out. With several classes in a dict, a prompt names its own in the
    column "environment". A completion has at most ``max_turns`` turns, and a call may take ``tool_timeout_s`` seconds. If the
    chat template rewrites earlier turns, the next turn still follows the tokens as sampled; with ``history`` = "template" it
    follows what the template writes.

    ``model`` is "tiny", a folder, a hub id, a GGUF file, a pair (model, tokenizer), or a dict with the keys of `[model]`, such
    as {"source": "Qwen/Qwen3-0.6B", "template_options": {"enable_thinking": False}}. ``lora`` is True or the keys of
    `[model.lora]`, such as {"rank": 8}; ``dtype`` is "float32", "bfloat16" or "float16"; ``device`` is "auto", "cpu" or "cuda";
    ``system_prompt`` is put before every prompt of a chat model. ``sinks`` are loggers: "wandb", "tensorboard", "trackio", or
    dicts as in a recipe. ``evaluation`` has the keys of `[evaluation]`. ``callbacks`` are instances of transformers'
    `TrainerCallback`.

    ``grpo_options`` are keys of a grpo stage, with the defaults of a recipe: optimiser, sampling, kl, eval_every, keep_best,
    patience (early stopping) and all others that `oncurve recipe explain grpo` lists. With a recipe, the other arguments
    replace the recipe's own. ``resume`` continues a run with the same prompts and rewards; if a reward
    function or data file has changed since it began, only with ``accept_changes``. In a script that torchrun starts, every
    process calls this function, and they train together.

    Examples:
        oncurve.train(oncurve.load_recipe("arithmetic", ["grpo.steps=50"]))

        def short(completion):
            return -len(completion) / 100

        rows = [{"prompt": "3+4=", "answer": "7"}, {"prompt": "5+6=", "answer": "11"}]
        oncurve.train(model="tiny", prompts=rows, rewards=["answer", (short, 0.1)], steps=100,
                      optimiser={"learning_rate": 1e-3})

        oncurve.train(model="Qwen/Qwen3-0.6B", prompts=rows, rewards=[{"type": "math", "name": "answer"}], lora={"rank": 8},
                      dtype="bfloat16", system_prompt="Answer in one word.", heldout=test_rows, eval_every=10, patience=3,
                      sinks=["wandb"])

        oncurve.train(resume="runs/arithmetic-1")
    """
    from oncurve.terminal.errors import silence_libraries
    from oncurve.training import start
    from oncurve.training.callbacks import CallbackListener

    silence_libraries()
    tools = None if tools is None else _as_list("tools", tools, "my_function")
    callbacks = _as_list("callbacks", callbacks, "MyCallback()")
    options = {"group_size": group_size, "steps": steps, **grpo_options}
    stage_keys = {key: value for key, value in options.items() if value is not None}
    _refuse_trl_names(stage_keys)
    environment = _as_environment(tools, environment_factory, max_turns, tool_timeout_s, history, prompts)
    mix = _with_environment_reward(rewards, environment)
    _check_rows("prompts", prompts)
    _check_rows("heldout", heldout)
    task = None if prompts is None else PromptList.of(prompts, () if heldout is None else heldout, environment=environment)
    settings = {"lora": _lora_keys(lora), "dtype": dtype, "device": device, "system_prompt": system_prompt}
    model_keys = {key: value for key, value in settings.items() if value is not None}
    if isinstance(model, Mapping):
        model_keys = {**model, **model_keys}
        model = model.get("source")
    policy, source = _as_policy(model, model_keys)
    if source is not None:
        model_keys["source"] = source
    began = time.monotonic()
    if resume is not None:
        section_keys = {"sinks": sinks, "evaluation": evaluation, **({} if policy is not None else model_keys)}
        given = {key: value for key, value in section_keys.items() if value is not None and key != "source"}
        _refuse_keys({**stage_keys, **given}, "a resumed run keeps its recipe", "leave it out")
        if not isinstance(resume, Run | str | Path):
            raise RunError("resume", repr(resume), because="it is a Run, or a run's name or folder", fix='resume="runs/run-1"')
        folder = resume.folder if isinstance(resume, Run) else RunFolder.open(resume, Path(runs_dir))
        resolved = load_recipe_of(folder)
    else:
        keys: dict[str, Any] = {"name": name, "seed": seed, "threads": threads, "evaluation": evaluation}
        run_keys = {key: value for key, value in keys.items() if value is not None}
        if sinks is not None:
            run_keys["sinks"] = [
                {"type": sink} if isinstance(sink, str) else sink for sink in _as_list("sinks", sinks, '"tensorboard"')
            ]
        resolved = _build_recipe(recipe, stage_keys, task, mix, model_keys, run_keys)
    resolved = with_ranks(resolved)
    with joined_ranks(resolved, print_error) as world:
        console = SafeConsole()
        display = NotebookDisplay if console.is_jupyter else partial(LiveDisplay, console)
        listeners: list[Listener] = [display()] if world.is_rank_zero and not quiet else []
        listeners += [CallbackListener(callbacks)] if callbacks and world.is_rank_zero else []
        parts: dict[str, Any] = {
            "task": task, "rewards": mix, "policy": policy, "listeners": listeners, "world": world,
        }  # fmt: skip
        if resume is not None:
            sets = [f"scale.ranks={world.size}"] if world.size > 1 else []
            run = start.resume(folder, sets=sets, accept_changes=accept_changes, **parts)
        else:
            run = start.begin(resolved, runs_dir=Path(runs_dir), out=None if out is None else Path(out), **parts)
    if world.is_rank_zero and not quiet:
        console = SafeConsole()
        console.print()
        console.print(render_summary(run, time.monotonic() - began))
    return Run(run)


def _as_environment(
    tools: list[Callable[..., Any]] | None,
    factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
    max_turns: int | None,
    timeout_s: float,
    history: History,
    prompts: Iterable[Row] | None,
) -> ToolEnvironment | dict[str, ToolEnvironment] | None:
    if not tools and factory is None:
        defaults: dict[str, object] = {"max_turns": None, "tool_timeout_s": TOOL_TIMEOUT_S, "history": "tokens"}
        because = "only tools and environments that are passed here use it"
        fix = "pass tools or environment_factory too, or set it under [task] in the recipe"
        for given, (name, default) in zip((max_turns, timeout_s, history), defaults.items(), strict=True):
            if given != default:
                raise RecipeError(name, "given without tools", because=because, fix=fix)
        return None
    if prompts is None:
        raise RecipeError(
            "tools" if tools else "environment_factory",
            "given without prompts",
            because="the tools of a recipe's own task are named there",
            fix="pass prompts=[…] too, or set task.tools and task.environment in the recipe",
        )
    options: dict[str, Any] = {"max_turns": max_turns, "timeout_s": timeout_s, "history": history}
    if not isinstance(factory, Mapping):
        environment = ToolEnvironment(tools or [], factory, **options)
        send_as_key(environment, "environment_factory")
        return environment
    environments = {}
    for name, one in factory.items():
        where = f"environment_factory[{name!r}]"
        environments[name] = ToolEnvironment(tools or [], one, factory_where=where, **options)
        send_as_key(environments[name], where)
    return environments


def _with_environment_reward(
    rewards: Rewards | None, environment: ToolEnvironment | dict[str, ToolEnvironment] | None
) -> RewardMix | None:
    """The rewards, and that of an environment with `get_reward`, of weight 1 under the name of its class, as in TRL. Several
    environments share one, called `environment`."""
    mix = None if rewards is None else as_mix(rewards)
    environments = environment.values() if isinstance(environment, dict) else [environment]
    names = {one.reward_name for one in environments if one is not None} - {None}
    if not names:
        return mix
    own = EnvironmentReward(str(names.pop()) if len(names) == 1 else "environment", 1.0)
    return RewardMix([own]) if mix is None else RewardMix([*mix.rewards, own], mix.accuracy_names)


def _build_recipe(
    recipe: Recipe | None,
    stage_keys: dict[str, Any],
    task: PromptList | None,
    mix: RewardMix | None,
    model_keys: dict[str, Any],
    run_keys: dict[str, Any],
) -> Recipe:
    """The given recipe with ``run_keys``, ``model_keys``, and prompts and rewards of Python in place of its own; without one, a
    recipe with a single grpo stage."""
    if recipe is not None and not isinstance(recipe, Recipe):
        example = repr(str(recipe)) if isinstance(recipe, str | Path) else '"mine.toml"'
        convert = "; `oncurve recipe from-trl` writes one from TRL's config" if hasattr(recipe, "num_generations") else ""
        raise RecipeError(
            "recipe",
            type(recipe).__name__,
            because="the first argument is a recipe, as load_recipe returns it",
            fix=f"oncurve.train(oncurve.load_recipe({example})){convert}",
        )
    # Prompts and rewards of Python are not part of a recipe, which only says where they came from.
    sections: dict[str, Any] = {}
    if task is not None:
        sections["task"] = {"type": FROM_PYTHON}
    if mix is not None:
        rewards = mix.rewards
        sections["rewards"] = [
            {"type": "python", "name": r.name, "weight": float(r.weight), "function": _where(r)} for r in rewards
        ]
    if recipe is not None:
        _refuse_keys(stage_keys, "it is a key of the recipe", 'change the recipe: load_recipe(FILE, ["grpo.group_size=16"])')
        if not run_keys and not model_keys and not sections:
            return recipe
        data = recipe.model_dump(exclude_none=True)
        stages = [{key: value for key, value in stage.items() if key not in sections} for stage in data["stages"]]
        return parse_recipe({**data, **run_keys, **sections, "stages": stages, "model": {**data["model"], **model_keys}})
    _check_keys(stage_keys)
    if task is None or mix is None:
        missing = "prompts" if task is None else "rewards"
        raise RecipeError(
            missing,
            "missing",
            because="without a recipe, training needs prompts and rewards",
            fix="oncurve.train(model=…, prompts=[…], rewards=[f]), or pass a recipe",
        )
    return parse_recipe({**run_keys, "model": model_keys, **sections, "stages": [{"type": "grpo", **stage_keys}]})


def _check_rows(name: str, rows: Any) -> None:
    """Refuses a value that would be iterated into something else than prompts: a text into its letters, a dict or a table
    into the names of its columns."""
    if rows is None:
        return
    kind, because, fix = type(rows).__name__, "", ""
    if isinstance(rows, str):
        because, fix = "a text is one prompt, and this is a list of prompts", f"{name}=[{rows!r}]"
        if Path(rows).suffix in (".jsonl", ".json", ".parquet", ".csv"):
            because = f"{name} takes a list, not the name of a file"
            fix = 'read the rows into a list of dicts, or use a recipe: task = { type = "file", path = "…" }'
    elif isinstance(rows, Mapping) and rows and all(hasattr(split, "features") for split in rows.values()):
        because = f"a DatasetDict has several splits: {', '.join(map(str, rows))}"
        fix = f"{name}=data[{next(iter(rows))!r}]"
    elif isinstance(rows, Mapping):
        because, fix = "a dict is one row, and this is a list of rows", f'{name}=[{{"prompt": …, "answer": …}}, …]'
    elif hasattr(rows, "itertuples"):
        because, fix = "iterating over a table gives the names of its columns", f'{name}=table.to_dict("records")'
    elif isinstance(rows, set | frozenset | bytes | bytearray | IOBase) or not isinstance(rows, Iterable):
        because, fix = "it is a list of prompts, in an order that stays the same", f'{name}=["3+4=", "5+6="]'
    if because:
        raise DataError(name, kind, because=because, fix=fix)


def _lora_keys(lora: bool | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if lora is None or lora is False:
        return None
    if lora is True:
        return {}
    if not isinstance(lora, Mapping):
        because, fix = "it is True, or the keys of [model.lora]", 'lora=True, or lora={"rank": 8}'
        if hasattr(lora, "lora_alpha"):  # peft's LoraConfig
            targets = f', "targets": {sorted(lora.target_modules)}' if isinstance(lora.target_modules, list | set) else ""
            raise RecipeError(
                "lora",
                "peft's LoraConfig",
                because=because,
                fix=f'lora={{"rank": {lora.r}, "alpha": {lora.lora_alpha}{targets}}}',
            )
        raise RecipeError("lora", repr(lora), because=because, fix=fix)
    return lora


def _as_list(name: str, value: Any, example: str) -> list[Any]:
    if isinstance(value, str | Mapping):
        return [value]
    if not isinstance(value, Iterable):
        raise RecipeError(name, repr(value), because="it is a list", fix=f"for example {name}=[{example}]")
    return list(value)


def _refuse_keys(keys: dict[str, Any], because: str, fix: str) -> None:
    for key, value in keys.items():
        raise RecipeError(key, value, because=because, fix=fix)


def _refuse_trl_names(keys: dict[str, Any]) -> None:
    """Refuses an argument of TRL's trainer, or an option of its config, with what to write instead."""
    for key in keys.keys() - Grpo.model_fields.keys():
        fix = explain_trl_argument(key)
        if fix is not None:
            raise RecipeError(
                key, "unknown keyword", because="it is TRL's name for an argument of its trainer or config", fix=fix
            )


def _check_keys(keys: dict[str, Any]) -> None:
    """Refuses a keyword that is not a key of a grpo stage: a typo, or a key of one of its sections."""
    known = set(Grpo.model_fields) - {"type", "task", "rewards"}
    sections = {
        key: kind
        for key, field in Grpo.model_fields.items()
        if isinstance(kind := field.annotation, type) and issubclass(kind, Section)
    }
    for key in keys.keys() - known:
        section = next((name for name, kind in sections.items() if key in kind.model_fields), None)
        fix = f"write {section}={{{key!r}: …}}" if section else "`oncurve recipe explain grpo` lists all keys"
        raise RecipeError(
            key,
            "unknown keyword" + ("" if section else did_you_mean(key, {*known, *signature(train).parameters})),
            because="it is neither a keyword of oncurve.train nor a key of a grpo stage",
            fix=fix,
        )


def as_mix(rewards: Rewards) -> RewardMix:
    """Combines rewards as passed to `train` into one mix. Functions of the same name get a number."""
    if isinstance(rewards, RewardMix):
        return rewards
    sources = rewards if isinstance(rewards, list) or (isinstance(rewards, tuple) and not _is_weighted(rewards)) else [rewards]
    if not sources:
        raise RewardError("rewards", "none", because="GRPO learns only from rewards", fix="pass at least one function")
    built: list[Reward] = []
    for source in sources:
        built.append(_with_unique_name(_as_reward(source), [other.name for other in built]))
    return RewardMix(built, [reward.name for source, reward in zip(sources, built, strict=True) if _is_verifiable(source)])


def _is_verifiable(source: Any) -> bool:
    """Whether a reward of 1 means that an answer is right: assumed of functions and objects, known of built-in rewards."""
    reward = source[0] if isinstance(source, tuple) else source
    return not isinstance(reward, str | Mapping) or is_verifiable(_reward_config(reward))


def _reward_config(reward: str | Mapping[str, Any]) -> RewardConfig:
    """A built-in reward, as its type or as a recipe writes it."""
    if isinstance(reward, str):
        if reward not in REWARDS and ("/" in reward or Path(reward).is_dir()):
            because = "a text is the type of a built-in reward, and this looks like a model"
            raise RewardError(
                "rewards", reward, because=because, fix=f'for a reward model: {{"type": "model", "model": {reward!r}}}'
            )
        return RewardConfig(type=reward)
    if "type" not in reward:
        because = f"a dict is a reward as a recipe writes it, and it has {', '.join(map(str, reward)) or 'no keys'}"
        raise RewardError(
            "rewards", "a dict without 'type'", because=because, fix='for example {"type": "answer", "take": "number"}'
        )
    return read_section(RewardConfig, reward, "rewards")


def _is_weighted(value: tuple[Any, ...]) -> bool:
    return len(value) == 2 and isinstance(value[1], int | float) and not isinstance(value[1], bool)


def _as_reward(reward: Any, weight: float | None = None) -> Reward:
    if isinstance(reward, tuple):
        if not _is_weighted(reward):
            raise RewardError("rewards", repr(reward), because="a pair is (reward, weight)", fix="for example (f, 0.5)")
        return _as_reward(reward[0], float(reward[1]))
    if isinstance(reward, str | Mapping):
        config = _reward_config(reward)
        return build_reward(config if weight is None else config.model_copy(update={"weight": weight}))
    if hasattr(reward, "save_pretrained"):
        because = "a reward model is loaded from a folder, with its tokenizer"
        fix = 'save both there, and pass {"type": "model", "model": "FOLDER"}'
        raise RewardError("rewards", type(reward).__name__, because=because, fix=fix)
    built = as_reward(reward)
    if weight is None:
        return built
    return replace(built, weight=weight) if isinstance(built, FunctionReward) else _Reweighted(built, weight)


@dataclass(frozen=True, slots=True)
class _Reweighted:
    """A reward with another weight. Everything else is the inner reward's."""

    inner: Reward
    weight: float

    @property
    def name(self) -> str:
        return self.inner.name

    def score(self, group: Any) -> Any:
        return self.inner.score(group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _with_unique_name(reward: Reward, taken: Sequence[str]) -> Reward:
    if not isinstance(reward, FunctionReward):
        return reward
    plain = "".join(c if c.isalnum() or c in "_-" else "" for c in reward.name) or "reward"
    name, number = plain, 1
    while name in taken:
        number += 1
        name = f"{plain}_{number}"
    return replace(reward, name=name)


def _where(reward: Reward) -> str:
    """Where a function is defined, for readers of the stored recipe."""
    function = reward.function if isinstance(reward, FunctionReward) else type(reward)
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__name__)}"


def _as_policy(model: ModelLike | None, settings: dict[str, Any]) -> tuple[Policy | None, str | None]:
    """(policy, source): one of them is set; neither if the recipe has the model. Of ``settings``, only the system prompt
    applies to a model object: its weights are used as they are."""
    if model is None or isinstance(model, str | Path):
        return None, None if model is None else str(model)
    from oncurve.models.policy import Policy

    for key in settings.keys() - {"system_prompt"}:
        raise RecipeError(
            key,
            repr(settings[key]),
            because="a model object is trained as it is",
            fix="pass the model's folder or hub id instead, or leave this out",
        )
    if isinstance(model, Policy):
        return model, None
    if isinstance(model, tuple) and len(model) == 2:
        return Policy(model[0], model[1], system_prompt=settings.get("system_prompt")), None
    raise RecipeError(
        "model",
        type(model).__name__,
        because="a model needs its tokenizer",
        fix='pass a folder, a hub id, "tiny", or (model, tokenizer)',
    )
