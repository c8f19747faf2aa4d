"""LoRA in the GPU fast path against peft's modules: values, the gradient of every A and B, and what the path supports.

Without a GPU the kernels run in Triton's interpreter: float32 here, bfloat16 in tests/gpu.
"""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from oncurve.engines.base import SampleKey, SampleRequest
from oncurve.engines.cuda.graph_decoder import GraphDecoder
from oncurve.engines.cuda.paged_kv_cache import PAGE, PagedPrefill
from oncurve.kernels.learner_layers import LoraTiles, expand
from oncurve.models import lora
from oncurve.models.gradient_buffers import GradAccumulator
from oncurve.models.llama.block_description import DecoderDescription, describe
from oncurve.models.llama.cuda_backbone import CudaBackbone
from oncurve.models.packing import build_pack
from oncurve.models.policy import Policy
from oncurve.models.reference import Reference
from oncurve.recipe.schema.model import Lora
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Completion
from tests.engines.cuda.test_graph_decoder import bits, complete, sample, small_pages  # noqa: F401 (a fixture that goes with ``sample``)
from tests.engines.native.plain import assert_logps, prompt_of
from tests.kernels.test_learner_kernels import on_gpu, pack_of
from tests.models.architectures import adapted, make_model, shake, tokenizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = [(5, [4, 1]), (3, [3])]
SAMPLING = Sampling(temperature=0.8, max_new_tokens=3)
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen2", {"rank": 20, "rslora": True}),
    ("llama", {"targets": ("q_proj", "v_proj", "down_proj")}),
    ("mistral", {"targets": ("k_proj", "o_proj", "up_proj")}),
]


def described(model: PreTrainedModel) -> DecoderDescription:
    description = describe(model)
    assert isinstance(description, DecoderDescription), description
    return description


def fast(model: PreTrainedModel) -> Policy:
    """The policy with the GPU fast path, on any device."""
    policy = Policy(model.to(DEVICE), tokenizer())
    policy.fast_backbone = CudaBackbone(policy.model, described(policy.model))
    return policy


def modules(model: PreTrainedModel, device: torch.device = DEVICE) -> Policy:
    policy = Policy(model.to(device), tokenizer())
    policy.fast_backbone = None
    return policy


def gradients(policy: Policy, accumulator: GradAccumulator | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The last hidden states of a pack, and each trained parameter's gradient of a sum of them."""
    plain = policy.fast_backbone is None
    pack = build_pack(pack_of(SHAPE), policy.device)
    attention = pack.attention if plain else on_gpu(pack_of(SHAPE))
    with policy.accumulate_into(accumulator):
        hidden = policy.hidden(pack.input_ids, pack.position_ids, attention)
        weigh = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)).to(hidden)
        (hidden * weigh).sum().backward()  # type: ignore[no-untyped-call]
    named = dict(policy.model.named_parameters())
    grads = {n: (p.grad if accumulator is None else accumulator.buffer_for(p)) for n, p in named.items() if p.requires_grad}
    assert all(p.grad is None for p in named.values() if not p.requires_grad or accumulator is not None)
    return hidden.detach(), {name: grad for name, grad in grads.items() if grad is not None}


