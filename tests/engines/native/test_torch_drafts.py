"""Drafts of the torch runner and of sessions: within one width, bits do not depend on what is drafted, queued or accepted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from oncurve.engines.base import PassCounts, SampleKey, SampleRequest
from oncurve.engines.native import c_decoder
from oncurve.engines.native.drafts import MAX_MATCH, Drafter, RequestTexts
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.native.session import SampledToken, Session, served_request, torch_session
from oncurve.engines.native.torch_runner import TorchRunner
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Draft, Engine, Sampling
from oncurve.records import Group, Ints, Prompt
from tests.engines.native.plain import assert_logps, prompt_of
from tests.engines.native.test_c_decoder import make_model as repetitive_model
from tests.engines.native.test_turns import Echo, LongEcho, prompt_with
from tests.engines.native.test_turns import policy as talking_policy
from tests.models.architectures import adapted, make_model, tokenizer
from tests.models.test_experts import mixture
from tests.models.tiny_families import tiny_model

PROMPTS = [prompt_of(n, name) for name, n in zip("ab", (9, 66), strict=True)]
T = 66  # a page of the KV cache, and two tokens
Bits = list[tuple[bytes, bytes, bytes, str]]
SETTINGS = {
    "cool": Sampling(max_new_tokens=T, temperature=0.4),
    "greedy": Sampling(max_new_tokens=T, temperature=0.0),
    "min length": Sampling(max_new_tokens=T, min_new_tokens=30, temperature=0.7),
    "truncated": Sampling(max_new_tokens=T, top_p=0.8, top_k=5),
    "stop strings": Sampling(max_new_tokens=T, temperature=0.6, stop=("q", "7")),
}


@cache
def policy(name: str) -> Policy:
    """Models that C does not decode: another family, with soft caps; and one with windows, by torch."""
    if name == "gemma2":
        return Policy(make_model("gemma2"), tokenizer())
    model = repetitive_model("mistral") if name == "repetitive" else make_model("mistral")
    return Policy(adapted(model) if name == "lora" else model, tokenizer(), compiled=False)


def sample(
    policy: Policy, draft: Draft, sampling: Sampling, prompts: list[Prompt] = PROMPTS, *, check_every: int = 4, group: int = 4
) -> tuple[list[Group], PassCounts]:
    engine = NativeEngine(policy, Engine(slots=8, check_every=check_every, draft=draft))
    groups = engine.sample(prompts, group, sampling, SampleKey(0, 1))
    return groups, engine.counts


def bits(groups: list[Group]) -> Bits:
    return [
        (c.token_ids.tobytes(), c.logps.tobytes(), c.raw_logps.tobytes(), c.stop) for group in groups for c in group.completions
    ]


def assert_same_texts(here: list[Group], there: list[Group]) -> None:
    """The same tokens, masks and ends, and log-probs within rounding: steps of other shapes."""
    for ours, theirs in zip(here, there, strict=True):
        for a, b in zip(ours.completions, theirs.completions, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert (a.stop, a.text, a.loss_mask.tolist()) == (b.stop, b.text, b.loss_mask.tolist())
            assert float(np.abs(a.logps - b.logps).max()) < 1e-4


@pytest.mark.parametrize(
    ("model", "name"),
    [("mistral", name) for name in SETTINGS] + [("gemma2", "cool"), ("lora", "cool")],
)
def test_no_source_of_drafts_changes_a_bit(model: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = policy(model)
    found, counts = sample(chosen, "group", SETTINGS[name])
    assert counts.drafted > 0
    assert counts.rows % (8 * 4) == 0, "every step has the same shape"
    if not SETTINGS[name].stop:
        assert counts.passes + counts.accepted == sum(len(c.token_ids) for group in found for c in group.completions)
    assert bits(sample(chosen, "own", SETTINGS[name])[0]) == bits(found)
    assert bits(sample(chosen, "group", SETTINGS[name], check_every=1)[0]) == bits(found)
    alone, _ = sample(chosen, "group", SETTINGS[name], PROMPTS[:1])
    assert bits(alone) == bits(found[:1]), "whatever else is queued"
    monkeypatch.setattr(Drafter, "propose", _proposing(lambda slot, at: []))
    none, none_counts = sample(chosen, "group", SETTINGS[name])
    assert bits(none) == bits(found)
    assert none_counts.drafted == none_counts.accepted == 0
    plain, plain_counts = sample(chosen, "off", SETTINGS[name])
    assert plain_counts == PassCounts()
    assert_same_texts(found, plain)
    if name in ("cool", "greedy"):
        assert counts.accepted > 0


def test_log_probs_are_those_of_a_full_forward() -> None:
    model = make_model("gemma2")
    groups, counts = sample(policy("gemma2"), "group", SETTINGS["cool"])
    assert counts.drafted > 0
    for group in groups:
        for completion in group.completions:
            assert_logps(model, group.prompt_ids, completion, SETTINGS["cool"].temperature)


Propose = Callable[[int, int], list[int]]


def _proposing(propose: Propose) -> Callable[..., Ints]:
    """Draft something else: ``propose`` gets a slot and the tokens that it has."""

    def call(self: Drafter, live: list[int], forced_ST: Ints | None) -> Ints:
        draft_SW = np.full((len(self.sequence_in), self.width - 1), -1, np.int64)
        for slot in live:
            at = int(self.position_S[slot])
            room = max(min(self.width - 1, T - 1 - at), 0)
            tokens = [] if self.has_ended[slot] else propose(slot, at)[:room]
            draft_SW[slot, : len(tokens)] = tokens
        return draft_SW

    return call


@pytest.mark.parametrize("kind", ["random", "nearly right", "right and beyond the end"])
def test_malicious_drafts_change_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, sampling = policy("mistral"), Sampling(max_new_tokens=T, temperature=0.8)
    expected, _ = sample(chosen, "group", sampling)
    rng, vocabulary = np.random.default_rng(0), len(chosen.head.weight_VD)
    texts = [c.token_ids.tolist() + [5] * 20 for group in expected for c in group.completions]

    def propose(slot: int, at: int) -> list[int]:
        if kind == "random":
            return [int(token) for token in rng.integers(0, vocabulary, 3)]
        right = texts[slot][at : at + 3]
        return [(token + 1) % vocabulary if kind == "nearly right" and rng.random() < 0.3 else token for token in right]

    monkeypatch.setattr(Drafter, "propose", _proposing(propose))
    found, counts = sample(chosen, "group", sampling)
    assert bits(found) == bits(expected)
    assert counts.drafted > 0
    if kind != "random":
        assert counts.accepted > counts.passes // 2


@pytest.mark.parametrize("environment", [Echo, LongEcho])
def test_drafts_change_neither_turns_nor_tokens(environment: type[Echo]) -> None:
    """Short replies are forced, and are drafts that are always right; long ones are prefilled."""
    sampling = Sampling(max_new_tokens=40 if environment is Echo else 100)
    received = []
    results = []
    for draft, check_every in (("off", 4), ("group", 4), ("own", 7)):
        environments = [environment(), environment()]
        prompts = [prompt_with(name, e) for name, e in zip(("one", "two"), environments, strict=True)]
        groups, _ = sample(talking_policy(), draft, sampling, prompts, check_every=check_every)  # type: ignore[arg-type]
        results.append(groups)
        received.append([sorted(e.received) for e in environments])
    assert any(not c.loss_mask.all() for group in results[0] for c in group.completions)
    assert_same_texts(results[1], results[0])
    assert bits(results[1]) == bits(results[2])
    assert received[0] == received[1] == received[2]


def test_earlier_answers_are_sources() -> None:
    """The same answers as last time: nearly every token is right, and none changes."""
    engine = NativeEngine(policy("mistral"), Engine(slots=8, draft="group"))
    sampling = Sampling(max_new_tokens=T, temperature=0.8)
    accepted = []
    for _ in range(2):
        before = engine.counts
        found = bits(engine.sample(PROMPTS, 4, sampling, SampleKey(0, 1)))
        accepted.append((engine.counts - before).accepted)
        assert found == bits(sample(policy("mistral"), "group", sampling)[0])
    assert accepted[1] > 2 * accepted[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_drafted_texts_have_the_models_distribution(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two tokens of 800 completions whose drafts come from each other and from earlier answers, against the product
    of softmaxes. In C, rows are plenty, so that every draft is verified."""
    monkeypatch.setattr(c_decoder, "MIN_ROWS", 64)
    chosen = Policy(repetitive_model("mistral"), tokenizer()) if compiled else policy("mistral")
    assert chosen.uses_c == compiled
    sampling, prompts, count = Sampling(max_new_tokens=2, min_new_tokens=2, temperature=0.6), PROMPTS[:1], 800
    engine = NativeEngine(chosen, Engine(slots=16, draft="group"))
    engine.sample(prompts, 4, sampling, SampleKey(0, 0))
    groups = engine.sample(prompts, count, sampling, SampleKey(0, 1))
    assert engine.counts.accepted > 5
    plain, _ = sample(chosen, "off", sampling, prompts, group=count)
    ids, other = (np.array([c.token_ids for c in g[0].completions]) for g in (groups, plain))
    logps = np.array([c.sampled_logps for c in groups[0].completions]).sum(1)
    assert (ids != other).any(1).mean() < 0.002, "the same uniform numbers: other tokens at near ties only"
    pairs, first, number = np.unique(ids, axis=0, return_index=True, return_counts=True)
    expected = count * np.exp(logps[first].astype(np.float64))
    often = expected >= 5
    chi = float(((number - expected) ** 2 / expected)[often].sum())
    degrees = int(often.sum())
    assert degrees > 5
    assert chi < degrees + 5 * (2 * degrees) ** 0.5, f"{chi:.1f} at {degrees} degrees of freedom"
    assert len(pairs) > degrees


