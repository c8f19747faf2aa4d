r"""The right answer in mathematics: 1 where `math-verify` finds answer and gold equal, else 0.

Fractions, roots, sets, intervals, matrices, equations and units are compared as what they mean. Equal texts, equal numbers,
letters and words are settled here; the rest goes to worker processes with a hard limit, and each pair only once.

Choices, each with a test: of several `\boxed{}` the last counts; a list of numbers with nothing between them is no answer
(math-verify would take its last); two numbers in a sentence are none either; a bare `\frac12` is read as a formula; `50\%`
equals 50 and not 0.5; words are compared as words, without case, `\text{}` and the brackets around a letter.
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
from oncurve.recipe.schema.sections import Section
from oncurve.records import Group
from oncurve.rewards.base import Result, Score, not_applicable
from oncurve.rewards.verifiers import answer as plain
from oncurve.rewards.verifiers.answer_extraction import Take, answer_in
from oncurve.workers.pool import Workers, python_workers, shared

LONGEST = 2000
"""Characters; nobody's answer is longer, and parsers take their time over one that is."""
KEPT_PAIRS = 200_000

_PLAIN_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit)\{([^{}]*)\}")
_LETTER = re.compile(r"\(?([A-Za-z])[).]?")
_FRACTION = re.compile(
    r"(?P<sign>-?)(?:(?P<a>[0-9]{1,18})\s*/\s*(?P<b>[0-9]{1,18})|\\[dt]?frac\{(?P<c>-?[0-9]{1,18})\}\{(?P<d>[0-9]{1,18})\}"
    r"|(?P<whole>[0-9]{1,18}))"
)
_WORDY = re.compile(r"[A-Za-z][A-Za-z ,'-]*")


class MathOptions(Section):
    """Options of the reward `math`."""

    take: Take = "any"
    """Where the answer is written: `tag`, `boxed`, `hashes`, `number`, or `any`, the first of these that is there."""
    column: str = "answer"
    """Column of the right answer, or of a list of right answers; a whole solution that ends in `####` or a box will do."""
    seconds: PositiveFloat = 5.0
    """Hard limit on comparing one answer; past it the reward has failed for that completion."""
    workers: PositiveInt | None = None
    """Worker processes; unset: one per core, at most 8. They are shared by all `math` rewards of a run."""


@dataclass(frozen=True)
class MathReward:
    """Graded by meaning. A prompt without the column is not graded by this reward."""

    name: str
    weight: float
    options: MathOptions = field(default_factory=MathOptions)
    waits: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingPackage(
                f"rewards.{self.name}",
                "math-verify is not installed",
                because="the reward `math` compares answers with it",
                fix=f"{pip_install('math')}, or use the reward `answer`, which compares numbers and texts",
            )

    def score(self, group: Group) -> list[Result]:
        gold = group.prompt.columns.get(self.options.column)
        golds = [plain.gold_answer(str(g)) for g in (gold if isinstance(gold, list | tuple) else [gold]) if g is not None]
        if not golds:
            return not_applicable(group, f"the prompt has no column '{self.options.column}'")
        answers = [answer_in(completion.text, self.options.take) for completion in group.completions]
        verdicts = self.verdicts([(g, a) for a in answers if a is not None for g in golds])
        return [self._result(answer, golds, verdicts) for answer in answers]

    def _result(self, answer: str | None, golds: Sequence[str], verdicts: dict[tuple[str, str], bool | Exception]) -> Result:
        if answer is None:
            return Score(0.0, "no answer found")
        said = [verdicts[gold, answer] for gold in golds]
        if any(verdict is True for verdict in said):
            return Score(1.0, f"{plain.short(answer)} is right")
        failed = next((verdict for verdict in said if isinstance(verdict, Exception)), None)
        return failed or Score(0.0, f"{plain.short(answer)} is not {plain.short(golds[0])}")

    def verdicts(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], bool | Exception]:
        """Whether gold and answer are the same, for each pair; an exception where that could not be found out."""
        known: dict[tuple[str, str], bool | Exception] = {}
        for pair in pairs:
            settled = fast_compare(*pair)
            kept = _PAIRS.get(pair) if settled is None else settled
            if kept is not None:
                known[pair] = kept
        asked = [pair for pair in dict.fromkeys(pairs) if pair not in known]
        jobs = [{"gold": gold, "answer": answer} for gold, answer in asked]
        answers = _workers(self.options.workers).ask_all(jobs, self.options.seconds) if jobs else []
        for pair, verdict in zip(asked, answers, strict=True):
            known[pair] = verdict
            if isinstance(verdict, bool):
                _PAIRS.put(pair, verdict)
        return known


def fast_compare(gold: str, answer: str) -> bool | None:
    """What can be said without math-verify; None where it must be asked."""
    if plain.answers_equal(gold, answer):
        return True
    numbers = plain.as_number(gold.strip()), plain.as_number(answer.strip())
    if None not in numbers:
        return numbers[0] == numbers[1]
    if len(answer) > LONGEST:
        return False
    fractions = fraction(gold), fraction(answer)
    if None not in fractions:
        return fractions[0] == fractions[1]
    one, other = words(gold), words(answer)
    if one == other:
        return True
    return False if _WORDY.fullmatch(one) and len(one) > 1 and not re.search(r"[0-9\\]", answer) else None


def fraction(text: str) -> Fraction | None:
    r"""The exact value of a whole number or of one over another, as `3/4` or `\frac{3}{4}`: most of what is not a plain number.

    Not of decimals: whether 0.333333 is 1/3 is math-verify's to say.
    """
    found = _FRACTION.fullmatch(text.strip().strip("$").strip().replace("−", "-"))
    if found is None:
        return None
    sign, top, bottom = found["sign"], found["a"] or found["c"] or found["whole"], found["b"] or found["d"] or "1"
    return Fraction(int(top), int(bottom)) * (-1 if sign else 1) if int(bottom) else None


def words(text: str) -> str:
    r"""A text for comparing: without case, `\text{}`, dollar signs, and the brackets or stop of a lone letter."""
    text = _PLAIN_TEXT.sub(r"\1", text).strip().strip("$").strip()
    letter = _LETTER.fullmatch(text)
    return " ".join((letter[1] if letter else text).lower().rstrip(".").split())


class _Pairs:
    """Verdicts of (gold, answer) pairs, the oldest forgotten first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], bool] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, pair: tuple[str, str]) -> bool | None:
        return self._kept.get(pair)

    def put(self, pair: tuple[str, str], verdict: bool) -> None:
        with self._lock:
            self._kept[pair] = verdict
            if len(self._kept) > KEPT_PAIRS:
                self._kept.popitem(last=False)


_PAIRS = _Pairs()


@shared
def _workers(count: int | None) -> Workers:
    return python_workers("oncurve.rewards.verifiers.math_worker", count or min(8, os.cpu_count() or 1))
