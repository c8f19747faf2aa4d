"""The learner on a GPU against itself on a CPU in float32: every attention path, both precisions, all that saves memory."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from oncurve.engines.native.engine import NativeEngine
from oncurve.kernels import pack_attention
from oncurve.kernels.launch import gpu_of
from oncurve.models import lora
from oncurve.models.attention_interface import ScoreRule
from oncurve.models.llama.cuda_backbone import CudaBackbone
from oncurve.models.loading.load import compile_blocks
from oncurve.models.pack_attention import PackAttention
from oncurve.models.pack_attention_cuda import CudaPackAttention
from oncurve.models.packing import build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import Lora
from oncurve.recipe.schema.sections import Engine
from oncurve.records import GradedGroup
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.learner.learner import Learner
from oncurve.training.stages.grpo import GrpoLoop, grpo_learner_settings
from tests.kernels.test_learner_kernels import RAGGED, pack_of
from tests.models.architectures import ARCHITECTURES, adapted, make_model, shake, tokenizer
from tests.training.builders import apart, graded_group, snapshot, stage

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
FAST = {"llama", "qwen2", "qwen3", "mistral"}


def groups(seed: int = 0, masked: bool = False) -> list[GradedGroup]:
    dice = np.random.default_rng(seed)
    shapes = [(40, [30, 1, 7]), (3, [12, 5]), (17, [1, 26]), (70, [66, 9])]
    return [graded_group(dice, p, c, masked=masked, name=f"p{i}") for i, (p, c) in enumerate(shapes)]


def learner_on(device: str, model: PreTrainedModel, dtype: torch.dtype = torch.float32, **options: Any) -> Learner:
    """Of a copy of the model, in packs that split the step in three."""
    copied = copy.deepcopy(model).to(device=device, dtype=dtype)
    return Learner(Policy(copied, tokenizer()), grpo_learner_settings(stage(tokens_per_pack=150, **options)))


def gradient_of(learner: Learner) -> Tensor:
    """Of the last update, in float32 on the CPU."""
    sums, weights = learner.optimiser.accumulator, learner.optimiser.weights
    found = [p.grad if sums is None else sums.buffer_for(p) for p in weights]
    return torch.cat([torch.zeros(p.numel()) if g is None else g.cpu().flatten() for p, g in zip(weights, found, strict=True)])


@pytest.fixture(scope="module")
def precise() -> Iterator[None]:
    """Products of float32 in float32, not in TensorFloat-32: what is compared is the formulas."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_gradient_is_the_cpus(name: str, precise: None) -> None:
    """Windows, soft caps, biases, odd heads; fast paths and modules: to 1e-5 in float32."""
    model = make_model(name)
    ours, theirs = learner_on("cuda", model, entropy_bonus=0.01), learner_on("cpu", model, entropy_bonus=0.01)
    assert isinstance(ours.policy.fast_backbone, CudaBackbone) == (name in FAST)
    reports = [learner.update(groups(masked=True)) for learner in (ours, theirs)]
    assert apart(gradient_of(ours), gradient_of(theirs)) < 1e-5
    for key in ("loss", "entropy", "grad_norm"):
        assert reports[0].metrics[key] == pytest.approx(reports[1].metrics[key], rel=1e-4, abs=1e-6)
    for one, other in zip(*([one for of_group in t.stats for one in of_group] for t in reports), strict=True):
        assert one is not None
        assert other is not None
        np.testing.assert_allclose(one.logps, other.logps, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2"])
def test_in_bfloat16_it_points_the_same_way(name: str) -> None:
    """Cosine above 0.999 with the float32 gradient of the same, rounded weights."""
    plain = AutoModelForCausalLM.from_config(make_model(name).config)  # its own first weights: louder ones are chaos in 16 bits
    model = plain.bfloat16().float().eval()
    ours, theirs = learner_on("cuda", model, torch.bfloat16), learner_on("cpu", model)
    for learner in (ours, theirs):
        learner.update(groups())
    a, b = gradient_of(ours), gradient_of(theirs)
    assert float(a @ b / (a.norm() * b.norm())) > 0.999


@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_compiled_blocks_leave_the_gradient(name: str, precise: None) -> None:
    """Of families that go through their modules; after it the sampler's step is captured and drawn as ever."""
    model = make_model(name)
    ours, theirs = learner_on("cuda", model), learner_on("cuda", model)
    assert compile_blocks(ours.policy.backbone)
    for seed in range(2):
        for learner in (ours, theirs):
            learner.update(groups(seed))
        assert apart(gradient_of(ours), gradient_of(theirs)) < 1e-5
    task = PromptList.of(["1 2 3", "4 5"])
    config = stage(prompts_per_step=2, group_size=2, sampling={"max_new_tokens": 8})
    rewards = RewardMix([FunctionReward(lambda completions, **_: [1.0 * (i % 2) for i in range(len(completions))], "odd")])
    rewards.bind(lambda: ours.policy.decode)
    assert GrpoLoop(config, 0, task, NativeEngine(ours.policy, Engine()), rewards).step(1).metrics["mismatch_kl"] < 1e-3


@pytest.mark.parametrize("keys", [100, 1000, 10_000], ids=["short", "long", "very long, by TMA"])
def test_attention_in_bfloat16(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own tiles for 16 bits against full scores in float64, with heads of 128."""
    tiling = pack_attention.tiling(128, torch.bfloat16, keys, gpu_of(torch.device("cuda", 0)), has_tma=True)
    assert tiling.uses_tma == (keys == 10_000)
    monkeypatch.setattr(pack_attention, "tiling", lambda *args, **options: tiling)
    pack = build_pack(pack_of([*RAGGED, (150, [140, 130])]), torch.device("cpu"))
    plain, layout = pack.attention, build_pack(pack_of([*RAGGED, (150, [140, 130])]), GPU).attention
    assert isinstance(plain, PackAttention)
    assert isinstance(layout, CudaPackAttention)
    dice = torch.Generator().manual_seed(0)
    for window in (None, 31):
        q, k, v = (torch.randn(1, n, pack.tokens, 128, generator=dice).bfloat16() for n in (4, 2, 2))
        weigh = torch.randn(1, pack.tokens, 4, 128, generator=dice).bfloat16()
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        expected = plain.attend_by_scores(exact[0], exact[1], exact[2], ScoreRule(0.1, window))
        gradients = torch.autograd.grad((expected * weigh).sum(), exact)
        ours = [x.to(GPU).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        out = layout.attend(0, ours[0], ours[1], ours[2], ScoreRule(0.1, window))
        found = torch.autograd.grad((out * weigh.to(GPU)).sum(), ours)
        for one, other in zip((out, *found), (expected, *gradients), strict=True):
            assert apart(one.detach().double().cpu(), other.detach()) < 8e-3


def test_what_saves_memory_changes_no_gradient(precise: None) -> None:
    """Checkpointing, packs of one group, prompts repeated: to 1e-5; the reference on the CPU: the same bits."""
    model = make_model("qwen3")
    plain = learner_on("cuda", model)
    plain.update(groups())
    expected = gradient_of(plain)
    for options in ({"checkpointing": "on"}, {"checkpointing": "auto"}, {"no_signal": "keep"}):
        other = learner_on("cuda", model, torch.float32, **options)
        other.update(groups())
        assert apart(gradient_of(other), expected) < 1e-5
    reports = []
    for on_cpu in (False, True):
        learner = learner_on(
            "cuda", model, torch.bfloat16, kl={"beta": 0.1, "on_cpu": on_cpu}, optimiser={"learning_rate": 0.01}
        )
        learner.update(groups())
        reports.append((learner.update(groups(1)).metrics["kl"], snapshot(learner.policy.model)))
    assert reports[0][0] == reports[1][0] > 0
    assert torch.equal(reports[0][1], reports[1][1])


@pytest.mark.parametrize("options", [{}, {"moments": "int8"}, {"on_cpu": True}])
def test_updates_move_the_weights_that_the_sampler_reads(options: dict[str, Any]) -> None:
    """float32 masters, bfloat16 weights: after three updates each weight is its master, rounded; and near AdamW's own."""
    found = []
    for more in ({}, options):
        learner = learner_on("cuda", make_model("qwen3"), torch.bfloat16, optimiser={"learning_rate": 1e-3, **more})
        before = snapshot(learner.policy.model)
        for seed in range(3):
            assert learner.update(groups(seed)).metrics["skipped_updates"] == 0
        for weight, master in zip(learner.optimiser.weights, learner.optimiser.masters, strict=True):
            assert torch.equal(weight.cpu(), master.detach().cpu().bfloat16())
        found.append((snapshot(learner.policy.model) - before).float())
    assert float(found[0] @ found[1] / (found[0].norm() * found[1].norm())) > 0.98


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_is_left_out_and_counted(dtype: torch.dtype) -> None:
    learner = learner_on("cuda", make_model("qwen3"), dtype, optimiser={"learning_rate": 1e-2})
    before = snapshot(learner.policy.model)
    broken = [GradedGroup(g.scored, tuple(np.full_like(a, np.nan) for a in g.advantages), g.graded) for g in groups()]
    assert learner.update(broken).metrics["skipped_updates"] == 1.0
    assert torch.equal(snapshot(learner.policy.model), before)
    assert learner.update(groups()).metrics["skipped_updates"] == 0.0
    after = snapshot(learner.policy.model)
    assert bool(torch.isfinite(after).all())
    assert not torch.equal(after, before)


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_an_ordinary_step_is_taken(beta: float) -> None:
    """Sampled, scored and learned in bfloat16 by the loop of a run: finite, taken, with moments, and every matrix moved."""
    model = AutoModelForCausalLM.from_config(make_model("qwen3").config).to(GPU, torch.bfloat16)
    policy = Policy(model, tokenizer())
    sampling = {"max_new_tokens": 24, "min_new_tokens": 24}
    config = stage(
        prompts_per_step=4,
        group_size=4,
        tokens_per_pack=150,
        kl={"beta": beta},
        sampling=sampling,
        optimiser={"learning_rate": 1e-2},
    )
    dice = random.Random(0)
    rewards = RewardMix([FunctionReward(lambda completions, **_: [dice.random() for _ in completions], "random")])
    rewards.bind(lambda: policy.decode)
    task = PromptList.of(["1 2 3", "4 5", "6 7 8 9", "3 1"])
    loop = GrpoLoop(config, 0, task, NativeEngine(policy, Engine()), rewards)
    before = [p.detach().clone() for p in model.parameters()]
    for n in (1, 2):
        metrics = loop.step(n).metrics
        assert metrics["skipped_updates"] == 0
        assert 0 < metrics["grad_norm"] < np.inf
        assert metrics["mismatch_kl"] < 1e-3
    learner = loop.learner
    assert len(learner.optimiser.adam.state) == len(learner.optimiser.weights)
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True) if p.dim() == 2)


