"""A GPU without Triton: torch decodes and learns, says so, and is right."""

from __future__ import annotations

import pytest
import torch

from oncurve import kernels
from oncurve.models.pack_attention import PackAttention
from oncurve.models.packing import build_pack
from oncurve.recipe.schema.sections import Sampling
from tests.gpu.test_engine import BOTH, assert_near, engine_of, errors, model_of, sample
from tests.gpu.test_learner import gradient_of, groups, learner_on
from tests.kernels.test_learner_kernels import RAGGED, pack_of
from tests.models.architectures import make_model
from tests.training.builders import apart

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "can_run_kernels", lambda device: False)


@pytest.mark.parametrize("dtype", BOTH)
def test_torch_decodes_and_says_so(dtype: torch.dtype) -> None:
    own = engine_of(model_of("qwen3"), dtype)
    assert own.policy.fast_backbone is None
    assert own.graph_decoder is None
    assert "Triton is not installed" in own.log_lines[0]
    assert_near(errors(own, sample(own, (1, 3, 64), 2, Sampling(max_new_tokens=12)), 1.0), dtype)


def test_torch_learns_what_a_cpu_learns() -> None:
    assert isinstance(build_pack(pack_of(RAGGED), torch.device("cuda")).attention, PackAttention)
    ours, theirs = (learner_on(device, make_model("qwen3")) for device in ("cuda", "cpu"))
    for learner in (ours, theirs):
        learner.update(groups())
    assert apart(gradient_of(ours), gradient_of(theirs)) < 1e-5
