"""Small runs of every kind, made in milliseconds, and folders that are not runs."""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from oncurve.algos.advantages import grade
from oncurve.recipe.load import dump_recipe, parse_recipe
from oncurve.records import (
    Aspect,
    Completion,
    EvalReport,
    Group,
    Prompt,
    ScoredCompletion,
    ScoredGroup,
    StepReport,
    TokenStats,
)
from oncurve.runs.database.row_codec import bool_blob, float_blob, int_blob
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder, Status

GROUP = 4
PROMPTS = 3
WORDS = ("right", "plain", "wrong", "odd")
HOSTILE = "<img src=x onerror=alert(1)><b>bold</b>"
TEXTS = {
    "right": "<think>1+2</think><answer>3</answer>",
    "plain": "3",
    "wrong": "<think>hm</think><answer>4</answer>",
    "odd": HOSTILE,
}
VALUES = {"right": (1.0, 1.0), "plain": (1.0, 0.0), "wrong": (0.0, 1.0), "odd": (0.0, 0.0)}


RECIPE = {
    "name": "sums",
    "task": {"type": "arithmetic"},
    "rewards": [{"type": "answer"}, {"type": "format", "weight": 0.1}],
    "stages": [{"type": "grpo", "group_size": GROUP, "prompts_per_step": PROMPTS, "kl": {"beta": 0.01}}],
}


def completion(text: str, seed: int, stop: str = "end") -> Completion:
    """One token per character or tag, and the end token, as in the built-in tokenizer."""
    rng = np.random.default_rng(seed)
    parts = re.findall(r"</?(?:think|answer)>|[\s\S]", text)
    count = len(parts) + 1
    logps = -rng.random(count, dtype=np.float32)
    ids = np.array([*(ord(part[-2:][0]) for part in parts), 1], dtype=np.int64)
    return Completion(ids, text, "length" if stop == "length" else "end", logps, logps, logps, np.ones(count, np.bool_))


def scored(prompt: Prompt, kinds: tuple[str, ...], seed: int) -> ScoredGroup:
    completions = []
    for index, kind in enumerate(kinds):
        answer, form = VALUES.get(kind, (0.0, 0.0))
        aspects: tuple[Aspect, ...] = (
            Aspect("answer", answer, 1.0, reason="'3' is right" if answer else "'4' is not '3'"),
            Aspect("format", form, 0.1),
        )
        if kind == "failed":
            aspects = (Aspect("answer", None, 1.0, failure="ValueError: no number here"), aspects[1])
        if kind == "steps":
            aspects = (*aspects, Aspect("process", None, 1.0, steps=((2, 0.5), (5, -1.0))))
        text = TEXTS.get(kind, f"{kind} {index}")
        sampled = completion(text, 100 * seed + index, "length" if kind == "cut" else "end")
        completions.append(ScoredCompletion(sampled, aspects))
    return ScoredGroup(Group(prompt, np.arange(4), tuple(s.completion for s in completions)), tuple(completions))


def random_group(seed: int, size: int = 5) -> ScoredGroup:
    """A group with every trait that a grading can have: each kind of aspect, failures, truncation, tokens of others."""
    rng = np.random.default_rng(seed)
    completions = []
    for index in range(size):
        sampled = completion("x" * int(rng.integers(4, 9)), 100 * seed + index, "length" if rng.random() < 0.3 else "end")
        count = len(sampled.token_ids)
        mask = np.ones(count, np.bool_)
        mask[1] = rng.random() < 0.6
        aspects: list[Aspect] = []
        if seed % 3 != 1:
            aspects.append(Aspect("answer", float(rng.integers(0, 3)), 1.0))
        if seed % 3 != 0:
            steps = tuple(
                (end, float(rng.normal())) for end in sorted(rng.choice(count, int(rng.integers(0, 3)), replace=False))
            )
            aspects.append(Aspect("process", None, 0.5, steps=tuple((int(end), reward) for end, reward in steps)))
        if rng.random() < 0.2:
            aspects[0] = Aspect("answer", None, 1.0, failure="ValueError: no number here")
        completions.append(ScoredCompletion(replace(sampled, loss_mask=mask), tuple(aspects)))
    prompt = Prompt(f"random/{seed}", text="?")
    return ScoredGroup(Group(prompt, np.arange(4), tuple(s.completion for s in completions)), tuple(completions))


def stats(one: ScoredCompletion, seed: int, moved: float) -> TokenStats:
    rng = np.random.default_rng(seed)
    count = len(one.completion.token_ids)
    ratio = np.exp(rng.normal(0.0, 0.2, count)).astype(np.float32)
    kl = (moved * rng.random(count)).astype(np.float32)
    return TokenStats(one.completion.logps, ratio, rng.random(count, dtype=np.float32), ratio > 1.2, kl)


