"""Tensor parallelism: a step equals that of a single process, however data and layers are split."""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from oncurve import trust
from oncurve.distributed.world import World
from oncurve.errors import ModelError
from oncurve.models.loading.load import load_policy
from oncurve.models.parallel import fsdp
from oncurve.models.parallel.dtensor import local_elements
from oncurve.models.parallel.tensor_parallel import tp_styles
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import Model, TinyModel
from oncurve.recipe.schema.recipe import Recipe
from oncurve.runs.checkpoints.listing import checkpoint_path, list_checkpoints
from oncurve.runs.checkpoints.shards import INDEX, MergedTensors, ShardedTensors
from oncurve.runs.folder import RunFolder
from oncurve.runs.metrics import is_repeatable
from oncurve.training.checkpoint_writer import collect_checkpoint_state
from oncurve.training.trainer import load_weights, shard_policy
from tests.distributed import runs
from tests.distributed.cases import CASES, StepOutcome, relative_distance, step_of
from tests.distributed.processes import in_ranks
from tests.distributed.runs import GONE_S, Started, distance, until
from tests.distributed.stage_cases import dpo_loop, dpo_of
from tests.distributed.test_bad_input import as_ranks, store, write_recipe
from tests.models.architectures import ARCHITECTURES, make_policy
from tests.training.builders import recipe as small

__all__ = ["store"]

SHAPE = TinyModel(layers=2, width=32, heads=4, kv_heads=2, head_size=8, mlp_width=54, context=128)
"""Half of the MLP's width is odd: two ranks have shards of different sizes."""


def tiny(dtype: Literal["float32", "bfloat16"] = "float32") -> Policy:
    return load_policy(Model(tiny=SHAPE, dtype=dtype), alphabet="0123456789+=", seed=0)


def steps(world: World, names: list[str], gather: bool) -> dict[str, StepOutcome]:
    return {name: step_of(world, name, tiny(), gather) for name in names}


def in_bfloat16(world: World) -> StepOutcome:
    trained = tiny("bfloat16")
    trained.fast_backbone = None
    return step_of(world, "grpo", trained)


def step_of_each(world: World, names: list[str]) -> dict[str, StepOutcome]:
    """One update only: these models amplify rounding with each update."""
    return {name: step_of(world, "grpo", make_policy(name), updates_per_step=1) for name in names}


def run_dpo(world: World, offload: bool) -> dict[str, StepOutcome]:
    sets = ["scale.offload=true", "scale.shard=full"] if offload else []
    return {"dpo": dpo_of(world, shard_policy(tiny(), small(*sets), world))}


def run_recipe(ranks: int, tensor: int, *more: str) -> Recipe:
    sizes = [f"scale.ranks={ranks}", f"scale.tensor={tensor}", "scale.shard=full"]
    return small(*sizes, "grpo.prompts_per_step=8", "scale.timeout_s=300.0", *more)


def check_same(ranks: list[dict[str, StepOutcome]], one: dict[str, StepOutcome]) -> None:
    for name, expected in one.items():
        for of_rank in (outcomes[name] for outcomes in ranks):
            assert of_rank.tokens == expected.tokens, name
            assert relative_distance(of_rank.gradient, expected.gradient) < 1e-5, name
            assert relative_distance(of_rank.weights, expected.weights) < 1e-5, name
            assert np.array_equal(of_rank.weights, ranks[0][name].weights), name
            assert of_rank.stats == expected.stats, name
            for metric, value in expected.metrics.items():
                if not is_repeatable(metric):
                    continue
                assert np.isclose(of_rank.metrics[metric], value, rtol=1e-4, atol=1e-5), (name, metric)


FEW = ["grpo", "empty ranks", "clipped", "fewer prompts than ranks"]


@pytest.mark.parametrize(
    ("ranks", "tensor", "gather"),
    [
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        pytest.param(2, 2, True, marks=pytest.mark.slow),
        pytest.param(4, 2, True, marks=pytest.mark.slow),
        (4, 2, False),
    ],
)
def test_a_step_equals_that_of_one_process(ranks: int, tensor: int, gather: bool) -> None:
    """With gather = false a group samples in lockstep and its first rank scores; else each rank samples and scores its own."""
    (one,) = in_ranks(1, steps, FEW, True)
    more = [] if gather else ["scale.gather=false"]
    check_same(in_ranks(ranks, steps, FEW, gather, recipe=run_recipe(ranks, tensor, *more)), one)


