"""`oncurve probe`: what GRPO would see, before any training.

Some groups are sampled and scored, and one step is timed and taken back. From the rewards of n completions of each prompt:

- pass@k, unbiased: 1 − C(n−c, k)/C(n, k) with c of n right (Chen et al. 2021), averaged over prompts. Where no rule says
  what is right, no share of right answers is known, and the mean reward stands for it.
- Share of groups with signal at group size G ≤ n, unbiased likewise: 1 − Σ_v C(m_v, G)/C(n, G), where m_v completions got
  reward v. For G > n the plug-in 1 − Σ_v (m_v/n)^G, or the value at n where that is larger: a reward that was never seen counts
  as impossible, so this errs on the low side.
- Reward noise: the std within a group (what the advantage is made of) against the std of group means (how prompts differ).
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from oncurve.engines.base import Engine, SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import RecipeError
from oncurve.models.loading.load import load_policy
from oncurve.models.policy import Policy
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Sampling
from oncurve.recipe.schema.stages import Grpo
from oncurve.recipe.validate import reject_python_only
from oncurve.records import Prompt, ScoredGroup
from oncurve.rewards.mix import RewardMix
from oncurve.tasks.base import Task
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.training.evaluate import pass_at, powers_of_two
from oncurve.training.stages.grpo import GrpoLoop
from oncurve.training.start import rewards_for, task_for
from oncurve.training.trainer import load_weights, trained_weights

PROBE_STEP = 1 << 41
"""Probing draws its random numbers far from any training step's and any evaluation's."""
GROUP_SIZES = (4, 8, 16, 32, 64)
TEMPERATURES = (0.7, 1.0, 1.3)
WORTH = 0.05
"""A doubled group size, or another temperature, must bring this much more of groups with signal to be worth it."""
KEPT_ACCURACY = 0.9
"""A temperature must keep this share of the accuracy that sampling at 1 has."""
LITTLE_SIGNAL = 0.1
"""Under this share of groups with signal at every group size, the remedy is another model or other prompts."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting that the probe would choose, beside the recipe's, with the reason from what was measured."""

    key: str
    current: float
    chosen: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class AtTemperature:
    """What sampling at one temperature gives: share right (None without a rule), share of groups with signal at the recipe's
    group size."""

    temperature: float
    pass_1: float | None
    signal: float
    cut_share: float
    reward: float = 0.0

    def is_as_good_as(self, other: AtTemperature) -> bool:
        if self.pass_1 is None or other.pass_1 is None:
            return self.reward >= other.reward
        return self.pass_1 >= KEPT_ACCURACY * other.pass_1


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """All that was measured. Shares are of prompts or completions; lengths are of completions that ended by themselves."""

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
    choices: tuple[Choice, ...]


