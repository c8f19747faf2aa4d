"""The one table of objectives: which ratio, surrogate, clip range, reduction, advantage and KL each of them uses.

Every part of Oncurve that knows objectives by name reads this table: the formulas (`oncurve.algos.objectives`), the recipe
schema, its defaults and checks, `oncurve recipe explain`, `oncurve compare`, the translation of TRL configs, and the
documentation. A new objective is one name and one row here; a new ratio, surrogate or reduction also needs its formula in
`oncurve.algos`. An installed package adds an objective as a plug-in: an `ObjectiveSpec`, with formulas of its own if it needs
any.

This module imports neither torch nor pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from oncurve.plugins import Registry, check_instance

RatioName = Literal["token_ratio", "sequence_product_ratio", "sequence_mean_ratio", "sequence_token_ratio"]
"""Functions of `oncurve.algos.ratios`."""
SurrogateName = Literal["clipped", "cispo", "sapo", "log_likelihood", "geometric_mean", "dppo_tv", "dppo_kl", "vespo", "dro"]
"""Classes of `oncurve.algos.surrogates`."""
ReductionName = Literal[
    "mean_of_completion_means", "mean_over_step_tokens", "mean_over_length_budget", "mean_of_completion_sums"
]
"""Functions of `oncurve.algos.reductions`."""
Baseline = Literal["mean", "leave_one_out", "length_weighted", "best_of_others", "none"]
"""What is subtracted from a reward: the group's mean, the mean of the others in the group, the mean weighted by length, the
best of the others (never below 0: pass@k), or nothing."""
AdvantageScale = Literal["group", "batch", "whiten", "mean", "signal_share", "per_reward", "none"]
"""What a centred reward is divided by: the group's std, one std over the batch, the std over tokens (`whiten`), the group's
mean reward, the fraction of completions in groups with signal, or nothing. `per_reward` normalises each reward first."""
DivergenceName = Literal["reverse_kl", "forward_kl", "jsd"]
"""Divergences between policy and teacher (`oncurve.algos.divergences`)."""
KlPlace = Literal["loss", "reward"]
"""Where the KL term goes: a term of the loss, or subtracted from the reward."""
KlEstimator = Literal["k1", "k2", "k3"]
"""Schulman's estimators (`oncurve.algos.kl`)."""

ObjectiveName = Literal[
    "grpo",
    "grpo_sequence",
    "dapo",
    "dr_grpo",
    "bnpo",
    "gspo",
    "gspo_token",
    "cispo",
    "sapo",
    "rloo",
    "reinforce",
    "reinforce_pp",
    "gmpo",
    "gpg",
    "opo",
    "dppo_tv",
    "dppo_kl",
    "maxrl",
    "vespo",
    "luspo",
    "dro",
    "pass_at_k",
    "gdpo",
]

DEFAULT_KL_ESTIMATOR: Mapping[KlPlace, KlEstimator] = {"loss": "k3", "reward": "k1"}
"""k3 is never negative; k1, summed over a completion, is exactly its log-ratio."""


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """One objective.

    ``ratio``, ``surrogate`` and ``reduction`` name a formula; in a plug-in they may be one: a function like those of
    `oncurve.algos.ratios` and `oncurve.algos.reductions`, an object like those of `oncurve.algos.surrogates`. ``clip`` is (low,
    high), None if the surrogate clips nothing. ``baseline``, ``scale`` and ``kl_place`` are the paper's own choices, used if
    the recipe sets none; with ``fixed_advantage`` the recipe may not set others. ``trl`` is TRL's
    (loss_type, importance_sampling_level) for the same loss, None if TRL has none.

    Example: ``OBJECTIVE_SPECS["dapo"].clip == (0.2, 0.28)``
    """

    ratio: RatioName | Callable[..., Any]
    surrogate: SurrogateName | Any
    clip: tuple[float, float] | None
    reduction: ReductionName | Callable[..., Any]
    sentence: str
    paper: str
    baseline: Baseline = "mean"
    scale: AdvantageScale = "group"
    kl_place: KlPlace = "loss"
    fixed_advantage: bool = False
    trl: tuple[str, str] | None = None

    @property
    def uses_ratio(self) -> bool:
        """Whether samples of an older policy are corrected for; without it only one update per step is a policy gradient."""
        return self.surrogate != "log_likelihood"

    @property
    def uses_length_budget(self) -> bool:
        return self.reduction == "mean_over_length_budget"


