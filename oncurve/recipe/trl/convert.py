"""`oncurve recipe from-trl`: convert a TRL GRPOConfig in YAML to a recipe. A comment above each key names the TRL option.

TRL's defaults are written out if they differ from the recipe's, so options that the file does not set keep their meaning. What
has no counterpart, or means something else, is reported in notes; nothing is dropped silently. An option without a counterpart
that has TRL's default needs no note, so a file may also be what `GRPOConfig.to_json_string()` returns, since JSON is YAML.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from oncurve.errors import DataError, did_you_mean
from oncurve.objective_specs import OBJECTIVE_SPECS
from oncurve.recipe.keys import field_at_location, toml_value
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import BUILT_IN_SINKS
from oncurve.recipe.trl.config import TRL_DEFAULTS, NoCounterpart, TrlConfig, is_hub_dataset
from oncurve.recipe.trl.options import REMOVED, TRL_OPTIONS

BOXED: dict[str, Any] = {"type": "math", "take": "boxed", "column": "solution"}
BUILT_IN_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": BOXED,
    "reasoning_accuracy_reward": BOXED,
    "think_format_reward": {"type": "format", "pattern": "<think>(?!.*<think>).*?</think>.*"},
    "get_soft_overlong_punishment": {"type": "overlong", "limit": 1280, "buffer": 256},
}
"""TRL's own reward functions, and the rewards that give the same scores (`tests/parity/test_trl_rewards.py`)."""

REWARD_MODEL = "reward model"


@dataclass(frozen=True, slots=True)
class ConversionNote:
    """An option that was not converted unchanged, its value in the file (None: not in the file), and what to know about it."""

    option: str
    value: object
    text: str

    def __str__(self) -> str:
        return f"{self.option}: {self.text}" if self.value is None else f"{self.option} = {toml_value(self.value)}: {self.text}"


@dataclass(frozen=True, slots=True)
class Line:
    """One key of the recipe and the comment above it."""

    key: str
    value: object
    comment: str


RENAMED = {"torch_dtype": "dtype"}
"""Names of options in older versions of TRL."""


def from_trl(path: Path, processes: int = 1) -> tuple[str, list[ConversionNote]]:
    """The recipe as TOML, and the notes. ``processes`` is the number of devices that TRL ran on: its batch sizes are per
    device."""
    config = TrlConfig(_read(path), processes)
    lines, notes = _convert_options(config)
    rewards, reward_notes = _convert_rewards(config)
    sinks, sink_notes = _convert_sinks(config)
    text = "\n".join(_render(path.name, lines, rewards, sinks)) + "\n"
    return text, [*notes, *reward_notes, *sink_notes, *_differences(config), *_unsupported(config)]


