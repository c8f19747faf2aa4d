"""The engine on a real GPU: ten architectures in two precisions, the same bits whatever is queued, full pools, LoRA and MoE."""

from __future__ import annotations

import copy
import logging
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from oncurve.engines.base import SampleKey
from oncurve.engines.cuda.decode_step import build_step
from oncurve.engines.native.engine import NativeEngine
from oncurve.kernels import decode_attention
from oncurve.kernels.decode_matmul import block_for
from oncurve.models import lora
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Completion, Group, Prompt
from tests.engines.native import test_turns as episodes
from tests.engines.native.plain import assert_same_greedy, generate, next_logits, prompt_of
from tests.models.architectures import ARCHITECTURES, adapted, make_model, tokenizer

pytestmark = pytest.mark.gpu

LENGTHS = (1, 3, 64, 65, 300, 530)
"""Around the bucket of 64 and the page of 512."""
BOTH = [torch.float32, torch.bfloat16]


def engine_of(model: PreTrainedModel, dtype: torch.dtype, slots: int = 8) -> NativeEngine:
    return NativeEngine(Policy(copy.deepcopy(model).to("cuda", dtype), tokenizer()), Engine(slots=slots))


@cache
def model_of(name: str) -> PreTrainedModel:
    """A model that reads texts of more than a page. Weights are half as large as those of the CPU's tests: in 16 bits, large
    ones say more about rounding than about the engine."""
    model = make_model(name)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(0.5)
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = 2048
    wide = type(model)(config).eval()
    wide.load_state_dict(model.state_dict())
    wide.set_attn_implementation("eager")
    return wide


@cache
def engine(name: str, dtype: torch.dtype) -> NativeEngine:
    return engine_of(model_of(name), dtype)


def sample(engine: NativeEngine, lengths: tuple[int, ...], group_size: int, sampling: Sampling, step: int = 1) -> list[Group]:
    return engine.sample([long_prompt(n) for n in lengths], group_size, sampling, SampleKey(seed=0, step=step))


def long_prompt(length: int) -> Prompt:
    short = prompt_of(min(length, 400))
    return Prompt(id=f"p/{length}", text=((short.text or "") * 2)[:length])


def errors(engine: NativeEngine, groups: list[Group], temperature: float) -> torch.Tensor:
    """|Δ| of every log-prob against one full forward in float32 with the engine's own weights."""
    plain = copy.deepcopy(engine.policy.model).float().cpu()
    plain.set_attn_implementation("eager")
    found = []
    for group in groups:
        for c in group.completions:
            logp_TV = (next_logits(plain, group.prompt_ids, c.token_ids) / temperature).log_softmax(-1)
            found.append((torch.from_numpy(c.logps) - logp_TV.gather(1, torch.from_numpy(c.token_ids)[:, None])[:, 0]).abs())
    return torch.cat(found)


def assert_near(found: torch.Tensor, dtype: torch.dtype) -> None:
    largest, mean = float(found.max()), float(found.mean())
    assert (largest < 1e-4) if dtype == torch.float32 else (mean < 0.02), (largest, mean)


def bits(completions: tuple[Completion, ...]) -> list[tuple[bytes, ...]]:
    return [(c.token_ids.tobytes(), c.logps.tobytes(), c.raw_logps.tobytes(), c.text.encode()) for c in completions]


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logps_are_those_of_a_full_forward_in_float32(name: str, dtype: torch.dtype) -> None:
    own = engine(name, dtype)
    found = errors(own, sample(own, LENGTHS, 3, Sampling(temperature=0.8, max_new_tokens=70)), 0.8)
    assert own.graph_decoder is not None
    assert own.graph_decoder.use_cuda_graphs
    assert_near(found, dtype)


def headed(head_size: int) -> PreTrainedModel:
    """Two layers whose weights keep the size of what goes through them, so that attention matters."""
    words = tokenizer()
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_size, max_position_embeddings=2048, initializer_range=0.1,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(head_size)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_head_sizes(head_size: int, dtype: torch.dtype) -> None:
    own = engine_of(headed(head_size), dtype)
    found = errors(own, sample(own, LENGTHS, 2, Sampling(temperature=0.8, max_new_tokens=20)), 0.8)
    assert own.policy.fast_backbone is not None
    assert_near(found, dtype)


