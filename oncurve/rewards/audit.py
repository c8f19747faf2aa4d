"""Signals in a run that a person should look at. None of them proves anything: each says what was seen, and where.

Change is between the first third of a stage's steps and its last; a run of fewer than 6 steps is too short to speak of any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from oncurve.records import EvalReport, GradedGroup, ScoredCompletion
from oncurve.rewards.style.length import repeated_share
from oncurve.rewards.verifiers.answer_extraction import answer_in, without_thinking

SHORTEST_RUN = 6
MOST_EXAMPLES = 3


@dataclass(frozen=True)
class AuditedCompletion:
    """One completion of the run, and where it stands. ``above`` is its reward over its group's mean, 0 where it has none."""

    step: int
    group: int
    prompt: str
    scored: ScoredCompletion
    above: float

    @property
    def text(self) -> str:
        return self.scored.completion.text


@dataclass(frozen=True)
class AuditFinding:
    """Something worth a look: what was seen, in words that claim no more, and completions to look at."""

    name: str
    what: str
    examples: tuple[AuditedCompletion, ...] = ()


@dataclass(frozen=True)
class History:
    """A stage as the audit reads it: every completion, and the measurements on held-out prompts."""

    completions: tuple[AuditedCompletion, ...]
    evals: tuple[EvalReport, ...] = ()
    decider: str | None = None
    steps: tuple[int, ...] = field(default=())

    @classmethod
    def of(cls, steps: Sequence[tuple[int, Sequence[GradedGroup]]], evals: Sequence[EvalReport]) -> History:
        """From what was recorded: no reward need be built again. What is solved is said by the aspect named `answer`, else by
        the first of weight above 0."""
        seen = [
            s
            for step, groups in steps
            for place, graded in enumerate(groups)
            for s in _audited_completions(step, place, graded)
        ]
        weights = {a.name: a.weight for s in seen for a in s.scored.aspects}
        decider = "answer" if "answer" in weights else next((name for name, weight in weights.items() if weight > 0), None)
        return cls(tuple(seen), tuple(evals), decider, tuple(step for step, _ in steps))

    def third(self, last: bool) -> list[AuditedCompletion]:
        size = len(self.steps) // 3
        kept = set(self.steps[-size:] if last else self.steps[:size])
        return [s for s in self.completions if s.step in kept]

    def change(self, value: Callable[[AuditedCompletion], float | None]) -> tuple[float, float]:
        """The mean of something in the first third and in the last."""
        parts = [[v for s in self.third(last) if (v := value(s)) is not None] for last in (False, True)]
        return float(np.mean(parts[0] or [0.0])), float(np.mean(parts[1] or [0.0]))


def _audited_completions(step: int, place: int, graded: GradedGroup) -> Iterator[AuditedCompletion]:
    totals = [t for t in graded.scored.totals if t is not None]
    mean = float(np.mean(totals)) if totals else 0.0
    for scored in graded.scored.scored:
        above = 0.0 if scored.total is None else scored.total - mean
        yield AuditedCompletion(step, place, graded.group.prompt.shown, scored, above)


def audit(history: History) -> list[AuditFinding]:
    """Every signal that this run shows; none where nothing stands out."""
    found: list[AuditFinding] = []
    if len(history.steps) >= SHORTEST_RUN:
        for look in (_reward_without_accuracy, _length, _repetition, _aspect_alone):
            found += look(history)
    for look in (_copies, _no_reasoning, _one_string, _at_odds, _inconsistent):
        found += look(history)
    return found


def _reward_without_accuracy(history: History) -> list[AuditFinding]:
    before, after = history.change(lambda s: s.scored.total)
    measured = [report.accuracy for report in history.evals if report.accuracy is not None]
    spread = float(np.std([s.scored.total for s in history.completions if s.scored.total is not None] or [0.0]))
    if len(measured) < 2 or after - before <= 0.25 * spread or measured[-1] > measured[0] + 0.01:
        return []
    held_out = f"held-out accuracy went from {measured[0]:.1%} to {measured[-1]:.1%}"
    what = f"the reward went from {before:.3g} to {after:.3g} while {held_out}"
    return [AuditFinding("reward up, accuracy not", what, _best(history.third(True)))]


def _length(history: History) -> list[AuditFinding]:
    before, after = history.change(lambda s: float(s.scored.completion.length))
    if after < 1.5 * before or after - before < 8:
        return []
    longest = sorted(history.third(True), key=lambda s: -s.scored.completion.length)
    what = f"completions went from {before:.0f} to {after:.0f} tokens on average"
    return [AuditFinding("length", what, tuple(longest[:MOST_EXAMPLES]))]


def _repeats(seen: AuditedCompletion) -> float:
    return repeated_share(seen.text.split(), 3)


def _repetition(history: History) -> list[AuditFinding]:
    before, after = history.change(_repeats)
    if after < 0.1 or after < 2 * before:
        return []
    worst = sorted(history.third(True), key=_repeats, reverse=True)
    what = f"repeated word triples went from {before:.0%} to {after:.0%}"
    return [AuditFinding("repetition", what, tuple(worst[:MOST_EXAMPLES]))]


