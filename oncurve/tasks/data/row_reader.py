"""Makes a prompt from a row of data: which column is asked, and in what words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

from oncurve.errors import DataError, RecipeError
from oncurve.records import Environment, Example, Prompt


@dataclass(frozen=True)
class RowReader:
    """How rows of one source are read. `answer` and `difficulty` name columns that rewards and tables know under those words.

    A prompt column that holds a list of messages is a chat already; `chat` makes one of a text, `system` goes before either.
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
        """The prompt of a row; every column of it goes along, for the rewards."""
        columns = {name: value for name, value in row.items() if name not in (self.prompt, self.completion)}
        columns |= {"answer": row[self.answer]} if self.answer in row else {}
        columns |= {"difficulty": row[self.difficulty]} if self.difficulty is not None else {}
        asked = self._prompt_of(row, where)
        if isinstance(asked, str) and not self.chat:
            return Prompt(id=id, text=asked, columns=columns, environment=self.environment)
        messages = ({"role": "user", "content": asked},) if isinstance(asked, str) else asked
        system = ({"role": "system", "content": self.system},) if self.system is not None else ()
        return Prompt(id=id, messages=(*system, *messages), columns=columns, environment=self.environment)

    def example(self, row: Mapping[str, Any], prompt: Prompt, where: str) -> Example | None:
        """The worked example of a row, where it has a completion."""
        completion = row.get(self.completion)
        if completion is None:
            return None
        text = _content(completion)
        if not text:
            raise DataError(
                where,
                f"column '{self.completion}' holds {_short(completion)}",
                because="a worked example needs a text to imitate (or one message)",
                fix="write a text there, or leave the column out of this row",
            )
        return Example(prompt, text)

    def examples(self, row: Mapping[str, Any], prompt: Prompt, where: str) -> list[Example]:
        """The worked examples of a row: its completion, or each answer of a chat that ends with one."""
        one = self.example(row, prompt, where)
        if one is not None:
            return [one]
        asked = row.get(self.prompt) if self.template is None else None
        if isinstance(asked, str) or not asked or not _is_answer(asked[-1]):
            return []
        opened = len(prompt.messages or ()) - (len(asked) - 1)  # system messages that the task adds
        whole = (*(prompt.messages or ()), asked[-1])
        places = [i for i, message in enumerate(whole) if i >= opened and _is_answer(message)]
        return [
            Example(replace(prompt, id=f"{prompt.id}/{i}", messages=whole[:i]), whole[i]["content"])
            for i in places
            if i > 0 and whole[i]["content"]
        ]

    def needed(self) -> list[str]:
        """The columns that every row must have."""
        asked = [self.prompt] if self.template is None else template_columns(self.template)
        return asked + ([self.difficulty] if self.difficulty is not None else [])

    def _prompt_of(self, row: Mapping[str, Any], where: str) -> str | tuple[Mapping[str, str], ...]:
        missing = [name for name in self.needed() if name not in row]
        if missing:
            raise DataError(
                where,
                f"no column '{missing[0]}'",
                because=f"the columns found there are: {', '.join(map(str, row)) or 'none'}",
                fix="name the right columns in the task (prompt, prompt_template, difficulty), or mend the data",
            )
        asked: object = row[self.prompt] if self.template is None else fill(self.template, row)
        if isinstance(asked, str) and asked:
            return asked
        if isinstance(asked, Sequence) and asked and all(is_message(message) for message in asked):
            answered = _is_answer(asked[-1]) and len(asked) > 1  # a whole chat: the last answer is what is asked for
            return tuple({"role": m["role"], "content": m["content"]} for m in (asked[:-1] if answered else asked))
        raise DataError(
            where,
            f"the prompt is {_short(asked)}",
            because="a prompt is a text that is not empty, or a list of messages with role and content",
            fix=f"mend the column '{self.prompt}'",
        )


def template_columns(template: str) -> list[str]:
    """The columns a template names. Only plain `{column}` is allowed: `{a.b}` and `{a!r:>9}` could reach into objects."""
    try:
        parts = [(name, spec, conversion) for _, name, spec, conversion in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise _template_error(template, str(error)) from None
    for name, spec, conversion in parts:
        if not name or spec or conversion or not all(c.isalnum() or c in "_- " for c in name):
            raise _template_error(template, f"'{{{name}}}' is not the plain name of a column")
    return [name for name, _, _ in parts]


def fill(template: str, row: Mapping[str, Any]) -> str:
    """The template with each `{column}` replaced by what the row holds there."""
    parts = Formatter().parse(template)
    return "".join(literal + ("" if name is None else str(row[name])) for literal, name, _, _ in parts)


def _template_error(template: str, because: str) -> RecipeError:
    return RecipeError("task.prompt_template", template, because=because, fix="use {column}, and {{ or }} for a bracket itself")


def is_message(message: object) -> bool:
    """Whether a value is a message of a chat: a role and a text."""
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def _is_answer(message: object) -> bool:
    return is_message(message) and isinstance(message, Mapping) and message["role"] == "assistant"


def _content(completion: object) -> str | None:
    """The text of a completion, written as a text or as the one message of a chat."""
    if isinstance(completion, Sequence) and not isinstance(completion, str) and len(completion) == 1:
        completion = completion[0]["content"] if is_message(completion[0]) else None
    return completion if isinstance(completion, str) else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
