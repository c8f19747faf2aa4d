"""Training on truncated samples: the learner's log-probs are those of the distribution that was sampled."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.token_sampling import truncate
from oncurve.models.heads import lm_head
from oncurve.models.heads.lm_head import Head, find_kept_tokens, kept_tokens
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Completion, Group, StepReport
from oncurve.training.learner.learner import log_mass_of
from tests.training.builders import SMOOTH, apart, digits, gradient, loop_for

TRUNCATED = {"top_p": {"top_p": 0.8}, "top_k": {"top_k": 3}, "min_p": {"min_p": 0.6}}
HEATED = {"max_new_tokens": 8, "temperature": 1.3}
STILL = {"learning_rate": 1e-9, "max_grad_norm": 0.0}


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.floats(0.5, 6.0), st.floats(0.05, 0.99), st.sampled_from([0, 1, 5, 40]), st.floats(0.0, 0.5))
def test_the_kept_tokens_follow_from_their_mass(seed: int, spread: float, top_p: float, top_k: int, min_p: float) -> None:
    """Up to tokens of less probability than the rounding of the mass."""
    torch.manual_seed(seed)
    logp = (spread * torch.randn(4, 200)).log_softmax(-1)
    truncated = truncate(logp, Sampling(top_p=top_p, top_k=top_k, min_p=min_p))
    kept = truncated.isfinite()
    log_mass = (logp.masked_fill(~kept, -torch.inf)).logsumexp(-1)
    noisy = (logp + 1e-6 * torch.randn_like(logp)).log_softmax(-1)
    found = kept_tokens(noisy, logp.argmax(-1), log_mass.clamp(max=0.0))
    wrong = (found != kept) & (log_mass < 0)[:, None]
    assert float((logp.exp() * wrong).sum(-1).max()) < 1e-5


def test_a_token_outside_of_the_mass_is_kept_if_it_was_sampled() -> None:
    logp = torch.tensor([[0.6, 0.3, 0.1]]).log()
    assert kept_tokens(logp, torch.tensor([2]), torch.tensor([0.6]).log()).tolist() == [[True, False, True]]
    assert kept_tokens(logp, torch.tensor([2]), torch.tensor([0.0])).tolist() == [[True, True, True]]


def truncated_logps(plain: torch.nn.Module, prompt: np.ndarray, completion: Completion, sampling: Sampling) -> Tensor:
    """By transformers' own forward: each token's log-prob after temperature and truncation, with a gradient."""
    ids = torch.from_numpy(np.concatenate((prompt, completion.token_ids)))[None]
    logits: Tensor = plain(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    logp_TV = (logits / sampling.temperature).log_softmax(-1)
    dropped = ~truncate(logp_TV.detach(), sampling).isfinite()
    renormalised: Tensor = logp_TV.masked_fill(dropped, -torch.inf).log_softmax(-1)
    return renormalised.gather(1, torch.from_numpy(completion.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("truncation", TRUNCATED.values(), ids=TRUNCATED)
@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_gradient_is_that_of_the_truncated_policy(truncation: dict[str, Any], minibatches: int) -> None:
    """Of the formula in plain transformers; without truncation in it, the gradient would be another one."""
    options = {"sampling": {**HEATED, **truncation}, "optimiser": STILL, "minibatches": minibatches}
    loop = loop_for(options, digits)
    plain = copy.deepcopy(loop.engine.policy.model)
    plain.set_attn_implementation("eager")
    report = loop.step(1)
    chosen = report.groups if minibatches == 1 else report.groups[2:]  # the gradient is that of the last update
    gradients = []
    for sampling in (loop.stage.sampling, Sampling(temperature=1.3)):
        loss = torch.zeros(())
        for graded in chosen:
            for c, advantages in zip(graded.group.completions, graded.advantages, strict=True):
                logp_T = truncated_logps(plain, graded.group.prompt_ids, c, sampling)
                loss = loss - ((logp_T - logp_T.detach()).exp() * torch.from_numpy(advantages)).mean() / (4 * len(chosen))
        plain.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients.append(gradient(plain).clone())
    ours = gradient(loop.engine.policy.model)
    assert apart(ours, gradients[0]) < 1e-4
    assert apart(ours, gradients[1]) > 0.01


class SilentEngine(NativeEngine):
    """As vLLM: one log-prob per token, that of the untruncated distribution."""

    shares_weights = False

    def sample(self, *arguments: Any, **named: Any) -> list[Group]:
        def without(completion: Completion) -> Completion:
            return replace(completion, sampled_logps=np.full_like(completion.logps, np.nan))

        groups = super().sample(*arguments, **named)
        return [replace(group, completions=tuple(map(without, group.completions))) for group in groups]


@pytest.mark.parametrize("truncation", TRUNCATED.values(), ids=TRUNCATED)
@pytest.mark.parametrize("minibatches", [1, 2])
def test_what_a_sampler_does_not_report_is_found_by_the_learner(truncation: dict[str, Any], minibatches: int) -> None:
    """The gradient is that with a sampler that reports it, and so are ratios and weights."""
    gradients, metrics = [], []
    for kind in (NativeEngine, SilentEngine):
        options = {"sampling": {"max_new_tokens": 8, **truncation}, "optimiser": STILL, "minibatches": minibatches}
        loop = loop_for({**options, "importance_cap": 0.9, "kl": {"beta": 0.1}}, digits)
        loop.engine = kind(loop.engine.policy, loop.engine.settings)
        metrics.append(loop.step(1).metrics)
        gradients.append(gradient(loop.engine.policy.model).clone())
    assert apart(gradients[1], gradients[0]) < 1e-4
    for name in ("mismatch_max", "mismatch_kl", "entropy", "ratio_mean", "kl"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], abs=1e-5)


def test_the_learner_truncates_in_the_order_of_vllm() -> None:
    """min-p leaves 0.5, 0.3 and 0.1; of these, top-p = 0.85 keeps two (0.8 / 0.9), and of all tokens it would keep three."""
    logp = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]]).log()
    loop = loop_for({"sampling": {"top_p": 0.85, "min_p": 0.15}}, digits)
    assert loop.learner._truncate(logp).isfinite().tolist() == [[True, True, False, False, False]]
    assert truncate(logp, loop.stage.sampling).isfinite().tolist() == [[True, True, True, False, False]]


def kept_under(model: torch.nn.Module, prompt: np.ndarray, completion: Completion, sampling: Sampling) -> Tensor:
    """Which tokens the sampler keeps at each position, [T, V]."""
    ids = torch.from_numpy(np.concatenate((prompt, completion.token_ids)))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return truncate((logits / sampling.temperature).log_softmax(-1), sampling).isfinite()


def logps_over(
    model: torch.nn.Module, prompt: np.ndarray, completion: Completion, sampling: Sampling, kept_TV: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-prob over the kept tokens, and over all) of each token."""
    ids = torch.from_numpy(np.concatenate((prompt, completion.token_ids)))[None]
    logp_TV = (model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / sampling.temperature).log_softmax(-1)
    over_kept_TV = logp_TV.masked_fill(~kept_TV, -torch.inf).log_softmax(-1)
    targets = torch.from_numpy(completion.token_ids)[:, None]
    return over_kept_TV.gather(1, targets)[:, 0], logp_TV.gather(1, targets)[:, 0]


