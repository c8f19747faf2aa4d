"""QLoRA: a frozen base in 4 or 8 bits, and an adapter with the exact gradient."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import ModelError, RecipeError
from oncurve.models import lora
from oncurve.models.loading.load import ModelSummary, check_quantised, load_policy
from oncurve.models.packing import Pack, PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.models.reference import Reference
from oncurve.recipe.schema.model import Lora, Model, TinyModel
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Prompt
from tests.models.test_lora import with_noise

WIDE = TinyModel(layers=2, width=64, heads=2, kv_heads=1, head_size=32, mlp_width=128, context=64)
KINDS = ["nf4", "int8"]
NEAR = {"nf4": 1e-4, "int8": 0.02}
"""4-bit products are computed in the model's precision; 8-bit ones also round their inputs to 8 bits."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qlora") / "base"
    load_policy(Model(tiny=WIDE), alphabet="0123456789+=", seed=0).save(folder)
    return folder


def quantised(base: Path, kind: str) -> Policy:
    config = {"source": str(base), "lora": {"rank": 4}, "quantise": kind, "device": "cpu"}
    return with_noise(load_policy(Model.model_validate(config), alphabet=None, seed=0))


def pack() -> Pack:
    ids = np.arange(2, 14)
    return build_pack([PrefixGroup(ids[:5], (ids[5:], ids[7:]), (0, 1))], torch.device("cpu"))


def gradients(policy: Policy) -> tuple[Tensor, dict[str, Tensor]]:
    policy.model.zero_grad()
    logps = policy.pack_logps(pack())[0]
    logps.sum().backward()  # type: ignore[no-untyped-call]
    return logps.detach(), {
        name: p.grad.clone() for name, p in lora.adapter_parameters(policy.model).items() if p.grad is not None
    }


def dequantised(policy: Policy, folder: Path) -> Policy:
    """The same model in float32: the dequantised base with the same adapter."""
    adapter = {name: p.detach().clone() for name, p in lora.adapter_parameters(policy.model).items()}
    with torch.no_grad():
        for p in lora.adapter_parameters(policy.model).values():
            p.zero_()
    policy.save(folder)
    plain = load_policy(Model(source=str(folder), lora=Lora(rank=4)), alphabet=None, seed=0)
    with torch.no_grad():
        for model in (policy, plain):
            for name, p in lora.adapter_parameters(model.model).items():
                p.copy_(adapter[name])
    return plain


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_dequantised_model(kind: str, base: Path, tmp_path: Path) -> None:
    policy = quantised(base, kind)
    plain = dequantised(policy, tmp_path / "plain")
    for when in ("fresh", "after it has sampled"):
        logps, grads = gradients(policy)
        expected_logps, expected = gradients(plain)
        assert torch.allclose(logps, expected_logps, atol=NEAR[kind]), when
        assert grads.keys() == expected.keys() == lora.adapter_parameters(policy.model).keys()
        for name, grad in grads.items():
            assert float((grad - expected[name]).norm() / expected[name].norm()) < 10 * NEAR[kind], (when, name)
        sample(policy)


def sample(policy: Policy) -> Tensor:
    engine = NativeEngine(policy, Engine(slots=4))
    (group,) = engine.sample([Prompt(id="p", text="1+2=")], 4, Sampling(max_new_tokens=6), SampleKey(0, 1))
    rows = tuple(c.token_ids for c in group.completions)
    packed = build_pack([PrefixGroup(group.prompt_ids, rows, tuple(range(4)))], torch.device("cpu"))
    with torch.no_grad():
        learner = policy.pack_logps(packed)[0]
    sampler = torch.from_numpy(np.concatenate([c.logps for c in group.completions]))
    return (learner - sampler).abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_takes_fewer_bits_and_does_not_change(kind: str, base: Path) -> None:
    policy = quantised(base, kind)
    layer = policy.model.get_submodule("model.layers.0.mlp.up_proj").base_layer
    assert type(layer).__name__ == {"nf4": "Linear4bit", "int8": "Linear8bitLt"}[kind]
    assert layer.weight.element_size() * layer.weight.numel() == 64 * 128 // {"nf4": 2, "int8": 1}[kind]
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters() if "lora_" not in name}
    optimiser = torch.optim.AdamW(lora.adapter_parameters(policy.model).values(), lr=1e-2)
    gradients(policy)
    optimiser.step()
    sample(policy)
    after = dict(policy.model.named_parameters())
    assert all(torch.equal(after[name], p) for name, p in before.items())
    assert ModelSummary.of(policy).trained == sum(p.numel() for p in lora.adapter_parameters(policy.model).values())


