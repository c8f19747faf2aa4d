"""`tool_choice`: what a random model writes is a call of one of the functions, with valid arguments, by OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest
from jsonschema import Draft202012Validator
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from oncurve.agents.tool_calls import CLOSE, OPEN
from oncurve.models.loading.load import build_tokenizer
from oncurve.serve.chat_message import MessageReader
from oncurve.serve.openai_format import ChatBody, Message
from tests.serve.serving import MODEL, Endpoint, endpoint
from tests.serve.test_json_output import PRINTABLE, byte_tokenizer, closed, random_policy

MESSAGES: Any = [{"role": "user", "content": "1+2"}]
INTEGER = {"type": "integer", "minimum": -99, "maximum": 99}
SCHEMAS: dict[str, dict[str, Any] | None] = {
    "add": closed(a=INTEGER, b=INTEGER),
    'say "it"\\': {**closed(word={"$ref": "#/$defs/word"}), "$defs": {"word": {"enum": ["yes", "a b", "{}"]}}},
    "stop": None,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name} | ({} if schema is None else {"parameters": schema})}
    for name, schema in SCHEMAS.items()
]


def tags_as(special: bool) -> PreTrainedTokenizerFast:
    """The tags of calls are tokens, as Qwen has them; or special ones, which a response's text leaves out."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=special) for tag in (OPEN, CLOSE)], special_tokens=special)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "characters": lambda: build_tokenizer(PRINTABLE, chat=True),
    "spelled": byte_tokenizer,
    "added": lambda: tags_as(special=False),
    "special": lambda: tags_as(special=True),
}


@pytest.fixture(scope="module")
def served() -> Iterator[Endpoint]:
    with endpoint(random_policy(tags_as(special=False))) as server:
        yield server


def calls(served: Endpoint, tool_choice: Any, samples: int = 12) -> list[tuple[str, Any]]:
    """The one call of each completion: its name and its arguments."""
    with served.client() as client:
        response = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice=tool_choice, n=samples, seed=1, max_tokens=200
        )
    assert {choice.finish_reason for choice in response.choices} == {"tool_calls"}
    assert {choice.message.content for choice in response.choices} == {None}
    found: Any = [call for choice in response.choices for call in choice.message.tool_calls or ()]
    assert len(found) == samples
    return [(call.function.name, json.loads(call.function.arguments)) for call in found]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_required_call_is_one_of_the_functions(tokenizer: str) -> None:
    with endpoint(random_policy(TOKENIZERS[tokenizer]()), slots=12) as server:
        found = calls(server, "required")
    assert {name for name, _ in found} == {*SCHEMAS}
    for name, arguments in found:
        schema = SCHEMAS[name]
        assert arguments == {} if schema is None else not list(Draft202012Validator(schema).iter_errors(arguments))


def test_a_named_function_is_called(served: Endpoint) -> None:
    for name in SCHEMAS:
        found = calls(served, {"type": "function", "function": {"name": name}}, samples=3)
        assert {called for called, _ in found} == {name}


def test_a_stream_has_the_same_call(served: Endpoint) -> None:
    options: Any = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": "required",
        "seed": 5,
        "max_tokens": 200,
    }
    with served.client() as client:
        expected: Any = client.chat.completions.create(**options).choices[0].message.tool_calls
        with client.chat.completions.stream(**options) as events:
            streamed: Any = events.get_final_completion().choices[0].message.tool_calls
    assert [call.function.arguments for call in streamed] == [call.function.arguments for call in expected]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tool_choice": "required"}, "'required' needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": TOOLS}, "no function 'other' in tools"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            },
            "'f' must be a schema of type object",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}],
            },
            "tool_choice: ",
        ),
        ({"tools": [*TOOLS, TOOLS[0]]}, "several functions are called 'add'"),
        ({"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format with tools"),
    ],
)
def test_what_can_not_be_required_is_refused(served: Endpoint, options: Any, reason: str) -> None:
    with served.client() as client, pytest.raises(openai.BadRequestError, match=reason):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, **options)


def test_a_model_with_a_form_of_its_own_is_refused(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.policy.tokenizer, "response_template", {"fields": {}}, raising=False)
    with served.client() as client, pytest.raises(openai.BadRequestError, match="a form of its own"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required")


def test_without_parallel_calls_a_message_has_only_the_first(served: Endpoint) -> None:
    body = ChatBody(model=MODEL, messages=[Message(role="user", content="x")], parallel_tool_calls=False)
    text = "".join(f'{OPEN}{{"name": "{name}", "arguments": {{}}}}{CLOSE}' for name in ("add", "stop"))
    ids = served.policy.tokenizer(text).input_ids
    for several, expected in ((True, ["add", "stop"]), (body.allows_several_calls, ["add"])):
        message = MessageReader(served.policy, np.asarray(ids), TOOLS, 1, several)(text, ids)
        assert [call["function"]["name"] for call in message["tool_calls"]] == expected
