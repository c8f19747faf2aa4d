"""Chat templates: messages as text, and the turns of environments and demonstrations as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from oncurve.errors import ModelError
from oncurve.records import Bools, Example, Ints, Message, Prompt, Reply

if TYPE_CHECKING:
    from oncurve.models.policy import Policy

TEMPLATE_FIX = "use roles that the template knows, or fix chat_template in the model's folder"
PROBE = "oncurve mark"
"""A text that no template writes by itself: if it is missing from the output, the template dropped the message."""
_ASSISTANT_PROBE, _USER_PROBE = "oncurve first mark", "oncurve second mark"


def apply_chat_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], where: str, whose: str = "the model's", /, **options: Any
) -> Any:
    """The tokenizer's ``apply_chat_template``, with one clear error if it fails, which names ``where`` and ``whose``."""
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # a template is a program by the model's author and may raise anything
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ModelError(where, f"{whose} chat template can't write it", because=reason, fix=TEMPLATE_FIX) from error


def encode_reply(policy: Policy, prompt: Prompt, reply: Reply, *, ended: bool) -> list[int]:
    """An environment's reply as the tokens that follow the policy's turn.

    In a chat whose turn the model ``ended`` with its end token, the reply is the next user message; otherwise it is plain text.
    """
    if isinstance(reply, np.ndarray):
        return [int(token) for token in reply]
    if isinstance(reply, tuple):
        text = _format_tool_turn(policy, prompt, reply)
    else:
        text = _format_user_turn(policy, prompt, reply) if ended and prompt.messages is not None else reply
    ids: list[int] = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _format_user_turn(policy: Policy, prompt: Prompt, reply: str) -> str:
    """The text that the template writes after an assistant turn's end token, up to the start of the next assistant turn.

    It is taken from a dummy chat, because templates may drop parts of earlier turns that are already in the real context.
    """
    messages = [
        *map(dict, prompt.messages or ()),
        {"role": "assistant", "content": _ASSISTANT_PROBE},
        {"role": "user", "content": _USER_PROBE},
    ]
    options = {"add_generation_prompt": True, "tokenize": False, **policy.template_options}
    text = apply_chat_template(policy.tokenizer, messages, prompt.id, **options)
    after = str(text).rpartition(_ASSISTANT_PROBE)[2]
    end_tokens = [policy.tokenizer.decode([i], skip_special_tokens=False) for i in policy.eos_ids]
    end_token = next((token for token in end_tokens if after.startswith(token)), "")
    return after[len(end_token) :].replace(_USER_PROBE, reply)


def _format_tool_turn(policy: Policy, prompt: Prompt, results: Sequence[Message]) -> str:
    """The text that the template writes after an assistant turn's end token for the results of its tool calls, up to the start
    of the next assistant turn.

    It is what these messages add to a dummy chat in which the assistant has called the tools. If the template writes that chat
    differently once results follow, a dummy chat without the calls is tried.
    """
    options: dict[str, Any] = {"tokenize": False, **policy.template_options}
    if prompt.tools:
        options["tools"] = list(prompt.tools)
    calls = [{"type": "function", "function": {"name": m.get("name", "tool"), "arguments": {}}} for m in results]
    user = {"role": "user", "content": _USER_PROBE}
    chats: list[list[Message]] = [
        [user, {"role": "assistant", "content": _ASSISTANT_PROBE, "tool_calls": calls}],
        [user, {"role": "assistant", "content": _ASSISTANT_PROBE}],
    ]
    for chat in chats:
        before = str(apply_chat_template(policy.tokenizer, chat, prompt.id, **options))
        after = str(apply_chat_template(policy.tokenizer, [*chat, *results], prompt.id, add_generation_prompt=True, **options))
        ends = [policy.tokenizer.decode([i], skip_special_tokens=False) for i in policy.eos_ids]
        before = max((before[: before.rfind(end) + len(end)] for end in ends if end in before), key=len, default=before)
        if after.startswith(before):
            return after[len(before) :]
    raise ModelError(
        prompt.id,
        "the model's chat template can't write tool results",
        because="it rewrites the assistant's turn before them",
        fix="use a model whose chat template supports tools",
    )


