"""The reward `reasoning_gym`: answers are scored by our own checks, else by the package's scorer inside of the sandbox.

The package's scorers are not safe: some execute the answer (`__import__("os").system(…)`), some never return (`9**9**9`), some
accept one and the same answer to every problem. `reasoning_gym_scorer` keeps them from executing anything, the sandbox limits
their time, and families whose scorer accepts too much have our own checks, at the end of this module.

Our own checks cover common families of reasoning-gym. They execute no part of an answer and give no partial credit. They are
stricter than the package's scorers, which accept numbers that are 1 off, texts that contain the right answer, and in four
families one answer to every problem (`6*4*1*1` in puzzle24, `nan` in complex_arithmetic, `0` in coin_flip, any text in
game_of_life_halting).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group, Prompt
from oncurve.rewards.base import Result, Score, missing_column, not_applicable, score_concurrently
from oncurve.rewards.sandbox.sandbox import Limits, Sandbox, find_sandbox
from oncurve.rewards.verifiers.answer import answers_equal, short
from oncurve.rewards.verifiers.answer_extraction import Take, answer_in
from oncurve.tasks.puzzles.expression import ExpressionError, parse

Columns = Mapping[str, Any]
_FRACTION = re.compile(r"\$?\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}\$?|\$?(-?[0-9]+)\s*/\s*([0-9]+)\$?")


def equal(answer: str, columns: Columns) -> bool:
    """The same number, or the same text."""
    return answers_equal(answer, str(columns["answer"]))


def equal_without_case(answer: str, columns: Columns) -> bool:
    return answers_equal(answer.lower(), str(columns["answer"]).lower())


def expression(answer: str, columns: Columns) -> bool:
    """Countdown: uses every number once and makes the target."""
    try:
        parsed = parse(answer)
    except ExpressionError:
        return False
    return Counter(parsed.numbers) == Counter(int(n) for n in columns["numbers"]) and parsed.value == int(columns["target"])


def items(text: str) -> list[str]:
    """The items of a list in any notation: with brackets, quotes, commas or spaces."""
    bare = re.sub(r"[\[\]()'\"]", " ", text)
    return [part.strip() for part in (bare.split(",") if "," in bare else bare.split())]


def equal_lists(answer: str, columns: Columns) -> bool:
    """The same items in the same order, as numbers or texts."""
    answer_items, gold_items = items(answer), items(str(columns["answer"]))
    return len(answer_items) == len(gold_items) and all(map(answers_equal, answer_items, gold_items))


def factors(answer: str, columns: Columns) -> bool:
    """The same factors in any order."""
    parts = re.split(r"\s*(?:×|\*|x|\\times|\\cdot)\s*", answer.strip().strip("$"))
    return all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts) and Counter(map(int, parts)) == Counter(
        int(factor) for factor in columns["factors"]
    )


def lowest_terms(answer: str, columns: Columns) -> bool:
    """The fraction in lowest terms; an equal one with other terms is wrong."""
    match = _FRACTION.fullmatch(answer.strip())
    if match is None:
        return False
    top, bottom = [group for group in match.groups() if group is not None]
    return (top, bottom) == (str(columns["simplified_numerator"]), str(columns["simplified_denominator"]))


def palindrome(answer: str, columns: Columns) -> bool:
    """A palindrome of exactly the given letters."""
    word = answer.strip().lower()
    return word == word[::-1] and Counter(word) == Counter(columns["letters"])


def twenty_four(answer: str, columns: Columns) -> bool:
    """An expression of exactly the four given numbers that makes 24."""
    return expression(answer, {"numbers": columns["numbers"], "target": 24})


def probability(answer: str, columns: Columns) -> bool:
    """The probability as a decimal or a fraction, off by at most 0.0001 and by at most a twentieth of it."""
    value, gold = (_as_fraction(text) for text in (answer, str(columns["answer"])))
    if value is None or gold is None:
        return False
    return abs(value - gold) <= min(Fraction(1, 10_000), gold / 20)


def _as_fraction(text: str) -> Fraction | None:
    match = re.fullmatch(r"\s*([0-9]{0,30})(\.[0-9]{1,30})?\s*(?:/\s*([0-9]{1,30}))?\s*", text)
    if match is None or not (match[1] or match[2]) or (match[3] is not None and int(match[3]) == 0):
        return None
    return Fraction((match[1] or "0") + (match[2] or "")) / int(match[3] or 1)


_COMPLEX = re.compile(r"(?P<real>[-+]?[0-9.]+)(?P<second>[-+][0-9.]*i)?|(?P<only>[-+]?[0-9.]*i)")


def complex_number(answer: str, columns: Columns) -> bool:
    """The same real and imaginary part, to a hundredth: `3.0 - 2.0i`, `3-2i`, `4i`."""
    value, gold = (_as_complex(text) for text in (answer, str(columns["answer"])))
    return value is not None and gold is not None and abs(value - gold) < 0.01


def _as_complex(text: str) -> complex | None:
    match = _COMPLEX.fullmatch(re.sub(r"\s", "", text).replace("−", "-").replace("j", "i"))
    if match is None:
        return None
    imaginary = (match["second"] or match["only"] or "0i").rstrip("i")
    try:
        return complex(float(match["real"] or 0), float(f"{imaginary}1" if imaginary in ("", "+", "-") else imaginary))
    except ValueError:
        return None


def hexadecimal(answer: str, columns: Columns) -> bool:
    """The same integer, with or without 0x."""
    number, gold = (re.fullmatch(r"(-?)(?:0x)?([0-9a-f]{1,40})", text.strip().lower()) for text in (answer, columns["answer"]))
    if number is None or gold is None:
        return False
    return number[1] == gold[1] and int(number[2], 16) == int(gold[2], 16)


CHECKS: dict[str, Callable[[str, Columns], bool]] = {
    "bitwise_arithmetic": hexadecimal,
    "calendar_arithmetic": equal_without_case,
    "chain_sum": equal,
    "coin_flip": probability,
    "complex_arithmetic": complex_number,
    "countdown": expression,
    "decimal_chain_sum": equal,
    "dice": equal,
    "fraction_simplification": lowest_terms,
    "game_of_life_halting": equal_without_case,
    "gsm_symbolic": equal,
    "letter_jumble": equal_without_case,
    "needle_haystack": equal_without_case,
    "number_sorting": equal_lists,
    "palindrome_generation": palindrome,
    "prime_factorization": factors,
    "products": equal,
    "puzzle24": twenty_four,
    "spell_backward": equal_without_case,
    "spiral_matrix": equal_lists,
    "string_insertion": equal,
    "word_sorting": equal_lists,
}
"""By family. One that is not listed and has no scorer of its own (gcd, lcm, leg_counting, basic_arithmetic …) uses `equal`."""


MAX_LENGTH = 5000
"""Characters of an answer; a longer one is wrong."""
SCORER = Path(__file__).with_name("reasoning_gym_scorer.py").read_text("utf-8")
"""The program that runs the package's scorer in the sandbox."""


