"""The engine against transformers: greedy texts and log-probs, ten architectures, prompts across pages and buckets."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
from tests.engines.native.plain import assert_logps, assert_same_greedy, generate, prompt_of, sample
from tests.models.architectures import ARCHITECTURES, make_model, tokenizer

LENGTHS = [1, 2, 16, 17, 64, 65, 66, 130]
"""Around the bucket of 16 and the page of 64: all but a prompt's last token are prefilled."""


@cache
def pair(name: str) -> tuple[PreTrainedModel, Policy]:
    """The model by itself, and opened as a policy."""
    model = make_model(name)
    return copy.deepcopy(model), Policy(model, tokenizer())


@pytest.mark.parametrize(
    "name", [name if name in ("llama", "gemma3") else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]
)
def test_greedy_text_is_that_of_transformers(name: str) -> None:
    """Of at least 66 tokens, so that every suffix crosses a page."""
    plain, policy = pair(name)
    prompts = [prompt_of(n) for n in LENGTHS]
    sampling = Sampling(temperature=0.0, max_new_tokens=70, min_new_tokens=66)
    groups = sample(policy, prompts, 1, sampling, slots=3)
    lively = 0
    for group in groups:
        ours = group.completions[0].token_ids
        assert_same_greedy(plain, group.prompt_ids, ours, generate(plain, group.prompt_ids, sampling))
        lively = max(lively, len(set(ours.tolist())))
    assert lively > 8, "a text that repeats itself would hide mistakes"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logps_are_those_of_a_full_forward(name: str) -> None:
    plain, policy = pair(name)
    groups = sample(policy, [prompt_of(n) for n in (3, 40, 90)], 3, Sampling(temperature=0.8, max_new_tokens=70), slots=6)
    for group in groups:
        for completion in group.completions:
            assert_logps(plain, group.prompt_ids, completion, temperature=0.8)


@pytest.mark.parametrize("group_size", [1, 3, 8, 20])
def test_logps_hold_for_any_group_size_with_fewer_slots_than_completions(group_size: int) -> None:
    """20 completions of a prompt fill two blocks; one after the other where slots are few."""
    plain, policy = pair("gemma3")
    groups = sample(policy, [prompt_of(n) for n in (5, 33, 70)], group_size, Sampling(max_new_tokens=12), slots=10)
    for group in groups:
        assert len(group.completions) == group_size
        for completion in group.completions:
            assert_logps(plain, group.prompt_ids, completion, temperature=1.0)
    if group_size > 1:
        assert len({c.token_ids.tobytes() for c in groups[0].completions}) > 1, "samples of a group are independent"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral", {"sliding_window": None}),
        ("phi3", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("granite", {"attention_multiplier": 1.0}),
        ("granite", {"logits_scaling": 1.0}),
    ],
)
@torch.no_grad()
def test_what_sets_an_architecture_apart_matters_here(name: str, change: dict[str, float | None]) -> None:
    """Else the tests above would pass without it."""
    model = make_model(name)
    other = type(model)(copy.deepcopy(model.config)).eval()
    for key, value in change.items():
        setattr(other.config, key, value)
    changed = type(model)(other.config).eval()
    changed.load_state_dict(model.state_dict())
    changed.set_attn_implementation("eager")
    ids = torch.tensor(tokenizer()(prompt_of(60).text)["input_ids"])[None]
    assert float((model(ids).logits - changed(ids).logits).abs().max()) > 0.05
