"""`oncurve rewards audit`: signs of reward hacking in a run, with completions to look at. None of them is a proof.

Changes are measured between the first and the last third of a stage's steps, if it has at least 6.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from oncurve.records import EvalReport, GradedGroup, ScoredCompletion
from oncurve.rewards.style.length import repeated_share
from oncurve.rewards.verifiers.answer_extraction import answer_in, without_thinking

MIN_STEPS = 6
"""Below this many steps a change over the run is not measured."""
MAX_EXAMPLES = 3
MIN_FAILURE_SHARE = 0.01
MIN_CONTRADICTED_SHARE = 0.05
MIN_CONSTANT = 16
"""Below this many completions equal scores may be chance."""


@dataclass(frozen=True)
class AuditedCompletion:
    """One completion of the run. ``above`` is its reward minus its group's mean; 0 if it has no reward."""

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
    """One sign: what was measured, and completions to look at.

    Example: ``AuditFinding("length", "completions went from 40 to 95 tokens on average", examples)``
    """

    name: str
    what: str
    examples: tuple[AuditedCompletion, ...] = ()


@dataclass(frozen=True)
class History:
    """A stage as the audit reads it: every completion, and the evaluations on held-out prompts."""

    completions: tuple[AuditedCompletion, ...]
    evals: tuple[EvalReport, ...] = ()
    accuracy_aspects: tuple[str, ...] = ()
    steps: tuple[int, ...] = field(default=())

    @classmethod
    def of(
        cls, steps: Sequence[tuple[int, Sequence[GradedGroup]]], evals: Sequence[EvalReport], accuracy_aspects: Sequence[str]
    ) -> History:
        """From a stage's stored records, without building a reward. ``accuracy_aspects`` are those in
        which 1 means correct; if none of them was recorded, correctness is unknown."""
        completions = [
            completion
            for step, groups in steps
            for index, graded in enumerate(groups)
            for completion in _audited_completions(step, index, graded)
        ]
        recorded = {aspect.name for s in completions for aspect in s.scored.aspects}
        accuracy = tuple(name for name in accuracy_aspects if name in recorded)
        return cls(tuple(completions), tuple(evals), accuracy, tuple(step for step, _ in steps))

    @property
    def accuracy_name(self) -> str:
        return " or ".join(f"'{name}'" for name in self.accuracy_aspects)

    def correctness(self, completion: AuditedCompletion) -> float | None:
        """The score of the accuracy aspect of its task: 1 is correct. None if it has none."""
        scores = (_aspect(completion, name) for name in self.accuracy_aspects)
        return next((score for score in scores if score is not None), None)

    def third(self, last: bool) -> list[AuditedCompletion]:
        size = len(self.steps) // 3
        steps = set(self.steps[-size:] if last else self.steps[:size])
        return [s for s in self.completions if s.step in steps]

    def change(self, value: Callable[[AuditedCompletion], float | None]) -> tuple[float, float]:
        """The mean of a value in the first third of the steps and in the last."""
        first, last = ([v for s in self.third(is_last) if (v := value(s)) is not None] for is_last in (False, True))
        return float(np.mean(first or [0.0])), float(np.mean(last or [0.0]))


def _audited_completions(step: int, index: int, graded: GradedGroup) -> Iterator[AuditedCompletion]:
    totals = [t for t in graded.scored.totals if t is not None]
    mean = float(np.mean(totals)) if totals else 0.0
    for scored in graded.scored.scored:
        above = 0.0 if scored.total is None else scored.total - mean
        yield AuditedCompletion(step, index, graded.group.prompt.shown, scored, above)


def audit(history: History) -> list[AuditFinding]:
    """Every sign of reward hacking that the history shows."""
    findings: list[AuditFinding] = []
    if len(history.steps) >= MIN_STEPS:
        for check in (_reward_without_accuracy, _length, _repetition, _aspect_alone):
            findings += check(history)
    for check in (_failing, _constant, _prefers_wrong, _copies, _no_reasoning, _one_string, _at_odds, _inconsistent):
        findings += check(history)
    return findings


def _failing(history: History) -> list[AuditFinding]:
    """A reward that often raises an error: those completions are not trained on."""
    findings = []
    for name in sorted({aspect.name for s in history.completions for aspect in s.scored.aspects}):
        failures = [(s, aspect.failure) for s in history.completions for aspect in s.scored.aspects if aspect.name == name]
        failed = [(s, failure) for s, failure in failures if failure is not None]
        if len(failed) >= max(1, MIN_FAILURE_SHARE * len(failures)):
            common, _ = Counter(failure for _, failure in failed).most_common(1)[0]
            share = f"{len(failed)} of {len(failures)} completions ({100 * len(failed) / len(failures):.1f} %)"
            what = f"'{name}' failed on {share}, most often with: {common}"
            findings.append(AuditFinding("failing reward", what, tuple(s for s, _ in failed[:MAX_EXAMPLES])))
    return findings


