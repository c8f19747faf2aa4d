"""The learner: old log-probs, the terms besides the surrogate, and what it reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oncurve.models.heads import lm_head
from oncurve.models.packing import Pack, PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.records import GradedGroup
from oncurve.training.learner.learner import Learner, prefix_group_of
from oncurve.training.learner.optimiser import Update
from oncurve.training.stages.grpo import grpo_learner_settings
from oncurve.training.timing import model_flops
from tests.training.builders import apart, digits, graded_group, gradient, loop_for, policy, snapshot, stage

MOVING = {"learning_rate": 0.02}


def groups(count: int = 4, seed: int = 0) -> list[GradedGroup]:
    rng = np.random.default_rng(seed)
    return [graded_group(rng, 3 + i, [5, 2 + i, 4], name=f"p{i}") for i in range(count)]


@torch.no_grad()
def logps_of(policy: Policy, group: GradedGroup, temperature: float = 1.0) -> list[Tensor]:
    rows = [c.token_ids for c in group.group.completions]
    pack = build_pack([PrefixGroup(group.group.prompt_ids, tuple(rows), tuple(range(len(rows))))], policy.device)
    return list(torch.split(policy.pack_logps(pack, temperature)[0], list(pack.lengths)))


def test_one_update_has_ratios_of_exactly_one_and_spends_no_pass_on_old_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(policy(), grpo_learner_settings(stage(optimiser=MOVING)))
    passes = []
    plain = Policy.pack_hidden

    def counted(self: Policy, pack: Pack) -> Tensor:
        passes.append(torch.is_grad_enabled())
        return plain(self, pack)

    monkeypatch.setattr(Policy, "pack_hidden", counted)
    learned = learner.update(groups())
    assert passes == [True]
    for of_group in learned.stats:
        for one in of_group:
            assert one is not None
            assert np.all(one.ratio == 1.0)
            assert not one.clipped.any()
    assert learned.metrics["ratio_mean"] == 1.0
    assert learned.metrics["clip_share"] == 0.0


@pytest.mark.parametrize("options", [{}, {"objective": "gspo", "entropy_bonus": 0.1}, {"kl": {"beta": 0.1}}], ids=str)
def test_a_pack_in_chunks_has_the_same_gradient_and_no_logits_are_computed_twice(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """μ = 2, so that the second pass has ratios that differ; parts of at most 6 tokens, and completions of up to 5."""
    output, computed, plain = [], [0], lm_head.Head.logits

    def counted(head: lm_head.Head, hidden: Tensor) -> Tensor:
        computed[0] += len(hidden)
        return plain(head, hidden)

    for elements in (lm_head.CPU_CHUNK_LOGITS, 6 * len(policy().head.weight_VD)):
        monkeypatch.setattr(lm_head, "CPU_CHUNK_LOGITS", elements)
        learner = Learner(policy(), grpo_learner_settings(stage(updates_per_step=2, optimiser=MOVING, **options)))
        monkeypatch.setattr(lm_head.Head, "logits", counted)
        computed[0] = 0
        learned = learner.update(groups())
        monkeypatch.setattr(lm_head.Head, "logits", plain)
        output.append((gradient(learner.policy.model), learned, computed[0]))
    (expected, full, once), (result, parts, again) = output
    assert apart(result, expected) < 1e-5
    assert again == once
    assert parts.metrics.keys() == full.metrics.keys()
    for name in full.metrics.keys() - {"mfu", "update_tflops"}:
        assert parts.metrics[name] == pytest.approx(full.metrics[name], rel=1e-4, abs=1e-6), name
    for of_group, others in zip(parts.stats, full.stats, strict=True):
        for one, other in zip(of_group, others, strict=True):
            assert one is not None
            assert other is not None
            np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)
            np.testing.assert_allclose(one.ratio, other.ratio, atol=1e-4)


def test_old_log_probs_are_those_before_the_first_of_many_updates() -> None:
    """μ = 2 with 2 mini-batches: what the last pass saw is exp(new − old), old being of the weights the step began with."""
    learner = Learner(policy(), grpo_learner_settings(stage(updates_per_step=2, minibatches=2, optimiser=MOVING)))
    batch = groups()
    old = [logps_of(learner.policy, g) for g in batch]
    learned = learner.update(batch)
    assert learner.optimiser.done == 4
    for of_group, before in zip(learned.stats, old, strict=True):
        for one, logp_old in zip(of_group, before, strict=True):
            assert one is not None
            np.testing.assert_allclose(one.ratio, np.exp(one.logps - logp_old.numpy()), rtol=1e-4)
            assert np.any(np.abs(one.ratio - 1) > 1e-3)
    assert learned.metrics["clip_share"] > 0


def test_minibatches_are_updates_on_parts_of_the_step_with_their_own_totals() -> None:
    """The first of two updates is that of a step with the first half of the groups."""
    batch, plain = groups(), {"learning_rate": 0.02, "max_grad_norm": 0.0}
    full, half = (Learner(policy(), grpo_learner_settings(stage(minibatches=n, optimiser=plain))) for n in (2, 1))
    observed: list[Tensor] = []
    step = full.optimiser.step

    def watched(values: Callable[[], Mapping[str, float]]) -> Update:
        observed.append(gradient(full.policy.model).clone())
        return step(values)

    full.optimiser.step = watched  # type: ignore[assignment, method-assign]
    full.update(batch)
    half.update(batch[:2])
    assert len(observed) == 2
    assert apart(gradient(half.policy.model), observed[0]) < 1e-5


def test_more_minibatches_than_groups_skip_the_empty_ones() -> None:
    learner = Learner(policy(), grpo_learner_settings(stage(minibatches=5, optimiser=MOVING)))
    learned = learner.update(groups(2))
    assert learner.optimiser.done == 2
    assert learned.metrics["skipped_updates"] == 0


def test_the_temperature_of_the_samples_is_the_learners() -> None:
    learner = Learner(policy(), grpo_learner_settings(stage(sampling={"temperature": 0.7})))
    batch = groups(1)
    expected = logps_of(learner.policy, batch[0], 0.7)
    learned = learner.update(batch)
    for one, logps in zip(learned.stats[0], expected, strict=True):
        assert one is not None
        np.testing.assert_allclose(one.logps, logps.numpy(), atol=1e-6)


def test_kl_in_the_loss_pulls_back_to_the_reference() -> None:
    """From the reference itself the KL has no gradient; away from it, a silent group's only gradient leads back."""
    learner = Learner(
        policy(), grpo_learner_settings(stage(kl={"beta": 1.0}, optimiser={"learning_rate": 0.003, "max_grad_norm": 0.0}))
    )
    silent = [graded_group(np.random.default_rng(0), 4, [6, 5, 7], signal=False)]
    first = learner.update(silent).metrics
    assert first["kl"] == pytest.approx(0.0, abs=1e-9)
    assert first["grad_norm"] == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        for p in learner.policy.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    kls = [learner.update(silent).metrics["kl"] for _ in range(15)]
    assert kls[0] > 0.01
    assert kls[-1] < kls[0] / 3