def test_the_same_update_twice_gives_the_same_bits() -> None:
    weights = []
    for _ in range(2):
        learner = learner_on("cuda", make_model("qwen3"), torch.bfloat16, optimiser={"learning_rate": 1e-2})
        for seed in range(3):
            learner.update(groups(seed))
        weights.append(snapshot(learner.policy.model))
    assert torch.equal(weights[0], weights[1])


def test_the_host_never_waits_within_an_update() -> None:
    """Forward, loss and backward of all packs are queued without one synchronisation; tables and kernels are made before."""
    learner = learner_on("cuda", make_model("qwen3"), torch.bfloat16)
    learner.update(groups())
    batch = learner._build_micro_batches(groups(), range(4))
    totals = learner._loss_denominators(groups())
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner._accumulate(batch, totals, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {}),
        ("llama", {"rslora": True, "rank": 20}),
        ("qwen2", {"targets": ("k_proj", "o_proj", "up_proj")}),
        ("mistral", {"targets": ("q_proj", "v_proj", "down_proj")}),
        ("qwen3", {"dora": True}),
        ("gemma2", {}),
    ],
)
def test_the_gradient_of_lora_is_the_cpus(name: str, options: dict[str, Any], precise: None) -> None:
    """Of every A and B, by the fast path and through modules, against peft's layers on the CPU, with the adapter off as the
    reference: to 1e-5 in float32."""
    model = make_model(name)
    lora.attach(model, Lora.model_validate({"rank": 4, "alpha": 4.0, **options}), 0, "base")
    ours, theirs = learner_on("cuda", model, kl={"beta": 0.1}), learner_on("cpu", model, kl={"beta": 0.1})
    assert isinstance(ours.policy.fast_backbone, CudaBackbone) == (name in FAST and "dora" not in options)
    theirs.policy.fast_backbone = None  # peft's own layers
    for learner in (ours, theirs):
        shake(learner.policy.model)
    reports = [learner.update(groups(masked=True)) for learner in (ours, theirs)]
    assert apart(gradient_of(ours), gradient_of(theirs)) < 1e-5
    assert reports[0].metrics["kl"] == pytest.approx(reports[1].metrics["kl"], rel=1e-4)
    assert reports[0].metrics["kl"] > 0


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_the_gradient_of_lora_in_bfloat16_points_the_same_way(name: str) -> None:
    model = adapted(AutoModelForCausalLM.from_config(make_model(name).config).bfloat16(), alpha=4.0).float().eval()
    ours, theirs = learner_on("cuda", model, torch.bfloat16), learner_on("cpu", model)
    reports = [learner.update(groups()) for learner in (ours, theirs)]
    a, b = gradient_of(ours), gradient_of(theirs)
    assert float(a @ b / (a.norm() * b.norm())) > 0.999
    pairs = zip(*([one.logps for of_group in t.stats for one in of_group if one is not None] for t in reports), strict=True)
    assert float(np.concatenate([np.abs(x - y) for x, y in pairs]).mean()) < 0.02