def _constant(history: History) -> list[AuditFinding]:
    """A reward that gave every completion the same score."""
    findings = []
    for name in _aspect_names(history):
        scored = [s for s in history.completions if any(a.name == name and a.weight != 0 for a in s.scored.aspects)]
        values = {value for s in scored if (value := _aspect(s, name)) is not None}
        if len(scored) >= MIN_CONSTANT and len(values) == 1:
            what = f"'{name}' gave all {len(scored)} audited completions the score {values.pop():g}, so it adds no signal"
            findings.append(AuditFinding("constant reward", what, tuple(scored[:MAX_EXAMPLES])))
    return findings


def _prefers_wrong(history: History) -> list[AuditFinding]:
    """A total reward that contradicts the verifiable one: within a group, wrong completions get more than right ones."""
    groups: dict[tuple[int, int], list[AuditedCompletion]] = defaultdict(list)
    for s in history.completions:
        if s.scored.total is not None and history.correctness(s) is not None:
            groups[s.step, s.group].append(s)
    mixed = 0
    contradicted: list[AuditedCompletion] = []
    for group in groups.values():
        right = [s for s in group if (history.correctness(s) or 0.0) >= 1]
        wrong = [s for s in group if (history.correctness(s) or 0.0) < 1]
        if right and wrong:
            mixed += 1
            if np.mean([s.above for s in wrong]) > np.mean([s.above for s in right]) + 1e-9:
                contradicted.append(max(wrong, key=lambda s: s.above))
    if len(contradicted) < max(1, MIN_CONTRADICTED_SHARE * mixed):
        return []
    share = f"{len(contradicted)} of {mixed} groups with right and wrong completions ({100 * len(contradicted) / mixed:.0f} %)"
    what = f"in {share} the reward was higher for the wrong ones, by {history.accuracy_name}"
    return [AuditFinding("reward contradicts correctness", what, _best(contradicted))]


def _reward_without_accuracy(history: History) -> list[AuditFinding]:
    before, after = history.change(lambda s: s.scored.total)
    accuracies = [report.accuracy for report in history.evals if report.accuracy is not None]
    spread = float(np.std([s.scored.total for s in history.completions if s.scored.total is not None] or [0.0]))
    if len(accuracies) < 2 or after - before <= 0.25 * spread or accuracies[-1] > accuracies[0] + 0.01:
        return []
    held_out = f"held-out accuracy went from {100 * accuracies[0]:.1f} % to {100 * accuracies[-1]:.1f} %"
    what = f"the reward went from {before:.3g} to {after:.3g} while {held_out}"
    return [AuditFinding("reward up, accuracy not", what, _best(history.third(True)))]


def _length(history: History) -> list[AuditFinding]:
    before, after = history.change(lambda s: float(s.scored.completion.length))
    if after < 1.5 * before or after - before < 8:
        return []
    longest = sorted(history.third(True), key=lambda s: -s.scored.completion.length)
    what = f"completions went from {before:.0f} to {after:.0f} tokens on average"
    return [AuditFinding("length", what, tuple(longest[:MAX_EXAMPLES]))]


def _repeats(completion: AuditedCompletion) -> float:
    return repeated_share(completion.text.split(), 3)


def _repetition(history: History) -> list[AuditFinding]:
    before, after = history.change(_repeats)
    if after < 0.1 or after < 2 * before:
        return []
    worst = sorted(history.third(True), key=_repeats, reverse=True)
    what = f"repeated word triples went from {100 * before:.0f} % to {100 * after:.0f} %"
    return [AuditFinding("repetition", what, tuple(worst[:MAX_EXAMPLES]))]


def _aspect_alone(history: History) -> list[AuditFinding]:
    """An aspect that rises while accuracy does not: a judge or reward model that the policy exploits. Both are measured on the
    completions that have a score for each. In a mix of tasks, an aspect is thus compared with the accuracy of its own task."""
    findings = []
    for name in _aspect_names(history):
        judged = [s for s in history.completions if _aspect(s, name) is not None and history.correctness(s) is not None]
        both = replace(history, completions=tuple(judged))
        if name in history.accuracy_aspects or not (both.third(False) and both.third(True)):
            continue
        before, after = both.change(lambda s, name=name: _aspect(s, name))  # type: ignore[misc]
        accuracy_before, accuracy_after = both.change(history.correctness)
        rose = after - before > 0.5 * float(np.std([_aspect(s, name) or 0.0 for s in judged])) > 0
        if rose and accuracy_after <= accuracy_before + 0.01:
            meanwhile = f"{history.accuracy_name} went from {accuracy_before:.3g} to {accuracy_after:.3g}"
            what = f"'{name}' went from {before:.3g} to {after:.3g} while {meanwhile}"
            top = sorted(both.third(True), key=lambda s, name=name: -(_aspect(s, name) or 0.0))  # type: ignore[misc]
            findings.append(AuditFinding("drift", what, tuple(top[:MAX_EXAMPLES])))
    return findings


