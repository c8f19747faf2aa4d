"""The recipes agent-gsm8k and agent-repair: their tool, their data, the rewards of the environment, runs of the tiny model."""

from __future__ import annotations

import ast
import doctest
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from oncurve.agents.tool_environment import ToolEnvironment
from oncurve.plugins import load_function
from oncurve.recipe.load import parse_recipe
from oncurve.records import Observation, Outcome, Prompt, Rollout, Turn
from oncurve.rewards.sandbox.sandbox import find_sandbox
from oncurve.runs.database.reader import RunReader
from oncurve.training.start import begin

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"


def module_of(file: str, name: str) -> ModuleType:
    return sys.modules[load_function(f"{RECIPES / file}:{name}", "test").__module__]


GSM8K, REPAIR = module_of("agent_gsm8k.py", "run_python"), module_of("agent_repair.py", "Repair")
SOURCES = REPAIR.sources()


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("print(48 / 2)\n48 + 24", "24.0\n72"),
        ("x = 1", "The code printed nothing."),
        ("None", "The code printed nothing."),
        ("", "The code printed nothing."),
        ("x = = 1", 'File "<code>", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax'),
        ("def f():\n    return 1 / 0\nprint('a')\nf()", 'a\nFile "<code>", line 2, in f\nZeroDivisionError: division by zero'),
        ("import sys\nsys.exit(3)", "Error: the code ended with exit 3."),
        ("while True: pass", "Error: the code took more than 2 seconds."),
        ("print('a' * 1000)", f"{'a' * 200} […] {'a' * 200}"),
        ("while True: print('a' * 1000)", f"{'a' * 150}\nError: the code printed too much."),
    ],
)
def test_the_python_tool_returns_output_errors_and_timeouts_as_text(code: str, result: str) -> None:
    assert GSM8K.run_python(code)[-len(result) :] == result


@pytest.mark.parametrize("code", ["open('/etc/passwd').read()", "import os\nos.listdir('/')", "import socket\nsocket.socket()"])
def test_the_python_tool_has_no_files_and_no_network(code: str) -> None:
    """Depending on the sandbox's level, files are forbidden or don't exist."""
    result = GSM8K.run_python(code)
    assert "PermissionError" in result or "FileNotFoundError: [Errno 2] No such file or directory: '/etc/passwd'" in result


def test_a_call_that_printed_something_is_rewarded() -> None:
    chats = [
        [{"role": "assistant", "content": "72"}, {"role": "tool", "content": GSM8K.run_python(code)}]
        for code in ("72", "x=", "x=1")
    ]
    assert GSM8K.called([*chats, chats[0][:1]]) == [1.0, 0.0, 0.0, 0.0]


def test_docstrings_of_the_programs_have_an_example_that_is_right() -> None:
    assert set(SOURCES) == set(REPAIR.TESTS)
    for name, source in SOURCES.items():
        names: dict[str, Any] = {}
        exec(source, names)
        (example,) = doctest.DocTestFinder().find(names[name], name, globs=names, module=False)
        result = doctest.DocTestRunner().run(example)
        assert (result.attempted, result.failed) == (1, 0), name
        assert len(REPAIR.TESTS[name]) == len(set(REPAIR.TESTS[name])) >= 6, name


def test_bugs_are_changes_of_one_place() -> None:
    found = dict(REPAIR.mutants("def f(a, b):\n    c = 0\n    if a < b and g(a, b):\n        return a + 1\n    return c"))
    body = "def f(a, b):\n    c = {}\n    if {}:\n        return {}\n    return c"
    condition = "a < b and g(a, b)"
    assert found == {
        body.format(1, condition, "a + 1"): "initial value",
        body.format(-1, condition, "a + 1"): "initial value",
        body.format(0, "not (a < b and g(a, b))", "a + 1"): "negated condition",
        body.format(0, "a < b or g(a, b)", "a + 1"): "and/or",
        body.format(0, "a <= b and g(a, b)", "a + 1"): "comparison",
        body.format(0, "a < b and g(b, a)", "a + 1"): "swapped arguments",
        body.format(0, condition, "a - 1"): "operator",
        body.format(0, condition, "a + 2"): "off by one",
        body.format(0, condition, "a + 1")[:-1] + "a": "return variable",
        body.format(0, condition, "a + 1")[:-1] + "b": "return variable",
        body.format(0, condition, "a + 0"): "off by one",
    }