class GymRewardOptions(Section):
    """1 for the right answer to a problem of the task `reasoning_gym`, else 0."""

    take: Take = "tag"
    """Where the answer is read from: `tag`, `boxed`, `hashes`, `number`, or `any`, the first of these that is present."""
    partial: bool = False
    """Use the partial credit of the package's scorers for wrong answers; if false, they get 0."""
    seconds: PositiveFloat = 10.0
    """Time limit of a scorer; an answer that exceeds it is wrong."""
    memory_mb: PositiveInt = 4096
    """Address space of a scorer."""
    workers: PositiveInt | None = None
    """Scorers that run concurrently; unset: one per core, at most 8."""


@dataclass(frozen=True)
class ReasoningGymReward:
    """1 for the right answer, else 0, or the package's partial credit if `partial` is set. Does not apply to prompts of other
    tasks."""

    name: str
    weight: float
    options: GymRewardOptions = field(default_factory=GymRewardOptions)
    is_async: bool = field(default=True, init=False)

    @cached_property
    def sandbox(self) -> Sandbox:
        """Started only when a family without our own check is first scored, because importing the package takes long."""
        return find_sandbox(f"rewards.{self.name}", count=self.options.workers, package="reasoning_gym")

    def missing_columns(self, prompt: Prompt) -> str | None:
        return missing_column(prompt, "gym", "family")

    def score(self, group: Group) -> list[Result]:
        columns = group.prompt.columns
        if "gym" not in columns or "family" not in columns:
            return not_applicable(group, "the prompt is not of the task reasoning_gym")
        check = CHECKS.get(columns["family"], None if columns["gym"].get("scorer") else equal)
        count = 1 if check is not None else self.sandbox.workers.count
        return score_concurrently(group, lambda completion: self._score(completion, columns, check), count)

    def _score(self, completion: Completion, columns: Any, check: Any) -> Score:
        answer = answer_in(completion.text, self.options.take)
        if answer is None:
            return Score(0.0, "no answer found")
        if check is not None:
            right = len(answer) <= MAX_LENGTH and check(answer, columns)
            return Score(float(right), f"{short(answer)} is {'right' if right else 'not right'}")
        if len(answer) > MAX_LENGTH:
            return Score(0.0, f"{short(answer)} is too long")
        return self._run_package_scorer(answer, columns)

    def _run_package_scorer(self, answer: str, columns: Any) -> Score:
        problem = columns["gym"]
        job = {"family": columns["family"], "seed": problem["seed"], "index": problem["index"], "settings": problem["settings"]}
        limits = Limits(self.options.seconds, self.options.memory_mb << 20)
        stdin = json.dumps({**job, "answer": answer})
        outcome = self.sandbox.run({"kind": "program", "program": SCORER, "stdin": stdin}, limits)
        ended, output = outcome["ended"], outcome["output"].strip()
        if ended == "time":
            return Score(0.0, f"{short(answer)} takes more than {self.options.seconds:g} s to judge")
        if ended != "exit 0":
            raise RuntimeError(f"the scorer of {columns['family']} ended in {ended}: {outcome['errors'][-200:]}")
        value = float(json.loads(output.rpartition("\n")[2])["score"])
        counted = value if self.options.partial or value >= 1 else 0.0
        return Score(min(1.0, max(0.0, counted)), f"{short(answer)} scores {value:g}")