@pytest.mark.parametrize("kind", KINDS)
def test_sampler_and_learner_agree_and_the_reference_is_the_base(kind: str, base: Path) -> None:
    policy = quantised(base, kind)
    assert float(sample(policy)) < NEAR[kind]
    reference = Reference(policy)
    with torch.no_grad():
        first = policy.pack_logps(pack())[0]
    with_noise(policy, seed=2)
    assert torch.allclose(reference.logps(pack(), 1.0), first, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_a_plain_model_with_the_adapter_merged(kind: str, base: Path, tmp_path: Path) -> None:
    policy = quantised(base, kind)
    policy.save(tmp_path / "model")
    again = load_policy(Model(source=str(tmp_path / "model")), alphabet=None, seed=0)
    with torch.no_grad():
        assert torch.allclose(again.pack_logps(pack())[0], policy.pack_logps(pack())[0], atol=5 * NEAR[kind])
    assert not lora.is_attached(again.model)


def save_family(family: str, base: Path, folder: Path, **options: object) -> Path:
    """A model of a family with random weights, and the tokenizer of ``base``."""
    settings = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, **options,
    )  # fmt: skip
    shutil.copytree(base, folder)
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_of_experts_is_refused(kind: str, base: Path, tmp_path: Path) -> None:
    """Its experts would stay in 16 bits: bitsandbytes quantises linear modules only."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    source = save_family("qwen3_moe", base, tmp_path / "mixture", **sizes)
    config = Model.model_validate({"source": str(source), "lora": {"rank": 4}, "quantise": kind, "device": "cpu"})
    with pytest.raises(RecipeError, match=r"8\d % .* not in linear modules.*layers\.0\.mlp\.experts\.gate_up_proj"):
        check_quantised(config, load_policy(config, alphabet=None, seed=0))


def test_embeddings_of_layers_do_not_keep_a_model_from_being_quantised(base: Path, tmp_path: Path) -> None:
    """More than half of the weights of Gemma 3n's layers are in an embedding, which is looked up."""
    sizes = {"vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 64, "laurel_rank": 4, "altup_num_inputs": 2}
    layers = ["sliding_attention", "full_attention"]
    source = save_family("gemma3n_text", base, tmp_path / "e2b", num_kv_shared_layers=0, layer_types=layers, **sizes)
    config = Model.model_validate({"source": str(source), "lora": {"rank": 4}, "quantise": "nf4", "device": "cpu"})
    policy = load_policy(config, alphabet=None, seed=0)
    linear = sum(module.in_features * module.out_features for module in lora.quantised_modules(policy.model))
    assert linear < 512 * 2 * 64
    check_quantised(config, policy)


def test_a_saved_dora_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    """Merging into 4 bits adds B·A alone, so an export would lack DoRA's magnitudes."""
    dora = load_policy(Model(source=str(base), lora=Lora(rank=2, dora=True), device="cpu"), alphabet=None, seed=0)
    lora.save(dora.model, tmp_path)
    (tmp_path / lora.BASE).unlink()  # as in adapters written by peft itself
    config = {"source": str(base), "adapter": str(tmp_path), "lora": {}, "quantise": "nf4", "device": "cpu"}
    with pytest.raises(ModelError, match="an adapter with use_dora"):
        load_policy(Model.model_validate(config), alphabet=None, seed=0)
