"""Turns on the GPU engine, here in Triton's interpreter, against the torch runner."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oncurve.engines.base import SampleKey
from oncurve.engines.cuda import paged_kv_cache, runner
from oncurve.engines.cuda.graph_decoder import GraphDecoder
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Completion, Prompt
from tests.agents.test_history import policy as chat_policy
from tests.agents.test_history import prompts as chat_prompts
from tests.engines.cuda.test_graph_decoder import complete, requests_for
from tests.engines.native.plain import engine_for
from tests.engines.native.test_parked_slots import SlowEcho, mixed
from tests.engines.native.test_turns import Echo, LongEcho, policy, prompt_with
from tests.engines.native.test_turns import sample as plain

SAMPLING = Sampling(max_new_tokens=24)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that turns cross pages."""
    for module in (runner, paged_kv_cache):
        monkeypatch.setattr(module, "PAGE", 8)
    monkeypatch.setattr(runner, "PREFILL_TOKENS_SMALL", 128)


def sample(
    prompts: list[Prompt], sampling: Sampling, pages: int = 99, check_every: int = 2, width: int = 1
) -> list[tuple[Completion, ...]]:
    return sample_from(policy(), prompts, sampling, pages, check_every, width)


@torch.inference_mode()
def sample_from(
    model: Policy, prompts: list[Prompt], sampling: Sampling, pages: int = 99, check_every: int = 2, width: int = 1
) -> list[tuple[Completion, ...]]:
    decoder = GraphDecoder.build(model, Engine(check_every=check_every))
    assert decoder is not None
    open_cache = decoder.cache.open
    decoder.cache.open = lambda first, most, share: open_cache(first, min(most, pages), share)  # type: ignore[method-assign]
    return complete(decoder, requests_for(model, prompts, sampling), 3, width)


def bits(groups: list[tuple[Completion, ...]]) -> list[tuple[bytes, ...]]:
    return [(c.token_ids.tobytes(), c.logps.tobytes(), c.loss_mask.tobytes()) for group in groups for c in group]


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLING.model_copy(update={"max_new_tokens": 12}),
        pytest.param(SAMPLING, marks=pytest.mark.slow),
        pytest.param(SAMPLING.model_copy(update={"top_k": 4, "min_new_tokens": 3}), marks=pytest.mark.slow),
        pytest.param(SAMPLING.model_copy(update={"stop": ("ba",)}), marks=pytest.mark.slow),
    ],
)
def test_turns_tokens_and_masks_are_those_of_the_plain_path(sampling: Sampling) -> None:
    echoes = [Echo(), Echo(), Echo(calls=()), Echo(calls=())]
    here = sample([prompt_with("one", echoes[0]), prompt_with("two", echoes[2])], sampling)
    there = plain([prompt_with("one", echoes[1]), prompt_with("two", echoes[3])], sampling, group_size=2)
    assert any(not c.loss_mask.all() for group in here for c in group), "an environment has answered"
    for ours, theirs in zip(here, there, strict=True):
        for a, b in zip(ours, theirs.completions, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.loss_mask.tolist() == b.loss_mask.tolist()
            assert (a.stop, a.text) == (b.stop, b.text)
            for x, y in ((a.logps, b.logps), (a.sampled_logps, b.sampled_logps), (a.raw_logps, b.raw_logps)):
                assert float(np.abs(x - y).max()) < 1e-4
    for mine, other in ((echoes[0], echoes[1]), (echoes[2], echoes[3])):
        assert sorted(mine.received) == sorted(other.received)


@pytest.mark.slow
def test_a_parked_slot_keeps_its_pages_and_its_bits() -> None:
    """Also if pages run out and parked sequences are preempted."""
    short = SAMPLING.model_copy(update={"max_new_tokens": 14})
    expected = bits(sample([prompt_with("one", Echo()), prompt_with("two", Echo())], short))
    for pages in (99, 5):
        slow = SlowEcho(mixed)
        assert bits(sample([prompt_with("one", slow), prompt_with("two", slow)], short, pages=pages)) == expected
        assert len(slow.asked) == len(set(slow.asked)) > 4


@pytest.mark.slow
def test_a_long_reply_is_prefilled_into_the_pages() -> None:
    """Of a prompt that fills more than a page, and into a suffix that has begun."""
    sampling = Sampling(max_new_tokens=56)
    prompts = [prompt_with("one" * 4, LongEcho())]
    here, there = sample(prompts, sampling, check_every=4), plain(prompts, sampling, group_size=2)
    assert any(not c.loss_mask.all() for group in here for c in group)
    for ours, theirs in zip(here, there, strict=True):
        for a, b in zip(ours, theirs.completions, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.loss_mask.tolist() == b.loss_mask.tolist()
            assert float(np.abs(a.logps - b.logps).max()) < 1e-4


@pytest.mark.slow
def test_neither_a_full_cache_nor_the_round_size_changes_a_bit() -> None:
    prompts, short = (
        [prompt_with("one", Echo()), prompt_with("two", Echo(calls=()))],
        SAMPLING.model_copy(update={"max_new_tokens": 14}),
    )
    expected = bits(sample(prompts, short))
    assert bits(sample(prompts, short, pages=5)) == expected, "a preempted sequence gets the same numbers and replies"
    assert bits(sample(prompts, short, check_every=5)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("environment", [Echo, LongEcho])
def test_drafts_change_neither_turns_nor_tokens(environment: type[Echo]) -> None:
    """Short replies are forced, and are drafts that are always right; long ones are prefilled."""
    sampling = Sampling(max_new_tokens=14 if environment is Echo else 56)
    prompts = [prompt_with("one", environment())]
    expected, found = sample(prompts, sampling), sample(prompts, sampling, width=3)
    assert any(not c.loss_mask.all() for group in found for c in group)
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert a.loss_mask.tolist() == b.loss_mask.tolist()
            assert float(np.abs(a.logps - b.logps).max()) < 1e-4
    assert bits(sample(prompts, sampling, width=3, pages=12)) == bits(found)


@pytest.mark.slow
def test_a_history_by_the_template_begins_sequences_with_contexts_of_their_own() -> None:
    """Also if pages run out: a sequence that is preempted begins again with the same context."""
    model, prompts, sampling = chat_policy(), chat_prompts("template")[:2], Sampling(max_new_tokens=30)
    here = sample_from(model, prompts, sampling)
    there = engine_for(model, 3, 2).sample(prompts, 2, sampling, SampleKey(0, 1))
    assert any(c.contexts for group in here for c in group)
    for ours, theirs in zip(here, there, strict=True):
        for a, b in zip(ours, theirs.completions, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert [(at, ids.tolist()) for at, ids in a.contexts] == [(at, ids.tolist()) for at, ids in b.contexts]
            assert float(np.abs(a.logps - b.logps).max()) < 1e-4
    assert bits(sample_from(model, prompts, sampling, pages=14)) == bits(here)
