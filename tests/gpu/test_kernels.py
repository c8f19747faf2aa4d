"""The kernels' own tests once more, compiled for the GPU: without one they run in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.models.test_kernels import (  # noqa: F401
    test_attention_in_a_pack,
    test_gated_unit,
    test_norm_and_rotation_of_queries_and_keys,
    test_residual_sum_and_norm,
    test_statistics_of_logits,
    test_the_head_in_chunks,
)

pytestmark = pytest.mark.gpu
