"""The divergence from a teacher against TRL's own distillation code: the chunked loss of its DistillationTrainer, GKD's loss,
and the losses of its trainer for teachers behind a server."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oncurve.algos.divergences import support_divergence
from oncurve.models.heads import lm_head
from oncurve.models.heads.divergence_head import DivergenceSettings, TeacherStates, support_logps, token_divergences
from oncurve.models.heads.lm_head import Head, token_logps
from oncurve.objective_specs import DivergenceName

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.gkd import GKDTrainer
    from trl.experimental.server_distillation.server_distillation_trainer import ServerDistillationTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

BETAS: dict[DivergenceName, float] = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.3}
MASK_BT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])


def case(seed: int, vocabulary: int = 37) -> dict[str, Tensor]:
    """Hidden states of a student of width 6 and a teacher of width 9, their heads, and the sampled tokens."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "hidden": noise(3, 5, 6),
        "weight": noise(vocabulary, 6),
        "bias": noise(vocabulary),
        "teacher_hidden": noise(3, 5, 9),
        "teacher_weight": noise(vocabulary, 9),
        "target": torch.randint(0, vocabulary, (3, 5), generator=generator),
    }


def our_loss(values: dict[str, Tensor], name: DivergenceName, temperature: float) -> tuple[Tensor, list[Tensor]]:
    leaves = [values[k].clone().requires_grad_() for k in ("hidden", "weight", "bias")]
    teacher = TeacherStates(Head(values["teacher_weight"]), values["teacher_hidden"].flatten(0, 1))
    settings = DivergenceSettings(name, BETAS[name] if name == "jsd" else 0.5, temperature)
    head = Head(leaves[1], leaves[2])
    divergence_M, _, _ = token_divergences(head, leaves[0].flatten(0, 1), values["target"].flatten(), teacher, settings)
    loss = (divergence_M * MASK_BT.flatten()).sum() / MASK_BT.sum()
    return loss.detach(), list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", BETAS)
