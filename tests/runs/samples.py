"""Made-up steps of every shape that the database must store, and a comparison of every bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from oncurve.records import (
    Aspect,
    Completion,
    EpisodeRecord,
    EvalReport,
    Floats,
    GradedGroup,
    Group,
    Observation,
    Outcome,
    Prompt,
    ScoredCompletion,
    ScoredGroup,
    StepReport,
    StopReason,
    TokenStats,
    ToolCall,
)


def completion(rng: np.random.Generator, length: int, index: int) -> Completion:
    """Every third has different log-probs, every fourth contains tokens of an environment, every sixth is of two sequences."""
    logps = -rng.random(length, dtype=np.float32)
    apart = -rng.random(length, dtype=np.float32) if index % 3 == 0 else logps
    mask = rng.random(length) < 0.7 if index % 4 == 3 else np.ones(length, dtype=np.bool_)
    ids = rng.integers(0, 200_000, length)
    contexts = ((0, rng.integers(0, 200_000, 3)), (length // 2, rng.integers(0, 200_000, 5))) if index % 6 == 5 else ()
    stop: StopReason = "length" if index % 5 == 4 else "end"
    episode = episode_record(length) if index % 4 == 1 else None
    return Completion(ids, f"<answer>{index}</answer> ✓", stop, logps, apart, logps, mask, None, episode, contexts)


def episode_record(length: int) -> EpisodeRecord:
    """Every kind of reply, a call that failed, and an outcome."""
    calls = (ToolCall("search", {"query": "tea"}, "3 kinds", None, 0.25), ToolCall("unknown", "[1", "no JSON", "not JSON"))
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
    turns = (
        (0, 1, Observation(({"role": "tool", "content": "3 kinds"},), message, calls, 0.5)),
        (1, 2, Observation("go on ✓")),
        (2, 3, Observation(np.arange(3))),
        (3, length, Observation(None, failure="hung")),
    )
    return EpisodeRecord(turns, Outcome(0.25, None))


def aspects(rng: np.random.Generator, index: int) -> tuple[Aspect, ...]:
    answer = Aspect("answer", float(rng.integers(0, 2)), 1.0, reason="compared as a number")
    if index % 7 == 6:
        answer = Aspect("answer", None, 1.0, failure="ZeroDivisionError: division by zero")
    process = Aspect("process", None, 0.5, steps=((2, 0.1), (4, -1.0)))
    return (answer, Aspect("format", 0.1 * index, 0.2), process, Aspect("watched", None, 0.0))


def scored_group(rng: np.random.Generator, number: int, size: int, length: int) -> ScoredGroup:
    scored = tuple(ScoredCompletion(completion(rng, length, index), aspects(rng, index)) for index in range(size))
    columns = {"answer": "46", "difficulty": "2 digits", "numbers": [1, 2.5, None]}
    prompt = Prompt(f"arithmetic/train/{number}", text=f"{number}+34=", columns=columns)
    if number % 2:
        prompt = Prompt(f"arithmetic/train/{number}", messages=({"role": "user", "content": f"{number}?"},), columns=columns)
    return ScoredGroup(Group(prompt, rng.integers(0, 500, 9), tuple(s.completion for s in scored)), scored)


def token_stats(rng: np.random.Generator, length: int, with_kl: bool) -> TokenStats:
    def draw() -> Floats:
        return rng.random(length, dtype=np.float32)

    return TokenStats(draw(), draw(), draw(), rng.random(length) < 0.1, draw() if with_kl else None)


def step_report(stage: str, step: int, *, prompts: int = 3, size: int = 8, length: int = 7) -> StepReport:
    """A function of the step's number, so that a repeated step is the same. The first group has no signal."""
    rng = np.random.default_rng(step)
    groups, stats = [], []
    for number in range(prompts):
        scored = scored_group(rng, 100 * step + number, size, length)
        constant = [np.full(length, rng.normal(), np.float32) for _ in range(size)]
        varied = [rng.normal(size=length).astype(np.float32) for _ in range(size)]
        advantages = [np.zeros(length, np.float32)] * size if number == 0 else constant if number % 2 else varied
        groups.append(GradedGroup(scored, tuple(advantages), tuple(s.total is not None for s in scored.scored)))
        stats.append([token_stats(rng, length, index % 2 == 0) if number else None for index in range(size)])
    metrics = {"reward": float(rng.random()), "loss": float("nan") if step % 4 == 3 else 0.25, "tokens_per_s": 100.0 / step}
    return StepReport(stage, step, metrics, {"sample": 0.5, "update": 0.25}, tuple(groups), tuple(stats))


def eval_report(stage: str, step: int, accuracy: float = 0.5) -> EvalReport:
    rng = np.random.default_rng(1000 + step)
    groups = tuple(scored_group(rng, number, 1, 4) for number in range(2))
    return EvalReport(stage, step, accuracy, 2, {"2 digits": (1, 2)}, {"length_mean": 4.0, "tokens_per_s": 3.0}, groups)


def same(left: Any, right: Any) -> bool:
    """Equal in every field, array bit and type, at any depth. A list equals a tuple of the same elements."""
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if dataclasses.is_dataclass(left):
        fields = [field.name for field in dataclasses.fields(left)]
        return type(left) is type(right) and all(same(getattr(left, name), getattr(right, name)) for name in fields)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right) or (left != left and right != right)
