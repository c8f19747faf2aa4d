"""`oncurve models`, `oncurve pairs` and `train --minutes` as a user calls them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from transformers.utils import logging

from oncurve.cli.models import table
from oncurve.model_families import PATHS
from oncurve.models.loading.local_models import LocalModel
from tests.cli.conftest import Oncurve
from tests.models.loading import gguf_files


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, with empty caches."""
    for name in ("ONCURVE_CACHE", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / ".caches" / name))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_models_are_listed_by_the_name_that_a_recipe_takes(oncurve: Oncurve, runs: Path, here: Path) -> None:
    assert "No models here yet" in oncurve("models").out
    gguf_files.write(here / "small.gguf")
    logging.enable_progress_bar()  # another command of this process may have disabled it
    converted = oncurve("models", "convert", "small.gguf", "models/mine", "--dtype", "float32")
    assert (converted.code, converted.err) == (0, ""), "no progress bar fills a log"
    found = {model["name"]: model for model in json.loads(oncurve("models", "--json", "--runs", runs).out)}
    assert found["small.gguf"]["kind"] == "gguf"
    assert found["models/mine"]["architecture"] == "LlamaForCausalLM"
    assert found[str(runs / "small-1" / "model")]["kind"] == "run"
    shown = oncurve("models", "--runs", runs).out
    assert all(name in shown for name in ("small.gguf", "models/mine"))


def test_a_mixture_says_how_many_of_its_parameters_are_active(oncurve: Oncurve, here: Path) -> None:
    """Qwen3-30B-A3B, by its settings."""
    (here / "mine").mkdir()
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
              "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
              "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False}  # fmt: skip
    (here / "mine" / "config.json").write_text(json.dumps(config))
    shown = oncurve("models", "mine").out
    assert "30.5B parameters, 3.35B of them active" in shown
    assert PATHS["attention"].partition(":")[0] in shown


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"model_type": "qwen3"}, "fast"),
        ({"model_type": "gemma2"}, "attention"),
        ({"model_type": "falcon"}, "general"),
        ({"model_type": "openai-gpt"}, "uncached"),
        ({"model_type": "cpmant"}, "refused"),
        ({"model_type": "published-tomorrow"}, "unknown"),
        ({"model_type": "published-tomorrow", "text_config": {"model_type": "llama"}}, "unknown"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}, "vision_config": {}}, "refused"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vision_config": {}}, "attention"),
        ({}, "unknown"),
    ],
)
def test_a_model_names_its_path_before_any_weights_are_read(
    oncurve: Oncurve, here: Path, config: dict[str, object], path: str
) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "config.json").write_text(json.dumps(config))
    (here / "mine" / "model.safetensors").write_bytes(b"not weights")
    (here / "adapter").mkdir()
    (here / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "mine"}))
    for name in ("mine", "adapter"):
        assert json.loads(oncurve("models", name, "--json").out)["path"] == path
        assert PATHS[path][:40] in oncurve("models", name).out.replace("\n", " ")


def test_a_path_of_what_is_no_model_is_refused(oncurve: Oncurve, here: Path) -> None:
    (here / "empty").mkdir()
    for name in ("empty", "nowhere", "OWNER/NAME"):
        result = oncurve("models", name)
        assert result.code == 2
        assert "fix" in result.err
    assert "fast path" in oncurve("models", "tiny").out
    gguf_files.write(here / "small.gguf")
    assert "fast path" in oncurve("models", "small.gguf").out


@pytest.mark.parametrize("longer", [(), ("cache/models/" + 50 * "x",)], ids=["all short", "beside a long one"])
@pytest.mark.parametrize("columns", [80, 100, 120])
def test_the_list_is_folded_and_never_cut(columns: int, longer: tuple[str, ...]) -> None:
    names = ("models/Qwen2.5-Coder-0.5B-Instruct", "runs/a/model")
    places = [LocalModel(name, "folder", "Qwen3ForCausalLM", 494_000_000, "F32", 3_087_000_000) for name in (*names, *longer)]
    out = io.StringIO()
    Console(file=out, width=columns).print(table(places))
    lines = out.getvalue().splitlines()
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in names)
    assert out.getvalue().count("Qwen3ForCausalLM") == out.getvalue().count("F32") == len(places)


def test_a_conversion_that_can_not_be_made_leaves_nothing(oncurve: Oncurve, here: Path) -> None:
    (here / "odd.gguf").write_bytes(b"hello")
    for words in (["odd.gguf", "out"], ["none.gguf", "out"]):
        result = oncurve("models", "convert", *words)
        assert result.code == 2
        assert "fix" in result.err
        assert "Traceback" not in result.err
    assert not (here / "out").exists()


def test_pairs_of_a_run(oncurve: Oncurve, runs: Path, here: Path) -> None:
    assert oncurve("pairs", "small-1", "-o", "pairs.jsonl", "--runs", runs).code == 0
    rows = [json.loads(line) for line in (here / "pairs.jsonl").read_text().splitlines()]
    assert rows
    assert all(set(row) == {"prompt", "chosen", "rejected", "margin"} and row["margin"] > 0 for row in rows)
    assert "already exists" in oncurve("pairs", "small-1", "-o", "pairs.jsonl", "--runs", runs).err
    unranked = oncurve("pairs", "small-1", "-o", "other.jsonl", "--people", "--runs", runs).err
    assert "no labels decide a pair" in unranked
    assert "rank groups in the studio" in unranked


def test_a_slice_of_time_ends_well_and_says_how_to_go_on(oncurve: Oncurve, recipe: Path, here: Path) -> None:
    first = oncurve("train", recipe, "--out", here / "run", "--minutes", "0")
    assert first.code == 0
    assert "stopped after 0 minutes" in first.out.replace("\n", " ")
    assert oncurve("train", "--resume", here / "run").code == 0
    assert json.loads((here / "run" / "run.json").read_text())["status"] == "finished"
