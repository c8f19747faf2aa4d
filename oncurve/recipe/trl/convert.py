"""`oncurve recipe from-trl`: a TRL GRPOConfig in YAML becomes a recipe, each key with the option that it came from.

TRL's defaults are carried over where they differ from the recipe's, so that what the file leaves unsaid means the same.
What has no counterpart, or means something else, is told in notes, never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml  # type: ignore[import-untyped]

from oncurve.errors import DataError, did_you_mean
from oncurve.recipe.keys import field_at, toml
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Sink
from oncurve.recipe.trl.config import NoCounterpart, TrlConfig
from oncurve.recipe.trl.options import TRL_OPTIONS

BOXED = {"type": "math", "take": "boxed", "column": "solution"}
BUILT_IN_REWARDS = {
    "accuracy_reward": BOXED,
    "reasoning_accuracy_reward": BOXED,
    "think_format_reward": {"type": "format", "pattern": "<think>(?!.*<think>).*?</think>.*"},
}
"""TRL's own reward functions, and the rewards that say the same (`tests/parity/test_trl_rewards.py`)."""

LEARNED = "reward model"

OVERLONG = "get_soft_overlong_punishment"


@dataclass(frozen=True, slots=True)
class Note:
    """Something that did not carry over as it was: the option, its value in the file (None: not in it), what to know."""

    option: str
    value: object
    text: str

    def __str__(self) -> str:
        return f"{self.option}: {self.text}" if self.value is None else f"{self.option} = {toml(self.value)}: {self.text}"


@dataclass(frozen=True, slots=True)
class Line:
    """One key of the recipe to be written, and the comment above it."""

    key: str
    value: object
    comment: str


