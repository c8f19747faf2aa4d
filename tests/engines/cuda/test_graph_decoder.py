"""The GPU engine end to end, here on a CPU in Triton's interpreter: every step runs as it would be captured."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oncurve.engines.base import SampleKey, SampleRequest
from oncurve.engines.cuda import decode_step, graph_decoder, paged_kv_cache, runner
from oncurve.engines.cuda.graph_decoder import GraphDecoder, bucket
from oncurve.engines.cuda.runner import CudaRunner
from oncurve.engines.native.scheduler import Scheduler
from oncurve.engines.native.turns import build_requests
from oncurve.errors import ModelError
from oncurve.kernels.decode_attention import LaunchShape
from oncurve.kernels.decode_matmul import ProductTiles
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Completion, Prompt
from tests.engines.native.plain import assert_logps, prompt_of
from tests.models.architectures import make_model, tokenizer

SAMPLING = Sampling(temperature=0.8, max_new_tokens=5)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short texts cross pages, buckets and chunks."""
    for module in (runner, paged_kv_cache):
        monkeypatch.setattr(module, "PAGE", 4)
    monkeypatch.setattr(runner, "BUCKET", 4)
    for name in ("PREFILL_TOKENS", "PREFILL_TOKENS_SMALL"):
        monkeypatch.setattr(runner, name, 8)


@torch.inference_mode()
def sample(policy: Policy, lengths: tuple[int, ...], sampling: Sampling = SAMPLING, pages: int = 99) -> list[list[Completion]]:
    """Two completions of each prompt over three slots, in rounds of two tokens."""
    decoder = GraphDecoder.build(policy, Engine(check_every=2))
    assert decoder is not None
    open_cache = decoder.cache.open
    decoder.cache.open = lambda first, most, share: open_cache(first, min(most, pages), share)  # type: ignore[method-assign]
    return [
        list(completions)
        for completions in complete(decoder, requests_for(policy, [prompt_of(n) for n in lengths], sampling), 3)
    ]


def requests_for(policy: Policy, prompts: list[Prompt], sampling: Sampling) -> list[SampleRequest]:
    return build_requests(policy, prompts, 2, sampling, SampleKey(0, 1))


def complete(decoder: GraphDecoder, requests: list[SampleRequest], slots: int, width: int = 1) -> list[tuple[Completion, ...]]:
    """Each request's completions."""
    scheduler = Scheduler(decoder.policy, CudaRunner.build(decoder, requests, slots, width), requests)
    return [completions for _, completions in sorted(scheduler.completions(), key=lambda group: group[0])]


def bits(completions: list[Completion]) -> list[tuple[bytes, ...]]:
    return [(c.token_ids.tobytes(), c.logps.tobytes(), c.raw_logps.tobytes(), c.text.encode()) for c in completions]


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_logps_are_those_of_a_full_forward(name: str) -> None:
    """With the fused step and through a model's modules; a prompt of one token, and one longer than a chunk."""
    model = make_model(name)
    policy = Policy(copy.deepcopy(model), tokenizer())
    for n, group in zip((1, 10), sample(policy, (1, 10)), strict=True):
        for completion in group:
            assert_logps(model, policy.encode(prompt_of(n)), completion, temperature=0.8)


def test_our_products_agree_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that they fill: q, k and v in one product, parts that the next norm sums, and the gated unit within its
    product."""
    taken: list[tuple[int, bool]] = []

    def block_for(x: torch.Tensor, outputs: int, *, gated: bool = False) -> ProductTiles:
        taken.append((outputs, gated))
        return ProductTiles(16, 16, 16, warps=4, stages=2, parts=1 if gated or outputs > x.shape[1] else x.shape[1] // 16)

    monkeypatch.setattr(decode_step, "block_for", block_for)
    model = make_model("qwen3")
    policy = Policy(copy.deepcopy(model), tokenizer())
    for completion in sample(policy, (10,))[0]:
        assert_logps(model, policy.encode(prompt_of(10)), completion, temperature=0.8)
    assert len(set(taken)) == 3


@pytest.mark.slow
def test_with_a_full_cache_completions_wait_and_get_the_same_bits() -> None:
    """Six pages: three for the longer prompt, and three for completions that need two each. Neighbours change no bit either."""
    policy = Policy(make_model("qwen3"), tokenizer())
    alone = bits(sample(policy, (10,))[0])
    assert bits(sample(policy, (1, 10), pages=6)[1]) == alone
    with pytest.raises(ModelError, match="4 pages of"):
        sample(policy, (10,), pages=4)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Without a GPU: the modes of synchronising operations so far, 0 or "error"."""
    modes: list[Any] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return modes


