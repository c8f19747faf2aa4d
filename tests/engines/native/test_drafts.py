"""Drafts of the C runner: whatever is drafted, tokens and log-probs are the same bits; and which drafts are found."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from oncurve.engines.base import PassCounts, SampleKey, SampleRequest
from oncurve.engines.native import c_decoder
from oncurve.engines.native.c_decoder import MAX_MATCH, CDecoder, SlotTexts
from oncurve.engines.native.engine import NativeEngine
from oncurve.models.llama.c_build import load_library
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Draft, Engine, Sampling
from oncurve.records import Group, Ints
from tests.engines.native.plain import prompt_of
from tests.engines.native.test_c_decoder import make_model
from tests.models.architectures import tokenizer

PROMPTS = [prompt_of(n, name) for name, n in zip("abc", (1, 9, 66), strict=True)]
T = 66
Bits = list[tuple[bytes, bytes, bytes, str]]


@pytest.fixture(scope="module", params=["qwen3", "mistral"])
def policy(request: pytest.FixtureRequest) -> Policy:
    """A model whose texts repeat themselves and each other: enlarged weights make it nearly greedy."""
    return Policy(make_model(request.param), tokenizer())


def sample(policy: Policy, draft: Draft, sampling: Sampling, check_every: int = 8, slots: int = 8) -> tuple[Bits, PassCounts]:
    engine = NativeEngine(policy, Engine(slots=slots, check_every=check_every, draft=draft))
    groups = engine.sample(PROMPTS, 8, sampling, SampleKey(0, 1))
    return bits(groups), engine.counts


def bits(groups: list[Group]) -> Bits:
    return [
        (c.token_ids.tobytes(), c.logps.tobytes(), c.raw_logps.tobytes(), c.stop) for group in groups for c in group.completions
    ]


SETTINGS = {
    "plain": Sampling(max_new_tokens=T),
    "cool": Sampling(max_new_tokens=T, temperature=0.4),
    "greedy": Sampling(max_new_tokens=T, temperature=0.0),
    "min length": Sampling(max_new_tokens=T, min_new_tokens=30, temperature=0.7),
    "stop strings": Sampling(max_new_tokens=T, temperature=0.6, stop=("q", "7")),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_no_source_of_drafts_changes_a_bit(policy: Policy, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SlotTexts, "start", _start_without_sharing)
        expected, plain = sample(policy, "off", SETTINGS[name])
    assert plain.rows == plain.passes
    assert plain.drafted == 0
    shared, counts = sample(policy, "off", SETTINGS[name])
    assert shared == expected
    assert counts.rows < counts.passes == plain.passes
    tries: tuple[tuple[Draft, int], ...] = (("own", 8), ("group", 1), ("auto", T), ("group", 8))
    for draft, check_every in tries:
        found, counts = sample(policy, draft, SETTINGS[name], check_every)
        assert found == expected, (draft, check_every)
        assert counts.passes + counts.accepted == plain.passes or SETTINGS[name].stop
    if name in ("cool", "greedy"):
        assert counts.accepted > 0


def _start_without_sharing(self: SlotTexts, slot: int, prompt_ids: Ints) -> None:
    START(self, slot, prompt_ids)
    self.storage_S[slot] = slot


START = SlotTexts.start


def test_earlier_answers_are_sources(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers as last time: nearly every token is right, and none changes."""
    monkeypatch.setattr(c_decoder, "MIN_ROWS", 64)
    engine, accepted = NativeEngine(policy, Engine(slots=24, draft="auto")), []
    sampling = Sampling(max_new_tokens=T, temperature=0.8)
    for _ in range(2):
        before = engine.counts
        found = engine.sample(PROMPTS, 8, sampling, SampleKey(0, 1))
        accepted.append((engine.counts - before).accepted)
        assert bits(found) == sample(policy, "off", sampling)[0]
    assert accepted[1] > accepted[0]


def random_tokens(rng: np.random.Generator, texts: Ints, vocabulary: int) -> Ints:
    return rng.integers(0, vocabulary, texts.shape)


def nearly_right(rng: np.random.Generator, texts: Ints, vocabulary: int) -> Ints:
    wrong = (texts + 1) % vocabulary
    return np.where(rng.random(texts.shape) < 0.2, wrong, texts)


def right_and_beyond_the_end(rng: np.random.Generator, texts: Ints, vocabulary: int) -> Ints:
    return texts


