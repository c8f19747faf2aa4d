"""Every stage type that samples, on a cluster: the bits of one process. With LoRA only the adapter is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oncurve.cluster.messages import copy_weights, weights_as_bytes
from oncurve.models.loading.load import load_policy
from oncurve.recipe.schema.model import Lora, Model, TinyModel
from oncurve.recipe.schema.sections import Task
from oncurve.runs.database.reader import RunReader
from oncurve.training.start import begin
from tests.cluster.started import Started, same_as_in_one_process
from tests.distributed.test_environments import CASES as ENVIRONMENTS
from tests.distributed.test_environments import DATED, recipe_of, texts
from tests.faults.cases import CASES

KINDS = [
    "sft then grpo",
    "process rewards",
    "dynamic sampling",
    "without a verifiable reward",
    "environments and drafts",
    "ppo",
    "rejection sampling",
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_on_a_cluster_leaves_what_it_leaves_in_one_process(cluster: Any, tmp_path: Path, kind: str) -> None:
    case = CASES[kind]
    scale = case.scale.model_copy(update={"samplers": 2, "reward_workers": 1})
    short = tuple(s.model_copy(update={"steps": min(s.steps, 8)}) for s in case.stages)
    recipe = case.model_copy(update={"scale": scale, "stages": short})
    started = Started.begin(tmp_path / "ray", recipe, cluster.address)
    started.end()
    same_as_in_one_process(started.run, recipe, tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a class of ours with options", "a pure one with options", "gymnasium"])
def test_each_sampler_loads_an_environment_that_can_not_be_sent(cluster: Any, tmp_path: Path, name: str) -> None:
    """The first stage has another task, so a sampler does not need the environment to load its model."""
    built = recipe_of(tmp_path, ENVIRONMENTS[name])
    (stage,) = built.stages
    options = {key: value for key, value in built.task.options.items() if not key.startswith("environment")}
    before = stage.model_copy(update={"name": "before", "steps": 1, "task": Task(type="file", heldout=2, **options)})
    recipe = built.model_copy(update={"stages": (before, stage)})
    scale = recipe.scale.model_copy(update={"samplers": 2, "reward_workers": 1})
    Started.begin(tmp_path / "ray", recipe.model_copy(update={"scale": scale}), cluster.address).end()
    begin(recipe, out=tmp_path / "plain")
    assert texts(tmp_path / "ray") == texts(tmp_path / "plain")


@pytest.mark.slow
def test_a_text_that_changes_within_a_step_ends_the_run_without_a_note_that_episodes_start_again(
    cluster: Any, tmp_path: Path
) -> None:
    """A sampler that has failed samples again only in a new session, so the step can't start again. A resumed run can."""
    built = recipe_of(tmp_path, {"environment": "own.py:Dated"})
    (tmp_path / "own.py").write_text(DATED)
    (tmp_path / "today").write_text(" on Monday")
    (tmp_path / "tomorrow").write_text(" on Tuesday")
    scale = built.scale.model_copy(update={"samplers": 2, "reward_workers": 1})
    started = Started.begin(tmp_path / "ray", built.model_copy(update={"scale": scale}), cluster.address)
    assert "different texts" in " ".join(started.end(code=2).split())
    with RunReader.open(started.run.path) as store:
        assert not store.events("episodes")
    started.resume(cluster.address).end()
    assert all(prompt.endswith("on Tuesday") for groups in texts(started.run.path) for prompt, _ in groups)


def test_with_lora_only_the_adapter_is_sent() -> None:
    small = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=48, context=64)
    model = Model(tiny=small, lora=Lora(rank=2))
    one, other = (load_policy(model, alphabet="0123456789+=", seed=seed) for seed in (0, 1))
    sent = weights_as_bytes(one)
    assert sent
    assert all("lora" in name for name in sent)
    assert sum(array.nbytes for array in sent.values()) < sum(p.nbytes for p in one.model.parameters()) / 4
    copy_weights(other, sent)
    for name, p in other.trainable.items():
        assert p.detach().numpy().tobytes() == one.trainable[name].detach().numpy().tobytes()