def test_products_of_our_own() -> None:
    """Widths and slots that fill an H200: log-probs, and the same bits whatever else is queued."""
    words = tokenizer()
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=1024, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=2048, eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    own = engine_of(AutoModelForCausalLM.from_config(config, attn_implementation="eager").float(), torch.bfloat16, slots=256)
    if torch.cuda.get_device_properties(0).multi_processor_count == 132 and torch.cuda.get_device_capability()[0] == 9:
        x = torch.empty(256, 1024, dtype=torch.bfloat16, device="cuda")
        assert block_for(x, 4096) is not None
        assert block_for(x, 3072, gated=True) is not None
    sampling = Sampling(max_new_tokens=30)
    together = sample(own, LENGTHS, 4, sampling)
    assert float(errors(own, together, 1.0).mean()) < 0.02
    for length, group in zip(LENGTHS, together, strict=True):
        assert bits(sample(own, (length,), 4, sampling)[0].completions) == bits(group.completions)
    with torch.no_grad():
        for weight in own.policy.model.parameters():
            weight.mul_(1.1)
    assert float(errors(own, sample(own, (65,), 2, sampling), 1.0).mean()) < 0.02, "weights changed in place are seen"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_text_is_that_of_transformers(name: str) -> None:
    sampling = Sampling(temperature=0.0, max_new_tokens=40)
    for group in sample(engine(name, torch.float32), LENGTHS, 1, sampling):
        theirs = generate(model_of(name), group.prompt_ids, sampling)
        assert_same_greedy(model_of(name), group.prompt_ids, group.completions[0].token_ids, theirs)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "smollm3"])
def test_a_completion_is_the_same_bits_whatever_else_is_queued(name: str, dtype: torch.dtype) -> None:
    sampling = Sampling(max_new_tokens=30)
    together = sample(engine(name, dtype), LENGTHS, 4, sampling)
    for length, group in zip(LENGTHS, together, strict=True):
        assert bits(sample(engine(name, dtype), (length,), 4, sampling)[0].completions) == bits(group.completions)
    backwards = sample(engine(name, dtype), LENGTHS[::-1], 4, sampling)
    assert [bits(g.completions) for g in backwards[::-1]] == [bits(g.completions) for g in together]


