"""The 50-line example is the same algorithm as the library: same gradient as `oncurve.algos`, and as the learner."""

from __future__ import annotations

import copy
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from oncurve.algos.advantages import grade
from oncurve.algos.objectives import OBJECTIVES, LossInputs, LossSettings
from oncurve.algos.reductions import loss_denominators
from oncurve.models.loading.load import build_tokenizer
from oncurve.models.policy import Policy
from oncurve.recipe.schema.stages import Grpo
from oncurve.records import Aspect, Completion, GradedGroup, Group, Prompt, ScoredCompletion, ScoredGroup
from oncurve.training.learner.learner import Learner
from oncurve.training.stages.grpo import grpo_learner_settings

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_in_50_lines.py"
P, Q, G, T, V, END = 3, 4, 5, 6, 12, 1


@pytest.fixture(scope="module")
def lines() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, eos_token_id=END, bos_token_id=None, **sizes))


class Batch:
    """P groups of G completions of 1 to T tokens, with rewards; the last group's are all equal."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        draw = torch.Generator().manual_seed(2)
        self.prompt_BQ = torch.randint(2, V, (P, Q), generator=draw).repeat_interleave(G, 0)
        self.completion_BT = torch.randint(2, V, (P * G, T), generator=draw)
        self.length_B = torch.randint(1, T + 1, (P * G,), generator=draw)
        self.mask_BT = torch.arange(T) < self.length_B[:, None]
        self.reward_PG = torch.randint(0, 5, (P, G), generator=draw) / 4
        self.reward_PG[-1] = 0.25

    def graded(self) -> list[GradedGroup]:
        scored = [ScoredGroup(self._group(p), tuple(self._scored(p * G + g) for g in range(G))) for p in range(P)]
        return grade(scored, baseline="mean", scale="group", eps=1e-4, mask_cut=False)

    def _group(self, p: int) -> Group:
        completions = tuple(self._completion(p * G + g) for g in range(G))
        return Group(Prompt(id=f"p{p}", text="?"), self.prompt_BQ[p * G].numpy(), completions)

    def _scored(self, b: int) -> ScoredCompletion:
        return ScoredCompletion(self._completion(b), (Aspect("reward", float(self.reward_PG.flatten()[b])),))

    def _completion(self, b: int) -> Completion:
        ids = self.completion_BT[b, : self.length_B[b]].numpy()
        zeros = np.zeros(len(ids), np.float32)
        return Completion(ids, "", "end", zeros, zeros, zeros, np.ones(len(ids), bool))


def test_it_is_at_most_50_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 50


def test_same_loss_and_gradient_as_the_objective(lines: dict[str, Any], model: LlamaForCausalLM) -> None:
    batch = Batch(model)
    old_BT = lines["logps"](model, batch.prompt_BQ, batch.completion_BT).detach()
    new_BT = (old_BT + 0.3 * torch.randn(old_BT.shape, generator=torch.Generator().manual_seed(3))).requires_grad_()
    ref_BT = old_BT + 0.5 * torch.randn(old_BT.shape, generator=torch.Generator().manual_seed(4))
    theirs = lines["grpo_loss"](new_BT, old_BT, ref_BT, batch.reward_PG, batch.mask_BT, 0.1)
    ours = _objective_loss(batch, new_BT, old_BT, ref_BT)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    gradients = [torch.autograd.grad(loss, new_BT)[0] for loss in (theirs, ours)]
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)


def _objective_loss(batch: Batch, new_BT: Tensor, old_BT: Tensor, ref_BT: Tensor) -> Tensor:
    graded = batch.graded()
    inputs = LossInputs(
        logp_new_M=new_BT[batch.mask_BT],
        logp_old_M=old_BT[batch.mask_BT],
        advantage_M=torch.from_numpy(np.concatenate([a for group in graded for a in group.advantages])),
        mask_M=torch.ones(int(batch.mask_BT.sum()), dtype=torch.bool),
        row_M=torch.arange(P * G).repeat_interleave(batch.length_B),
        rows=P * G,
        totals=loss_denominators(graded, T),
        logp_ref_M=ref_BT[batch.mask_BT],
    )
    return OBJECTIVES["grpo"].loss(inputs, LossSettings(0.1, "k3", False, 0.0)).loss


def test_same_gradient_as_the_learner(lines: dict[str, Any], model: LlamaForCausalLM) -> None:
    batch = Batch(model)
    plain = copy.deepcopy(model)
    new_BT = lines["logps"](plain, batch.prompt_BQ, batch.completion_BT)
    lines["grpo_loss"](new_BT, new_BT.detach(), new_BT.detach(), batch.reward_PG, batch.mask_BT, 0.0).backward()

    trained = copy.deepcopy(model)
    stage = Grpo.model_validate({"optimiser": {"max_grad_norm": 0.0}, "sampling": {"max_new_tokens": T}})
    Learner(Policy(trained, build_tokenizer("0123")), grpo_learner_settings(stage)).update(batch.graded())

    for (name, ours), theirs in zip(trained.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
    assert max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None) > 1e-3


@pytest.mark.slow
def test_it_learns() -> None:
    ran = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True, timeout=300)
    rewards = [float(line.split()[3]) for line in ran.stdout.splitlines()]
    assert rewards[0] < 0.15
    assert np.mean(rewards[-3:]) > 0.85