def test_kl_inside_the_reward_is_the_sum_of_log_ratios_of_each_completion() -> None:
    learner = Learner(policy(), grpo_learner_settings(stage(objective="rloo", kl={"beta": 0.1})))
    batch = groups(2)
    reference = [logps_of(learner.policy, g) for g in batch]
    assert [sums == [0.0] * 3 for sums in learner.kl_sums([g.scored for g in batch])] == [True, True]
    with torch.no_grad():
        for p in learner.policy.model.parameters():
            p.add_(0.02)
    moved = [logps_of(learner.policy, g) for g in batch]
    expected = [[float((m - r).sum()) for m, r in zip(*pair, strict=True)] for pair in zip(moved, reference, strict=True)]
    np.testing.assert_allclose(learner.kl_sums([g.scored for g in batch]), expected, atol=1e-5)
    assert learner.update(batch).metrics["loss"] == learner.update(batch).metrics["policy_loss"], "and none in the loss"


def test_the_entropy_bonus_raises_entropy_and_a_negative_one_lowers_it() -> None:
    silent = [graded_group(np.random.default_rng(0), 4, [6, 5], signal=False)]
    after = {}
    for bonus in (1.0, -1.0):
        learner = Learner(policy(), grpo_learner_settings(stage(entropy_bonus=bonus, optimiser={"learning_rate": 3e-3})))
        values = [learner.update(silent).metrics["entropy"] for _ in range(8)]
        after[bonus] = values[-1] - values[0]
    assert after[1.0] > 0.001
    assert after[-1.0] < -0.001