@pytest.mark.parametrize("dtype", [*BOTH, torch.float16])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "smollm3"])
def test_an_fp8_cache_moves_log_probs_a_little_and_keeps_every_bit(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else is queued; and the conversion of GPUs without FP8 instructions gives the same bits."""
    policy, settings = Policy(copy.deepcopy(model_of(name)).to("cuda", dtype), tokenizer()), Engine(slots=8, kv_dtype="fp8")
    own, sampling = NativeEngine(policy, settings), Sampling(max_new_tokens=70)
    together = sample(own, LENGTHS, 4, sampling)
    found = errors(own, together, 1.0)
    assert 1e-3 < float(found.mean()) < 0.1
    assert bits(sample(own, LENGTHS[-1:], 4, sampling)[0].completions) == bits(together[-1].completions)
    monkeypatch.setattr(decode_attention, "_converts_fp8", lambda device: False)
    converted = sample(NativeEngine(policy, settings), LENGTHS, 4, sampling)
    assert [bits(g.completions) for g in converted] == [bits(g.completions) for g in together]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.8, top_p=0.9, max_new_tokens=40),
        Sampling(top_k=5, min_p=0.02, max_new_tokens=40, min_new_tokens=8),
        Sampling(temperature=1.3, max_new_tokens=40, min_new_tokens=8),
        Sampling(max_new_tokens=40, stop=("a", "7")),
    ],
)
def test_the_gpu_draws_what_the_cpu_draws(sampling: Sampling) -> None:
    """Same numbers, same distributions: texts diverge only at near ties, which are rare."""
    here = sample(engine("qwen3", torch.float32), LENGTHS, 4, sampling)
    there = NativeEngine(Policy(copy.deepcopy(model_of("qwen3")), tokenizer()), Engine(slots=8))
    same = 0
    for one, two in zip(here, sample(there, LENGTHS, 4, sampling), strict=True):
        for a, b in zip(one.completions, two.completions, strict=True):
            if a.token_ids.tolist() == b.token_ids.tolist():
                same += 1
                assert a.stop == b.stop
                for x, y in ((a.logps, b.logps), (a.sampled_logps, b.sampled_logps), (a.raw_logps, b.raw_logps)):
                    assert float(np.abs(x - y).max()) < 1e-4
    assert same >= len(LENGTHS) * 4 - 1


def test_a_pool_too_small_for_all_makes_completions_wait_and_changes_no_bit() -> None:
    own, sampling = engine_of(model_of("qwen3"), torch.float32), Sampling(max_new_tokens=600)
    free = sample(own, (1, 300), 8, sampling)
    assert own.graph_decoder is not None
    room = own.graph_decoder.cache.open
    own.graph_decoder.cache.open = lambda first, most, share: room(min(first, 5), min(most, 5), share)  # type: ignore[method-assign]
    assert [bits(g.completions) for g in sample(own, (1, 300), 8, sampling)] == [bits(g.completions) for g in free]


def test_after_sampling_the_memory_of_the_pool_is_free_and_graphs_are_kept() -> None:
    own, sampling = engine_of(model_of("llama"), torch.bfloat16, 64), Sampling(max_new_tokens=1024, min_new_tokens=1000)
    sample(own, (300,), 64, sampling)
    assert own.graph_decoder is not None
    graphs = dict(own.graph_decoder.graphs)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    sample(own, (300,), 64, sampling, step=2)
    torch.cuda.synchronize()
    assert abs(torch.cuda.mem_get_info()[0] - before) < 64 << 20
    assert own.graph_decoder.graphs == graphs
    assert own.graph_decoder.cache.range is not None
    assert own.graph_decoder.cache.range.mapped == 0


@pytest.mark.parametrize("dtype", BOTH)
def test_weights_that_an_optimiser_changes_are_seen_with_no_call(dtype: torch.dtype) -> None:
    own, sampling = engine_of(model_of("qwen3"), dtype), Sampling(temperature=0.8, max_new_tokens=20)
    before = sample(own, LENGTHS, 2, sampling)
    assert own.graph_decoder is not None
    graphs = dict(own.graph_decoder.graphs)
    optimiser = torch.optim.SGD(own.policy.model.parameters(), lr=0.05)
    for parameter in own.policy.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimiser.step()
    after = sample(own, LENGTHS, 2, sampling)
    assert graphs.items() <= own.graph_decoder.graphs.items(), "what was captured before the update is used after it"
    assert [bits(g.completions) for g in before] != [bits(g.completions) for g in after]
    found = errors(own, after, 0.8)
    assert_near(found, dtype)


@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=100), Sampling(max_new_tokens=100, top_k=5)])
def test_environments_answer_as_on_a_cpu(sampling: Sampling) -> None:
    """The same turns, tokens and masks, but for near ties, which are rare."""
    plain = episodes.policy()
    there = NativeEngine(plain, Engine(slots=8))
    here = NativeEngine(Policy(copy.deepcopy(plain.model).to("cuda"), plain.tokenizer), Engine(slots=8))
    assert here.graph_decoder is not None
    found = []
    for own in (here, there):
        prompts = [episodes.prompt_with("one", episodes.Echo()), episodes.prompt_with("two", episodes.Echo(calls=()))]
        found.append(episodes.completions(own.sample(prompts, 8, sampling, SampleKey(seed=0, step=1))))
    same = [(a, b) for a, b in zip(*found, strict=True) if a.token_ids.tolist() == b.token_ids.tolist()]
    assert len(same) >= len(found[0]) - 1
    for a, b in same:
        assert (a.stop, a.text, a.loss_mask.tolist()) == (b.stop, b.text, b.loss_mask.tolist())
        assert float(np.abs(a.logps - b.logps).max()) < 1e-4
    assert any(not a.loss_mask.all() for a, _ in same), "an environment has answered"


def adapted_engine(dtype: torch.dtype, **options: object) -> NativeEngine:
    return engine_of(adapted(copy.deepcopy(model_of("qwen3")), **options), dtype)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    "options", [{}, {"rslora": True, "rank": 16, "targets": ("q_proj", "v_proj", "down_proj")}, {"dora": True}]
)
def test_lora_layers_are_active(options: dict[str, object], dtype: torch.dtype) -> None:
    """Plain adapters by the fast path, DoRA through the modules: log-probs of a full forward through peft's layers."""
    own = adapted_engine(dtype, **options)
    assert (own.policy.fast_backbone is None) == ("dora" in options)
    groups = sample(own, LENGTHS, 3, Sampling(max_new_tokens=30))
    found = errors(own, groups, 1.0)
    assert_near(found, dtype)
    assert own.graph_decoder is not None
    assert own.graph_decoder.use_cuda_graphs
    base = sample(engine("qwen3", dtype), LENGTHS, 3, Sampling(max_new_tokens=30))
    assert [bits(g.completions) for g in groups] != [bits(g.completions) for g in base]


def test_lora_by_the_fast_path_draws_what_the_modules_draw() -> None:
    """Texts diverge only at near ties, which are rare."""
    fast, slow = adapted_engine(torch.float32), adapted_engine(torch.float32)
    slow.policy.fast_backbone = None
    assert slow.graph_decoder is not None
    slow.graph_decoder.step = build_step(slow.policy)
    found = [[c for g in sample(own, LENGTHS, 4, Sampling(max_new_tokens=30)) for c in g.completions] for own in (fast, slow)]
    same = [(a, b) for a, b in zip(*found, strict=True) if a.token_ids.tolist() == b.token_ids.tolist()]
    assert len(same) >= len(found[0]) - 1
    assert max(float(np.abs(a.logps - b.logps).max()) for a, b in same) < 1e-4


@pytest.mark.parametrize("dtype", BOTH)
def test_lora_weights_that_an_optimiser_changes_are_seen_with_no_call(dtype: torch.dtype) -> None:
    own, sampling = adapted_engine(dtype), Sampling(temperature=0.8, max_new_tokens=20)
    before = sample(own, LENGTHS, 2, sampling)
    assert own.graph_decoder is not None
    graphs = dict(own.graph_decoder.graphs)
    trained = list(lora.adapter_parameters(own.policy.model).values())
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter)
    torch.optim.SGD(trained, lr=0.1).step()
    after = sample(own, LENGTHS, 2, sampling)
    assert graphs.items() <= own.graph_decoder.graphs.items(), "what was captured before the update is used after it"
    assert [bits(g.completions) for g in before] != [bits(g.completions) for g in after]
    found = errors(own, after, 0.8)
    assert_near(found, dtype)


