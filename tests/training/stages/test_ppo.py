"""PPO: loss and gradient against float64, its relation to GRPO, truncated completions, critic warm-up, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oncurve.algos.advantages import grade
from oncurve.algos.objectives import OBJECTIVES
from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import RecipeError
from oncurve.models.heads.critic import ValueModel, append_placeholder
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.recipe.schema.sections import Engine
from oncurve.recipe.schema.stages import Ppo
from oncurve.records import Aspect, Floats, GradedGroup, Group, Ints, Prompt, ScoredCompletion, ScoredGroup
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.learner.learner import Learner
from oncurve.training.stages.grpo import grpo_learner_settings
from oncurve.training.stages.ppo import PpoLearner, PpoLoop, ValuedGroup, ppo_learner_settings, value_completion
from oncurve.training.start import begin, resume
from tests.training.builders import PROMPTS, apart, completion, digits, gradient, policy, recipe, snapshot, stage
from tests.training.test_trainer import StopAfter, fingerprint

STILL = {"learning_rate": 1e-9, "max_grad_norm": 0.0}


def ppo(**options: Any) -> Ppo:
    plain = {"steps": 4, "prompts_per_step": 4, "group_size": 4, "optimiser": STILL, "sampling": {"max_new_tokens": 8}}
    return Ppo.model_validate({**plain, **options})


def scored_group(seed: int, lengths: Sequence[int], *, masked: bool = False) -> ScoredGroup:
    rng = np.random.default_rng(seed)
    rows = [completion(rng, n, masked=masked, stop="length" if i == 1 else "end") for i, n in enumerate(lengths)]
    rows = [replace(c, loss_mask=np.ones(len(c.token_ids), bool)) if not c.loss_mask.any() else c for c in rows]
    aspects = [Aspect("a", float(rng.normal())) for _ in rows]
    group = Group(Prompt(id=f"p{seed}", text="1"), rng.integers(3, 19, 3 + seed), tuple(rows))
    return ScoredGroup(group, tuple(ScoredCompletion(c, (a,)) for c, a in zip(rows, aspects, strict=True)))


def loop_for(options: dict[str, Any], seed: int = 0) -> PpoLoop:
    engine = NativeEngine(policy(seed), Engine(slots=16))
    return PpoLoop(ppo(**options), seed, PROMPTS, engine, RewardMix([FunctionReward(digits, "f")]))


def add_noise(module: torch.nn.Module, seed: int, size: float = 0.05) -> None:
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=rng), alpha=size)


def plain_hidden(model: Any, prompt: Ints, tokens: Ints) -> Tensor:
    """Plain transformers in float64: the hidden state before each token."""
    ids = torch.tensor([[*prompt.tolist(), *tokens.tolist()]])
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return hidden[len(prompt) - 1 : -1]


def doubled(model: Any) -> Any:
    own = copy.deepcopy(model).double()
    own.set_attn_implementation("eager")
    return own


def reference_gradients(learner: PpoLearner, groups: Sequence[GradedGroup], old: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """∇ of PPO's policy loss and of its value loss, written out token by token in float64."""
    model, trunk = doubled(learner.policy.model), doubled(learner.critic.trunk.model)
    head: Any = copy.deepcopy(learner.critic.head).double()
    total = sum(int(s.completion.loss_mask.sum()) for g in groups for s in g.scored.scored)
    policy_loss = value_part = torch.zeros((), dtype=torch.float64)
    for group, old_logps in zip(groups, old, strict=True):
        assert isinstance(group, ValuedGroup)
        for c, s in enumerate(group.scored.scored):
            ids = s.completion.token_ids
            logits = model.get_output_embeddings()(plain_hidden(model, group.group.prompt_ids, ids))
            values = head(plain_hidden(trunk, group.group.prompt_ids, ids))[:, 0]
            for t in np.flatnonzero(s.completion.loss_mask):
                logp = logits[t].log_softmax(-1)[int(ids[t])]
                ratio, a = (logp - old_logps[c][t]).exp(), float(group.advantages[c][t])
                policy_loss = policy_loss - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) / total
                v_old, target = float(group.values[c][t]), float(group.returns[c][t])
                near = v_old + (values[t] - v_old).clamp(-0.2, 0.2)
                value_part = value_part + 0.5 * torch.maximum((values[t] - target) ** 2, (near - target) ** 2) / total
    (policy_loss + value_part).backward()  # type: ignore[no-untyped-call]
    critic = torch.cat([head.weight.grad.flatten(), head.bias.grad, gradient(trunk.base_model)])
    return gradient(model), critic


