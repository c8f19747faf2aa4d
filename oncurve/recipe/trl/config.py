"""A TRL GRPOConfig read from YAML: the options of the file, TRL 1.16's defaults, and the quantities derived from them."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncurve.errors import DataError
from oncurve.objective_specs import BUILT_IN_OBJECTIVES, ObjectiveName

TRL_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))

TRL_DEFAULTS: dict[str, Any] = TRL_TABLE["defaults"]

TRL_OBJECTIVES: dict[tuple[str, str], ObjectiveName] = {
    spec.trl: name for name, spec in BUILT_IN_OBJECTIVES.items() if spec.trl is not None
}
"""(loss_type, importance_sampling_level) → the objective with the same loss."""


DATA_FILE = re.compile(r".*\.(jsonl|ndjson|json|csv|tsv|parquet)(\.gz)?", re.IGNORECASE)


def is_hub_dataset(name: str) -> bool:
    """Whether a data set's name is OWNER/NAME of the hub, and not a file or folder of this machine."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None and not DATA_FILE.fullmatch(name) and not Path(name).exists()


class NoCounterpart(Exception):
    """An option that cannot be converted. The message gives the reason and what the recipe has instead."""


@dataclass(frozen=True, slots=True)
class TrlConfig:
    """The options of one file, and the quantities that TRL derives from them. ``processes`` is TRL's world size."""

    options: Mapping[str, Any]
    processes: int = 1

    def value(self, option: str) -> Any:
        """The file's value, else TRL's default; None for options whose default does not matter here."""
        value = self.options.get(option)
        return TRL_DEFAULTS.get(option) if value is None else value

    def number(self, option: str) -> float:
        """YAML 1.1 reads `1e-6` as text, so text that is a number counts as one."""
        value = self.value(option)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise DataError(
                option, value, because="TRL takes a number here", fix=f"write {option}: NUMBER in the YAML"
            ) from None

    def integer(self, option: str) -> int:
        number = self.number(option)
        if number != int(number):
            raise DataError(option, self.value(option), because="TRL takes an integer here", fix=f"round {option}")
        return int(number)

    def boolean(self, option: str) -> bool:
        return str(self.value(option)).lower() in ("true", "1", "yes")

    def strategy(self, option: str) -> str:
        """The value of `save_strategy` or `eval_strategy`. YAML 1.1 reads `no` as false."""
        value = str(self.value(option)).lower()
        return "no" if value == "false" else value

    def texts(self, option: str) -> list[str]:
        """The items of a list, as text; a single value is a list of one."""
        value = self.value(option)
        items = value if isinstance(value, list) else [] if value is None else [value]
        return [str(item) for item in items]

    @property
    def update_completions(self) -> int:
        """Completions of one optimiser update: TRL's batch sizes count completions, not prompts."""
        return self.integer("per_device_train_batch_size") * self.processes * self.integer("gradient_accumulation_steps")

    @property
    def step_completions(self) -> int:
        """Completions that TRL samples at once; in Oncurve they are one step."""
        if self.value("generation_batch_size") is not None:
            return self.integer("generation_batch_size")
        if self.value("steps_per_generation") is not None:
            return self.integer("per_device_train_batch_size") * self.processes * self.integer("steps_per_generation")
        return self.update_completions

    @property
    def prompts(self) -> int:
        """Prompts of a step: its completions divided by the group size, `num_generations`."""
        group = self.integer("num_generations")
        if group < 1 or self.step_completions % group:
            raise DataError(
                "num_generations",
                group,
                because=f"TRL samples {self.step_completions} completions at once, which is not a multiple of the group size",
                fix="make per_device_train_batch_size × steps_per_generation a multiple of num_generations",
            )
        return self.step_completions // group

    @property
    def minibatches(self) -> int:
        """Optimiser updates per pass over a step's samples."""
        return max(1, self.step_completions // self.update_completions)

    @property
    def updates(self) -> int:
        """Optimiser updates per step: the unit in which TRL counts its steps."""
        return self.minibatches * self.integer("num_iterations")

    def in_steps(self, option: str) -> int:
        """A number of TRL steps (updates) as steps here; below 1 it is a fraction of `max_steps`."""
        return math.ceil(self.in_updates(option) / self.updates)

    def in_updates(self, option: str) -> float:
        number = self.number(option)
        if not 0 < number < 1:
            return number
        if self.integer("max_steps") <= 0:
            raise NoCounterpart("it is a fraction of the run's length, which TRL derives from the data set; set it by hand")
        return number * self.integer("max_steps")

    @property
    def loss(self) -> tuple[str, str]:
        """(loss_type, importance_sampling_level)."""
        return str(self.value("loss_type")), str(self.value("importance_sampling_level"))

    @property
    def objective(self) -> ObjectiveName:
        """The objective with the same loss, else the nearest: the one with the same kind of ratio."""
        return TRL_OBJECTIVES.get(self.loss) or ("gspo" if self.loss[1] == "sequence" else "grpo")

    @property
    def has_same_objective(self) -> bool:
        return self.loss in TRL_OBJECTIVES
