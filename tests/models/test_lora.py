"""LoRA: what is trained, what the reference is, and that saving, loading, merging and resuming are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import ModelError, RecipeError
from oncurve.models import lora
from oncurve.models.loading.load import ModelSummary, load_policy
from oncurve.models.packing import Pack, PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.models.reference import Reference
from oncurve.recipe.schema.model import Lora, Model, TinyModel
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Prompt
from tests.models.architectures import shake
from tests.models.tiny_families import tiny_model

SMALL = TinyModel(layers=2, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=48, context=128)
KINDS = [{}, {"rslora": True}, {"dora": True}, {"targets": ("q_proj", "v_proj"), "rank": 2}]


def policy(seed: int = 0, dtype: str = "float32", **options: Any) -> Policy:
    settings = Lora.model_validate({"rank": 4, **options})
    return load_policy(Model(tiny=SMALL, lora=settings, dtype=dtype), alphabet="0123456789+=", seed=seed)  # type: ignore[arg-type]


def plain(seed: int = 0) -> Policy:
    return load_policy(Model(tiny=SMALL), alphabet="0123456789+=", seed=seed)


def pack() -> Pack:
    ids = np.arange(9, dtype=np.int64)
    return build_pack([PrefixGroup(ids[:4], (ids[3:], ids[5:]), (0, 1))], torch.device("cpu"))


def with_noise(changed: Policy, seed: int = 1) -> Policy:
    shake(changed.model, seed)
    return changed


@torch.no_grad()
def logps(policy: Policy) -> Tensor:
    return policy.pack_logps(pack())[0]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_only_the_adapter_has_a_gradient_and_a_new_one_changes_nothing(kind: dict[str, Any]) -> None:
    adapted = policy(**kind)
    assert torch.allclose(logps(adapted), logps(plain()), atol=1e-6)
    adapted.pack_logps(pack())[0].sum().backward()  # type: ignore[no-untyped-call]
    moved = {name for name, p in adapted.model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved
    assert all("lora_" in name for name in moved)
    assert {n for n, p in adapted.model.named_parameters() if p.requires_grad} == set(lora.adapter_parameters(adapted.model))


def test_the_scale_is_alpha_over_rank_or_over_its_root() -> None:
    """s·B·A by hand, against the merged weight: α = 32, r = 4 gives 8, or 16 with rsLoRA."""
    for rslora, scale in ((False, 8.0), (True, 16.0)):
        adapted = with_noise(policy(rslora=rslora))
        layer = adapted.model.get_submodule("model.layers.1.mlp.down_proj")
        expected = layer.base_layer.weight + scale * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        merged = lora.merge_copy(adapted.model).get_submodule("model.layers.1.mlp.down_proj").weight
        assert torch.allclose(merged, expected, atol=1e-6)


@pytest.mark.parametrize("family", ["mixtral", "llama4_text", pytest.param("recurrent_gemma", marks=pytest.mark.slow)])
def test_merging_keeps_what_a_family_computes(family: str) -> None:
    """Experts have one adapter inside another, for their two matrices; the router of Llama 4 is a linear layer with another
    result, and has none; RecurrentGemma keeps the state of its last pass."""
    adapted = tiny_model(family)
    lora.attach(adapted, Lora(rank=4), 0, "base")
    if family == "mixtral":
        assert any(name.endswith("experts.base_layer.lora_A") for name, _ in adapted.named_modules()), "one inside another"
    shake(adapted, 1)
    ids = torch.arange(3, 20)[None]
    with_adapter = adapted(input_ids=ids, use_cache=False).logits
    merged = lora.merge_copy(adapted)
    assert torch.allclose(merged(input_ids=ids, use_cache=False).logits, with_adapter, atol=1e-4)
    assert {name for name, _ in merged.named_parameters()} == {name for name, _ in tiny_model(family).named_parameters()}


def test_a_target_that_can_not_have_an_adapter_is_not_offered() -> None:
    with pytest.raises(ModelError, match="out_proj") as refusal:
        lora.attach(tiny_model("mamba2"), Lora(rank=4), 0, "base")
    assert refusal.value.fix == "choose from: in_proj"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_reference_is_the_model_with_the_adapter_disabled(kind: dict[str, Any]) -> None:
    adapted = policy(**kind)
    reference = Reference(adapted)
    before = logps(adapted)
    with_noise(adapted)
    after = logps(adapted)
    assert not torch.allclose(after, before, atol=1e-3)
    assert torch.equal(reference.logps(pack(), 1.0), before)
    assert torch.equal(logps(adapted), after)
    assert all(p.requires_grad for p in lora.adapter_parameters(adapted.model).values())


def test_a_reference_of_a_trained_adapter_is_that_adapter_and_can_be_refreshed() -> None:
    adapted = with_noise(policy())
    reference, first = Reference(adapted), logps(adapted)
    with_noise(adapted, seed=2)
    assert torch.equal(reference.logps(pack(), 1.0), first)
    state = {name: tensor.clone() for name, tensor in reference.state().items()}
    reference.refresh(adapted)
    assert torch.equal(reference.logps(pack(), 1.0), logps(adapted))
    reference.load_state(state)
    assert torch.equal(reference.logps(pack(), 1.0), first)


def test_a_share_of_a_new_adapter_mixed_into_the_disabled_one_is_that_share_of_its_change() -> None:
    adapted = policy()
    reference = Reference(adapted)
    with_noise(adapted)
    reference.refresh(adapted, 0.25)
    for name, weight in lora.adapter_parameters(adapted.model).items():
        expected = 0.25 * weight if "lora_B" in name else weight
        torch.testing.assert_close(reference.state()[name], expected.detach())
    reference.refresh(adapted, 1.0)
    assert torch.equal(reference.logps(pack(), 1.0), logps(adapted))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_saved_adapter_is_small_complete_and_loads_in_peft(kind: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = plain()
    base.save(tmp_path / "base")
    settings = Lora.model_validate({"rank": 4, **kind})
    adapted = with_noise(load_policy(Model(source=str(tmp_path / "base"), lora=settings), alphabet=None, seed=0))
    lora.save(adapted.model, tmp_path / "adapter")
    size = (tmp_path / "adapter" / lora.WEIGHTS).stat().st_size
    assert size < (tmp_path / "base" / "model.safetensors").stat().st_size
    for config in (
        Model(source=str(tmp_path / "base"), adapter=str(tmp_path / "adapter"), lora=Lora()),
        Model(source=str(tmp_path / "adapter"), lora=Lora()),
        Model(source=str(tmp_path / "adapter")),
    ):
        again = load_policy(config, alphabet=None, seed=5)
        assert torch.allclose(logps(again), logps(adapted), atol=1e-5)
        assert lora.is_attached(again.model) == (config.lora is not None)
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    ).eval()
    ids = torch.arange(9)[None] % 8
    ours = lora.merge_copy(adapted.model)
    ours.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, ours(ids).logits, atol=1e-4)


def test_an_export_is_a_plain_model(tmp_path: Path) -> None:
    adapted = with_noise(policy())
    adapted.save(tmp_path / "model")
    again = load_policy(Model(source=str(tmp_path / "model")), alphabet=None, seed=0)
    assert not lora.is_attached(again.model)
    assert torch.allclose(logps(again), logps(adapted), atol=1e-5)
    assert lora.is_attached(adapted.model)


def test_the_engine_samples_with_the_adapter() -> None:
    """Its log-probs are those of the learner and differ from the base's."""
    adapted = with_noise(policy())
    prompt = Prompt(id="p", text="1+2=")
    engine = NativeEngine(adapted, Engine(slots=4))
    (group,) = engine.sample([prompt], 4, Sampling(max_new_tokens=6), SampleKey(0, 1))
    for completion in group.completions:
        packed = build_pack([PrefixGroup(group.prompt_ids, (completion.token_ids,), (0,))], torch.device("cpu"))
        with torch.no_grad():
            ours = adapted.pack_logps(packed)[0].numpy()
            base = plain().pack_logps(packed)[0].numpy()
        assert np.allclose(ours, completion.logps, atol=1e-4)
        assert not np.allclose(base, completion.logps, atol=1e-3)


