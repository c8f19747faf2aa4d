"""Which checkpoint of a stage is its best, by a metric that the run recorded."""

from __future__ import annotations

from collections.abc import Collection

from oncurve.errors import RecipeError, did_you_mean
from oncurve.runs import metrics
from oncurve.runs.reading import Reader

HELDOUT = "heldout_accuracy"
"""The name under which held-out accuracy, which is no metric of a step, is asked for; where no rule says what is right, the
held-out reward."""
LOWER = ("loss", "policy_loss", "heldout_loss", "kl", "failure_share", "cut_share", "no_signal_share", "mismatch_kl")
"""Metrics of which less is better; of all others more is."""


def best_step(store: Reader, stage: str, metric: str | None, steps: Collection[int]) -> int | None:
    """The step among ``steps`` with the best value, the earliest of equals; None where none has one."""
    if metric is None:
        return None
    known = _measured(store, stage) if metric == HELDOUT else dict(store.metric(metric, stage))
    sign = -1.0 if metric in LOWER else 1.0
    values = [(sign * known[step], -step) for step in steps if step in known and known[step] == known[step]]
    return -max(values)[1] if values else None


def _measured(store: Reader, stage: str) -> dict[int, float]:
    found = {e.step: e.reward if e.accuracy is None else e.accuracy for e in store.evals(stage)}
    return {step: value for step, value in found.items() if value is not None}


def check_metric(where: str, metric: str | None) -> None:
    """Refuses a name that no stage records."""
    if metric is None or metric == HELDOUT or metrics.find(metric) is not None:
        return
    raise RecipeError(
        where,
        metric + did_you_mean(metric, [HELDOUT, *metrics.METRICS]),
        because="no stage records a metric of that name",
        fix=f"use {HELDOUT}, reward, loss, or another of docs/algorithms.md",
    )