def brute_force(texts: list[list[int]], row: int, most: int) -> list[int]:
    """The longest match of 2 to 8 tokens, of equal ones the one that ends last. Texts include 8 tokens before their start."""
    end, best, draft = texts[row][-MAX_MATCH:], (1, 0), []
    for text in texts:
        for at in range(MAX_MATCH, len(text)):
            n = 0
            while n < MAX_MATCH and text[at - 1 - n] == end[-1 - n]:
                n += 1
            if n > 1 and (n, at) > best:
                best, draft = (n, at), text[at : at + most]
    return draft


def test_drafts_are_those_of_a_search_by_brute_force() -> None:
    rng, found = np.random.default_rng(0), 0
    for letters in (2, 3, 5, 9):
        for _ in range(60):
            prompt = rng.integers(0, letters, rng.integers(1, 40))
            earlier = tuple(rng.integers(0, letters, rng.integers(0, 50)) for _ in range(2))
            request = SampleRequest(PROMPTS[0], prompt, 3, Sampling(max_new_tokens=T), SampleKey(0, 1), earlier=earlier)
            texts, own = RequestTexts(request), [rng.integers(0, letters, rng.integers(0, T)) for _ in range(3)]
            for row, text in enumerate(own, start=1):
                texts.write(row, 0, text)
            before = ([-1] * MAX_MATCH + prompt.tolist())[-MAX_MATCH:]
            lists = [[-2] * MAX_MATCH + prompt.tolist(), *(before + text.tolist() for text in (*own, *earlier))]
            row, most = int(rng.integers(1, 4)), int(rng.integers(1, 8))
            assert texts.find(row, most, "group").tolist() == brute_force(lists, row, most)
            assert texts.find(row, most, "own").tolist() == brute_force([lists[0], lists[row]], 1, most)
            found += len(texts.find(row, most, "group")) > 0
    assert found > 100