def test_a_new_adapter_depends_only_on_the_seed() -> None:
    one, two, other = (lora.adapter_parameters(policy(seed=s).model) for s in (3, 3, 4))
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert not all(torch.equal(one[n], other[n]) for n in one)


def test_the_summary_has_the_number_of_trained_parameters() -> None:
    summary = ModelSummary.of(policy(rank=2))
    assert summary.architecture == "Qwen3ForCausalLM"
    assert 0 < summary.trained < summary.parameters / 4
    assert "LoRA" in str(summary)
    assert "no chat template" in str(summary)


def test_an_adapter_for_another_base_is_refused(tmp_path: Path) -> None:
    plain().save(tmp_path / "base")
    plain(seed=1).save(tmp_path / "other")
    wide = SMALL.model_copy(update={"width": 48})
    load_policy(Model(tiny=wide), alphabet="0123456789+=", seed=0).save(tmp_path / "wide")
    adapted = load_policy(Model(source=str(tmp_path / "base"), lora=Lora(rank=2)), alphabet=None, seed=0)
    lora.save(adapted.model, tmp_path / "adapter")
    for other in ("other", "wide"):
        with pytest.raises(ModelError, match="another base"):
            load_policy(Model(source=str(tmp_path / other), adapter=str(tmp_path / "adapter")), alphabet=None, seed=0)
    (tmp_path / "adapter" / lora.BASE).unlink()  # as in adapters written by peft itself
    with pytest.raises(ModelError, match=r"in the adapter, and .* in this model"):
        load_policy(Model(source=str(tmp_path / "wide"), adapter=str(tmp_path / "adapter")), alphabet=None, seed=0)


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["input_layernorm"]}, {"bias": "all"}, {"alora_invocation_tokens": [5]}, {"lora_bias": True},
        {"trainable_token_indices": [3]}, {"layer_replication": [[0, 2], [1, 2]]},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_an_adapter_that_is_more_than_matrices_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    """peft trains more than `model.lora` does. Left out silently, it would be missing in passes or in the exported model."""
    plain().save(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], **options)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=f"an adapter with {next(iter(options))}"):
        load_policy(Model(source=str(tmp_path / "base"), adapter=str(tmp_path / "adapter")), alphabet=None, seed=0)


