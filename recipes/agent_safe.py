"""A safe with a dial: the environment of agent-safe.toml. Run as a program, it writes the recipe's demonstrations."""

import json
import random
from pathlib import Path


class Safe:
    """By TRL's contract: `reset` gets the row's columns, public methods are tools, `get_reward` scores the episode.

    Every turn of the dial is answered with where the code lies now: `<` to the left, `>` to the right, `=` here. A safe that is
    opened at another number is locked for good.
    """

    def reset(self, dial: int, code: int, **columns: object) -> str:
        self.dial, self.code, self.state = dial, code, "shut"
        return f" {self._direction()}"

    def left(self) -> str:
        """
        Turn the dial to the left.

        Returns:
            Where the code lies now.
        """
        self.dial -= 1
        return self._direction()

    def right(self) -> str:
        """
        Turn the dial to the right.

        Returns:
            Where the code lies now.
        """
        self.dial += 1
        return self._direction()

    def open(self) -> str:
        """
        Open the safe.

        Returns:
            Whether it is open, or locked for good.
        """
        if self.state == "shut":
            self.state = "open" if self.dial == self.code else "locked"
        return self.state

    def get_reward(self) -> float:
        return float(self.state == "open")

    def _direction(self) -> str:
        return "=" if self.dial == self.code else "<" if self.code < self.dial else ">"


def demonstration(dice: random.Random) -> list[dict[str, str]]:
    """A conversation of up to four calls: the dial is turned as the answers say, and a quarter of the calls, wherever the dial
    is, open the safe."""
    safe, dial = Safe(), dice.randint(10, 90)
    start = safe.reset(dial, dial + dice.choice((-2, -1, 1, 2)))
    messages = [{"role": "user", "content": f"open safe {dice.randint(100, 999)}{start}"}]
    for _ in range(4):
        turn = {"<": "left", ">": "right", "=": dice.choice(("left", "right"))}[safe._direction()]
        name = "open" if dice.random() < 0.25 else turn
        messages.append({"role": "assistant", "content": f'<tool_call>{{"name":"{name}"}}</tool_call>'})
        messages.append({"role": "tool", "content": getattr(safe, name)()})
        if safe.state != "shut":
            break
    return [*messages, {"role": "assistant", "content": "done"}]


if __name__ == "__main__":
    dice = random.Random(0)
    lines = [json.dumps({"prompt": demonstration(dice)}) + "\n" for _ in range(400)]
    Path(__file__).with_name("agent-safe-demos.jsonl").write_text("".join(lines))