def _copies(history: History) -> list[AuditFinding]:
    copies = [s for s in history.completions if s.above > 0 and len(s.prompt) >= 20 and s.prompt.strip() in s.text]
    if len(copies) < 0.05 * len(history.completions) or not copies:
        return []
    what = f"{len(copies)} completions that contain their prompt were rewarded above their group's mean"
    return [AuditFinding("copies of the prompt", what, tuple(copies[:MAX_EXAMPLES]))]


def _no_reasoning(history: History) -> list[AuditFinding]:
    """Answers with almost no reasoning, in a run whose other completions do reason."""
    word_counts = [(s, len(_thinking(s.text).split())) for s in history.completions]
    median = float(np.median([words for _, words in word_counts] or [0]))
    bare = [s for s, words in word_counts if s.above > 0 and words <= 2 and answer_in(s.text, "any") is not None]
    if median < 3 or len(bare) < max(3, 0.02 * len(word_counts)):
        return []
    what = f"{len(bare)} rewarded completions answer with at most two words of reasoning; the median is {median:.0f}"
    return [AuditFinding("answers without reasoning", what, tuple(bare[:MAX_EXAMPLES]))]


def _thinking(text: str) -> str:
    """The reasoning of a completion: its think block, or the text before the answer if it has none."""
    if "</think>" in text:
        return text.partition("</think>")[0].removeprefix("<think>")
    visible = without_thinking(text)
    answers = [start for mark in ("<answer>", "\\boxed", "####") if (start := visible.find(mark)) >= 0]
    return visible[: min(answers)] if answers else visible


def _one_string(history: History) -> list[AuditFinding]:
    prompts: dict[str, set[str]] = defaultdict(set)
    first: dict[str, AuditedCompletion] = {}
    for s in history.completions:
        if s.above > 0:
            prompts[s.text].add(s.prompt)
            first.setdefault(s.text, s)
    common = sorted(prompts, key=lambda text: -len(prompts[text]))[:MAX_EXAMPLES]
    prompt_count = len({s.prompt for s in history.completions})
    frequent = [text for text in common if len(prompts[text]) >= max(5, 0.05 * prompt_count)]
    if not frequent:
        return []
    what = f"the same text was rewarded above its group's mean for {len(prompts[frequent[0]])} different prompts"
    return [AuditFinding("one string for many prompts", what, tuple(first[text] for text in frequent))]


def _at_odds(history: History) -> list[AuditFinding]:
    """Two aspects that are negatively correlated within groups."""
    names, findings = _aspect_names(history), []
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            correlation = _correlation_within_groups(history, name, other)
            if correlation is not None and correlation < -0.5:
                what = f"'{name}' and '{other}' are at odds: their correlation within groups is {correlation:.2f}"
                findings.append(AuditFinding("aspects at odds", what))
    return findings


def _correlation_within_groups(history: History, name: str, other: str) -> float | None:
    groups: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for s in history.completions:
        a, b = _aspect(s, name), _aspect(s, other)
        if a is not None and b is not None:
            groups[s.step, s.group].append((a, b))
    centred = [np.asarray(pairs) - np.mean(pairs, axis=0) for pairs in groups.values() if len(pairs) > 1]
    pooled = np.concatenate(centred) if centred else np.zeros((0, 2))
    if len(pooled) < 20 or min(pooled.std(axis=0)) < 1e-9:
        return None
    return float(np.corrcoef(pooled.T)[0, 1])


def _inconsistent(history: History) -> list[AuditFinding]:
    """A reward that scored the same completion of the same prompt differently: a nondeterministic judge or function."""
    findings = []
    for name in _aspect_names(history):
        equal: dict[tuple[str, str], list[AuditedCompletion]] = defaultdict(list)
        for s in history.completions:
            if _aspect(s, name) is not None:
                equal[s.prompt, s.text].append(s)
        differing = [same for same in equal.values() if len({_aspect(s, name) for s in same}) > 1]
        if differing:
            what = f"'{name}' scored the same completion differently, {len(differing)} times"
            findings.append(AuditFinding("inconsistent reward", what, tuple(differing[0][:MAX_EXAMPLES])))
    return findings


def _aspect(completion: AuditedCompletion, name: str) -> float | None:
    return next((aspect.value for aspect in completion.scored.aspects if aspect.name == name), None)


def _aspect_names(history: History) -> list[str]:
    return sorted({aspect.name for s in history.completions for aspect in s.scored.aspects if aspect.value is not None})


def _best(completions: Sequence[AuditedCompletion]) -> tuple[AuditedCompletion, ...]:
    return tuple(sorted(completions, key=lambda s: -s.above)[:MAX_EXAMPLES])
