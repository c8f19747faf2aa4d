"""`oncurve probe`: what GRPO would get to learn from, before any training.

Some groups are sampled and scored, and one step is timed and undone. From the rewards of n completions of each prompt:

- pass@k, unbiased: 1 − C(n−c, k)/C(n, k) if c of n are correct (Chen et al. 2021), averaged over prompts. Without a verifiable
  reward the mean reward is reported instead.
- The fraction of groups with signal at group size G ≤ n, unbiased likewise: 1 − Σ_v C(m_v, G)/C(n, G), where m_v completions
  have reward v. For G > n the plug-in 1 − Σ_v (m_v/n)^G, or the value at n if that is larger. Rewards that did not occur count
  as impossible, so this is a low estimate.
- Reward noise: the std within a group, from which advantages are made, and the std of group means (how prompts differ).
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch

from oncurve.engines.base import Engine, SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.native.sampler_check import check_sampler
from oncurve.errors import RecipeError
from oncurve.models.loading.load import load_policy
from oncurve.models.policy import Policy
from oncurve.recipe.defaults import seed_for_stage
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Sampling
from oncurve.recipe.schema.stages import Grpo
from oncurve.recipe.validate import reject_python_only
from oncurve.records import Prompt, ScoredCompletion, ScoredGroup
from oncurve.rewards.mix import RewardMix
from oncurve.runs.atomic_files import write_file_atomically
from oncurve.runs.step_notes import report_progress
from oncurve.tasks.base import Task
from oncurve.tasks.curriculum import estimate_row
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.training.evaluate import pass_at, powers_of_two
from oncurve.training.stages.grpo import GrpoLoop, group_result
from oncurve.training.start import rewards_for, task_for
from oncurve.training.trainer import load_weights, trained_weights, with_agents

PROBE_STEP = 1 << 41
"""Probing samples as if at this step, so that its random numbers differ from those of training and evaluation."""
GROUP_SIZES = (4, 8, 16, 32, 64)
TEMPERATURES = (0.7, 1.0, 1.3)
MIN_GAIN = 0.05
"""A doubled group size or another temperature is worth it if the fraction of groups with signal rises by this much."""
MIN_ACCURACY_RATIO = 0.9
"""A temperature must keep this fraction of the accuracy at temperature 1."""
LITTLE_SIGNAL = 0.1
"""With a smaller fraction of groups with signal at every group size, only another model or other prompts help."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A value that the probe recommends for a key, with the recipe's value and the measured reason."""

    key: str
    current: float
    chosen: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class AtTemperature:
    """Sampling at one temperature: accuracy (None without a verifiable reward), and the fraction of groups with signal at the
    recipe's group size."""

    temperature: float
    pass_1: float | None
    signal: float
    cut_share: float
    reward: float = 0.0

    def is_as_good_as(self, other: AtTemperature) -> bool:
        if self.pass_1 is None or other.pass_1 is None:
            return self.reward >= other.reward
        return self.pass_1 >= MIN_ACCURACY_RATIO * other.pass_1


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """All measurements. Shares are fractions of prompts or completions; lengths are those of completions that ended."""

    stage: str
    note: str | None
    prompts: int
    samples: int
    temperature: float
    pass_at: Mapping[int, float]
    all_right: float | None
    all_wrong: float | None
    no_signal: float
    signal_at: Mapping[int, float]
    cut_share: float
    failure_share: float
    length_median: float | None
    length_99: float | None
    reward_mean: float
    within_std: float
    between_std: float
    sample_s: float
    update_s: float
    step_s: float
    steps: int
    temperatures: tuple[AtTemperature, ...]
    choices: tuple[Suggestion, ...]


def probe(
    recipe: Recipe, prompts: int, *, samples: int, policy: Policy | None = None, estimates: Path | None = None
) -> ProbeReport:
    """Probes a recipe's first grpo stage. ``policy`` is the stage's start; unset: the recipe's model.

    The pass rate of each prompt is written to ``estimates``, for `curriculum.estimates`.
    """
    torch.set_num_threads(recipe.threads or os.cpu_count() or 1)
    stage = grpo_stage(recipe)
    reject_python_only(recipe, stage)
    task, rewards = task_for(recipe, stage), rewards_for(recipe, stage)
    note = None if policy is not None else start_note(recipe, stage)
    policy = policy or load_policy(recipe.model, alphabet=task_for(recipe, recipe.stages[0]).alphabet, seed=recipe.seed)
    native = NativeEngine(policy, recipe.engine)
    check_sampler(native)
    rewards.bind(lambda: native.policy.decode)
    with closing(with_agents(native, recipe)) as engine:
        return _probe_stage(recipe, stage, task, engine, rewards, prompts, samples, estimates, note)


