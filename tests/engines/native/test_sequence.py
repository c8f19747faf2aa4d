"""Stop strings at the end of a text."""

from __future__ import annotations

import numpy as np
import pytest

from oncurve.engines.native.sequence import ends_with_stop
from tests.models.architectures import make_policy


@pytest.mark.parametrize(
    ("text", "strings", "more", "found"),
    [
        ("1+2=3", ("=3",), 0, True),
        ("1+2=3", ("never", "3"), 0, True),
        ("1+2=3", ("1+2=34",), 0, False),
        ("ab", ("much longer than the text",), 0, False),
        ("", ("a",), 0, False),
        ("xxabyyyyy", ("ab",), 0, False),  # two bytes and four tokens to spare: it ended too long ago
        ("xxabyyyyy", ("ab",), 1, True),
    ],
)
def test_the_end_of_a_text_is_looked_at(text: str, strings: tuple[str, ...], more: int, found: bool) -> None:
    policy = make_policy("qwen3")
    ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text)
    assert ends_with_stop(policy, ids, strings, more) is found
    assert ends_with_stop(policy, np.asarray(ids, np.int64), strings, more) is found


def test_special_tokens_are_not_part_of_the_text() -> None:
    """`a`, many special tokens, `b` is the text `ab`."""
    policy = make_policy("qwen3")
    a, b = policy.tokenizer("ab", add_special_tokens=False)["input_ids"]
    (special,) = {policy.tokenizer.eos_token_id}
    assert policy.decode(np.array([a, special, b])) == "ab"
    for count in (1, 6, 40):
        assert ends_with_stop(policy, [a, *[special] * count, b], ("ab",))
    assert not ends_with_stop(policy, [a, *[special] * 40, a, b, a, a, a, a, a], ("ab",))
