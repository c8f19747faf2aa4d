"""Messages by a chat template, and one clear word where it refuses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oncurve.errors import ModelError

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