def apart(ours: Tensor, exact: Tensor) -> float:
    exact = exact.double().cpu()
    return float((ours.double().cpu() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("name", "kind", "accumulated"),
    [
        (*KINDS[0], False),
        pytest.param(*KINDS[0], True, marks=pytest.mark.slow),
        (*KINDS[1], True),
        (*KINDS[2], True),
        pytest.param(*KINDS[3], True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_the_modules(name: str, kind: dict[str, Any], accumulated: bool) -> None:
    """Against peft's layers in float64; our gradients go to autograd, or to float32 buffers of the trained size."""
    exact = modules(adapted(make_model(name), **kind), torch.device("cpu"))
    exact.model.double()
    hidden, expected = gradients(exact)
    ours = fast(adapted(make_model(name), **kind))
    trained = lora.adapter_parameters(ours.model)
    accumulator = GradAccumulator([p for p in ours.model.parameters() if p.requires_grad]) if accumulated else None
    ours_hidden, grads = gradients(ours, accumulator)
    assert apart(ours_hidden, hidden) < 1e-5
    assert grads.keys() == expected.keys() == trained.keys()
    for parameter, grad in grads.items():
        assert apart(grad, expected[parameter]) < 1e-5, parameter
    if accumulator is not None:
        assert sum(len(b) for b in accumulator._buffers.values()) == sum(p.numel() for p in trained.values())


def test_checkpointed_layers_have_the_same_gradient() -> None:
    plain, checkpointed = fast(adapted(make_model("qwen3"))), fast(adapted(make_model("qwen3")))
    assert checkpointed.fast_backbone is not None
    checkpointed.fast_backbone.checkpointed = 2
    for one, other in zip(gradients(plain)[1].values(), gradients(checkpointed)[1].values(), strict=True):
        assert torch.equal(one, other)


def test_some_weights_trained_and_some_not() -> None:
    """Also within fused layers: each trained weight gets a gradient, the others none."""
    grads = []
    for policy in (modules(make_model("qwen2")), fast(make_model("qwen2"))):
        for name, p in policy.model.named_parameters():
            p.requires_grad_("k_proj" in name or "up_proj" in name or name.endswith("0.input_layernorm.weight"))
        grads.append(gradients(policy)[1])
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[1].items():
        assert apart(grad, grads[0][name]) < 1e-5, name


def test_with_the_adapter_disabled_it_is_the_base_and_the_reference() -> None:
    policy, base = fast(adapted(make_model("qwen3"))), fast(make_model("qwen3"))
    pack = build_pack(pack_of(SHAPE), DEVICE)
    with torch.no_grad():
        on = policy.pack_logps(pack)[0]
        with lora.adapter_disabled(policy.model):
            off = policy.pack_logps(pack)[0]
        assert torch.equal(off, base.pack_logps(pack)[0])
        assert torch.equal(policy.pack_logps(pack)[0], on)
    assert not torch.allclose(on, off, atol=1e-2)
    fresh = make_model("qwen3")
    lora.attach(fresh, Lora(rank=4), 0, "base")
    policy = fast(fresh)
    reference = Reference(policy)
    shake(policy.model)
    assert torch.equal(reference.logps(pack, 1.0), off)


@pytest.mark.parametrize(
    ("name", "kind"), [KINDS[1], *(pytest.param(*kind, marks=pytest.mark.slow) for kind in (KINDS[0], KINDS[2]))], ids=str
)
def test_sampled_tokens_are_those_of_the_modules(name: str, kind: dict[str, Any]) -> None:
    """The same tokens, with the log-probs of a full forward of the merged model by plain transformers."""
    model = adapted(make_model(name), **kind)
    merged = lora.merge_copy(model)
    policy = fast(copy.deepcopy(model))
    (ours,), (theirs,) = sample(policy, (6,), SAMPLING), sample(modules(model), (6,), SAMPLING)
    assert [c.token_ids.tolist() for c in ours] == [c.token_ids.tolist() for c in theirs]
    for completion in ours:
        assert_logps(merged, policy.encode(prompt_of(6)), completion, temperature=SAMPLING.temperature)


@torch.inference_mode()
def sample_once(decoder: GraphDecoder) -> list[Completion]:
    prompt = prompt_of(3)
    request = SampleRequest(prompt, decoder.policy.encode(prompt), 1, SAMPLING, SampleKey(0, 1))
    return list(complete(decoder, [request], 1)[0])


def test_the_sampler_reads_an_updated_adapter_in_place() -> None:
    """An optimiser step changes the samples, and the sampler's addresses stay the same."""
    policy = fast(adapted(make_model("qwen3")))
    decoder = GraphDecoder.build(policy, Engine(check_every=2))
    assert decoder is not None
    before, addresses = sample_once(decoder), decoder.addresses
    trained = list(lora.adapter_parameters(policy.model).values())
    for p in trained:
        p.grad = torch.ones_like(p)
    torch.optim.SGD(trained, lr=0.1).step()
    after = sample_once(decoder)
    assert decoder.addresses == addresses
    assert bits(after) != bits(before)
    merged = lora.merge_copy(policy.model)
    merged.set_attn_implementation("eager")
    for completion in after:
        assert_logps(merged, policy.encode(prompt_of(3)), completion, temperature=SAMPLING.temperature)


def with_config(**options: Any) -> PreTrainedModel:
    model = make_model("llama")
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], **options), model)
    return model


@pytest.mark.parametrize(
    ("options", "supported"),
    [
        ({}, True),
        ({"use_rslora": True}, True),
        ({"layers_to_transform": [1]}, True),
        ({"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"up_proj": 5}}, True),
        ({"rank_pattern": {"q_proj": 2}}, False),
        ({"use_dora": True}, False),
        ({"lora_dropout": 0.1}, False),
        ({"lora_bias": True}, False),
    ],
    ids=str,
)
def test_what_takes_the_fast_path(options: dict[str, Any], supported: bool) -> None:
    """On a GPU plain adapters, if fused layers have one rank; on a CPU plain adapters of any rank, in float32."""
    model = with_config(**options)
    is_plain = supported or "rank_pattern" in options
    assert (Policy(copy.deepcopy(model), tokenizer()).fast_backbone is not None) == is_plain
    assert Policy(copy.deepcopy(model).to(torch.bfloat16), tokenizer()).fast_backbone is None
    description = describe(model)
    is_supported = isinstance(description, DecoderDescription) and CudaBackbone.supports(model, description)
    assert is_supported == supported


@pytest.mark.parametrize(("sizes", "rank"), [([100, 30, 65], 1), ([128, 32, 80], 16), ([96, 48, 64], 70)])
def test_the_kernel(sizes: list[int], rank: int) -> None:
    """Rows with a stride, columns that do not fill a tile, a layer without an adapter in the middle."""
    adapters, generator, O = [True, False, True], torch.Generator().manual_seed(0), sum(sizes)  # noqa: E741
    shapes = ((40, O + 2 * rank), (sizes[0] + sizes[2], rank), (O,))
    both, b, bias = (torch.randn(*shape, generator=generator) for shape in shapes)
    expected = (both[:, :O] + bias).double()
    expected[:, : sizes[0]] += 0.3 * both[:, O : O + rank].double() @ b[: sizes[0]].double().T
    expected[:, -sizes[2] :] += 0.3 * both[:, O + rank :].double() @ b[sizes[0] :].double().T
    both, b, bias = both.to(DEVICE), b.to(DEVICE), bias.to(DEVICE)
    out = torch.full((40, O), torch.nan, device=DEVICE)
    expand(both, both[:, O:], b, 0.3, LoraTiles.of(sizes, adapters, rank, DEVICE, every=True), bias, out)
    assert apart(out, expected) < 1e-6
    low = both[:, O:].clone()
    expand(both, low, b, 0.3, LoraTiles.of(sizes, adapters, rank, DEVICE, every=False), None, both)
    assert apart(both[:, :O] + bias, expected) < 1e-6
    assert torch.equal(both[:, O:], low)


def test_prompts_reach_torchs_attention_in_aligned_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three adapters of rank 4 add 24 bytes to each row of v; torch's attention kernels may load 16 bytes at once."""
    policy = fast(adapted(make_model("qwen3")).to(torch.bfloat16))
    plain, inputs = functional.scaled_dot_product_attention, list[Tensor]()

    def record(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        inputs.extend((q, k, v))
        return plain(q, k, v, **more)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", record)
    pool, lengths = torch.zeros(2, 2, 2, 2, PAGE, 16, dtype=torch.bfloat16, device=DEVICE), torch.full((2,), 5, device=DEVICE)
    prefill = PagedPrefill(pool, torch.arange(2, device=DEVICE)[:, None].int(), 0, 5, lengths.int(), {0: 0, 1: 1})
    with torch.no_grad():
        policy.hidden(torch.arange(2, 12, device=DEVICE).view(2, 5), prefill.positions.expand(2, -1), prefill)
    assert len(inputs) == 6
    assert all(step * x.itemsize % 16 == 0 for x in inputs for step in x.stride()[:-1])
