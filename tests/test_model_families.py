"""The planner and the model code read one list of fast families, and agree on every architecture."""

from __future__ import annotations

import pytest

from oncurve.model_families import FUSED_FAMILIES
from oncurve.models.llama.block_description import DecoderDescription, describe
from oncurve.models.llama.fused import FusedBackbone
from oncurve.plan.memory import uses_fused_kernels
from oncurve.plan.model_shape import shape_of_config
from tests.models.architectures import ARCHITECTURES, make_model
from tests.plan.jobs import job


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_planner_counts_fused_activations_for_exactly_the_models_that_fuse(name: str) -> None:
    model = make_model(name)
    shape = shape_of_config(model.config.to_dict(), name)
    description = describe(model)
    assert isinstance(description, DecoderDescription)
    assert uses_fused_kernels(shape, job(shape)) == FusedBackbone.supports(model, description)


def test_every_family_is_covered_by_an_architecture_above() -> None:
    models = {make_model(name) for name in FUSED_FAMILIES}
    assert {model.config.model_type: type(model.base_model).__name__ for model in models} == FUSED_FAMILIES
