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
    asked = replace(group(*(text for text, _ in cells)), prompt=Prompt(id=prompt, text=prompt))
    asked = replace(asked, completions=tuple(completion(text, len(text.split())) for text, _ in cells))
    scored = [
        ScoredCompletion(c, tuple(Aspect(name, value) for name, value in values.items()))
        for c, (_, values) in zip(asked.completions, cells, strict=True)
    ]
    zeros = tuple(np.zeros(len(c.token_ids), np.float32) for c in asked.completions)
    return GradedGroup(ScoredGroup(asked, tuple(scored)), zeros, (True,) * len(cells))


def history(
    cells: Callable[[int, int], list[Cell]], accuracies: tuple[float, ...] = (), prompts: int = 4, steps: int = 9
) -> History:
    made = [(step, [graded(f"{PROMPT} ({n})", cells(step, n)) for n in range(prompts)]) for step in range(1, steps + 1)]
    evals = [EvalReport("grpo", step, accuracy, 10, {}) for step, accuracy in enumerate(accuracies)]
    return History.of(made, evals)


def thought(step: int, n: int, i: int) -> str:
    return f"<think>we add number {step} and {n} then {i} and carry</think><answer>{step + n * 7 + i}</answer>"


def healthy(step: int, n: int) -> list[Cell]:
    return [(thought(step, n, i), {"answer": float(i < 1 + step // 4), "format": float((i + n) % 2)}) for i in range(4)]


def names(made: History) -> set[str]:
    return {signal.name for signal in audit(made)}


def test_a_healthy_run() -> None:
    assert names(history(healthy, (0.4, 0.6, 0.8))) == set()


def test_reward_up_and_accuracy_not() -> None:
    (signal,) = audit(history(healthy, (0.6, 0.6)))
    assert signal.name == "reward up, accuracy not"
    assert "held-out accuracy went from 60.0% to 60.0%" in signal.what
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
    made = history(lambda step, n: [(thought(step, n, i), {"answer": float(i % 2), "brief": 1.0 - i % 2}) for i in range(4)])
    assert "aspects at odds" in names(made)


def test_an_aspect_that_rises_alone() -> None:
    made = history(
        lambda step, n: [(thought(step, n, i), {"answer": float(i % 2), "judge": step / 10 + i / 50}) for i in range(4)]
    )
    (signal,) = [s for s in audit(made) if s.name == "drift"]
    assert signal.what.startswith("'judge' went from ")


def test_an_inconsistent_reward() -> None:
    made = history(lambda step, n: [(thought(0, n, i), {"answer": float(i % 2), "judge": (step + i) % 3}) for i in range(4)])
    assert "inconsistent reward" in names(made)


def test_a_run_too_short_to_measure_a_change() -> None:
    assert names(history(healthy, (0.6, 0.6), steps=3)) == set()