def _aspect_alone(history: History) -> list[AuditFinding]:
    """An aspect that rises by itself: a judge or reward model that the policy has learnt to please."""
    if history.decider is None:
        return []
    base = history.change(lambda s: _aspect(s, history.decider))
    found = []
    for name in _aspect_names(history):
        before, after = history.change(lambda s, name=name: _aspect(s, name))  # type: ignore[misc]
        values = [v for s in history.completions if (v := _aspect(s, name)) is not None]
        rose = after - before > 0.5 * float(np.std(values or [0.0])) > 0
        if name != history.decider and rose and base[1] <= base[0] + 0.01:
            beside = f"'{history.decider}' went from {base[0]:.3g} to {base[1]:.3g}"
            what = f"'{name}' went from {before:.3g} to {after:.3g} while {beside}"
            top = sorted(history.third(True), key=lambda s, name=name: -(_aspect(s, name) or 0.0))  # type: ignore[misc]
            found.append(AuditFinding("drift", what, tuple(top[:MOST_EXAMPLES])))
    return found


def _copies(history: History) -> list[AuditFinding]:
    copies = [s for s in history.completions if s.above > 0 and len(s.prompt) >= 20 and s.prompt.strip() in s.text]
    if len(copies) < 0.05 * len(history.completions) or not copies:
        return []
    what = f"{len(copies)} completions that hold a copy of their prompt were rewarded above their group"
    return [AuditFinding("copies of the prompt", what, tuple(copies[:MOST_EXAMPLES]))]


def _no_reasoning(history: History) -> list[AuditFinding]:
    """Thinking that is there in form only, where others of the run do think."""
    thought = [(s, len(_thinking(s.text).split())) for s in history.completions]
    usual = float(np.median([words for _, words in thought] or [0]))
    bare = [s for s, words in thought if s.above > 0 and words <= 2 and answer_in(s.text, "any") is not None]
    if usual < 3 or len(bare) < max(3, 0.02 * len(thought)):
        return []
    what = f"{len(bare)} rewarded completions answer with at most two words of reasoning; {usual:.0f} are usual"
    return [AuditFinding("answers without reasoning", what, tuple(bare[:MOST_EXAMPLES]))]


def _thinking(text: str) -> str:
    """What comes before the answer: what was thought, or where nothing is marked so, what was said first."""
    if "</think>" in text:
        return text.partition("</think>")[0].removeprefix("<think>")
    spoken = without_thinking(text)
    ends = [place for mark in ("<answer>", "\\boxed", "####") if (place := spoken.find(mark)) >= 0]
    return spoken[: min(ends)] if ends else spoken


def _one_string(history: History) -> list[AuditFinding]:
    prompts: dict[str, set[str]] = defaultdict(set)
    first: dict[str, AuditedCompletion] = {}
    for s in history.completions:
        if s.above > 0:
            prompts[s.text].add(s.prompt)
            first.setdefault(s.text, s)
    common = sorted(prompts, key=lambda text: -len(prompts[text]))[:MOST_EXAMPLES]
    asked = len({s.prompt for s in history.completions})
    often = [text for text in common if len(prompts[text]) >= max(5, 0.05 * asked)]
    if not often:
        return []
    what = f"one text was rewarded above its group for {len(prompts[often[0]])} different prompts"
    return [AuditFinding("one string for many prompts", what, tuple(first[text] for text in often))]


def _at_odds(history: History) -> list[AuditFinding]:
    """Two aspects that pull apart: within groups, more of one goes with less of the other."""
    names, found = _aspect_names(history), []
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            r = _within_groups(history, one, other)
            if r is not None and r < -0.5:
                what = f"'{one}' and '{other}' are at odds: their correlation within groups is {r:.2f}"
                found.append(AuditFinding("aspects at odds", what))
    return found


def _within_groups(history: History, one: str, other: str) -> float | None:
    groups: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for s in history.completions:
        a, b = _aspect(s, one), _aspect(s, other)
        if a is not None and b is not None:
            groups[s.step, s.group].append((a, b))
    parts = [np.asarray(pairs) - np.mean(pairs, axis=0) for pairs in groups.values() if len(pairs) > 1]
    pooled = np.concatenate(parts) if parts else np.zeros((0, 2))
    if len(pooled) < 20 or min(pooled.std(axis=0)) < 1e-9:
        return None
    return float(np.corrcoef(pooled.T)[0, 1])


def _inconsistent(history: History) -> list[AuditFinding]:
    """The same completion of the same prompt, graded twice and otherwise: a judge of moods, or a reward that rolls dice."""
    found = []
    for name in _aspect_names(history):
        seen: dict[tuple[str, str], list[AuditedCompletion]] = defaultdict(list)
        for s in history.completions:
            if _aspect(s, name) is not None:
                seen[s.prompt, s.text].append(s)
        apart = [same for same in seen.values() if len({_aspect(s, name) for s in same}) > 1]
        if apart:
            what = f"'{name}' gave the same completion different values, {len(apart)} times"
            found.append(AuditFinding("a reward of moods", what, tuple(apart[0][:MOST_EXAMPLES])))
    return found


def _aspect(seen: AuditedCompletion, name: str | None) -> float | None:
    return next((aspect.value for aspect in seen.scored.aspects if aspect.name == name), None)


def _aspect_names(history: History) -> list[str]:
    return sorted({aspect.name for s in history.completions for aspect in s.scored.aspects if aspect.value is not None})


def _best(seen: Sequence[AuditedCompletion]) -> tuple[AuditedCompletion, ...]:
    return tuple(sorted(seen, key=lambda s: -s.above)[:MOST_EXAMPLES])
