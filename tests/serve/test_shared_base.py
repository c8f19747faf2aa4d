"""Adapters side by side over one base: its weights are in memory once, and each model answers as it does alone."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from openai.types import Completion

from oncurve.engines.native.session import torch_session
from oncurve.local_http import listen
from oncurve.models import lora
from oncurve.models.loading.load import load_policy
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.operations.run_model import LoadedModel, load_model, load_models
from oncurve.recipe.schema.model import Lora, Model, TinyModel
from oncurve.serve.server import CompletionServer, EngineThread, ServedModel
from oncurve.training.start import begin
from tests.models.architectures import shake
from tests.training.builders import recipe

ALPHABET = "0123456789+=<>/abcdefghijklmnopqrstuvwxyz ,:"
SHAPE = TinyModel(layers=2, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=64, context=128)


@dataclass(frozen=True)
class Folders:
    base: Path
    plain: Path
    """An adapter of attention and MLPs, of rank 4."""
    scaled: Path
    """rsLoRA of rank 2, of two layers."""
    dora: Path
    run: Path
    """A run that trained an adapter, with a checkpoint of its first step."""

    @property
    def over_base(self) -> list[str]:
        return [*map(str, (self.plain, self.scaled, self.run)), f"{self.run}@grpo-1"]


def save_adapter(base: Path, folder: Path, seed: int, settings: Lora) -> Path:
    policy = load_policy(Model(source=str(base), lora=settings), alphabet=None, seed=seed)
    shake(policy.model, seed)
    lora.save(policy.model, folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("models")
    base = root / "base"
    load_policy(Model(tiny=SHAPE), alphabet=ALPHABET, seed=0).save(base)
    short = ("task.heldout=3", "sft.steps=1", "grpo.steps=2", "grpo.save_every=1", "grpo.optimiser.learning_rate=0.05")
    run = begin(recipe(f"model.source={base}", "model.lora.rank=2", *short), out=root / "run")
    return Folders(
        base,
        save_adapter(base, root / "plain", 1, Lora(rank=4)),
        save_adapter(base, root / "scaled", 2, Lora(rank=2, rslora=True, targets=("q_proj", "v_proj"))),
        save_adapter(base, root / "dora", 3, Lora(rank=2, dora=True)),
        run.path,
    )


@contextmanager
def serving(models: Sequence[LoadedModel], names: Sequence[str]) -> Iterator[openai.OpenAI]:
    engines = [EngineThread(torch_session(model.policy, 4, 100)) for model in models]
    with listen("127.0.0.1", 0) as listening:
        of_models = zip(names, models, engines, strict=True)
        server = CompletionServer(*(ServedModel(name, model.policy, engine) for name, model, engine in of_models))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.02)
            assert thread.is_alive(), "the server ended before it started"
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=300) as client:
            yield client
        server.should_exit = True
        thread.join(10)
    for engine in engines:
        engine.close()


def complete(client: openai.OpenAI, name: str) -> Completion:
    return client.completions.create(model=name, prompt="12+34=", max_tokens=24, temperature=0, logprobs=1)


def weights(model: LoadedModel) -> dict[str, torch.Tensor]:
    return {name.replace(".base_layer", ""): p for name, p in model.policy.model.named_parameters() if "lora_" not in name}


def test_adapters_share_the_weights_of_their_base(folders: Folders) -> None:
    models = load_models([*folders.over_base, str(folders.base)], Path("runs"))
    first = weights(models[0])
    for model in models[1:]:
        assert {name: p.data_ptr() for name, p in weights(model).items()} == {name: p.data_ptr() for name, p in first.items()}
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in first.values()}
    assert sum(storages.values()) == sum(p.nbytes for p in first.values()), "there is one copy, and nothing else in its storage"
    assert [lora.is_attached(model.policy.model) for model in models] == [True, True, True, True, False]
    assert [model.run is not None for model in models] == [False, False, True, True, False]


@pytest.mark.slow
def test_each_answers_as_it_does_alone(folders: Folders) -> None:
    """With the same greedy tokens as its merged weights, and their log-probs up to rounding, while the others answer too."""
    names = [*folders.over_base, str(folders.base)]
    alone = {}
    for name in names:
        (model,) = load_models([name], Path("runs"))
        assert not lora.is_attached(model.policy.model), "alone, an adapter is merged once and not in each pass"
        with serving([model], [name]) as client:
            alone[name] = complete(client, name)
    assert len({answer.choices[0].text for answer in alone.values()}) > 2, "the adapters matter"
    with serving(load_models(names, Path("runs")), names) as client, ThreadPoolExecutor(8) as threads:
        for name, answer in zip(names * 2, threads.map(lambda name: complete(client, name), names * 2), strict=True):
            ours, theirs = answer.choices[0].logprobs, alone[name].choices[0].logprobs
            assert ours is not None
            assert theirs is not None
            assert ours.tokens == theirs.tokens
            assert ours.token_logprobs == pytest.approx(theirs.token_logprobs, abs=1e-4)


def test_a_merged_checkpoint_has_the_log_probs_of_its_adapter(folders: Folders) -> None:
    target = f"{folders.run}@grpo-1"
    merged, attached = load_models([target], Path("runs"))[0].policy, load_model(target, Path("runs")).policy
    assert lora.is_attached(attached.model)
    assert not lora.is_zero(attached.model)
    ids = np.arange(20)
    pack = build_pack([PrefixGroup(ids, (ids[3:],), (0,))], torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(merged.pack_logps(pack), attached.pack_logps(pack), atol=1e-4, rtol=1e-4)


def test_adapters_that_change_or_lack_their_base_are_loaded_by_themselves(folders: Folders, tmp_path: Path) -> None:
    """PiSSA subtracts its first matrices from the base's weights, DoRA merges itself in each pass, and a finished run has its
    merged model if its base is gone."""
    pissa = shutil.copytree(folders.plain, tmp_path / "pissa")
    config = json.loads((pissa / lora.CONFIG).read_text())
    (pissa / lora.CONFIG).write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
    before = {name: p.clone() for name, p in weights(load_model(str(folders.base), Path("runs"))).items()}
    models = load_models([*map(str, (folders.base, folders.plain, pissa, folders.dora))], Path("runs"))
    assert [lora.is_attached(model.policy.model) for model in models] == [False, True, False, False]
    assert all(torch.equal(p, before[name]) for name, p in weights(models[1]).items())

    gone = folders.base.rename(tmp_path / "gone")
    try:
        runs = [shutil.copytree(folders.run, tmp_path / name) for name in ("one", "two")]
        models = load_models([str(run) for run in runs], Path("runs"))
        assert not any(lora.is_attached(model.policy.model) for model in models)
    finally:
        gone.rename(folders.base)