# Sessions.

SERVED = (
    Sampling(max_new_tokens=20, temperature=0.5),
    Sampling(max_new_tokens=9, temperature=0.0),
    Sampling(max_new_tokens=14, temperature=0.7, top_p=0.8),
    Sampling(max_new_tokens=12, top_k=3, min_p=0.05, min_new_tokens=4, stop=("7",)),
)


def ask(place: int) -> SampleRequest:
    ids = policy("repetitive").encode(prompt_of((1, 9, 17, 70, 33)[place % 5]))
    return served_request(ids, 1 + place % 3, SERVED[place % 4], seed=place, top=place % 2)


def answers(session: Session, places: list[int]) -> dict[int, list[list[SampledToken]]]:
    numbers = {session.submit(ask(place)): place for place in places}
    found: dict[int, list[list[SampledToken]]] = {place: [[] for _ in range(1 + place % 3)] for place in places}
    while session.requests:
        for token in session.step():
            found[numbers[token.request]][token.sample].append(token)
    return found


def test_a_served_request_gets_the_same_bits_whatever_is_drafted_and_served(monkeypatch: pytest.MonkeyPatch) -> None:
    session = torch_session(policy("repetitive"), 4, 32, "own")
    assert session.runner.width == 8
    together = answers(session, list(range(6)))
    assert session.runner.counts.accepted > 0
    plain = answers(torch_session(policy("repetitive"), 4, 32), list(range(6)))
    for place, samples in together.items():
        alone = answers(torch_session(policy("repetitive"), 4, 32, "own"), [place])[place]
        assert [[(t.token_id, t.logp, t.top, t.stop) for t in s] for s in samples] == [
            [(t.token_id, t.logp, t.top, t.stop) for t in s] for s in alone
        ]
        for ours, theirs in zip(samples, plain[place], strict=True):
            assert [(t.token_id, t.stop) for t in ours] == [(t.token_id, t.stop) for t in theirs]
            assert [t.logp for t in ours] == pytest.approx([t.logp for t in theirs], abs=1e-4)
            for a, b in zip(ours, theirs, strict=True):
                assert [i for i, _ in a.top] == [i for i, _ in b.top]
    monkeypatch.setattr(Drafter, "propose", _proposing(lambda slot, at: [3, 4, 5]))
    wrong = answers(torch_session(policy("repetitive"), 4, 32, "own"), list(range(6)))
    assert wrong == together


