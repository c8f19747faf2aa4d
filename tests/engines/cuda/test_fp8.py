"""The KV cache in FP8: the GPU engine in Triton's interpreter, and torch on a CPU, which rounds in the same way."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch

from oncurve.engines.base import SampleKey, SampleRequest
from oncurve.engines.cuda import decode_step, paged_kv_cache, runner
from oncurve.engines.cuda.graph_decoder import GraphDecoder
from oncurve.engines.cuda.runner import CudaRunner
from oncurve.engines.native import kv_cache
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.native.scheduler import Scheduler
from oncurve.engines.native.turns import build_requests
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Draft, Engine, Sampling
from oncurve.records import Completion, Prompt
from tests.engines.cuda.test_drafts import _drafting, count_preemptions
from tests.engines.cuda.test_drafts import make_model as repetitive_model
from tests.engines.cuda.test_graph_decoder import small_pages  # noqa: F401 (a fixture of every test)
from tests.engines.native.plain import next_logits, prompt_of
from tests.engines.native.test_turns import LongEcho, prompt_with
from tests.engines.native.test_turns import policy as talking_policy
from tests.models.architectures import make_model, tokenizer

SAMPLING = Sampling(temperature=0.8, max_new_tokens=5)
FP8 = Engine(check_every=2, kv_dtype="fp8")
Bits = list[tuple[bytes, ...]]


@torch.inference_mode()
def sample(
    policy: Policy,
    prompts: list[Prompt],
    sampling: Sampling = SAMPLING,
    *,
    slots: int = 3,
    pages: int = 99,
    width: int = 1,
    draft: Draft = "group",
    samples: int = 2,
) -> list[list[Completion]]:
    decoder = GraphDecoder.build(policy, FP8.model_copy(update={"draft": draft}))
    assert decoder is not None
    open_cache = decoder.cache.open
    decoder.cache.open = lambda first, most, share: open_cache(first, min(most, pages), share)  # type: ignore[method-assign]
    requests: list[SampleRequest] = build_requests(policy, prompts, samples, sampling, SampleKey(0, 1))
    scheduler = Scheduler(policy, CudaRunner.build(decoder, requests, slots, width), requests)
    groups = dict(scheduler.completions())
    assert decoder.cache.data.dtype == torch.uint8
    return [list(groups[number]) for number in sorted(groups)]


def in_torch(
    policy: Policy, prompts: list[Prompt], sampling: Sampling = SAMPLING, settings: Engine = FP8
) -> list[list[Completion]]:
    engine = NativeEngine(policy, settings.model_copy(update={"slots": 8}))
    return [list(group.completions) for group in engine.sample(prompts, 2, sampling, SampleKey(0, 1))]


def bits(groups: list[list[Completion]]) -> Bits:
    return [(c.token_ids.tobytes(), c.logps.tobytes(), c.loss_mask.tobytes(), c.text.encode()) for g in groups for c in g]


def off_by(policy: Policy, prompts: list[Prompt], groups: list[list[Completion]]) -> list[float]:
    """How far each sampled log-prob is from a plain forward's."""
    model = copy.deepcopy(policy.model)
    model.set_attn_implementation("eager")
    off: list[float] = []
    for prompt, group in zip(prompts, groups, strict=True):
        for c in group:
            logps_TV = (next_logits(model, policy.encode(prompt), c.token_ids) / SAMPLING.temperature).log_softmax(-1)
            plain_T = logps_TV.gather(1, torch.from_numpy(c.token_ids)[:, None])[:, 0]
            off += (torch.from_numpy(c.logps) - plain_T).abs().tolist()
    return off


