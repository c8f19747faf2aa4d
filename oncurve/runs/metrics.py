"""What each metric of a run means, what a healthy one looks like, and which ones are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from oncurve.errors import RunError, did_you_mean


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. A name that ends in ``/`` stands for a family: ``reward/`` explains ``reward/answer``.

    ``repeatable`` is False if the metric measures the machine: two identical runs differ in it. ``best`` is the value that
    `keep_best` looks for, None if neither is better.
    """

    name: str
    unit: str
    one_sentence: str
    healthy: str
    repeatable: bool = True
    best: Literal["highest", "lowest"] | None = None


_TABLE = (
    Metric(
        "reward",
        "reward",
        "Mean total reward of the step's completions, without those that could not be rewarded.",
        "rises, then levels off",
        best="highest",
    ),
    Metric(
        "reward_std",
        "reward",
        "Mean over groups of the std of their total rewards (dividing by G − 1).",
        "well above 0 while there is something to learn",
    ),
    Metric(
        "reward/",
        "reward",
        "Mean value of one reward aspect, before its weight.",
        "rises; if it falls while the total rises, the policy trades it for other rewards",
        best="highest",
    ),
    Metric(
        "accuracy",
        "share",
        "Share of completions that are correct, if there is a verifiable reward.",
        "rises; held-out accuracy should follow it",
        best="highest",
    ),
    Metric("accuracy/", "share", "Share of correct completions of one task of a mix.", "rises for each task", best="highest"),
    Metric(
        "pass_at/",
        "share",
        "Probability that at least one of k answers to a held-out problem is right (unbiased).",
        "rises with accuracy; if it falls while accuracy rises, answers have lost their variety",
        best="highest",
    ),
    Metric("turns", "turns", "Mean number of the model's turns in a completion with tools.", "as many as the task needs"),
    Metric("tool_calls", "calls", "Mean number of tool calls of a completion.", "as many as the task needs"),
    Metric(
        "tool_failure_share",
        "share",
        "Share of tool calls that failed: not parseable, an unknown tool, wrong arguments, an exception or a time limit (not "
        "recorded for agent programs, which run their tools themselves).",
        "falls towards 0",
        best="lowest",
    ),
    Metric(
        "samples_kept",
        "completions",
        "Completions of the step that were kept as demonstrations (rejection_sample).",
        "above 0",
        best="highest",
    ),
    Metric("comparisons", "pairs", "New comparisons that the reward model learned from after this step (iterate).", "above 0"),
    Metric(
        "reward_model_loss",
        "loss",
        "The reward model's loss at the last update of a round (iterate).",
        "below 0.69",
        best="lowest",
    ),
    Metric(
        "experiences",
        "entries",
        "Experiences in the library after the step (training_free).",
        "grows, then entries are rewritten",
    ),
    Metric(
        "changes",
        "changes",
        "Replies of the teacher that changed the library in this step (training_free).",
        "above 0 at first",
    ),
    Metric(
        "heldout_with",
        "share",
        "Held-out accuracy with the library in the prompt (training_free).",
        "above heldout_without",
        best="highest",
    ),
    Metric(
        "heldout_without",
        "share",
        "Held-out accuracy of the same model without the library (training_free).",
        "constant: the baseline",
    ),
    Metric(
        "heldout_reward_with",
        "reward",
        "Held-out reward with the library in the prompt, if there is no verifiable reward (training_free).",
        "above heldout_reward_without",
        best="highest",
    ),
    Metric(
        "heldout_reward_without",
        "reward",
        "Held-out reward of the same model without the library, if there is no verifiable reward (training_free).",
        "constant: the baseline",
    ),
    Metric(
        "maj_at/",
        "share",
        "Share of held-out problems whose most frequent answer among k is right.",
        "above accuracy",
        best="highest",
    ),
    Metric(
        "no_signal_share",
        "share",
        "Share of groups whose advantages are all 0: every completion got the same reward.",
        "below 0.5; near 1 the prompts are too easy or too hard",
        best="lowest",
    ),
    Metric(
        "no_signal_samples",
        "share",
        "Share of completions in groups without signal (curriculum), smaller than no_signal_share if group sizes adapt.",
        "below no_signal_share of a run without a curriculum",
        best="lowest",
    ),
    Metric("known_prompts", "prompts", "Prompts that have been sampled and have a pass rate (curriculum).", "rises"),
    Metric(
        "pass_rate/",
        "share",
        "Running pass rate of one level of difficulty, measured on prompts when they are first sampled (curriculum).",
        "rises; a level near 1 is sampled less",
        best="highest",
    ),
    Metric(
        "cut_share",
        "share",
        "Share of completions that were truncated at the length limit.",
        "near 0; if it grows, raise max_new_tokens or penalise length",
        best="lowest",
    ),
    Metric(
        "failure_share",
        "share",
        "Share of completions that could not be rewarded: a reward raised an error, timed out or returned no number.",
        "0",
        best="lowest",
    ),
    Metric(
        "length_mean", "tokens", "Mean number of tokens that the policy sampled per completion.", "steady or changing slowly"
    ),
    Metric(
        "length_min",
        "tokens",
        "Length of the step's shortest completion.",
        "above 1: a policy that stops at once has collapsed",
    ),
    Metric("length_max", "tokens", "Length of the step's longest completion.", "below max_new_tokens"),
    Metric(
        "entropy",
        "nats",
        "Mean entropy of the policy at the sampling temperature (over the kept tokens, if sampling truncates), over the tokens "
        "that the update forwards: those of groups with a signal.",
        "falls slowly; at 0 exploration ends, and a rise means that the policy is degenerating",
    ),
    Metric(
        "sampled_entropy",
        "nats",
        "Mean of −log-prob over all tokens that the step sampled, groups without signal included: an unbiased estimate of the "
        "entropy of what they were sampled from.",
        "falls slowly; at 0 exploration ends",
    ),
    Metric(
        "kl",
        "nats",
        "Mean estimate per forwarded token of the KL divergence from the reference, not weighted by the ratio; logged if the "
        "stage has a reference.",
        "grows slowly; a jump means that the policy has left the reference",
        best="lowest",
    ),
    Metric(
        "loss",
        "loss",
        "The loss that was minimised: the policy loss with its KL and entropy terms, or cross-entropy per token in sft.",
        "in sft it falls; in grpo it stays near 0 and says little",
        best="lowest",
    ),
    Metric(
        "policy_loss",
        "loss",
        "The surrogate part of the loss, without KL and entropy terms.",
        "near 0 with one update per step",
        best="lowest",
    ),
    Metric("grad_norm", "norm", "Norm of the gradient before clipping.", "steady; spikes are an early warning"),
    Metric("learning_rate", "rate", "Learning rate of the step's last update.", "follows the schedule"),
    Metric(
        "clip_low_share",
        "share",
        "Share of forwarded tokens clipped from below: ratio under the range, negative advantage.",
        "below 0.1",
    ),
    Metric(
        "clip_high_share",
        "share",
        "Share of forwarded tokens clipped from above: ratio over the range with a positive advantage (cispo: of either sign), "
        "or over clip.dual with a negative one.",
        "below 0.1",
    ),
    Metric(
        "clip_share",
        "share",
        "Share of forwarded tokens clipped on either side; with one ratio per completion, its tokens are clipped together.",
        "0 with one update per step; below 0.2 otherwise",
    ),
    Metric(
        "ratio_mean",
        "ratio",
        "Mean of new over old probability at the step's last update, over forwarded tokens.",
        "1 with one update per step; near 1 otherwise",
    ),
    Metric(
        "ratio_max",
        "ratio",
        "Largest ratio of new over old probability at the step's last update, of forwarded tokens.",
        "below about 10",
    ),
    Metric(
        "update_kl",
        "nats",
        "How far the step's updates before the last moved the policy: mean k3 estimate per forwarded token; 0 with a single "
        "update.",
        "below about 0.02; a spike means that the learning rate is too high",
        best="lowest",
    ),
    Metric(
        "mismatch_kl",
        "nats",
        "Mean k3 estimate per forwarded token of the KL divergence between sampler and learner.",
        "below 1e-6 in float32, below 1e-3 in bfloat16",
        best="lowest",
    ),
    Metric(
        "mismatch_max",
        "nats",
        "Largest absolute difference between a forwarded token's log-prob in sampler and learner.",
        "below 1e-4 in float32, below 0.5 in bfloat16; with the native engine, the run stops if the first step is above 0.01 "
        "in float32, or in 16 bits above 1 with mismatch_kl above 0.01; with an FP8 KV cache, if mismatch_kl is above 0.1",
        best="lowest",
    ),
    Metric(
        "loss_scale",
        "factor",
        'With `model.dtype` = "float16": what the loss is multiplied by before the backward pass.',
        "65536 or less; it is halved by an overflow, whose update is skipped, and doubled after 2000 updates without one",
    ),
    Metric(
        "balance_loss",
        "loss",
        "Mixtures of experts with `balance_loss`: how unevenly the routers use their experts, before its weight in the loss.",
        "the number of experts that a token takes in a layer if all experts are used evenly; more if not",
        best="lowest",
    ),
    Metric(
        "staleness",
        "updates",
        "Mean number of updates between sampling a token and learning from it, over tokens (asynchronous, or with carry_over).",
        "well below scale.max_staleness; with carry_over below 1",
        repeatable=False,
        best="lowest",
    ),
    Metric(
        "staleness_max",
        "updates",
        "Largest number of updates between sampling a token of the step and learning from it (asynchronous, or with "
        "carry_over).",
        "never above scale.max_staleness; with carry_over the most times that an answer was carried over",
        repeatable=False,
        best="lowest",
    ),
    Metric(
        "carried_groups",
        "groups",
        "Groups that were unfinished when the step was full and continue in the next one (grpo.carry_over).",
        "equal to carry_over; 0 in the last step",
    ),
    Metric(
        "value_loss",
        "loss",
        "The critic's loss, a mean over tokens and over the step's updates (ppo).",
        "falls in the first tens of steps",
        best="lowest",
    ),
    Metric("value_clip_share", "share", "Share of tokens whose value was clipped (ppo).", "below 0.3"),
    Metric(
        "explained_variance",
        "share",
        "Share of the variance of returns that the critic predicts: 1 − Var(R − V) / Var(R), over tokens (ppo).",
        "rises from 0; below 0 the critic does harm",
        best="highest",
    ),
    Metric("value_mean", "reward", "Mean of the critic's values over tokens (ppo).", "near the mean reward"),
    Metric("critic_grad_norm", "norm", "Norm of the critic's gradient before clipping (ppo).", "steady"),
    Metric(
        "skipped_critic_updates", "updates", "Updates of the critic that were skipped: NaN, or a spike.", "0", best="lowest"
    ),
    Metric(
        "step_kl",
        "nats",
        "Mean KL(π_old‖π_new) per token of the step, over full distributions (trpo).",
        "below max_kl",
        best="lowest",
    ),
    Metric("step_gain", "reward", "How much the surrogate rose in the step (trpo).", "above 0", best="highest"),
    Metric(
        "step_share",
        "share",
        "The step length that the line search accepted, as a share of the longest one; 0: no step was good enough (trpo).",
        "1, or 0.5",
    ),
    Metric("step_norm", "norm", "Norm of the change of the weights in the step (trpo).", "steady"),
    Metric("line_search_tries", "tries", "Step lengths that the line search tried (trpo).", "1 to 3"),
    Metric(
        "cg_residual",
        "share",
        "Relative residual of conjugate gradient for the natural gradient: |g − (F + damping) x| / |g| (trpo).",
        "below 0.3; else raise cg_iterations or damping",
        best="lowest",
    ),
    Metric(
        "pair_accuracy",
        "share",
        "Share of pairs whose chosen completion has the higher reward, in dpo the implicit one (dpo, reward_model).",
        "rises; before dpo's first update it is chance, as policy and reference differ only by rounding",
        best="highest",
    ),
    Metric(
        "pair_margin",
        "reward",
        "Mean reward of the chosen minus that of the rejected completion, in dpo the implicit ones (dpo, reward_model).",
        "rises",
        best="highest",
    ),
    Metric(
        "heldout_pair_accuracy",
        "share",
        "Share of held-out comparisons, or judged steps, that the reward model gets right (reward_model).",
        "above 0.5; 0.6 to 0.75 is usual if people disagree with each other",
        best="highest",
    ),
    Metric(
        "calibration_error",
        "share",
        "Mean distance between the reward model's confidence and its accuracy, on held-out rows (reward_model).",
        "below 0.1",
        best="lowest",
    ),
    Metric(
        "chosen_reward",
        "reward",
        "Mean implicit reward β log(π/π_ref) of chosen completions (dpo).",
        "near 0 or rising",
        best="highest",
    ),
    Metric(
        "rejected_reward",
        "reward",
        "Mean implicit reward of rejected completions (dpo).",
        "falls; if the chosen one falls as fast, raise beta",
    ),
    Metric(
        "teacher_divergence",
        "nats",
        "Mean divergence of the policy from its teacher per token (distil); estimated from samples with teach_by = advantage.",
        "falls",
        best="lowest",
    ),
    Metric(
        "mismatch_masked_share",
        "share",
        "Share of forwarded tokens masked because sampler and learner disagree on them (mismatch_limit, correction, "
        "off_policy_kl).",
        "near 0",
        best="lowest",
    ),
    Metric(
        "entropy_dropped_share",
        "share",
        "Share of forwarded tokens that an entropy control leaves out of the surrogate (entropy.top_share, entropy.clip_cov).",
        "1 − top_share; near clip_cov",
    ),
    Metric(
        "entropy_bonus",
        "weight",
        "Weight of the entropy in the step's objective, if it follows a target (entropy.target).",
        "0 above the target; rises below it",
    ),
    Metric(
        "tokens",
        "tokens",
        "Completion tokens sampled in the step, those of discarded groups included; with carry_over, all tokens of the groups "
        "that the step completes; in a stage that does not sample, tokens trained on.",
        "as large as fits",
    ),
    Metric(
        "tokens_per_s",
        "tokens/s",
        "The step's tokens divided by its time; in a stage that does not sample, by the time of its update.",
        "as high as possible",
        repeatable=False,
        best="highest",
    ),
    Metric(
        "sample_tokens_per_s",
        "tokens/s",
        "Completion tokens divided by the time spent sampling them.",
        "as high as possible",
        repeatable=False,
        best="highest",
    ),
    Metric(
        "tokens_per_pass",
        "tokens",
        "Tokens sampled per completion and forward pass: 1 plus the drafted tokens that were accepted.",
        "above 1 if drafts are of use; it rises as the answers of a group become more alike",
        repeatable=False,
        best="highest",
    ),
    Metric(
        "kv_reuse",
        "share",
        "Fraction of the tokens before agents' turns whose keys and values were still in the KV cache from an earlier call.",
        "high if agents make several calls that extend each other; low if the engine has fewer slots than conversations",
        repeatable=False,
        best="highest",
    ),
    Metric(
        "tokens_per_row",
        "tokens",
        "Tokens sampled per row that the sampler computed: drafts that are not accepted lower it, and completions of a group "
        "that share a row on a CPU while their texts are the same raise it.",
        "on a CPU above 1, up to the group size",
        repeatable=False,
        best="highest",
    ),
    Metric(
        "draft_accepted",
        "share",
        "Share of drafted tokens that the sampler also chose (engine.draft).",
        "0.3 to 0.6 for texts with recurring parts; near 0 drafts are of no use",
        repeatable=False,
        best="highest",
    ),
    Metric(
        "epoch",
        "epochs",
        "Passes made over the stage's examples, pairs or judged steps.",
        "rises; few epochs over few examples overfit less",
    ),
    Metric(
        "seconds/",
        "s",
        "Time of one phase of the step: sample, score, grade, reference (dpo), update or eval; and of parts of the update "
        "(update/pack, update/forward …).",
        "sample and update dominate",
        repeatable=False,
    ),
    Metric(
        "update_tflops",
        "TFLOP/s",
        "Floating-point operations of the update's formulas, without recomputation, divided by its time.",
        "as high as possible",
        repeatable=False,
        best="highest",
    ),
    Metric(
        "mfu",
        "share",
        "Model FLOP utilisation: update_tflops as a share of what this device reaches in a large matrix multiplication.",
        "above 0.4 on a GPU with packs of 8,192 tokens or more; small models are limited by memory bandwidth",
        repeatable=False,
        best="highest",
    ),
    Metric(
        "cpu_seconds",
        "s",
        "CPU time of the process in the step, over all its threads: fairer than wall-clock time on a shared machine.",
        "steady",
        repeatable=False,
    ),
    Metric(
        "memory_mib",
        "MiB",
        "Peak memory: of the process on a CPU, of the allocator on a GPU.",
        "flat after the first steps",
        repeatable=False,
    ),
    Metric(
        "skipped_updates", "updates", "Updates that were skipped: NaN, a spike, or (trpo) no good step.", "0", best="lowest"
    ),
    Metric(
        "groups_resampled",
        "groups",
        "Groups without signal that were replaced by groups of other prompts.",
        "few; many make steps slow",
        best="lowest",
    ),
    Metric(
        "heldout_loss",
        "loss",
        "The loss on the held-out split: cross-entropy per token in sft, the model's own loss in reward_model.",
        "falls; a rise while the loss falls is overfitting",
        best="lowest",
    ),
    Metric(
        "examples_seen",
        "examples",
        "Demonstrations, pairs or judged steps trained on since the stage began, with repeats.",
        "rises by the batch size",
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}
"""Every metric that a stage logs, by name."""

CURVES = (
    "reward", "accuracy", "teacher_divergence", "reward_std", "no_signal_share", "kl", "step_kl", "sampled_entropy", "entropy",
    "clip_share",
    "length_mean", "cut_share", "failure_share", "mismatch_kl", "explained_variance", "value_loss", "pair_accuracy",
    "pair_margin", "heldout_pair_accuracy", "samples_kept", "experiences", "heldout_with", "heldout_reward_with", "loss",
    "heldout_loss", "grad_norm", "tokens_per_s", "tokens_per_pass", "draft_accepted", "memory_mib",
)  # fmt: skip
"""The metrics worth drawing, in order. The HTML report draws those that a stage logged."""

MAIN_CURVES = {
    "sft": ("loss", "heldout_loss", "entropy"),
    "grpo": ("reward", "accuracy", "sampled_entropy", "length_mean", "no_signal_share", "kl", "draft_accepted"),
    "distil": ("reward", "accuracy", "teacher_divergence", "sampled_entropy", "length_mean", "draft_accepted"),
    "ppo": ("reward", "accuracy", "sampled_entropy", "length_mean", "explained_variance", "value_loss", "kl", "draft_accepted"),
    "trpo": ("reward", "accuracy", "sampled_entropy", "length_mean", "no_signal_share", "step_kl", "draft_accepted"),
    "dpo": ("loss", "pair_accuracy", "pair_margin", "entropy"),
    "reward_model": ("loss", "pair_accuracy", "heldout_loss", "heldout_pair_accuracy"),
    "rejection_sample": ("reward", "accuracy", "length_mean", "samples_kept"),
    "training_free": ("reward", "accuracy", "experiences", "heldout_with", "heldout_reward_with"),
}
"""The most telling of those by type of stage."""


def main_curves(stage_type: str, is_logged: Callable[[str], bool]) -> list[str]:
    """The logged curves to show in a terminal: `oncurve show`, and a fork compared with its parent."""
    names = MAIN_CURVES.get(stage_type, ("loss",))
    if not is_logged("sampled_entropy"):  # a run of version 0.1
        names = tuple("entropy" if name == "sampled_entropy" else name for name in names)
    return [name for name in names if is_logged(name)]


def find(name: str) -> Metric | None:
    """The metric of this name, or the family that it belongs to."""
    family, slash, member = name.partition("/")
    return METRICS.get(family + slash) if member else METRICS.get(name)


def is_repeatable(name: str) -> bool:
    metric = find(name)
    return metric is None or metric.repeatable


def explain(name: str) -> Metric:
    """The metric of this name. A member of a family (``reward/answer``) gets the family's explanation."""
    metric = find(name)
    if metric is None:
        raise RunError(
            name,
            "no such metric" + did_you_mean(name, METRICS),
            because="no stage logs a metric of that name",
            fix="metrics are: " + ", ".join(f"{known}NAME" if known.endswith("/") else known for known in METRICS),
        )
    return metric