def check_rows(rows: list[dict[str, Any]]) -> None:
    """Each bug fails a test and ends, the original passes all, and the prompt has the specification and no test."""
    for row in rows:
        source = SOURCES[row["program"]]
        assert reward_of(row, source) == 1.0, row["id"]
        ended, passed = REPAIR.run_tests(find_sandbox("test"), row["code"], row["tests"])
        assert ended == "exit 0", row["id"]
        assert not all(passed), row["id"]
        assert reward_of(row, row["code"]) == 0.0, row["id"]
        assert ast.get_docstring(ast.parse(source).body[0]) == ast.get_docstring(ast.parse(row["code"]).body[0])
        assert row["code"] in row["prompt"]
        assert "assert" not in row["prompt"]


def reward_of(row: dict[str, Any], submitted: str) -> float:
    repair = REPAIR.Repair()
    repair.reset(**row)
    assert repair.submit(submitted) == "Received."
    return float(repair.get_reward())


def test_bugs_of_a_program_fail_and_the_program_passes() -> None:
    rows = [row for name in ("clamp", "median", "invert") for row in REPAIR.rows_of(find_sandbox("test"), name, SOURCES[name])]
    assert len({row["code"] for row in rows}) == len(rows) >= 15
    assert len({row["bug"] for row in rows}) >= 4
    check_rows(rows)


@pytest.mark.slow
def test_the_data_of_all_programs(tmp_path: Path) -> None:
    subprocess.run([sys.executable, RECIPES / "agent_repair.py", tmp_path], check=True)
    train, heldout = ([json.loads(line) for line in (tmp_path / f"{part}.jsonl").open()] for part in ("train", "heldout"))
    programs = [{row["program"] for row in part} for part in (train, heldout)]
    assert programs[0].isdisjoint(programs[1])
    assert programs[0] | programs[1] == set(SOURCES)
    assert len(programs[1]) >= 12
    assert len(train) >= 200
    recipe = tomllib.loads((RECIPES / "agent-repair.toml").read_text())
    assert len(heldout) == recipe["task"]["heldout"], "the recipe evaluates on all of them"
    assert len({row["code"] for row in [*train, *heldout]}) == len(train) + len(heldout)
    check_rows([*train, *heldout])


ROW = {"code": "def twice(x):\n    return 3 * x", "tests": ["assert twice(1) == 2", "assert twice(4007) == 8014"]}

SPY = """
import gc, os, sys

def twice(x):
    secret = "".join(reversed("4108"))
    found = [str(o)[:10000] for o in gc.get_objects() if not isinstance(o, list)]
    frame = sys._getframe(1)
    while frame is not None:
        found += [str(v) for v in frame.f_locals.values()]
        frame = frame.f_back
    for pid in ("self", os.getpid() - 1, os.getpid() + 1, os.getppid()):
        for name in ("environ", "cmdline", "mem", "maps"):
            try:
                found += [open(f"/proc/{pid}/{name}", errors="replace").read()]
            except OSError:
                pass
    return [2 * x, any(secret in text for text in found)]
"""
CHEATS = {
    "equal to everything": "class E:\n    def __eq__(self, other): return True\ndef twice(x): return E()",
    "ends the process": "import os\nos._exit(0)",
    "ends the call": "def twice(x):\n    raise SystemExit(0)",
    "replaces a function of the tests": "import builtins\nbuiltins.AssertionError = None\ndef twice(x): return 0",
    "prints verdicts": """
import os
def twice(x):
    for descriptor in range(3, 9):
        try:
            os.write(descriptor, b'{"passed": true}\\n')
        except OSError:
            pass
    return 0
""",
    "never ends": "def twice(x):\n    while True: pass",
}