@pytest.mark.parametrize("chunk", [10**9, 300])
def test_the_chunked_loss_of_the_distillation_trainer(
    name: DivergenceName, temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, and gradient in hidden states, weight and bias of the head; ours in one chunk and in chunks of two tokens."""
    monkeypatch.setattr(lm_head, "CPU_CHUNK_LOGITS", chunk)
    for seed in range(3):
        values = case(seed)
        leaves = [values[k].clone().requires_grad_() for k in ("hidden", "weight", "bias")]
        loss, _, count = _chunked_divergence_loss(
            leaves[0],
            values["teacher_hidden"],
            leaves[1],
            values["teacher_weight"],
            MASK_BT,
            BETAS[name],
            student_lm_head_bias=leaves[2],
            temperature=temperature,
        )
        assert int(count) == int(MASK_BT.sum())
        ours, gradients = our_loss(values, name, temperature)
        torch.testing.assert_close(ours, loss.detach(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(gradients, list(torch.autograd.grad(loss, leaves)), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", BETAS)
def test_gkd(name: DivergenceName, temperature: float) -> None:
    values = case(1)
    leaves = [values[k].clone().requires_grad_() for k in ("hidden", "weight", "bias")]
    logits = nn.functional.linear(*leaves)
    labels = values["target"].masked_fill(MASK_BT == 0, -100)
    theirs = values["teacher_hidden"] @ values["teacher_weight"].T
    loss = GKDTrainer.generalized_jsd_loss(logits, theirs, labels, BETAS[name], temperature)
    ours, gradients = our_loss(values, name, temperature)
    torch.testing.assert_close(ours, loss.detach(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradients, list(torch.autograd.grad(loss, leaves)), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", BETAS)
def test_the_same_pass_returns_log_probs_and_entropy_with_their_gradients(name: DivergenceName) -> None:
    """What the policy gradient reads is what the plain head computes, also with a soft cap, a scale and several chunks."""
    values = case(2)
    for head_options in ({}, {"scale": 0.5, "softcap": 3.0}):
        results = []
        for is_plain in (True, False):
            leaves = [values[k].double().requires_grad_() for k in ("hidden", "weight")]
            head, hidden, target = Head(leaves[1], **head_options), leaves[0].flatten(0, 1), values["target"].flatten()  # type: ignore[arg-type]
            if is_plain:
                logp, entropy = token_logps(head, hidden, target, 0.8)
            else:
                teacher = TeacherStates(
                    Head(values["teacher_weight"].double()), values["teacher_hidden"].flatten(0, 1).double()
                )
                _, logp, entropy = token_divergences(head, hidden, target, teacher, DivergenceSettings(name, 0.3, 0.8))
            weights = torch.arange(15).double()
            gradients = torch.autograd.grad((weights * logp).sum() + (weights.flip(0) * entropy).sum(), leaves)
            results.append([logp.detach(), entropy.detach(), *gradients])
        torch.testing.assert_close(*results, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", BETAS)
def test_gradients_by_finite_differences_and_a_padded_vocabulary(name: DivergenceName) -> None:
    """The teacher's head has three rows more, and the policy's a soft cap: gradcheck in float64."""
    values = {k: v.double() if v.is_floating_point() else v for k, v in case(3, vocabulary=11).items()}
    wide = torch.cat([values["teacher_weight"], torch.ones(3, 9).double()])
    teacher = TeacherStates(Head(wide), values["teacher_hidden"].flatten(0, 1))

    def divergence(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        head = Head(weight, bias, 0.7, 4.0)
        settings = DivergenceSettings(name, 0.3, 0.9)
        return token_divergences(head, hidden.flatten(0, 1), values["target"].flatten(), teacher, settings)[0]

    leaves = tuple(values[k].requires_grad_() for k in ("hidden", "weight", "bias"))
    assert torch.autograd.gradcheck(divergence, leaves)
    narrow = TeacherStates(Head(values["teacher_weight"]), values["teacher_hidden"].flatten(0, 1))
    settings = DivergenceSettings(name, 0.3, 0.9)
    head, hidden = Head(leaves[1], leaves[2], 0.7, 4.0), leaves[0].flatten(0, 1)
    both = [token_divergences(head, hidden, values["target"].flatten(), t, settings)[0] for t in (teacher, narrow)]
    torch.testing.assert_close(*both)


def server_trainer(beta: float) -> Any:
    trainer: Any = object.__new__(ServerDistillationTrainer)
    trainer.beta, trainer.loss_add_tail, trainer.reverse_kl_top_1_mode = beta, True, "sampled"
    trainer.accelerator = SimpleNamespace(num_processes=1)
    return trainer


@pytest.mark.parametrize("k", [1, 5])
def test_a_servers_most_likely_tokens_for_the_forward_kl(k: int) -> None:
    values = case(4)
    leaf = values["hidden"].clone().requires_grad_()
    student = (leaf @ values["weight"].T).log_softmax(-1)
    teacher = (values["teacher_hidden"] @ values["teacher_weight"].T).log_softmax(-1)
    top = teacher.topk(k)
    result = {"topk_logprobs": top.values, "topk_token_ids": top.indices}
    labels = values["target"].masked_fill(MASK_BT == 0, -100)
    theirs = server_trainer(0.0)._compute_server_forward_kl_loss(result, student, labels)
    ours_M3, _, _ = support_logps(
        Head(values["weight"]), leaf.flatten(0, 1), values["target"].flatten(), top.indices.flatten(0, 1), 1.0
    )
    every = torch.ones_like(ours_M3, dtype=torch.bool)
    divergence_M = support_divergence(ours_M3, top.values.flatten(0, 1), every, "forward_kl", 0.5)
    ours = (divergence_M * MASK_BT.flatten()).sum() / MASK_BT.sum()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    gradients = [torch.autograd.grad(loss, leaf)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["reverse_kl", "jsd"])
def test_a_servers_sampled_and_most_likely_token(name: DivergenceName) -> None:
    """TRL's support: the sampled token for the reverse KL, and the teacher's first one too for jsd."""
    values = case(5)
    leaf = values["hidden"].clone().requires_grad_()
    student = (leaf @ values["weight"].T).log_softmax(-1)
    teacher = (values["teacher_hidden"] @ values["teacher_weight"].T).log_softmax(-1)
    values["target"][0, 0] = teacher[0, 0].argmax()  # in one place the two are the same token
    top, target = teacher.topk(1), values["target"]
    actual = teacher.gather(-1, target[..., None])[..., 0]
    result = {"topk_logprobs": top.values, "topk_token_ids": top.indices, "actual_logprobs": actual}
    labels = target.masked_fill(MASK_BT == 0, -100)
    theirs = server_trainer(BETAS[name])._compute_server_sparse_top_1_divergence_loss(result, student, target, labels)
    ids = torch.cat([top.indices, target[..., None]], -1).flatten(0, 1)
    logps = torch.cat([top.values, actual[..., None]], -1).flatten(0, 1)
    if name == "jsd":
        valid = torch.stack([torch.ones(15, dtype=torch.bool), ids[:, 0] != ids[:, 1]], 1)
    else:
        valid = torch.tensor([[False, True]] * 15)
    ours_M2, _, _ = support_logps(Head(values["weight"]), leaf.flatten(0, 1), target.flatten(), ids, 1.0)
    divergence_M = support_divergence(ours_M2, logps, valid, name, 0.3)
    ours = (divergence_M * MASK_BT.flatten()).sum() / MASK_BT.sum()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    gradients = [torch.autograd.grad(loss, leaf)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)