def test_top_entropy_tokens_are_those_of_the_policy_before_the_update() -> None:
    """The gradient is that of the same groups with an advantage of 0 at all other tokens."""
    batch, trained = groups(), policy()
    entropies = [
        np.split(trained.pack_logps(pack)[1].detach().numpy(), np.cumsum(pack.lengths)[:-1])
        for g in batch
        for pack in [
            build_pack(
                [PrefixGroup(g.group.prompt_ids, tuple(c.token_ids for c in g.group.completions), (0, 1, 2))], trained.device
            )
        ]
    ]
    flat = np.sort(np.concatenate([e for rows in entropies for e in rows]))
    bound = flat[-round(0.3 * len(flat))]
    by_hand = [
        replace(g, advantages=tuple(a * (e >= bound) for a, e in zip(g.advantages, rows, strict=True)))
        for g, rows in zip(batch, entropies, strict=True)
    ]
    learner = Learner(trained, grpo_learner_settings(stage(entropy={"top_share": 0.3})))
    metrics = learner.update(batch).metrics
    assert metrics["entropy_dropped_share"] == pytest.approx(1 - round(0.3 * len(flat)) / len(flat))
    expected = Learner(policy(), grpo_learner_settings(stage()))
    expected.update(by_hand)
    assert apart(gradient(trained.model), gradient(expected.policy.model)) < 1e-5


def test_clip_cov_draws_other_tokens_with_another_seed() -> None:
    """The stage's seed, which a loop passes on."""
    controls = {"clip_cov": 0.1, "clip_cov_range": [-50.0, 50.0]}

    def dropped(seed: int) -> list[int]:
        settings = grpo_learner_settings(stage(entropy=controls), seed)
        marked = Learner(policy(), settings)._select_tokens(groups())
        return [int(t) for t in np.flatnonzero(~np.concatenate([k for g in marked for k in g.kept]))]

    assert dropped(0) == dropped(0)
    assert len({tuple(dropped(seed)) for seed in range(4)}) == 4
    assert loop_for({}, digits, seed=3).learner.settings.seed == 3


def test_kl_cov_and_clip_cov_choose_by_the_samplers_log_probs() -> None:
    """One token of each kind out of 44: that of the highest covariance, and one of those in the range."""
    controls = {"clip_cov": 0.01, "clip_cov_range": [0.5, 50.0], "kl_cov": 0.01, "kl_cov_weight": 3.0}
    learner = Learner(policy(), grpo_learner_settings(stage(entropy=controls, updates_per_step=2, optimiser=MOVING)))
    marked = learner._select_tokens(groups())
    advantages, logps, kept, anchored = (
        np.concatenate([np.concatenate(rows) for rows in columns])
        for columns in (
            [g.advantages for g in marked],
            [[s.completion.logps for s in g.scored.scored] for g in marked],
            [g.kept for g in marked],
            [g.anchored for g in marked],
        )
    )
    values = (advantages - advantages.mean()) * (logps - logps.mean())
    assert anchored.nonzero()[0].tolist() == [values.argmax()]
    (dropped,) = (~kept).nonzero()[0]
    assert 0.5 < values[dropped] < 50
    plain = Learner(policy(), grpo_learner_settings(stage(updates_per_step=2, optimiser=MOVING)))
    plain.update(groups())
    learner.update(groups())
    assert apart(gradient(learner.policy.model), gradient(plain.policy.model)) > 1e-3


