"""Messages by a chat template, and one clear word where it refuses them.

Turns as tokens: what an environment says, as the model reads it, and worked examples in which one takes part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from oncurve.errors import ModelError
from oncurve.records import Bools, Example, Ints, Prompt

if TYPE_CHECKING:
    from oncurve.models.policy import Policy

FIX = "give messages of the roles that the template knows, or mend chat_template in the model's folder"


def by_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], where: str, whose: str = "the model's", /, **how: Any
) -> Any:
    """What the tokenizer's ``apply_chat_template`` gives; ``where`` and ``whose`` are for the error."""
    try:
        return tokenizer.apply_chat_template(messages, **how)
    except Exception as error:  # a template is a program of the model's maker, and may raise anything
        said = f"{type(error).__name__}: {str(error)[:200]}"
        raise ModelError(where, f"{whose} chat template can't write it", because=said, fix=FIX) from error


_MARKS = ("oncurve first mark", "oncurve second mark")
"""Stand in for what was said, to find out what a chat template writes around it."""


def reply_ids(policy: Policy, prompt: Prompt, reply: str, *, ended: bool) -> list[int]:
    """What follows the policy's turn: the reply as it is, or the user's next message of a chat whose turn was ``ended`` by the
    model's end token."""
    text = _as_message(policy, prompt, reply) if ended and prompt.messages is not None else reply
    ids: list[int] = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _as_message(policy: Policy, prompt: Prompt, reply: str) -> str:
    """What the chat template writes from the end of an assistant's turn (its end token is there already) to the next.

    It is read off a dummy chat: templates may leave out parts of earlier turns, and the real one's are in the context already.
    """
    said, told = _MARKS
    messages = [*map(dict, prompt.messages or ()), {"role": "assistant", "content": said}, {"role": "user", "content": told}]
    how = {"add_generation_prompt": True, "tokenize": False, **policy.template_options}
    whole = by_template(policy.tokenizer, messages, prompt.id, **how)
    after = str(whole).rpartition(said)[2]
    endings = [policy.tokenizer.decode([i], skip_special_tokens=False) for i in policy.eos_ids]
    closed = next((ending for ending in endings if after.startswith(ending)), "")
    return after[len(closed) :].replace(told, reply)


def example_ids(policy: Policy, example: Example) -> tuple[Ints, Bools]:
    """A worked completion as token ids, closed by the end token; and which of them the policy is to write itself."""
    if not example.turns:
        ids = policy.encode_completion(example.completion)
        return ids, np.ones(len(ids), bool)
    parts = [reply_ids(policy, example.prompt, turn, ended=False) for turn in example.turns]
    wrote = [np.full(len(part), place % 2 == 0) for place, part in enumerate(parts)]
    joined = [token for part in parts for token in part]
    return np.asarray([*joined, policy.eos_ids[0]], np.int64), np.concatenate((*wrote, np.ones(1, bool)))
