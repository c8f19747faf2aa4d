"""The kernels' own tests once more, compiled for the GPU: without one they run in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.engines.test_kernels_attention import (  # noqa: F401
    test_any_grouping_of_heads,
    test_head_sizes,
    test_idle_slots_are_left_out_and_a_longer_launch_changes_no_bit,
    test_sixteen_bits_round_once,
    test_soft_caps,
    test_windows_are_measured_in_positions,
)
from tests.engines.test_kernels_choosing import (  # noqa: F401
    test_all_logits_equal,
    test_each_slot_draws_what_the_plain_path_draws_for_it,
    test_neighbours_and_their_settings_change_no_bit,
    test_of_equal_logits_the_first_are_kept,
)
from tests.engines.test_kernels_choosing import (
    test_the_models_scale_and_soft_cap as test_choosing_by_the_models_scale_and_soft_cap,  # noqa: F401
)
from tests.engines.test_kernels_layers import (  # noqa: F401
    test_a_prompt_is_stored_from_where_it_goes_on_up_to_its_length,
    test_residual_and_norm,
    test_rotary_positions_and_the_pool,
)
from tests.engines.test_kernels_products import (  # noqa: F401
    test_a_row_depends_on_no_other,
    test_parts_add_up_to_the_product,
    test_the_gated_unit_behind_its_product,
)
from tests.engines.test_kernels_sampling import (  # noqa: F401
    test_a_tile_without_mass_is_never_drawn_from,
    test_idle_slots_draw_nothing_and_limits_end,
    test_shares_are_those_of_the_distribution,
    test_the_models_scale_and_soft_cap,
    test_tokens_and_logps_are_those_of_the_plain_path,
    test_uniforms_are_those_of_the_plain_path,
)
from tests.models.test_gpu_lora import (
    test_the_kernel as test_what_an_adapter_adds_to_a_product,  # noqa: F401
)
from tests.models.test_kernels import (  # noqa: F401
    test_attention_in_a_pack,
    test_gated_unit,
    test_norm_and_rotation_of_queries_and_keys,
    test_residual_sum_and_norm,
    test_statistics_of_logits,
)

pytestmark = pytest.mark.gpu
