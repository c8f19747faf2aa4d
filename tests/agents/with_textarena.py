"""Games of textarena. test_other_packages.py runs these tests in an environment that has it."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import textarena

from oncurve.agents.tool_environment import ToolEnvironment
from oncurve.errors import RecipeError
from oncurve.tasks.environments import load_environment
from tests.agents.demonstrated import demonstration, train_tiny


def game_class(id: str) -> Any:
    environment = load_environment(f"textarena:{id}", "task.environment")
    assert isinstance(environment, ToolEnvironment)
    return environment.factory


def own_loop(id: str, seed: int, actions: list[str]) -> tuple[list[str], Any]:
    """The game's messages after each action, and its rewards, in textarena's own loop."""
    game = textarena.make(f"{id}-raw")
    game.reset(num_players=1, seed=seed)
    texts = []
    for action in [None, *actions]:
        if action is not None:
            game.step(action)
        _, messages = game.get_observation()
        texts.append([text.strip() for sender, text, _ in messages if sender == textarena.GAME_ID])
    rewards, _ = game.close()
    return ["\n".join(text) for text in texts], rewards


def test_an_episode_is_that_of_its_own_loop() -> None:
    for name, actions in {
        "GuessTheNumber-v0": ["[10]", "[5]", "[5]", "[4]"],
        "TowerOfHanoi-v0": ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"],
        "2048-v0-ultra-easy": ["[left]", "[up]", "[right]", "[down]"] * 3,
    }.items():
        texts, rewards = own_loop(name, 7, actions)
        game = game_class(name)()
        said = [game.reset(seed=7), *(game.act(action) for action in actions)]
        assert [text.partition("\nreward")[0].lstrip("\n") for text in said[:-1]] == texts[:-1]
        if rewards is not None:
            assert said[-1].endswith("over")
            assert game.get_reward() == rewards[0]
            with pytest.raises(ValueError, match="over"):
                game.act("[1]")


def test_right_and_wrong_guesses() -> None:
    kind = game_class("GuessTheNumber-v0")
    rewards = {}
    for guess in range(1, 21):
        game = kind()
        assert "between 1 and 20" in game.reset(seed=3)
        answer = game.act(f"{guess}")
        rewards[guess] = game.get_reward()
        assert ("over" in answer) == (rewards[guess] == 1.0)
    assert sorted(rewards.values()) == [0.0] * 19 + [1.0], "one of the numbers ends the game at once"


def test_options_of_a_game() -> None:
    environment = load_environment("textarena:GuessTheNumber-v0", "task.environment", options={"max_number": 5})
    assert isinstance(environment, ToolEnvironment)
    assert environment.factory is not None
    assert "between 1 and 5" in environment.factory().reset(seed=3)
    with pytest.raises(RecipeError, match=r"highest"):
        load_environment("textarena:GuessTheNumber-v0", "task.environment", options={"highest": 5})


def test_games_at_the_same_time_share_no_random_numbers() -> None:
    """textarena uses Python's global random numbers; 2048 takes some with every move."""
    kind, moves = game_class("2048-v0"), ["[left]", "[up]", "[right]", "[up]"] * 5

    def play(seed: int) -> list[str]:
        game = kind()
        texts = [game.reset(seed=seed)]
        for move in moves:
            try:
                texts.append(game.act(move))
            except ValueError:  # over
                break
        return texts

    alone = [play(seed) for seed in range(6)]
    assert len({text[-1] for text in alone}) == 6
    together: dict[int, list[str]] = {}
    threads = [threading.Thread(target=lambda seed: together.update({seed: play(seed)}), args=(seed,)) for seed in range(6)]
    random.seed(1)
    expected = random.Random(1).random()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[seed] for seed in range(6)] == alone
    assert random.random() == expected, "others' random numbers stay as they were"


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("NoSuchGame-v0", "textarena has no game of this id"),
        ("TicTacToe-v0", "other players"),
        ("SecretMafia-v0", "other players"),
        ("IteratedPrisonersDilemma-v0", "other players"),
        ("TwentyQuestions-v0", "OPENROUTER_API_KEY"),
        ("Wordle-v0", "it does not begin: LookupError"),
    ],
)
def test_a_game_that_can_not_be_played(id: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    monkeypatch.setattr("nltk.download", lambda *_, **__: False)
    with pytest.raises(RecipeError, match=rf"task\.environment: textarena:{id}(?s:.*){message}"):
        load_environment(f"textarena:{id}", "task.environment")


def test_a_game_that_asks_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "none")
    with pytest.raises(RecipeError, match="another model of a service"):
        load_environment("textarena:TwentyQuestions-v0", "task.environment")


def test_a_run_with_textarena(tmp_path: Path) -> None:
    kind, demonstrations = game_class("GuessTheNumber-v0"), []
    for seed in range(2):
        for guess in (5, 10):
            game = kind()
            prompt = f"game {seed}{game.reset(seed=seed)}"
            call = {"name": "act", "arguments": {"action": f"[{guess}]"}}
            demonstrations.append(demonstration(prompt, call, game.act(f"[{guess}]")))
    rows = [{"prompt": f"game {seed}", "seed": seed} for seed in range(2)]
    calls = train_tiny(tmp_path, "textarena:GuessTheNumber-v0", rows, demonstrations)
    assert any("The target number is" in call.result for call in calls)
