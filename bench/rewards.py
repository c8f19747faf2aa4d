"""Cost of rewards: math answers compared with a plain loop over math-verify, programs in the sandbox, and scoring during
sampling.

    python bench/rewards.py [--answers 10000] [--programs 400]

Answers are measured twice: with the repeats that groups have (8 completions per prompt, few different answers), and all
different. Nothing is cached between the two sides: the plain loop parses and verifies each pair as a user of math-verify would.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from oncurve.records import Completion, Group, Prompt
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.sandbox.sandbox import Limits
from oncurve.rewards.verifiers.code import CodeOptions, CodeReward
from oncurve.rewards.verifiers.math import MathReward

GROUP = 8
Pair = tuple[str, str]


KINDS = (
    (r"\frac{%d}{7}", "%d/7", "%d/9"),
    (r"\sqrt{%d}", r"%d^{1/2}", r"%d^{1/3}"),
    (r"x^2+%dx", r"x(x+%d)", r"x^2-%dx"),
    (r"(%d,\infty)", r"x>%d", r"[%d,\infty)"),
)
"""The gold, another spelling of it, and something else: fractions, roots, polynomials, intervals."""


def pairs_with_repeats(count: int) -> list[Pair]:
    """Groups of 8: five right answers in two spellings and three wrong ones, over 200 prompts of four kinds."""
    places = (0, 1, 0, 0, 1, 2, 2, 2)
    numbered = ((2 + (i // GROUP) % 200, KINDS[i // GROUP % len(KINDS)], places[i % GROUP]) for i in range(count))
    return [(kind[0] % n, kind[place] % n) for n, kind, place in numbered]


def pairs_without(count: int) -> list[Pair]:
    """A different number each time, alternately right and wrong."""
    return [(kind[0] % n, kind[1 + n % 2] % n) for n in range(2, count + 2) for kind in [KINDS[n % len(KINDS)]]]


def plainly(pairs: list[Pair]) -> int:
    from math_verify import parse, verify

    return sum(bool(verify(parse(f"${gold}$"), parse(f"${answer}$"))) for gold, answer in pairs)


def grouped(pairs: list[Pair]) -> list[Group]:
    """Completions with eight answers per prompt."""
    zeros = np.zeros(1, np.float32)
    groups = []
    for start in range(0, len(pairs), GROUP):
        gold = pairs[start][0]
        texts = [f"<answer>{answer}</answer>" for g, answer in pairs[start : start + GROUP] if g == gold]
        mask = np.ones(1, np.bool_)
        completions = tuple(Completion(np.zeros(1, np.int64), text, "end", zeros, zeros, zeros, mask) for text in texts)
        groups.append(Group(Prompt(f"p{start}", "?", columns={"answer": gold}), np.zeros(1, np.int64), completions))
    return groups


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def bench_math(name: str, pairs: list[Pair], sample: int) -> None:
    """Time the plain loop on a sample of the pairs, and ours on all of them with started workers and an empty cache."""
    reward = MathReward("math", 1.0)
    warm = timed(lambda: reward.verdicts([(rf"\sqrt{{{n}}}", f"{n}^{{1/2}}") for n in range(20_000, 20_040)]))
    plainly(pairs[:20])
    plain = timed(lambda: plainly(pairs[:sample])) / sample
    ours = timed(lambda: reward.verdicts(pairs)) / len(pairs)
    rate = f"{1 / plain:8.0f}/s plain   {1 / ours:8.0f}/s here   {plain / ours:6.1f}×"
    print(f"math, {len(pairs)} answers, {name:<14}{rate}   (workers started in {warm:.1f} s)")


def bench_code(count: int) -> None:
    reward = CodeReward("code", 1.0, CodeOptions())
    jobs = {
        "empty program": {"kind": "program", "program": ""},
        "empty program, one test": {"kind": "tests", "program": "def f(): return 1", "tests": ["assert f() == 1"]},
    }
    print(reward.log_lines[0])
    for name, job in jobs.items():
        ask = lambda _, job=job: reward.sandbox.run(job, Limits())  # noqa: E731
        with ThreadPoolExecutor(reward.sandbox.workers.count) as pool:
            list(pool.map(ask, range(8)))
            seconds = timed(lambda ask=ask, pool=pool: list(pool.map(ask, range(count))))  # type: ignore[misc]
        print(f"code, {name:<28}{count / seconds:8.0f}/s   {1000 * seconds / count:.1f} ms each")


def bench_overlap(count: int, sampling: float = 0.1) -> None:
    """Groups that arrive one by one from a sampler (it sleeps here, as the CPU does while a GPU samples), graded meanwhile.

    Both sides grade pairs that were never seen before.
    """
    mix = RewardMix([MathReward("math", 1.0)])
    numbers = [(n, k) for n in range(1, count + 1) for k in range(2, 2 + GROUP)]
    fresh = [[(rf"\sqrt{{{d * n}}}", rf"\sqrt{{{d * n + k}}}") for n, k in numbers] for d in (1000, 1001)]

    def after(groups: list[Group]) -> None:
        time.sleep(sampling * len(groups))
        mix.score(groups)

    def beside(groups: list[Group]) -> None:
        for group in groups:
            time.sleep(sampling)
            mix.prefetch(group)
        mix.score(groups)

    late, meanwhile = (timed(lambda: after(grouped(fresh[0]))), timed(lambda: beside(grouped(fresh[1]))))
    workload = f"{count} groups of {GROUP} that take {count * sampling:.1f} s to sample"
    print(f"sampling and grading {workload}: {late:.2f} s one after the other, {meanwhile:.2f} s overlapped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--programs", type=int, default=400)
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    bench_math("with repeats", pairs_with_repeats(chosen.answers), min(chosen.answers, 1000))
    few = min(chosen.answers, 2000)  # nothing is cached here, so fewer answers are enough
    bench_math("all different", pairs_without(few), min(few, 500))
    bench_code(chosen.programs)
    bench_overlap(30)


if __name__ == "__main__":
    main()