def test_a_bonus_follows_its_target_over_groups_with_and_without_signal() -> None:
    controls = {"target": 100.0, "bonus_step": 0.1, "max_bonus": 0.25}
    learner = Learner(policy(), grpo_learner_settings(stage(entropy_bonus=0.05, entropy=controls)))
    silent = [graded_group(np.random.default_rng(0), 4, [6, 5], signal=False)]
    applied = [learner.update([*groups(), *silent]).metrics["entropy_bonus"] for _ in range(5)]
    assert applied == pytest.approx([0.0, 0.15, 0.25, 0.25, 0.25])
    assert learner.update(silent).metrics["entropy"] > 0


def test_importance_weights_scale_each_tokens_gradient_up_to_the_cap() -> None:
    """If the sampler's probability of each token is half the learner's, the weight is 2, or the cap."""
    learner = Learner(policy(), grpo_learner_settings(stage()))
    batch = groups(1)
    exact = [logps_of(learner.policy, batch[0])]
    rows = [
        replace(s, completion=replace(s.completion, logps=(logp - math.log(2)).numpy()))
        for s, logp in zip(batch[0].scored.scored, exact[0], strict=True)
    ]
    half = [replace(batch[0], scored=replace(batch[0].scored, scored=tuple(rows)))]
    result = {}
    for cap in (None, 1.5, 10.0):
        one = Learner(policy(), grpo_learner_settings(stage(importance_cap=cap)))
        metrics = one.update(half).metrics
        result[cap] = gradient(one.policy.model)
        assert metrics["mismatch_max"] == pytest.approx(math.log(2), abs=1e-4)
        assert metrics["mismatch_kl"] == pytest.approx(2 - math.log(2) - 1, abs=1e-4)
    assert apart(result[1.5], 1.5 * result[None]) < 1e-5
    assert apart(result[10.0], 2.0 * result[None]) < 1e-5


def test_a_gradient_that_is_not_finite_leaves_every_weight_and_is_counted() -> None:
    learner = Learner(policy(), grpo_learner_settings(stage(optimiser=MOVING)))
    batch = groups(2)
    broken = replace(batch[0], advantages=(np.array([math.nan] * 5, np.float32), *batch[0].advantages[1:]))
    before = snapshot(learner.policy.model)
    learned = learner.update([broken, batch[1]])
    assert torch.equal(snapshot(learner.policy.model), before)
    assert learned.metrics["skipped_updates"] == 1.0
    assert learner.update(batch).metrics["skipped_updates"] == 0.0
    assert not torch.equal(snapshot(learner.policy.model), before)


def test_what_was_not_forwarded_has_no_stats() -> None:
    rng = np.random.default_rng(0)
    loud, silent = graded_group(rng, 3, [4, 2]), graded_group(rng, 3, [4], signal=False)
    some = replace(loud, graded=(True, False))
    learned = Learner(policy(), grpo_learner_settings(stage())).update([silent, some])
    assert [[one is None for one in of_group] for of_group in learned.stats] == [[True], [False, True]]
    kept = learned.stats[1][0]
    assert kept is not None
    assert len(kept.logps) == len(kept.entropy) == len(kept.ratio) == len(kept.clipped) == 4
    assert kept.kl is None


def test_a_step_without_any_signal_updates_nothing() -> None:
    learner = Learner(policy(), grpo_learner_settings(stage(optimiser=MOVING)))
    before = snapshot(learner.policy.model)
    learned = learner.update([graded_group(np.random.default_rng(0), 3, [4, 2], signal=False)])
    assert torch.equal(snapshot(learner.policy.model), before)
    assert learned.metrics["loss"] == 0.0
    assert learner.optimiser.done == 0


def test_the_clip_of_the_recipe_takes_the_place_of_the_objectives_own() -> None:
    batch = groups()
    shares = []
    for clip in (None, {"low": 1e-6, "high": 1e-6}):
        learner = Learner(
            policy(), grpo_learner_settings(stage(updates_per_step=2, clip=clip, optimiser={"learning_rate": 1e-3}))
        )
        shares.append(learner.update(batch).metrics["clip_share"])
    assert shares[0] < 0.1
    assert shares[1] > 0.2


