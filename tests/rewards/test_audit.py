"""Each sign on a run constructed to show it, and none on a healthy run."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from oncurve.records import Aspect, EvalReport, GradedGroup, Prompt, ScoredCompletion, ScoredGroup
from oncurve.rewards.audit import History, audit
from tests.rewards.builders import completion, group

Cell = tuple[str, dict[str, float]]
PROMPT = "What is the sum of twelve and thirty-four?"


def graded(prompt: str, cells: list[Cell]) -> GradedGroup:
    sampled = replace(group(*(text for text, _ in cells)), prompt=Prompt(id=prompt, text=prompt))
    sampled = replace(sampled, completions=tuple(completion(text, len(text.split())) for text, _ in cells))
    scored = [
        ScoredCompletion(c, tuple(Aspect(name, value) for name, value in values.items()))
        for c, (_, values) in zip(sampled.completions, cells, strict=True)
    ]
    zeros = tuple(np.zeros(len(c.token_ids), np.float32) for c in sampled.completions)
    return GradedGroup(ScoredGroup(sampled, tuple(scored)), zeros, (True,) * len(cells))


def history(
    cells: Callable[[int, int], list[Cell]],
    accuracies: tuple[float, ...] = (),
    prompts: int = 4,
    steps: int = 9,
    accuracy_aspects: tuple[str, ...] = ("answer",),
) -> History:
    steps_and_groups = [
        (step, [graded(f"{PROMPT} ({n})", cells(step, n)) for n in range(prompts)]) for step in range(1, steps + 1)
    ]
    evals = [EvalReport("grpo", step, accuracy, 10, {}) for step, accuracy in enumerate(accuracies)]
    return History.of(steps_and_groups, evals, accuracy_aspects)


def thought(step: int, n: int, i: int) -> str:
    return f"<think>we add number {step} and {n} then {i} and carry</think><answer>{step + n * 7 + i}</answer>"


def healthy(step: int, n: int) -> list[Cell]:
    return [(thought(step, n, i), {"answer": float(i < 1 + step // 4), "format": float((i + n) % 2)}) for i in range(4)]


def names(recorded: History) -> set[str]:
    return {signal.name for signal in audit(recorded)}


def test_a_healthy_run() -> None:
    assert names(history(healthy, (0.4, 0.6, 0.8))) == set()


def test_reward_up_and_accuracy_not() -> None:
    (signal,) = audit(history(healthy, (0.6, 0.6)))
    assert signal.name == "reward up, accuracy not"
    assert "held-out accuracy went from 60.0 % to 60.0 %" in signal.what
    assert len(signal.examples) == 3


def changed(change: Callable[[str, int, int], str]) -> Callable[[int, int], list[Cell]]:
    return lambda step, n: [(change(text, step, i), values) for i, (text, values) in enumerate(healthy(step, n))]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("length", lambda text, step, i: " ".join(f"w{k}" for k in range(5 * step)) + text),
        ("repetition", lambda text, step, i: text + " so it goes" * step),
        ("copies of the prompt", lambda text, step, i: f"{PROMPT} (0) {PROMPT} (1) {PROMPT} (2) {PROMPT} (3){text}"),
        ("answers without reasoning", lambda text, step, i: f"<think></think><answer>{step}</answer>" if i == 0 else text),
        (
            "one string for many prompts",
            lambda text, step, i: "<think>I just always say the same</think>yes" if i == 0 else text,
        ),
    ],
)
def test_signs_in_the_texts(name: str, change: Callable[[str, int, int], str]) -> None:
    assert name in names(history(changed(change), prompts=6))


def test_aspects_at_odds() -> None:
    recorded = history(
        lambda step, n: [(thought(step, n, i), {"answer": float(i % 2), "brief": 1.0 - i % 2}) for i in range(4)]
    )
    assert "aspects at odds" in names(recorded)


def test_an_aspect_that_rises_alone() -> None:
    recorded = history(
        lambda step, n: [(thought(step, n, i), {"answer": float(i % 2), "judge": step / 10 + i / 50}) for i in range(4)]
    )
    (signal,) = [s for s in audit(recorded) if s.name == "drift"]
    assert signal.what.startswith("'judge' went from ")


def test_a_task_of_a_mix_that_improves_is_no_drift() -> None:
    """Sums are right as often as before, and countdowns more often. A judge of sums only that rises alone is still found."""

    def cells(step: int, n: int) -> list[Cell]:
        if n % 2:
            return [(thought(step, n, i), {"countdown": float(i < step // 2)}) for i in range(4)]
        return [(thought(step, n, i), {"sums": float(i % 2), "judge": step / 10 + i / 50}) for i in range(4)]

    drifts = [s.what for s in audit(history(cells, accuracy_aspects=("sums", "countdown"))) if s.name == "drift"]
    assert [what.partition(" went")[0] for what in drifts] == ["'judge'"]
    assert "'sums' or 'countdown' went from 0.5 to 0.5" in drifts[0]


def test_without_a_verifiable_reward_correctness_is_unknown() -> None:
    rising = history(lambda step, n: [(thought(step, n, i), {"format": 1.0, "judge": step / 10 + i / 50}) for i in range(4)])
    assert "drift" not in names(rising)


def test_an_inconsistent_reward() -> None:
    recorded = history(
        lambda step, n: [(thought(0, n, i), {"answer": float(i % 2), "judge": (step + i) % 3}) for i in range(4)]
    )
    assert "inconsistent reward" in names(recorded)


def test_a_run_too_short_to_measure_a_change() -> None:
    assert names(history(healthy, (0.6, 0.6), steps=3)) == set()


def test_a_reward_that_always_gives_the_same_score() -> None:
    """At 0, at 1, and next to one that varies; one of weight 0 is only watched."""
    for score in (0.0, 1.0):
        constant = history(
            lambda step, n, score=score: [(text, {**values, "style": score}) for text, values in healthy(step, n)]  # type: ignore[misc]
        )
        (signal,) = audit(constant)
        assert (signal.name, f"the score {score:g}" in signal.what) == ("constant reward", True)
    everything = history(lambda step, n: [(text, {"answer": 0.0}) for text, _ in healthy(step, n)])
    assert names(everything) == {"constant reward"}


def test_a_reward_that_fails() -> None:
    """One completion in eight; the finding names the commonest error. One failure among 144 is below a hundredth."""

    def with_failures(every: int) -> History:
        recorded = history(healthy)
        failed = (Aspect("answer", None, failure="ValueError: no number"),)
        completions = [
            replace(s, scored=replace(s.scored, aspects=failed)) if i % every == 0 else s
            for i, s in enumerate(recorded.completions)
        ]
        return replace(recorded, completions=tuple(completions))

    finding = next(finding for finding in audit(with_failures(8)) if finding.name == "failing reward")
    assert "18 of 144 completions (12.5 %)" in finding.what
    assert "ValueError: no number" in finding.what
    assert "failing reward" not in names(with_failures(1000))


def test_a_reward_that_prefers_wrong_answers() -> None:
    """A learned reward against an answer of weight 0 that is only watched: in every fourth group it prefers a wrong answer."""

    def cells(step: int, n: int) -> list[Cell]:
        better = 0.0 if n == 0 else 2.0
        rights = [float(i < 2) for i in range(4)]
        return [
            (thought(step, n, i), {"answer": 0.0 * right, "model": better * right + 0.1 * i}) for i, right in enumerate(rights)
        ]

    def watched(recorded: History) -> History:
        """Answer 1 for the first two of each group, at weight 0."""
        return replace(
            recorded,
            completions=tuple(
                replace(s, scored=replace(s.scored, aspects=(Aspect("answer", float(i % 4 < 2), 0.0), s.scored.aspects[1])))
                for i, s in enumerate(recorded.completions)
            ),
        )

    finding = next(finding for finding in audit(watched(history(cells))) if finding.name == "reward contradicts correctness")
    assert "9 of 36 groups with right and wrong completions (25 %)" in finding.what
    assert all(example.above > 0 for example in finding.examples)
