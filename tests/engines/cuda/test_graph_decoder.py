"""The GPU's engine as a whole, here on a CPU: kernels by Triton's interpreter, every step run as it would be captured."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from oncurve.engines.cuda import decode_step, paged_kv_cache, scheduler
from oncurve.engines.cuda.graph_decoder import GraphDecoder
from oncurve.engines.cuda.scheduler import CudaSampleRequest, bucket
from oncurve.errors import ModelError
from oncurve.kernels.decode_attention import LaunchShape
from oncurve.kernels.decode_matmul import Block
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Completion
from tests.engines.native.plain import assert_logps, prompt_of
from tests.models.architectures import make_model, tokenizer

HOW = Sampling(temperature=0.8, max_new_tokens=5)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short texts cross pages, buckets and chunks."""
    for module in (scheduler, paged_kv_cache):
        monkeypatch.setattr(module, "PAGE", 4)
    monkeypatch.setattr(scheduler, "BUCKET", 4)
    for name in ("PREFILL_TOKENS", "PREFILL_TOKENS_SMALL"):
        monkeypatch.setattr(scheduler, name, 8)


@torch.inference_mode()
def sample(policy: Policy, lengths: tuple[int, ...], how: Sampling = HOW, pages: int = 99) -> list[list[Completion]]:
    """Two completions of each prompt over three slots, looked at every other token."""
    sampler = GraphDecoder.of(policy, Engine(check_every=2))
    assert sampler is not None
    room = sampler.pool.open
    sampler.pool.open = lambda first, most, share: room(first, min(most, pages), share)  # type: ignore[method-assign]
    prompts = [prompt_of(n) for n in lengths]
    ask = CudaSampleRequest([policy.encode(p) for p in prompts], [p.id for p in prompts], 2, how, 0, 1)
    return [list(c) for _, c in sorted(sampler.completions(ask, 3), key=lambda found: found[0])]


def bits(completions: list[Completion]) -> list[tuple[bytes, ...]]:
    return [(c.token_ids.tobytes(), c.logps.tobytes(), c.raw_logps.tobytes(), c.text.encode()) for c in completions]


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_logps_are_those_of_a_full_forward(name: str) -> None:
    """By the family's own step and through a model's modules; a prompt of one token, and one longer than a chunk."""
    model = make_model(name)
    policy = Policy(copy.deepcopy(model), tokenizer())
    for n, group in zip((1, 10), sample(policy, (1, 10)), strict=True):
        for completion in group:
            assert_logps(model, policy.encode(prompt_of(n)), completion, temperature=0.8)


def test_products_of_our_own_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that they fill: q, k and v as a whole, parts that the next norm adds up, and the gated unit within."""
    taken: list[tuple[int, bool]] = []

    def block_for(x: torch.Tensor, outputs: int, *, gated: bool = False) -> Block:
        taken.append((outputs, gated))
        return Block(16, 16, 16, warps=4, stages=2, parts=1 if gated or outputs > x.shape[1] else x.shape[1] // 16)

    monkeypatch.setattr(decode_step, "block_for", block_for)
    model = make_model("qwen3")
    policy = Policy(copy.deepcopy(model), tokenizer())
    for completion in sample(policy, (10,))[0]:
        assert_logps(model, policy.encode(prompt_of(10)), completion, temperature=0.8)
    assert len(set(taken)) == 3


def test_where_the_pool_is_full_completions_wait_and_come_out_the_same() -> None:
    """Six pages: the longer prompt's three, and three for completions that need two each. Neighbours change no bit either."""
    policy = Policy(make_model("qwen3"), tokenizer())
    alone = bits(sample(policy, (10,))[0])
    assert bits(sample(policy, (1, 10), pages=6)[1]) == alone
    with pytest.raises(ModelError, match="4 pages of"):
        sample(policy, (10,), pages=4)


@torch.inference_mode()
def test_where_memory_is_too_short_to_capture_the_next_call_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    sampler = GraphDecoder.of(policy, Engine())
    assert sampler is not None
    sampler.by_graph, tries = True, 0

    def capture(reach: LaunchShape, how: Sampling) -> SimpleNamespace:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(replay=partial(sampler._step, reach, how))

    monkeypatch.setattr(sampler, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    ask = CudaSampleRequest([policy.encode(prompt_of(3))], ["p"], 2, HOW, 0, 1)
    found = [bits([*next(iter(sampler.completions(ask, 2)))[1]]) for _ in range(2)]
    assert tries > 1
    assert sampler.graphs
    assert found[0] == found[1]


def test_a_stop_string_ends_a_completion_where_it_is_complete() -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    whole = sample(policy, (10,))[0][0]
    letter = policy.decode(whole.token_ids[2:3])
    first = next(i for i in range(5) if policy.decode(whole.token_ids[i : i + 1]) == letter)
    cut = sample(policy, (10,), HOW.model_copy(update={"stop": (letter,)}))[0][0]
    assert cut.stop == "stop_string"
    assert cut.token_ids.tolist() == whole.token_ids[: first + 1].tolist()
    assert cut.logps.tobytes() == whole.logps[: first + 1].tobytes()


def test_launches_come_in_few_sizes() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 33, 48, 49)] == [
        1,
        2,
        3,
        4,
        6,
        6,
        8,
        8,
        12,
        12,
        16,
        48,
        48,
        64,
    ]


def test_texts_of_many_are_those_of_each() -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    ids = [policy.encode(prompt_of(n)) for n in (1, 9, 30)]
    assert policy.decode_all(ids) == [policy.decode(x) for x in ids]
