"""Held-out accuracy: each held-out prompt answered, greedily unless told otherwise, and graded by the recipe's rewards.

Where none of them says what is right (a reward model, a judge's mark), there is no accuracy and no pass@k: the mean reward is
the measure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oncurve.engines.native import Draws, NativeEngine
from oncurve.models.policy import Policy
from oncurve.recipe.schema import Evaluation
from oncurve.recipe.sections import Sampling
from oncurve.records import EvalReport, Group, Prompt, ScoredGroup
from oncurve.rewards.mix import RewardMix
from oncurve.runs.notes import measuring
from oncurve.scale.world import ALONE, World
from oncurve.train.best_of_n import several
from oncurve.train.memory import sample

EVAL_STEP = 1 << 40
"""Evaluation draws its random numbers far from any training step's."""
EVAL_TOKENS = 256
"""Length limit of held-out answers where neither the recipe nor any of its stages sets one."""


def usual_limit(policy: Policy, prompts: Sequence[Prompt]) -> int:
    """That limit, or less where the model has no room for it: a default that no one chose must not be why it is refused."""
    longest = max(len(policy.encode(prompt)) for prompt in prompts)
    return max(1, min(EVAL_TOKENS, policy.context - longest))


def evaluate(
    engine: NativeEngine,
    rewards: RewardMix,
    prompts: Sequence[Prompt],
    settings: Evaluation,
    *,
    max_new_tokens: int,
    seed: int,
    stage: str,
    step: int,
    world: World = ALONE,
) -> EvalReport:
    """Accuracy is the share of prompts solved, averaged over ``settings.samples`` completions of each."""
    how = Sampling(temperature=settings.temperature, max_new_tokens=settings.max_new_tokens or max_new_tokens)
    draws = Draws(seed, EVAL_STEP + step)
    own = world.share(prompts)

    done: set[int] = set()

    def begin_scoring(place: int, group: Group) -> None:
        done.add(place)
        measuring(len(done) / len(own))
        if world.scores:
            rewards.begin(group)

    measuring(0.0)
    groups = sample(engine, own, settings.samples, how, draws, on_group=begin_scoring)
    scored = world.gathered(lambda: rewards.score(groups))
    return summarise(scored, rewards, stage, step)


def summarise(scored: Sequence[ScoredGroup], rewards: RewardMix, stage: str, step: int) -> EvalReport:
    solved = [[rewards.solved(s) for s in g.scored] for g in scored] if rewards.decider is not None else []
    totals = [s.total for g in scored for s in g.scored if s.total is not None]
    levels: dict[str, tuple[int, int]] = {}
    for group, marks in zip(scored, solved, strict=False):
        level = group.group.prompt.difficulty
        if level is not None:
            right, asked = levels.get(level, (0, 0))
            levels[level] = (right + sum(marks), asked + len(marks))
    completions = [s.completion for g in scored for s in g.scored]
    metrics = {
        **({"reward": float(np.mean(totals))} if totals else {}),
        "length_mean": float(np.mean([c.length for c in completions])),
        "cut_share": float(np.mean([c.cut for c in completions])),
        **several(scored, solved),
    }
    accuracy = float(np.mean([m for marks in solved for m in marks])) if solved else None
    return EvalReport(stage, step, accuracy, len(scored), dict(sorted(levels.items())), metrics, tuple(scored))
