"""Reads tool calls from a turn of the policy.

If the tokenizer has a response template, transformers' parser reads the turn. Otherwise calls have the Hermes form, which Qwen,
SmolLM and many others write: a JSON object with `name` and `arguments` between `<tool_call>` and `</tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oncurve.records import Message, Turn
from oncurve.strict_json import parse_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPEN}(.*?)(?:{CLOSE}|(?={OPEN})|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call that the policy wrote. If it can't be read, ``fault`` says why and ``arguments`` is the text."""

    name: str
    arguments: Mapping[str, Any] | str
    fault: str | None = None


def parse_turn(tokenizer: Any, turn: Turn, tools: Sequence[Mapping[str, Any]]) -> tuple[Message, list[ParsedCall]]:
    """A turn as a chat message, and its tool calls."""
    if getattr(tokenizer, "response_template", None) is not None:
        return _parse_by_template(tokenizer, turn, tools)
    text = _text_of(tokenizer, turn)
    calls = [_parse_hermes(match) for match in _CALL.finditer(text)]
    content = _CALL.sub("", text).strip() if calls and not any(call.fault for call in calls) else text
    return _message(content, calls), calls


def _parse_by_template(tokenizer: Any, turn: Turn, tools: Sequence[Mapping[str, Any]]) -> tuple[Message, list[ParsedCall]]:
    before = [] if turn.context_ids is None else turn.context_ids.tolist()  # it may begin the turn, such as with <think>
    try:
        parsed = tokenizer.parse_response(turn.token_ids.tolist(), prefix=before, tools=list(tools))
        calls = [_call_of(call.get("function", call)) for call in parsed.get("tool_calls") or ()]
    except Exception as error:  # a template is data by the model's author, and what it can't read raises anything
        fault = f"the turn can't be read: {' '.join(str(error).split())[:200]}"
        return {"role": "assistant", "content": turn.text}, [ParsedCall("unknown", turn.text, fault)]
    message = _message(parsed.get("content") or "", calls)
    thinking = {key: parsed[key] for key in ("thinking", "reasoning_content") if parsed.get(key)}
    return {**message, **thinking}, calls


def _text_of(tokenizer: Any, turn: Turn) -> str:
    """The turn's text. If the tags of calls are special tokens, which a plain text leaves out, they are put back."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special = {*getattr(tokenizer, "all_special_tokens", ()), *(str(token) for token in added if token.special)}
    if OPEN not in special:
        return turn.text
    text = str(tokenizer.decode(turn.token_ids.tolist(), skip_special_tokens=False))
    for token in special - {OPEN, CLOSE}:
        text = text.replace(token, "")
    return text


def _parse_hermes(match: re.Match[str]) -> ParsedCall:
    text = match[1].strip()
    if not match[0].endswith(CLOSE):
        return ParsedCall("unknown", text, f"the call is not closed by {CLOSE}")
    try:
        call = parse_json(text)
    except ValueError as error:
        return ParsedCall("unknown", text, f"the call is not valid JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ParsedCall("unknown", text, "the call is not a JSON object with a name and arguments")
    return _call_of(call)


def _call_of(call: Mapping[str, Any]) -> ParsedCall:
    name, arguments = str(call["name"]), call.get("arguments", {})
    if isinstance(arguments, str):  # some models write them as JSON within JSON
        try:
            arguments = parse_json(arguments)
        except ValueError as error:
            return ParsedCall(name, str(arguments), f"the arguments are not valid JSON: {error}")
    if not isinstance(arguments, Mapping):
        return ParsedCall(name, json.dumps(arguments), "the arguments are not a JSON object")
    return ParsedCall(name, dict(arguments))


def _message(content: str, calls: Sequence[ParsedCall]) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    written = [call for call in calls if call.fault is None]
    if written:
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in written]  # type: ignore[arg-type]
        message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return message
