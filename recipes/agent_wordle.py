"""Wordle: the environment of agent-wordle.toml. Run as a program, it writes the recipe's games and demonstrations:

python recipes/agent_wordle.py              three letters, for the built-in model
python recipes/agent_wordle.py five.jsonl   five letters, with the rules in words, for a pretrained model
"""

import itertools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GUESSES = 6
THREE = tuple("".join(letters) for letters in itertools.product("bdgt", "aeo", "bdgt"))
"""A consonant, a vowel and a consonant: not all of them are English."""
_LIST = """
about above actor adult after again agent agree alarm album alive allow alone angle apple apron arena arise array aside
badge baker basic beach berry birth black blank blaze blend block board bonus brain brave bread brick bring brown brush
cabin cable camel candy cargo carry cause chain chair chalk cheap check chess chest child civic clean clear clock cloud
crane daily dairy dance delay depth dozen draft dream dress drift drink eager eagle early earth eight elbow empty enjoy equal
event every exact faith fence ferry fever field final flame fleet floor flour fresh front fruit giant glass globe grade
grain grape grass green guess guide happy heart heavy hello honey horse hotel house human ideal image index jelly judge
juice knife knock label large laser later layer learn lemon level light limit linen local lucky lunch magic major maple
march match medal metal minor model money month mouse mouth music night noise north novel ocean offer olive onion orbit
order paint panel paper party peace pearl phone piano pilot plain plane plant plate point power press price pride prize
proud queen quick quiet radio raise range rapid reach ready river robot rough round royal salad scale score seven shade
shape sharp sheep shelf shine shirt short skill sleep small smile smoke snake solid sound south space spoon stage stair
steel stone storm sugar sweet table taste teeth thank tiger title toast tooth total touch tower train treat trust uncle
under upper usual valid value video visit voice wagon water whale wheat wheel white woman world worry wrong yield young
"""
FIVE = tuple(_LIST.split())
RULES = (
    "We play Wordle. I think of an English word of five letters, and you have six guesses. Write a guess in brackets, as in "
    "[crane], and I answer with a sign for each of its letters: the letter itself if it is in the word at this place, ? if it "
    "is in the word at another place, - if it is not. I answer ! to what is no such word."
)
_GUESS = re.compile(r"\[([^\[\]]*)\]")


class Wordle:
    """The pure form: replies to a guess in brackets by the prompt's column `secret`."""

    calls = ("]",)

    def reply(self, prompt: Any, turns: Sequence[str], dice: object) -> str | None:
        """The marks of a guess, or ! if it is not in the list; None if the game is over or the turn has no guess."""
        secret, found = prompt.columns["secret"], _GUESS.findall(turns[-1])
        if not found or found[-1] == secret or len(turns[::2]) == GUESSES:
            return None
        return mark(secret, found[-1]) if found[-1] in words_like(secret) else "!"


def words_like(secret: str) -> tuple[str, ...]:
    return THREE if len(secret) == 3 else FIVE


def mark(secret: str, guess: str) -> str:
    """A letter at its place is repeated; ? stands for one at another place, and - for any other. A letter is marked as often as
    it is in the secret: first those at their place, then the others from the left."""
    left = Counter(a for a, b in zip(secret, guess, strict=True) if a != b)
    marks = []
    for a, b in zip(secret, guess, strict=True):
        if a == b:
            marks.append(b)
        else:
            marks.append("?" if left[b] > 0 else "-")
            left[b] -= 1
    return "".join(marks)


def found(completion: str, secret: str) -> float:
    """The reward: 1 if the secret is among the guesses. All brackets are the policy's, because replies have none."""
    return float(secret in _GUESS.findall(completion)[:GUESSES])


def demonstration(secret: str, dice: random.Random) -> str:
    """A game. Every guess keeps the letters that are at their place, and is any of the words that have them."""
    guess = dice.choice(THREE)
    text = f"[{guess}]"
    for _ in range(GUESSES - 1):
        if guess == secret:
            break
        marks = mark(secret, guess)
        guess = dice.choice([word for word in THREE if all(m in ("?", "-", a) for m, a in zip(marks, word, strict=True))])
        text += f"{marks}[{guess}]"
    return text


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    dice, here = random.Random(0), Path(__file__).parent
    if len(sys.argv) > 1:
        rows = [{"prompt": f"{RULES} This is game {number}.", "secret": word} for number, word in enumerate(FIVE, 1)]
        write_rows(Path(sys.argv[1]), rows)
    else:
        games = [{"prompt": f"{number}:", "secret": dice.choice(THREE)} for number in range(100, 500)]
        write_rows(here / "agent-wordle.jsonl", games)
        secrets = [dice.choice(THREE) for _ in range(2000)]
        shown = [{"prompt": f"{dice.randint(500, 999)}:", "completion": demonstration(secret, dice)} for secret in secrets]
        write_rows(here / "agent-wordle-demos.jsonl", shown)
