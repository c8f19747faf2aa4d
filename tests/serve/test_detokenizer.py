"""Text as it is sent to a client: complete characters, no stop string, and nothing that changes later."""

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
    """One token per byte: every non-ASCII character takes several tokens."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def decode(ids: list[int]) -> str:
    return str(of_bytes().decode(ids))


@given(text=st.text(min_size=1, max_size=40))
def test_text_comes_in_complete_characters_and_adds_up(text: str) -> None:
    ids = of_bytes().encode(text).ids
    detokenizer = IncrementalDetokenizer(decode)
    parts = [detokenizer.push(i, last=n == len(ids) - 1) for n, i in enumerate(ids)]
    assert "".join(parts) == decode(ids)
    assert "�" in text or not any("�" in part for part in parts)


def id_of(letter: str) -> int:
    token = of_bytes().token_to_id(letter)
    assert token is not None
    return token


@given(data=st.lists(st.one_of(st.binary(max_size=40), st.text(max_size=6).map(str.encode))).map(b"".join))
def test_any_bytes_add_up_to_their_text(data: bytes) -> None:
    """Also if runs of invalid bytes are returned before they end."""
    alphabet = bytes_to_letters()
    ids = [id_of(alphabet[byte]) for byte in data]
    detokenizer = IncrementalDetokenizer(decode)
    assert "".join([detokenizer.push(i, last=n == len(ids) - 1) for n, i in enumerate(ids)]) == decode(ids)


@pytest.mark.parametrize("run", [b"\x80", b"\xf0\x9f", b"\xe2\x82", b"\xff\xc3"])
def test_long_runs_of_invalid_bytes_cost_linear_time(run: bytes) -> None:
    ids = [id_of(bytes_to_letters()[byte]) for byte in run * 500]
    decoded = 0

    def counted(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    detokenizer = IncrementalDetokenizer(counted)
    text = "".join([detokenizer.push(i, last=n == len(ids) - 1) for n, i in enumerate(ids)])
    assert text == decode(ids)
    assert decoded < 100 * len(ids)


def bytes_to_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def push_characters(characters: str, stop: tuple[str, ...], why: StopReason) -> tuple[list[TextDelta], StreamedText]:
    """Pushes each character as a token whose id is its code point; the last token has the stop reason ``why``."""
    text = StreamedText(lambda ids: "".join(map(chr, ids)), stop)
    ends = [None] * (len(characters) - 1) + [why]
    return [text.push(SampledToken(0, 0, ord(c), -1.0, (), end)) for c, end in zip(characters, ends, strict=True)], text


def test_a_stop_string_is_never_sent_not_even_its_beginning() -> None:
    deltas, _ = push_characters("one END", ("END",), "stop_string")
    assert [s.text for s in deltas] == ["o", "n", "e", " ", "", "", ""]
    assert deltas[-1].finish == "stop"
    assert [chr(token.token_id) for s in deltas for token, _ in s.tokens] == list("one ")


def test_text_that_only_began_like_a_stop_string_is_sent_late() -> None:
    deltas, _ = push_characters("an ENDEX!", ("ENDED",), "length")
    assert [s.text for s in deltas] == ["a", "n", " ", "", "", "", "", "ENDEX", "!"]
    assert [offset for s in deltas for _, offset in s.tokens] == list(range(9))
    assert deltas[-1].finish == "length"


def test_text_ends_before_the_first_of_several_stop_strings() -> None:
    deltas, _ = push_characters("abc", ("c", "bc"), "stop_string")
    assert "".join(s.text for s in deltas) == "a"


def test_the_end_token_has_no_text_and_is_counted() -> None:
    deltas, text = push_characters("ab$", (), "end")
    assert "".join(s.text for s in deltas) == "ab"
    assert [chr(token.token_id) for s in deltas for token, _ in s.tokens] == list("ab")
    assert (deltas[-1].finish, text.count) == ("stop", 3)


def test_tokens_are_sent_with_their_text() -> None:
    """The second E may begin the stop string: it waits when the first is sent, and is never sent."""
    deltas, _ = push_characters("EEN", ("EN",), "stop_string")
    assert "".join(s.text for s in deltas) == "E"
    assert [offset for s in deltas for _, offset in s.tokens] == [0]


@given(text=st.text("abEND", min_size=1, max_size=30), stop=st.lists(st.text("abEND", min_size=1, max_size=4), max_size=3))
def test_the_sent_text_is_the_text_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    ends = [offset + len(s) for s in stop for offset in [text.find(s)] if offset >= 0]
    upto, why = (min(ends), "stop_string") if ends else (len(text), "length")
    deltas, _ = push_characters(text[:upto], tuple(stop), "stop_string" if why == "stop_string" else "length")
    cut = min((offset for s in stop for offset in [text[:upto].find(s)] if offset >= 0), default=len(text))
    assert "".join(s.text for s in deltas) == text[:cut]
    assert [(chr(token.token_id), offset) for s in deltas for token, offset in s.tokens] == [
        (c, i) for i, c in enumerate(text[:cut])
    ]


@pytest.mark.parametrize("why", ["end", "length"])
def test_an_incomplete_character_at_the_end(why: StopReason) -> None:
    text = StreamedText(decode, ())
    first, second, third = of_bytes().encode("€").ids
    deltas = [text.push(SampledToken(0, 0, i, 0.0, (), s)) for i, s in ((first, None), (second, None), (third, why))]
    assert "".join(s.text for s in deltas) == ("€" if why == "length" else "")


@given(
    text=st.text(min_size=1, max_size=30),
    cut=st.integers(0, 3),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    why=st.sampled_from(["end", "length", "stop_string"]),
)
def test_tokens_pushed_together_give_the_text_of_tokens_pushed_one_by_one(
    text: str, cut: int, sizes: list[int], why: StopReason
) -> None:
    """In any split into rounds, even if the last character is incomplete."""
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
    assert "".join(d.text for d in many) == "".join(d.text for d in one)
    assert many[-1].finish == one[-1].finish
    assert together.count == apart.count
