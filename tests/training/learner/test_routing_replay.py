"""Routing replay and the balance loss: what is recorded, what the learner computes from it, and that runs repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from oncurve.engines.base import SampleKey
from oncurve.engines.cuda.graph_decoder import GraphDecoder
from oncurve.engines.cuda.runner import CudaRunner
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.native.scheduler import Scheduler
from oncurve.engines.native.turns import build_requests
from oncurve.errors import RecipeError
from oncurve.models import attention_interface, experts
from oncurve.models.experts import RoutingPass
from oncurve.models.packing import build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Aspect, GradedGroup, Group, Routing, ScoredCompletion, ScoredGroup
from oncurve.runs.database.reader import RunReader
from oncurve.training.learner.learner import Learner, prefix_group_of
from oncurve.training.stages.grpo import grpo_learner_settings
from oncurve.training.start import begin
from tests.engines.cuda.test_graph_decoder import small_pages
from tests.engines.native.plain import prompt_of
from tests.models.architectures import tokenizer
from tests.models.test_experts import mixture
from tests.training.builders import apart, gradient, recipe, stage
from tests.training.stages.test_iterative_grpo import in_slices

__all__ = ["small_pages"]
SAMPLING = Sampling(max_new_tokens=7)
LENGTHS = (1, 5, 21)


def policy(family: str = "qwen3_moe") -> Policy:
    return Policy(mixture(family), tokenizer())


def recorded_groups(policy: Policy, lengths: Sequence[int] = LENGTHS) -> list[Group]:
    engine = NativeEngine(policy, Engine(slots=4, check_every=3))
    engine.records_routing = True
    return engine.sample([prompt_of(n, str(n)) for n in lengths], 3, SAMPLING, SampleKey(0, 1))


def graded(groups: Sequence[Group], seed: int = 0) -> list[GradedGroup]:
    dice = np.random.default_rng(seed)
    result = []
    for group in groups:
        scored = tuple(ScoredCompletion(c, (Aspect("a", 0.0),)) for c in group.completions)
        advantages = tuple(dice.standard_normal(len(c.token_ids)).astype(np.float32) for c in group.completions)
        result.append(GradedGroup(ScoredGroup(group, scored), advantages, (True,) * len(scored)))
    return result


def plain_routing(policy: Policy, group: Group, index: int) -> list[Routing]:
    """The prompt's and the completion's experts, by the model's own forward of the complete sequence."""
    ids, routing = np.concatenate((group.prompt_ids, group.completions[index].token_ids[:-1])), RoutingPass(records=True)
    policy.model.set_attn_implementation(policy.check.own_attention)
    with torch.no_grad(), experts.routed(routing):
        policy.backbone(input_ids=torch.from_numpy(ids)[None], use_cache=False)
    if policy.general_reason is None:
        policy.model.set_attn_implementation(attention_interface.NAME)
    return np.split(routing.chosen_NE.numpy(), [len(group.prompt_ids) - 1])


def assert_recorded(policy: Policy, group: Group) -> None:
    for index, completion in enumerate(group.completions):
        of_prompt, own = plain_routing(policy, group, index)
        np.testing.assert_array_equal(completion.routing, own)
        np.testing.assert_array_equal(group.prompt_routing, of_prompt)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v32"])
def test_the_sampler_records_the_experts_of_every_token(family: str) -> None:
    """Through our attention, and on the general path."""
    model = policy(family)
    assert (model.general_reason is None) == (family == "qwen3_moe")
    for group in recorded_groups(model):
        assert_recorded(model, group)


@pytest.mark.slow
@torch.inference_mode()
def test_the_gpu_runner_records_the_same() -> None:
    """In Triton's interpreter; prompts in chunks, slots that end and take the next sequence."""
    model = policy()
    decoder = GraphDecoder.build(model, Engine(check_every=2))
    assert decoder is not None
    requests = build_requests(model, [prompt_of(n, str(n)) for n in (1, 13)], 2, SAMPLING, SampleKey(0, 1))
    runner = CudaRunner.build(decoder, requests, 3, records_routing=True)
    for number, completions in Scheduler(model, runner, requests).completions():
        group = Group(requests[number].prompt, requests[number].prompt_ids, completions, runner.prompt_routing(number))
        assert_recorded(model, group)


def rerouted(group: Group, experts: int) -> Group:
    """The same group as if every token had taken other experts."""
    completions = tuple(replace(c, routing=(c.routing + 1) % experts) for c in group.completions if c.routing is not None)
    assert group.prompt_routing is not None
    return replace(group, completions=completions, prompt_routing=(group.prompt_routing + 1) % experts)


