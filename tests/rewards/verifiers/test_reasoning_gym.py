"""Answers to reasoning-gym's problems: our own checks, and the package's scorers in the sandbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from oncurve.errors import RecipeError
from oncurve.recipe.schema.sections import Task
from oncurve.records import Aspect, Prompt
from oncurve.rewards.mix import aspects_of
from oncurve.rewards.sandbox.sandbox import Limits
from oncurve.rewards.verifiers.reasoning_gym import CHECKS, SCORER, GymRewardOptions, ReasoningGymReward
from oncurve.tasks.base import Task as AnyTask
from oncurve.tasks.registry import build_task
from tests.rewards.builders import group

OWN = ReasoningGymReward("gym", 1.0)


def task(*families: str, heldout: int = 8, **options: Any) -> AnyTask:
    section = {"type": "reasoning_gym", "families": list(families), "heldout": heldout, "problems": 50, **options}
    return build_task(Task.model_validate(section))


def judged(prompt: Prompt, *answers: str, reward: ReasoningGymReward = OWN) -> list[Aspect]:
    texts = [f"<think>so</think><answer>{answer}</answer>" for answer in answers]
    return aspects_of(reward, group(*texts, **prompt.columns))


def values(prompt: Prompt, *answers: str, reward: ReasoningGymReward = OWN) -> list[float | None]:
    return [aspect.value for aspect in judged(prompt, *answers, reward=reward)]


@pytest.mark.parametrize("family", [*CHECKS, "gcd", "lcm", "leg_counting", "basic_arithmetic", "base_conversion"])
def test_the_right_answer_is_right_and_another_is_not(family: str) -> None:
    for prompt in task(family, heldout=4).heldout:
        gold = prompt.columns["answer"]
        other = f"1{gold}" if gold[-1:].isdigit() else f"{gold} or so"
        assert values(prompt, gold, other, f"It is {gold}, I think", "", "9**9**9") == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("family", "columns", "right", "wrong"),
    [
        ("countdown", {"numbers": [2, 3, 4], "target": 20}, ["(2+3)*4", "4*(3 + 2)"], ["20", "4*5", "2+3*4", "(2+3)*4*1"]),
        ("number_sorting", {"answer": "['-1.0', '2.5']"}, ["[-1, 2.5]", "-1.0, 2.50"], ["[2.5, -1]", "[-1]", "[-1, 2.4]"]),
        ("prime_factorization", {"factors": [2, 2, 41]}, ["2 × 2 × 41", "41*2*2"], ["164", "4 × 41", "2 × 82", "2 × × 41"]),
        (
            "fraction_simplification",
            {"simplified_numerator": 23, "simplified_denominator": 131},
            [r"$\frac{23}{131}$", "23/131", r"\frac{23}{131}"],
            ["46/262", "23", r"\frac{23}{13}"],
        ),
        ("palindrome_generation", {"letters": ["h", "a", "h", "a"]}, ["ahha", "HAAH"], ["ahah", "aha", "ahhaa"]),
        ("spiral_matrix", {"answer": "3 1 3"}, ["3 1 3", "[3, 1, 3]"], ["3 3 1", "313"]),
        ("bitwise_arithmetic", {"answer": "-0x1f"}, ["-0x1F", "-1f"], ["0x1f", "-31", "0x"]),
        ("chain_sum", {"answer": "-1000"}, ["-1000", "-1,000.0"], ["1000", "-1000 or so"]),
        ("spell_backward", {"answer": "ziuq"}, ["ziuq", "Ziuq"], ["quiz"]),
        ("puzzle24", {"numbers": [1, 6, 6, 3]}, ["6*(1+6-3)", "(6 + 1 - 3) * 6"], ["6*4*1*1", "24", "6*6-6*(1+1)", "6*(1+6)"]),
        (
            "complex_arithmetic",
            {"answer": "3.0 - 2.0i"},
            ["3-2i", "3.0 - 2.0i", "3.00-2j"],
            ["nan", "3+2i", "3", "-2i", "", "1..2i"],
        ),
        ("complex_arithmetic", {"answer": "0.0 + 1.0i"}, ["i", "0+i", "1i"], ["1", "-i", "nani"]),
        (
            "coin_flip",
            {"answer": "0.171875"},
            ["0.171875", "11/64", ".1719"],
            ["0", "0.18", "nan", "1/0", "-0.171875", "17.19%"],
        ),
        ("coin_flip", {"answer": "0.00005"}, ["0.00005", "1/20000"], ["0", "0.0", "0.0001"]),
        ("game_of_life_halting", {"answer": "False"}, ["False", "false"], ["True", "0", "any", ""]),
    ],
)
def test_our_own_checks(family: str, columns: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    prompt = Prompt("p", "", columns={"answer": "", "family": family, "gym": {"scorer": True}, **columns})
    assert values(prompt, *right) == [1.0] * len(right)
    assert values(prompt, *wrong) == [0.0] * len(wrong)


def test_prompts_of_other_tasks_are_not_graded() -> None:
    assert values(Prompt("p", "", columns={"answer": "1"}), "1") == [None]


ATTACK = '__import__("os").system("touch {path}")'


@pytest.mark.slow
def test_a_scorer_that_executes_the_answer_does_so_in_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own scorers of these families run the command; here nothing runs, and `9**9**9` returns.

    Our own checks and the replaced `eval` are disabled: the sandbox must hold by itself.
    """
    monkeypatch.setattr("oncurve.rewards.verifiers.reasoning_gym.CHECKS", {})
    unguarded = SCORER.replace("    replace_evaluation()\n", "")
    monkeypatch.setattr("oncurve.rewards.verifiers.reasoning_gym.SCORER", unguarded)
    here = tmp_path / "proof"
    data = reasoning_gym.create_dataset("string_insertion", seed=1, size=1)
    data.score_answer(ATTACK.format(path=here), data[0])
    assert here.exists(), "the attack works without a sandbox"
    here.unlink()
    reward = ReasoningGymReward("gym", 1.0, GymRewardOptions(seconds=4.0, workers=1))
    for family in ("string_insertion", "spiral_matrix", "countdown"):
        prompt = task(family, heldout=1).heldout[0]
        assert values(prompt, prompt.columns["answer"], reward=reward) == [1.0]
        aspects = judged(prompt, ATTACK.format(path=here), reward=reward)
        assert [aspect.value for aspect in aspects] == [0.0]
        assert not here.exists()
    (slow,) = judged(task("countdown", heldout=1).heldout[0], "9**9**9", reward=reward)
    assert (slow.value, slow.failure) == (0.0, None)
    assert "takes more than 4 s" in str(slow.reason)
    assert values(prompt, prompt.columns["answer"], reward=reward) == [1.0], "the next one is judged as ever"


