"""The collapse watch: says early that a run has stopped learning, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from oncurve.records import StepReport

PATIENCE = 5
"""Steps in a row that must look bad before a word is said; and once as many look well, it may be said again."""


@dataclass(frozen=True, slots=True)
class CollapseRule:
    """A way for training to end in nothing: how it shows in a step's metrics, and what helps."""

    shows: Callable[[Mapping[str, float]], bool]
    message: str


COLLAPSE_RULES = {
    "entropy": CollapseRule(
        lambda m: m.get("entropy", 1.0) < 0.01,
        "entropy is {entropy:.3g} nats: completions of a prompt are all alike, and nothing new is tried. Lower "
        "optimiser.learning_rate, set kl.beta or entropy_bonus, or go on from before with `oncurve fork`",
    ),
    "easy": CollapseRule(
        lambda m: m.get("no_signal_share", 0.0) >= 1.0 and m.get("accuracy", 0.0) > 0.5,
        "no group has a signal, and {accuracy:.0%} of completions are right: the prompts are too easy now. Take harder ones, "
        "or stop here",
    ),
    "equal": CollapseRule(
        lambda m: m.get("no_signal_share", 0.0) >= 1.0 and "accuracy" not in m,
        "no group has a signal: equal rewards teach nothing. Take other prompts, a reward with finer steps, or a larger "
        "group_size (oncurve probe)",
    ),
    "hard": CollapseRule(
        lambda m: m.get("no_signal_share", 0.0) >= 1.0 and m.get("accuracy", 1.0) <= 0.5,
        "no group has a signal, and {accuracy:.0%} of completions are right: equal rewards teach nothing. Take easier "
        "prompts, a reward with steps between wrong and right, a larger group_size, or an sft stage first (oncurve probe)",
    ),
    "length": CollapseRule(
        lambda m: m.get("cut_share", 0.0) > 0.9,
        "{cut_share:.0%} of completions reach the length limit and are cut: they can't be graded as a whole. Raise "
        "sampling.max_new_tokens, set overlong.buffer, or mask_cut",
    ),
}


class CollapseWatch:
    """Looks at each step's report; a sign is told once when it has lasted."""

    def __init__(self) -> None:
        self.lasted: dict[str, int] = {}
        self.told: set[str] = set()

    def check(self, report: StepReport) -> list[str]:
        """What should be said after this step."""
        said = []
        for name, sign in COLLAPSE_RULES.items():
            shows = bool(report.groups) and sign.shows(report.metrics)
            count = self.lasted.get(name, 0)
            self.lasted[name] = max(1, count + 1) if shows else min(-1, count - 1)
            if self.lasted[name] <= -PATIENCE:
                self.told.discard(name)
            if self.lasted[name] >= PATIENCE and name not in self.told:
                self.told.add(name)
                said.append(f"{report.stage} {report.step}: " + sign.message.format(**report.metrics))
        return said
