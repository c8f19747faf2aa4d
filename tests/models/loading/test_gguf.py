"""GGUF files: converted once, re-tied, saved and loaded with their tokenizer; and files that are not GGUF."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oncurve.errors import DiskError, ModelError
from oncurve.models.loading import gguf
from oncurve.models.loading.load import ModelSummary, load_policy
from oncurve.models.loading.local_models import ORIGIN, list_local_models, read_gguf_metadata
from oncurve.recipe.schema.model import Model
from oncurve.records import Prompt
from tests.models.loading import gguf_files


def test_a_tied_head_and_embedding_get_the_values_of_the_head(tmp_path: Path) -> None:
    tensors = gguf_files.write(tmp_path / "small.gguf")
    gguf.convert(tmp_path / "small.gguf", tmp_path / "out", "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head.data_ptr() == embedding.data_ptr()
    assert np.allclose(head.detach().numpy(), tensors["output.weight"], atol=1e-6)
    assert model.config.tie_word_embeddings
    assert json.loads((tmp_path / "out" / ORIGIN).read_text())["file"] == "small.gguf"


@pytest.mark.parametrize(("head", "tied"), [("untied", False), ("absent", True)])
def test_an_untied_head_stays_untied(tmp_path: Path, head: str, tied: bool) -> None:
    tensors = gguf_files.write(tmp_path / "small.gguf", head=head)
    gguf.convert(tmp_path / "small.gguf", tmp_path / "out", "float32")
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {(tmp_path / "out").stat().st_mode & 0o666}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.tie_word_embeddings is tied
    assert np.allclose(model.get_input_embeddings().weight.detach().numpy(), tensors["token_embd.weight"], atol=1e-6)


def test_a_recipe_uses_a_gguf_file_and_it_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCURVE_CACHE", str(tmp_path / "cache"))
    gguf_files.write(tmp_path / "small.gguf")
    config = Model(source=str(tmp_path / "small.gguf"))
    policy = load_policy(config, alphabet=None, seed=0)
    summary = ModelSummary.of(policy)
    assert (summary.architecture, summary.template) == ("LlamaForCausalLM", True)
    assert summary.ends == ("<|im_end|>", "<|endoftext|>")  # </s> is an ordinary word here
    monkeypatch.setattr(gguf, "convert", None)  # a second conversion would fail
    again = load_policy(config, alphabet=None, seed=0)
    prompt = Prompt(id="p", messages=({"role": "user", "content": "ab"},))
    assert policy.tokenizer.decode(again.encode(prompt)) == "<|im_start|>user" + "ab<|im_end|><|im_start|>assistant"
    assert torch.equal(policy.head.weight_VD, again.head.weight_VD)
    models = list_local_models(tmp_path / "empty", tmp_path / "runs")
    assert [model.architecture for model in models if model.kind == "converted"] == ["LlamaForCausalLM"]


def test_the_tokenizer_survives_being_saved(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "small.gguf")
    direct = AutoTokenizer.from_pretrained(tmp_path, gguf_file="small.gguf")
    gguf.convert(tmp_path / "small.gguf", tmp_path / "out", "bfloat16")
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("abcd", "a b", "<|im_end|>abc"):
        assert saved.encode(text) == direct.encode(text)
    assert saved.chat_template == direct.chat_template == gguf_files.TEMPLATE


def test_a_begin_token_is_not_an_end_token(tmp_path: Path) -> None:
    """transformers 5.17 reads such files with the same token for begin and end."""
    gguf_files.write(tmp_path / "small.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="small.gguf")
    expected = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert gguf.find_end_tokens(tokenizer) == expected
    tokenizer.bos_token = tokenizer.eos_token = "<|im_start|>"
    assert gguf.find_end_tokens(tokenizer) == expected
    tokenizer.bos_token = tokenizer.eos_token = "<|endoftext|>"  # as GPT-2 has it: one token for both
    assert gguf.find_end_tokens(tokenizer) == expected[::-1]


def test_metadata_is_read_without_the_gguf_package(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "small.gguf")
    metadata = read_gguf_metadata(tmp_path / "small.gguf")
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.embedding_length"] == gguf_files.D


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "complete.gguf")
    data = (tmp_path / "complete.gguf").read_bytes()
    cases = {"text.gguf": b"hello", "short.gguf": data[:30], "truncated.gguf": data[: len(data) // 2]}
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError):
            gguf.convert(tmp_path / name, tmp_path / "out", "float32")
        assert not (tmp_path / "out").exists()
    with pytest.raises(
        ModelError, match="use the run or folder that it was made from, or download the file again: it may be truncated"
    ):
        gguf.convert(tmp_path / "truncated.gguf", tmp_path / "out", "float32")
    with pytest.raises(ModelError, match="it is a folder"):
        gguf.convert(tmp_path, tmp_path / "out", "float32")
    with pytest.raises(ModelError, match="no such file"):
        gguf.convert(tmp_path / "none.gguf", tmp_path / "out", "float32")


def test_an_architecture_that_is_not_supported_is_named(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "odd.gguf", architecture="plamo")
    with pytest.raises(ModelError, match=r"plamo.*(?s:.)*one of these architectures: .*llama"):
        gguf.convert(tmp_path / "odd.gguf", tmp_path / "out", "float32")


def test_an_unwritable_target_is_refused_and_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "small.gguf")
    with pytest.raises(DiskError, match=r"small\.gguf is a file"):
        gguf.convert(tmp_path / "small.gguf", tmp_path / "small.gguf" / "a" / "out", "float32")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(DiskError, match="can't be written"):
            gguf.convert(tmp_path / "small.gguf", tmp_path / "out", "float32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "small.gguf")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="already exists"):
        gguf.convert(tmp_path / "small.gguf", tmp_path / "out", "float32")


@pytest.mark.parametrize("kind", ["yarn", "none"])
def test_rope_scaling_that_cannot_be_read_is_refused(kind: str, tmp_path: Path) -> None:
    """transformers leaves it out, and the model would compute something else."""
    gguf_files.write(tmp_path / "model.gguf", rope_scaling=kind)
    with pytest.raises(ModelError, match="rope scaling 'yarn'" if kind == "yarn" else "rope factors of an unknown kind"):
        gguf.convert(tmp_path / "model.gguf", tmp_path / "folder", "float32")
    assert not (tmp_path / "folder").exists()