WRITE = "import os\\nos.write(1,b'{\\\"score\\\": 1.0}\\\\n')\\nos._exit(0)"
EXECUTED = [
    f'(exec)("{WRITE}")',
    f'[exec][0]("{WRITE}")',
    f'max(["{WRITE}"], key=exec)',
    f'list(map(exec, ["{WRITE}"]))',
    f'sorted(["{WRITE}"], key=exec)',
    f'(lambda e: e("{WRITE}"))(exec)',
    f'__builtins__["exec"]("{WRITE}")',
    f'[*map(eval, ["exec({WRITE!r})"])]',
    f'eval("exec", dict())("{WRITE}")',
    f'getattr(__import__("builtins"), "exec")("{WRITE}")',
    '__import__("os")._exit(0)',
    "print('{\"score\": 1.0}') or exit(0)",
    "[c for c in ().__class__.__base__.__subclasses__()][0]",
    'S("exec(1)")',
    "sympify(\"__import__('os')._exit(0)\")",
    "f'{exec(chr(49))}'",
    "[x for x in [1] if exec('1') is None]",
]
EXECUTING = (
    "binary_matrix", "n_queens", "polynomial_multiplication", "simple_integration", "intermediate_integration", "puzzle24",
    "countdown", "spiral_matrix", "string_insertion", "number_sorting",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", EXECUTING)
def test_no_answer_is_executed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package hands answers of these families to `eval`. Our own checks are off: the scorer must hold by itself."""
    monkeypatch.setattr("oncurve.rewards.verifiers.reasoning_gym.CHECKS", {})
    reward = ReasoningGymReward("gym", 1.0, GymRewardOptions(seconds=20.0, workers=2))
    prompt = task(family, heldout=1).heldout[0]
    assert values(prompt, prompt.columns["answer"], *EXECUTED, reward=reward) == [1.0] + [0.0] * len(EXECUTED)


def test_an_answer_that_would_write_its_own_score() -> None:
    """One of each way to `eval`, at every run."""
    reward = ReasoningGymReward("gym", 1.0, GymRewardOptions(seconds=20.0, workers=1))
    for family in ("n_queens", "polynomial_multiplication"):
        prompt = task(family, heldout=1).heldout[0]
        assert values(prompt, prompt.columns["answer"], EXECUTED[0], "9" * 6000, reward=reward) == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_an_answer_at_which_a_scorer_raises_is_wrong() -> None:
    """And no failure: a completion without a reward would be a way out of a reward of 0."""
    reward = ReasoningGymReward("gym", 1.0, GymRewardOptions(seconds=60.0, workers=1))
    for family in ("boxnet", "game_of_life"):
        assert values(task(family, heldout=1).heldout[0], "{}", "[]", '{"a": 1}', reward=reward) == [0.0, 0.0, 0.0]


CONSTANTS = (
    "0", "1", "-1", "nan", "inf", "-inf", "True", "False", "yes", "no", "None", "[]", "{}", "()", "a", "[[]]", "0 0", "6*4*1*1",
    "24", "24*1*1*1", "null", "0.5", "1/2", "1e9", "[0]", "[[0]]", "''", '{"a": 1}', "[{}]", "0,0", "+", "-", ".", "0j",
    "nan+nani",    "8*3*1*1", "1e-9", "0/1", "any text", "\\boxed{}",
)  # fmt: skip


SCORE_ALL = (
    SCORER.partition('if __name__ == "__main__":')[0]
    + """
jobs = json.loads(sys.stdin.read())
problems = [reasoning_gym.create_dataset(j["family"], seed=j["seed"], **j["settings"]) for j in jobs]
entries = [data[j["index"]] for data, j in zip(problems, jobs)]
replace_evaluation()
scores = []
for answer in jobs[0]["answers"]:
    for data, entry in zip(problems, entries):
        try:
            scores.append(float(data.score_answer(answer, entry)))
        except Exception:
            data.score_answer(entry["answer"] or "", entry)
            scores.append(0.0)
print(json.dumps(scores))
"""
)


@pytest.mark.slow
def test_no_constant_is_right_everywhere() -> None:
    """Four problems of every family with different answers: no constant is right for all of them, and none is a failure."""
    reward = ReasoningGymReward("gym", 1.0, GymRewardOptions(seconds=60.0))
    accepted: dict[str, list[str]] = {}
    for family in sorted(set(reasoning_gym.factory.DATASETS) - {"composite"}):
        prompts = task(family, heldout=4).heldout
        if len({prompt.columns.get("answer") for prompt in prompts}) == 1 and "answer" in prompts[0].columns:
            continue
        if family in CHECKS or not prompts[0].columns["gym"]["scorer"]:
            rows = [list(row) for row in zip(*(values(prompt, *CONSTANTS) for prompt in prompts), strict=True)]
        else:
            jobs = [{**prompt.columns["gym"], "family": family, "answers": CONSTANTS} for prompt in prompts]
            job = {"kind": "program", "program": SCORE_ALL, "stdin": json.dumps(jobs)}
            outcome = reward.sandbox.run(job, Limits(seconds=100.0, memory=4 << 30))
            assert outcome["ended"] == "exit 0", (family, outcome)
            scores = json.loads(outcome["output"].strip().rpartition("\n")[2])
            rows = [scores[i : i + len(prompts)] for i in range(0, len(scores), len(prompts))]
        always = [constant for constant, row in zip(CONSTANTS, rows, strict=True) if all(value == 1.0 for value in row)]
        accepted |= {family: always} if always else {}
    assert accepted == {}


def test_partial_credit_only_if_the_option_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = task("sudoku", heldout=1).heldout[0]
    nearly = prompt.columns["answer"][:-1] + ("1" if prompt.columns["answer"][-1] != "1" else "2")
    strict, lenient = (
        ReasoningGymReward("gym", 1.0, GymRewardOptions(partial=partial, workers=1)) for partial in (False, True)
    )
    assert values(prompt, prompt.columns["answer"], nearly, reward=strict) == [1.0, 0.0]
    (right, near) = values(prompt, prompt.columns["answer"], nearly, reward=lenient)
    assert right == 1.0
    assert near is not None
    assert 0 < near < 1


def test_families_settings_and_seeds() -> None:
    problems = task("chain_sum", "gcd", settings={"chain_sum": {"max_terms": 2, "min_terms": 2}}, heldout=10)
    assert problems.train_size == 100
    prompts = [problems.train_prompt(i) for i in range(100)]
    assert {p.columns["family"] for p in prompts} == {"chain_sum", "gcd"}
    sums = [p.shown.split("problem: ")[1].split("=")[0] for p in prompts if p.columns["family"] == "chain_sum"]
    assert all(len(text.replace(" - ", " + ").split(" + ")) == 2 for text in sums)
    again = task("chain_sum", "gcd", settings={"chain_sum": {"max_terms": 2, "min_terms": 2}}, heldout=10)
    assert [again.train_prompt(i) for i in range(100)] == prompts
    assert not {p.shown for p in problems.heldout} & {p.shown for p in prompts}
    assert [p.difficulty for p in problems.heldout[:2]] == ["chain_sum", "gcd"]
    assert prompts[0].messages is not None
    assert prompts[0].messages[0]["content"].endswith("in <answer></answer>.")
    assert task("gcd", chat=False, instruction="").train_prompt(0).text is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"families": ["chain_sam"]}, "did you mean 'chain_sum'?"),
        ({"families": ["gcd"], "settings": {"gcd": {"max_numbers": -1}}}, "task.settings.gcd"),
        ({"families": ["gcd"], "settings": {"gcd": {"no_such": 1}}}, "no_such"),
        ({"families": []}, "task.families"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build_task(Task.model_validate({"type": "reasoning_gym", **options}))
    assert message in str(caught.value)


@pytest.mark.slow
def test_the_reference_answer_of_every_family_is_right() -> None:
    """Except `composite`, and families that give no answer."""
    reward = ReasoningGymReward("gym", 1.0, GymRewardOptions(seconds=60.0))
    silent, wrong = set(), {}
    for family in sorted(set(reasoning_gym.factory.DATASETS) - {"composite"}):
        prompt = task(family, heldout=1).heldout[0]
        if "answer" not in prompt.columns:
            silent.add(family)
            continue
        (aspect,) = judged(prompt, prompt.columns["answer"], reward=reward)
        if aspect.value != 1.0:
            wrong[family] = (aspect.value, aspect.failure or aspect.reason)
    assert wrong == {}
    assert silent == {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


@pytest.mark.slow
def test_problems_are_the_same_in_every_process() -> None:
    """The package itself generates other problems of these families under another hash seed."""
    program = (
        "from tests.rewards.verifiers.test_reasoning_gym import task\n"
        "made = task('polynomial_multiplication', 'ransom_note', 'isomorphic_strings', heldout=3)\n"
        "print([made.train_prompt(i).shown for i in range(12)])"
    )

    def problems_of(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert problems_of("1") == problems_of("2") != ""
