"""The page's formulas against the trainer's, on the same numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page

from oncurve.algos.advantages import grade, outcome_advantages, process_advantages
from oncurve.algos.kl import k1, k2, k3
from oncurve.algos.objectives import OBJECTIVES, LossInputs, LossSettings
from oncurve.algos.reductions import LossDenominators
from oncurve.objective_specs import AdvantageScale, Baseline
from oncurve.studio.groups import gradable
from tests.studio.browsing import a_browser, a_page
from tests.studio.samples import random_group
from tests.studio.serving import Served

pytestmark = pytest.mark.slow
STATIC = Path(__file__).resolve().parents[2] / "oncurve" / "studio" / "static" / "assets"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as found:
        yield found


@pytest.fixture(scope="module")
def page(studio: Served, browser: Browser) -> Iterator[Page]:
    with a_page(browser, f"{studio.address}/#/runs") as watched:
        yield watched.page


def ask(page: Page, call: str, arguments: Any) -> Any:
    """Runs an expression over the built formulas `f` and the numbers `x`."""
    file = next(STATIC.glob("formulas-*.js")).name
    script = f"async (x) => {{ const f = await import('/assets/{file}'); return JSON.stringify({call}); }}"
    return json.loads(page.evaluate(script, arguments))


GROUPS: list[list[list[float | None]]] = [
    [[1.0, 0.0, 0.5, 0.7], [0.1, 0.2, 0.9, 1.3]],
    [[0.1] * 8, [0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]],
    [[1.0, None, 0.3], [None, None, 0.4], [2.0, -1.0, 0.25]],
    [[0.1 + 0.2, 0.3], [1.0, 1.0]],
]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("scale", ["group", "batch", "whiten", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
def test_advantages(page: Page, groups: list[list[float | None]], baseline: Baseline, scale: AdvantageScale) -> None:
    rewards = torch.tensor([[math.nan if r is None else r for r in group] for group in groups], dtype=torch.float64)
    ours = outcome_advantages(rewards, baseline, scale, 1e-4)
    theirs = ask(page, "f.advantages(x[0], x[1], x[2], 1e-4)", [groups, baseline, scale])
    assert torch.tensor(theirs, dtype=torch.float64) == pytest.approx(ours, rel=1e-7, abs=1e-12)


def test_process_advantages(page: Page) -> None:
    steps = [[(2, 0.5), (5, -1.0)], [(0, 0.1)], []]
    ours = process_advantages([[0.5, -1.0], [0.1], []], [[2, 5], [0], []], [7, 3, 2], 1e-4)
    theirs = ask(page, "f.processAdvantages(x[0], x[1], 1e-4)", [steps, [7, 3, 2]])
    for one, other in zip(theirs, ours, strict=True):
        assert one == pytest.approx(other.tolist(), abs=1e-12)


@pytest.mark.parametrize("mask_cut", [False, True])
@pytest.mark.parametrize("scale", ["group", "batch", "whiten", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
def test_the_advantage_of_every_token(page: Page, baseline: Baseline, scale: AdvantageScale, mask_cut: bool) -> None:
    """Steps with outcome rewards, step rewards, both, failures, truncated completions and tokens of an environment."""
    for seed in range(6):
        groups = [random_group(10 * seed + index) for index in range(4)]
        ours = grade(groups, baseline=baseline, scale=scale, eps=1e-4, mask_cut=mask_cut)
        batch = [[gradable(one) for one in group.scored] for group in groups]
        settings = {"baseline": baseline, "scale": scale, "eps": 1e-4, "mask_cut": mask_cut}
        theirs = ask(page, "x[0].map((_, at) => f.gradeTokens(x[0], at, x[1]))", [batch, settings])
        for group, found in zip(ours, theirs, strict=True):
            assert [tokens is not None for tokens in found] == list(group.graded)
            for advantages, tokens in zip(group.advantages, found, strict=True):
                if tokens is not None:
                    assert tokens == pytest.approx(advantages.tolist(), rel=1e-5, abs=1e-5)


def test_kl_estimators(page: Page) -> None:
    pairs = [(-1.0, -1.2), (-0.5, -0.5), (-3.0, -0.1), (-30.0, -1.0), (-1e-9, -2e-9)]
    theirs = ask(page, "x.map(([a, b]) => [f.k1(a, b), f.k2(a, b), f.k3(a, b)])", pairs)
    new, ref = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    ours = torch.stack([k1(new, ref), k2(new, ref), k3(new, ref)], dim=1)
    assert torch.tensor(theirs, dtype=torch.float64) == pytest.approx(ours, rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_loss_and_its_gradient(page: Page, seed: int, beta: float) -> None:
    """Completions of 1 to 4 tokens, with old and reference policies that differ enough to clip some tokens."""
    torch.manual_seed(seed)
    lengths = [1, 2, 3, 4]
    total = sum(lengths)
    new = (-torch.rand(total, dtype=torch.float64) - 0.1).requires_grad_()
    old, ref = new.detach() + 0.3 * torch.randn(total, dtype=torch.float64), new.detach() + 0.3 * torch.randn(total).double()
    advantage = torch.randn(4, dtype=torch.float64)
    row = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    inputs = LossInputs(
        new, old, advantage[row], torch.ones(total, dtype=torch.bool), row, 4, LossDenominators(4, total, 8), logp_ref_M=ref
    )
    ours = OBJECTIVES["grpo"].loss(inputs, LossSettings(beta, "k3", False, 0.0))
    (gradient,) = torch.autograd.grad(ours.loss, new)
    parts = [[t.tolist() for t in torch.split(values.detach(), lengths)] for values in (new, old, ref)]
    sampled = [
        {"logpNew": parts[0][i], "logpOld": parts[1][i], "logpRef": parts[2][i], "advantage": float(advantage[i])}
        for i in range(4)
    ]
    theirs = ask(page, "f.grpoLoss(x[0], 0.2, 0.2, x[1])", [sampled, beta])
    assert theirs["loss"] == pytest.approx(float(ours.loss.detach()), abs=1e-12)
    assert [slope for of in theirs["gradient"] for slope in of] == pytest.approx(gradient.tolist(), abs=1e-12)
    assert theirs["clippedShare"] == pytest.approx(float(ours.clipped_M.double().mean()))


def test_the_small_policy_follows_the_gradient(page: Page) -> None:
    """Two updates of the demo's softmax policy against autograd on the same samples."""
    settings = {"groupSize": 6, "clip": 0.2, "beta": 0.1, "updates": 2, "rate": 0.7, "eps": 1e-4, "scale": "group"}
    start, rewards = [0.3, -0.2, 0.1, 0.5], [1.0, 0.0, 0.4, 0.0]
    call = "f.step(x[0], f.softmax([0, 0.2, -0.1, 0.3]), x[1], x[2], f.random(3))"
    theirs = ask(page, call, [start, rewards, settings])
    sampled = torch.tensor(theirs["sampled"])
    reference = torch.tensor([0, 0.2, -0.1, 0.3], dtype=torch.float64).log_softmax(0)[sampled]
    logits = torch.tensor(start, dtype=torch.float64)
    old = logits.log_softmax(0)[sampled]
    graded = outcome_advantages(
        torch.tensor([[rewards[i] for i in theirs["sampled"]]], dtype=torch.float64), "mean", "group", 1e-4
    )
    for _ in range(2):
        logits = logits.detach().requires_grad_()
        rows = torch.arange(6)
        inputs = LossInputs(
            logits.log_softmax(0)[sampled], old, graded[0], torch.ones(6, dtype=torch.bool), rows, 6, LossDenominators(6, 6, 1),
            logp_ref_M=reference,
        )  # fmt: skip
        loss = OBJECTIVES["grpo"].loss(inputs, LossSettings(0.1, "k3", False, 0.0)).loss
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - 0.7 * gradient).detach()
    assert theirs["logits"] == pytest.approx(logits.tolist(), abs=1e-12)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("size", "baseline"), [(2, "mean"), (8, "mean"), (8, "leave_one_out"), (16, "none")])
