"""What a recipe computes has a version, recorded in each run (`oncurve.runs.folder.SEMANTICS`).

A run continues only as it began. If a version changed what one of a run's settings means, then resume, fork and replay refuse
the run and name the release that can do it: continuing would silently give other numbers than a run that never stopped.
Showing, serving and evaluating a run do not depend on how it was trained, so they always work. A run that uses no changed
setting continues to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from oncurve.errors import RunError
from oncurve.models.loading.load import choose_device
from oncurve.plan.memory import fisher_groups
from oncurve.recipe.defaults import rewards_for_stage
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Grpo, PolicyGradientStage, RejectionSample, TrainingFree, Trpo
from oncurve.runs.checkpoints.listing import HELDOUT, best_value
from oncurve.runs.folder import SEMANTICS, RunFolder


def _later_stages_sample(recipe: Recipe) -> bool:
    return len(recipe.rollout_stages) > 1


def _combines_top_k_and_top_p(recipe: Recipe) -> bool:
    return any(stage.sampling.top_k > 0 and stage.sampling.top_p < 1 for stage in recipe.rollout_stages)


def _learns_from_truncated_samples(recipe: Recipe) -> bool:
    return any(isinstance(stage, PolicyGradientStage) and stage.sampling.truncates for stage in recipe.rollout_stages)


def _has_int8_moments(recipe: Recipe) -> bool:
    return any(optimiser.moments == "int8" for stage in recipe.stages for optimiser in stage.optimisers)


def _ends_completions_itself(recipe: Recipe) -> bool:
    """Evaluations are part of a run's record, and choose its best checkpoint."""
    return any(stage.sampling.stop or stage.sampling.min_new_tokens for stage in recipe.rollout_stages)


def _adapts_on_a_cpu(recipe: Recipe) -> bool:
    """Only rounding differs."""
    model = recipe.model
    return model.lora is not None and model.dtype == "float32" and choose_device(model.device).type == "cpu"


def _has_own_environment(recipe: Recipe) -> bool:
    """Only rounding differs. The replies of the built-in environments are too short to be prefilled."""
    return ":" in (getattr(recipe.task, "environment", None) or "")


def _discards_groups_within_a_budget(recipe: Recipe) -> bool:
    return any(
        isinstance(stage, Grpo) and stage.no_signal == "resample" and stage.tokens is not None for stage in recipe.stages
    )


def _measures_curvature_on_other_groups(recipe: Recipe) -> bool:
    """The share of groups was rounded to 1/2, 1/3, 1/4 …"""
    return any(
        isinstance(stage, Trpo)
        and fisher_groups(stage.prompts_per_step, stage.fisher_share)
        != list(range(0, stage.prompts_per_step, int(1 / stage.fisher_share)))
        for stage in recipe.stages
    )


def _ends_early_without_updates(recipe: Recipe) -> bool:
    return any(
        isinstance(stage, RejectionSample | TrainingFree) and (stage.tokens is not None or stage.seconds is not None)
        for stage in recipe.stages
    )


COARSE_REWARDS = frozenset({
    "answer", "code", "columns", "countdown", "format", "guess", "json", "language", "length", "math", "model", "overlong",
    "repetition",
})  # fmt: skip
"""Rewards without step rewards whose values, if they differ at all, differ by more than rounding. That is not known of Python
functions, nor of sums, as in a judge's rubric."""


def _resamples_other_groups(recipe: Recipe) -> bool:
    """Total rewards were compared exactly. A group of one coarse reward has a signal by that rule if and only if it has an
    advantage. In other groups, totals that differ by rounding, equal step rewards, and rewards of truncated completions that
    `mask_cut` leaves out counted as a signal."""
    for stage in recipe.stages:
        if isinstance(stage, Grpo) and stage.no_signal == "resample":
            counted = [reward.type for reward in rewards_for_stage(recipe, stage) if reward.weight != 0]
            if stage.mask_cut or len(counted) > 1 or not COARSE_REWARDS.issuperset(counted):
                return True
    return False


LOWEST = frozenset({
    "loss", "policy_loss", "heldout_loss", "kl", "failure_share", "cut_share", "no_signal_share", "mismatch_kl",
})  # fmt: skip
"""The metrics of which version 1 took the lowest value as the best; of all others it took the highest."""


def _keeps_another_best(recipe: Recipe) -> bool:
    """A checkpoint that was kept as the best would be deleted."""
    metrics = {stage.keep_best for stage in recipe.stages if stage.keep_best not in (None, HELDOUT)}
    return any(best_value(metric) != ("lowest" if metric in LOWEST else "highest") for metric in metrics if metric)


def _has_16_bit_weights(recipe: Recipe) -> bool:
    """A quantised model's buffers were never rounded."""
    return recipe.uses_policy and recipe.model.dtype != "float32" and recipe.model.quantise is None


CHANGES: Mapping[int, Mapping[str, Callable[[Recipe], bool]]] = {
    2: {
        "a second sampling stage has its own prompts and random numbers": _later_stages_sample,
        "top_p is taken of what top_k leaves": _combines_top_k_and_top_p,
        "log-probs of truncated samples are renormalised": _learns_from_truncated_samples,
        "int8 moments no longer shrink updates": _has_int8_moments,
        "held-out answers end at sampling.stop and not before min_new_tokens": _ends_completions_itself,
        "on a CPU adapters are merged into the weights": _adapts_on_a_cpu,
        "long replies of an environment are prefilled in one pass": _has_own_environment,
        "groups that resampling discards count in the budget of tokens": _discards_groups_within_a_budget,
        "fisher_share is the share of groups that curvature is measured on": _measures_curvature_on_other_groups,
        "groups without an advantage are resampled, not those of equal totals": _resamples_other_groups,
        "rejection_sample and training_free end when their budget is spent": _ends_early_without_updates,
        "keep_best takes the lowest value of every loss, KL, error and failure share, and no length": _keeps_another_best,
        "in 16 bits, frequencies of rotary embeddings stay in float32": _has_16_bit_weights,
    }
}
"""By version: what has changed since the version before, and whether a recipe uses it."""


def changes_since(version: int, recipe: Recipe) -> list[str]:
    """What a recipe uses that means something else since a version."""
    return [text for later in CHANGES if later > version for text, uses in CHANGES[later].items() if uses(recipe)]


def as_first_trained(run: RunFolder, recipe: Recipe) -> Recipe:
    """The recipe by which a run is continued or replayed, without what its version ignored: rewards that failed never ended a
    rejection_sample or training_free stage of version 1."""
    if run.state().semantics > 1:
        return recipe
    stages = [
        stage.model_copy(update={"max_failure_share": 1.0}) if isinstance(stage, RejectionSample | TrainingFree) else stage
        for stage in recipe.stages
    ]
    return recipe.model_copy(update={"stages": tuple(stages)})


def check_semantics(run: RunFolder, recipe: Recipe) -> None:
    """Raises RunError if this release would continue or repeat the run with other results than the one that made it."""
    state = run.state()
    fix = f"use the release that made it: pip install oncurve=={state.oncurve}; any release can show, serve and evaluate it"
    if state.semantics > SEMANTICS:
        raise RunError(
            run.name,
            "can't be continued by this release",
            because=f"a newer one made it, which computes some settings differently (semantics {state.semantics})",
            fix=fix,
        )
    changes = changes_since(state.semantics, recipe)
    if changes:
        raise RunError(
            run.name,
            "can't be continued or replayed by this release",
            because=f"its recipe now computes something else: {'; '.join(changes)}",
            fix=fix,
        )
