"""`oncurve chat`: answers one prompt after another, printing tokens as they are sampled.

Uses transformers' `generate`, which suits a single stream; the native engine is built for groups. A model with a chat template
gets the complete conversation. Any other model continues each prompt on its own.
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

INPUT_PROMPT = "› "


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How answers are sampled. Temperature 0 is greedy."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    system: str | None = None
    seed: int = 0


class Printer(BaseStreamer):  # type: ignore[misc]
    """Prints tokens as they arrive. Holds back the end of the text while it is an incomplete UTF-8 character."""

    def __init__(self, policy: Policy, out: TextIO) -> None:
        self.policy, self.out = policy, out
        self.ids: list[int] = []
        self.shown = 0
        self.is_prompt_skipped = False

    @property
    def text(self) -> str:
        return clean(str(self.policy.tokenizer.decode(self.ids, skip_special_tokens=True)))

    def put(self, value: torch.Tensor) -> None:
        """transformers passes the prompt first, then one token at a time."""
        if not self.is_prompt_skipped:
            self.is_prompt_skipped = True
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
        self.reset()

    def reset(self) -> None:
        """Starts a new conversation."""
        system = self.settings.system or self.policy.system_prompt
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    @property
    def is_chat_model(self) -> bool:
        return bool(self.policy.tokenizer.chat_template)

    def ask(self, text: str, out: TextIO) -> str:
        """Prints the answer to ``out`` and returns it."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = Prompt("chat", messages=tuple(messages)) if self.is_chat_model else Prompt("chat", text=text)
        ids = torch.from_numpy(self.policy.encode(prompt))[None].to(self.policy.device)
        room = self.policy.max_positions - ids.shape[1]
        if room < 1:
            raise ModelError(
                "chat",
                f"{ids.shape[1]} tokens",
                because=f"the model has {self.policy.max_positions} positions, including its answer",
                fix="ask something shorter, or start a new conversation with /new",
            )
        printer = Printer(self.policy, out)
        self.policy.model.generate(ids, attention_mask=torch.ones_like(ids), streamer=printer, **self._generation_options(room))
        if self.is_chat_model:
            self.messages = [*messages, {"role": "assistant", "content": printer.text}]
        return printer.text

    def _generation_options(self, room: int) -> dict[str, Any]:
        settings = self.settings
        options: dict[str, Any] = {
            "max_new_tokens": min(settings.max_new_tokens, room),
            "eos_token_id": list(self.policy.eos_ids),
            "pad_token_id": self.policy.eos_ids[0],
            "do_sample": settings.temperature > 0,
        }
        # Override the sampling settings that a model's generation config may contain.
        return options | {"temperature": settings.temperature or 1.0, "top_k": 0, "top_p": 1.0}


def converse(chat: Chat, lines: Iterable[str], out: TextIO, live: bool) -> None:
    """Answers each line: one conversation at a terminal; from a pipe (``live`` is False) each line is a separate prompt."""
    if live:
        out.write(f"{_hint(chat)}\n")
    for line in lines:
        if line == "/new" or not live:
            chat.reset()
        if live and line in ("/help", "/?"):
            out.write(f"{_hint(chat)}\n")
            continue
        if not line.strip() or line == "/new":
            continue
        try:
            chat.ask(line, out)
        except ModelError as error:
            if not live:
                raise
            out.write(f"{error.what}: {error.because}; {error.fix}\n")


def _hint(chat: Chat) -> str:
    memory = "The model sees the conversation so far; /new starts another."
    return f"{memory if chat.is_chat_model else 'The model continues each prompt on its own.'} /help shows this, Ctrl-D ends."


def typed_lines() -> Iterator[str]:
    """Lines typed at the terminal, with the line editing of `input`, until Ctrl-D."""
    while True:
        try:
            yield input(INPUT_PROMPT)
        except EOFError:
            print()
            return
