r"""The reward `math`: 1 if `math-verify` finds answer and gold mathematically equal, else 0.

Fractions, roots, sets, intervals, matrices, equations and units are compared by meaning. Equal texts, numbers, letters and
words are compared here; the rest goes to worker processes with a hard time limit, each pair only once.

Choices, each with a test: of several `\boxed{}` the last counts; a list of numbers without separators is no answer
(math-verify would take the last one), and neither are two numbers in a sentence; a bare `\frac12` is read as a formula; `50\%`
equals 50 and not 0.5; words are compared ignoring case, `\text{}` and the brackets around a letter.
"""

from __future__ import annotations

import importlib.util
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from pydantic import PositiveFloat, PositiveInt

from oncurve.errors import MissingPackage, pip_install
from oncurve.recipe.schema.base import Section
from oncurve.records import Group, Prompt
from oncurve.rewards.base import Result, Score, missing_column, not_applicable
from oncurve.rewards.verifiers import answer as plain
from oncurve.rewards.verifiers.answer_extraction import Take, answer_in
from oncurve.workers.pool import Workers, python_workers, shared

MAX_DEPTH = 30
"""Nested brackets of an answer; one with more is wrong unless it is spelt like the gold answer."""
MAX_LENGTH = 2000
"""Characters of an answer; a longer one is wrong unless it is spelt like the gold answer, because parsing it would take too
long."""
MAX_CACHED_PAIRS = 200_000

_PLAIN_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit)\{([^{}]*)\}")
_LETTER = re.compile(r"\(?([A-Za-z])[).]?")
_FRACTION = re.compile(
    r"(?P<sign>-?)(?:(?P<a>[0-9]{1,18})\s*/\s*(?P<b>[0-9]{1,18})|\\[dt]?frac\{(?P<c>-?[0-9]{1,18})\}\{(?P<d>[0-9]{1,18})\}"
    r"|(?P<integer>[0-9]{1,18}))"
)
_WORDY = re.compile(r"[A-Za-z][A-Za-z ,'-]*")


class MathOptions(Section):
    """1 for an answer that means the same as the gold answer: fractions, roots, sets, intervals, units (math-verify)."""

    take: Take = "any"
    """Where the answer is read from: `tag`, `boxed`, `hashes`, `number`, or `any`, the first of these that is present."""
    column: str = "answer"
    """Column of the right answer, or of a list of right answers. May hold a complete solution that ends in `####` or a box."""
    seconds: PositiveFloat = 5.0
    """Time limit of one comparison; if it is exceeded, the reward has failed for that completion."""
    workers: PositiveInt | None = None
    """Worker processes, shared by all `math` rewards of a run; unset: one per core, at most 8."""


@dataclass(frozen=True)
class MathReward:
    """Compares by meaning. Does not apply to prompts without the column."""

    name: str
    weight: float
    options: MathOptions = field(default_factory=MathOptions)
    is_async: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingPackage(
                f"rewards.{self.name}",
                "math-verify is not installed",
                because="the reward `math` compares answers with it",
                fix=f"{pip_install('math')}, or use the reward `answer`, which compares numbers and texts",
            )

    def missing_columns(self, prompt: Prompt) -> str | None:
        return missing_column(prompt, self.options.column)

    def score(self, group: Group) -> list[Result]:
        golds = [plain.gold_answer(gold) for gold in plain.gold_texts(group.prompt.columns.get(self.options.column))]
        if not golds:
            return not_applicable(group, f"the prompt has no column '{self.options.column}'")
        answers = [answer_in(completion.text, self.options.take) for completion in group.completions]
        verdicts = self.verdicts([(g, a) for a in answers if a is not None for g in golds])
        return [self._result(answer, golds, verdicts) for answer in answers]

    def _result(self, answer: str | None, golds: Sequence[str], verdicts: dict[tuple[str, str], bool | Exception]) -> Result:
        if answer is None:
            return Score(0.0, "no answer found")
        answer_verdicts = [verdicts[gold, answer] for gold in golds]
        if any(verdict is True for verdict in answer_verdicts):
            return Score(1.0, f"{plain.short(answer)} is right")
        failure = next((verdict for verdict in answer_verdicts if isinstance(verdict, Exception)), None)
        return failure or Score(0.0, f"{plain.short(answer)} is not {plain.short(golds[0])}")

    def verdicts(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], bool | Exception]:
        """Whether gold and answer are equal, for each pair; the exception if the comparison failed."""
        known: dict[tuple[str, str], bool | Exception] = {}
        for pair in pairs:
            fast_verdict = fast_compare(*pair)
            verdict = _CACHE.get(pair) if fast_verdict is None else fast_verdict
            if verdict is not None:
                known[pair] = verdict
        unknown = [pair for pair in dict.fromkeys(pairs) if pair not in known]
        jobs = [{"gold": gold, "answer": answer} for gold, answer in unknown]
        answers = _workers(self.options.workers).ask_all(jobs, self.options.seconds) if jobs else []
        for pair, result in zip(unknown, answers, strict=True):
            known[pair] = result
            if isinstance(result, bool):
                _CACHE.put(pair, result)
        return known


def fast_compare(gold: str, answer: str) -> bool | None:
    """Compares without math-verify; None if only math-verify can tell."""
    if plain.answers_equal(gold, answer):
        return True
    numbers = plain.as_number(gold.strip()), plain.as_number(answer.strip())
    if None not in numbers:
        return numbers[0] == numbers[1]
    if len(answer) > MAX_LENGTH or _depth(answer) > MAX_DEPTH:
        return False
    fractions = fraction(gold), fraction(answer)
    if None not in fractions:
        return fractions[0] == fractions[1]
    one, other = words(gold), words(answer)
    if one == other:
        return True
    return False if _WORDY.fullmatch(one) and len(one) > 1 and not re.search(r"[0-9\\π∞½⅓⅔¼¾]", answer) else None


def _depth(text: str) -> int:
    """How deep brackets are nested, closed or not: parsers take exponential time for hundreds of them."""
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    return deepest


def fraction(text: str) -> Fraction | None:
    r"""The exact value of an integer or a fraction such as `3/4` or `\frac{3}{4}`: the most common answers.

    None for decimals: math-verify decides whether 0.333333 equals 1/3.
    """
    match = _FRACTION.fullmatch(text.strip().strip("$").strip().replace("−", "-"))
    if match is None:
        return None
    sign, top, bottom = match["sign"], match["a"] or match["c"] or match["integer"], match["b"] or match["d"] or "1"
    return Fraction(int(top), int(bottom)) * (-1 if sign else 1) if int(bottom) else None


def words(text: str) -> str:
    r"""A text normalised for comparison: lower case, without `\text{}`, dollar signs, and brackets around one letter."""
    text = _PLAIN_TEXT.sub(r"\1", text).strip().strip("$").strip()
    letter = _LETTER.fullmatch(text)
    return " ".join((letter[1] if letter else text).lower().rstrip(".").split())


class _VerdictCache:
    """Verdicts of (gold, answer) pairs; the oldest are evicted first."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[tuple[str, str], bool] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, pair: tuple[str, str]) -> bool | None:
        return self._verdicts.get(pair)

    def put(self, pair: tuple[str, str], verdict: bool) -> None:
        with self._lock:
            self._verdicts[pair] = verdict
            if len(self._verdicts) > MAX_CACHED_PAIRS:
                self._verdicts.popitem(last=False)


_CACHE = _VerdictCache()


@shared
def _workers(count: int | None) -> Workers:
    return python_workers("oncurve.rewards.verifiers.math_worker", count or min(8, os.cpu_count() or 1))
