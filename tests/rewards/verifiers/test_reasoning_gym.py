"""Answers to reasoning-gym's problems: our own checks, and the package's scorers in the sandbox."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reasoning_gym

from oncurve.errors import RecipeError
from oncurve.recipe.schema.sections import Task
from oncurve.records import Aspect, Prompt
from oncurve.rewards.mix import aspects_of
from oncurve.rewards.verifiers.reasoning_gym import GymRewardOptions, ReasoningGymReward
from oncurve.rewards.verifiers.reasoning_gym_checks import CHECKS
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
        other = f"{gold}1" if gold[-1:].isdigit() else f"{gold} or so"
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
    ],
)
def test_our_own_checks(family: str, columns: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    prompt = Prompt("p", "", columns={"answer": "", "family": family, "gym": {"scorer": True}, **columns})
    assert values(prompt, *right) == [1.0] * len(right)
    assert values(prompt, *wrong) == [0.0] * len(wrong)


def test_prompts_of_other_tasks_are_not_graded() -> None:
    assert values(Prompt("p", "", columns={"answer": "1"}), "1") == [None]


ATTACK = '__import__("os").system("touch {path}")'


def test_a_scorer_that_executes_the_answer_does_so_in_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own scorers of these families run the command; here nothing runs, and `9**9**9` returns.

    Our own checks, and the pattern that refuses such answers, are disabled: the sandbox must hold by itself.
    """
    monkeypatch.setattr("oncurve.rewards.verifiers.reasoning_gym.CHECKS", {})
    monkeypatch.setattr("oncurve.rewards.verifiers.reasoning_gym._CODE", re.compile("(?!)"))
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
    began = time.monotonic()
    (slow,) = judged(task("countdown", heldout=1).heldout[0], "9**9**9", reward=reward)
    assert (slow.value, slow.failure) == (0.0, None)
    assert "takes more than 4 s" in str(slow.reason)
    assert time.monotonic() - began < 4 + 2 + 20, "the wall's own clock, and a busy machine"
    assert values(prompt, prompt.columns["answer"], reward=reward) == [1.0], "the next one is judged as ever"


def test_an_answer_that_contains_code_is_wrong_without_being_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scorer that executes the answer can be made to print any score and exit. Such answers are never scored."""
    nothing_to_ask = SimpleNamespace(workers=SimpleNamespace(count=1))
    monkeypatch.setattr(ReasoningGymReward, "sandbox", nothing_to_ask)
    prompt = Prompt("p", "", columns={"answer": "1", "family": "puzzle24", "gym": {"scorer": True}})
    texts = [ATTACK, "[print('{}'), exit(0)]", "().__class__", "(lambda x: x)(1)", "sympify('1')", "9" * 6000]
    assert values(prompt, *texts) == [0.0] * len(texts)


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