def test_an_adapter_that_changed_its_base_can_be_trained_saved_and_loaded_again(tmp_path: Path) -> None:
    """PiSSA takes the first singular values out of the weights when it is added, each time in the same way."""
    plain().save(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    settings = Model(source=str(tmp_path / "base"), adapter=str(tmp_path / "adapter"), lora=Lora())
    trained = with_noise(load_policy(settings, alphabet=None, seed=0))
    lora.save(trained.model, tmp_path / "trained")
    again = load_policy(settings.model_copy(update={"adapter": str(tmp_path / "trained")}), alphabet=None, seed=0)
    assert torch.allclose(logps(again), logps(trained), atol=1e-6)


def test_a_damaged_adapter_is_reported(tmp_path: Path) -> None:
    plain().save(tmp_path / "base")
    adapted = load_policy(Model(source=str(tmp_path / "base"), lora=Lora(rank=2)), alphabet=None, seed=0)
    for name in (lora.BASE, lora.CONFIG):
        lora.save(adapted.model, tmp_path / "adapter")
        (tmp_path / "adapter" / name).write_text('{"finger')
        with pytest.raises(ModelError, match=rf"{name}: can't be read"):
            load_policy(Model(source=str(tmp_path / "adapter")), alphabet=None, seed=0)


def test_targets_that_do_not_exist_or_reach_the_head_are_refused() -> None:
    with pytest.raises(ModelError, match="q_proj") as error:
        policy(targets=("query",))
    assert "lm_head" not in error.value.fix
    with pytest.raises(ModelError, match="leave the embedding and the head out"):
        policy(targets=("lm_head",))


def test_a_quantised_base_needs_lora_and_pretrained_weights(tmp_path: Path) -> None:
    plain().save(tmp_path / "base")
    with pytest.raises(RecipeError, match="starts with random weights"):
        load_policy(Model(tiny=SMALL, quantise="nf4", lora=Lora()), alphabet=None, seed=0)
    with pytest.raises(RecipeError, match="DoRA needs"):
        load_policy(Model(source=str(tmp_path / "base"), quantise="nf4", lora=Lora(dora=True)), alphabet=None, seed=0)
    with pytest.raises(RecipeError, match=r"set model\.lora"):
        load_policy(Model(source=str(tmp_path / "base"), quantise="nf4"), alphabet=None, seed=0)
