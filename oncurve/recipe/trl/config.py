"""A TRL GRPOConfig as read from YAML: what the file says, what TRL 1.16 assumes otherwise, and what follows from both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oncurve.errors import DataError
from oncurve.objective_specs import OBJECTIVE_SPECS, ObjectiveName

TRL_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "num_iterations": 1,
    "max_steps": -1,
    "max_completion_length": 512,
    "temperature": 1.0,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "beta": 0.0,
    "scale_rewards": "group",
    "use_bias_correction_kl": True,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "seed": 42,
    "fp16": False,
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "logging_steps": 10,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "num_train_epochs": 3.0,
    "lora_r": 16,
}
"""Defaults of TRL 1.16's GRPOConfig that differ from the recipe's, or that other options are read by."""

TRL_OBJECTIVES: dict[tuple[str, str], ObjectiveName] = {
    spec.trl: name for name, spec in OBJECTIVE_SPECS.items() if spec.trl is not None
}
"""(loss_type, importance_sampling_level) → the objective with the same loss."""


class NoCounterpart(Exception):
    """An option that can't be carried over; the message says why and what happens instead."""


@dataclass(frozen=True, slots=True)
class TrlConfig:
    """The options of one file, with the quantities that TRL derives from several of them. ``processes`` is its world size."""

    said: Mapping[str, Any]
    processes: int = 1

    def value(self, option: str) -> Any:
        """What the file says, else TRL's default (None for options whose default does not matter here)."""
        found = self.said.get(option)
        return TRL_DEFAULTS.get(option) if found is None else found

    def number(self, option: str) -> float:
        """YAML 1.1 reads `1e-6` as text, so text that is a number counts as one."""
        value = self.value(option)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise DataError(
                option, value, because="TRL takes a number here", fix=f"write {option}: NUMBER in the YAML"
            ) from None

    def whole(self, option: str) -> int:
        number = self.number(option)
        if number != int(number):
            raise DataError(option, self.value(option), because="TRL takes a whole number here", fix=f"round {option}")
        return int(number)

    def truth(self, option: str) -> bool:
        return str(self.value(option)).lower() in ("true", "1", "yes")

    @property
    def update_completions(self) -> int:
        """Completions in one optimiser update: TRL's batch sizes count completions, not prompts."""
        return self.whole("per_device_train_batch_size") * self.processes * self.whole("gradient_accumulation_steps")

    @property
    def step_completions(self) -> int:
        """Completions sampled at once: one step here."""
        if self.value("generation_batch_size") is not None:
            return self.whole("generation_batch_size")
        if self.value("steps_per_generation") is not None:
            return self.whole("per_device_train_batch_size") * self.processes * self.whole("steps_per_generation")
        return self.update_completions

    @property
    def prompts(self) -> int:
        """Prompts of a step: its completions come in groups of `num_generations`."""
        group = self.whole("num_generations")
        if group < 1 or self.step_completions % group:
            raise DataError(
                "num_generations",
                group,
                because=f"TRL samples {self.step_completions} completions at once, which is no whole number of groups",
                fix="make per_device_train_batch_size × steps_per_generation a multiple of num_generations",
            )
        return self.step_completions // group

    @property
    def minibatches(self) -> int:
        """Optimiser updates per pass over a step's samples."""
        return max(1, self.step_completions // self.update_completions)

    @property
    def updates(self) -> int:
        """Optimiser updates per step: TRL counts its steps in these."""
        return self.minibatches * self.whole("num_iterations")

    def in_steps(self, option: str) -> int:
        """A number of TRL's steps (updates) as steps here; below 1 it is a share of `max_steps`."""
        return math.ceil(self.in_updates(option) / self.updates)

    def in_updates(self, option: str) -> float:
        number = self.number(option)
        if not 0 < number < 1:
            return number
        if self.whole("max_steps") <= 0:
            raise NoCounterpart("it is a share of the run's length, which TRL knows from the data set; set it by hand")
        return number * self.whole("max_steps")

    @property
    def objective(self) -> ObjectiveName:
        """The same loss, else the nearest: the sequence ratio decides before the reduction does."""
        loss, level = str(self.value("loss_type")), str(self.value("importance_sampling_level"))
        if (loss, level) in TRL_OBJECTIVES:
            return TRL_OBJECTIVES[loss, level]
        return "gspo" if level == "sequence" else "grpo"

    @property
    def same_objective(self) -> bool:
        return (str(self.value("loss_type")), str(self.value("importance_sampling_level"))) in TRL_OBJECTIVES