@torch.inference_mode()
def test_a_step_that_waits_for_the_device_is_never_captured(
    refused: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch before 2.13 releases no cached memory any more once a capture has failed."""
    policy = Policy(make_model("qwen3"), tokenizer())
    decoder, step = GraphDecoder.build(policy, Engine()), GraphDecoder._step
    assert decoder is not None
    decoder.use_cuda_graphs = True

    def waiting_step(launch: LaunchShape, sampling: Sampling) -> None:
        if refused[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        step(decoder, launch, sampling)

    monkeypatch.setattr(decoder, "_step", waiting_step)
    monkeypatch.setattr(decoder, "_capture", lambda *_: pytest.fail("captured"))
    found = complete(decoder, requests_for(policy, [prompt_of(3)], SAMPLING), 2)
    assert "without CUDA graphs" in caplog.text
    assert "synchronizing" in caplog.text
    assert refused[-1] == 0
    decoder.use_cuda_graphs = False
    assert bits(list(found[0])) == bits(list(complete(decoder, requests_for(policy, [prompt_of(3)], SAMPLING), 2)[0]))


@torch.inference_mode()
@pytest.mark.parametrize("is_sharded", [False, True])
def test_no_graphs_over_weights_that_fsdp_gathers(is_sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while they are gathered. FSDP's own streams wait for the current one before each layer, which ends a capture."""
    policy = Policy(make_model("qwen3"), tokenizer())
    shape = paged_kv_cache.shape_of(policy)
    assert not isinstance(shape, str)
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    monkeypatch.setattr(graph_decoder, "PagedKVCache", lambda *_: None)
    monkeypatch.setattr(graph_decoder, "build_step", lambda *_: None)
    policy.is_sharded = is_sharded
    assert GraphDecoder(policy, Engine(), shape).use_cuda_graphs is not is_sharded


@torch.inference_mode()
def test_after_an_oom_in_capture_the_next_call_tries_again(refused: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    decoder = GraphDecoder.build(policy, Engine())
    assert decoder is not None
    decoder.use_cuda_graphs, tries = True, 0

    def capture(launch: LaunchShape, sampling: Sampling) -> SimpleNamespace:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(replay=partial(decoder._step, launch, sampling))

    monkeypatch.setattr(decoder, "_capture", capture)
    found = [bits(list(complete(decoder, requests_for(policy, [prompt_of(3)], SAMPLING), 2)[0])) for _ in range(2)]
    assert tries > 1
    assert decoder.graphs
    assert found[0] == found[1]


OTHER: dict[str, object] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "max_new_tokens": 4, "min_new_tokens": 2, "stop": ("x",),
}  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("name", list(Sampling.model_fields))
def test_every_sampling_setting_has_its_own_graph(name: str, refused: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that was captured for another setting would sample by that one, and nothing would tell."""
    policy = Policy(make_model("qwen3"), tokenizer())
    decoder = GraphDecoder.build(policy, Engine())
    assert decoder is not None
    decoder.use_cuda_graphs = True
    replayed: list[Sampling] = []

    def capture(launch: LaunchShape, sampling: Sampling) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: replayed.append(sampling))

    monkeypatch.setattr(decoder, "_capture", capture)
    monkeypatch.setattr(decoder, "_run_idle", lambda launch, sampling: None)
    decoder.prepare(requests_for(policy, [prompt_of(3)], SAMPLING), 2)
    launch, other = LaunchShape(1, 1, 1), SAMPLING.model_copy(update={name: OTHER[name]})
    for sampling in (SAMPLING, other, SAMPLING, other):
        decoder.decode(launch, sampling, 1)
    assert replayed == [SAMPLING, other, SAMPLING, other]
    assert len(decoder.graphs) == 2


def test_a_completion_ends_once_it_contains_a_stop_string() -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    whole = sample(policy, (10,))[0][0]
    letter = policy.decode(whole.token_ids[2:3])
    first = next(i for i in range(5) if policy.decode(whole.token_ids[i : i + 1]) == letter)
    cut = sample(policy, (10,), SAMPLING.model_copy(update={"stop": (letter,)}))[0][0]
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