CorrectionName = Literal["tis", "seq_tis", "mis", "seq_mis", "icepop", "geo_rs"]


@dataclass(frozen=True, slots=True)
class Correction:
    """How samples of a sampler that differs from the learner are weighted, by w = π_learner/π_sampler.

    ``level``: w of each token, of the completion (the product over its tokens), or their geometric mean (``mean``). Outside
    ``low`` … ``high`` w is clamped (``outside`` = clamp) or replaced by 0 (drop). ``is_weight`` is False if w only decides
    what is dropped, and what is left has weight 1.
    """

    level: Literal["token", "sequence", "mean"]
    low: float
    high: float
    outside: Literal["clamp", "drop"]
    sentence: str
    paper: str
    is_weight: bool = True


CORRECTIONS: Mapping[CorrectionName, Correction] = {
    "tis": Correction("token", 0.0, 2.0, "clamp", "each token weighted by min(w, 2)", "TIS, Yao et al. 2025"),
    "seq_tis": Correction(
        "sequence", 0.0, 2.0, "clamp", "each completion weighted by min(w, 2)", "sequence TIS, Liu et al. 2025"
    ),
    "mis": Correction("token", 0.0, 3.0, "drop", "each token weighted by w, or dropped if w > 3", "token MIS, Liu et al. 2025"),
    "seq_mis": Correction(
        "sequence", 0.0, 3.0, "drop", "each completion weighted by w, or dropped if w > 3", "MIS, Liu et al. 2025"
    ),
    "icepop": Correction(
        "token", 0.5, 5.0, "drop", "each token weighted by w, or dropped if w is outside 0.5 … 5", "IcePop, arXiv 2510.18855"
    ),
    "geo_rs": Correction(
        "mean",
        0.999,
        1.001,
        "drop",
        "completions dropped if the geometric mean of w is outside 0.999 … 1.001; the others have weight 1",
        "Geo-RS, Liu et al. 2025",
        is_weight=False,
    ),
}
"""Named corrections for a foreign sampler, with the bounds of their authors: `correction` of a policy-gradient stage. Liu et
al. 2025 is "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"."""