@contextmanager
def routers_by_hand(policy: Policy, routing_NE: Tensor) -> Iterator[None]:
    """Replaces the forward of each Qwen3-MoE router by its formula with these experts."""
    gates = [layer.mlp.gate for layer in policy.backbone.layers]  # type: ignore[union-attr]
    choices = routing_NE.long().view(len(routing_NE), len(gates), -1)

    def forward(gate: Any, chosen_Nk: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.t()
        weights = logits.softmax(-1).gather(1, chosen_Nk)
        return logits, weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights, chosen_Nk

    for layer, gate in enumerate(gates):
        gate.forward = lambda hidden, gate=gate, layer=layer: forward(gate, choices[:, layer], hidden)
    try:
        yield
    finally:
        for gate in gates:
            del gate.forward


@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_the_learner_takes_the_recorded_experts(checkpointing: str) -> None:
    """Log-probs and gradients are those of transformers' own modules with routers that are written out by hand."""
    ours, plain = policy(), policy()
    groups = graded([rerouted(group, 4) for group in recorded_groups(ours)])
    settings = grpo_learner_settings(stage(routing_replay=True, checkpointing=checkpointing, minibatches=1))
    learner = Learner(ours, settings)
    result = learner.update(groups)
    packs = build_pack(
        [prefix_group_of(g.scored, range(3), range(3 * i, 3 * i + 3)) for i, g in enumerate(groups)], ours.device
    )
    assert packs.routing_NE is not None
    reference = Learner(plain, replace(settings, routing_replay=False))
    with routers_by_hand(plain, packs.routing_NE):
        expected = reference.update(groups)
    for mine, theirs in zip(result.stats, expected.stats, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one is not None
            assert other is not None
            np.testing.assert_allclose(one.logps, other.logps, atol=2e-6)
    assert apart(gradient(ours.model), gradient(plain.model)) < 1e-5
    routers = [p.grad for name, p in ours.model.named_parameters() if "gate.weight" in name]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in routers)
    free = Learner(policy(), replace(settings, routing_replay=False))
    free.update(groups)
    assert apart(gradient(free.policy.model), gradient(ours.model)) > 1e-2, "the forced experts made no difference"


def test_replay_of_what_the_learner_would_choose_changes_nothing() -> None:
    one, other = policy(), policy()
    groups = graded(recorded_groups(one))
    for model, replays in ((one, True), (other, False)):
        Learner(model, grpo_learner_settings(stage(routing_replay=replays, tokens_per_pack=40))).update(groups)
    assert apart(gradient(one.model), gradient(other.model)) < 1e-6


@pytest.mark.parametrize("tokens_per_pack", [16384, 30])
def test_the_balance_loss_is_that_of_transformers(tokens_per_pack: int) -> None:
    """Its value and, with advantages of 0, its gradient. However the update is split into packs."""
    model = policy()
    groups = [replace(g, advantages=tuple(np.zeros_like(a) for a in g.advantages)) for g in graded(recorded_groups(model))]
    options = {
        "balance_loss": 0.5,
        "no_signal": "keep",
        "tokens_per_pack": tokens_per_pack,
        "optimiser": {"learning_rate": 0.0},
    }
    options["optimiser"] = {"learning_rate": 1e-9, "max_grad_norm": 0.0}
    result = Learner(model, grpo_learner_settings(stage(**options))).update(groups)
    plain = mixture("qwen3_moe")
    logits, counted = [], []
    for group in (g.group for g in groups):
        for completion in group.completions:
            ids = np.concatenate((group.prompt_ids, completion.token_ids[:-1]))
            logits.append(plain(input_ids=torch.from_numpy(ids)[None], output_router_logits=True).router_logits)
            counted.append(torch.arange(len(ids)) >= len(group.prompt_ids) - 1)
    joined = tuple(torch.cat(of_layer) for of_layer in zip(*logits, strict=True))
    expected = load_balancing_loss_func(joined, 4, 2, torch.cat(counted))
    assert isinstance(expected, Tensor)
    assert result.metrics["balance_loss"] == pytest.approx(expected.item(), rel=1e-5)
    (0.5 * expected).backward()  # type: ignore[no-untyped-call]
    assert apart(gradient(model.model), gradient(plain)) < 1e-5


def small_mixture(folder: Path) -> str:
    model = policy()
    model.save(folder)
    return f"model.source={folder}"


def test_a_run_with_replay_and_balance_loss_resumes_to_the_same_bits_and_stores_its_routing(tmp_path: Path) -> None:
    source = small_mixture(tmp_path / "mixture")
    sets = (source, "grpo.routing_replay=true", "grpo.balance_loss=0.01", "grpo.save_every=1", "task.heldout=3", "sft.steps=1")
    config = recipe(*sets, "grpo.steps=2")
    full, sliced = begin(config, out=tmp_path / "whole"), in_slices(config, tmp_path / "sliced")
    with RunReader.open(full.path) as one, RunReader.open(sliced.path) as other:
        assert one.fingerprint() == other.fingerprint()
        group = one.group("grpo", 1, 0).graded.group
    assert group.prompt_routing is not None
    assert group.prompt_routing.shape == (len(group.prompt_ids) - 1, 4)
    for completion in group.completions:
        assert completion.routing is not None
        assert completion.routing.shape == (len(completion.token_ids), 4)
        assert set(np.unique(completion.routing)) <= set(range(4))
    weights = [(run.model / "model.safetensors").read_bytes() for run in (full, sliced)]
    assert weights[0] == weights[1]


def test_engines_that_do_not_record_are_refused() -> None:
    with pytest.raises(RecipeError, match="not recorded"):
        recipe("grpo.routing_replay=true", "scale.engine=vllm")
