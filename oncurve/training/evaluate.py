"""Held-out evaluation: each held-out prompt is answered, greedily by default, and graded by the recipe's rewards.

With several completions per prompt there are two more measures. pass@k is the probability that k completions drawn without
replacement from the n sampled contain a correct one: 1 − C(n − c, k) / C(n, k) if c of n are correct, averaged over prompts
(Chen et al. 2021); it is unbiased, unlike 1 − (1 − c/n)^k. maj@k takes the most frequent answer of k completions (Wang et al.
2022), the earlier one of a tie, averaged over the ⌊n/k⌋ blocks of k. Answers are equal if they are the same number or text; a
completion without an answer has no vote, and a block without votes is not correct.

If no reward defines correctness (a reward model, a judge), there is neither accuracy nor pass@k: the mean reward is the
measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np

from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import Engine, SampleKey
from oncurve.models.policy import Policy
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Sampling
from oncurve.recipe.schema.stages import RolloutStage, Stage
from oncurve.records import EvalReport, Group, Prompt, ScoredGroup
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.verifiers.answer import answers_equal
from oncurve.rewards.verifiers.answer_extraction import answer_in
from oncurve.runs.step_notes import report_progress
from oncurve.training.learner.oom_retry import sample_with_retry

EVAL_STEP = 1 << 40
"""Evaluation samples as if at this step, so that its random numbers differ from those of every training step."""
DEFAULT_ANSWER_LIMIT = 256
"""Length limit of held-out answers if neither the recipe nor any of its stages sets one."""


def pass_at(k: int, correct: int, total: int) -> float:
    """The probability that k of ``total`` completions, of which ``correct`` are correct, contain a correct one."""
    return 1.0 - comb(total - correct, k) / comb(total, k)


def is_majority_correct(answers: Sequence[str | None], correct: Sequence[bool]) -> bool:
    """Whether the most frequent answer is correct, judged by the first completion that gave it."""
    classes: list[tuple[str, int, bool]] = []
    for answer, answer_is_correct in zip(answers, correct, strict=True):
        if answer is None:
            continue
        index = next((i for i, (known, _, _) in enumerate(classes) if answers_equal(known, answer)), None)
        if index is None:
            classes.append((answer, 1, answer_is_correct))
        else:
            known, votes, first = classes[index]
            classes[index] = (known, votes + 1, first)
    return max(classes, key=lambda c: c[1])[2] if classes else False


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4 … up to ``limit``."""
    return [2**i for i in range(limit.bit_length())]


def best_of_k_metrics(scored: Sequence[ScoredGroup], correct: Sequence[Sequence[bool]]) -> dict[str, float]:
    """pass@k for k = 1, 2, 4 … and all n samples, and maj@k for k > 2; nothing with one completion per prompt."""
    n = min((len(row) for row in correct), default=0)
    if n < 2:
        return {}
    sizes = sorted({*powers_of_two(n), n})
    metrics = {f"pass_at/{k}": float(np.mean([pass_at(k, sum(row), len(row)) for row in correct])) for k in sizes}
    answers = [[answer_in(s.completion.text, "any") for s in group.scored] for group in scored]
    for k in (k for k in sizes if k > 2):
        blocks = [
            is_majority_correct(of_prompt[start : start + k], row[start : start + k])
            for of_prompt, row in zip(answers, correct, strict=True)
            for start in range(0, len(row) - k + 1, k)
        ]
        metrics[f"maj_at/{k}"] = float(np.mean(blocks))
    return metrics


def answer_sampling(recipe: Recipe, stage: Stage, policy: Policy, prompts: Sequence[Prompt]) -> Sampling:
    """How held-out answers are sampled: at the evaluation's temperature, and ended as the stage ends its completions, so that
    the policy that is trained is the one that is measured.

    A stage that does not sample has the stop strings and `min_new_tokens` of the recipe's last stage that does, and the largest
    length limit of any; without such a stage, a default limit that fits the model.
    """
    like = next((s for s in (stage, *reversed(recipe.rollout_stages)) if isinstance(s, RolloutStage)), None)
    limits = [s.max_new_tokens for s in ((stage,) if stage.samples else recipe.rollout_stages) if s.max_new_tokens]
    limit = recipe.evaluation.max_new_tokens or max(limits, default=0) or _default_limit(policy, prompts)
    return Sampling(
        temperature=recipe.evaluation.temperature,
        max_new_tokens=limit,
        min_new_tokens=0 if like is None else min(like.sampling.min_new_tokens, limit),
        stop=() if like is None else like.sampling.stop,
    )


def _default_limit(policy: Policy, prompts: Sequence[Prompt]) -> int:
    """The default length limit, or less if the model has fewer positions: a default must not be why a run is refused. If the
    prompts have environments, whose `reset` may add to them, half of the positions stay free for that."""
    room = policy.max_positions - max(len(policy.encode(prompt)) for prompt in prompts)
    has_reset = any(hasattr(prompt.environment, "begin") for prompt in prompts)
    return max(1, min(DEFAULT_ANSWER_LIMIT, room // 2 if has_reset else room))


def evaluate(
    engine: Engine,
    rewards: RewardMix,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    samples: int = 1,
    seed: int,
    stage: str,
    step: int,
    world: World = SINGLE_PROCESS,
) -> EvalReport:
    """Samples and grades ``samples`` completions for each prompt. Accuracy is the fraction of them that is correct."""
    local = world.local_prompts(prompts)
    done: set[int] = set()

    def on_group(index: int, group: Group) -> None:
        done.add(index)
        report_progress(len(done) / len(local))
        if world.computes_rewards:
            rewards.prefetch(group)

    report_progress(0.0)
    key = SampleKey(seed, EVAL_STEP + step)
    groups = sample_with_retry(engine, local, samples, sampling, key, on_group=on_group)
    scored = world.all_gather_results(lambda: rewards.score(groups))
    return summarise(scored, rewards, stage, step)


def summarise(scored: Sequence[ScoredGroup], rewards: RewardMix, stage: str, step: int) -> EvalReport:
    """The report of an evaluation: accuracy, also by difficulty, and metrics."""
    correct = [[rewards.is_correct(s) for s in g.scored] for g in scored] if rewards.accuracy_reward is not None else []
    totals = [s.total for g in scored for s in g.scored if s.total is not None]
    levels: dict[str, tuple[int, int]] = {}
    for group, row in zip(scored, correct, strict=False):
        level = group.group.prompt.difficulty
        if level is not None:
            solved, total = levels.get(level, (0, 0))
            levels[level] = (solved + sum(row), total + len(row))
    completions = [s.completion for g in scored for s in g.scored]
    metrics = {
        **({"reward": float(np.mean(totals))} if totals else {}),
        "length_mean": float(np.mean([c.length for c in completions])),
        "cut_share": float(np.mean([c.is_truncated for c in completions])),
        **best_of_k_metrics(scored, correct),
        **rewards.accuracy_by_task(scored),
    }
    accuracy = float(np.mean([is_correct for row in correct for is_correct in row])) if correct else None
    return EvalReport(stage, step, accuracy, len(scored), dict(sorted(levels.items())), metrics, tuple(scored))