@pytest.mark.parametrize("truncation", TRUNCATED.values(), ids=TRUNCATED)
@pytest.mark.parametrize("tokens_per_pack", [20, 4096])
def test_later_updates_keep_the_tokens_that_were_sampled_from(truncation: dict[str, Any], tokens_per_pack: int) -> None:
    """The second update's gradient is that of the formula, with the set of the weights that sampled, and the KL is that of
    the untruncated models."""
    beta = 0.5
    options = {
        "sampling": {**HEATED, **truncation}, "optimiser": {**SMOOTH, "learning_rate": 1.0}, "kl": {"beta": beta},
        "no_signal": "keep", "tokens_per_pack": tokens_per_pack, "clip": {"low": 0.9, "high": 9.0},
    }  # fmt: skip
    once, twice = (loop_for({**options, "updates_per_step": updates}, digits) for updates in (1, 2))
    start = copy.deepcopy(once.engine.policy.model)
    once.step(1)
    report = twice.step(1)
    moved = copy.deepcopy(once.engine.policy.model)
    for model in (start, moved):
        model.set_attn_implementation("eager")
    loss, changed = torch.zeros(()), 0.0
    for graded in report.groups:
        for c, advantages in zip(graded.group.completions, graded.advantages, strict=True):
            where = (graded.group.prompt_ids, c, twice.stage.sampling)
            kept_TV = kept_under(start, *where)
            with torch.no_grad():
                old_T, reference_T = logps_over(start, *where, kept_TV)
            new_T, plain_T = logps_over(moved, *where, kept_TV)
            changed = max(changed, float((kept_TV != kept_under(moved, *where)).sum(1).max()))
            gap_T = reference_T - plain_T
            kl_T = gap_T.exp() - gap_T - 1
            ratio_T = (new_T - old_T).exp()
            loss = loss + (-ratio_T * torch.from_numpy(advantages) + beta * kl_T).mean() / 16
    assert changed > 0, "the weights that have moved would keep other tokens"
    moved.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    assert apart(gradient(twice.engine.policy.model), gradient(moved)) < 1e-4
    assert report.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)


