"""The Rewards page: the audit of a run's rewards over a sample of its steps, and trials of rewards on texts.

A trial runs in a separate process, so that a reward can't affect the server:

    python -m oncurve.studio.rewards [FOLDER] < trial.json > scores.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from oncurve.errors import OncurveError, RewardError
from oncurve.recipe.defaults import task_for_stage
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Reward
from oncurve.records import Group, Prompt
from oncurve.rewards.audit import AuditedCompletion, History, audit
from oncurve.rewards.base import completion_by_letters, from_letters
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.registry import build_rewards, can_define_accuracy, is_verifiable, stage_reward_configs
from oncurve.runs.folder import RunFolder
from oncurve.runs.views import finite, json_text
from oncurve.studio.groups import EXCERPT, aspect_with_steps
from oncurve.studio.open_run import open_reader
from oncurve.tasks.registry import build_task
from oncurve.trust import capabilities_of, load_recipe_of

MAX_STEPS = 24
MAX_COMPLETIONS = 4000
"""The audit reads at most this many, at steps spread evenly over the stage, so that the page loads fast for any run."""


def spread_steps(last: int, count: int) -> list[int]:
    """At most ``count`` of the steps 1 to ``last``, evenly spaced, with the first and the last."""
    if last <= count:
        return list(range(1, last + 1))
    return sorted({1 + round(i * (last - 1) / (count - 1)) for i in range(count)})


def audit_data(run: RunFolder) -> dict[str, Any]:
    """The findings of the audit, each with example completions; empty if no stage has sampled groups."""
    with open_reader(run) as store:
        stage = store.last_sampled()
        if stage is None:
            return {"stage": None, "steps": 0, "signals": []}
        size = sum(group.completions for group in store.groups(stage.name, stage.done))
        chosen = spread_steps(stage.done, max(6, min(MAX_STEPS, MAX_COMPLETIONS // max(1, size))))
        steps = [(step, store.step(stage.name, step).groups) for step in chosen]
        evals = store.evals(stage.name)
    findings = audit(History.of(steps, evals, accuracy_aspects(run, stage.name)))
    signals = [{"name": f.name, "what": f.what, "examples": [_example(e) for e in f.examples]} for f in findings]
    return {"stage": stage.name, "steps": len(steps), "signals": signals}


def _example(example: AuditedCompletion) -> dict[str, Any]:
    return {
        "step": example.step,
        "group": example.group,
        "total": finite(example.scored.total),
        "prompt": json_text(example.prompt)[:EXCERPT],
        "text": json_text(example.text)[:EXCERPT],
    }


LIMIT_S = 60.0
Text = Annotated[str, Field(max_length=200_000)]


class Trial(BaseModel):
    """Rewards as a recipe writes them, and the completions of one prompt to score with them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rewards: list[dict[str, Any]]
    prompt: Text
    columns: dict[str, Any]
    completions: Annotated[list[Text], Field(min_length=1, max_length=64)]
    max_new_tokens: int | None = None


def rewards_of(recipe: Recipe) -> list[dict[str, Any]]:
    """The rewards that grade a recipe's last stage that trains on samples, as a trial names them."""
    return [reward.model_dump(mode="json", exclude_none=True) for reward in reward_configs_of(recipe)]


def reward_configs_of(recipe: Recipe, stage_name: str | None = None) -> tuple[Reward, ...]:
    """The rewards that grade the stage of this name, by default the last that trains on samples, for pages and reports that
    only read: no code of the recipe runs, and data that is not on this machine is not an error."""
    stage = recipe.stage_to_grade(stage_name)

    def default_rewards() -> Sequence[Reward]:
        if any(capability.part == "task" for capability in capabilities_of(recipe)):
            return ()  # building this task runs code
        try:
            return build_task(task_for_stage(recipe, stage)).default_rewards
        except OncurveError:  # its data is not on this machine
            return ()

    return stage_reward_configs(recipe, stage, default_rewards)


def accuracy_aspects(run: RunFolder, stage_name: str | None = None) -> tuple[str, ...]:
    """The aspects of a run in which a score of 1 means correct: one, or one for each task of a mix. They are those that
    `RewardMix.accuracy_rewards` chooses; for a task without one, a verifiable reward that is only watched (weight 0)."""
    try:
        configs = reward_configs_of(load_recipe_of(run), stage_name)
    except OncurveError:  # the recipe can't be read
        return ("answer",)
    by_task: dict[str | None, list[Reward]] = {}
    for config in sorted(configs, key=lambda config: config.task is None):
        if can_define_accuracy(config) or is_verifiable(config):
            by_task.setdefault(config.task, []).append(config)
    chosen = (min(of_task, key=lambda c: (c.label != "answer", c.weight <= 0)).label for of_task in by_task.values())
    return tuple(chosen) or ("answer",)


def run_trial(trial: Trial, folder: Path | None = None, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """The scores, or the error that a recipe with these rewards would raise. Ends the process after ``limit_s``. Relative paths
    of the rewards are in ``folder``, by default the current one."""
    command = [sys.executable, "-m", "oncurve.studio.rewards", *([] if folder is None else [str(folder)])]
    request = trial.model_dump_json().encode()
    try:
        process = subprocess.run(command, input=request, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise RewardError(
            "rewards", "timed out", because=f"they took more than {limit_s:g} s", fix="try fewer or shorter texts"
        ) from None
    try:
        scores: dict[str, Any] = json.loads(process.stdout)
    except ValueError:
        last = (process.stderr.decode("utf-8", "replace").strip().splitlines() or ["it printed nothing"])[-1]
        raise RewardError("rewards", "the trial's process ended early", because=last[:300], fix="correct the reward") from None
    return scores


def score(trial: Trial) -> dict[str, Any]:
    """Scores the texts as a run would, in this process. There is no tokenizer, so each character counts as one token."""
    mix: RewardMix = build_rewards([Reward.model_validate(r) for r in trial.rewards], max_new_tokens=trial.max_new_tokens)
    mix.bind(lambda: from_letters)
    prompt = Prompt("trial", text=trial.prompt, columns=trial.columns)
    group = Group(prompt, np.zeros(1, np.int64), tuple(map(completion_by_letters, trial.completions)))
    scored = mix.score([group])[0].scored
    return {
        "completions": [
            {
                "total": completion.total,
                "failure": completion.failure,
                "solved": mix.is_correct(completion),
                "aspects": [aspect_with_steps(aspect) for aspect in completion.aspects],
            }
            for completion in scored
        ]
    }


def main() -> None:
    """Writes the scores to the real standard output; what a reward prints goes to standard error."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        for folder in sys.argv[1:]:
            os.chdir(folder)  # not before: modules in it must not hide those of this program
        scores = score(Trial.model_validate_json(sys.stdin.buffer.read()))
    except OncurveError as error:
        scores = {"error": {"where": error.where, "what": str(error.what), "because": error.because, "fix": error.fix}}
    with output:
        json.dump(scores, output)


if __name__ == "__main__":
    main()
