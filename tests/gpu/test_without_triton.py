"""A GPU without Triton: torch decodes and learns, says so, and is right."""

from __future__ import annotations

import pytest
import torch

from oncurve.models import kernels
from oncurve.models.packing import PackLayout, build_pack
from oncurve.recipe.sections import Sampling
from tests.gpu.test_engine import BOTH, assert_near, engine_of, errors, model_of, sample
from tests.gpu.test_learner import gradient_of, groups, learner_on
from tests.models.architectures import make_model
from tests.models.test_kernels import RAGGED, pack_of
from tests.train.builders import apart

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "run_on", lambda device: False)


@pytest.mark.parametrize("dtype", BOTH)
def test_torch_decodes_and_says_so(dtype: torch.dtype) -> None:
    own = engine_of(model_of("qwen3"), dtype)
    assert own.policy.fused is None
    assert own.gpu is None
    assert "Triton is not installed" in own.remarks[0]
    assert_near(errors(own, sample(own, (1, 3, 64), 2, Sampling(max_new_tokens=12)), 1.0), dtype)


def test_torch_learns_what_a_cpu_learns() -> None:
    assert isinstance(build_pack(pack_of(RAGGED), torch.device("cuda")).layout, PackLayout)
    ours, theirs = (learner_on(device, make_model("qwen3")) for device in ("cuda", "cpu"))
    for learner in (ours, theirs):
        learner.update(groups())
    assert apart(gradient_of(ours), gradient_of(theirs)) < 1e-5
