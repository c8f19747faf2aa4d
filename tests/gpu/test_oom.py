"""On a real GPU: memory really runs out, the step is done over smaller packs, and its gradient is the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from oncurve.models.load import load_policy
from oncurve.recipe.sections import Model, TinyModel
from oncurve.runs.notes import collecting
from oncurve.train.determinism import settle
from oncurve.train.learner import Learner
from oncurve.train.start import begin
from tests.faults.cases import GRPO, recipe
from tests.faults.sameness import everything
from tests.train.builders import apart, graded_group, gradient, stage

pytestmark = pytest.mark.gpu
WIDE = TinyModel(layers=4, width=1024, heads=8, kv_heads=4, head_size=128, mlp_width=4096, context=4096)


def learner() -> Learner:
    policy = load_policy(Model(tiny=WIDE, device="cuda"), alphabet="0123456789+=", seed=0)
    return Learner(policy, stage(tokens_per_pack=1 << 20))


def test_a_step_too_large_for_the_gpu_is_done_in_parts_with_the_same_gradient() -> None:
    dice = np.random.default_rng(0)
    groups = [graded_group(dice, 64, [1024] * 16, name=str(i)) for i in range(4)]
    whole = learner()
    whole.update(groups)
    expected = gradient(whole.policy.model).cpu()
    used = torch.cuda.max_memory_allocated()
    del whole
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    for share in (0.5, 0.3, 0.2, 0.1):  # checkpointing may make do with half
        small = learner()
        held = torch.cuda.memory_allocated()
        torch.cuda.set_per_process_memory_fraction((held + share * (used - held)) / total)
        try:
            with collecting() as notes:
                small.update(groups)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        if notes:
            assert notes[0].kind == "memory"
            assert apart(gradient(small.policy.model).cpu(), expected) < 1e-5
            return
        del small
        torch.cuda.empty_cache()
    pytest.fail("a tenth of the memory was enough: the test has nothing to show")


def test_a_deterministic_run_repeats_bit_for_bit_and_says_what_it_costs(tmp_path: Path) -> None:
    asked = recipe({**GRPO, "steps": 6}, deterministic=True)
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"device": "cuda"})})
    one, two = (everything(begin(asked, out=tmp_path / name)) for name in ("one", "two"))
    assert one == two
    policy = load_policy(Model(tiny=WIDE, device="cuda"), alphabet="0123456789", seed=0)
    said = settle(True, policy)
    torch.use_deterministic_algorithms(False)
    assert said is not None
    assert "× the time of one without them" in said
