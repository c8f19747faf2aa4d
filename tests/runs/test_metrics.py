from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from oncurve.errors import RunError
from oncurve.recipe.schema.stages import Stage
from oncurve.runs.metrics import CURVES, MAIN_CURVES, METRICS, explain, find, is_repeatable

TRAINED = ["loss", "policy_loss", "grad_norm", "learning_rate", "skipped_updates", "epoch", "heldout_loss", "examples_seen"]
REWARDED = [
    "reward",
    "reward_std",
    "reward/answer",
    "accuracy",
    "samples_kept",
    "experiences",
    "changes",
    "heldout_with",
    "heldout_without",
    "heldout_reward_with",
    "heldout_reward_without",
    "comparisons",
    "reward_model_loss",
    "pass_at/8",
    "maj_at/8",
    "no_signal_share",
    "cut_share",
    "failure_share",
    "groups_resampled",
    "accuracy/sums",
    "pass_rate/1",
    "known_prompts",
    "no_signal_samples",
    "teacher_divergence",
]
ACTED = ["turns", "tool_calls", "tool_failure_share"]
WRITTEN = ["length_mean", "length_min", "length_max", "entropy", "sampled_entropy", "kl", "tokens"]
MOVED = [
    "clip_low_share",
    "clip_high_share",
    "clip_share",
    "ratio_mean",
    "ratio_max",
    "update_kl",
    "mismatch_kl",
    "mismatch_max",
    "mismatch_masked_share",
]
STALE = ["staleness", "staleness_max"]
CARRIED = ["carried_groups"]
CONTROLLED = ["entropy_bonus", "entropy_dropped_share", "loss_scale", "balance_loss"]
DRAFTED = ["tokens_per_pass", "tokens_per_row", "draft_accepted", "kv_reuse"]
CRITIC = ["value_loss", "value_clip_share", "explained_variance", "value_mean", "critic_grad_norm", "skipped_critic_updates"]
TRUSTED = ["step_kl", "step_gain", "step_share", "step_norm", "line_search_tries", "cg_residual"]
COMPARED = ["pair_accuracy", "pair_margin", "chosen_reward", "rejected_reward", "heldout_pair_accuracy", "calibration_error"]
PHASES = [f"seconds/{phase}" for phase in ("sample", "score", "grade", "update", "record", "eval", "save")]
MACHINE = ["tokens_per_s", "sample_tokens_per_s", "memory_mib", "update_tflops", "mfu", "cpu_seconds", *PHASES]
LOGGED = (
    TRAINED
    + REWARDED
    + ACTED
    + WRITTEN
    + MOVED
    + CRITIC
    + TRUSTED
    + COMPARED
    + MACHINE
    + STALE
    + DRAFTED
    + CARRIED
    + CONTROLLED
)


@pytest.mark.parametrize("name", LOGGED)
def test_every_metric_is_explained_in_one_sentence(name: str) -> None:
    metric = explain(name)
    assert metric.one_sentence.endswith(".")
    assert metric.one_sentence[:-1].count(". ") == 0
    assert metric.unit
    assert metric.healthy


def test_the_table_has_no_other_names() -> None:
    families = {name.partition("/")[0] + "/" for name in LOGGED if "/" in name}
    assert set(METRICS) == {name for name in LOGGED if "/" not in name} | families


def test_families_and_mistakes() -> None:
    assert explain("reward/my aspect").name == "reward/"
    assert explain("reward").name == "reward"
    with pytest.raises(RunError, match=r"no such metric \(did you mean 'grad_norm'\?\)"):
        explain("gradnorm")
    with pytest.raises(RunError):
        explain("loss/x")


def test_what_measures_the_machine_is_not_repeatable() -> None:
    assert [name for name in LOGGED if not is_repeatable(name)] == MACHINE + STALE + DRAFTED
    assert is_repeatable("something of a user's own")


@pytest.mark.parametrize("name", ["loss", "value_loss", "update_kl", "mismatch_max", "tool_failure_share", "calibration_error"])
def test_the_lowest_loss_kl_error_or_failure_share_is_the_best(name: str) -> None:
    assert explain(name).best == "lowest"


def test_what_falls_or_should_be_zero_is_never_best_at_its_highest() -> None:
    falling = [m.name for m in METRICS.values() if m.healthy.startswith(("falls", "below")) or m.healthy in ("0", "near 0")]
    assert len(falling) > 15
    assert [name for name in falling if explain(name).best == "highest"] == []


def test_every_drawn_metric_is_in_the_table() -> None:
    assert [name for name in CURVES if name not in METRICS] == []
    assert {name for names in MAIN_CURVES.values() for name in names} <= set(CURVES)
    assert set(MAIN_CURVES) == {stage.model_fields["type"].default for stage in get_args(get_args(Stage)[0])}


def test_every_chart_of_the_studio_draws_metrics_of_the_table() -> None:
    """The page has its own list of charts, in TypeScript."""
    source = (Path(__file__).parents[2] / "web" / "src" / "runs" / "charts.ts").read_text("utf-8")
    charts = source[source.index("export const CHARTS") :]
    charts = charts[: charts.index("\n];")]
    names = [name for names in re.findall(r"metrics: \[(.*?)\]", charts) for name in re.findall(r'"([^"]+)"', names)]
    names += re.findall(r'(?:spread|low|high): "([^"]+)"', charts)
    assert len(names) > 20
    assert [name for name in names if find(name) is None] == []