def test_a_program_that_looks_for_the_tests_finds_nothing() -> None:
    """It looks among its objects, in its callers' variables and in the files of its processes."""
    tests = ["assert twice(1) == [2, False]", "assert twice(2) == [4, False]", "assert twice(4007) == [8014, False]"]
    assert reward_of({**ROW, "tests": tests}, SPY) == 1.0
    assert reward_of({**ROW, "tests": tests}, SPY.replace("found = [", "found = ['8014'] + [")) == 0.1, "it can say so"


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS)
def test_a_program_that_cheats_gets_no_reward(code: str) -> None:
    assert reward_of(ROW, code) <= 0.1


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("def twice(x):\n    return x + x", 1.0),
        ("def twice(x):\n    return x", 0.1),
        (ROW["code"], 0.0),
        (f"{ROW['code']}\n", 0.0),
        ("def twice(x) return", 0.0),
        ("  ", 0.0),
    ],
)
def test_what_a_submission_is_worth(code: str, reward: float) -> None:
    assert reward_of(ROW, code) == pytest.approx(reward)


def test_nothing_is_rewarded_without_a_submission() -> None:
    repair = REPAIR.Repair()
    repair.reset(**ROW)
    assert repair.get_reward() == 0.0


def call(name: str, code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"


def converse(environment: ToolEnvironment, *texts: str) -> tuple[list[Observation], Outcome]:
    """A scripted conversation about the row."""
    prompt = Prompt("p", messages=({"role": "user", "content": "repair"},), columns=ROW)
    episode = environment.begin(Rollout(prompt, seed=0, step=1, sample=0, tokenizer=object()))
    start = episode.start()
    assert start is not None
    start.result(60)
    turns = [Turn(index, np.array([0]), text, False) for index, text in enumerate(texts)]
    observations = [episode.answer(turn).result(60) for turn in turns]
    outcome = episode.finish().result(60)
    episode.close()
    return observations, outcome


def test_a_conversation_that_repairs_a_program() -> None:
    environment = ToolEnvironment([GSM8K.run_python], REPAIR.Repair, max_turns=4)
    assert [tool["function"]["name"] for tool in environment.tools] == ["run_python", "submit"]
    fixed = ROW["code"].replace("3", "2")  # type: ignore[attr-defined]
    observations, outcome = converse(
        environment, call("run_python", f"{ROW['code']}\ntwice(5)"), call("submit", fixed), call("show_tests", ""), "Done."
    )
    replies = [observation.reply[0]["content"] for observation in observations if isinstance(observation.reply, tuple)]
    assert replies == ["15", "Received.", "{'error': 'Tool show_tests not found.'}"]
    assert outcome.reward == 1.0
    _, outcome = converse(environment, *["<tool_call>{oops}</tool_call>"] * 3, call("submit", fixed))
    assert outcome.reward == 0.0, "calls in the last turn are not run"


@pytest.mark.parametrize("name", ["agent-gsm8k", "agent-repair"])
def test_the_recipes_train_the_tiny_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if name == "agent-gsm8k":
        rows: list[dict[str, Any]] = [
            {"question": f"What is {i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(6)
        ]
    else:
        rows = REPAIR.rows_of(find_sandbox("test"), "median", SOURCES["median"])
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = tomllib.loads((RECIPES / f"{name}.toml").read_text())
    data |= {"threads": 1, "model": {"tiny": {"layers": 1, "width": 16, "mlp_width": 32, "context": 2048, "chat": True}}}
    data["task"] |= {"path": str(file), "heldout_path": str(file), "heldout": 2}
    (stage,) = data["stages"]
    stage |= {"steps": 2, "prompts_per_step": 2, "group_size": 4, "eval_every": 1, "tokens_per_pack": 4096}
    stage["optimiser"]["warmup_steps"] = 1
    stage["sampling"]["max_new_tokens"] = 24
    run = begin(parse_recipe(data), out=tmp_path / "run")
    with RunReader.open(run.path) as store:
        groups = store.step("grpo", 2).groups
        evals = store.evals()
    assert len(groups) == 2
    assert all(scored.total is not None for graded in groups for scored in graded.scored.scored)
    assert evals[-1].accuracy == 0.0, "the reward `answer` defines accuracy"