@pytest.mark.parametrize("lie", [random_tokens, nearly_right, right_and_beyond_the_end])
def test_malicious_drafts_change_no_bit(
    policy: Policy, lie: Callable[[np.random.Generator, Ints, int], Ints], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every slot claims a text of full length from the start: noise, or what will be sampled with some tokens replaced or
    with tokens after its end. Rows are plenty, so that every draft is verified."""
    sampling, vocabulary = Sampling(max_new_tokens=T, temperature=0.8), len(policy.head.weight_VD)
    expected, _ = sample(policy, "off", sampling, slots=24)
    truth = np.random.default_rng(0).integers(0, vocabulary, (24, T))
    for row, (tokens, *_) in zip(truth, expected, strict=True):
        ids = np.frombuffer(tokens, np.int64)
        row[: len(ids)] = ids
    lies = lie(np.random.default_rng(1), truth, vocabulary)

    def start(self: SlotTexts, slot: int, prompt_ids: Ints) -> None:
        START(self, slot, prompt_ids)
        self.text_ST[slot, MAX_MATCH:], self.length_S[slot] = lies[(slot + 1) % 24], T

    monkeypatch.setattr(SlotTexts, "start", start)
    monkeypatch.setattr(SlotTexts, "set_lengths", lambda *_: None)
    monkeypatch.setattr(c_decoder, "MIN_ROWS", 64)
    found, counts = sample(policy, "group", sampling, slots=24)
    assert found == expected
    assert counts.drafted > counts.accepted > 0


def brute_force(texts: list[list[int]], own: int, prompt: list[int], most: int) -> list[int]:
    """The longest match of 2 to 8 tokens, the own text first, then the others and earlier answers in order, then the prompt;
    the latest of equal ones."""
    before = ([-1] * MAX_MATCH + prompt)[-MAX_MATCH:]
    end = (before + texts[own])[-MAX_MATCH:]
    best, draft = 1, []
    for number in [own, *(i for i in range(len(texts)) if i != own), -1]:
        source = prompt if number < 0 else before + texts[number]
        first = 0 if number < 0 else MAX_MATCH
        for at in range(len(source) - 1, first - 1, -1):
            n = 0
            while n < MAX_MATCH and at - n - 1 >= 0 and source[at - n - 1] == end[-1 - n]:
                n += 1
            if n > best:
                best, draft = n, source[at : at + most]
    return draft


def test_drafts_are_those_of_a_search_by_brute_force(policy: Policy) -> None:
    library, rng = load_library(), np.random.default_rng(0)
    assert library is not None
    library.find_draft.restype = ctypes.c_int64
    engine = NativeEngine(policy, Engine(slots=4, draft="group"))
    request = SampleRequest(PROMPTS[0], policy.encode(PROMPTS[0]), 4, Sampling(max_new_tokens=T), SampleKey(0, 1))
    found = 0
    runner = engine.build_runner([request])
    assert isinstance(runner, c_decoder.CRunner)
    decoder: CDecoder = runner.decoder
    for letters in (2, 3, 5, 9):
        for _ in range(150):
            prompt = rng.integers(0, letters, rng.integers(1, 40)).tolist()
            texts = [rng.integers(0, letters, rng.integers(0, T)).tolist() for _ in range(4)]
            for slot, text in enumerate(texts):
                decoder.texts.start(slot, np.array(prompt))
                decoder.texts.text_ST[slot, MAX_MATCH : MAX_MATCH + len(text)] = text
                runner.suffix_length_S[slot] = decoder.texts.length_S[slot] = len(text)
                runner.prompt_length_S[slot] = len(prompt) - 1
            decoder.model.prompt, decoder.model.P = decoder.texts.prompt_NP.ctypes.data, decoder.texts.prompt_NP.shape[1]
            slot, most = int(rng.integers(4)), int(rng.integers(1, 8))
            earlier = [rng.integers(0, letters, rng.integers(0, T)) for _ in range(rng.integers(0, 3))]
            decoder.texts.set_earlier(slot, earlier)
            draft = np.full(7, -1, np.int64)
            count = library.find_draft(
                ctypes.byref(decoder.model), ctypes.c_int64(slot), ctypes.c_int64(most), ctypes.c_void_p(draft.ctypes.data)
            )
            assert draft[:count].tolist() == brute_force(texts + [e.tolist() for e in earlier], slot, prompt, most)
            assert (draft[count:] == -1).all()
            found += count > 0
    assert found > 300