def test_a_mixture_of_experts_is_sampled_faithfully(caplog: pytest.LogCaptureFixture) -> None:
    """By graphs where its experts allow that, else without, and then the log says so."""
    words = tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_experts=6,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    own = engine_of(model, torch.float32)
    with caplog.at_level(logging.WARNING, "oncurve.engine"):
        groups = sample(own, LENGTHS, 3, Sampling(max_new_tokens=20))
    assert float(errors(own, groups, 1.0).max()) < 1e-4
    assert own.graph_decoder is not None
    assert own.graph_decoder.use_cuda_graphs or "without CUDA graphs" in caplog.text


def test_a_step_that_cannot_be_captured_runs_without_graphs_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    own, slow = (engine_of(model_of("olmo2"), torch.float32) for _ in range(2))
    own.policy.fused_weights = slow.policy.fused_weights = None  # the model's own modules decode
    sampling = Sampling(max_new_tokens=20)
    expected = sample(own, LENGTHS, 2, sampling)
    norm = slow.policy.backbone.norm
    assert isinstance(norm, nn.Module)
    norm.register_forward_hook(lambda module, inputs, output: output if float(output.sum()) < 1e30 else None)
    with caplog.at_level(logging.WARNING, "oncurve.engine"):
        found = sample(slow, LENGTHS, 2, sampling)
    assert "without CUDA graphs" in caplog.text
    assert [bits(g.completions) for g in found] == [bits(g.completions) for g in expected]
    torch.cuda.empty_cache()
    unused = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del unused
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - (1 << 28), "torch can still release its memory"
