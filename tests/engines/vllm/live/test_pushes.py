"""Weights reach vLLM: after a push it writes what the native engine writes with the new ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oncurve.engines.base import SampleKey
from oncurve.engines.vllm.engine import MEMORY, VllmEngine
from oncurve.models import lora
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Group
from tests.engines.native.plain import next_logits
from tests.engines.vllm.live.models import GREEDY, PROMPTS, assert_agree, engine_of, native, plain, policy_of, train

pytestmark = pytest.mark.vllm
STEP = SampleKey(seed=0, step=1)


def texts(groups: list[Group]) -> list[str]:
    return [c.text for g in groups for c in g.completions]


@pytest.mark.parametrize("name", ["qwen3", "llama_biased"])
def test_after_an_update_vllm_writes_what_the_native_engine_writes(name: str) -> None:
    """Tied weights (qwen3), untied ones and biases (llama_biased), again and again."""
    policy = policy_of(name)
    engine = engine_of(policy)
    try:
        before = texts(engine.sample(PROMPTS, 1, GREEDY, STEP))
        for seed in range(3):
            train(policy, seed)
            now = engine.sample(PROMPTS, 1, GREEDY, STEP)
            assert_agree(policy, now, native(policy, PROMPTS, GREEDY))
            assert texts(now) != before
            before = texts(now)
    finally:
        engine.close()


class Change:
    """Changes the weights after this many calls, as a cluster's learner may."""

    def __init__(self, policy: Policy, looks: int) -> None:
        self.policy, self.looks, self.version = policy, looks, 7

    def __call__(self) -> bool:
        self.looks -= 1
        if self.looks:
            return False
        train(self.policy, seed=5)
        self.version = 8
        return True


@pytest.mark.parametrize("rank", [0, 4])
def test_weights_that_change_on_the_way_write_the_rest(rank: int) -> None:
    """Every token is of the weights that its version names, and log-probs say so; with an adapter (rank 4) as well."""
    policy = policy_of(rank=rank)
    first = plain(policy)
    engine = engine_of(policy)
    try:
        engine.weight_source = Change(policy, looks=3)
        groups = engine.sample(PROMPTS, 4, Sampling(max_new_tokens=400), STEP)
    finally:
        engine.close()
    second, mixed = plain(policy), 0
    for group in groups:
        for c in group.completions:
            assert c.versions is not None
            parts = {version: at for at, version in c.versions}
            turn = parts.get(8, len(c.token_ids))
            mixed += 0 < turn < len(c.token_ids)
            for model, span in ((first, slice(0, turn)), (second, slice(turn, None))):
                logps_TV = next_logits(model, group.prompt_ids, c.token_ids).log_softmax(-1).numpy()
                expected = logps_TV[range(len(c.token_ids)), c.token_ids][span]
                assert not len(expected) or abs(c.logps[span] - expected).max() < 1e-3
    assert mixed, "the change came before or after everything"


@pytest.fixture(scope="module")
def tuned() -> Iterator[VllmEngine]:
    engine = engine_of(policy_of(rank=4))
    yield engine
    engine.close()


def test_an_adapter_alone_is_pushed_and_works(tuned: VllmEngine) -> None:
    """A fresh adapter changes nothing; a trained one what it should, again and again."""
    policy = tuned.policy
    before = texts(tuned.sample(PROMPTS, 1, GREEDY, STEP))
    assert before == texts(native(policy_of(), PROMPTS, GREEDY))
    for seed in range(2):
        train(policy, seed)
        now = tuned.sample(PROMPTS, 1, GREEDY, STEP)
        assert_agree(policy, now, native(policy, PROMPTS, GREEDY))
        assert texts(now) != before
        before = texts(now)


def test_of_a_tuned_model_only_small_files_are_left_in_memory(tuned: VllmEngine) -> None:
    tuned.sample(PROMPTS[:1], 1, GREEDY, STEP)
    left = [p for folder in MEMORY.glob("oncurve-vllm-*") for p in folder.rglob("*.safetensors") if _of(tuned, p)]
    assert [p.name for p in left] == [lora.WEIGHTS]


def _of(engine: VllmEngine, path: Path) -> bool:
    return engine._folder is not None and path.is_relative_to(engine._folder)