def test_the_baseline_study_agrees_with_the_exact_expectation(page: Page, p: float, size: int, baseline: str) -> None:
    """The expected estimate of a group, summed over all numbers of successes with binomial weights."""
    exact = 0.0
    for successes in range(size + 1):
        rewards = torch.tensor([[1.0] * successes + [0.0] * (size - successes)], dtype=torch.float64)
        graded = outcome_advantages(rewards, baseline, "none", 0.0)[0]  # type: ignore[arg-type]
        slopes = rewards[0] - p
        exact += math.comb(size, successes) * p**successes * (1 - p) ** (size - successes) * float((graded * slopes).mean())
    theirs = ask(page, "f.baselineStudy(x[0], x[1], x[2], 4000, 7)", [p, size, baseline])
    assert theirs["truth"] == pytest.approx(p * (1 - p))
    assert theirs["expected"] == pytest.approx(exact, abs=1e-12)
    assert theirs["mean"] == pytest.approx(exact, abs=5 * theirs["std"] / math.sqrt(4000))


def test_the_kl_study_agrees_with_autograd(page: Page) -> None:
    """The exact KL, and the error of each estimator's expected gradient as a loss, by automatic differentiation."""
    logits, reference = [0.9, 0.3, -0.4, -0.3, 0.1], [0.2, 0.3, 0.0, -0.3, 0.1]
    theirs = ask(page, "f.klStudy(x[0], x[1], 20000, 5)", [logits, reference])
    new, ref = torch.tensor(logits, dtype=torch.float64, requires_grad=True), torch.tensor(reference, dtype=torch.float64)
    logp, logp_ref = new.log_softmax(0), ref.log_softmax(0)
    kl = (logp.exp() * (logp - logp_ref)).sum()
    (truth,) = torch.autograd.grad(kl, new, retain_graph=True)
    assert theirs["exact"] == pytest.approx(float(kl.detach()))
    for found, estimator in zip(theirs["estimators"], (k1, k2, k3), strict=True):
        values = estimator(logp, logp_ref)
        (slope,) = torch.autograd.grad((logp.exp().detach() * values).sum(), new, retain_graph=True)
        assert found["gradientError"] == pytest.approx(float((slope - truth).norm() / truth.norm()), abs=1e-9)
        expected = float((logp.exp() * values).sum().detach())
        assert found["mean"] == pytest.approx(expected, abs=5 * found["std"] / math.sqrt(20000))


@pytest.mark.parametrize(
    ("line", "text", "value"),
    [
        ('1 if contains "12"', "a 12 b", 1), ('1 if contains "12"', "1 2", 0), ('-0.5 if not ends with "."', "x", -0.5),
        ('2 if starts with "a"', "ab", 2), ("0.1 per character", "abcd", 0.4), ("1 per word", " a  b c ", 3),
        ('1 per "ab"', "ababa", 2), ("1 if longer than 3", "abc", 0), ("1 if shorter than 3", "ab", 1), ("", "x", 0),
        ("import os", "x", None), ('1 if contains 12', "12", None), ("1 per", "x", None),
    ],
)  # fmt: skip
def test_the_sandbox_s_rules(page: Page, line: str, text: str, value: float | None) -> None:
    found = ask(page, "f.readRule(x[0])?.(x[1]) ?? null", [line, text])
    assert found == (value if value is None else pytest.approx(value))
