"""Chat templates: messages as text, and the turns of environments and demonstrations as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from oncurve.errors import ModelError
from oncurve.records import Bools, Example, Ints, Prompt

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


def encode_reply(policy: Policy, prompt: Prompt, reply: str, *, ended: bool) -> list[int]:
    """An environment's reply as the tokens that follow the policy's turn.

    In a chat whose turn the model ``ended`` with its end token, the reply is the next user message; otherwise it is plain text.
    """
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


def encode_example(policy: Policy, example: Example) -> tuple[Ints, Bools]:
    """A demonstration as token ids with the end token, and a mask of the tokens that the policy writes (and imitates)."""
    if not example.turns:
        ids = policy.encode_completion(example.completion)
        return ids, np.ones(len(ids), bool)
    turns = [encode_reply(policy, example.prompt, turn, ended=False) for turn in example.turns]
    masks = [np.full(len(turn), index % 2 == 0) for index, turn in enumerate(turns)]
    ids = np.asarray([*(token for turn in turns for token in turn), policy.eos_ids[0]], np.int64)
    return ids, np.concatenate((*masks, np.ones(1, bool)))
