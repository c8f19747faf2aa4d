"""The collapse watch: warns early that a run has stopped learning, and says what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from oncurve.errors import troubleshooting
from oncurve.recipe.schema.stages import Stage
from oncurve.records import StepReport

PATIENCE = 5
"""Steps in a row that must look bad before a warning, and good before the warning may be repeated."""

NEARLY_ALL = 0.9
"""If this fraction of a step's completions is correct, a low entropy is what success looks like, and there is no warning."""


@dataclass(frozen=True, slots=True)
class CollapseRule:
    """One way for training to collapse: its sign in a step's metrics, and what helps."""

    is_bad: Callable[[Mapping[str, float]], bool]
    message: str
    """With the names of metrics in braces."""
    section: str
    """The section of docs/troubleshooting.md that the warning names."""


COLLAPSE_RULES = {
    "entropy": CollapseRule(
        lambda m: m.get("sampled_entropy", 1.0) < 0.01 and m.get("accuracy", 0.0) < NEARLY_ALL,  # a correct policy is sure too
        "entropy is {sampled_entropy} nats: all completions of a prompt are alike, and nothing new is tried. Lower "
        "optimiser.learning_rate, set kl.beta or entropy_bonus, or continue from an earlier step with `oncurve fork`",
        "Entropy collapses",
    ),
    "easy": CollapseRule(
        lambda m: m.get("no_signal_share", 0.0) >= 1.0 and m.get("accuracy", 0.0) > 0.5,
        "no group has a signal, and {accuracy} of completions are correct: the prompts are too easy now, or a reward gives "
        "every text the same score (`oncurve rewards audit` shows this). Use harder ones, fix the reward, or stop here",
        "Groups have no signal",
    ),
    "equal": CollapseRule(
        lambda m: m.get("no_signal_share", 0.0) >= 1.0 and "accuracy" not in m,
        "no group has a signal: its rewards are all equal. If a reward gives every text the same score (`oncurve rewards audit`"
        " shows this), fix it; otherwise use other prompts, a finer-grained reward, or a larger group_size (oncurve probe)",
        "Groups have no signal",
    ),
    "hard": CollapseRule(
        lambda m: m.get("no_signal_share", 0.0) >= 1.0 and m.get("accuracy", 1.0) <= 0.5,
        "no group has a signal, and {accuracy} of completions are correct: all rewards of a group are equal. Check with "
        "`oncurve rewards try` that a right text is scored as right. If it is, use easier prompts, a reward with partial "
        "credit, a larger group_size, or an sft stage first (oncurve probe)",
        "Groups have no signal",
    ),
    "length": CollapseRule(
        lambda m: m.get("cut_share", 0.0) > 0.9,
        "{cut_share} of completions are truncated at the length limit: their answers are missing. Raise "
        "sampling.max_new_tokens, or set overlong.buffer or mask_cut",
        "Lengths explode",
    ),
}


def _shown(name: str, value: float) -> str:
    """A metric in a message: a share as a percentage, the entropy with three digits."""
    return f"{value:.3g}" if name == "sampled_entropy" else f"{100 * value:.0f} %"


MIN_LEARNING_RATE = 1e-8
"""A stage with a lower rate gets a warning: Adam's updates are about as large as the rate, and 1e-8 is less than the rounding
of most float32 weights, so the policy stays as it is. The smallest rate in common use for GRPO is 1e-7."""
MAX_LEARNING_RATE = 1e-2
"""A stage with a higher rate gets a warning: with Adam, one such update is as large as a typical weight, whose size is about
0.02 (the usual std at initialisation). The largest rates in common use, for tiny models trained from scratch, are 3e-3."""


def learning_rate_warning(stage: Stage) -> str | None:
    """The warning for a stage whose learning rate is too small to change the policy, or so large that it destroys it; None if
    there is nothing to say."""
    rate = getattr(getattr(stage, "optimiser", None), "learning_rate", None)
    if rate is None or MIN_LEARNING_RATE <= rate <= MAX_LEARNING_RATE:
        return None
    if rate < MIN_LEARNING_RATE:
        effect, section = "hardly changes the weights", "The reward is flat"
    else:
        effect, section = "makes each update as large as the weights themselves, or larger", "The policy moves too far"
    usual = "1e-6 suits full fine-tuning, 1e-5 to 2e-5 LoRA, 1e-3 the tiny model"
    return f"{stage.label}: optimiser.learning_rate = {rate:g} {effect}. {usual}; {troubleshooting(section)}"


class CollapseWatch:
    """Checks each step's report. A rule warns once it has held for `PATIENCE` steps. The first failed reward of a stage
    warns at once."""

    def __init__(self) -> None:
        self.streaks: dict[str, int] = {}
        """By rule: bad steps in a row, or, if negative, good ones."""
        self.warned: set[str] = set()
        self.stages_with_failures: set[str] = set()

    def check(self, report: StepReport) -> list[str]:
        """The warnings to give after this step."""
        warnings = self._failed_rewards(report)
        shown = {name: _shown(name, value) for name, value in report.metrics.items()}
        for name, rule in COLLAPSE_RULES.items():
            is_bad = bool(report.groups) and rule.is_bad(report.metrics)
            streak = self.streaks.get(name, 0)
            self.streaks[name] = max(1, streak + 1) if is_bad else min(-1, streak - 1)
            if self.streaks[name] <= -PATIENCE:
                self.warned.discard(name)
            if self.streaks[name] >= PATIENCE and name not in self.warned:
                self.warned.add(name)
                advice = f"{rule.message.format(**shown)}; {troubleshooting(rule.section)}"
                warnings.append(f"{report.stage} {report.step}: {advice}")
        return warnings

    def _failed_rewards(self, report: StepReport) -> list[str]:
        """The warning at the first step of a stage in which a reward failed, with the first error."""
        if not report.metrics.get("failure_share") or report.stage in self.stages_with_failures:
            return []
        failures = [s.failure for graded in report.groups for s in graded.scored.scored if s.failure is not None]
        if not failures:
            return []
        self.stages_with_failures.add(report.stage)
        completions = sum(len(graded.scored.scored) for graded in report.groups)
        pairs = [pair for group in report.groups for pair in zip(group.scored.scored, group.graded, strict=True)]
        left_out = " and are left out of their groups" if any(s.failure and not kept for s, kept in pairs) else ""
        return [
            f"{report.stage} {report.step}: {len(failures)} of {completions} completions could not be rewarded{left_out}. "
            f"The first error is: {failures[0]}; {troubleshooting('Rewards fail')}"
        ]
