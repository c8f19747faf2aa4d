"""The task `guess`: the environment's rules, and valid demonstrations."""

import numpy as np
import pytest

from oncurve.errors import RecipeError
from oncurve.recipe.schema.sections import Task
from oncurve.records import Prompt
from oncurve.rewards.verifiers.puzzles import GuessReward, GuessRewardOptions
from oncurve.tasks.base import Task as AnyTask
from oncurve.tasks.puzzles.guess import GuessEnvironment, Secret, guesses_in, halvings, play
from oncurve.tasks.registry import build_task
from tests.rewards.builders import aspects, values
from tests.tasks.puzzles.test_calculator import follow

DICE = np.random.default_rng(0)


def task(**options: object) -> AnyTask:
    return build_task(Task.model_validate({"type": "guess", "heldout": 30, "examples": 40, **options}))


def game(secret: int = 8, guesses: int = 4) -> Prompt:
    return Prompt("p", "1-15:", columns={"secret": secret, "guesses": guesses})


@pytest.mark.parametrize(
    ("turns", "answer"),
    [
        (("4?",), ">"),
        (("12?",), "<"),
        (("12 ?",), "<"),
        (("8?",), None),
        (("?",), "!"),
        (("-?",), "!"),
        (("8",), None),
        (("4?", ">", "12?"), "<"),
        (("1?", ">", "2?", ">", "3?", ">", "4?"), None),
        (("99999999999999999999?",), "<"),
    ],
)
def test_replies(turns: tuple[str, ...], answer: str | None) -> None:
    assert GuessEnvironment().reply(game(), turns, DICE) == answer


def test_halving_finds_any_number_in_the_guesses_allowed() -> None:
    for size in range(2, 40):
        for secret in range(1, size + 1):
            low, high, used = 1, size, 1
            while (guess := (low + high) // 2) != secret:
                low, high, used = (low, guess - 1, used + 1) if secret < guess else (guess + 1, high, used + 1)
            assert used <= halvings(size)
    assert [halvings(size) for size in (2, 3, 4, 7, 8, 15, 16)] == [2, 2, 3, 3, 4, 4, 5]


def test_demonstrations_are_won_games() -> None:
    for example in task().examples:
        follow(example.prompt, example.turns)
        assert guesses_in(example.completion)[-1] == example.prompt.columns["secret"]
        assert len(example.turns[::2]) <= example.prompt.columns["guesses"]
    lost = [play(Secret(1, 15, 1), 2, np.random.default_rng(seed)) for seed in range(20)]
    assert None in lost


def test_ranges_and_secrets() -> None:
    games = task(largest=30, min_size=4, max_size=9)
    prompts = [games.train_prompt(i) for i in range(500)]
    for prompt in prompts:
        low, high = map(int, prompt.shown.rstrip(":").split("-"))
        assert 1 <= low <= prompt.columns["secret"] <= high <= 30
        assert 4 <= high - low + 1 <= 9
        assert prompt.columns["guesses"] == halvings(high - low + 1)
    assert not {p.shown for p in games.heldout} & {p.shown for p in prompts}, "whole ranges are held out"
    assert len({p.shown for p in games.heldout}) == 30
    assert task(guesses=9).train_prompt(0).columns["guesses"] == 9
    assert "6 guesses" in task(guesses=6, chat=True).train_prompt(0).shown
    with pytest.raises(RecipeError, match=r"task\.heldout"):
        _ = task(largest=6, min_size=6, max_size=6).heldout


def test_the_reward_is_more_for_fewer_guesses() -> None:
    reward = GuessReward("guess", 1.0)
    found = values(reward, "8?", "4?>8?", "4?>12?<8?", "1?>2?>3?>4?", "8", "?!8?", secret=8, guesses=4)
    assert found == [1.375, 1.25, 1.125, 0.0, 0.0, 1.25]
    assert values(GuessReward("guess", 1.0, GuessRewardOptions(early=0.0)), "8?", secret=8, guesses=4) == [1.0]
    assert values(reward, "8?", answer="8") == [None]
    assert aspects(reward, "4?>8?", columns={"secret": 8, "guesses": 4})[0].reason == "found 8 with guess 2 of 4"
