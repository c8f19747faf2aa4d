"""Signs that a reward is being gamed, as `oncurve rewards audit` finds them, over a sample of a run's steps.

Tries rewards on texts, in a process of its own: what a reward does there can't touch the server.

python -m oncurve.studio.rewards < asked.json > told.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
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
from oncurve.rewards.registry import build_rewards, stage_reward_configs
from oncurve.runs.folder import RunFolder
from oncurve.studio.groups import EXCERPT, shown_text
from oncurve.studio.open_run import finite, open_reader
from oncurve.tasks.registry import build_task
from oncurve.trust import powers_of

MOST_STEPS = 24
MOST_COMPLETIONS = 4000
"""What is read at most: steps spread evenly over the stage, so that a page comes up at once however long the run was."""


def spread(last: int, most: int) -> list[int]:
    """At most so many of the steps 1 to ``last``, evenly, both ends among them."""
    if last <= most:
        return list(range(1, last + 1))
    return sorted({1 + round(place * (last - 1) / (most - 1)) for place in range(most)})


def audit_data(run: RunFolder) -> dict[str, Any]:
    """What is worth a look, with completions to look at; nothing where no stage has sampled groups."""
    with open_reader(run) as store:
        stage = store.last_sampled()
        if stage is None:
            return {"stage": None, "steps": 0, "signals": []}
        size = sum(group.completions for group in store.groups(stage.name, stage.done))
        chosen = spread(stage.done, max(6, min(MOST_STEPS, MOST_COMPLETIONS // max(1, size))))
        steps = [(step, store.step(stage.name, step).groups) for step in chosen]
        evals = store.evals(stage.name)
    signals = audit(History.of(steps, evals))
    told = [{"name": s.name, "what": s.what, "examples": [_example(seen) for seen in s.examples]} for s in signals]
    return {"stage": stage.name, "steps": len(steps), "signals": told}


def _example(seen: AuditedCompletion) -> dict[str, Any]:
    words = {"prompt": shown_text(seen.prompt)[:EXCERPT], "text": shown_text(seen.text)[:EXCERPT]}
    return {"step": seen.step, "group": seen.group, "total": finite(seen.scored.total), **words}


LIMIT_S = 60.0
Text = Annotated[str, Field(max_length=200_000)]


class Trial(BaseModel):
    """What is tried: rewards as a recipe writes them, on the completions of one prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rewards: list[dict[str, Any]]
    prompt: Text
    columns: dict[str, Any]
    completions: Annotated[list[Text], Field(min_length=1, max_length=64)]
    max_new_tokens: int | None = None


def rewards_of(recipe: Recipe) -> list[dict[str, Any]]:
    """The rewards that grade a recipe's last stage that trains on samples, as a trial names them."""
    stage = recipe.stage_to_grade()

    def default_rewards() -> Sequence[Reward]:
        if any(power.part == "task" for power in powers_of(recipe)):
            return ()  # building this task runs code, and a page must not do that unasked
        try:
            return build_task(task_for_stage(recipe, stage)).default_rewards
        except OncurveError:  # its data is not on this machine
            return ()

    configs = stage_reward_configs(recipe, stage, default_rewards)
    return [reward.model_dump(mode="json", exclude_none=True) for reward in configs]


def run_trial(trial: Trial, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """What the rewards say, or the error that a recipe with them would meet. A reward that hangs is ended."""
    command = [sys.executable, "-m", "oncurve.studio.rewards"]
    asked = trial.model_dump_json().encode()
    try:
        done = subprocess.run(command, input=asked, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise RewardError("rewards", "no answer", because=f"they took more than {limit_s:g} s", fix="try fewer texts") from None
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["nothing was said"])[-1]
        raise RewardError("rewards", "the trial ended early", because=last[:300], fix="mend the reward") from None
    return told


def score(trial: Trial) -> dict[str, Any]:
    """Scores the texts as a run would, in this process. No tokenizer is at hand, so a text has one token per character."""
    mix: RewardMix = build_rewards([Reward.model_validate(r) for r in trial.rewards], max_new_tokens=trial.max_new_tokens)
    mix.bind(lambda: from_letters)
    prompt = Prompt("trial", text=trial.prompt, columns=trial.columns)
    group = Group(prompt, np.zeros(1, np.int64), tuple(map(completion_by_letters, trial.completions)))
    scored = mix.score([group])[0].scored
    return {
        "completions": [
            {
                "total": one.total,
                "failure": one.failure,
                "solved": mix.is_correct(one),
                "aspects": [
                    {"name": a.name, "value": a.value, "weight": a.weight, "failure": a.failure, "reason": a.reason}
                    for a in one.aspects
                ],
            }
            for one in scored
        ]
    }


def main() -> None:
    """Answers on the real standard output; whatever a reward prints goes to standard error."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        told = score(Trial.model_validate_json(sys.stdin.buffer.read()))
    except OncurveError as error:
        told = {"error": {"where": error.where, "what": str(error.what), "because": error.because, "fix": error.fix}}
    with answer:
        json.dump(told, answer)


if __name__ == "__main__":
    main()
