"""Converts a row of data to a prompt and demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

from oncurve.errors import DataError, RecipeError
from oncurve.records import Environment, Example, Prompt


@dataclass(frozen=True)
class RowReader:
    """How the rows of a file are read. ``answer`` and ``difficulty`` name the columns that rewards and tables read as such.

    A prompt column with a list of messages is a chat; ``chat`` makes one of a text, and ``system`` is put before either.

    Example: ``RowReader(answer="label").read({"prompt": "2+2=", "label": "4"}, "a.jsonl:1", "a/1").columns["answer"]`` is "4"
    """

    prompt: str = "prompt"
    answer: str = "answer"
    completion: str = "completion"
    difficulty: str | None = None
    template: str | None = None
    chat: bool = False
    system: str | None = None
    environment: Environment | None = None

    def read(self, row: Mapping[str, Any], where: str, id: str) -> Prompt:
        """The prompt of a row, with all of its columns for the rewards.

        `prompt` and `completion` are names that rewards have for other things: columns of these names do not reach them.
        """
        content = self._prompt_of(row, where)
        columns = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
        columns |= {"answer": row[self.answer]} if self.answer in row else {}
        columns |= {"difficulty": row[self.difficulty]} if self.difficulty is not None else {}
        if isinstance(content, str) and not self.chat:
            return Prompt(id=id, text=content, columns=columns, environment=self.environment)
        messages = ({"role": "user", "content": content},) if isinstance(content, str) else content
        system = ({"role": "system", "content": self.system},) if self.system is not None else ()
        return Prompt(id=id, messages=(*system, *messages), columns=columns, environment=self.environment)

    def example(self, row: Mapping[str, Any], prompt: Prompt, where: str) -> Example | None:
        """The demonstration of a row; None if it has no completion."""
        completion = row.get(self.completion)
        if completion is None:
            return None
        text = _content(completion)
        if not text:
            raise DataError(
                where,
                f"column '{self.completion}' holds {_short(completion)}",
                because="a demonstration needs a text to imitate (or one message)",
                fix="write a text there, or remove the column from this row",
            )
        return Example(prompt, text)

    def examples(self, row: Mapping[str, Any], prompt: Prompt, where: str) -> list[Example]:
        """The demonstrations of a row: its completion, or each answer of a chat that ends with one."""
        example = self.example(row, prompt, where)
        if example is not None:
            return [example]
        chat = row.get(self.prompt) if self.template is None else None
        if isinstance(chat, str) or not chat or not _is_answer(chat[-1]):
            return []
        added = len(prompt.messages or ()) - (len(chat) - 1)  # system messages that the task adds
        messages = (*(prompt.messages or ()), chat[-1])
        answers = [i for i, message in enumerate(messages) if i >= added and _is_answer(message)]
        return [
            Example(replace(prompt, id=f"{prompt.id}/{i}", messages=messages[:i]), messages[i]["content"])
            for i in answers
            if i > 0 and messages[i]["content"]
        ]

    def required_columns(self) -> list[str]:
        """The columns that every row must have."""
        prompt = [self.prompt] if self.template is None else template_columns(self.template)
        return prompt + ([self.difficulty] if self.difficulty is not None else [])

    def _prompt_of(self, row: Mapping[str, Any], where: str) -> str | tuple[Mapping[str, str], ...]:
        missing = [name for name in self.required_columns() if name not in row]
        if missing:
            raise DataError(
                where,
                f"no column '{missing[0]}'",
                because=f"the columns found there are: {', '.join(map(str, row)) or 'none'}",
                fix="name the right columns in the task (prompt, prompt_template, difficulty), or fix the data",
            )
        content: object = row[self.prompt] if self.template is None else fill(self.template, row)
        if isinstance(content, str) and content:
            return content
        if isinstance(content, Sequence) and content and all(is_message(message) for message in content):
            has_answer = _is_answer(content[-1]) and len(content) > 1  # a complete chat: the prompt ends before the last answer
            return tuple({"role": m["role"], "content": m["content"]} for m in (content[:-1] if has_answer else content))
        raise DataError(
            where,
            f"the prompt is {_short(content)}",
            because="a prompt is a text that is not empty, or a list of messages with role and content",
            fix=f"fix the column '{self.prompt}'",
        )


def template_columns(template: str) -> list[str]:
    """The columns of a template. Only plain `{column}` is allowed: `{a.b}` and `{a!r:>9}` could reach into objects."""
    try:
        parts = [(name, spec, conversion) for _, name, spec, conversion in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise _template_error(template, str(error)) from None
    for name, spec, conversion in parts:
        if not name or spec or conversion or not all(c.isalnum() or c in "_- " for c in name):
            raise _template_error(template, f"'{{{name}}}' is not the plain name of a column")
    return [name for name, _, _ in parts]


def fill(template: str, row: Mapping[str, Any]) -> str:
    """The template with each `{column}` replaced by the row's value."""
    parts = Formatter().parse(template)
    return "".join(literal + ("" if name is None else str(row[name])) for literal, name, _, _ in parts)


def _template_error(template: str, because: str) -> RecipeError:
    return RecipeError(
        "task.prompt_template", template, because=because, fix="use {column}, and {{ or }} for a literal bracket"
    )


def is_message(message: object) -> bool:
    """Whether a value is a chat message: a role and a text."""
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def _is_answer(message: object) -> bool:
    return is_message(message) and isinstance(message, Mapping) and message["role"] == "assistant"


def _content(completion: object) -> str | None:
    """The text of a completion that is a text or a list with one message."""
    if isinstance(completion, Sequence) and not isinstance(completion, str) and len(completion) == 1:
        completion = completion[0]["content"] if is_message(completion[0]) else None
    return completion if isinstance(completion, str) else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
