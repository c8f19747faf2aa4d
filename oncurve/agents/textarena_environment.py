"""Single-player games of textarena, named by id, as in `textarena:Sudoku-v0`. Their tool is `act`; observations are texts."""

from __future__ import annotations

import contextlib
import io
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

from oncurve.errors import MissingPackage, RecipeError, pip_install

_RANDOM = threading.Lock()
"""Held while a game runs: textarena seeds and uses the random numbers of Python's `random` module, which all threads share."""


def textarena_class(id: str, where: str, options: Mapping[str, Any]) -> type:
    """A class of environments by TRL's contract. Raises an error, which names ``where``, if the model can't play it alone."""
    try:
        import textarena
    except ModuleNotFoundError as error:
        because = "games of textarena are an optional extra"
        raise MissingPackage(where, "textarena is not installed", because=because, fix=pip_install("textarena")) from error

    def begin(seed: int) -> tuple[Any, Any]:
        """(a new game in its wrappers, which complete the format of a move; the bare game, so that no message repeats)."""
        with contextlib.redirect_stdout(io.StringIO()):  # some print
            wrapped = textarena.make(id, **options)
            wrapped.reset(num_players=1, seed=seed)
        game = wrapped
        while isinstance(game, textarena.Wrapper):
            game = game.env
        return wrapped, game

    def observe(game: Any) -> str:
        """What the game has said since the last time, without the player's own moves."""
        _, messages = game.get_observation()
        return "\n".join(text.strip() for sender, text, _ in messages if sender == textarena.GAME_ID)

    _check(id, where, begin)

    class TextArenaEnvironment:
        has_group_seed = True
        """Without a column `seed`, all completions of a group play the same episode."""

        def reset(self, seed: int, **columns: Any) -> str:
            """Begins a game. The row's column `seed` determines it."""
            self._state = random.Random(seed).getstate()
            self._wrapped, self._game = self._alone(lambda: begin(seed))
            self._is_over, self._reward = False, 0.0
            return f"\n{observe(self._game)}"

        def act(self, action: str) -> str:
            if self._is_over:
                raise ValueError("the game is over")
            self._is_over, _ = self._alone(lambda: self._wrapped.step(action))
            text = observe(self._game)
            if not self._is_over:
                return text
            rewards, info = self._wrapped.close()
            self._reward = float(rewards[0])
            return "\n".join(filter(None, (text, info[0].get("reason"), f"reward {self._reward:g}; over")))

        def get_reward(self) -> float:
            """What the game says at its end; 0 if it did not end."""
            return self._reward

        def _alone(self, play: Callable[[], Any]) -> Any:
            """Runs ``play`` with the random state of this game."""
            with _RANDOM:
                others = random.getstate()
                random.setstate(self._state)
                try:
                    return play()
                finally:
                    self._state = random.getstate()
                    random.setstate(others)

    TextArenaEnvironment.act.__doc__ = f"""
        Make a move in {id}.

        Args:
            action: The move, as the rules describe it.

        Returns:
            What the game answers.
        """
    TextArenaEnvironment.__name__ = id
    return TextArenaEnvironment


def _check(id: str, where: str, begin: Callable[[int], tuple[Any, Any]]) -> None:
    """Raises RecipeError if there is no such game, or if it needs more than the model and a seed."""
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    what = f"textarena:{id}"
    if id not in ENV_REGISTRY:
        fix = "name an id of textarena.envs.registration.ENV_REGISTRY, such as GuessTheNumber-v0"
        raise RecipeError(where, what, because="textarena has no game of this id", fix=fix)
    alone = "use a game for one player, or write a class whose methods play the others' moves"
    try:
        with _RANDOM:
            _, game = begin(0)
    except AssertionError as error:  # what a state for several players raises
        because = "the game has other players, and only the model plays"
        raise RecipeError(where, what, because=because, fix=alone) from error
    except Exception as error:  # what a game's own packages and data raise
        because = f"it does not begin: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise RecipeError(where, what, because=because, fix="install what the game needs, or use another game") from error
    if not isinstance(game.state, textarena.SinglePlayerState):
        because = "the game has other players, and only the model plays"
        raise RecipeError(where, what, because=because, fix=alone)
    if any(isinstance(part, textarena.Agent) for part in vars(game).values()):
        because = "another model of a service answers in this game, so a run could not be repeated"
        raise RecipeError(where, what, because=because, fix="use a game that needs no other model")