def test_a_cancelled_request_leaves_its_slot_and_texts() -> None:
    session = torch_session(policy("repetitive"), 4, 32, "own")
    assert isinstance(session.runner, TorchRunner)
    number = session.submit(ask(2))
    session.step()
    session.cancel(number)
    assert session.runner.drafter is not None
    assert not session.runner.drafter.texts
    found, alone = (answers(s, [1])[1] for s in (session, torch_session(policy("repetitive"), 4, 32, "own")))
    assert [[(t.token_id, t.logp) for t in s] for s in found] == [[(t.token_id, t.logp) for t in s] for s in alone]


@pytest.mark.parametrize(
    ("name", "slots", "line"),
    [
        ("gemma2", 4, "drafts: 8 rows per slot"),
        ("gemma2", 16, "drafts: 2 rows per slot"),
        ("gemma2", 17, "no drafts, because a step computes 32 rows, and there are 17 slots: set engine.slots = 16 or less"),
        ("mamba2", 4, "no drafts, because the model has recurrent layers"),
        ("gptj", 4, "no drafts, because transformers' own forward decodes the model"),
    ],
)
def test_the_log_says_how_many_rows_drafts_have_or_why_there_are_none(name: str, slots: int, line: str) -> None:
    model = policy(name) if name == "gemma2" else Policy(tiny_model(name), tokenizer())
    for draft in ("group", "own"):
        engine = NativeEngine(model, Engine(slots=slots, draft=draft))
        assert engine.log_lines[0].startswith(line)
        runner = engine.build_runner([SampleRequest(PROMPTS[0], prompt_ids(model), slots, Sampling(), SampleKey(0, 1))])
        assert getattr(runner, "width", 1) == (int(line.split()[1]) if line.startswith("drafts") else 1)
    assert not any("drafts" in text for text in NativeEngine(model, Engine(slots=slots)).log_lines)


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_the_log_runs_no_pass_over_sharded_weights(layer_by_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone writes the log, on a GPU too, and a pass over shards is a collective."""
    model = Policy(make_model("gemma2"), tokenizer())
    model.layer_by_layer = layer_by_layer
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    monkeypatch.setattr("oncurve.engines.native.engine.is_dtensor", lambda weight: True)
    monkeypatch.setattr(model, "hidden", lambda *_: pytest.fail("a pass"))
    monkeypatch.setattr("oncurve.engines.native.engine.kernels.can_run_kernels", lambda device: True)
    line = NativeEngine(model, Engine(slots=4, draft="group")).log_lines[0]
    assert line == (
        "no drafts, because torch decodes on the GPU, and would wait for each draft"
        if layer_by_layer
        else "drafts: 8 rows per slot"
    )


def test_the_log_says_that_there_are_no_drafts_while_experts_are_recorded() -> None:
    """Held-out answers, whose experts are not recorded, have drafts."""
    model = Policy(mixture("qwen3_moe"), tokenizer())
    engine = NativeEngine(model, Engine(slots=4, draft="group"))
    assert engine.log_lines[0] == "drafts: 8 rows per slot, but none while routing_replay or balance_loss record experts"
    request = SampleRequest(PROMPTS[0], prompt_ids(model), 4, Sampling(), SampleKey(0, 1))
    for records, width in ((False, 8), (True, 1)):
        engine.records_routing = records
        runner = engine.build_runner([request])
        assert isinstance(runner, TorchRunner)
        assert runner.width == width


def prompt_ids(policy: Policy) -> Ints:
    return policy.encode(PROMPTS[0])
