"""Converts a row of data to a prompt and demonstrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

from oncurve.errors import DataError, RecipeError
from oncurve.records import Environment, Example, Message, Prompt, StatefulEnvironment, message_text
from oncurve.strict_json import parse_json

REASONING = ("reasoning_content", "thinking")
"""Keys under which chat templates read an assistant's reasoning."""


@dataclass(frozen=True)
class RowReader:
    """How the rows of a file are read. ``answer`` names the column with the right answer, ``difficulty`` the one that tables of
    results are split by.

    A prompt that is a list of messages is a chat. ``chat`` turns a text into a user message. ``system`` is a system message
    before either.

    Example: ``RowReader(answer="label").read({"prompt": "2+2=", "label": "4"}, "a.jsonl:1", "a/1").columns["answer"]`` is "4"
    """

    prompt: str = "prompt"
    answer: str = "answer"
    completion: str = "completion"
    difficulty: str | None = None
    template: str | None = None
    chat: bool = False
    system: str | None = None
    environment: Environment | StatefulEnvironment | None = None
    missing_column_fix: str = "name the right columns in the task (prompt, prompt_template, difficulty), or fix the data"

    def read(self, row: Mapping[str, Any], where: str, id: str) -> Prompt:
        """The prompt of a row, with all of its columns for the rewards.

        `prompt` and `completion` are names that rewards have for other things: columns of these names do not reach them.
        """
        content = self._prompt_of(row, where)
        columns = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
        columns |= {"answer": row[self.answer]} if self.answer in row else {}
        columns |= {"difficulty": row[self.difficulty]} if self.difficulty is not None else {}
        if isinstance(content, str) and not self.chat:
            prompt = Prompt(id=id, text=content, columns=columns, environment=self.environment)
            if prompt.tools:
                raise DataError(
                    where,
                    "tools for a prompt in plain text",
                    because="the model learns of its tools through its chat template",
                    fix="set task.chat = true, or give the prompt as a list of messages",
                )
            return prompt
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
                because="a demonstration needs a text to imitate, or messages after a prompt of messages",
                fix="write a text there, or remove the column from this row",
            )
        return Example(prompt, text)

    def examples(self, row: Mapping[str, Any], prompt: Prompt, where: str) -> list[Example]:
        """The demonstrations of a row: its completion, or each answer of a chat that ends with one. The messages between
        answers, such as a tool's results, are what the next answer follows."""
        before, follows = prompt.messages or (), _read_messages(row.get(self.completion))
        if follows is not None and before and (len(follows) > 1 or _needs_template(follows[0])):
            first = len(before)
        else:
            example = self.example(row, prompt, where)
            if example is not None:
                return [example]
            chat = _read_messages(row.get(self.prompt)) if self.template is None else None
            if not chat or not _is_answer(chat[-1]):
                return []
            first, follows = len(before) - (len(chat) - 1), chat[-1:]  # the messages before it are system messages of the task
        messages, tools = (*before, *follows), _read_tools(row.get("tools"))
        answers = [i for i, message in enumerate(messages) if i >= max(first, 1) and _is_answer(message)]
        return [
            Example(
                replace(prompt, id=f"{prompt.id}/{i}", messages=messages[:i]),
                message_text(messages[i]),
                message=messages[i] if _needs_template(messages[i]) else None,
                tools=tools,
            )
            for i in answers
            if message_text(messages[i])
        ]

    def required_columns(self) -> list[str]:
        """The columns that every row must have."""
        prompt = [self.prompt] if self.template is None else template_columns(self.template)
        return prompt + ([self.difficulty] if self.difficulty is not None else [])

    def _prompt_of(self, row: Mapping[str, Any], where: str) -> str | tuple[Message, ...]:
        filled = () if self.template is None else template_columns(self.template)  # a null would be written as "None"
        missing = [name for name in self.required_columns() if name not in row or (name in filled and row[name] is None)]
        if missing:
            raise DataError(
                where,
                f"no column '{missing[0]}'",
                because=f"the columns found there are: {', '.join(map(str, row)) or 'none'}",
                fix=self.missing_column_fix,
            )
        content: object = row[self.prompt] if self.template is None else fill(self.template, row)
        if isinstance(content, str) and content:
            return content
        messages = _read_messages(content)
        if messages is not None:
            has_answer = (
                _is_answer(messages[-1]) and len(messages) > 1
            )  # a complete chat: the prompt ends before the last answer
            return messages[:-1] if has_answer else messages
        raise DataError(
            where,
            f"the prompt is {_short(content)}",
            because="a prompt is a text that is not empty, or a list of messages with role and content (or tool_calls)",
            fix=f"correct the column '{self.prompt}'",
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
    return RecipeError("task.prompt_template", template, because=because, fix="use {column}, and {{ or }} for a literal brace")


def is_message(message: object) -> bool:
    """Whether a value is a chat message: a role and a text."""
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def _read_messages(value: object) -> tuple[Message, ...] | None:
    """A list of chat messages, each with what templates read of it; None if the value is no such list."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return None
    messages = [_read_message(message) for message in value]
    return None if None in messages else tuple(message for message in messages if message is not None)


def _read_message(value: object) -> Message | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return None
    calls = [_read_call(call) for call in value.get("tool_calls") or ()]
    content = "" if calls and value.get("content") is None else value.get("content")
    if not isinstance(content, str) or None in calls:
        return None
    message: dict[str, Any] = {"role": value["role"], "content": content, **({"tool_calls": calls} if calls else {})}
    if value["role"] == "assistant":
        message |= {key: value[key] for key in REASONING if isinstance(value.get(key), str) and value[key]}
    if value["role"] == "tool":
        message |= {key: value[key] for key in ("name", "tool_call_id") if isinstance(value.get(key), str)}
    return message


def _needs_template(message: Message) -> bool:
    """Whether an answer has more than a text, so that the chat template has to write it."""
    return any(key in message for key in ("tool_calls", *REASONING))


def _read_call(call: object) -> dict[str, Any] | None:
    """A tool call in OpenAI's form, or its function alone. Templates write the arguments as JSON, so a JSON text is parsed."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return None
    read = {"type": "function", "function": {"name": function["name"], "arguments": {} if arguments is None else arguments}}
    return {**read, "id": call["id"]} if isinstance(call.get("id"), str) else read


def _read_tools(value: object) -> tuple[Mapping[str, Any], ...]:
    """The schemas in a row's column `tools`, which may be a JSON text, as in TRL; none if it has other things."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            return ()
    is_schemas = isinstance(value, Sequence) and all(isinstance(tool, Mapping) for tool in value)
    return tuple(value) if is_schemas and isinstance(value, Sequence) else ()


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _content(completion: object) -> str | None:
    """The text of a completion that is a text or a list with one message."""
    if isinstance(completion, Sequence) and not isinstance(completion, str) and len(completion) == 1:
        completion = completion[0]["content"] if is_message(completion[0]) else None
    return completion if isinstance(completion, str) else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