def probe(recipe: Recipe, prompts: int, *, samples: int, policy: Policy | None = None) -> ProbeReport:
    """Probes a recipe's first grpo stage. ``policy`` is what the stage would start from; unset: the model the recipe names."""
    torch.set_num_threads(recipe.threads or os.cpu_count() or 1)
    stage = grpo_stage(recipe)
    reject_python_only(recipe, stage)
    task, rewards = task_for(recipe, stage), rewards_for(recipe, stage)
    note = None if policy is not None else untrained(recipe, stage)
    policy = policy or load_policy(recipe.model, alphabet=task_for(recipe, recipe.stages[0]).alphabet, seed=recipe.seed)
    engine = NativeEngine(policy, recipe.engine)
    asked = prompts_for_step(task, recipe.seed, 0, prompts)
    scored = _sampled(engine, rewards, asked, samples, stage.sampling, recipe.seed)
    some = asked[: max(4, prompts // 2)]
    tried = tuple(
        _at(t, engine, rewards, some, samples, stage, recipe.seed) for t in sorted({*TEMPERATURES, stage.sampling.temperature})
    )
    sample_s, update_s = _timed_step(recipe, stage, task, engine, rewards)
    return _report(stage, note, scored, rewards, samples, tried, sample_s, update_s)


def grpo_stage(recipe: Recipe) -> Grpo:
    for stage in recipe.stages:
        if isinstance(stage, Grpo):
            return stage
    raise RecipeError(
        "stages", "no grpo stage", because="the probe says what GRPO would see", fix="probe a recipe that has one"
    )


def untrained(recipe: Recipe, stage: Grpo) -> str | None:
    """Why these numbers are not those of the stage's start: stages before it, or a model with random weights."""
    before = [s.label for s in recipe.stages[: recipe.stages.index(stage)]]
    if before:
        return (
            f"this is the model before {' and '.join(before)}: the stage '{stage.label}' starts from a better one. "
            "Probe that with --from RUN, a run of this recipe"
        )
    return "this is the built-in model with random weights: it knows nothing yet" if recipe.model.source == "tiny" else None


def signal_at(totals: Sequence[float], size: int) -> float:
    """Chance that a group of ``size`` of one prompt has two different rewards."""
    counts, n = Counter(totals).values(), len(totals)
    if size <= n:
        return 1 - sum(math.comb(m, size) for m in counts) / math.comb(n, size)
    return max(signal_at(totals, n), 1 - sum((m / n) ** size for m in counts)) if n else 0.0


def _sampled(
    engine: Engine, rewards: RewardMix, prompts: Sequence[Prompt], samples: int, how: Sampling, seed: int
) -> list[ScoredGroup]:
    return rewards.score(engine.sample(prompts, samples, how, SampleKey(seed, PROBE_STEP)))


def _at(
    temperature: float,
    engine: Engine,
    rewards: RewardMix,
    prompts: Sequence[Prompt],
    samples: int,
    stage: Grpo,
    seed: int,
) -> AtTemperature:
    how = stage.sampling.model_copy(update={"temperature": temperature})
    scored = _sampled(engine, rewards, prompts, samples, how, seed)
    right = None if rewards.accuracy_reward is None else _mean([rewards.is_correct(s) for g in scored for s in g.scored])
    cut = _mean([s.completion.cut for g in scored for s in g.scored])
    reward = _mean([t for g in scored for t in g.totals if t is not None])
    return AtTemperature(temperature, right, _signal(scored, stage.group_size), cut, reward)


def _timed_step(recipe: Recipe, stage: Grpo, task: Task, engine: Engine, rewards: RewardMix) -> tuple[float, float]:
    """(sampling and scoring, update) in seconds of one real step; the weights are put back. Silent groups are forwarded too,
    so that an update has something to do."""
    kept = {name: tensor.clone() for name, tensor in trained_weights(engine.policy).items()}
    timed = stage.model_copy(update={"no_signal": "keep", "max_failure_share": 1.0})
    loop = GrpoLoop(timed, recipe.seed, task, engine, rewards)
    try:
        seconds = loop.step(1).seconds
    finally:
        loop.learner.optimiser.zero_grad()
        load_weights(engine.policy, kept)
    return seconds["sample"] + seconds["score"], seconds["grade"] + seconds["update"]


def _report(
    stage: Grpo,
    note: str | None,
    scored: Sequence[ScoredGroup],
    rewards: RewardMix,
    samples: int,
    tried: tuple[AtTemperature, ...],
    sample_s: float,
    update_s: float,
) -> ProbeReport:
    ruled = rewards.accuracy_reward is not None
    right = [sum(rewards.is_correct(s) for s in g.scored) for g in scored]
    totals = [[t for t in g.totals if t is not None] for g in scored]
    completions = [s for g in scored for s in g.scored]
    ended = [s.completion.length for s in completions if not s.completion.cut]
    signal = {size: _signal(scored, size) for size in GROUP_SIZES}
    here = _signal(scored, stage.group_size)
    every_s = sample_s + here * update_s
    length_99 = float(np.percentile(ended, 99)) if ended else None
    cut = _mean([s.completion.cut for s in completions])
    return ProbeReport(
        stage=stage.label,
        note=note,
        prompts=len(scored),
        samples=samples,
        temperature=stage.sampling.temperature,
        pass_at={k: _mean([pass_at(k, c, samples) for c in right]) for k in powers_of_two(samples)} if ruled else {},
        all_right=_mean([c == samples for c in right]) if ruled else None,
        all_wrong=_mean([c == 0 for c in right]) if ruled else None,
        no_signal=1 - here,
        signal_at=signal,
        cut_share=cut,
        failure_share=_mean([s.failure is not None for s in completions]),
        length_median=float(np.median(ended)) if ended else None,
        length_99=length_99,
        reward_mean=_mean([t for row in totals for t in row]),
        within_std=math.sqrt(_mean([float(np.var(row, ddof=1)) for row in totals if len(row) > 1])),
        between_std=float(np.std([np.mean(row) for row in totals if row], ddof=1)) if sum(map(bool, totals)) > 1 else 0.0,
        sample_s=sample_s,
        update_s=update_s,
        step_s=every_s,
        steps=stage.steps,
        temperatures=tried,
        choices=(
            choose_group_size(stage.group_size, signal, _mean([c / samples for c in right]) if ruled else None),
            choose_length(stage.sampling.max_new_tokens, length_99, cut),
            choose_temperature(stage.sampling.temperature, tried, stage.group_size),
        ),
    )


def choose_group_size(current: int, signal: Mapping[int, float], solved: float | None) -> Choice:
    """The smallest usual size whose double would bring little more signal; none where no size has any."""
    key, largest = "group_size", max(GROUP_SIZES)
    if signal[largest] < LITTLE_SIGNAL:
        cure = "warm-start it with an sft stage, or choose easier prompts"
        if solved is None:
            cure = "choose other prompts, or a reward with finer steps"
        elif solved > 0.5:
            cure = "choose harder prompts"
        share = "" if solved is None else f" ({_percent(solved)} right)"
        return Choice(key, current, None, f"even of {largest} completions nearly all score the same{share}: {cure}")
    usual = [size for size in GROUP_SIZES if size >= 8]
    chosen = next((size for size in usual[:-1] if signal[2 * size] - signal[size] < WORTH), largest)
    if chosen == largest:
        return Choice(
            key,
            current,
            chosen,
            f"{_percent(signal[chosen])} of groups would teach, {_percent(signal[chosen // 2])} with half as many",
        )
    told = f"{_percent(signal[chosen])} of groups would teach; with {2 * chosen} completions {_percent(signal[2 * chosen])}"
    return Choice(key, current, chosen, told)


def choose_length(current: int, length_99: float | None, cut_share: float) -> Choice:
    """Room for 99 of 100 completions that end, and a quarter more; twice the limit where many were cut."""
    key = "sampling.max_new_tokens"
    if length_99 is None:
        return Choice(key, current, None, "every completion was cut: the model does not end by itself yet")
    if cut_share > 0.05:
        return Choice(key, current, 2 * current, f"{_percent(cut_share)} of completions were cut at {current}")
    chosen = 8 * math.ceil(1.25 * length_99 / 8)
    return Choice(
        key, current, chosen, f"99 % of those that ended had up to {length_99:.0f} tokens; a quarter more is room to grow"
    )


def choose_temperature(current: float, tried: Sequence[AtTemperature], group_size: int) -> Choice:
    """The one with the most groups that teach; 1, which samples the policy itself, unless another is clearly better.

    More heat always makes rewards differ, in the end by spoiling answers: one that costs much of the accuracy is no choice,
    nor, where there is none, one that costs reward.
    """
    key = "sampling.temperature"
    plain = next(one for one in tried if one.temperature == 1.0)
    sound = [one for one in tried if one.is_as_good_as(plain)]
    best = max(sound, key=lambda one: one.signal)
    if best.signal < LITTLE_SIGNAL:
        return Choice(key, current, None, "at no temperature did groups differ")
    if best.signal - plain.signal < WORTH:
        return Choice(
            key,
            current,
            1.0,
            f"it samples the policy itself, and {_percent(plain.signal)} of groups of {group_size} would teach",
        )
    told = f"{_percent(best.signal)} of groups of {group_size} would teach, at 1 only {_percent(plain.signal)}"
    return Choice(key, current, best.temperature, told)


def _signal(scored: Sequence[ScoredGroup], size: int) -> float:
    return _mean([signal_at([t for t in g.totals if t is not None], size) for g in scored])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
