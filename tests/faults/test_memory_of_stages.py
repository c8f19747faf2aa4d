"""Memory that runs out in a stage's own pass: ppo's critic, trpo's curvature and search, pairs, a reward model.

Done over smaller packs, the gradient (or the step) is the same, the log says so, and later steps begin with what was enough.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oncurve.models import fisher
from oncurve.models.heads.critic import ValueModel
from oncurve.models.policy import Policy
from oncurve.recipe.schema.stages import RewardModel
from oncurve.records import GradedGroup
from oncurve.runs.step_notes import Note, collect_notes
from oncurve.training.stages import reward_model, trpo
from oncurve.training.stages.dpo import DpoLoop
from oncurve.training.stages.ppo import PpoLearner, grade_with_critic
from oncurve.training.stages.reward_model import RewardModelLoop
from oncurve.training.stages.sft import SftLoop
from oncurve.training.stages.trpo import TrpoLearner
from tests.faults.cases import SFT, recipe
from tests.training.builders import apart, graded_group, gradient, policy, snapshot
from tests.training.stages import test_dpo, test_trpo
from tests.training.stages.test_ppo import add_noise, ppo, scored_group


class Full:
    """A device on which ``owner.name`` has room for so many tokens, as ``size`` counts them: more raises, either at once or in
    the middle of the backward pass of what it gave."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        size: Callable[..., int],
        room: int,
        *,
        backward: bool = False,
    ) -> None:
        self.refused, real = 0, getattr(owner, name)

        def cramped(*arguments: Any, **named: Any) -> Any:
            if size(*arguments, **named) <= room:
                return real(*arguments, **named)
            if not backward or not torch.is_grad_enabled():
                self.refuse()
            out = real(*arguments, **named)
            (out[0] if isinstance(out, tuple) else out).register_hook(lambda _: self.refuse())
            return out

        monkeypatch.setattr("oncurve.training.learner.oom_retry.release_memory", lambda: None)
        monkeypatch.setattr("oncurve.models.self_check.attention_problem", lambda *_: None)  # it needs memory too
        monkeypatch.setattr(owner, name, cramped)

    def refuse(self) -> None:
        self.refused += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def of_pack(owner: Any, pack: Any, *more: Any) -> int:
    return int(pack.tokens)


def check_notes(notes: Sequence[Note]) -> None:
    assert notes
    assert all(n.kind == "memory" and "retrying with tokens_per_pack" in n.message for n in notes), notes


def by_critic(learner: PpoLearner) -> list[GradedGroup]:
    groups = [scored_group(seed, [9, 7, 8, 5]) for seed in range(4)]
    return [grade_with_critic(g, v, learner.ppo, None) for g, v in zip(groups, learner.values(groups), strict=True)]


