"""On a real GPU: memory really runs out, the step is done over smaller packs, and its gradient is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from oncurve.models.loading.load import load_policy
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import Model, TinyModel
from oncurve.runs.step_notes import collect_notes
from oncurve.training.determinism import enable_determinism
from oncurve.training.learner.learner import Learner
from oncurve.training.stages.grpo import grpo_learner_settings
from oncurve.training.stages.ppo import PpoLearner, grade_with_critic
from oncurve.training.start import begin
from tests.faults.cases import GRPO, recipe
from tests.faults.sameness import everything
from tests.training.builders import apart, graded_group, gradient, stage
from tests.training.stages.test_ppo import ppo, scored_group

pytestmark = pytest.mark.gpu
WIDE = TinyModel(layers=4, width=1024, heads=8, kv_heads=4, head_size=128, mlp_width=4096, context=4096)


def wide() -> Policy:
    return load_policy(Model(tiny=WIDE, device="cuda"), alphabet="0123456789+=", seed=0)


def of_grpo() -> Tensor:
    """The gradient of a step of 66,000 tokens in one pack, if there is room for it."""
    dice = np.random.default_rng(0)
    learner = Learner(wide(), grpo_learner_settings(stage(tokens_per_pack=1 << 20)))
    learner.update([graded_group(dice, 64, [1024] * 16, name=str(i)) for i in range(4)])
    return gradient(learner.policy.model).cpu()


def of_ppo() -> Tensor:
    """The same of policy and critic, whose values are asked for first."""
    learner = PpoLearner(wide(), ppo(tokens_per_pack=1 << 20))
    scored = [scored_group(i, [1024] * 16) for i in range(4)]
    learner.update([grade_with_critic(g, v, learner.ppo, None) for g, v in zip(scored, learner.values(scored), strict=True)])
    return torch.cat([gradient(learner.policy.model), gradient(learner.critic.module)]).cpu()


@pytest.mark.parametrize("work", [of_grpo, of_ppo])
def test_a_step_too_large_for_the_gpu_is_done_in_parts_with_the_same_gradient(work: Callable[[], Tensor]) -> None:
    torch.cuda.reset_peak_memory_stats()
    expected, used = work(), torch.cuda.max_memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    for share in (0.5, 0.3, 0.2, 0.1):  # checkpointing may make do with half
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(share * used / total)
        try:
            with collect_notes() as notes:
                found = work()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        if notes:
            assert notes[0].kind == "memory"
            assert apart(found, expected) < 1e-5
            return
    pytest.fail("a tenth of the memory was enough: the test has nothing to show")


def test_a_deterministic_run_repeats_bit_for_bit_and_says_what_it_costs(tmp_path: Path) -> None:
    config = recipe({**GRPO, "steps": 6}, deterministic=True)
    config = config.model_copy(update={"model": config.model.model_copy(update={"device": "cuda"})})
    one, two = (everything(begin(config, out=tmp_path / name)) for name in ("one", "two"))
    assert one == two
    policy = load_policy(Model(tiny=WIDE, device="cuda"), alphabet="0123456789", seed=0)
    message = enable_determinism(True, policy)
    torch.use_deterministic_algorithms(False)
    assert message is not None
    assert "× as long as without them" in message
