"""What several answers to one problem are worth: pass@k and maj@k.

pass@k is the chance that k answers drawn without return from the n sampled hold a right one: 1 − C(n − c, k) / C(n, k) where
c of n are right, averaged over problems (Chen et al. 2021); unbiased, unlike 1 − (1 − c/n)^k. maj@k takes the answer that k
of them give most often (Wang et al. 2022), the earlier one where two are given equally often, averaged over the ⌊n/k⌋ blocks
of k. Answers are one where they are the same number or text; a completion without an answer has no vote, and a block without
votes is not right.

Held-out accuracy: each held-out prompt answered, greedily unless told otherwise, and graded by the recipe's rewards.

Where none of them says what is right (a reward model, a judge's mark), there is no accuracy and no pass@k: the mean reward is
the measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np

from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import Engine, SampleKey
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Evaluation, Sampling
from oncurve.records import EvalReport, Group, Prompt, ScoredGroup
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.verifiers.answer import answers_equal
from oncurve.rewards.verifiers.answer_extraction import answer_in
from oncurve.runs.step_notes import report_progress
from oncurve.training.learner.oom_retry import sample_with_retry


def pass_at(k: int, right: int, of: int) -> float:
    """The chance that k of the ``of`` answers, ``right`` of them right, hold a right one."""
    return 1.0 - comb(of - right, k) / comb(of, k)


def majority_is_right(answers: Sequence[str | None], marks: Sequence[bool]) -> bool:
    """Whether the answer given most often is right; it is right if the first completion that gave it is."""
    classes: list[tuple[str, int, bool]] = []
    for answer, mark in zip(answers, marks, strict=True):
        if answer is None:
            continue
        place = next((i for i, (known, _, _) in enumerate(classes) if answers_equal(known, answer)), None)
        if place is None:
            classes.append((answer, 1, mark))
        else:
            known, votes, first = classes[place]
            classes[place] = (known, votes + 1, first)
    return max(classes, key=lambda c: c[1])[2] if classes else False


def powers(most: int) -> list[int]:
    """1, 2, 4 … up to ``most``."""
    return [2**i for i in range(most.bit_length())]


def several(scored: Sequence[ScoredGroup], solved: Sequence[Sequence[bool]]) -> dict[str, float]:
    """pass@k for 1, 2, 4 … and all n samples, and maj@k for those above 2; nothing where a problem has one answer."""
    n = min((len(marks) for marks in solved), default=0)
    if n < 2:
        return {}
    sizes = sorted({*powers(n), n})
    metrics = {f"pass_at/{k}": float(np.mean([pass_at(k, sum(marks), len(marks)) for marks in solved])) for k in sizes}
    answers = [[answer_in(s.completion.text, "any") for s in group.scored] for group in scored]
    for k in (k for k in sizes if k > 2):
        blocks = [
            majority_is_right(said[start : start + k], marks[start : start + k])
            for said, marks in zip(answers, solved, strict=True)
            for start in range(0, len(marks) - k + 1, k)
        ]
        metrics[f"maj_at/{k}"] = float(np.mean(blocks))
    return metrics


EVAL_STEP = 1 << 40
"""Evaluation draws its random numbers far from any training step's."""
EVAL_TOKENS = 256
"""Length limit of held-out answers where neither the recipe nor any of its stages sets one."""


def usual_limit(policy: Policy, prompts: Sequence[Prompt]) -> int:
    """That limit, or less where the model has no room for it: a default that no one chose must not be why it is refused."""
    longest = max(len(policy.encode(prompt)) for prompt in prompts)
    return max(1, min(EVAL_TOKENS, policy.max_positions - longest))


def evaluate(
    engine: Engine,
    rewards: RewardMix,
    prompts: Sequence[Prompt],
    settings: Evaluation,
    *,
    max_new_tokens: int,
    seed: int,
    stage: str,
    step: int,
    world: World = SINGLE_PROCESS,
) -> EvalReport:
    """Accuracy is the share of prompts solved, averaged over ``settings.samples`` completions of each."""
    how = Sampling(temperature=settings.temperature, max_new_tokens=settings.max_new_tokens or max_new_tokens)
    draws = SampleKey(seed, EVAL_STEP + step)
    own = world.local_prompts(prompts)

    done: set[int] = set()

    def begin_scoring(place: int, group: Group) -> None:
        done.add(place)
        report_progress(len(done) / len(own))
        if world.computes_rewards:
            rewards.prefetch(group)

    report_progress(0.0)
    groups = sample_with_retry(engine, own, settings.samples, how, draws, on_group=begin_scoring)
    scored = world.all_gather_results(lambda: rewards.score(groups))
    return summarise(scored, rewards, stage, step)


def summarise(scored: Sequence[ScoredGroup], rewards: RewardMix, stage: str, step: int) -> EvalReport:
    solved = [[rewards.is_correct(s) for s in g.scored] for g in scored] if rewards.accuracy_reward is not None else []
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