def ppo_learner(options: dict[str, Any]) -> PpoLearner:
    learner = PpoLearner(policy(), ppo(**options))
    add_noise(learner.critic.head, 1)
    return learner


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("warming", [False, True], ids=["", "warming"])
@pytest.mark.parametrize(
    "options", [{}, {"critic": {"trunk": "shared"}}, {"minibatches": 2, "updates_per_step": 2}], ids=["own", "shared", "twice"]
)
def test_the_critics_gradient_is_the_same(
    options: dict[str, Any], warming: bool, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, small = ppo_learner(options), ppo_learner(options)
    full.is_warming_up = small.is_warming_up = warming
    expected = full.update(by_critic(full)).metrics
    gpu = Full(monkeypatch, ValueModel, "values", of_pack, 30, backward=backward)
    with collect_notes() as notes:
        result = small.update(by_critic(small)).metrics
    assert gpu.refused
    check_notes(notes)
    assert apart(gradient(small.critic.module), gradient(full.critic.module)) < 1e-5
    if not warming:
        assert apart(gradient(small.policy.model), gradient(full.policy.model)) < 1e-5
    assert expected.keys() == result.keys()
    for name in ("value_loss", "value_clip_share", "explained_variance", "critic_grad_norm"):
        assert result[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert len(small.value_updates) == len(full.value_updates)
    refused = gpu.refused
    small.update(by_critic(small))
    assert gpu.refused == refused, "later steps begin with what was enough"


def test_the_kl_inside_the_reward_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"kl": {"beta": 0.1, "where": "reward"}}
    full, small = ppo_learner(options), ppo_learner(options)
    groups = [scored_group(seed, [9, 7, 8, 5]) for seed in range(4)]
    for learner in (full, small):
        add_noise(learner.policy.model, 3)
    expected = full.kl_tokens(groups)
    gpu = Full(monkeypatch, Policy, "pack_hidden", of_pack, 30)
    with collect_notes() as notes:
        result = small.kl_tokens(groups)
    assert gpu.refused
    check_notes(notes)
    for of_one, of_other in zip(result, expected, strict=True):
        for a, b in zip(of_one, of_other, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
    assert any(np.abs(b).max() > 1e-3 for of_other in expected for b in of_other)


@pytest.mark.parametrize("where", ["gradient", "fisher", "search"])
def test_a_natural_gradient_step_is_the_same(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    groups = [graded_group(rng, 6, [9, 7, 8, 5], name=str(i)) for i in range(4)]
    options: dict[str, Any] = {"max_kl": 1e-3, "cg_iterations": 4}
    full, small = (TrpoLearner(policy(), test_trpo.stage(**options)) for _ in range(2))
    before = snapshot(full.policy.model)
    expected = full.update(groups).metrics
    owner = {"gradient": Policy, "fisher": fisher, "search": trpo}[where]
    name = {"gradient": "pack_hidden", "fisher": "vocab_logps", "search": "policy_distributions"}[where]
    gpu = Full(monkeypatch, owner, name, of_pack, 40)
    with collect_notes() as notes:
        result = small.update(groups).metrics
    assert gpu.refused
    check_notes(notes)
    assert apart(snapshot(small.policy.model) - before, snapshot(full.policy.model) - before) < 1e-3
    for name in ("grad_norm", "step_norm", "step_kl", "step_gain", "step_share", "loss"):
        assert result[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-7), name


def test_a_search_that_finds_no_room_leaves_the_policy_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device runs out of memory only after the policy has changed."""
    rng = np.random.default_rng(0)
    learner = TrpoLearner(policy(), test_trpo.stage(max_kl=1e-3, cg_iterations=4))
    before, calls, real = snapshot(learner.policy.model), [0], fisher.policy_distributions

    def ever_fuller(*arguments: Any) -> Tensor:
        calls[0] += 1
        if calls[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*arguments)

    monkeypatch.setattr(trpo, "policy_distributions", ever_fuller)
    with pytest.raises(Exception, match="out of memory at"):
        learner.update([graded_group(rng, 6, [9, 7, 8, 5], name="a")])
    assert torch.equal(snapshot(learner.policy.model), before)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_pairs_give_the_same_gradient(loss: str, backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"loss": loss, "batch_size": 6}
    full, small = (DpoLoop(test_dpo.stage(**settings), 0, policy(), test_dpo.PAIRS) for _ in range(2))
    expected = full.step(1).metrics
    gpu = Full(monkeypatch, Policy, "pack_hidden", of_pack, 16, backward=backward)
    with collect_notes() as notes:
        result = small.step(1).metrics
    assert gpu.refused
    check_notes(notes)
    assert apart(gradient(small.policy.model), gradient(full.policy.model)) < 1e-5
    for name in ("loss", "pair_accuracy", "pair_margin", "entropy", "grad_norm", "tokens"):
        assert result[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    refused = gpu.refused
    small.step(2)
    assert gpu.refused == refused


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_reward_models_gradient_is_the_same(backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"{i}+", "chosen": "9" * (1 + i % 5), "rejected": f"{i % 10}0"} for i in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    still = {"learning_rate": 1e-9, "max_grad_norm": 0.0}
    settings = {"data": str(tmp_path / "pairs.jsonl"), "steps": 3, "batch_size": 8, "optimiser": still, "eval_every": 1}
    full, small = (RewardModelLoop(RewardModel.model_validate(settings), 0, policy(), tmp_path) for _ in range(2))
    expected = full.step(1).metrics

    def padded(model: Any, rows: Sequence[Sequence[int]]) -> int:
        return len(rows) * max(map(len, rows))

    gpu = Full(monkeypatch, reward_model, "classify", padded, 40, backward=backward)
    with collect_notes() as notes:
        result = small.step(1).metrics
    assert gpu.refused
    check_notes([n for n in notes if n.kind != "data"])
    assert apart(gradient(small.model), gradient(full.model)) < 1e-5
    for name in ("loss", "pair_accuracy", "grad_norm", "heldout_loss", "heldout_pair_accuracy"):
        assert result[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    refused = gpu.refused
    small.step(2)
    assert gpu.refused == refused


def test_the_loss_of_examples_kept_aside_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from oncurve.training.start import task_for

    config = recipe({**SFT, "heldout_share": 0.3})
    stage: Any = config.stages[0]
    loop = SftLoop(stage, 0, task_for(config, stage), policy(alphabet="0123456789+=<>/abcdefghijklmnopqrstuvwxyz "))
    expected = loop.heldout_loss()
    gpu = Full(monkeypatch, Policy, "pack_hidden", of_pack, 200)
    with collect_notes() as notes:
        assert loop.heldout_loss() == pytest.approx(expected, rel=1e-5)
    assert gpu.refused
    check_notes(notes)