@pytest.mark.parametrize("objective", ["grpo", "gspo", "grpo_sequence"])
def test_repacking_keeps_the_truncation(objective: str) -> None:
    """As after an out-of-memory error: the same completions in smaller packs have the same loss."""
    options = {"sampling": {**HEATED, "top_p": 0.8}, "optimiser": STILL, "no_signal": "keep", "updates_per_step": 2}
    loop = loop_for({**options, "objective": objective}, digits)
    groups = loop.grade(loop.score(loop.sample(1)))
    learner, totals = loop.learner, loop.learner._loss_denominators(groups)
    (batch,) = learner._build_fitting_batches(groups, [range(len(groups))])
    smaller = learner.repack(groups, batch, 24)
    assert len(smaller) > len(batch)
    losses, gradients = [], []
    for packs in (batch, smaller):
        learner.optimiser.zero_grad()
        results = [learner._forward_backward(micro, totals)[1] for micro in packs]
        losses.append(float(torch.stack([outputs.loss.detach() for outputs in results]).sum()))
        gradients.append(gradient(learner.policy.model))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert apart(gradients[0], gradients[1]) < 1e-4


def test_the_mean_ratio_is_1_over_the_kept_tokens_whatever_the_weights() -> None:
    """In float64, over every token that could have been sampled: E over π_old of π_new/π_old."""
    torch.manual_seed(0)
    tokens, width, vocabulary = 6, 8, 50
    hidden, moved = torch.randn(tokens, width, dtype=torch.float64), torch.randn(tokens, width, dtype=torch.float64)
    head = Head(2 * torch.randn(vocabulary, width, dtype=torch.float64))
    for sampling in (Sampling(top_p=0.9), Sampling(top_k=7), Sampling(min_p=0.05)):
        logp_MV = head.logits(hidden).log_softmax(-1)
        kept_MV = truncate(logp_MV, sampling).isfinite()
        log_mass_M = logp_MV.masked_fill(~kept_MV, -torch.inf).logsumexp(-1)
        mean_M = torch.zeros(tokens, dtype=torch.float64)
        for target in range(vocabulary):
            target_M = torch.full((tokens,), target)
            truncation = find_kept_tokens(head, hidden, target_M, 1.0, log_mass_M, lambda logp: logp)
            assert truncation.count_M is not None
            old_M, new_M = (lm_head.truncated_logps(head, states, target_M, 1.0, truncation)[0] for states in (hidden, moved))
            mean_M += torch.where(kept_MV[:, target], old_M.exp() * (new_M - old_M).exp(), 0.0)
        torch.testing.assert_close(mean_M, torch.ones_like(mean_M), rtol=1e-10, atol=0)