def test_loss_and_gradient_agree_with_float64_off_policy() -> None:
    """Weights differ between old and new, so that some ratios and values are clipped; masked tokens, one truncated."""
    loop = loop_for({"minibatches": 2})
    add_noise(loop.learner.critic.head, 3, 0.3)
    scored = [scored_group(i, [4, 6, 3], masked=True) for i in range(2)]
    graded = loop.grade(scored)
    batch = [micro for g in range(2) for micro in loop.learner._build_micro_batches(graded, range(g, g + 1))]
    old = [
        [logp.double() for logp in torch.split(micro.logp_old_M, list(micro.pack.lengths))]
        for micro in batch
        if micro.logp_old_M is not None
    ]
    add_noise(loop.learner.policy.model, 1)
    add_noise(loop.learner.critic.module, 2)
    loop.learner._accumulate(batch, loop.learner._loss_denominators(graded), None)
    expected_policy, expected_critic = reference_gradients(loop.learner, graded, old)
    assert apart(gradient(loop.learner.policy.model).double(), expected_policy) < 1e-5
    assert apart(gradient(loop.learner.critic.module).double(), expected_critic) < 1e-5
    assert 0 < loop.learner._last_value_sums["value_clip_share"] < 1


def test_with_the_groups_mean_as_critic_it_is_grpo_without_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """γ = λ = 1: advantages, and the gradient of the complete step, up to rounding."""
    loop = loop_for({"gae_lambda": 1.0, "whiten": False, "reduction": "completions", "max_failure_share": 1.0})
    scored = [scored_group(i, [4, 6, 3]) for i in range(3)]
    ended = [
        replace(g, scored=tuple(replace(s, completion=replace(s.completion, stop="end")) for s in g.scored)) for g in scored
    ]

    def means(groups: Sequence[ScoredGroup]) -> list[list[Floats]]:
        totals = [[s.total or 0.0 for s in g.scored] for g in groups]
        return [
            [np.full(len(s.completion.token_ids), np.mean(t), np.float32) for s in g.scored]
            for g, t in zip(groups, totals, strict=True)
        ]

    monkeypatch.setattr(loop.learner, "values", means)
    by_critic = loop.grade(ended)
    grpo = stage(advantage={"scale": "none"})
    plain = Learner(policy(), grpo_learner_settings(grpo))
    by_group = grade(ended, baseline="mean", scale="none", eps=1e-4, mask_cut=False)
    for one, other in zip(by_critic, by_group, strict=True):
        for a, b in zip(one.advantages, other.advantages, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
    loop.learner.update(by_critic)
    plain.update(by_group)
    assert apart(gradient(loop.learner.policy.model), gradient(plain.policy.model)) < 1e-5


def test_an_ended_completion_has_value_0_after_it_and_a_truncated_one_the_critics() -> None:
    """γ = 0.5, λ = 1, two tokens, reward 1, values 0: 0.5 and 1 if it ended; plus 0.25·8 and 0.5·8 if it was truncated."""
    rng = np.random.default_rng(0)
    for stop, expected in (("end", [0.5, 1.0]), ("length", [2.5, 5.0])):
        s = ScoredCompletion(completion(rng, 2, stop=stop), (Aspect("a", 1.0),))  # type: ignore[arg-type]
        values = np.array([0.0, 0.0, 8.0] if stop == "length" else [0.0, 0.0], dtype=np.float32)
        advantages, _, returns, _ = value_completion(s, values, ppo(gamma=0.5, gae_lambda=1.0), None)
        assert advantages.tolist() == expected
        assert returns.tolist() == expected


def test_values_are_those_of_the_state_before_each_token_and_after_a_cut() -> None:
    loop = loop_for({})
    add_noise(loop.learner.critic.head, 0, 0.5)
    scored = scored_group(2, [3, 4])
    result = loop.learner.values([scored])[0]
    model, head = doubled(loop.learner.critic.trunk.model), copy.deepcopy(loop.learner.critic.head).double()
    for c, values in enumerate(result):
        ids = scored.scored[c].completion.token_ids
        config = append_placeholder(ids) if c == 1 else ids
        expected = head(plain_hidden(model, scored.group.prompt_ids, config))[:, 0]
        assert len(values) == len(ids) + (c == 1)
        np.testing.assert_allclose(values, expected.detach().numpy(), atol=1e-5)


def test_a_critic_starts_at_zero_and_shares_no_weight_with_the_policy() -> None:
    own = policy()
    critic = ValueModel(own)
    pack = build_pack([PrefixGroup(np.array([3, 4]), (np.array([5, 6, 7]),), (0,))], own.device)
    assert not critic.values(pack).any()
    assert {p.data_ptr() for p in critic.module.parameters()}.isdisjoint({p.data_ptr() for p in own.model.parameters()})
    trunk = sum(p.numel() for p in critic.trunk.backbone.parameters())
    assert trunk == sum(p.numel() for p in own.backbone.parameters())
    shared = ValueModel(own, shared=True)
    assert [name for name, _ in shared.module.named_parameters()] == ["head.weight", "head.bias"]


def test_in_a_shared_trunk_the_value_loss_moves_the_policys_weights() -> None:
    """With advantages of 0 the policy's gradient comes from the value loss only, times its weight."""
    result = []
    for weight in (0.5, 1.0):
        loop = loop_for({"critic": {"trunk": "shared", "loss_weight": weight}})
        add_noise(loop.learner.critic.head, 0, 0.5)
        graded = loop.grade([scored_group(0, [4, 3])])
        still = [replace(g, advantages=tuple(np.zeros_like(a) for a in g.advantages)) for g in graded]
        loop.learner.update(still)
        result.append(gradient(loop.learner.policy.model))
    assert float(result[0].norm()) > 0
    assert apart(result[1], 2 * result[0]) < 1e-5


def test_value_warm_up_updates_only_the_critic() -> None:
    loop = loop_for({"critic": {"warmup_steps": 1, "learning_rate": 1e-2}, "optimiser": {"learning_rate": 1e-2}})
    before, critic = snapshot(loop.learner.policy.model), snapshot(loop.learner.critic.module)
    first = loop.step(1)
    assert torch.equal(snapshot(loop.learner.policy.model), before)
    assert not torch.equal(snapshot(loop.learner.critic.module), critic)
    assert first.metrics["value_loss"] > 0
    loop.step(2)
    assert not torch.equal(snapshot(loop.learner.policy.model), before)


def test_further_passes_of_the_critic_leave_the_policys_update_alone() -> None:
    """Three passes of the critic for one of the policy; in a warm-up step three too."""
    options: dict[str, Any] = {"critic": {"learning_rate": 1e-2, "warmup_steps": 1}, "optimiser": {"learning_rate": 1e-2}}
    more = {**options, "critic": {**options["critic"], "updates_per_step": 3}}
    once, often = loop_for(options), loop_for(more)
    scored = [scored_group(i, [4, 6, 3]) for i in range(3)]
    for loop in (once, often):
        graded = loop.grade(scored)
        loop.learner.update(graded)
    assert (len(once.learner.value_updates), len(often.learner.value_updates)) == (1, 3)
    assert torch.equal(snapshot(once.learner.policy.model), snapshot(often.learner.policy.model))
    assert not torch.equal(snapshot(once.learner.critic.module), snapshot(often.learner.critic.module))
    often.step(1)
    assert len(often.learner.value_updates) == 3


def test_a_normalised_critic_starts_at_the_mean_reward_and_resumes_with_its_scale() -> None:
    options: dict[str, Any] = {"critic": {"normalise": True, "learning_rate": 1e-2}}
    loop = loop_for(options)
    scored = [scored_group(i, [4, 6, 3]) for i in range(3)]
    graded = loop.grade(scored)
    rewards = [total for group in scored for total in group.totals if total is not None]
    values = np.concatenate([v for g in graded if isinstance(g, ValuedGroup) for v in g.values])
    assert values == pytest.approx(np.full(len(values), np.mean(rewards)), abs=1e-5)
    assert loop.learner.value_scale == pytest.approx((np.mean(rewards), np.std(rewards)))
    loop.learner.update(graded)
    resumed = loop_for(options)
    resumed.load_state(copy.deepcopy(loop.state()))
    one, other = (each.learner.values(scored) for each in (loop, resumed))
    assert all(np.array_equal(a, b) for rows in zip(one, other, strict=True) for a, b in zip(*rows, strict=True))
    assert not np.allclose(np.concatenate([v for rows in one for v in rows]), np.mean(rewards), atol=1e-3), "it has learned"


def test_the_critic_learns_what_follows() -> None:
    """On the same completions again and again, explained variance rises from 0 to well above 0.5."""
    loop = loop_for({"gae_lambda": 1.0, "critic": {"learning_rate": 3e-3, "clip": 0.0}})
    loop.learner.is_warming_up = True
    scored = [scored_group(i, [4, 6, 3]) for i in range(3)]
    observed = [loop.learner.update(loop.grade(scored)).metrics["explained_variance"] for _ in range(60)]
    assert observed[0] == 0.0
    assert max(observed) > 0.8


def test_a_kl_in_the_reward_is_paid_token_by_token() -> None:
    """λ = 1, values 0: the advantage at t is the reward minus β times the KL from t on."""
    loop = loop_for({"kl": {"beta": 0.5}, "gae_lambda": 1.0, "whiten": False})
    add_noise(loop.learner.policy.model, 1)
    scored = [scored_group(0, [4])]
    (kl,) = loop.learner.kl_tokens(scored)[0]
    (graded,) = loop.grade(scored)
    total = scored[0].scored[0].total
    assert total is not None
    np.testing.assert_allclose(graded.advantages[0], total - 0.5 * kl[::-1].cumsum()[::-1], atol=1e-5)
    assert float(np.abs(kl).max()) > 1e-3


def test_the_split_into_packs_does_not_matter() -> None:
    result = []
    for budget in (5, 10_000):
        loop = loop_for({"tokens_per_pack": budget})
        add_noise(loop.learner.critic.head, 3, 0.3)
        loop.learner.update(loop.grade([scored_group(i, [4, 6, 3], masked=True) for i in range(3)]))
        result.append((gradient(loop.learner.policy.model), gradient(loop.learner.critic.module)))
    assert apart(result[0][0], result[1][0]) < 1e-5
    assert apart(result[0][1], result[1][1]) < 1e-5


PPO_RECIPE = (
    "grpo.type=ppo",
    "ppo.save_every=2",
    "ppo.eval_every=2",
    "ppo.updates_per_step=2",
    "ppo.kl.beta=0.05",
    "ppo.critic.warmup_steps=1",
)


@pytest.mark.parametrize("trunk", ["separate", "shared"])
def test_a_run_that_crashed_resumes_to_the_same_bits(trunk: str, tmp_path: Path) -> None:
    config = recipe(*PPO_RECIPE, f"ppo.critic.trunk={trunk}")
    with pytest.raises(KeyboardInterrupt):
        begin(config, out=tmp_path / "crashed", listeners=[StopAfter("ppo", 3)])
    run = RunFolder(tmp_path / "crashed")
    resume(run)
    assert fingerprint(run) == fingerprint(begin(config, out=tmp_path / "whole"))


def test_bfloat16_trains(tmp_path: Path) -> None:
    run = begin(recipe("model.dtype=bfloat16", *PPO_RECIPE), runs_dir=tmp_path)
    with RunReader.open(run.path) as store:
        assert store.metric("skipped_critic_updates", "ppo") == [(n, 0.0) for n in range(1, 5)]


def test_a_stage_with_only_warm_up_steps_is_refused() -> None:
    with pytest.raises(RecipeError) as raised:
        recipe("grpo.type=ppo", "ppo.critic.warmup_steps=4")
    assert raised.value.where == "ppo.critic.warmup_steps"
    assert "none would train the policy" in raised.value.because


def test_a_critic_with_fewer_passes_than_the_policy_is_refused() -> None:
    with pytest.raises(RecipeError) as raised:
        recipe("grpo.type=ppo", "ppo.updates_per_step=2", "ppo.critic.updates_per_step=1")
    assert raised.value.where == "ppo.critic.updates_per_step"


def test_the_policy_learns_as_in_grpo_after_the_warm_up() -> None:
    """4 steps, 1 of them for the critic only: 3 steps of 3 passes. PPO's KL is in the reward by default."""
    settings = ppo_learner_settings(ppo(kl={"beta": 0.1}, updates_per_step=3, critic={"warmup_steps": 1}))
    assert (settings.objective, settings.updates, settings.passes) == (OBJECTIVES["bnpo"], 9, 3)
    assert (settings.beta, settings.kl_in_reward, settings.kl_estimator) == (0.1, True, "k1")
    assert (settings.length_budget, settings.forward_silent_groups) == (8, True)
    by_completion = ppo_learner_settings(ppo(reduction="completions", kl={"beta": 0.1, "where": "loss"}))
    assert (by_completion.objective, by_completion.kl_in_reward) == (OBJECTIVES["grpo"], False)