def _read(path: Path) -> dict[str, Any]:
    if path.suffix == ".toml":
        raise DataError(
            str(path), "a TOML file", because="a TRL config is YAML", fix=f"if it is a recipe, use it: oncurve train {path}"
        )
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(str(path), "no such file", because="it should be the TRL config", fix="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(str(path), "can't be read", because=str(error), fix="give a YAML text file") from None
    except yaml.YAMLError as error:
        raise DataError(
            str(path), "not YAML", because=" ".join(str(error).split()), fix="correct that line of the file"
        ) from None
    if not isinstance(options, dict):
        shape = {list: "a list", str: "plain text", type(None): "an empty file"}.get(type(options), "a single value")
        raise DataError(str(path), shape, because="a TRL config is a mapping of options", fix="write `option: value` lines")
    named = {str(key): value for key, value in options.items() if value is not None and value != "None"}
    return {RENAMED.get(name, name): value for name, value in named.items()}


def _convert_options(config: TrlConfig) -> tuple[list[Line], list[ConversionNote]]:
    """One line for each option of the table that the file sets, or whose TRL default is not the recipe's."""
    lines, notes = [], []
    for name, option in TRL_OPTIONS.items():
        if option.key is None or option.convert is None:
            continue
        try:
            value = option.convert(config)
        except NoCounterpart as reason:
            notes.append(ConversionNote(name, config.options.get(name), str(reason)))
            continue
        if value is not None and (_options_in_file(option.key, config) or value != _default(option.key)):
            lines.append(Line(option.key, value, _comment(name, config)))
    return lines, notes


def _options_in_file(key: str, config: TrlConfig) -> list[str]:
    """The options of the file that belong to a recipe key."""
    return [name for name, option in TRL_OPTIONS.items() if option.key == key and name in config.options]


def _default(key: str) -> object:
    head, _, rest = key.partition(".")
    loc = ("stages", "grpo", *rest.split(".")) if head == "grpo" else tuple(key.split("."))
    field, _ = field_at_location(Recipe, loc)
    return None if field is None else field.get_default()


def _comment(name: str, config: TrlConfig) -> str:
    """The options of the file that a key was made from, with the remark of the table."""
    option = TRL_OPTIONS[name]
    sources = [f"{source}: {toml_value(config.options[source])}" for source in _options_in_file(str(option.key), config)]
    if not sources:
        return f"TRL's default for {name}"
    return f"TRL {', '.join(sources)}" + (f" ({option.remark})" if option.remark else "")


def _convert_rewards(config: TrlConfig) -> tuple[list[list[Line]], list[ConversionNote]]:
    """One [[rewards]] per reward function. Weights go by position, and TRL puts a reward model first."""
    names = config.texts("reward_funcs")
    weights: list[float | None] = [float(weight) for weight in config.texts("reward_weights")]
    model = config.options.get("reward_model_name_or_path")
    names = names if model is None else [REWARD_MODEL, *names]
    if weights and names and len(weights) != len(names):
        because = f"there are {len(names)} rewards and {len(weights)} weights"
        raise DataError("reward_weights", weights, because=because, fix="give one weight per reward, the reward model's first")
    if not names:
        text = 'TRL takes reward functions in Python: name them in [[rewards]] as function = "FILE.py:NAME"'
        blank = Line("function", "rewards.py:reward", "put your reward function here; it takes the same arguments as in TRL")
        return [[Line("type", "python", "a Python function"), blank]], [ConversionNote("reward_funcs", None, text)]
    rewards, notes = [], []
    for name, weight in zip(names, weights or [None] * len(names), strict=True):
        lines, note = _convert_reward_model(str(model)) if name == REWARD_MODEL else _convert_reward(name)
        rewards.append(lines + ([] if weight is None else [Line("weight", weight, "TRL reward_weights")]))
        notes += [] if note is None else [note]
    return rewards, notes


def _convert_reward(name: str) -> tuple[list[Line], ConversionNote | None]:
    comment = f"TRL reward_funcs: {name}"
    if name in BUILT_IN_REWARDS:
        options = BUILT_IN_REWARDS[name]
        note = ConversionNote(name, None, f"became the reward '{options['type']}'; for the differences see docs/rewards.md")
        return [Line(key, value, comment if key == "type" else "the same as in TRL") for key, value in options.items()], note
    module, _, function = name.rpartition(".")
    path = f"{module or 'rewards'}:{function}"
    return [Line("type", "python", comment), Line("name", function, comment), Line("function", path, comment)], None


def _convert_reward_model(model: str) -> tuple[list[Line], ConversionNote]:
    comment = "TRL reward_model_name_or_path"
    note = ConversionNote(
        "reward_model_name_or_path",
        model,
        "became a reward of type model, which runs on the CPU unless device is set; a prompt that is a text becomes a message "
        "if the reward model has a chat template, while TRL joins prompt and completion",
    )
    return [Line("type", "model", comment), Line("model", model, comment)], note


def _convert_sinks(config: TrlConfig) -> tuple[list[list[Line]], list[ConversionNote]]:
    """One [[sinks]] per logger of TRL that a run can log to."""
    names = [name for name in config.texts("report_to") if name != "none"]
    project = [Line("project", config.options["project"], "TRL project")] if "project" in config.options else []
    sinks, notes = [], []
    for name in names:
        if name in BUILT_IN_SINKS:
            kind = Line("type", name, f"TRL report_to: {name}")
            sinks.append([kind, *(project if name == "trackio" else [])])
        else:
            notes.append(
                ConversionNote(
                    "report_to", name, "the run's database has everything; [[sinks]] are tensorboard, wandb, trackio"
                )
            )
    return sinks, notes


def _differences(config: TrlConfig) -> Iterator[ConversionNote]:
    """Options that were converted but do not mean quite the same."""
    options = config.options
    surrogate = OBJECTIVE_SPECS[config.objective].surrogate
    if not config.has_same_objective:
        loss, level = config.loss
        yield ConversionNote(
            "loss_type",
            options.get("loss_type"),
            f"{loss} with {level} ratios has no counterpart; {config.objective} is the nearest",
        )
    if config.objective == "bnpo":
        yield ConversionNote(
            "loss_type",
            "bnpo",
            "TRL divides by the tokens of a micro-batch, Oncurve by those of the step: dapo's loss with bnpo's clip range",
        )
    if surrogate == "sapo" and {"epsilon", "epsilon_high"} & set(options):
        yield ConversionNote("epsilon", options.get("epsilon"), "sapo has a soft gate instead of a clip, in TRL too")
    if surrogate == "cispo" and config.number("epsilon" if "epsilon_high" not in options else "epsilon_high") <= 1:
        yield ConversionNote(
            "epsilon_high",
            options.get("epsilon_high"),
            "TRL would bound every ratio below 1; the recipe keeps the objective's own bound",
        )
    if config.step_completions % config.update_completions:
        yield ConversionNote(
            "steps_per_generation",
            options.get("steps_per_generation"),
            "not a multiple of gradient_accumulation_steps: rounded down",
        )
    reduction = OBJECTIVE_SPECS[config.objective].reduction
    if config.boolean("mask_truncated_completions") and reduction != "mean_over_step_tokens":
        yield ConversionNote(
            "mask_truncated_completions",
            options.get("mask_truncated_completions"),
            f"TRL counts truncated completions in the number that {config.objective} divides by, Oncurve does not: if t of a "
            "step's B completions are truncated, the gradient is B / (B − t) times TRL's",
        )
    if config.strategy("eval_strategy") != "no":
        yield ConversionNote(
            "eval_strategy",
            options["eval_strategy"],
            "TRL evaluates on the data set's split test: name its file in task.heldout_path; until then, rows of task.path are "
            "held out and not trained on",
        )
    if "model_name_or_path" not in options:
        yield ConversionNote(
            "model_name_or_path", None, "TRL takes the model in Python: set model.source to its folder or hub id"
        )
    if "dataset_name" not in options:
        yield ConversionNote(
            "dataset_name", None, "TRL takes the data set in Python: save it as JSONL and set its path in [task]"
        )
    elif is_hub_dataset(str(options["dataset_name"])):
        wanted = "".join(
            f", of {what} {options[name]}"
            for name, what in (("dataset_config", "config"), ("dataset_train_split", "split"))
            if name in options
        )
        text = f"a recipe reads one file: write its path in the data set instead of FILE in task.path{wanted}"
        yield ConversionNote("dataset_name", options["dataset_name"], text)


def _unsupported(config: TrlConfig) -> Iterator[ConversionNote]:
    for name, value in config.options.items():
        option = TRL_OPTIONS.get(name)
        if option is None:
            reason = REMOVED.get(name) or f"TRL 1.16 has no such option{did_you_mean(name, TRL_OPTIONS)}"
            yield ConversionNote(name, value, reason)
        elif option.key is None and not _is_default(name, value):
            yield ConversionNote(name, value, f"no counterpart: {option.remark}")


def _is_default(name: str, value: Any) -> bool:
    """Whether an option without a counterpart has TRL's default, as in a config that TRL has written."""
    plain = {key: part for key, part in value.items() if part is not None} if isinstance(value, dict) else value
    return plain in ("", [], {}) or plain == TRL_DEFAULTS.get(name)


def _render(source: str, lines: list[Line], rewards: list[list[Line]], sinks: list[list[Line]]) -> Iterator[str]:
    """The recipe in the order of the schema: top-level keys, then section by section."""
    yield f"# A recipe converted from {source} by `oncurve recipe from-trl`. Each comment names the TRL option."
    yield from _pairs([line for line in lines if "." not in line.key])
    model = [line for line in lines if line.key.startswith("model.")]
    has_source = any(line.key == "model.source" for line in model)
    source_line = [] if has_source else [Line("source", "MODEL", "TRL takes the model in Python")]
    yield from _section("[model]", source_line + [line for line in model if line.key.count(".") == 1])
    yield from _section("[model.lora]", [line for line in model if line.key.count(".") == 2])
    yield from _section("[evaluation]", [line for line in lines if line.key.startswith("evaluation.")])
    task = [line for line in lines if line.key.startswith("task.")]
    no_path = Line("task.path", "train.jsonl", "your data: one JSON object per line, with `prompt` and your rewards' columns")
    has_path = any(line.key == "task.path" for line in task)
    task_lines = [Line("task.type", "file", "rows of a JSONL or Parquet file"), *([] if has_path else [no_path]), *task]
    yield from _section("[task]", task_lines)
    for reward in rewards:
        yield from _section("[[rewards]]", reward)
    for sink in sinks:
        yield from _section("[[sinks]]", sink)
    stage = [line for line in lines if line.key.startswith("grpo.")]
    yield from _section("[[stages]]", [Line("type", "grpo", "TRL GRPOTrainer"), *(s for s in stage if s.key.count(".") == 1)])
    for section in dict.fromkeys(line.key.split(".")[1] for line in stage if line.key.count(".") == 2):
        yield from _section(f"[stages.{section}]", [line for line in stage if line.key.startswith(f"grpo.{section}.")])


def _section(header: str, lines: list[Line]) -> Iterator[str]:
    if lines:
        yield ""
        yield header
        yield from _pairs(lines)


def _pairs(lines: list[Line]) -> Iterator[str]:
    for line in lines:
        yield f"# {line.comment}"
        yield f"{line.key.rpartition('.')[2]} = {toml_value(line.value)}"
