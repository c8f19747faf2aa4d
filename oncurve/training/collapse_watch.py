"""The collapse watch: warns early that a run has stopped learning, and says what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from oncurve.records import StepReport

PATIENCE = 5
"""Steps in a row that must look bad before a warning, and look well before it may be repeated."""


@dataclass(frozen=True, slots=True)
class CollapseRule:
    """One way for training to collapse: its sign in a step's metrics, and what helps."""

    is_bad: Callable[[Mapping[str, float]], bool]
    message: str


COLLAPSE_RULES = {
    "entropy": CollapseRule(
        lambda m: m.get("sampled_entropy", 1.0) < 0.01,
        "entropy is {sampled_entropy:.3g} nats: all completions of a prompt are alike, and nothing new is tried. Lower "
        "optimiser.learning_rate, set kl.beta or entropy_bonus, or continue from an earlier step with `oncurve fork`",
    ),
    "easy": CollapseRule(
        lambda m: m.get("no_signal_share", 0.0) >= 1.0 and m.get("accuracy", 0.0) > 0.5,
        "no group has a signal, and {accuracy:.0%} of completions are correct: the prompts are too easy now. Use harder ones, "
        "or stop here",
    ),
    "equal": CollapseRule(
        lambda m: m.get("no_signal_share", 0.0) >= 1.0 and "accuracy" not in m,
        "no group has a signal: its rewards are all equal. Use other prompts, a finer-grained reward, or a larger group_size "
        "(oncurve probe)",
    ),
    "hard": CollapseRule(
        lambda m: m.get("no_signal_share", 0.0) >= 1.0 and m.get("accuracy", 1.0) <= 0.5,
        "no group has a signal, and {accuracy:.0%} of completions are correct: all rewards of a group are equal. Use "
        "easier prompts, a reward with partial credit, a larger group_size, or an sft stage first (oncurve probe)",
    ),
    "length": CollapseRule(
        lambda m: m.get("cut_share", 0.0) > 0.9,
        "{cut_share:.0%} of completions are truncated at the length limit: their answers are missing. Raise "
        "sampling.max_new_tokens, or set overlong.buffer or mask_cut",
    ),
}


class CollapseWatch:
    """Checks each step's report. A rule warns once it has held for `PATIENCE` steps."""

    def __init__(self) -> None:
        self.streaks: dict[str, int] = {}
        """By rule: bad steps in a row, or, if negative, good ones."""
        self.warned: set[str] = set()

    def check(self, report: StepReport) -> list[str]:
        """The warnings to give after this step."""
        warnings = []
        for name, rule in COLLAPSE_RULES.items():
            is_bad = bool(report.groups) and rule.is_bad(report.metrics)
            streak = self.streaks.get(name, 0)
            self.streaks[name] = max(1, streak + 1) if is_bad else min(-1, streak - 1)
            if self.streaks[name] <= -PATIENCE:
                self.warned.discard(name)
            if self.streaks[name] >= PATIENCE and name not in self.warned:
                self.warned.add(name)
                warnings.append(f"{report.stage} {report.step}: " + rule.message.format(**report.metrics))
        return warnings
