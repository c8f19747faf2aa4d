"""`oncurve chat`: answers one prompt after another, printing tokens as they are sampled.

Uses transformers' `generate`, which suits a single stream; the native engine is built for groups. A model with a chat template
gets the complete conversation. Any other model continues each prompt on its own. With an environment, tool calls run and their
results are printed, and the model has another turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from oncurve.engines.interactive import InteractiveEpisode
from oncurve.engines.native.sequence import ends_with_stop
from oncurve.errors import DataError, ModelError, OncurveError, printable
from oncurve.models.policy import Policy
from oncurve.records import Environment, Observation, Prompt, StatefulEnvironment, StopReason

INPUT_PROMPT = "› "
ENVIRONMENT_FIX = (
    """if it reads the columns of a row, give them, such as --columns '{"name": 3}'; else correct it, or leave out --tools"""
)


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How answers are sampled. Temperature 0 is greedy. ``environment`` runs the model's tool calls, and ``columns`` are those
    of the row that it begins with."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    system: str | None = None
    seed: int = 0
    environment: Environment | StatefulEnvironment | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


class Printer(BaseStreamer):  # type: ignore[misc]
    """Prints tokens as they arrive. Holds back the end of the text while it is an incomplete UTF-8 character."""

    def __init__(self, policy: Policy, out: TextIO) -> None:
        self.policy, self.out = policy, out
        self.ids: list[int] = []
        self.shown = 0
        self.is_prompt_skipped = False

    @property
    def text(self) -> str:
        return printable(str(self.policy.tokenizer.decode(self.ids, skip_special_tokens=True)))

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


class TurnEnd(StoppingCriteria):  # type: ignore[misc]
    """Ends a turn after one of the strings in the environment's `calls`."""

    def __init__(self, policy: Policy, prompt_tokens: int, calls: tuple[str, ...]) -> None:
        self.policy, self.prompt_tokens, self.calls = policy, prompt_tokens, calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        is_over = ends_with_stop(self.policy, input_ids[0, self.prompt_tokens :].tolist(), self.calls)
        return torch.full((1,), is_over, device=input_ids.device)


class Chat:
    """A conversation with a policy."""

    def __init__(self, policy: Policy, settings: ChatSettings) -> None:
        self.policy, self.settings = policy, settings
        self.episode: InteractiveEpisode | None = None
        policy.model.set_attn_implementation("eager")
        policy.model.generation_config = GenerationConfig()  # a model's own may penalise repetition or exclude tokens
        torch.manual_seed(settings.seed)
        self.reset()

    def reset(self) -> None:
        """Starts a new conversation."""
        system = self.settings.system or self.policy.system_prompt
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        if self.episode is not None:
            self.episode.close()
            self.episode = None

    @property
    def is_chat_model(self) -> bool:
        return bool(self.policy.tokenizer.chat_template)

    def ask(self, text: str, out: TextIO) -> str:
        """Prints the answer to ``out`` and returns it."""
        if self.settings.environment is not None:
            return self._ask_with_environment(text, out)
        messages = [*self.messages, {"role": "user", "content": text}]
        printer, _ = self._sample(self.policy.encode(self._prompt(messages, text)).tolist(), out)
        if self.is_chat_model:
            self.messages = [*messages, {"role": "assistant", "content": printer.text}]
        return printer.text

    def _prompt(self, messages: Sequence[Mapping[str, str]], text: str) -> Prompt:
        columns, environment = self.settings.columns, self.settings.environment
        if self.is_chat_model:
            return Prompt("chat", messages=tuple(messages), columns=columns, environment=environment)
        return Prompt("chat", text=text, columns=columns, environment=environment)

    def _ask_with_environment(self, text: str, out: TextIO) -> str:
        """`ask` with an environment: the answer is the model's last turn."""
        if self.episode is not None and self.is_chat_model:
            self.episode.ask(text)
        else:
            self.reset()
            prompt = self._prompt([*self.messages, {"role": "user", "content": text}], text)
            self.episode = InteractiveEpisode(self.policy, prompt, self.settings.seed)
            start = self.episode.start()
            self.episode.open(None if start is None else start.result())
        while True:
            printer, turn_ids = self._sample(self.episode.token_ids, out, self.episode.prompt.calls)
            is_called = bool(self.episode.prompt.calls) and ends_with_stop(self.policy, turn_ids, self.episode.prompt.calls)
            stop: StopReason = "end" if turn_ids[-1] in self.policy.eos_ids else "stop_string" if is_called else "length"
            try:
                observation = self.episode.answer(turn_ids, stop).result()
            except DataError as error:
                self.reset()
                raise DataError("chat", error.what, because=error.because, fix=ENVIRONMENT_FIX) from error
            self._show(observation, out)
            if self.episode.add(observation) is None:
                return printer.text

    def _show(self, observation: Observation, out: TextIO) -> None:
        """Prints what the environment has answered. Raises DataError if it has failed."""
        for call in observation.calls:
            out.write(f"→ {printable(call.name)}: {printable(call.result)}\n")
        if isinstance(observation.reply, str):
            out.write(f"→ {printable(observation.reply)}\n")
        out.flush()
        if observation.failure is not None:
            self.reset()
            raise DataError(
                "chat",
                f"the environment failed: {printable(observation.failure)}",
                because="the conversation can't continue without it",
                fix=ENVIRONMENT_FIX,
            )

    def _sample(self, prompt_ids: Sequence[int], out: TextIO, calls: tuple[str, ...] = ()) -> tuple[Printer, list[int]]:
        """Samples a turn while it is printed. Returns its printer, and its tokens with the end token."""
        ids = torch.tensor([prompt_ids], device=self.policy.device)
        room = self.policy.max_positions - ids.shape[1]
        if room < 1:
            raise ModelError(
                "chat",
                f"{ids.shape[1]} tokens",
                because=f"the model has {self.policy.max_positions} positions, including its answer",
                fix="ask something shorter, or start a new conversation with /new",
            )
        printer, options = Printer(self.policy, out), self._generation_options(room)
        if calls:
            options["stopping_criteria"] = StoppingCriteriaList([TurnEnd(self.policy, ids.shape[1], calls)])
        self.policy.model.generate(ids, attention_mask=torch.ones_like(ids), streamer=printer, **options)
        return printer, printer.ids

    def _generation_options(self, room: int) -> dict[str, Any]:
        settings = self.settings
        return {
            "max_new_tokens": min(settings.max_new_tokens, room),
            "eos_token_id": list(self.policy.eos_ids),
            "pad_token_id": self.policy.eos_ids[0],
            "do_sample": settings.temperature > 0,
            "temperature": settings.temperature or 1.0,
            "top_k": 0,
            "top_p": 1.0,
        }


def converse(chat: Chat, lines: Iterable[str], out: TextIO, live: bool) -> None:
    """Answers each line. At a terminal the lines are one conversation; from a pipe (``live`` is False) each is a new one."""
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
        except OncurveError as error:
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
