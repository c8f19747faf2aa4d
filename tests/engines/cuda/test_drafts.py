"""Speculative sampling of the GPU engine, here on a CPU in Triton's interpreter: bits do not depend on what is drafted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

from oncurve.engines.base import MAX_EARLIER, BegunCompletion, PassCounts, SampleKey, SampleRequest, draft_width
from oncurve.engines.cuda import decode_step, paged_kv_cache, runner
from oncurve.engines.cuda.graph_decoder import GraphDecoder
from oncurve.engines.cuda.runner import CudaRunner
from oncurve.engines.native.scheduler import Scheduler
from oncurve.kernels.drafting import MAX_MATCH, DraftState, accept_and_draft
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Draft, Engine, Sampling
from oncurve.records import Completion, Ints
from tests import fast_interpreter
from tests.engines.native.plain import assert_logps, prompt_of
from tests.models.architectures import adapted, tokenizer

SAMPLING = Sampling(temperature=0.2, max_new_tokens=8)
Bits = list[tuple[bytes, ...]]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that drafts cross pages."""
    for module in (runner, paged_kv_cache):
        monkeypatch.setattr(module, "PAGE", 4)
    monkeypatch.setattr(runner, "BUCKET", 4)
    for name in ("PREFILL_TOKENS", "PREFILL_TOKENS_SMALL"):
        monkeypatch.setattr(runner, name, 8)


@torch.inference_mode()
def sample(
    policy: Policy,
    width: int,
    draft: Draft = "group",
    sampling: Sampling = SAMPLING,
    slots: int = 2,
    pages: int = 99,
    earlier: tuple[Ints, ...] = (),
) -> tuple[list[Completion], PassCounts]:
    """Two completions of each of two prompts over two slots, in rounds of two steps."""
    decoder = GraphDecoder.build(policy, Engine(check_every=2, draft=draft))
    assert decoder is not None
    open_cache = decoder.cache.open
    decoder.cache.open = lambda first, most, share: open_cache(first, min(most, pages), share)  # type: ignore[method-assign]
    key = SampleKey(0, 1, first=5)
    requests = [SampleRequest(p, policy.encode(p), 2, sampling, key, earlier=earlier) for p in (prompt_of(3), prompt_of(6))]
    device = CudaRunner.build(decoder, requests, slots, width)
    groups = dict(Scheduler(policy, device, requests).completions())
    return [completion for number in sorted(groups) for completion in groups[number]], device.counts


def bits(completions: list[Completion]) -> Bits:
    return [(c.token_ids.tobytes(), c.logps.tobytes(), c.raw_logps.tobytes(), c.stop.encode()) for c in completions]


def make_model(**special: Any) -> PreTrainedModel:
    """One layer; with tied embeddings the likeliest token is the last one, so that texts repeat themselves."""
    words = tokenizer()
    config = MistralConfig(
        vocab_size=len(words), eos_token_id=words.eos_token_id, pad_token_id=0, bos_token_id=None, hidden_size=32,
        intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        max_position_embeddings=64, tie_word_embeddings=True, **{"sliding_window": None} | special,
    )  # fmt: skip
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(make_model(), tokenizer())