def test_lora_takes_less_memory_than_training_all_weights() -> None:
    """Of a model wide enough for its weights to count: no sums, masters or moments of what is frozen, and no more kept."""
    peaks = []
    for with_adapter in (False, True):
        model = make_model("qwen3", hidden_size=1024, intermediate_size=3072, num_attention_heads=16, head_dim=64)
        model = adapted(model, rank=32, alpha=4.0) if with_adapter else model
        learner = learner_on("cuda", model, torch.bfloat16)
        del model
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        learner.update(groups())
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del learner
    assert peaks[1] < 0.5 * peaks[0]


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_a_resumed_lora_update_gives_the_same_bits(moments: str) -> None:
    """Three updates in a row; or two, and the third by a learner that was given what a checkpoint would hold of them."""
    settings: dict[str, Any] = {"optimiser": {"learning_rate": 1e-2, "moments": moments}}
    model = adapted(make_model("qwen3"), alpha=4.0)
    whole, first, second = (learner_on("cuda", model, torch.bfloat16, **settings) for _ in range(3))
    for seed in range(3):
        whole.update(groups(seed))
    for seed in range(2):
        first.update(groups(seed))
    with torch.no_grad():
        for name, parameter in lora.adapter_parameters(second.policy.model).items():
            parameter.copy_(first.policy.model.get_parameter(name))
    second.optimiser.load_state({name: tensor.cpu() for name, tensor in first.optimiser.state().items()})
    second.update(groups(2))
    assert torch.equal(snapshot(whole.policy.model), snapshot(second.policy.model))
    assert not torch.equal(snapshot(first.policy.model), snapshot(second.policy.model))


def test_the_host_never_waits_within_a_lora_update() -> None:
    learner = learner_on("cuda", adapted(make_model("qwen3"), alpha=4.0), torch.bfloat16)
    learner.update(groups())
    batch, totals = learner._build_micro_batches(groups(), range(4)), learner._loss_denominators(groups())
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner._accumulate(batch, totals, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