def test_a_reference_that_waits_on_the_cpu_is_the_same_reference() -> None:
    """Its weights replace the policy's for a forward pass, and the policy's are restored bit for bit."""
    learned = []
    for on_cpu in (False, True):
        learner = Learner(policy(), grpo_learner_settings(stage(kl={"beta": 0.1, "on_cpu": on_cpu}, optimiser=MOVING)))
        learner.update(groups())
        before = snapshot(learner.policy.model)
        with learner.reference.loaded():  # type: ignore[union-attr]
            assert not torch.equal(snapshot(learner.policy.model), before) or not on_cpu
        assert torch.equal(snapshot(learner.policy.model), before)
        learned.append(learner.update(groups(seed=1)).metrics)
    assert learned[0]["kl"] == learned[1]["kl"] > 0
    assert learned[0]["loss"] == learned[1]["loss"]


def test_completions_on_which_sampler_and_learner_disagree_are_left_out() -> None:
    """One row's sampler log-probs are off by 0.5 per token: a ratio of 1.65, outside of 1.1; the others are exact."""
    learner = Learner(policy(), grpo_learner_settings(stage()))
    batch = groups(1)
    exact = logps_of(learner.policy, batch[0])
    off = [0.0, 0.5, 0.0]
    rows = [
        replace(s, completion=replace(s.completion, logps=(logp - by).numpy()))
        for s, logp, by in zip(batch[0].scored.scored, exact, off, strict=True)
    ]
    output = replace(batch[0], scored=replace(batch[0].scored, scored=tuple(rows)))
    silent = replace(output, advantages=tuple(a * (by == 0) for a, by in zip(output.advantages, off, strict=True)))
    result = []
    for limit, group in ((1.1, output), (None, silent), (2.0, output), (None, output)):
        one = Learner(policy(), grpo_learner_settings(stage(mismatch_limit=limit)))
        metrics = one.update([group]).metrics
        result.append(gradient(one.policy.model))
        share = len(exact[1]) / sum(map(len, exact)) if limit == 1.1 else 0.0
        assert metrics.get("mismatch_masked_share", 0.0) == pytest.approx(share)
    assert apart(result[0], result[1]) < 1e-6
    assert apart(result[2], result[3]) < 1e-6
    assert apart(result[0], result[3]) > 0.01


def test_an_update_says_where_its_time_went_and_how_much_of_the_machine_it_used() -> None:
    learner = Learner(policy(), grpo_learner_settings(stage(minibatches=2, kl={"beta": 0.1}, optimiser=MOVING)))
    learned = learner.update(groups())
    assert set(learned.seconds) == {"pack", "old", "reference", "forward", "backward", "optimiser", "idle"}
    assert all(value >= 0 for value in learned.seconds.values())
    assert 0 < learned.metrics["mfu"] < 1
    assert learned.metrics["update_tflops"] > 0


def test_the_pass_that_measures_entropies_counts_as_work() -> None:
    learner = Learner(policy(), grpo_learner_settings(stage(entropy={"top_share": 0.5})))
    learned, batch = learner.update(groups()), groups()
    prefixes = [prefix_group_of(g.scored, range(len(g.scored.scored)), range(len(g.scored.scored))) for g in batch]
    expected = sum(
        model_flops(learner.policy, [build_pack([p], learner.policy.device)], forward=1, backward=0) for p in prefixes
    )
    assert learner.other_flops == pytest.approx(expected)
    assert learned.metrics["update_tflops"] * sum(learned.seconds.values()) * 1e12 > expected


def test_checkpointing_on_a_cpu_changes_no_gradient() -> None:
    result = []
    for sampling in ("off", "on"):
        one = Learner(policy(), grpo_learner_settings(stage(checkpointing=sampling)))
        one.policy.fast_backbone = None
        one.update(groups())
        result.append(gradient(one.policy.model))
    assert apart(result[1], result[0]) < 1e-6