@pytest.mark.slow
def test_drafts_save_passes_and_change_no_token(policy: Policy) -> None:
    plain, _ = sample(policy, 1)
    found, counts = sample(policy, 3)
    for a, b in zip(plain, found, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.stop == b.stop
        assert np.abs(a.logps - b.logps).max() < 1e-4
    assert counts.accepted > 0
    assert counts.passes + counts.accepted == sum(len(c.token_ids) for c in found)


def count_preemptions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    slots: list[int] = []
    preempt = Scheduler._preempt

    def counted(self: Scheduler, slot: int) -> None:
        slots.append(slot)
        preempt(self, slot)

    monkeypatch.setattr(Scheduler, "_preempt", counted)
    return slots


@pytest.mark.slow
def test_bits_are_those_of_any_drafts_and_of_none(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if pages run out and sequences are preempted."""
    fast_interpreter.multiply_in_float64(monkeypatch)
    preempted = count_preemptions(monkeypatch)
    found, counts = sample(policy, 3)
    own, own_counts = sample(policy, 3, "own")
    assert bits(own) == bits(found)
    assert own_counts.drafted < counts.drafted
    assert not preempted
    assert bits(sample(policy, 3, pages=5)[0]) == bits(found)
    assert preempted
    monkeypatch.setattr(decode_step, "accept_and_draft", _drafting(lambda text, position: []))
    none, none_counts = sample(policy, 3)
    assert bits(none) == bits(found)
    assert none_counts.accepted == none_counts.drafted == 0


@pytest.mark.slow
def test_earlier_answers_are_sources(policy: Policy) -> None:
    """The same answers as last time: nearly every token is right, and none changes."""
    found, counts = sample(policy, 3)
    again, again_counts = sample(policy, 3, earlier=tuple(c.token_ids for c in found))
    assert bits(again) == bits(found)
    assert again_counts.accepted > counts.accepted


@torch.inference_mode()
def test_prefilled_tokens_are_a_source(policy: Policy) -> None:
    """Tokens that are prefilled, as a long reply or a text that has begun, are in the text in which drafts are looked for."""
    begun_ids = np.arange(40) % 13 + 3
    sampling, begun = Sampling(max_new_tokens=42), BegunCompletion(begun_ids, np.zeros((40, 3), np.float32))
    decoder = GraphDecoder.build(policy, Engine(check_every=2))
    assert decoder is not None
    prompt = prompt_of(3)
    requests = [SampleRequest(prompt, policy.encode(prompt), 1, sampling, SampleKey(0, 1), begun=(begun,))]
    device = CudaRunner.build(decoder, requests, 1, 3)
    ((_, (completion,)),) = Scheduler(policy, device, requests).completions()
    assert device.buffers.drafts is not None
    text = device.buffers.drafts.texts[1, MAX_MATCH : MAX_MATCH + len(completion.token_ids)]
    assert completion.token_ids[:40].tolist() == begun_ids.tolist()
    assert text.tolist() == completion.token_ids.tolist()


@pytest.mark.slow
def test_adapters_draft_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of LoRA have no limit on the rows of a step."""
    policy = Policy(adapted(make_model()), tokenizer())
    found, counts = sample(policy, 3)
    assert counts.drafted > 0
    for a, b in zip(sample(policy, 1)[0], found, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert np.abs(a.logps - b.logps).max() < 1e-4
    monkeypatch.setattr(decode_step, "accept_and_draft", _drafting(lambda text, position: [3, 4]))
    assert bits(sample(policy, 3)[0]) == bits(found)


Propose = Callable[[int, int], list[int]]


def _drafting(propose: Propose) -> Callable[..., None]:
    """Accept as always, then draft something else: ``propose`` gets a slot's text and position, and the room that is left."""

    def call(
        row_token: Tensor, row_position: Tensor, sampled: Tensor, logps: Tensor, state: DraftState, *rest: Any, **flags: Any
    ) -> None:
        accept_and_draft(row_token, row_position, sampled, logps, state, *rest, **flags)
        W = state.width
        for slot, position in enumerate(state.position.tolist()):
            rows = slice(slot * W + 1, slot * W + W)
            state.draft[slot], row_position[rows] = -1, -1
            if position < 0:
                continue
            room = int(state.limit[slot]) - position - 1
            for w, token in enumerate(propose(int(state.text[slot]), position)[: min(W - 1, room)]):
                state.draft[slot, w], row_token[slot * W + 1 + w] = token, token
                row_position[slot * W + 1 + w] = position + 1 + w

    return call


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "nearly right", "right and beyond the end"])
def test_malicious_drafts_change_no_bit(policy: Policy, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    completions, _ = sample(policy, 3)
    rng, vocabulary = np.random.default_rng(0), len(policy.head.weight_VD)
    texts = {1 + i % 2 + i // 2 * (3 + MAX_EARLIER): c.token_ids.tolist() + [5] * 20 for i, c in enumerate(completions)}

    def propose(text: int, position: int) -> list[int]:
        right = texts[text][position : position + 2]
        if kind == "random":
            return [int(token) for token in rng.integers(0, vocabulary, 2)]
        return [(t + 1) % vocabulary if kind == "nearly right" and rng.random() < 0.4 else t for t in right]

    monkeypatch.setattr(decode_step, "accept_and_draft", _drafting(propose))
    found, counts = sample(policy, 3)
    assert bits(found) == bits(completions)
    assert counts.drafted > 0
    if kind != "random":
        assert counts.accepted > counts.passes // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, max_new_tokens=8),
        Sampling(temperature=0.7, max_new_tokens=8, min_new_tokens=6),
        Sampling(temperature=0.9, max_new_tokens=8, top_p=0.8),
        Sampling(temperature=0.5, max_new_tokens=8, stop=("q", "7")),
    ],
)
def test_every_kind_of_sampling_gets_the_tokens_that_it_gets_without_drafts(policy: Policy, sampling: Sampling) -> None:
    for a, b in zip(sample(policy, 1, sampling=sampling)[0], sample(policy, 4, sampling=sampling)[0], strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.stop == b.stop


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", "modules"])
def test_log_probs_are_those_of_a_full_forward(name: str) -> None:
    """With windows, and through the model's own modules."""
    model = make_model(sliding_window=5) if name == "window" else make_model()
    policy = Policy(copy.deepcopy(model), tokenizer(), compiled=name != "modules")
    completions, counts = sample(policy, 4)
    for completion, n in zip(completions, (3, 3, 6, 6), strict=True):
        assert_logps(model, policy.encode(prompt_of(n)), completion, SAMPLING.temperature)
    assert counts.drafted > 0


def brute_force(texts: list[list[int]], own: int, most: int) -> list[int]:
    """The longest match of 2 to 8 tokens, of equal ones the one that ends last. Texts include 8 tokens before their start."""
    end, best, draft = texts[own][-MAX_MATCH:], (1, 0), []
    for text in texts:
        for at in range(MAX_MATCH, len(text)):
            n = 0
            while n < MAX_MATCH and text[at - 1 - n] == end[-1 - n]:
                n += 1
            if n > 1 and (n, at) > best:
                best, draft = (n, at), text[at : at + most]
    return draft


def test_drafts_are_those_of_a_search_by_brute_force() -> None:
    rng, S, W, T = np.random.default_rng(0), 3, 4, 40
    found = 0
    for letters in (2, 3, 6, 12):
        state = DraftState.empty(S, W, 2, 8, MAX_MATCH + T, 1 + S, 0, torch.device("cpu"))
        prompt = [-2] * MAX_MATCH + rng.integers(0, letters, rng.integers(9, T)).tolist()
        texts = [prompt] + [prompt[-MAX_MATCH:] + rng.integers(0, letters, rng.integers(0, T - 4)).tolist() for _ in range(S)]
        for row, text in enumerate(texts):
            state.texts[row, : len(text)], state.text_length[row] = torch.tensor(text), len(text) - MAX_MATCH
        state.text.copy_(torch.arange(1, S + 1))
        state.limit.fill_(T)
        state.position.copy_(state.text_length[1 : S + 1])
        state.position[1] = -1  # idle
        row_token, row_position = torch.zeros(S * W, dtype=torch.long), torch.zeros(S * W, dtype=torch.int32)
        sampled, logps = torch.zeros((1, S * W), dtype=torch.int32), torch.zeros(1, 3, S * W)
        next_token = rng.integers(0, letters, S * W)
        sampled[0] = torch.from_numpy(next_token)
        accept_and_draft(row_token, row_position, sampled, logps, state, torch.zeros(letters, dtype=torch.int8), own=False)
        for slot in (0, 2):
            texts[slot + 1].append(int(next_token[slot * W]))
        for slot in range(S):
            position = int(state.position[slot])
            if slot == 1:
                assert position == -1
                assert row_position[W : 2 * W].tolist() == [-1] * W
                continue
            expected = brute_force(texts, slot + 1, W - 1)
            assert state.draft[slot].tolist() == expected + [-1] * (W - 1 - len(expected))
            assert row_token[slot * W : slot * W + W].tolist()[: 1 + len(expected)] == [texts[slot + 1][-1], *expected]
            places = [position + w if w <= len(expected) else -1 for w in range(W)]
            assert row_position[slot * W : slot * W + W].tolist() == places
            found += len(expected) > 0
    assert found > 3


def test_the_width_is_a_function_of_the_recorded_settings() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [draft_width("group", slots, gpu) for slots in (1, 64, 128, 200, 256, 512, 2048)] == [8, 8, 4, 2, 2, 1, 1]
    assert [draft_width("own", slots, cpu) for slots in (1, 4, 8, 12, 16, 32)] == [8, 8, 4, 2, 2, 1]
    assert draft_width("off", 8, gpu) == draft_width("auto", 8, gpu) == draft_width("auto", 8, cpu) == 1
