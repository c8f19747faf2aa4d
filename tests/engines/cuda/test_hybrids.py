"""Hybrid models in the GPU engine, in Triton's interpreter: recurrent states of slots and prompts beside the pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oncurve.engines.cuda.graph_decoder import GraphDecoder
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from tests.engines.cuda.test_graph_decoder import complete, requests_for, small_pages
from tests.engines.native.plain import prompt_of
from tests.models.test_recurrent_layers import ROUNDING, hybrid, open_hybrid, plain_logps

__all__ = ["small_pages"]

SAMPLING = Sampling(max_new_tokens=5, min_new_tokens=5)
LENGTHS = (1, 13)
"""Prompts of one token and of two chunks."""


@torch.inference_mode()
def sample(policy: Policy, lengths: tuple[int, ...], pages: int = 99) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Prompt, tokens and log-probs of two completions of each prompt over three slots."""
    decoder = GraphDecoder.build(policy, Engine(check_every=2))
    assert decoder is not None
    open_cache = decoder.cache.open
    decoder.cache.open = lambda first, most, share: open_cache(first, min(most, pages), share)  # type: ignore[method-assign]
    requests = requests_for(policy, [prompt_of(n) for n in lengths], SAMPLING)
    groups = complete(decoder, requests, 3)
    return [(r.prompt_ids, c.token_ids, c.logps) for r, group in zip(requests, groups, strict=True) for c in group]


@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_sampled_logps_are_those_of_a_plain_forward(family: str) -> None:
    plain = hybrid(family)
    for prompt_ids, token_ids, logps in sample(open_hybrid(family), LENGTHS):
        np.testing.assert_allclose(logps, plain_logps(plain, prompt_ids, token_ids).numpy(), atol=ROUNDING)


@pytest.mark.slow
def test_neither_neighbours_nor_preemption_change_a_bit() -> None:
    """With few pages, sequences are preempted and prompts are prefilled again."""
    policy = open_hybrid("lfm2")
    together, alone, preempted = sample(policy, LENGTHS), sample(policy, LENGTHS[-1:]), sample(policy, LENGTHS, pages=7)
    for one, other in [*zip(together[-2:], alone, strict=True), *zip(together, preempted, strict=True)]:
        np.testing.assert_array_equal(one[1], other[1])
        np.testing.assert_array_equal(one[2], other[2])