def from_trl(path: Path, processes: int = 1) -> tuple[str, list[Note]]:
    """The recipe as TOML text, and the notes. ``processes`` is the number of devices that TRL
    ran on, as its batch sizes are per device."""
    config = TrlConfig(_read(path), processes)
    lines, notes = _translate(config)
    rewards, reward_notes = _rewards(config)
    sinks, sink_notes = _sinks(config)
    text = "\n".join(_render(path.name, lines, rewards, sinks)) + "\n"
    return text, [*notes, *reward_notes, *sink_notes, *_differences(config), *_unmatched(config)]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(str(path), "no such file", because="it is the TRL config to read", fix="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(str(path), "can't be read", because=str(error), fix="give a YAML text file") from None
    except yaml.YAMLError as error:
        raise DataError(str(path), "not YAML", because=" ".join(str(error).split()), fix="mend the file at that line") from None
    if not isinstance(found, dict):
        raise DataError(
            str(path), type(found).__name__, because="a TRL config is a mapping of options", fix="write `option: value` lines"
        )
    return {str(key): value for key, value in found.items() if value is not None and value != "None"}


def _translate(config: TrlConfig) -> tuple[list[Line], list[Note]]:
    """Each option of the table in turn: a line where the file says it, or where TRL's default is not the recipe's."""
    lines, notes = [], []
    for name, option in TRL_OPTIONS.items():
        if option.key is None or option.convert is None:
            continue
        try:
            value = option.convert(config)
        except NoCounterpart as reason:
            notes.append(Note(name, config.said.get(name), str(reason)))
            continue
        said = any(other.key == option.key and key in config.said for key, other in TRL_OPTIONS.items())
        if value is not None and (said or value != _default(option.key)):
            lines.append(Line(option.key, value, _comment(name, config)))
    return lines, notes


def _default(key: str) -> object:
    head, _, rest = key.partition(".")
    loc = ("stages", "grpo", *rest.split(".")) if head == "grpo" else tuple(key.split("."))
    field, _ = field_at(Recipe, loc)
    return None if field is None else field.get_default()


def _comment(name: str, config: TrlConfig) -> str:
    """The options that went into a key, as the file has them; a remark only where the file says something."""
    key, remark = TRL_OPTIONS[name].key, TRL_OPTIONS[name].remark
    said = [
        f"{other}: {toml(config.said[other])}"
        for other, option in TRL_OPTIONS.items()
        if option.key == key and other in config.said
    ]
    if not said:
        return f"TRL's default for {name}"
    return f"TRL {', '.join(said)}" + (f" ({remark})" if remark else "")


def _rewards(config: TrlConfig) -> tuple[list[list[Line]], list[Note]]:
    """One [[rewards]] per reward function. Weights are by position, and a reward model, if any, comes first in TRL."""
    names = [str(name) for name in config.said.get("reward_funcs") or ()]
    weights: list[float | None] = [float(weight) for weight in config.said.get("reward_weights") or ()]
    model = config.said.get("reward_model_name_or_path")
    names = names if model is None else [LEARNED, *names]
    if weights and names and len(weights) != len(names):
        because = f"there are {len(names)} rewards and {len(weights)} weights for them"
        raise DataError("reward_weights", weights, because=because, fix="give one weight per reward, the reward model's first")
    if not names:
        text = 'TRL takes reward functions in Python: name them in [[rewards]] as function = "FILE.py:NAME"'
        blank = Line("function", "rewards.py:reward", "put your reward function here; it takes the same arguments as in TRL")
        return [[Line("type", "python", "a Python function"), blank]], [Note("reward_funcs", None, text)]
    found, notes = [], []
    for name, weight in zip(names, weights or [None] * len(names), strict=True):
        if name == OVERLONG:
            continue
        lines, note = _learned(str(model)) if name == LEARNED else _reward(name)
        found.append(lines + ([] if weight is None else [Line("weight", weight, "TRL reward_weights")]))
        notes += [] if note is None else [note]
    return found, notes


def _reward(name: str) -> tuple[list[Line], Note | None]:
    comment = f"TRL reward_funcs: {name}"
    if name in BUILT_IN_REWARDS:
        options = BUILT_IN_REWARDS[name]
        note = Note(
            name, None, f"became the reward '{options['type']}'; where they differ: docs/rewards.md, Beside TRL's rewards"
        )
        return [Line(key, value, comment if key == "type" else "as it is in TRL") for key, value in options.items()], note
    module, _, function = name.rpartition(".")
    place = f"{module or 'rewards'}:{function}"
    return [Line("type", "python", comment), Line("name", function, comment), Line("function", place, comment)], None


def _learned(model: str) -> tuple[list[Line], Note]:
    comment = "TRL reward_model_name_or_path"
    note = Note("reward_model_name_or_path", model, "became a reward of type model, which runs on the CPU unless device is set")
    return [Line("type", "model", comment), Line("model", model, comment)], note


def _sinks(config: TrlConfig) -> tuple[list[list[Line]], list[Note]]:
    """One [[sinks]] per place that TRL reports to and a run can write to."""
    said = config.said.get("report_to") or []
    names = [str(name) for name in ([said] if isinstance(said, str) else said) if name != "none"]
    project = [Line("project", config.said["project"], "TRL project")] if "project" in config.said else []
    found, notes = [], []
    for name in names:
        if name in get_args(Sink.model_fields["type"].annotation):
            kind = Line("type", name, f"TRL report_to: {name}")
            found.append([kind, *(project if name == "trackio" else [])])
        else:
            notes.append(
                Note("report_to", name, "the run's database has everything; [[sinks]] are tensorboard, wandb, trackio")
            )
    return found, notes


def _differences(config: TrlConfig) -> Iterator[Note]:
    """Options that were carried over but don't mean quite the same."""
    said = config.said
    if not config.same_objective:
        pair = f"{config.value('loss_type')} with {config.value('importance_sampling_level')} ratios"
        yield Note("loss_type", said.get("loss_type"), f"{pair} has no counterpart; {config.objective} is the nearest")
    if config.objective == "bnpo":
        yield Note(
            "loss_type",
            "bnpo",
            "TRL divides by a micro-batch's tokens, here by the step's: dapo's loss, with its own clip range",
        )
    if config.objective == "sapo" and {"epsilon", "epsilon_high"} & set(said):
        yield Note("epsilon", said.get("epsilon"), "sapo has a soft gate in place of the clip, in TRL too")
    if config.objective == "cispo" and config.number("epsilon" if "epsilon_high" not in said else "epsilon_high") <= 1:
        yield Note(
            "epsilon_high", said.get("epsilon_high"), "TRL would bound every ratio below 1; the objective's own bound is kept"
        )
    if config.truth("sync_ref_model") and config.number("ref_model_mixup_alpha") != 1:
        yield Note(
            "ref_model_mixup_alpha", said.get("ref_model_mixup_alpha"), "TRL mixes reference and policy; here it is replaced"
        )
    if config.step_completions % config.update_completions:
        yield Note(
            "steps_per_generation", said.get("steps_per_generation"), "no multiple of gradient_accumulation_steps: rounded down"
        )
    if OVERLONG in (said.get("reward_funcs") or ()):
        text = "set grpo.overlong.buffer = 256: it counts back from max_new_tokens, where TRL counts from 1280"
        yield Note("reward_funcs", OVERLONG, text)
    if "model_name_or_path" not in said:
        yield Note("model_name_or_path", None, "TRL takes the model in Python: give its folder or hub id in model.source")
    if "dataset_name" not in said:
        yield Note("dataset_name", None, "TRL takes the data set in Python: save it as JSONL and give its path in [task]")


def _unmatched(config: TrlConfig) -> Iterator[Note]:
    for name, value in config.said.items():
        option = TRL_OPTIONS.get(name)
        if option is None:
            yield Note(name, value, f"TRL 1.16 has no such option{did_you_mean(name, TRL_OPTIONS)}")
        elif option.key is None and not (name == "multi_objective_aggregation" and value == "sum_then_normalize"):
            yield Note(name, value, f"no counterpart: {option.remark}")


def _render(source: str, lines: list[Line], rewards: list[list[Line]], sinks: list[list[Line]]) -> Iterator[str]:
    """The recipe in the order of the schema: the recipe's own keys, then section by section."""
    yield f"# A recipe made from {source} by `oncurve recipe from-trl`. Each comment names the TRL option."
    yield from _pairs([line for line in lines if "." not in line.key])
    model = [line for line in lines if line.key.startswith("model.")]
    unnamed = (
        [] if any(line.key == "model.source" for line in model) else [Line("source", "MODEL", "TRL takes the model in Python")]
    )
    yield from _section("[model]", unnamed + [line for line in model if line.key.count(".") == 1])
    yield from _section("[model.lora]", [line for line in model if line.key.count(".") == 2])
    yield from _section("[evaluation]", [line for line in lines if line.key.startswith("evaluation.")])
    task = [line for line in lines if line.key.startswith("task.")]
    missing = Line("task.path", "train.jsonl", "your data, one JSON object per line with a `prompt` and your rewards' columns")
    yield from _section("[task]", [Line("task.type", "file", "rows of a JSONL or Parquet file"), *(task or [missing])])
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
        yield f"{line.key.rpartition('.')[2]} = {toml(line.value)}"