def learner_ratios(report: StepReport) -> np.ndarray:
    """π_learner/π_sampler of every token that was forwarded, both after truncation."""
    rows = [
        np.exp(stats.logps - completion.sampled_logps)
        for graded, row in zip(report.groups, report.stats, strict=True)
        for completion, stats in zip(graded.group.completions, row, strict=True)
        if stats is not None
    ]
    return np.concatenate(rows)


def test_learner_and_sampler_agree_on_truncated_samples() -> None:
    """The mean ratio is 1; of the untruncated learner over the truncated sampler it would be the mass that was kept."""
    loop = loop_for({"sampling": {**HEATED, "top_p": 0.8}, "optimiser": STILL, "no_signal": "keep"}, digits)
    report = loop.step(1)
    ratios = learner_ratios(report)
    assert abs(float(ratios.mean()) - 1) < 1e-5
    assert report.metrics["mismatch_max"] < 1e-4
    completions = [c for graded in report.groups for c in graded.group.completions]
    uncorrected = np.exp(np.concatenate([c.logps - c.sampled_logps for c in completions]))
    assert 0.75 < uncorrected.mean() < 0.95


def test_the_kl_compares_what_both_models_give_before_truncation() -> None:
    """A reference that equals the policy has no KL, whatever is truncated."""
    loop = loop_for({"sampling": {**HEATED, "top_p": 0.8}, "optimiser": STILL, "kl": {"beta": 0.1}}, digits)
    assert loop.step(1).metrics["kl"] < 1e-6


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_gradient_of_the_kl_is_that_of_the_log_prob_before_truncation(top_k: int) -> None:
    """Without a signal, the gradient is that of the KL alone. A token that was sampled from one has a log-prob of 0 whatever
    the weights, and its KL still pulls."""
    kl = {"beta": 1.0, "estimator": "k2"}
    loop = loop_for({"sampling": {**HEATED, "top_k": top_k}, "optimiser": STILL, "kl": kl}, lambda text: 0.0)
    reference = copy.deepcopy(loop.engine.policy.model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in loop.engine.policy.model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    plain = copy.deepcopy(loop.engine.policy.model)
    for model in (reference, plain):
        model.set_attn_implementation("eager")
    report = loop.step(1)
    loss = torch.zeros(())
    for graded in report.groups:
        for c in graded.group.completions:
            everything = Sampling(temperature=1.3)
            ours_T, theirs_T = (truncated_logps(m, graded.group.prompt_ids, c, everything) for m in (plain, reference))
            loss = loss + 0.5 * (ours_T - theirs_T.detach()).square().mean() / (4 * len(report.groups))
    plain.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    assert report.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert apart(gradient(loop.engine.policy.model), gradient(plain)) < 1e-4


def test_an_agent_bans_end_tokens_at_the_start_of_each_turn() -> None:
    """A turn of 3 tokens, 2 tokens of the environment, a turn of 3, and a second sequence of 2: the first two of each turn."""
    logps, mask = np.full(10, -2.0, np.float32), np.array([1, 1, 1, 0, 0, 1, 1, 1, 1, 1], bool)
    sampled = np.where(mask, logps + 0.5, np.nan).astype(np.float32)
    contexts = ((8, np.arange(4)),)
    one = Completion(np.arange(10), "", "end", logps, sampled, logps, mask, contexts=contexts)
    assert log_mass_of(one, 2).tolist() == [0, 0, -0.5, 0, 0, -0.5, -0.5, -0.5, -0.5, -0.5]
    assert log_mass_of(one, 2, by_turn=True).tolist() == [0, 0, -0.5, 0, 0, 0, 0, -0.5, 0, 0]


def test_banned_end_tokens_do_not_count_as_truncated() -> None:
    sampling = {**HEATED, "top_p": 0.8, "min_new_tokens": 8}
    loop = loop_for({"sampling": sampling, "optimiser": STILL, "no_signal": "keep"}, digits)
    assert loop.step(1).metrics["mismatch_max"] < 1e-4
