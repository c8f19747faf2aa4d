"""TRPO: Fisher products and the complete step against a dense solve in float64; the KL bound; what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oncurve.errors import ModelError, RecipeError
from oncurve.models.fisher import Fisher, flatten, vocab_logps
from oncurve.models.loading.load import load_policy
from oncurve.models.policy import Policy
from oncurve.plan.memory import fisher_groups
from oncurve.recipe.schema.model import Model, TinyModel
from oncurve.recipe.schema.stages import Trpo
from oncurve.records import GradedGroup
from oncurve.runs.folder import RunFolder
from oncurve.training.stages import trpo
from oncurve.training.stages.trpo import TrpoLearner, parameters_that_fit
from oncurve.training.start import begin, resume
from tests.training.builders import apart, graded_group, policy, recipe, snapshot
from tests.training.test_trainer import StopAfter, fingerprint

MINUTE = TinyModel(layers=1, width=8, heads=2, kv_heads=1, head_size=4, mlp_width=8, context=64)


def minute_policy() -> Policy:
    """About 500 weights, in float64: few enough for a Fisher matrix in full."""
    own = load_policy(Model(tiny=MINUTE), alphabet="0123456789+=", seed=0)
    own.model.double()
    own.fast_backbone = None  # its tables are in float32
    return own


def stage(**options: Any) -> Trpo:
    plain = {"steps": 4, "prompts_per_step": 4, "group_size": 4, "fisher_share": 1.0, "sampling": {"temperature": 0.8}}
    return Trpo.model_validate({**plain, **options})


def groups(seed: int = 0, count: int = 3) -> list[GradedGroup]:
    rng = np.random.default_rng(seed)
    return [graded_group(rng, 3 + i, [5, 2 + i, 4], masked=True, name=f"p{i}") for i in range(count)]


def dense(own: Policy, batch: Sequence[Any], tokens: int) -> tuple[Tensor, Tensor]:
    """(F, ∇L) from the Jacobian of every log-prob of every token: F = mean Σ_y π(y) ∇log π(y) ∇log π(y)ᵀ."""
    parameters = list(own.trainable.values())
    size = sum(p.numel() for p in parameters)
    fisher, uphill = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for micro in batch:
        logps = vocab_logps(own, micro.pack, 0.8)
        for m in torch.nonzero(micro.mask_M)[:, 0].tolist():
            rows = [flatten(torch.autograd.grad(logp, parameters, retain_graph=True)) for logp in logps[m]]
            jacobian = torch.stack(rows)
            fisher += jacobian.T @ (logps[m].detach().exp()[:, None] * jacobian) / tokens
            uphill += float(micro.advantage_M[m]) * jacobian[int(micro.pack.target_M[m])] / tokens
    return fisher, uphill


def test_products_and_the_step_agree_with_a_dense_solve() -> None:
    own = minute_policy()
    learner = TrpoLearner(own, stage(cg_iterations=400, damping=0.05, max_kl=1e-6))
    graded = groups()
    batch = list(learner._build_micro_batches(graded, range(len(graded))))
    totals = learner._loss_denominators(graded)
    fisher, uphill = dense(own, batch, totals.tokens)
    products = Fisher(own, learner._fisher_packs(graded), 0.8)
    for seed in range(3):
        v = torch.randn(len(uphill), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert apart(products.product(v), fisher @ v) < 1e-6
    damped = fisher + 0.05 * torch.eye(len(uphill), dtype=torch.float64)
    x = torch.linalg.solve(damped, uphill)
    expected = x * (2e-6 / (x @ damped @ x)) ** 0.5
    before = snapshot(own.model)
    metrics = learner.update(graded).metrics
    assert metrics["step_share"] == 1.0
    assert apart(snapshot(own.model) - before, expected) < 1e-4
    assert metrics["step_gain"] == pytest.approx(float(uphill @ expected), rel=1e-2)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_kl", [1e-3, 0.3])
def test_the_kl_is_within_its_bound_and_the_surrogate_rises(seed: int, max_kl: float) -> None:
    """The KL is recomputed over complete distributions. At 0.3 the quadratic model is inaccurate: the search shortens."""
    own = policy(seed)
    learner = TrpoLearner(own, stage(max_kl=max_kl, damping=1e-3))
    graded = groups(seed)
    batch = list(learner._build_micro_batches(graded, range(len(graded))))
    with torch.no_grad():
        old = [vocab_logps(own, micro.pack, 0.8) for micro in batch]
    metrics = learner.update(graded).metrics
    with torch.no_grad():
        new = [vocab_logps(own, micro.pack, 0.8) for micro in batch]
    kls = [torch.nn.functional.kl_div(n, o, log_target=True, reduction="none").sum(-1) for n, o in zip(new, old, strict=True)]
    kl = torch.cat([k[micro.mask_M] for k, micro in zip(kls, batch, strict=True)]).double().mean()
    assert metrics["step_share"] > 0
    assert 0 < float(kl) <= max_kl
    assert float(kl) == pytest.approx(metrics["step_kl"], rel=1e-3)
    assert metrics["step_gain"] > 0


def test_packs_do_not_matter() -> None:
    result = []
    for budget in (6, 10_000):
        learner = TrpoLearner(policy(), stage(tokens_per_pack=budget, cg_iterations=5))
        before = snapshot(learner.policy.model)
        learner.update(groups())
        result.append(snapshot(learner.policy.model) - before)
    assert apart(result[0], result[1]) < 1e-3


def test_without_a_signal_or_a_good_step_no_weight_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """No advantage, no gradient. If every step is worse, the line search gives up and restores the weights bit for bit."""
    learner = TrpoLearner(policy(), stage())
    before = snapshot(learner.policy.model)
    silent = [graded_group(np.random.default_rng(0), 4, [3, 5], signal=False)]
    assert learner.update(silent).metrics["step_share"] == 0
    assert torch.equal(snapshot(learner.policy.model), before)
    monkeypatch.setattr(learner, "_measure_step", lambda *_: {"gain": -100.0, "kl": 0.0})
    observed = learner.update(groups()).metrics
    assert (observed["step_share"], observed["line_search_tries"], observed["skipped_updates"]) == (0, 11, 1)
    assert torch.equal(snapshot(learner.policy.model), before)


def test_the_fisher_matrix_is_measured_on_a_share_of_the_groups() -> None:
    learner = TrpoLearner(policy(), stage(fisher_share=0.5))
    result = learner._fisher_packs(groups(count=4))
    assert sum(pack.rows for pack, _ in result) == 6
    assert sum(float(weight.sum()) for _, weight in result) == pytest.approx(1.0)
    learner = TrpoLearner(policy(), stage(fisher_share=0.6))
    assert sum(pack.rows for pack, _ in learner._fisher_packs(groups(count=5))) == 9, "3 of 5 groups of 3"


def test_the_measured_groups_are_a_share_of_all_and_evenly_spaced() -> None:
    """Shares of 1/k take every k-th group."""
    for k in range(1, 12):
        for count in range(1, 50):
            assert fisher_groups(count, 1 / k) == list(range(0, count, k))
    assert fisher_groups(16, 0.1) == [0, 10]
    assert fisher_groups(10, 0.6) == [0, 1, 3, 5, 6, 8]
    assert fisher_groups(10, 0.4) == [0, 2, 5, 7]
    assert fisher_groups(10, 0.01) == [0]


TRPO_RECIPE = ("grpo.type=trpo", "trpo.save_every=2", "trpo.fisher_share=0.5")


def bare(*sets: str) -> Any:
    """The small recipe with a default optimiser, which a trpo stage requires."""
    return recipe("grpo.optimiser={}", *sets)


def test_a_run_that_crashed_resumes_to_the_same_bits(tmp_path: Path) -> None:
    config = bare(*TRPO_RECIPE)
    with pytest.raises(KeyboardInterrupt):
        begin(config, out=tmp_path / "crashed", listeners=[StopAfter("trpo", 3)])
    run = RunFolder(tmp_path / "crashed")
    resume(run)
    assert fingerprint(run) == fingerprint(begin(config, out=tmp_path / "whole"))


def test_a_model_that_is_too_large_is_refused_with_how_large_would_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is trained: the sft stage before it has not started."""
    config = bare(*TRPO_RECIPE)
    own = stage(prompts_per_step=3, group_size=4, fisher_share=0.5, sampling={"max_new_tokens": 8})
    tables = 4 * 30 * (96 + 8 * 64)  # curvature on 2 of 3 groups
    assert parameters_that_fit(tables + 44 * 1000, own, 30) == 1000
    assert parameters_that_fit(10, own, 30) == 0
    monkeypatch.setattr(trpo, "free_memory", lambda device: 100_000)
    with pytest.raises(ModelError, match=r"trpo on a model of [\d,]+ trained parameters") as raised:
        begin(config, out=tmp_path / "large")
    assert "would fit" in raised.value.because
    assert not (tmp_path / "large").exists()


def test_what_trpo_can_not_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="max_kl"):
        recipe("grpo.type=trpo")
    with pytest.raises(RecipeError, match="16-bit numbers have at most three digits"):
        begin(bare("model.dtype=bfloat16", *TRPO_RECIPE), out=tmp_path / "half")
