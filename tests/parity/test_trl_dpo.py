"""DPO and IPO against TRL's own loss: values, and the gradient through a complete model. SimPO against TRL's CPO trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl.trainer.dpo_trainer import DPOTrainer

from oncurve.algos.preference_losses import PAIR_LOSSES, Pairs
from oncurve.recipe.schema.stages import Dpo
from oncurve.training.stages.dpo import DpoLoop
from tests.parity.trl_oracle import _alone, _bare
from tests.training.builders import apart, gradient, policy
from tests.training.stages.test_dpo import PAIRS, STILL
from tests.training.stages.test_ppo import doubled

FIELDS = {
    "ld_alpha": None,
    "precompute_ref_logps": True,
    "f_divergence_type": "reverse_kl",
    "loss_weights": [1.0],
    "label_smoothing": 0.0,
    "use_weighting": False,
    "_total_train_tokens": 0,
    "_tp_size": 1,
}
TRL_NAMES = {"dpo": "sigmoid", "ipo": "ipo"}


def trl_loss(model: Any, inputs: dict[str, Tensor], loss: str, beta: float) -> Tensor:
    """TRL's _compute_loss; ``model`` gives the log-probs of the labels, as its fused LM head would."""
    trainer = _bare(DPOTrainer, {}, {**FIELDS, "loss_types": [TRL_NAMES[loss]], "beta": beta})
    trainer.accelerator.gather_for_metrics = _alone
    value: Tensor = trainer._compute_loss(model, inputs, False)
    return value


def outputs(log_probs: Tensor) -> SimpleNamespace:
    zeros = torch.zeros_like(log_probs)
    return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


@pytest.mark.parametrize("loss", TRL_NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_slope_of_random_pairs(loss: Any, seed: int) -> None:
    """Four pairs of one to nine tokens each, β from 0.05 to 2."""
    dice = torch.Generator().manual_seed(seed)
    mask = torch.zeros(8, 10, dtype=torch.int64)
    for row in mask:
        row[1 : 2 + int(torch.randint(0, 9, (1,), generator=dice))] = 1
    logps = (-2 * torch.rand(8, 9, generator=dice, dtype=torch.float64)).requires_grad_()
    reference = -10 * torch.rand(8, generator=dice, dtype=torch.float64)
    beta = (0.05, 0.1, 0.5, 1.0, 2.0)[seed]
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    inputs |= {"ref_chosen_logps": reference[:4], "ref_rejected_logps": reference[4:]}
    theirs = trl_loss(lambda **_: outputs(logps * mask[:, 1:]), inputs, loss, beta)
    sums, lengths = (logps * mask[:, 1:]).sum(1), mask.sum(1).double()
    ours = PAIR_LOSSES[loss](Pairs(sums[:4], sums[4:], lengths[:4], lengths[4:], reference[:4], reference[4:]), beta, 0.0)
    assert float(ours.detach().mean()) == pytest.approx(float(theirs.detach()), rel=1e-10)
    (expected,), (gradient,) = (torch.autograd.grad(x, logps) for x in (theirs, ours.mean()))
    assert torch.allclose(gradient, expected, atol=1e-12)


@pytest.mark.parametrize("loss", TRL_NAMES)
def test_the_gradient_of_a_complete_step_is_trls(loss: Any) -> None:
    """Our packs in float32 against TRL's padded batch in float64, with a reference that is not the policy."""
    loop = DpoLoop(Dpo(pairs="-", loss=loss, batch_size=6, optimiser=STILL), 0, policy(), PAIRS)  # type: ignore[arg-type]
    loop.reference = -5 - torch.arange(12, dtype=torch.float64).view(6, 2)
    metrics = loop.step(1).metrics
    model = doubled(loop.policy.model)
    rows = [(b.prompt_ids, b.completion_ids[side]) for side in (0, 1) for b in loop.rows]
    width = max(len(p) + len(c) for p, c in rows)
    ids = torch.tensor([[*p, *c, *[0] * (width - len(p) - len(c))] for p, c in rows])
    mask = torch.tensor([[0] * len(p) + [1] * len(c) + [0] * (width - len(p) - len(c)) for p, c in rows])

    def forward(**_: Any) -> SimpleNamespace:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return outputs(logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0] * mask[:, 1:])

    inputs = {"input_ids": ids, "attention_mask": (mask >= 0).long(), "completion_mask": mask}
    inputs |= {"ref_chosen_logps": loop.reference[:, 0], "ref_rejected_logps": loop.reference[:, 1]}
    theirs = trl_loss(forward, inputs, loss, loop.stage.beta)
    theirs.backward()  # type: ignore[no-untyped-call]
    assert metrics["loss"] == pytest.approx(float(theirs.detach()), rel=1e-5)
    assert apart(gradient(loop.policy.model).double(), gradient(model)) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_simpo_is_trls() -> None:
    from trl.experimental.cpo import CPOTrainer

    dice = np.random.default_rng(0)
    chosen, rejected = (torch.from_numpy(-10 * dice.random(5)) for _ in range(2))
    lengths = [torch.from_numpy(dice.integers(1, 9, 5).astype(np.float64)) for _ in range(2)]
    fields = {"alpha": 0.0, "loss_type": "simpo", "simpo_gamma": 0.7, "beta": 2.5, "label_smoothing": 0.0}
    trainer = _bare(CPOTrainer, {}, fields)
    theirs, _, _ = trainer.cpo_loss(chosen / lengths[0], rejected / lengths[1])
    ours = PAIR_LOSSES["simpo"](Pairs(chosen, rejected, lengths[0], lengths[1]), 2.5, 0.7)
    assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-12)