def rounds_to(policy: Policy, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> float:
    """How far log-probs are off on average if keys and values are rounded to this dtype."""
    monkeypatch.setattr(kv_cache, "rounded_to_fp8", lambda x: x.to(dtype).to(x.dtype))
    return float(np.mean(off_by(policy, PROMPTS, in_torch(policy, PROMPTS, LONG))))


PROMPTS, LONG = [prompt_of(3), prompt_of(10)], Sampling(temperature=0.8, max_new_tokens=40)


@pytest.fixture(scope="module")
def qwen3() -> Policy:
    return Policy(make_model("qwen3"), tokenizer())


def with_large_keys() -> Policy:
    """As in Qwen 2.5: the bias of keys is 600 in a channel of the lowest frequency."""
    model = make_model("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias
            bias.view(-1, layer.self_attn.head_dim)[:, -1] = 600.0
    return Policy(model, tokenizer())


def test_torch_rounds_as_the_kernels_do(qwen3: Policy) -> None:
    """Prompts that fit a chunk and that don't, in pages of FP8 numbers and in a cache of the model's dtype."""
    for ours, theirs in zip(sample(qwen3, PROMPTS), in_torch(qwen3, PROMPTS), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert float(np.abs(a.logps - b.logps).max()) < 1e-4


def test_log_probs_are_off_as_far_as_the_format_explains(qwen3: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """e4m3 has 3 bits after the point and bfloat16 7, so its rounding is 16 times as large, and small errors of log-probs are
    proportional to it. The largest numbers, which e4m3 keeps, and the tenth that is not proportional allow 6 to 24 times."""
    found = float(np.mean(off_by(qwen3, PROMPTS, in_torch(qwen3, PROMPTS, LONG))))
    rounding = rounds_to(qwen3, monkeypatch, torch.bfloat16)
    assert 6 * rounding < found < 24 * rounding
    assert found < 0.1


def test_large_keys_neither_saturate_nor_lose_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest key of a position is exact, and it hardly depends on the position. With bfloat16, whose step is 4 there, it
    does; and with e4m3 without a scale nothing is left."""
    policy = with_large_keys()
    assert max(off_by(policy, PROMPTS, sample(policy, PROMPTS))) < 0.3
    found = float(np.mean(off_by(policy, PROMPTS, in_torch(policy, PROMPTS, LONG))))
    assert found < 0.2 < rounds_to(policy, monkeypatch, torch.bfloat16)
    monkeypatch.setattr(kv_cache, "rounded_to_fp8", lambda x: x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype))
    assert float(np.mean(off_by(policy, PROMPTS, in_torch(policy, PROMPTS, LONG)))) > 0.5


def test_a_page_has_half_the_bytes(qwen3: Policy) -> None:
    plain, fp8 = (GraphDecoder.build(qwen3, Engine(kv_dtype=kind)) for kind in ("auto", "fp8"))
    assert plain is not None
    assert fp8 is not None
    assert plain.cache.shape.page_bytes == 2 * 2 * 2 * 4 * 16 * 4, "layers, K and V, heads, positions, numbers of 4 bytes"
    assert fp8.cache.shape.page_bytes == 2 * 2 * 2 * 4 * (16 + 4), "numbers of a byte, and a scale"


def test_bits_depend_neither_on_what_is_queued_nor_on_preemption(qwen3: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted = count_preemptions(monkeypatch)
    alone = bits(sample(qwen3, PROMPTS[1:]))
    assert not preempted
    assert bits(sample(qwen3, PROMPTS, pages=6)[1:]) == alone
    assert preempted


def always(tokens: list[int], text: int, position: int) -> list[int]:
    return tokens


def test_drafts_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources, wrong tokens, none, and pages that run out. Rejected rows leave codes and scales behind, which are
    overwritten. A single completion of each prompt: in numpy, a row's place in an attention tile may change its rounding."""
    policy, sampling = Policy(repetitive_model(), tokenizer()), Sampling(temperature=0.2, max_new_tokens=8)
    drafted = partial(sample, policy, [prompt_of(3), prompt_of(6)], sampling, slots=2, width=4, samples=1)
    preempted = count_preemptions(monkeypatch)
    expected = bits(drafted())
    assert bits(drafted(draft="own")) == expected
    assert not preempted
    assert bits(drafted(pages=5)) == expected
    assert preempted
    for tokens in ([], [3, 4]):
        monkeypatch.setattr(decode_step, "accept_and_draft", _drafting(partial(always, tokens)))
        assert bits(drafted()) == expected


@pytest.mark.slow
def test_long_replies_attend_to_rounded_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are prefilled into the pages of a suffix, behind a prompt that fills more than a page; as in torch."""
    for module in (runner, paged_kv_cache):
        monkeypatch.setattr(module, "PAGE", 8)
    prompts, sampling = [prompt_with("ab" * 5, LongEcho())], Sampling(max_new_tokens=56)
    here, there = sample(talking_policy(), prompts, sampling), in_torch(talking_policy(), prompts, sampling)
    assert any(not c.loss_mask.all() for group in here for c in group)
    for a, b in zip(here[0], there[0], strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert float(np.abs(a.logps - b.logps).max()) < 1e-3


@pytest.mark.parametrize("draft", ["own", "group"])
def test_torch_gives_the_same_bits_whatever_is_queued_and_drafted(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, sampling = Policy(repetitive_model(), tokenizer()), Sampling(temperature=0.2, max_new_tokens=20)
    settings = FP8.model_copy(update={"draft": "group"})
    expected = in_torch(policy, PROMPTS, sampling, settings)
    assert bits(in_torch(policy, PROMPTS[1:], sampling, settings)) == bits(expected[1:])
    assert bits(in_torch(policy, PROMPTS, sampling, settings.model_copy(update={"draft": draft}))) == bits(expected)
    assert max(off_by(policy, PROMPTS, expected)) > 1e-3