def step_report(step: int, kinds: tuple[str, ...] = WORDS, first: int = 2) -> StepReport:
    """Three groups: a usual one, one without signal, one with a failure, a truncated completion and step rewards."""
    prompts = [Prompt(f"sums/{n}", text=f"1+{n}=", columns={"answer": str(1 + n)}) for n in (first, 2 + step, 50)]
    groups = [
        scored(prompts[0], kinds, step),
        scored(prompts[1], ("wrong",) * GROUP, step + 1),
        scored(prompts[2], ("right", "failed", "cut", "steps"), step + 2),
    ]
    graded = grade(groups, baseline="mean", scale="group", eps=1e-4, mask_cut=False)
    token_stats = [
        [stats(one, step, 0.01 * step) for one in group.scored] if group is not groups[1] else [None] * GROUP
        for group in groups
    ]
    reward = float(np.mean([t for group in groups for t in group.totals if t is not None]))
    metrics = {
        "reward": reward + 0.01 * step,
        "reward_std": 0.2,
        "accuracy": 0.4,
        "reward/answer": 0.4,
        "reward/format": 0.5,
        "kl": 0.01 * step,
        "entropy": 1 / step,
        "clip_low_share": 0.01,
        "clip_high_share": 0.02,
        "length_mean": 20.0 + step,
        "length_min": 2.0,
        "length_max": 40.0,
        "no_signal_share": 1 / 3,
        "mismatch_kl": 1e-7,
        "tokens_per_s": 900.0,
        "memory_mib": 512.0,
        "loss": math.nan if step == 2 else 0.01,
    }
    return StepReport("grpo", step, metrics, {"sample": 0.5, "update": 0.25}, tuple(graded), tuple(map(tuple, token_stats)))


def eval_report(step: int, accuracy: float) -> EvalReport:
    groups = tuple(scored(Prompt(f"sums/held/{n}", text=f"9+{n}="), (kind,), n) for n, kind in enumerate(("right", "wrong")))
    return EvalReport("grpo", step, accuracy, 2, {"1 digit": (1, 2)}, {}, groups)


def make_free_run(runs_dir: Path, name: str) -> RunFolder:
    """A run without a verifiable reward: its two evaluations have a reward and no accuracy."""
    run = make_run(runs_dir, name)
    with RunWriter.open(run.path) as store:
        for step, reward in ((0, -1.25), (4, 0.5)):
            store.record_eval(EvalReport("grpo", step, None, 2, {}, {"reward": reward}, eval_report(step, 0.0).groups))
    return run


def make_run(runs_dir: Path, name: str, steps: int = 4, finished: bool = True, sets: tuple[str, ...] = ()) -> RunFolder:
    run = RunFolder.create_at(runs_dir / name)
    run.write_recipe(dump_recipe(parse_recipe(RECIPE, [f"grpo.steps={max(steps, 8)}", *sets])))
    with RunWriter.create(run.path) as store:
        store.begin_stage("grpo", "grpo", 0, max(steps, 8))
        for step in range(1, steps + 1):
            store.record_step(step_report(step))
        store.record_eval(eval_report(steps, 0.5))
        if finished:
            store.end_stage("grpo")
    run.set_status("finished" if finished else "running")
    return run


def make_broken(runs_dir: Path) -> None:
    """Folders that are not runs, and runs that are damaged."""
    (runs_dir / "foreign").mkdir()
    (runs_dir / "foreign" / "notes.txt").write_text("not a run")
    torn = make_run(runs_dir, "torn")
    torn.database.write_bytes(torn.database.read_bytes()[:5000])
    for leftover in torn.path.glob("run.db-*"):
        leftover.unlink()
    (runs_dir / "bad-json").mkdir()
    (runs_dir / "bad-json" / "run.json").write_text("{")
    newer = make_run(runs_dir, "newer")
    (newer.path / "run.json").write_text((newer.path / "run.json").read_text().replace('"format": 1', '"format": 99'))
    empty = make_run(runs_dir, "no-database")
    empty.database.unlink()


def make_stage_run(
    runs_dir: Path, name: str, stages: Sequence[tuple[str, str, dict[str, float]]], *, status: Status = "finished"
) -> RunFolder:
    """A run of (stage name, type, metrics) with three steps each, all with one group of four."""
    run = RunFolder.create_at(runs_dir / name)
    run.write_recipe(dump_recipe(parse_recipe(RECIPE, [])))
    with RunWriter.create(run.path) as store:
        for position, (stage, type_, metrics) in enumerate(stages):
            store.begin_stage(stage, type_, position, 3)
            for step in range(1, 4):
                report = step_report(step)
                groups, stats_of = (report.groups, report.stats) if type_ in ("grpo", "ppo", "trpo") else ((), ())
                store.record_step(StepReport(stage, step, metrics, {"update": 0.1}, groups, stats_of))
            store.end_stage(stage)
    run.set_status(status)
    return run


