"""The reference: transformers alone, one sequence at a time, without a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Completion, Group, Ints, Prompt

NEAR_TIE = 1e-3
SENTENCE = "the quick brown fox jumps over 1234 lazy dogs + 567 more = "


def prompt_of(length: int, name: str = "p") -> Prompt:
    """A prompt of this many tokens; the length determines the text."""
    return Prompt(id=f"{name}/{length}", text=(SENTENCE[length % 7 :] + SENTENCE * 8)[:length])


def engine_for(policy: Policy, slots: int | None, check_every: int = 4) -> NativeEngine:
    return NativeEngine(policy, Engine(slots=slots, check_every=check_every))


def sample(
    policy: Policy, prompts: list[Prompt], group_size: int, sampling: Sampling, *, slots: int = 8, step: int = 1
) -> list[Group]:
    return engine_for(policy, slots).sample(prompts, group_size, sampling, SampleKey(seed=0, step=step))


@torch.no_grad()
def next_logits(model: PreTrainedModel, prompt_ids: Ints, token_ids: Ints) -> Tensor:
    """The logits from which each token of a completion is sampled, [T, V], by one full forward."""
    ids = torch.tensor([[*prompt_ids.tolist(), *token_ids.tolist()]])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits[len(prompt_ids) - 1 : -1].double()


@torch.no_grad()
def generate(model: PreTrainedModel, prompt_ids: Ints, sampling: Sampling) -> list[int]:
    """transformers' own greedy text."""
    ids = torch.from_numpy(prompt_ids)[None]
    limits = {"max_new_tokens": sampling.max_new_tokens, "min_new_tokens": sampling.min_new_tokens}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **limits)
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def assert_same_greedy(model: PreTrainedModel, prompt_ids: Ints, ours: Ints, theirs: list[int]) -> None:
    """Token for token, or a near tie at the first difference."""
    if ours.tolist() == theirs:
        return
    at = next((i for i, (a, b) in enumerate(zip(ours.tolist(), theirs, strict=False)) if a != b), None)
    assert at is not None, f"one text continues after the other ends: {len(ours)} and {len(theirs)} tokens"
    scores = next_logits(model, prompt_ids, ours[: at + 1])[-1]
    margin = float((scores[int(ours[at])] - scores[theirs[at]]).abs())
    assert margin < NEAR_TIE, f"token {at}: {int(ours[at])} and {theirs[at]}, {margin} apart"


def assert_logps(
    model: PreTrainedModel, prompt_ids: Ints, completion: Completion, temperature: float, within: float = 1e-4
) -> None:
    """Scaled and raw log-probs of every sampled token against a full forward."""
    logits_TV = next_logits(model, prompt_ids, completion.token_ids)
    at = torch.from_numpy(completion.token_ids)[:, None]
    for found, scale in ((completion.logps, temperature), (completion.raw_logps, 1.0)):
        expected = (logits_TV / scale).log_softmax(-1).gather(1, at)[:, 0]
        assert float((torch.from_numpy(found) - expected).abs().max()) < within