def gather_weights(world: World) -> tuple[list[str], float]:
    """The backends of the mesh's groups, on a machine with a GPU, and the largest difference of gathered weights."""
    setattr(DTensor, "full_tensor", fail)  # noqa: B010
    made: list[Any] = []

    def init_on_gpu(*arguments: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.cuda.is_available", lambda: True)
            made.append(init_device_mesh(*arguments, **options))
        return made[-1]

    vars(fsdp)["init_device_mesh"] = init_on_gpu
    policy, before = tiny(), {name: p.detach().clone() for name, p in tiny().model.named_parameters()}
    sharded = fsdp.ShardedPolicy(
        policy, torch.device("cpu"), world.collective, offload=False, gather=True, tensor=world.tp_size
    )
    found = sharded.full_state_dict(keep=True)
    backends = [str(dist.get_backend(group)) for mesh in made for group in mesh.get_all_groups()]
    with sharded.full_weights():
        found |= {f"gathered/{name}": p.detach().clone() for name, p in sharded.model.named_parameters()}
    return backends, max(float((w - before[name.removeprefix("gathered/")]).abs().max()) for name, w in found.items())


def fail(*_: Any, **__: Any) -> Any:
    raise AssertionError("gloo has no coalesced all-gather of a GPU's tensors: full_tensor would end the process")


@pytest.mark.parametrize("tensor", [1, 2])
def test_ranks_that_share_a_gpu_use_only_what_gloo_has(tensor: int) -> None:
    for backends, difference in in_ranks(2, gather_weights, recipe=run_recipe(2, tensor)):
        assert backends == ["gloo"] * tensor
        assert difference == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tensor"), [(2, 2), (4, 2)])
def test_every_objective(ranks: int, tensor: int) -> None:
    (one,) = in_ranks(1, steps, list(CASES), True)
    check_same(in_ranks(ranks, steps, list(CASES), True, recipe=run_recipe(ranks, tensor)), one)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_case_layer_by_layer(ranks: int) -> None:
    (one,) = in_ranks(1, steps, list(CASES), True)
    found = in_ranks(ranks, steps, list(CASES), False, recipe=run_recipe(ranks, 2, "scale.gather=false"))
    check_same(found, one)


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_another_stage(offload: bool) -> None:
    (one,) = in_ranks(1, run_dpo, False)
    check_same(in_ranks(4, run_dpo, offload, recipe=run_recipe(4, 2)), one)


@pytest.mark.slow
def test_models_with_a_plan() -> None:
    """With biases, tied and untied heads, norms of heads, and plans that gather split outputs."""
    names = list(ARCHITECTURES)
    (one,) = in_ranks(1, step_of_each, names)
    check_same(in_ranks(2, step_of_each, names, recipe=run_recipe(2, 2)), one)


def test_weights_in_bfloat16() -> None:
    (one,) = in_ranks(1, in_bfloat16)
    for half in in_ranks(2, in_bfloat16, recipe=run_recipe(2, 2)):
        assert half.tokens == one.tokens
        assert relative_distance(half.gradient, one.gradient) < 3e-2
        assert relative_distance(half.weights, one.weights) < 4e-3


STEPS = 12


def run_of(ranks: int, tensor: int, *more: str) -> Recipe:
    sets = ["model.tiny.kv_heads=2", "model.tiny.mlp_width=54", "scale.shard=full", f"scale.tensor={tensor}"]
    return runs.run_recipe(ranks, *sets, "grpo.kl.beta=0.04", f"grpo.steps={STEPS}", *more)


def has_checkpoint(path: Path) -> bool:
    return any(entry.stage == "grpo" for entry in list_checkpoints(path / "checkpoints"))


def start_and_kill(path: Path, recipe: Recipe) -> None:
    """Starts a run and kills its last rank after the first checkpoint."""
    run = Started(recipe, path)
    until(partial(has_checkpoint, path))
    os.kill(run.processes[-1].pid or 0, signal.SIGKILL)
    run.wait(GONE_S)
    assert max(p.step for p in list_checkpoints(path / "checkpoints") if p.stage == "grpo") < STEPS


def resume_copy(path: Path, source: Path, ranks: int, tensor: int) -> Path:
    shutil.copytree(source, path)
    trust.grant(RunFolder(path))
    sets = [f"scale.ranks={ranks}", f"scale.tensor={tensor}"]
    again = Started(run_of(ranks, tensor), path, again=True, sets=sets)
    assert again.wait() == [0] * ranks, again.log_text
    return path


def save_and_load(world: World, folder: Path) -> bool:
    """Saves a step as shards, loads it into another loop, and returns whether both continue with the same bits."""
    first, second = (dpo_loop(world, shard_policy(tiny(), small(), world)) for _ in range(2))
    first.step(1)
    state = first.state() | {"model": {name: p.detach() for name, p in first.policy.model.named_parameters()}}
    saved = collect_checkpoint_state(world, folder, state)
    index, whole = saved.documents[INDEX], world.all_gather_dict({world.rank: saved.tensors})[0]
    assert any(len(part) == 5 for entry in index["model"].values() for part in entry["parts"]), "some columns of rows"
    read = whole | {
        group: MergedTensors(whole.get(group, {}), ShardedTensors(folder, group, names)) for group, names in index.items()
    }
    with first.policy.full_weights():
        assert all(torch.equal(read["model"][name], p) for name, p in first.policy.model.named_parameters())
    load_weights(second.policy, read["model"])
    second.load_state(read)
    for loop in (first, second):
        loop.step(2)
    return all(
        torch.equal(local_elements(a), local_elements(b))
        for a, b in zip(*(x.optimiser.weights for x in (first, second)), strict=True)
    )


def test_shards_of_split_layers_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert all(in_ranks(4, save_and_load, tmp_path, recipe=run_recipe(4, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tensor"), [(1, 1), (2, 2)])
def test_a_checkpoint_of_split_layers_resumes_anywhere(tmp_path: Path, ranks: int, tensor: int) -> None:
    """Weights, moments and the reference, in shards of rows and columns: other groups and a single process read them."""
    plain = Started(run_of(1, 1), tmp_path / "plain")
    assert plain.wait() == [0], plain.log_text
    start_and_kill(tmp_path / "4", run_of(4, 2))
    last = max(p.step for p in list_checkpoints(tmp_path / "4" / "checkpoints") if p.stage == "grpo")
    pieces = sorted(checkpoint_path(tmp_path / "4" / "checkpoints", "grpo", last).glob("pieces-*"))
    assert [f.name for f in pieces] == [f"pieces-0000{i}.safetensors" for i in range(4)]
    shards = [load_file(f) for f in pieces]
    assert {name for name in shards[0] if name not in shards[1]}, (
        "what all ranks of a group hold is write_recipe by its first rank only"
    )
    column = "model/model.layers.0.self_attn.o_proj.weight"
    assert [of_rank[column].size for of_rank in shards] == [32 * 32 // 4] * 4
    assert distance(resume_copy(tmp_path / "again", tmp_path / "4", ranks, tensor), tmp_path / "plain") < 1e-4


@pytest.mark.slow
def test_a_checkpoint_of_unsplit_layers_resumes_on_split_ones(tmp_path: Path) -> None:
    plain = Started(run_of(1, 1), tmp_path / "plain")
    assert plain.wait() == [0], plain.log_text
    start_and_kill(tmp_path / "2", run_of(2, 1))
    for ranks, tensor in ((4, 2), (2, 2)):
        assert distance(resume_copy(tmp_path / f"{ranks}x{tensor}", tmp_path / "2", ranks, tensor), tmp_path / "plain") < 1e-4
    start_and_kill(tmp_path / "in step", run_of(2, 2, "scale.gather=false"))
    assert distance(resume_copy(tmp_path / "2x1", tmp_path / "in step", 2, 1), tmp_path / "plain") < 1e-4


@pytest.mark.parametrize(
    ("sets", "what", "fix"),
    [
        (["model.tiny.kv_heads=1"], "scale.tensor: 2", "use scale.tensor = 1"),
        (["model.tiny.heads=6", "model.tiny.kv_heads=3", "model.tiny.mlp_width=51"], "scale.tensor: 2", "use a divisor of 3"),
        (["model.compile_blocks=true"], "model.compile_blocks: true", "leave it out"),
        (["model.lora.rank=4"], "scale.shard: full", 'use scale.shard = "optimiser" and scale.tensor = 1'),
    ],
)
def test_models_and_settings_that_cannot_be_split(
    tmp_path: Path, store: TCPStore, sets: list[str], what: str, fix: str
) -> None:
    recipe = str(write_recipe(tmp_path / "r.toml", 2, "scale.shard=full", "scale.tensor=2", *sets))
    first, second = as_ranks(tmp_path, store, recipe, recipe)
    assert [first.code(), second.code(GONE_S)] == [2, 2], first.stderr
    assert what in first.stderr
    assert fix in first.stderr
    assert first.stderr.count("error") == 1
    assert second.stderr == ""


def test_models_without_a_usable_plan() -> None:
    """The error names the reason and the fix."""
    policy = make_policy("llama")
    layers = policy.backbone.layers
    assert isinstance(layers, nn.ModuleList)
    plan = dict(policy.model.config.base_model_tp_plan)
    assert tp_styles(policy, layers, 2)[1]["mlp.down_proj"] == "rowwise"
    for changed, what in (
        ({}, "has no tensor-parallel plan"),
        ({**plan, "layers.*.mlp": "moe_tp_experts"}, "splits 'mlp' by 'moe_tp_experts'"),
        ({**plan, "layers.*.input_layernorm": "colwise"}, "splits 'input_layernorm' by 'colwise'"),
        ({name: style for name, style in plan.items() if "k_proj" not in name}, "without 'self_attn.k_proj.weight'"),
    ):
        policy.model.config.base_model_tp_plan = changed
        with pytest.raises(ModelError, match=what) as caught:
            tp_styles(policy, layers, 2)
        assert "use scale.tensor = 1" in str(caught.value)
