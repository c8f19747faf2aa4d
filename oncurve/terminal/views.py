"""What `oncurve show` tells, as plain data for programs."""

from __future__ import annotations

from typing import Any

from oncurve.records import Aspect, GradedGroup
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunEntry, RunFolder
from oncurve.terminal.runs import run_data
from oncurve.terminal.show import children_of, stage_of


def data_of(run: RunFolder, stage: str | None, step: int | None, group: int | None) -> dict[str, Any]:
    """A run, one of its steps, or one group."""
    if step is None:
        return _run(run)
    with RunReader.open(run.path) as store:
        name = stage_of(store, run, stage, step)
        place = {"run": run.name, "stage": name, "step": step}
        if group is not None:
            return {**place, "position": group, **group_data(store.group(name, step, group).graded)}
        report = store.step(name, step)
    groups = [{"position": i, **group_data(graded)} for i, graded in enumerate(report.groups)]
    return {**place, "metrics": dict(report.metrics), "seconds": dict(report.seconds), "groups": groups}


def _run(run: RunFolder) -> dict[str, Any]:
    state = run.state()
    data = run_data(RunEntry(run.name, run.path, state.current_status, state))
    with RunReader.open(run.path) as store:
        data["evals"] = [
            {
                "stage": e.stage,
                "step": e.step,
                "accuracy": e.accuracy,
                "reward": e.reward,
                "asked": e.asked,
                "by_difficulty": dict(e.by_difficulty),
            }
            for e in store.evals()
        ]
        begun = [s for s in store.stages() if s.done]
        data["last_metrics"] = {s.name: store.metrics_of(s.name, s.done) for s in begun}
    return data | {"children": [child.name for child in children_of(run)]}


def group_data(graded: GradedGroup) -> dict[str, Any]:
    """A group, its completions best first."""
    return {
        "prompt_id": graded.group.prompt.id,
        "prompt": graded.group.prompt.shown,
        "has_signal": graded.has_signal,
        "completions": [_completion(graded, place) for place in graded.best_first],
    }


def _completion(graded: GradedGroup, place: int) -> dict[str, Any]:
    scored = graded.scored.scored[place]
    return {
        "text": scored.completion.text,
        "stop": scored.completion.stop,
        "length": scored.completion.length,
        "reward": scored.total,
        "advantage": graded.advantage_of(place),
        "failure": scored.failure,
        "aspects": [_aspect(a) for a in scored.aspects],
    }


def _aspect(aspect: Aspect) -> dict[str, Any]:
    return {
        "name": aspect.name,
        "value": aspect.value,
        "weight": aspect.weight,
        "failure": aspect.failure,
        "reason": aspect.reason,
    }