def _probe_stage(
    recipe: Recipe, stage: Grpo, task: Task, engine: Engine, rewards: RewardMix, prompts: int, samples: int,
    estimates: Path | None, note: str | None,
) -> ProbeReport:  # fmt: skip
    seed = seed_for_stage(recipe, stage)
    batch = prompts_for_step(task, seed, 0, prompts)
    half = batch[: max(4, prompts // 2)]
    probed = sorted({*TEMPERATURES, stage.sampling.temperature})
    done, planned = count(1), len(batch) + len(probed) * len(half) + stage.prompts_per_step

    def sample_and_score(prompts: Sequence[Prompt], sampling: Sampling) -> list[ScoredGroup]:
        key = SampleKey(seed, PROBE_STEP)
        return rewards.score(
            engine.sample(prompts, samples, sampling, key, on_group=lambda *_: report_progress(next(done) / planned))
        )

    report_progress(0.0)
    scored = sample_and_score(batch, stage.sampling)
    if estimates is not None:
        _write_estimates(estimates, scored, rewards)
    temperatures = tuple(
        _at_temperature(t, sample_and_score(half, stage.sampling.model_copy(update={"temperature": t})), rewards, stage)
        for t in probed
    )
    sample_s, update_s = _time_step(recipe, stage, task, engine, rewards)
    return _report(stage, note, scored, rewards, samples, temperatures, sample_s, update_s)


def _write_estimates(path: Path, scored: Sequence[ScoredGroup], rewards: RewardMix) -> None:
    if rewards.accuracy_reward is None:
        raise RecipeError(
            "--estimates",
            path,
            because="none of the recipe's rewards defines correct answers, so there are no pass rates",
            fix="add a verifiable reward, or give the reward that defines them the name `answer`",
        )
    rows = (json.dumps(estimate_row(group_result(group, rewards)), ensure_ascii=False) for group in scored)
    write_file_atomically(path, "".join(f"{row}\n" for row in rows).encode())


def grpo_stage(recipe: Recipe) -> Grpo:
    for stage in recipe.stages:
        if isinstance(stage, Grpo):
            return stage
    raise RecipeError(
        "stages", "no grpo stage", because="the probe measures what GRPO learns from", fix="probe a recipe that has one"
    )


def start_note(recipe: Recipe, stage: Grpo) -> str | None:
    """Why the measurements are not those of the stage's start: earlier stages, or a model with random weights."""
    before = [s.label for s in recipe.stages[: recipe.stages.index(stage)]]
    if before:
        return (
            f"this is the model before {' and '.join(before)}: stage '{stage.label}' starts from a better one. "
            "Probe that one with --from RUN, a run of this recipe"
        )
    return "this is the built-in model with random weights: it has not been trained" if recipe.model.source == "tiny" else None


def signal_at(totals: Sequence[Hashable], size: int) -> float:
    """The probability that a group of ``size`` completions of one prompt has two different rewards."""
    counts, n = Counter(totals).values(), len(totals)
    if size <= n:
        return 1 - sum(math.comb(m, size) for m in counts) / math.comb(n, size)
    return max(signal_at(totals, n), 1 - sum((m / n) ** size for m in counts)) if n else 0.0


def _at_temperature(temperature: float, scored: Sequence[ScoredGroup], rewards: RewardMix, stage: Grpo) -> AtTemperature:
    accuracy = None if rewards.accuracy_reward is None else _mean([rewards.is_correct(s) for g in scored for s in g.scored])
    truncated = _mean([s.completion.is_truncated for g in scored for s in g.scored])
    reward = _mean([t for g in scored for t in g.totals if t is not None])
    return AtTemperature(temperature, accuracy, _signal(scored, stage.group_size), truncated, reward)


def _time_step(recipe: Recipe, stage: Grpo, task: Task, engine: Engine, rewards: RewardMix) -> tuple[float, float]:
    """(sampling and scoring, update) seconds of one real step. Then the weights are restored.

    Groups without signal are forwarded too, so that there is always an update.
    """
    before = {name: tensor.clone() for name, tensor in trained_weights(engine.policy).items()}
    timed = stage.model_copy(update={"no_signal": "keep", "max_failure_share": 1.0, "curriculum": None})
    loop = GrpoLoop(timed, seed_for_stage(recipe, stage), task, engine, rewards)
    try:
        seconds = loop.step(1).seconds
    finally:
        loop.learner.optimiser.zero_grad()
        load_weights(engine.policy, before)
    return seconds["sample"] + seconds["score"], seconds["grade"] + seconds["update"]


def _report(
    stage: Grpo,
    note: str | None,
    scored: Sequence[ScoredGroup],
    rewards: RewardMix,
    samples: int,
    temperatures: tuple[AtTemperature, ...],
    sample_s: float,
    update_s: float,
) -> ProbeReport:
    has_accuracy = rewards.accuracy_reward is not None
    correct = [sum(rewards.is_correct(s) for s in g.scored) for g in scored]
    totals = [[t for t in g.totals if t is not None] for g in scored]
    completions = [s for g in scored for s in g.scored]
    ended = [s.completion.length for s in completions if not s.completion.is_truncated]
    signal = {size: _signal(scored, size) for size in GROUP_SIZES}
    current_signal = _signal(scored, stage.group_size)
    length_99 = float(np.percentile(ended, 99)) if ended else None
    truncated = _mean([s.completion.is_truncated for s in completions])
    return ProbeReport(
        stage=stage.label,
        note=note,
        prompts=len(scored),
        samples=samples,
        temperature=stage.sampling.temperature,
        pass_at={k: _mean([pass_at(k, c, samples) for c in correct]) for k in powers_of_two(samples)} if has_accuracy else {},
        all_right=_mean([c == samples for c in correct]) if has_accuracy else None,
        all_wrong=_mean([c == 0 for c in correct]) if has_accuracy else None,
        no_signal=1 - current_signal,
        signal_at=signal,
        cut_share=truncated,
        failure_share=_mean([s.failure is not None for s in completions]),
        length_median=float(np.median(ended)) if ended else None,
        length_99=length_99,
        reward_mean=_mean([t for row in totals for t in row]),
        within_std=math.sqrt(_mean([float(np.var(row, ddof=1)) for row in totals if len(row) > 1])),
        between_std=float(np.std([np.mean(row) for row in totals if row], ddof=1)) if sum(map(bool, totals)) > 1 else 0.0,
        sample_s=sample_s,
        update_s=update_s,
        step_s=sample_s + current_signal * update_s,
        steps=stage.steps,
        temperatures=temperatures,
        choices=(
            choose_group_size(
                stage.group_size,
                signal,
                _mean([c / samples for c in correct]) if has_accuracy else None,
                constant_total(scored),
            ),
            choose_length(stage.sampling.max_new_tokens, length_99, truncated),
            choose_temperature(stage.sampling.temperature, temperatures, stage.group_size),
        ),
    )


def constant_total(scored: Sequence[ScoredGroup]) -> float | None:
    """The reward that every completion of every group got; None if rewards differ, or if there are fewer than two. Also None
    if single steps are rewarded: totals don't include those rewards."""
    if any(_step_rewards(s) for g in scored for s in g.scored):
        return None
    values = [total for g in scored for total in g.totals if total is not None]
    return values[0] if len(values) > 1 and len(set(values)) == 1 else None


def choose_group_size(
    current: int, signal: Mapping[int, float], accuracy: float | None, constant: float | None = None
) -> Suggestion:
    """The smallest of the usual sizes that gains little signal by doubling; None if even the largest has too little.

    ``constant`` is the reward that every completion of every group got. Then the reward itself may be at fault. Only if 0 or
    1 is also what a verifiable reward gives for a task that is too hard or too easy, the prompts are mentioned too.
    """
    key, largest = "group_size", max(GROUP_SIZES)
    if constant is not None:
        reason = f"the reward gave every completion the same value, {constant:g}. Check with `oncurve rewards try` that "
        if accuracy == 0 and constant == 0:
            reason += "a right text gets more; if it does, warm-start the model with an sft stage, or choose easier prompts"
        elif accuracy == 1 and constant == 1:
            reason += "a wrong text gets less; if it does, choose harder prompts"
        else:
            reason += "it tells good texts from bad ones"
        return Suggestion(key, current, None, reason)
    if signal[largest] < LITTLE_SIGNAL:
        fix = "warm-start it with an sft stage, or choose easier prompts"
        if accuracy is None:
            fix = "choose other prompts, or a finer-grained reward"
        elif accuracy > 0.5:
            fix = "choose harder prompts"
        correct = "" if accuracy is None else f" ({_percent(accuracy)} correct)"
        return Suggestion(key, current, None, f"even of {largest} completions nearly all have the same reward{correct}: {fix}")
    usual = [size for size in GROUP_SIZES if size >= 8]
    chosen = next((size for size in usual[:-1] if signal[2 * size] - signal[size] < MIN_GAIN), largest)
    if chosen == largest:
        return Suggestion(
            key,
            current,
            chosen,
            f"{_percent(signal[chosen])} of groups have a signal, {_percent(signal[chosen // 2])} with half as many",
        )
    double = f"with {2 * chosen} completions {_percent(signal[2 * chosen])}"
    return Suggestion(key, current, chosen, f"{_percent(signal[chosen])} of groups have a signal; {double}")


def choose_length(current: int, length_99: float | None, cut_share: float) -> Suggestion:
    """Suggests 1.25 times ``length_99`` (the length up to which 99 % of the completions end), rounded up to a multiple of 8, or
    twice the current limit if more than 5 % of all completions were truncated."""
    key = "sampling.max_new_tokens"
    if length_99 is None:
        return Suggestion(key, current, None, "every completion was truncated: the model does not end its answers yet")
    if cut_share > 0.05:
        return Suggestion(key, current, 2 * current, f"{_percent(cut_share)} of completions were truncated at {current}")
    chosen = 8 * math.ceil(1.25 * length_99 / 8)
    return Suggestion(
        key, current, chosen, f"99 % of those that ended had up to {length_99:.0f} tokens; a quarter more leaves room to grow"
    )


def choose_temperature(current: float, measured: Sequence[AtTemperature], group_size: int) -> Suggestion:
    """Temperature 1, which samples the policy itself, unless another one gives clearly more groups with signal.

    A higher temperature always makes rewards differ more, partly because it makes answers worse. So one that costs much
    accuracy, or reward if there is no accuracy, is not chosen.
    """
    key = "sampling.temperature"
    at_one = next(t for t in measured if t.temperature == 1.0)
    best = max((t for t in measured if t.is_as_good_as(at_one)), key=lambda t: t.signal)
    if best.signal < LITTLE_SIGNAL:
        worse = max((t for t in measured if not t.is_as_good_as(at_one)), key=lambda t: t.signal, default=at_one)
        if worse.signal < LITTLE_SIGNAL:
            return Suggestion(key, current, None, "rewards of a group hardly differ at any temperature")
        reason = (
            f"rewards of a group hardly differ, and temperature {worse.temperature:g}, at which they do, makes answers worse"
        )
        return Suggestion(key, current, None, reason)
    if best.signal - at_one.signal < MIN_GAIN:
        return Suggestion(
            key,
            current,
            1.0,
            f"it samples the policy itself, and {_percent(at_one.signal)} of groups of {group_size} have a signal",
        )
    reason = f"{_percent(best.signal)} of groups of {group_size} have a signal, at 1 only {_percent(at_one.signal)}"
    return Suggestion(key, current, best.temperature, reason)


def _signal(scored: Sequence[ScoredGroup], size: int) -> float:
    return _mean([signal_at([(s.total, _step_rewards(s)) for s in g.scored if s.failure is None], size) for g in scored])


def _step_rewards(scored: ScoredCompletion) -> tuple[tuple[float, ...], ...]:
    """The rewards of a completion's single steps, from each process reward of nonzero weight."""
    return tuple(tuple(value for _, value in a.steps) for a in scored.aspects if a.steps is not None and a.weight != 0)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
