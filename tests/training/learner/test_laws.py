"""Laws of the learner: a step's gradient does not depend on how its batch is split, packed, padded, shared or reordered.

Each law is checked at the second of two updates, where ratios are no longer 1, with KL, entropy bonus and importance weights.
Adam's epsilon is large here, so that the first update is smooth in its gradient: with the usual one it follows the sign of
rounding where a gradient is almost 0. Examples are drawn the same each time: right at a clip's bound a law has a kink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oncurve.algos.objectives import OBJECTIVES
from oncurve.objective_specs import OBJECTIVE_SPECS
from oncurve.records import GradedGroup, Group, ScoredGroup
from oncurve.training.learner.learner import Learner
from oncurve.training.stages.grpo import grpo_learner_settings
from tests.training.builders import TERMS, apart, graded_group, gradient, policy, stage

LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=4)
SHAPES = st.lists(st.tuples(st.integers(1, 20), LENGTHS), min_size=2, max_size=4)
Shape = list[tuple[int, list[int]]]
FEW = settings(max_examples=6, deadline=None, derandomize=True)


def groups_of(shape: Shape, seed: int, **options: Any) -> list[GradedGroup]:
    rng = np.random.default_rng(seed)
    return [
        graded_group(rng, prompt, lengths, masked=True, name=f"p{i}", **options) for i, (prompt, lengths) in enumerate(shape)
    ]


def gradient_of(groups: Sequence[GradedGroup], objective: str, **options: Any) -> Tensor:
    learner = Learner(policy(), grpo_learner_settings(stage(**{"objective": objective, **TERMS, **options})))
    learner.update(groups)
    return gradient(learner.policy.model)


def alone(group: GradedGroup) -> list[GradedGroup]:
    """Each completion as its own group, with the same advantage: its prompt is no longer shared."""
    g, parts = group.group, []
    for i, scored in enumerate(group.scored.scored):
        one = ScoredGroup(Group(g.prompt, g.prompt_ids, (scored.completion,)), (scored,))
        parts.append(GradedGroup(one, (group.advantages[i],), (group.graded[i],)))
    return parts


@pytest.mark.parametrize("objective", OBJECTIVES)
@FEW
@given(shape=SHAPES, budget=st.integers(1, 60), seed=st.integers(0, 999))
def test_the_split_into_packs_does_not_matter(objective: str, shape: Shape, budget: int, seed: int) -> None:
    """One pack of all groups, or one pack for each."""
    groups = groups_of(shape, seed)
    assert apart(gradient_of(groups, objective, tokens_per_pack=budget), gradient_of(groups, objective)) < 1e-5


@pytest.mark.parametrize("objective", OBJECTIVES)
@FEW
@given(shape=SHAPES, seed=st.integers(0, 999), order=st.randoms(use_true_random=False))
def test_order_and_sharing_do_not_matter(objective: str, shape: Shape, seed: int, order: Any) -> None:
    groups = groups_of(shape, seed)
    plain = gradient_of(groups, objective)
    shuffled = order.sample(groups, len(groups))
    assert apart(gradient_of(shuffled, objective), plain) < 1e-5
    unshared = [part for group in shuffled for part in alone(group)]
    assert apart(gradient_of(unshared, objective, tokens_per_pack=30), plain) < 1e-5


def cut_in_two(group: GradedGroup, cuts: st.DataObject) -> GradedGroup:
    """Each completion as two sequences: the second follows a context that is the prompt with the first."""
    g, parts = group.group, []
    for scored in group.scored.scored:
        one = scored.completion
        cut = cuts.draw(st.integers(0, len(one.token_ids) - 1))
        context = np.concatenate((g.prompt_ids, one.token_ids[:cut]))
        parts.append(replace(scored, completion=replace(one, contexts=((cut, context),))))
    return replace(group, scored=ScoredGroup(Group(g.prompt, g.prompt_ids, tuple(s.completion for s in parts)), tuple(parts)))


@pytest.mark.parametrize("objective", OBJECTIVES)
@FEW
@given(shape=SHAPES, budget=st.integers(1, 60), seed=st.integers(0, 999), cuts=st.data())
def test_a_completion_in_several_sequences_is_one_completion(
    objective: str, shape: Shape, budget: int, seed: int, cuts: st.DataObject
) -> None:
    """A sequence that continues another, forwarded in a context of its own, changes nothing: not even a sequence's ratio."""
    groups = groups_of(shape, seed)
    forked = [cut_in_two(group, cuts) for group in groups]
    assert apart(gradient_of(forked, objective, tokens_per_pack=budget), gradient_of(groups, objective)) < 1e-5


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_groups_without_signal_change_totals_only(objective: str) -> None:
    """Forwarded or dropped, the gradient is the same: that of the others, divided by a larger total."""
    rng = np.random.default_rng(0)
    loud = [graded_group(rng, 5, [4, 6, 2]), graded_group(rng, 9, [3, 5])]
    silent = [graded_group(rng, 7, [5, 4, 6], signal=False), graded_group(rng, 2, [5], signal=False)]
    bare: dict[str, Any] = {"kl": {"beta": 0.0}, "entropy_bonus": 0.0, "updates_per_step": 1, "length_budget": 10}
    without, dropped, kept = (
        gradient_of(groups, objective, no_signal=mode, **bare)
        for groups, mode in ((loud, "drop"), ([*loud, *silent], "drop"), ([silent[0], *loud, silent[1]], "keep"))
    )
    assert apart(dropped, kept) < 1e-5
    by_tokens = OBJECTIVE_SPECS[objective].reduction == "mean_over_step_tokens"
    assert apart(dropped, without * (20 / 40 if by_tokens else 5 / 9)) < 1e-5