BUILT_IN_OBJECTIVES: Mapping[ObjectiveName, ObjectiveSpec] = {
    "grpo": ObjectiveSpec(
        "token_ratio",
        "clipped",
        (0.2, 0.2),
        "mean_of_completion_means",
        "a clipped ratio per token; mean over each completion, then over completions",
        "DeepSeekMath, arXiv 2402.03300",
        trl=("grpo", "token"),
    ),
    "grpo_sequence": ObjectiveSpec(
        "sequence_product_ratio",
        "clipped",
        (0.2, 0.2),
        "mean_of_completion_means",
        "one clipped ratio per completion, the product of its token ratios",
        "the sequence form of GRPO, arXiv 2402.03300",
    ),
    "dapo": ObjectiveSpec(
        "token_ratio",
        "clipped",
        (0.2, 0.28),
        "mean_over_step_tokens",
        "a ratio per token with a wider clip above 1 than below; mean over all tokens of the step",
        "DAPO, arXiv 2503.14476",
        trl=("dapo", "token"),
    ),
    "dr_grpo": ObjectiveSpec(
        "token_ratio",
        "clipped",
        (0.2, 0.2),
        "mean_over_length_budget",
        "a clipped ratio per token; each completion's sum is divided by a constant length budget; no division by the std",
        "Dr. GRPO, arXiv 2503.20783",
        scale="none",
        trl=("dr_grpo", "token"),
    ),
    "bnpo": ObjectiveSpec(
        "token_ratio",
        "clipped",
        (0.2, 0.2),
        "mean_over_step_tokens",
        "a clipped ratio per token; mean over all tokens of the step",
        "TRL's bnpo, with the step as the batch",
        trl=("bnpo", "token"),
    ),
    "gspo": ObjectiveSpec(
        "sequence_mean_ratio",
        "clipped",
        (3e-4, 4e-4),
        "mean_of_completion_means",
        "one ratio per completion, the geometric mean of its token ratios, in a narrow clip range",
        "GSPO, arXiv 2507.18071",
        trl=("grpo", "sequence"),
    ),
    "gspo_token": ObjectiveSpec(
        "sequence_token_ratio",
        "clipped",
        (3e-4, 4e-4),
        "mean_of_completion_means",
        "gspo for advantages that differ by token",
        "GSPO-token, arXiv 2507.18071",
    ),
    # The upper bound of 5 on the ratio is TRL's reading; the paper leaves it to be tuned.
    "cispo": ObjectiveSpec(
        "token_ratio",
        "cispo",
        (1.0, 4.0),
        "mean_over_step_tokens",
        "log-likelihood weighted by a bounded ratio, so every token keeps its gradient; mean over all tokens of the step",
        "CISPO, MiniMax-M1, arXiv 2506.13585",
        trl=("cispo", "token"),
    ),
    "sapo": ObjectiveSpec(
        "token_ratio",
        "sapo",
        None,
        "mean_of_completion_means",
        "a ratio per token through a soft gate instead of a clip",
        "SAPO, arXiv 2511.20347",
        trl=("sapo", "token"),
    ),
    # The loss is grpo_sequence's: the mean over a completion of one number per sequence is that number. What makes it RLOO is
    # the leave-one-out baseline without scaling, and the k1 KL in the reward.
    "rloo": ObjectiveSpec(
        "sequence_product_ratio",
        "clipped",
        (0.2, 0.2),
        "mean_of_completion_means",
        "one clipped ratio per completion, the product of its token ratios; the baseline is the mean of the group's others",
        "RLOO, arXiv 2402.14740",
        baseline="leave_one_out",
        scale="none",
        kl_place="reward",
        fixed_advantage=True,
    ),
    "reinforce": ObjectiveSpec(
        "token_ratio",
        "log_likelihood",
        None,
        "mean_of_completion_sums",
        "log-likelihood weighted by the advantage: no ratio, no clip, one update per step",
        "REINFORCE, Williams 1992",
        baseline="none",
        scale="none",
        kl_place="reward",
    ),
    "reinforce_pp": ObjectiveSpec(
        "token_ratio",
        "clipped",
        (0.2, 0.2),
        "mean_over_step_tokens",
        "a clipped ratio per token; rewards are whitened over all tokens of the step and need no group",
        "REINFORCE++, arXiv 2501.03262",
        baseline="none",
        scale="whiten",
        kl_place="reward",
    ),
    # The clip range is in log-space: ratios from e^-0.4 to e^0.4, the paper's and TRL's.
    "gmpo": ObjectiveSpec(
        "token_ratio",
        "geometric_mean",
        (0.4, 0.4),
        "mean_of_completion_means",
        "the geometric mean of a completion's token ratios, each clipped in log-space before the mean",
        "GMPO, arXiv 2507.20673",
    ),
    "gpg": ObjectiveSpec(
        "token_ratio",
        "log_likelihood",
        None,
        "mean_over_step_tokens",
        "log-likelihood weighted by the centred reward, divided by the fraction of completions in groups with signal",
        "GPG, arXiv 2504.02546",
        scale="signal_share",
    ),
    "opo": ObjectiveSpec(
        "token_ratio",
        "log_likelihood",
        None,
        "mean_of_completion_sums",
        "the exact policy gradient with the baseline of least variance: the group's mean weighted by length",
        "OPO, arXiv 2505.23585",
        baseline="length_weighted",
        scale="none",
    ),
    # clip is the largest change of a token's probability (tv) or its binary KL (kl) that still gets a gradient. The values are
    # those of verl's example of DPPO (run_qwen30b_dppo.sh, by the paper's authors).
    "dppo_tv": ObjectiveSpec(
        "token_ratio",
        "dppo_tv",
        (0.15, 0.15),
        "mean_over_step_tokens",
        "a bounded ratio times log-likelihood, for tokens whose probability has changed by at most the clip range",
        "DPPO-Binary-TV, arXiv 2602.04879",
    ),
    "dppo_kl": ObjectiveSpec(
        "token_ratio",
        "dppo_kl",
        (0.05, 0.05),
        "mean_over_step_tokens",
        "dppo_tv with a bound on the binary KL (this token or any other) instead of the change of probability",
        "DPPO-Binary-KL, arXiv 2602.04879",
    ),
    "maxrl": ObjectiveSpec(
        "token_ratio",
        "log_likelihood",
        None,
        "mean_of_completion_sums",
        "the policy gradient of the log of the success rate: the centred reward divided by the group's mean reward",
        "MaxRL, arXiv 2602.02710",
        scale="mean",
    ),
    "vespo": ObjectiveSpec(
        "sequence_product_ratio",
        "vespo",
        None,
        "mean_over_step_tokens",
        "log-likelihood weighted by a smooth function of the completion's ratio that fades on both sides of 1",
        "VESPO, arXiv 2602.10693",
        trl=("vespo", "token"),
    ),
    "luspo": ObjectiveSpec(
        "sequence_mean_ratio",
        "clipped",
        (3e-4, 4e-4),
        "mean_of_completion_sums",
        "gspo with each completion weighted by its length, so that long ones do not count less per token",
        "LUSPO, arXiv 2602.05261",
        trl=("luspo", "sequence"),
    ),
    "dro": ObjectiveSpec(
        "token_ratio",
        "dro",
        None,
        "mean_over_step_tokens",
        "log-likelihood weighted by the advantage, minus a squared log-ratio to the old policy instead of a clip",
        "DRO, arXiv 2405.19107; as in verl, with the group's mean instead of a value network",
        scale="none",
    ),
    "pass_at_k": ObjectiveSpec(
        "token_ratio",
        "clipped",
        (0.2, 0.2),
        "mean_of_completion_means",
        "grpo for the best of k: a completion is graded by how much it raises the best reward of the group",
        "pass@k advantages, arXiv 2503.19595",
        baseline="best_of_others",
    ),
    "gdpo": ObjectiveSpec(
        "token_ratio",
        "clipped",
        (0.2, 0.2),
        "mean_of_completion_means",
        "grpo with each reward normalised by itself before they are summed, so that none drowns the others",
        "GDPO, arXiv 2601.05242",
        scale="per_reward",
    ),
}


OBJECTIVE_SPECS: Registry[ObjectiveSpec] = Registry(
    "objective", {str(name): spec for name, spec in BUILT_IN_OBJECTIVES.items()}, check_instance(ObjectiveSpec)
)
"""Every objective by name: those above, and the plug-ins of installed packages."""


def defaults_in_words(trait: Literal["baseline", "scale", "kl_place"]) -> str:
    """A trait of all objectives in one phrase: `none for dr_grpo, rloo, reinforce; whiten for reinforce_pp; group for the
    others`."""
    usual: str = getattr(BUILT_IN_OBJECTIVES["grpo"], trait)
    names: dict[str, list[str]] = {}
    for name, spec in BUILT_IN_OBJECTIVES.items():
        names.setdefault(getattr(spec, trait), []).append(name)
    parts = [f"{value} for {', '.join(group)}" for value, group in names.items() if value != usual]
    return "; ".join([*parts, f"{usual} for the others"])
