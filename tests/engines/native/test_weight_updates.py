"""Weights that change while completions are sampled: sequences continue with the new ones and record each token's version."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oncurve.engines.base import SampleKey, SampleRequest
from oncurve.engines.cuda.graph_decoder import GraphDecoder
from oncurve.engines.cuda.runner import CudaRunner
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.native.scheduler import Scheduler
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Completion, Prompt
from tests.training.builders import policy as make_policy

SAMPLING = Sampling(max_new_tokens=24, min_new_tokens=24)
PROMPTS = [Prompt(name, text=f"{name}+1=") for name in "123"]
KEY = SampleKey(3, 1)


class After:
    """Changes the weights after this many rounds."""

    def __init__(self, policy: Policy, rounds: int, scale: float) -> None:
        self.policy, self.rounds, self.scale, self.version = policy, rounds, scale, 7

    def __call__(self) -> bool:
        self.rounds -= 1
        if self.rounds:
            return False
        change(self.policy, self.scale)
        self.version = 8
        return True


@torch.no_grad()
def change(policy: Policy, scale: float) -> None:
    dice = torch.Generator().manual_seed(1)
    for p in policy.model.parameters():
        p.add_(torch.randn(p.shape, generator=dice), alpha=scale)


def engine(policy: Policy, rounds: int, scale: float = 0.5) -> NativeEngine:
    engine_ = NativeEngine(policy, Engine(slots=8, check_every=4))
    engine_.weight_source = After(policy, rounds, scale)
    return engine_


@pytest.mark.parametrize("top_k", [0, 1000], ids=["compiled", "torch"])
def test_tokens_before_the_change_are_the_old_weights_and_those_after_it_the_new(top_k: int) -> None:
    sampling = SAMPLING.model_copy(update={"top_k": top_k})
    before = NativeEngine(make_policy(), Engine(slots=8, check_every=4)).sample(PROMPTS, 2, sampling, KEY)
    mixed = engine(make_policy(), rounds=3).sample(PROMPTS, 2, sampling, KEY)
    for old, new in zip(before, mixed, strict=True):
        for a, b in zip(old.completions, new.completions, strict=True):
            assert b.versions == ((0, 7), (8, 8))
            assert a.token_ids[:8].tobytes() == b.token_ids[:8].tobytes()
            assert a.logps[:8].tobytes() == b.logps[:8].tobytes()
            assert not np.array_equal(a.logps[8:], b.logps[8:])


@pytest.mark.parametrize("top_k", [0, 1000], ids=["compiled", "torch"])
def test_completions_seated_after_the_change_are_wholly_the_new_weights(top_k: int) -> None:
    """Eight slots hold two of three prompts: the third is admitted after the change, and must show no trace of the old
    weights."""
    sampling, policy = SAMPLING.model_copy(update={"top_k": top_k}), make_policy()
    last = engine(policy, rounds=3).sample(PROMPTS, 4, sampling, KEY)[2]
    for completion in last.completions:
        assert completion.versions == ((0, 8),)
        pack = build_pack([PrefixGroup(last.prompt_ids, (completion.token_ids,), (0,))], policy.device)
        expected = policy.pack_logps(pack, 1.0)[0].detach().numpy()
        assert np.allclose(completion.logps, expected, atol=1e-4)


@torch.inference_mode()
def test_the_engine_of_a_gpu_takes_new_weights_between_rounds() -> None:
    """Here in Triton's interpreter. The round in flight has the old weights, and the next the new ones."""

    def sample(exchange: bool) -> list[Completion]:
        policy = make_policy()
        decoder = GraphDecoder.build(policy, Engine(check_every=2))
        assert decoder is not None
        sampling = Sampling(max_new_tokens=8, min_new_tokens=8)
        requests = [SampleRequest(PROMPTS[0], policy.encode(PROMPTS[0]), 2, sampling, SampleKey(0, 1))]
        source = After(policy, rounds=3, scale=0.5) if exchange else None
        scheduler = Scheduler(policy, CudaRunner.build(decoder, requests, 2), requests, source)
        return [completion for _, group in scheduler.completions() for completion in group]

    for a, b in zip(sample(exchange=False), sample(exchange=True), strict=True):
        assert a.versions is None
        assert b.versions == ((0, 7), (4, 8))
        assert a.logps[:4].tobytes() == b.logps[:4].tobytes()
        assert not np.array_equal(a.logps[4:], b.logps[4:])


def test_without_an_exchange_there_are_no_versions() -> None:
    groups = NativeEngine(make_policy(), Engine(slots=8)).sample(PROMPTS, 2, SAMPLING, KEY)
    assert all(c.versions is None for g in groups for c in g.completions)
