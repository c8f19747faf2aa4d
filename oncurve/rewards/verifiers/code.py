"""The reward `code`: runs the program of a completion against tests in a sandbox; 1 if all pass, or the fraction that does.

Three kinds of tests, by the prompt's columns:

    inputs, outputs     standard input, and what must be printed (trailing spaces and trailing empty lines are ignored)
    tests               a list of snippets, usually `assert f(2) == 4` (MBPP)
    test_code           functions `test_…`, `check(candidate)` with the column `entry_point` (HumanEval), or code that raises

Tests never run in the program's process, and nothing of them enters it but the arguments of calls: all that a program can do is
return values (`sandbox/tests_child.py`). A program that is wrong, crashes, or exceeds its time or memory fails the test, which
is a score. If the sandbox itself fails, the reward has failed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from oncurve.errors import DataError
from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group, Prompt
from oncurve.rewards.base import Result, Score, not_applicable, score_concurrently
from oncurve.rewards.sandbox.sandbox import Limits, Sandbox, find_sandbox
from oncurve.rewards.verifiers.answer_extraction import extract_fenced, extract_tagged, without_thinking

_NEEDED = "'inputs' and 'outputs', 'tests' or 'test_code'"
_PYTHON = ("python", "py", "python3", "")


class CodeOptions(Section):
    """1 if the completion's program passes all tests, run in a sandbox; or the fraction that it passes."""

    score: Literal["all", "share"] = "all"
    """`all`: 1 if every test passes, else 0. `share`: the fraction that passes."""
    seconds: PositiveFloat = 5.0
    """Wall time of one run (CPU time: one second more): of a program on one input, or of a complete list of tests."""
    memory_mb: PositiveInt = 1024
    """Address space of a program."""
    output_kb: PositiveInt = 1024
    """How much a program may print before it is stopped."""
    most_tests: PositiveInt = 100
    """Run at most this many tests of a problem, the first ones."""
    trusted: bool = False
    """Run programs without a sandbox if the machine has none. Only for a machine with nothing of value on it."""
    workers: PositiveInt | None = None
    """Programs that run concurrently; unset: one per core, at most 8."""


@dataclass(frozen=True)
class CodeReward:
    """Runs each completion's program. Does not apply to prompts without tests."""

    name: str
    weight: float
    options: CodeOptions = field(default_factory=CodeOptions)
    is_async: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        _ = self.sandbox  # raises before training if the machine can't run programs safely

    @cached_property
    def sandbox(self) -> Sandbox:
        return find_sandbox(f"rewards.{self.name}", trusted=self.options.trusted, count=self.options.workers)

    @property
    def log_lines(self) -> list[str]:
        return [f"{self.name}: {self.sandbox.description}"]

    def missing_columns(self, prompt: Prompt) -> str | None:
        return _NEEDED if read_tests(prompt.columns, 1) is None else None

    def score(self, group: Group) -> list[Result]:
        tests = read_tests(group.prompt.columns, self.options.most_tests)
        if tests is None:
            return not_applicable(group, f"the prompt has no columns {_NEEDED}")
        return score_concurrently(group, lambda completion: self._score(completion, tests), self.sandbox.workers.count)

    def _score(self, completion: Completion, tests: Tests) -> Score:
        program = program_in(completion.text, tests)
        if not program.strip():
            return Score(0.0, "no program found")
        passed, why = self._run(program, tests)
        right = passed == tests.count
        value = float(right) if self.options.score == "all" else passed / tests.count
        return Score(value, f"{passed} of {tests.count} tests passed" + ("" if right else f"; {why}"))

    @property
    def _limits(self) -> Limits:
        return Limits(self.options.seconds, self.options.memory_mb << 20, self.options.output_kb << 10)

    def _run(self, program: str, tests: Tests) -> tuple[int, str]:
        """How many tests pass, and the message of the first that fails."""
        if tests.pairs:
            return self._run_pairs(program, tests.pairs)
        outcome = self.sandbox.run({"kind": "tests", "program": program, **tests.job}, self._limits)
        verdicts = outcome["verdicts"]
        broken = next((v for v in verdicts if "broken" in v), None)
        if broken is not None and broken.get("fault") == "tests" and "SyntaxError" in broken["broken"]:
            raise DataError("tests", broken["broken"], because="they are not Python", fix="correct the data")
        passed = sum(bool(v.get("passed")) for v in verdicts)
        return passed, _failed_test(verdicts, outcome["ended"])

    def _run_pairs(self, program: str, pairs: Sequence[tuple[str, str]]) -> tuple[int, str]:
        passed, first = 0, ""
        for number, (stdin, expected) in enumerate(pairs, start=1):
            outcome = self.sandbox.run({"kind": "program", "program": program, "stdin": stdin}, self._limits)
            if outcome["ended"] == "exit 0" and same_output(outcome["output"], expected):
                passed += 1
                continue
            first = first or f"test {number}: {_program_output(outcome)}"
            if self.options.score == "all" or outcome["ended"] == "time":
                break
        return passed, first


