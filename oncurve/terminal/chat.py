"""`oncurve chat`: one prompt after another, answered token by token as they are drawn.

A single stream is what transformers' own `generate` does well, and it hands over each token as it comes; the native engine is
built for groups. A model with a chat template is sent the whole conversation, any other goes on from each prompt by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from transformers.generation.streamers import BaseStreamer

from oncurve.errors import ModelError
from oncurve.models.policy import Policy
from oncurve.records import Prompt
from oncurve.terminal.text import clean

INVITE = "› "


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How answers are drawn. Temperature 0 is greedy: the same each time."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    system: str | None = None
    seed: int = 0


class Printer(BaseStreamer):  # type: ignore[misc]
    """Writes text as tokens come. The last character waits while it may be half of one: bytes arrive before characters do."""

    def __init__(self, policy: Policy, out: TextIO) -> None:
        self.policy, self.out = policy, out
        self.ids: list[int] = []
        self.shown = 0
        self.prompt_seen = False

    @property
    def text(self) -> str:
        return clean(str(self.policy.tokenizer.decode(self.ids, skip_special_tokens=True)))

    def put(self, value: torch.Tensor) -> None:
        """The prompt comes first, then a token at a time."""
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.ids += value.flatten().tolist()
        text = self.text
        if not text.endswith("�"):
            self._write(text)

    def end(self) -> None:
        self._write(self.text)
        self.out.write("\n")
        self.out.flush()

    def _write(self, text: str) -> None:
        self.out.write(text[self.shown :])
        self.out.flush()
        self.shown = len(text)


class Chat:
    """A conversation with a policy."""

    def __init__(self, policy: Policy, settings: ChatSettings) -> None:
        self.policy, self.settings = policy, settings
        policy.model.set_attn_implementation("eager")
        torch.manual_seed(settings.seed)
        self.forget()

    def forget(self) -> None:
        system = self.settings.system or self.policy.system_prompt
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    @property
    def talks(self) -> bool:
        return bool(self.policy.tokenizer.chat_template)

    def ask(self, text: str, out: TextIO) -> str:
        """Answers onto ``out`` and returns the answer."""
        said = [*self.messages, {"role": "user", "content": text}]
        prompt = Prompt("chat", messages=tuple(said)) if self.talks else Prompt("chat", text=text)
        ids = torch.from_numpy(self.policy.encode(prompt))[None].to(self.policy.device)
        room = self.policy.max_positions - ids.shape[1]
        if room < 1:
            raise ModelError(
                "chat",
                f"{ids.shape[1]} tokens",
                because=f"the model addresses {self.policy.max_positions} positions, its answer included",
                fix="ask something shorter, or begin anew with /new",
            )
        printer = Printer(self.policy, out)
        self.policy.model.generate(ids, attention_mask=torch.ones_like(ids), streamer=printer, **self._how(room))
        if self.talks:
            self.messages = [*said, {"role": "assistant", "content": printer.text}]
        return printer.text

    def _how(self, room: int) -> dict[str, Any]:
        settings = self.settings
        how: dict[str, Any] = {
            "max_new_tokens": min(settings.max_new_tokens, room),
            "eos_token_id": list(self.policy.eos_ids),
            "pad_token_id": self.policy.eos_ids[0],
            "do_sample": settings.temperature > 0,
        }
        # A model's own generation config may hold sampling settings; only what was asked for here counts.
        return how | {"temperature": settings.temperature or 1.0, "top_k": 0, "top_p": 1.0}


def converse(chat: Chat, lines: Iterable[str], out: TextIO, live: bool) -> None:
    """Each line is asked in turn: one conversation at a terminal; from a pipe (``live`` is False) each a prompt of its own."""
    if live:
        kind = "It remembers the conversation; /new begins another." if chat.talks else "It goes on from each prompt by itself."
        out.write(f"{kind} Ctrl-D ends.\n")
    for line in lines:
        if line == "/new" or not live:
            chat.forget()
        if not line.strip() or line == "/new":
            continue
        try:
            chat.ask(line, out)
        except ModelError as error:
            if not live:
                raise
            out.write(f"{error.what}: {error.because}; {error.fix}\n")


def typed_lines() -> Iterator[str]:
    """What a person types, with the line editing that `input` has, until Ctrl-D."""
    while True:
        try:
            yield input(INVITE)
        except EOFError:
            print()
            return
