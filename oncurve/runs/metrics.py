"""What each number of a run means, and what a healthy one looks like: for the terminal, the studio and the documentation."""

from __future__ import annotations

from dataclasses import dataclass

from oncurve.errors import RunError, did_you_mean


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. A name that ends in ``/`` stands for a family: ``reward/`` explains ``reward/answer``.

    ``repeatable`` is False where the number measures the machine rather than the run: two identical runs differ in it.
    """

    name: str
    unit: str
    one_sentence: str
    healthy: str
    repeatable: bool = True


_TABLE = (
    Metric("reward", "reward", "Mean total reward of the step's rewarded completions.", "rises, then levels off"),
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
        "rises; one that falls while the total rises is being traded away",
    ),
    Metric(
        "accuracy",
        "share",
        "Share of completions that are solved, where a rule says which are.",
        "rises; held-out accuracy should follow it",
    ),
    Metric(
        "pass_at/",
        "share",
        "Chance that so many answers to a held-out problem hold a right one (unbiased).",
        "rises with accuracy; where it falls while accuracy rises, answers have lost their variety",
    ),
    Metric(
        "samples_kept",
        "completions",
        "Completions of the step that were kept to be imitated (rejection_sample).",
        "above 0",
    ),
    Metric(
        "comparisons", "pairs", "Fresh comparisons that the reward model learned from after this step (iterate).", "above 0"
    ),
    Metric("reward_model_loss", "loss", "The reward model's loss at the last update of a round (iterate).", "below 0.69"),
    Metric("experiences", "entries", "Experiences in the library after the step (training_free).", "grows, then is rewritten"),
    Metric(
        "changes",
        "changes",
        "Replies of the teacher that changed the library in this step (training_free).",
        "above 0 at first",
    ),
    Metric(
        "heldout_with", "share", "Held-out accuracy with the library in the prompt (training_free).", "above heldout_without"
    ),
    Metric("heldout_without", "share", "Held-out accuracy of the same model without the library (training_free).", "the start"),
    Metric(
        "heldout_reward_with",
        "reward",
        "Held-out reward with the library in the prompt, where no rule says what is right (training_free).",
        "above heldout_reward_without",
    ),
    Metric(
        "heldout_reward_without",
        "reward",
        "Held-out reward of the same model without the library, where no rule says what is right (training_free).",
        "the start",
    ),
    Metric("maj_at/", "share", "Share of held-out problems whose most frequent answer of so many is right.", "above accuracy"),
    Metric(
        "no_signal_share",
        "share",
        "Share of groups whose advantages are all 0: every completion got the same reward.",
        "below 0.5; near 1 the prompts are too easy or too hard",
    ),
    Metric(
        "cut_share",
        "share",
        "Share of completions that reached the length limit before they ended.",
        "near 0; if it grows, raise max_new_tokens or punish length",
    ),
    Metric(
        "failure_share",
        "share",
        "Share of completions that could not be rewarded: a reward raised, hung or gave no number.",
        "0",
    ),
    Metric("length_mean", "tokens", "Mean number of tokens that the policy wrote in a completion.", "steady or slowly moving"),
    Metric("length_min", "tokens", "Length of the step's shortest completion.", "not 1: that is a policy that says nothing"),
    Metric("length_max", "tokens", "Length of the step's longest completion.", "below max_new_tokens"),
    Metric(
        "entropy",
        "nats",
        "Mean entropy of the policy over the tokens it wrote, at the sampling temperature.",
        "falls slowly; a fall to 0 ends exploration, a rise means the policy is coming apart",
    ),
    Metric(
        "kl",
        "nats",
        "Mean estimate per token of the KL divergence from the reference; logged where a reference is held.",
        "grows slowly; a jump is a policy that has left its anchor",
    ),
    Metric(
        "loss",
        "loss",
        "What was minimised: the policy loss with its KL and entropy terms, or cross-entropy per token in sft.",
        "in sft it falls; in grpo it stays near 0 and says little",
    ),
    Metric(
        "policy_loss",
        "loss",
        "The surrogate's part of the loss, without KL and entropy terms.",
        "near 0 with one update per step",
    ),
    Metric("grad_norm", "norm", "Length of the gradient before clipping.", "steady; spikes come before trouble"),
    Metric("learning_rate", "rate", "Learning rate of the step's last update.", "as the schedule says"),
    Metric(
        "clip_low_share", "share", "Share of tokens clipped from below: ratio under the range, negative advantage.", "below 0.1"
    ),
    Metric(
        "clip_high_share", "share", "Share of tokens clipped from above: ratio over the range, positive advantage.", "below 0.1"
    ),
    Metric("clip_share", "share", "Share of tokens clipped on either side.", "0 with one update per step; below 0.2 otherwise"),
    Metric(
        "ratio_mean",
        "ratio",
        "Mean of new over old probability at the step's last update.",
        "1 with one update per step; near 1 otherwise",
    ),
    Metric("ratio_max", "ratio", "Largest ratio of new over old probability at the step's last update.", "below about 10"),
    Metric(
        "update_kl",
        "nats",
        "How far the step's updates before the last moved the policy: mean k3 estimate per token; 0 with a single update.",
        "below about 0.02; a spike means too large a learning rate",
    ),
    Metric(
        "mismatch_kl",
        "nats",
        "Mean k3 estimate per token of the KL divergence between sampler and learner on the sampled tokens.",
        "below 1e-6 in float32, below 1e-3 in bfloat16",
    ),
    Metric(
        "mismatch_max",
        "nats",
        "Largest absolute difference between a token's log-prob in sampler and learner.",
        "below 1e-4 in float32, below 0.5 in bfloat16; with the native engine, a first step above 0.01 or 1 stops the run",
    ),
    Metric(
        "staleness",
        "updates",
        "Mean over tokens of the updates between the weights that wrote a token and those that learned from it (asynchronous).",
        "well below scale.max_staleness",
        repeatable=False,
    ),
    Metric(
        "staleness_max",
        "updates",
        "The most updates between the weights that wrote a token of the step and those that learned from it (asynchronous).",
        "never above scale.max_staleness",
        repeatable=False,
    ),
    Metric(
        "value_loss",
        "loss",
        "The critic's loss, a mean over tokens and over the step's updates (ppo).",
        "falls in the first tens of steps",
    ),
    Metric("value_clip_share", "share", "Share of tokens whose value the clip held back (ppo).", "below 0.3"),
    Metric(
        "explained_variance",
        "share",
        "How much of the variance of what followed the critic foresaw: 1 − Var(R − V) / Var(R), over tokens (ppo).",
        "rises from 0; below 0 the critic misleads",
    ),
    Metric("value_mean", "reward", "Mean of the critic's values over tokens (ppo).", "near the mean reward"),
    Metric("critic_grad_norm", "norm", "Length of the critic's gradient before clipping (ppo).", "steady"),
    Metric("skipped_critic_updates", "updates", "Updates of the critic left out: NaN, or a spike.", "0"),
    Metric(
        "step_kl", "nats", "Mean KL(π_old‖π_new) per token that the step cost, over whole distributions (trpo).", "below max_kl"
    ),
    Metric("step_gain", "reward", "How much the surrogate rose in the step (trpo).", "above 0"),
    Metric(
        "step_share", "share", "How much of the longest step the line search took; 0: none was good enough (trpo).", "1, or 0.5"
    ),
    Metric("step_norm", "norm", "Length of the step that the weights took (trpo).", "steady"),
    Metric("line_search_tries", "tries", "Step lengths that the line search tried (trpo).", "1 to 3"),
    Metric(
        "cg_residual",
        "share",
        "What conjugate gradient left unsolved of the natural gradient: |g − F x| / |g| (trpo).",
        "below 0.3; else raise cg_iterations or damping",
    ),
    Metric(
        "pair_accuracy",
        "share",
        "Share of pairs whose chosen completion has the higher reward, in dpo the implicit one (dpo, reward_model).",
        "rises; before dpo's first update it is chance, as policy and reference differ by rounding alone",
    ),
    Metric(
        "pair_margin",
        "reward",
        "Mean reward of the chosen minus that of the rejected completion, in dpo the implicit ones (dpo, reward_model).",
        "rises",
    ),
    Metric(
        "heldout_pair_accuracy",
        "share",
        "Share of held-out comparisons, or judged steps, that the reward model gets right (reward_model).",
        "above 0.5; 0.6 to 0.75 is usual where people disagree with each other",
    ),
    Metric(
        "calibration_error",
        "share",
        "Mean distance between the reward model's confidence and how often it is right, on held-out rows (reward_model).",
        "below 0.1",
    ),
    Metric("chosen_reward", "reward", "Mean implicit reward β log(π/π_ref) of chosen completions (dpo).", "near 0 or rising"),
    Metric(
        "rejected_reward",
        "reward",
        "Mean implicit reward of rejected completions (dpo).",
        "falls; if the chosen one falls as fast, raise beta",
    ),
    Metric(
        "mismatch_masked_share",
        "share",
        "Share of tokens left out because sampler and learner disagree on their completion (mismatch_limit).",
        "near 0",
    ),
    Metric(
        "tokens",
        "tokens",
        "Completion tokens sampled in the step, or tokens trained on where a stage samples none.",
        "as large as fits",
    ),
    Metric(
        "tokens_per_s",
        "tokens/s",
        "The step's tokens over its time; where a stage samples none, over the time of its update.",
        "as high as it gets",
        repeatable=False,
    ),
    Metric(
        "sample_tokens_per_s",
        "tokens/s",
        "Completion tokens over the time spent sampling them.",
        "as high as it gets",
        repeatable=False,
    ),
    Metric(
        "epoch",
        "epochs",
        "How often the stage's examples, pairs or judged steps have been gone through.",
        "rises; few epochs over few examples overfit less",
    ),
    Metric(
        "seconds/",
        "s",
        "Time of one phase of the step: sample, score, grade, reference (dpo), update or eval; and of phases within the update "
        "(update/pack, update/forward …).",
        "sample and update lead",
        repeatable=False,
    ),
    Metric(
        "update_tflops",
        "TFLOP/s",
        "Floating-point operations that the update's formulas ask for, over its time; what is computed again does not count.",
        "as high as it gets",
        repeatable=False,
    ),
    Metric(
        "mfu",
        "share",
        "Model FLOP utilisation: update_tflops as a share of what this device reaches in a large product of matrices.",
        "above 0.4 on a GPU with packs of 8,192 tokens or more; small models are bound by memory instead",
        repeatable=False,
    ),
    Metric(
        "cpu_seconds",
        "s",
        "What the process computed in the step, over all its threads: fairer than time where others share the machine.",
        "steady",
        repeatable=False,
    ),
    Metric(
        "memory_mib",
        "MiB",
        "Most memory that was in use: the process's on a CPU, the allocator's on a GPU.",
        "flat after the first steps",
        repeatable=False,
    ),
    Metric("skipped_updates", "updates", "Updates left out: NaN, a spike, or (trpo) no good step.", "0"),
    Metric(
        "groups_resampled", "groups", "Groups without signal that were replaced by fresh prompts.", "few; many make steps slow"
    ),
    Metric(
        "heldout_loss",
        "loss",
        "The loss on what is kept out of training: cross-entropy per token in sft, the model's own in reward_model.",
        "falls; a rise while the loss falls is overfitting",
    ),
    Metric(
        "examples_seen",
        "examples",
        "Worked examples, pairs or judged steps trained on since the stage began, repeats counted.",
        "rises by the batch size",
    ),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}
"""Every metric that a stage logs, by name."""


def find(name: str) -> Metric | None:
    """The metric, or the family that the name belongs to."""
    family, slash, member = name.partition("/")
    return METRICS.get(family + slash) if member else METRICS.get(name)


def is_repeatable(name: str) -> bool:
    metric = find(name)
    return metric is None or metric.repeatable


def explain(name: str) -> Metric:
    """What a metric means. A family's member (``reward/answer``) gets the family's words."""
    metric = find(name)
    if metric is None:
        raise RunError(
            name,
            "no such metric" + did_you_mean(name, METRICS),
            because="no stage logs a metric of that name",
            fix="metrics are: " + ", ".join(f"{known}NAME" if known.endswith("/") else known for known in METRICS),
        )
    return metric
