"""Every reader of the table of objectives knows every objective, and shows what the table says of it."""

from __future__ import annotations

import io
import re
import runpy
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from oncurve.algos.kl import KL_ESTIMATORS
from oncurve.algos.objectives import OBJECTIVES
from oncurve.algos.ratios import RATIOS
from oncurve.algos.reductions import REDUCTIONS
from oncurve.errors import RecipeError
from oncurve.objective_specs import (
    BUILT_IN_OBJECTIVES,
    KlEstimator,
    ObjectiveName,
    RatioName,
    ReductionName,
    SurrogateName,
    defaults_in_words,
)
from oncurve.recipe.defaults import advantage_settings, kl_settings
from oncurve.recipe.explain import explain
from oncurve.recipe.keys import recipe_keys
from oncurve.recipe.schema.stages import Grpo
from oncurve.recipe.trl.config import TRL_OBJECTIVES, TrlConfig
from oncurve.recipe.variants import ALGORITHMS
from tests.recipe.recipes import recipe

NAMES: tuple[ObjectiveName, ...] = get_args(ObjectiveName)


def test_the_table_has_a_row_for_every_name() -> None:
    assert tuple(BUILT_IN_OBJECTIVES) == NAMES


def test_every_part_that_is_named_has_a_formula_and_is_used() -> None:
    assert set(RATIOS) == set(get_args(RatioName)) == {spec.ratio for spec in BUILT_IN_OBJECTIVES.values()}
    assert set(REDUCTIONS) == set(get_args(ReductionName)) == {spec.reduction for spec in BUILT_IN_OBJECTIVES.values()}
    assert set(get_args(SurrogateName)) == {spec.surrogate for spec in BUILT_IN_OBJECTIVES.values()}
    assert set(KL_ESTIMATORS) == set(get_args(KlEstimator))


@pytest.mark.parametrize("name", NAMES)
def test_formulas(name: ObjectiveName) -> None:
    spec, objective = BUILT_IN_OBJECTIVES[name], OBJECTIVES[name]
    assert (objective.ratio.__name__, objective.reduction.__name__) == (spec.ratio, spec.reduction)
    assert type(objective.surrogate).__name__.lower() == spec.surrogate.replace("_", "")
    low, high = (getattr(objective.surrogate, bound, None) for bound in ("low", "high"))
    assert spec.clip == (None if low is None else (low, high))


@pytest.mark.parametrize("name", NAMES)
def test_defaults_and_checks_of_a_recipe(name: ObjectiveName) -> None:
    spec, stage = BUILT_IN_OBJECTIVES[name], Grpo(objective=name)
    assert advantage_settings(stage) == (spec.baseline, spec.scale)
    assert kl_settings(stage)[0] == spec.kl_place
    for change, is_allowed in [
        ("grpo.clip={low=0.1, high=0.1}", spec.clip is not None),
        ("grpo.length_budget=100", spec.uses_length_budget),
        ("grpo.advantage.scale=batch", not spec.fixed_advantage),
    ]:
        if is_allowed:
            recipe(f"grpo.objective={name}", change)
        else:
            with pytest.raises(RecipeError):
                recipe(f"grpo.objective={name}", change)


DEFAULT_KEYS = {"baseline": "grpo.advantage.baseline", "scale": "grpo.advantage.scale", "kl_place": "grpo.kl.where"}


def test_the_defaults_of_all_objectives_in_words() -> None:
    assert defaults_in_words("scale") == (
        "none for dr_grpo, rloo, reinforce, opo, dro; whiten for reinforce_pp; signal_share for gpg; mean for maxrl; "
        "per_reward for gdpo; group for the others"
    )
    docs = {key.key: key.doc for key in recipe_keys()}
    for trait, key in DEFAULT_KEYS.items():
        for name, spec in BUILT_IN_OBJECTIVES.items():
            differs = getattr(spec, trait) != getattr(BUILT_IN_OBJECTIVES["grpo"], trait)
            assert bool(re.search(rf"\b{name}\b", docs[key].rpartition("which is")[2])) == differs


def test_the_key_takes_every_name() -> None:
    (entry,) = (entry for entry in recipe_keys() if entry.key == "grpo.objective")
    assert entry.allowed == NAMES


def test_explain_and_the_documentation_show_every_row() -> None:
    console = Console(width=400, file=io.StringIO())
    with console.capture() as capture:
        console.print(explain("grpo.objective"))
    make_pages = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "make_pages.py"))
    shown, written = capture.get().splitlines(), make_pages["objectives_table"]().splitlines()
    for name, spec in BUILT_IN_OBJECTIVES.items():
        for lines, cell in [(shown, name), (written, f"| `{name}`")]:
            (line,) = (line for line in lines if line.startswith(f"{cell} "))
            assert all(text in line for text in (spec.sentence, spec.paper, spec.baseline, spec.scale, spec.kl_place))


def test_algorithms_that_can_be_compared() -> None:
    assert set(NAMES) <= set(ALGORITHMS)


@pytest.mark.parametrize("name", [name for name in NAMES if BUILT_IN_OBJECTIVES[name].trl])
def test_trls_name_leads_to_the_objective(name: ObjectiveName) -> None:
    loss, level = BUILT_IN_OBJECTIVES[name].trl or ("", "")
    assert TRL_OBJECTIVES[loss, level] == name
    assert TrlConfig({"loss_type": loss, "importance_sampling_level": level}).objective == name
