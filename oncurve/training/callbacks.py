"""A run calls the user's callbacks: instances of subclasses of transformers' `TrainerCallback`, as its `Trainer` does.

| event | when | besides args, state and control |
|---|---|---|
| `on_train_begin`, `on_train_end` | around the run | |
| `on_step_end` | after each step | `report`, the step as the run stores it |
| `on_log` | after each step | `logs`, its metrics by name |
| `on_evaluate` | after each evaluation on held-out prompts | `metrics`: `eval_accuracy` and `eval_reward` |
| `on_save` | after each checkpoint | |

``args`` has `output_dir` (the run's folder), `max_steps`, `seed` and `recipe`. ``state`` is a `TrainerState` with `global_step`
(counted within the stage), `max_steps` and `log_history`. A callback that overrides another event, such as `on_epoch_end`, is
refused, because it would never be called. If a callback sets `should_training_stop` of ``control``, the stage
ends after the step. `should_evaluate`, `should_save` and `should_epoch_stop` are refused, because keys of the recipe decide
about them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from oncurve.errors import RecipeError
from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import EvalReport, StepReport
from oncurve.training.listeners import Listener

OTHER_FLAGS = {"should_evaluate": "eval_every", "should_save": "save_every", "should_epoch_stop": "steps"}
"""Flags of `TrainerControl` that a callback can't set, and the key to use instead."""
EVENTS = ("on_train_begin", "on_train_end", "on_step_end", "on_log", "on_evaluate", "on_save")
"""The events that callbacks are called with."""


class CallbackListener(Listener):
    """Passes a run's events to callbacks."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        trainer = importlib.import_module("transformers.trainer_callback")
        for index, callback in enumerate(callbacks):
            if not isinstance(callback, trainer.TrainerCallback):
                raise RecipeError(
                    f"callbacks[{index}]",
                    callback.__name__ if isinstance(callback, type) else type(callback).__name__,
                    because="a callback is an instance of a class that extends transformers.TrainerCallback",
                    fix="class Mine(transformers.TrainerCallback): …; callbacks=[Mine()]",
                )
            if isinstance(callback, trainer.EarlyStoppingCallback):
                raise RecipeError(
                    f"callbacks[{index}]",
                    "EarlyStoppingCallback",
                    because="it reads settings of a Trainer that a run does not have",
                    fix="patience=… and eval_every=… stop a stage early",
                )
            _check_events(f"callbacks[{index}]", type(callback), trainer.TrainerCallback)
        self.callbacks = tuple(callbacks)
        self.state, self.control = trainer.TrainerState(), trainer.TrainerControl()
        self.args = SimpleNamespace()

    @property
    def wants_stop(self) -> bool:
        return bool(self.control.should_training_stop)

    def on_run_start(self, recipe: Recipe, folder: Path, parameters: int, resumed_from: tuple[str, int] | None) -> None:
        self.args = SimpleNamespace(output_dir=str(folder), max_steps=recipe.stages[-1].steps, seed=recipe.seed, recipe=recipe)
        self._call("on_train_begin")

    def on_stage_start(self, stage: str, type: str, position: int, steps: int, done: int) -> None:
        self.state.max_steps, self.state.global_step = steps, done
        self.control.should_training_stop = False

    def on_step(self, report: StepReport) -> None:
        self.state.global_step = report.step
        self._log(dict(report.metrics), report.step)
        self._call("on_step_end", report=report)
        self._call("on_log", logs=dict(report.metrics))

    def on_eval(self, report: EvalReport) -> None:
        values = {"eval_accuracy": report.accuracy, "eval_reward": report.reward}
        metrics = {name: value for name, value in values.items() if value is not None}
        self._log(metrics, report.step)
        self._call("on_evaluate", metrics=metrics)

    def on_checkpoint(self, stage: str, step: int, path: Path) -> None:
        self._call("on_save")

    def on_run_end(self, status: str) -> None:
        self._call("on_train_end")

    def _log(self, values: dict[str, float], step: int) -> None:
        self.state.log_history.append({**values, "step": step})

    def _call(self, event: str, **values: Any) -> None:
        for callback in self.callbacks:
            returned = getattr(callback, event)(self.args, self.state, self.control, **values)
            self.control = self.control if returned is None else returned
            for flag, key in OTHER_FLAGS.items():
                if getattr(self.control, flag):
                    raise RecipeError(
                        f"{type(callback).__name__}.{event}",
                        f"control.{flag}",
                        because="when a run evaluates and saves is part of its recipe, so that it can be repeated",
                        fix=f"set {key} of the stage",
                    )


def _check_events(where: str, kind: type, base: type) -> None:
    """Refuses a callback that waits for an event that never comes."""
    for event in dir(base):
        if event.startswith("on_") and event not in EVENTS and getattr(kind, event) is not getattr(base, event):
            raise RecipeError(
                where,
                f"{kind.__name__}.{event}",
                because=f"a run does not call it; it calls {', '.join(EVENTS)}",
                fix=f"move the code from {event} to one of these, such as on_step_end",
            )