def encode_following(
    policy: Policy,
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    where: str,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    ended: bool,
) -> list[int]:
    """The tokens between the policy's turn (the last message of ``before``) and its next turn, with the messages ``after``.

    They close the turn, write these messages, and start the next turn. ``ended``: the turn's tokens include its end token.
    """
    options = {"add_generation_prompt": True, "tokenize": False, **policy.template_options}
    options |= {"tools": [dict(tool) for tool in tools]} if tools else {}
    end_tokens = [policy.tokenizer.decode([i], skip_special_tokens=False) for i in policy.eos_ids]
    messages = with_system_prompt(policy, before)
    try:
        # As for an environment's reply, from a chat with a dummy turn: templates may rewrite turns that are in the context.
        dummy = {"role": "assistant", "content": _ASSISTANT_PROBE}
        text = str(apply_chat_template(policy.tokenizer, [*messages[:-1], dummy, *after], where, **options))
        follows = text.rpartition(_ASSISTANT_PROBE)[2]
    except ModelError:  # a template may refuse a tool's result after a turn without a call
        text = str(apply_chat_template(policy.tokenizer, [*messages, *after], where, **options))
        closed = str(apply_chat_template(policy.tokenizer, messages, where, **options | {"add_generation_prompt": False}))
        if not text.startswith(closed):
            raise
        ends = [closed.rfind(token) for token in end_tokens]
        follows = closed[max(ends) :] * (max(ends) >= 0) + text[len(closed) :]
    end_token = next((token for token in end_tokens if follows.startswith(token)), "")
    ids: list[int] = policy.tokenizer(follows[len(end_token) * ended :], add_special_tokens=False)["input_ids"]
    return ids


def find_rewriting(policy: Policy, sampled_ids: Ints, written_ids: Ints) -> str | None:
    """How the chat template's rendering of a conversation differs from the sampled text; None if it does not.

    Texts are compared, not tokens: if only the tokenisation differs, nothing was rewritten.
    """
    sampled, written = (
        str(policy.tokenizer.decode(ids.tolist(), skip_special_tokens=False)) for ids in (sampled_ids, written_ids)
    )
    if sampled == written:
        return None
    at = next(i for i, (a, b) in enumerate(zip(f"{sampled}\0", f"{written}\0", strict=False)) if a != b)
    return (
        f"the chat template rewrites what was sampled ({written[at : at + 30]!r} instead of {sampled[at : at + 30]!r}): "
        'the tokens stay as they were sampled; with task.history = "template" a new sequence follows the template'
    )


def with_system_prompt(policy: Policy, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the recipe's system prompt before them, unless they have one."""
    system = {"role": "system", "content": policy.system_prompt}
    has_own = not policy.system_prompt or any(message["role"] == "system" for message in messages)
    return [*(() if has_own else (system,)), *map(dict, messages)]


def encode_example(policy: Policy, example: Example) -> tuple[Ints, Bools]:
    """A demonstration as token ids with the end token, and a mask of the tokens that the policy writes (and imitates)."""
    if not example.turns:
        called = example.message is not None
        ids = _encode_answer(policy, example) if called else policy.encode_completion(example.completion)
        return ids, np.ones(len(ids), bool)
    turns = [encode_reply(policy, example.prompt, turn, ended=False) for turn in example.turns]
    masks = [np.full(len(turn), index % 2 == 0) for index, turn in enumerate(turns)]
    ids = np.asarray([*(token for turn in turns for token in turn), policy.eos_ids[0]], np.int64)
    return ids, np.concatenate((*masks, np.ones(1, bool)))


def _encode_answer(policy: Policy, example: Example) -> Ints:
    """An answer with tool calls or reasoning as the chat template writes it after the prompt, with its end token."""
    prompt = example.prompt
    tools, messages = example.tools or prompt.tools, with_system_prompt(policy, prompt.messages or ())
    options: dict[str, Any] = {"tokenize": False, **policy.template_options}
    options |= {"tools": [dict(tool) for tool in tools]} if tools else {}
    before = str(apply_chat_template(policy.tokenizer, messages, prompt.id, add_generation_prompt=True, **options))
    after = str(apply_chat_template(policy.tokenizer, [*messages, dict(example.message or {})], prompt.id, **options))
    text = after.removeprefix(before)
    ends = {token_id: text.rfind(policy.tokenizer.decode([token_id], skip_special_tokens=False)) for token_id in policy.eos_ids}
    end_id = max(ends, key=lambda token_id: ends[token_id])
    if not after.startswith(before) or ends[end_id] < 0:
        raise ModelError(
            prompt.id,
            "the model's chat template can't write the tool calls or the reasoning of its answer",
            because="what it writes of them does not follow the prompt, or has no end token",
            fix="write them into the answer's content, in the form that the model should write",
        )
    ids = policy.tokenizer(text[: ends[end_id]], add_special_tokens=False)["input_ids"]
    return np.asarray([*ids, end_id], np.int64)