LARGE_PROMPTS, LARGE_GROUP = 62, 8


def make_large_run(runs_dir: Path, name: str, steps: int, token_steps: range) -> RunFolder:
    """A run of 62 groups of 8 at every step, written by SQL: 1 completion in 50,000 has failed, a prompt is asked 25 times.

    Only the groups of ``token_steps`` have tokens, and can be opened: a token for each character, for each tag and for the end.
    """
    run = make_run(runs_dir, name, steps=1)
    groups = (steps - 1) * LARGE_PROMPTS
    numbers = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {} - 1)"
    script = f"""
    PRAGMA synchronous = OFF;
    BEGIN;
    {numbers.format(steps - 1)} INSERT INTO steps SELECT 'grpo', i + 2, 1.0, 1.0 FROM n;
    INSERT INTO metrics SELECT 'grpo', step, name, value + step * 1e-4 FROM steps
        JOIN (SELECT name, value FROM metrics WHERE step = 1) WHERE step > 1;
    {numbers.format(groups)} INSERT INTO groups SELECT 1000 + i, 'grpo', 2 + i / {LARGE_PROMPTS}, 'train', i % {LARGE_PROMPTS},
        'sums/' || (i % {groups // 25}), '1+' || i || '=', NULL, '{{}}', x'00000000', i % 3 > 0 FROM n;
    {numbers.format(groups * LARGE_GROUP)} INSERT INTO completions SELECT 1000 + i, 1000 + i / {LARGE_GROUP}, i % {LARGE_GROUP},
        text, 'end', length(text) - 27, signal * (i % 2), 1, CASE WHEN i % 50000 = 7 THEN 'answer: ValueError' END,
        signal * (i % 2 - 0.5)
        FROM (SELECT i, i / {LARGE_GROUP} % 3 > 0 AS signal,
            '<think>some words of thought ' || i || '</think><answer>' || (i % 97) || '</answer>' AS text FROM n);
    INSERT INTO aspects SELECT id, 0, 'answer', total, 1.0, NULL, NULL, NULL FROM completions WHERE id >= 1000;
    INSERT INTO aspects SELECT id, 1, 'format', (id % 40000) > 3, 0.1, NULL, NULL, NULL FROM completions WHERE id >= 1000;
    COMMIT;
    """
    with closing(sqlite3.connect(run.database)) as database:
        database.executescript(script)
        database.execute(INSERT_TOKENS, {"first": token_steps.start, "end": token_steps.stop, **_token_arrays()})
        database.commit()
    return run


INSERT_TOKENS = """
INSERT INTO tokens SELECT completions.id, substr(:ids, 1 + 4 * at, 4 * length), NULL, substr(:logps, 1 + 4 * at, 4 * length),
    NULL, NULL, CASE WHEN advantage > 0 THEN :up WHEN advantage < 0 THEN :down ELSE :none END,
    substr(:logps, 1 + 4 * at, 4 * length), substr(:ratios, 1 + 4 * at, 4 * length), substr(:entropies, 1 + 4 * at, 4 * length),
    substr(:clipped, 1 + at, length), substr(:kls, 1 + 4 * at, 4 * length)
FROM groups JOIN (SELECT *, id % 1000 AS at FROM completions) AS completions ON group_id = groups.id
WHERE groups.id >= 1000 AND step >= :first AND step < :end
"""
"""A completion's arrays are a piece of the arrays of `_token_arrays`."""


def _token_arrays() -> dict[str, bytes]:
    rng, count = np.random.default_rng(0), 1100
    ratios = np.exp(rng.normal(0.0, 0.2, count))
    return {
        "ids": int_blob(rng.integers(97, 123, count)),
        "logps": float_blob(-rng.random(count, dtype=np.float32)),
        "ratios": float_blob(ratios.astype(np.float32)),
        "entropies": float_blob(rng.random(count, dtype=np.float32)),
        "clipped": bool_blob(ratios > 1.2),
        "kls": float_blob(0.01 * rng.random(count, dtype=np.float32)),
        "up": float_blob(np.array([0.5], np.float32)),
        "down": float_blob(np.array([-0.5], np.float32)),
        "none": float_blob(np.array([0.0], np.float32)),
    }