PENALTIES: dict[str, dict[str, Any]] = {"dro": {"objective": "dro"}, "kl_cov": {"entropy": {"kl_cov": 0.3}}, "none": {}}


@pytest.mark.parametrize("options", PENALTIES.values(), ids=PENALTIES)
def test_a_penalty_on_the_change_of_the_policy_gives_silent_groups_a_gradient(options: dict[str, Any]) -> None:
    """From the second update on, when ratios are no longer 1. Dropped or kept, the gradient is the formula's."""
    rng = np.random.default_rng(0)
    groups = [graded_group(rng, 5, [4, 6, 2]), graded_group(rng, 9, [3, 5])]
    groups += [graded_group(rng, 7, [5, 4, 6], signal=False), graded_group(rng, 2, [5], signal=False)]
    bare: dict[str, Any] = {"objective": "grpo", "kl": {"beta": 0.0}, "entropy_bonus": 0.0, **options}
    dropped, kept = (gradient_of(groups, no_signal=mode, **bare) for mode in ("drop", "keep"))
    assert apart(dropped, kept) < 1e-6


CONTROLS = {"top_share": 0.6, "clip_cov": 0.1, "clip_cov_range": [0.0, 9.0], "kl_cov": 0.2}


@FEW
@given(shape=SHAPES, budget=st.integers(1, 60), seed=st.integers(0, 999))
def test_entropy_controls_select_the_same_tokens_for_every_split_into_packs(shape: Shape, budget: int, seed: int) -> None:
    groups = groups_of(shape, seed)
    plain, split = (gradient_of(groups, "grpo", entropy=CONTROLS, **how) for how in ({}, {"tokens_per_pack": budget}))
    assert apart(split, plain) < 1e-5


def test_completions_that_are_not_graded_count_nowhere() -> None:
    """Not in the gradient, not in the totals, whatever their advantage."""
    rng = np.random.default_rng(1)
    full = graded_group(rng, 6, [5, 3, 4])
    some = replace(full, graded=(True, False, True))
    rest = [alone(full)[0], alone(full)[2]]
    assert apart(gradient_of([some], "grpo"), gradient_of(rest, "grpo")) < 1e-5
    assert apart(gradient_of([some], "dapo"), gradient_of(rest, "dapo")) < 1e-5


def test_a_kl_or_an_entropy_bonus_gives_silent_groups_a_gradient() -> None:
    """Then they are forwarded although their advantages are 0."""
    silent = [graded_group(np.random.default_rng(2), 4, [5, 3], signal=False)]
    assert float(gradient_of(silent, "grpo", kl={"beta": 0.0}, entropy_bonus=0.0, updates_per_step=1).norm()) == 0
    assert float(gradient_of(silent, "grpo", kl={"beta": 0.0}, entropy_bonus=0.1, updates_per_step=1).norm()) > 0
    both = gradient_of([*silent, graded_group(np.random.default_rng(3), 4, [5, 3])], "grpo", entropy_bonus=0.0)
    assert float(both.norm()) > 0
