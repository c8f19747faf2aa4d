"""Text as a client is told it: whole characters, no stop string, and nothing that is taken back."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from oncurve.engines.native.session import SampledToken
from oncurve.records import StopReason
from oncurve.serve.detokenizer import IncrementalDetokenizer, StreamedText, TextDelta


@cache
def of_bytes() -> Tokenizer:
    """One token per byte: every character beyond ASCII is spread over several."""
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def decode(ids: list[int]) -> str:
    return str(of_bytes().decode(ids))


@given(text=st.text(min_size=1, max_size=40))
def test_text_comes_in_whole_characters_and_adds_up(text: str) -> None:
    ids = of_bytes().encode(text).ids
    unfolding = IncrementalDetokenizer(decode)
    parts = [unfolding.push(i, last=n == len(ids) - 1) for n, i in enumerate(ids)]
    assert "".join(parts) == decode(ids)
    assert "�" in text or not any("�" in part for part in parts)


def written(text: str, stop: tuple[str, ...], why: StopReason) -> tuple[list[TextDelta], StreamedText]:
    """Each character as a token of its own, its id the character's; the last token stops for the reason given."""
    writing = StreamedText(lambda ids: "".join(map(chr, ids)), stop)
    ends = [None] * (len(text) - 1) + [why]
    return [writing.push(SampledToken(0, 0, ord(c), -1.0, (), end)) for c, end in zip(text, ends, strict=True)], writing


def test_a_stop_string_is_never_told_not_even_its_beginning() -> None:
    said, _ = written("one END", ("END",), "stop_string")
    assert [s.text for s in said] == ["o", "n", "e", " ", "", "", ""]
    assert said[-1].finish == "stop"
    assert [chr(token.token_id) for s in said for token, _ in s.tokens] == list("one ")


def test_what_only_looked_like_a_stop_string_is_told_late() -> None:
    said, _ = written("an ENDEX!", ("ENDED",), "length")
    assert [s.text for s in said] == ["a", "n", " ", "", "", "", "", "ENDEX", "!"]
    assert [place for s in said for _, place in s.tokens] == list(range(9))
    assert said[-1].finish == "length"


def test_the_first_of_several_stop_strings_cuts() -> None:
    said, _ = written("abc", ("c", "bc"), "stop_string")
    assert "".join(s.text for s in said) == "a"


def test_the_end_token_has_no_text_and_is_counted() -> None:
    said, writing = written("ab$", (), "end")
    assert "".join(s.text for s in said) == "ab"
    assert [chr(token.token_id) for s in said for token, _ in s.tokens] == list("ab")
    assert (said[-1].finish, writing.count) == ("stop", 3)


@given(text=st.text("abEND", min_size=1, max_size=30), stop=st.lists(st.text("abEND", min_size=1, max_size=4), max_size=3))
def test_whatever_is_told_is_the_text_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    ends = [place + len(s) for s in stop for place in [text.find(s)] if place >= 0]
    upto, why = (min(ends), "stop_string") if ends else (len(text), "length")
    said, _ = written(text[:upto], tuple(stop), "stop_string" if why == "stop_string" else "length")
    cut = min((place for s in stop for place in [text[:upto].find(s)] if place >= 0), default=len(text))
    assert "".join(s.text for s in said) == text[:cut]


@pytest.mark.parametrize("why", ["end", "length"])
def test_half_a_character_at_the_end_is_shown_as_such(why: StopReason) -> None:
    writing = StreamedText(decode, ())
    first, second, third = of_bytes().encode("€").ids
    said = [writing.push(SampledToken(0, 0, i, 0.0, (), s)) for i, s in ((first, None), (second, None), (third, why))]
    assert "".join(s.text for s in said) == ("€" if why == "length" else "")


@given(
    text=st.text(min_size=1, max_size=30),
    cut=st.integers(0, 3),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    why=st.sampled_from(["end", "length", "stop_string"]),
)
def test_tokens_that_come_together_say_what_they_say_one_by_one(text: str, cut: int, sizes: list[int], why: StopReason) -> None:
    """Whichever rounds they come in, even where the last character is half of one."""
    ids = of_bytes().encode(text).ids
    ids = ids[: max(1, len(ids) - cut)]
    stop = (decode(ids)[-2:],) if why == "stop_string" else ("never",)
    tokens = [SampledToken(0, 0, token_id, -1.0, (), why if n == len(ids) - 1 else None) for n, token_id in enumerate(ids)]
    apart, together = StreamedText(decode, stop), StreamedText(decode, stop)
    one = [apart.push(token) for token in tokens]
    many: list[TextDelta] = []
    while tokens:
        size = sizes[len(many) % len(sizes)]
        many.append(together.push(*tokens[:size]))
        tokens = tokens[size:]
    assert "".join(said.text for said in many) == "".join(said.text for said in one)
    assert many[-1].finish == one[-1].finish
    assert together.count == apart.count
