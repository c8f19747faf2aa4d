"""The calculator environment, and the task `calculator`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oncurve.errors import RecipeError
from oncurve.recipe.schema.sections import Task
from oncurve.records import Prompt
from oncurve.tasks.base import TAGS
from oncurve.tasks.base import Task as AnyTask
from oncurve.tasks.environments import PureEnvironment
from oncurve.tasks.puzzles.calculator import Calculator, Sum, calls
from oncurve.tasks.registry import build_task

DICE = np.random.default_rng(0)


def task(**options: object) -> AnyTask:
    return build_task(Task.model_validate({"type": "calculator", "heldout": 50, "examples": 30, **options}))


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("<think>[38+47]", "85"),
        ("[7*8-(2+4)]", "50"),
        ("[1/3]", "1/3"),
        ("[2-5]", "-3"),
        ("[__import__('os')]", "?"),
        ("[9**9**9]", "?"),
        ("[1/0]", "?"),
        ("12]", "?"),
        ("[]", "?"),
        ("[1+[2+2]", "4"),
        ("</think><answer>3</answer>", None),
    ],
)
def test_replies(turn: str, answer: str | None) -> None:
    assert Calculator("[", "]").reply(Prompt("p", ""), (turn,), DICE) == answer


def test_sums_are_evaluated_one_operation_at_a_time() -> None:
    assert [tuple(call) for call in calls("38+47-19")] == [("38+47", 85), ("85-19", 66)]
    assert [tuple(call) for call in calls("2+3*4*5-6")] == [("3*4", 12), ("12*5", 60), ("2+60", 62), ("62-6", 56)]
    assert [call.value for call in calls("3-5+9")] == [-2, -1]


def follow(prompt: Prompt, turns: tuple[str, ...]) -> None:
    """Every second turn is the environment's reply to those before it; to the complete game there is none."""
    environment: Any = prompt.environment
    for place in range(1, len(turns), 2):
        assert environment.reply(prompt, turns[:place], DICE) == turns[place]
    assert environment.reply(prompt, turns, DICE) is None


def test_demonstrations_contain_the_calculator_s_replies() -> None:
    sums = task(operations=["+", "-", "*"], numbers=4)
    for example in sums.examples:
        follow(example.prompt, example.turns)
        assert example.completion == "".join(example.turns)
        assert example.completion.endswith(f"<answer>{example.prompt.columns['answer']}</answer>")
        assert int(example.prompt.columns["answer"]) >= 0
    levels = {example.prompt.difficulty for example in sums.examples}
    assert levels == {"2 numbers", "3 numbers", "4 numbers"}


def test_the_alphabet_covers_all_texts_and_nothing_held_out_is_trained_on() -> None:
    sums = task()
    assert sums.alphabet is not None
    for example in sums.examples:
        text = example.prompt.shown + example.completion
        for tag in TAGS:
            text = text.replace(tag, "")
        assert set(text) <= set(sums.alphabet)
    held = {prompt.shown for prompt in sums.heldout}
    assert len(held) == 50
    assert not held & {sums.train_prompt(i).shown for i in range(3000)}
    assert not held & {example.prompt.shown for example in sums.examples}


def test_the_question_in_words() -> None:
    prompt = task(chat=True).train_prompt(0)
    assert prompt.text is None
    assert prompt.messages is not None
    assert "calculator" in prompt.messages[0]["content"]
    assert prompt.environment is not None


def test_a_file_s_prompts_may_have_an_environment(tmp_path: Path) -> None:
    folder = tmp_path
    rows = "".join(f'{{"prompt": "{n}+{n}=", "answer": "{2 * n}"}}\n' for n in range(20))
    (folder / "sums.jsonl").write_text(rows)
    (folder / "mine.py").write_text(
        "class Shop:\n    calls = ('?',)\n    def reply(self, prompt, turns, dice):\n        return prompt.columns['answer']\n"
        "class Mute:\n    calls = '?'\nclass Needy:\n    def __init__(self, what): pass\n"
    )

    def environment(name: str | None) -> Any:
        options = {} if name is None else {"environment": name}
        file_task = build_task(Task.model_validate({"type": "file", "path": f"{folder}/sums.jsonl", "heldout": 2, **options}))
        assert all((p.environment is None) == (name is None) for p in file_task.heldout)
        return file_task.train_prompt(0).environment

    assert environment(None) is None
    assert environment("calculator") == PureEnvironment(Calculator("<calc>", "</calc>"))
    shop = environment(f"{folder}/mine.py:Shop")
    assert shop is not None
    assert shop.reply(Prompt("p", "", columns={"answer": "4"}), ("?",), DICE) == "4"
    for name, because in [("Mute", "`calls`, a tuple"), ("Needy", "creating it failed"), ("Shup", "did you mean 'Shop'?")]:
        with pytest.raises(RecipeError) as caught:
            environment(f"{folder}/mine.py:{name}")
        assert caught.value.where == "task.environment"
        assert because in caught.value.because


def test_sums_differ_by_their_text() -> None:
    assert Sum("1+2", 2).key != Sum("2+1", 2).key