def _failed_test(verdicts: Sequence[Mapping[str, Any]], ended: str) -> str:
    for verdict in verdicts:
        if not verdict.get("passed"):
            return str(verdict.get("why") or verdict.get("broken"))
    return _ENDS.get(ended, f"the tests ended in {ended}")


def _program_output(outcome: Mapping[str, Any]) -> str:
    if outcome["ended"] in ("exit 0", "exit 1"):
        is_complete = outcome["ended"] == "exit 0"
        last = outcome["output" if is_complete else "errors"].strip().rpartition("\n")[2]
        return f"printed {last[:80]!r}" if is_complete else last[:120] or "it failed"
    return _ENDS.get(outcome["ended"], f"it ended in {outcome['ended']}")


_ENDS = {"time": "it took too long", "output": "it printed too much", "signal 9": "it took too long", "signal 11": "it crashed"}


@dataclass(frozen=True)
class Tests:
    """The tests of a prompt: pairs of input and output, or a job for the sandbox; ``count`` in total.

    Example: ``Tests(1, pairs=(("2\\n", "4\\n"),))``
    """

    count: int
    pairs: tuple[tuple[str, str], ...] = ()
    job: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    entry_point: str | None = None


def read_tests(columns: Mapping[str, Any], max_tests: int) -> Tests | None:
    """The tests of a prompt's columns; None if there are none."""
    inputs, outputs = columns.get("inputs"), columns.get("outputs")
    if inputs and outputs:
        pairs = tuple((str(i), str(o)) for i, o in zip(_as_list(inputs), _as_list(outputs), strict=True))[:max_tests]
        return Tests(len(pairs), pairs)
    tests, code = _as_list(columns.get("tests") or ())[:max_tests], columns.get("test_code")
    if not tests and not code:
        return None
    entry, prefix = columns.get("entry_point"), columns.get("prompt_code") or ""
    setup = f"{_before_function(prefix, entry)}\n{columns.get('setup') or ''}"
    job = {"tests": tests, "test_code": code, "setup": setup, "entry_point": entry}
    return Tests(len(tests) + _count_tests(code), (), job, prefix, entry)


def _as_list(tests: Any) -> list[Any]:
    """A text is one test: as a sequence it would be one for each character."""
    return [tests] if isinstance(tests, str) else list(tests)


def _before_function(prefix: str, entry_point: str | None) -> str:
    """What the prompt's code has before the function under test: imports and helpers, which tests use from there."""
    return prefix[: max(0, prefix.rfind(f"def {entry_point}"))]


def _count_tests(code: str | None) -> int:
    """How many tests a test module has: its functions `test_…`, or itself as one."""
    if not code:
        return 0
    try:
        body = ast.parse(code).body
    except SyntaxError:
        return 1
    return sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test") for node in body) or 1


def program_in(text: str, tests: Tests | None = None) -> str:
    """The program of a completion: its last fenced block of Python, else its answer tag, else everything but the thinking.

    If the prompt began a function (`prompt_code`) and the program does not define it, the program is its continuation.
    """
    visible = without_thinking(text)
    programs = (extract_fenced(visible, _PYTHON), extract_tagged(visible))
    program = next((program for program in programs if program is not None), visible)
    if tests is None or not tests.prefix:
        return program
    if tests.entry_point is not None and re.search(rf"^\s*(?:async )?def {re.escape(tests.entry_point)}\b", program, re.M):
        return f"{_before_function(tests.prefix, tests.entry_point)}\n{program}"
    return tests.prefix + program


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs are equal except for trailing spaces and trailing empty lines."""
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().split("\n")
