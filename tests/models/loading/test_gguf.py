"""GGUF files: converted once, tied again, saved, and loaded with their tokenizer; and what is no such file."""

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


def test_head_and_embedding_that_were_one_are_one_again_and_it_is_the_head_that_stays(tmp_path: Path) -> None:
    drawn = gguf_files.write(tmp_path / "small.gguf")
    gguf.convert(tmp_path / "small.gguf", tmp_path / "out", "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    head, words = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head.data_ptr() == words.data_ptr()
    assert np.allclose(head.detach().numpy(), drawn["output.weight"], atol=1e-6)
    assert model.config.tie_word_embeddings
    assert json.loads((tmp_path / "out" / ORIGIN).read_text())["file"] == "small.gguf"


@pytest.mark.parametrize(("head", "tied"), [("own", False), ("absent", True)])
def test_a_head_of_its_own_stays_apart(tmp_path: Path, head: str, tied: bool) -> None:
    drawn = gguf_files.write(tmp_path / "small.gguf", head=head)
    gguf.convert(tmp_path / "small.gguf", tmp_path / "out", "float32")
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == {(tmp_path / "out").stat().st_mode & 0o666}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.tie_word_embeddings is tied
    assert np.allclose(model.get_input_embeddings().weight.detach().numpy(), drawn["token_embd.weight"], atol=1e-6)


def test_a_recipe_names_the_file_and_the_conversion_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCURVE_CACHE", str(tmp_path / "cache"))
    gguf_files.write(tmp_path / "small.gguf")
    config = Model(source=str(tmp_path / "small.gguf"))
    policy = load_policy(config, alphabet=None, seed=0)
    found = ModelSummary.of(policy)
    assert (found.architecture, found.template) == ("LlamaForCausalLM", True)
    assert found.ends == ("<|im_end|>", "<|endoftext|>")  # </s> is a word like any other here
    monkeypatch.setattr(gguf, "convert", None)  # a second conversion would fail
    again = load_policy(config, alphabet=None, seed=0)
    prompt = Prompt(id="p", messages=({"role": "user", "content": "ab"},))
    assert policy.tokenizer.decode(again.encode(prompt)) == "<|im_start|>user" + "ab<|im_end|><|im_start|>assistant"
    assert torch.equal(policy.head.weight_VD, again.head.weight_VD)
    kept = list_local_models(tmp_path / "empty", tmp_path / "runs")
    assert [place.architecture for place in kept if place.kind == "converted"] == ["LlamaForCausalLM"]


def test_the_tokenizer_survives_being_saved(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "small.gguf")
    direct = AutoTokenizer.from_pretrained(tmp_path, gguf_file="small.gguf")
    gguf.convert(tmp_path / "small.gguf", tmp_path / "out", "bfloat16")
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("abcd", "a b", "<|im_end|>abc"):
        assert saved.encode(text) == direct.encode(text)
    assert saved.chat_template == direct.chat_template == gguf_files.TEMPLATE


def test_a_token_that_begins_texts_is_no_end_token(tmp_path: Path) -> None:
    """As transformers 5.17 reads such files: begin and end are the same token there."""
    gguf_files.write(tmp_path / "small.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="small.gguf")
    wanted = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert gguf.find_end_tokens(tokenizer) == wanted
    tokenizer.bos_token = tokenizer.eos_token = "<|im_start|>"
    assert gguf.find_end_tokens(tokenizer) == wanted
    tokenizer.bos_token = tokenizer.eos_token = "<|endoftext|>"  # as GPT-2 has it: one token for both
    assert gguf.find_end_tokens(tokenizer) == wanted[::-1]


def test_the_head_of_a_file_is_read_without_the_package(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "small.gguf")
    told = read_gguf_metadata(tmp_path / "small.gguf")
    assert told["general.architecture"] == "llama"
    assert told["llama.embedding_length"] == gguf_files.D


def test_what_is_no_gguf_file_is_told(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    cases = {"text.gguf": b"hello", "short.gguf": whole[:30], "cut.gguf": whole[: len(whole) // 2]}
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ModelError):
            gguf.convert(tmp_path / name, tmp_path / "out", "float32")
        assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError, match="download the file again: it may be truncated"):
        gguf.convert(tmp_path / "cut.gguf", tmp_path / "out", "float32")
    with pytest.raises(ModelError, match="it is a folder"):
        gguf.convert(tmp_path, tmp_path / "out", "float32")
    with pytest.raises(ModelError, match="no such file"):
        gguf.convert(tmp_path / "none.gguf", tmp_path / "out", "float32")


def test_an_architecture_that_is_not_supported_is_named(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "odd.gguf", architecture="plamo")
    with pytest.raises(ModelError, match=r"plamo.*(?s:.)*one of these architectures: .*llama"):
        gguf.convert(tmp_path / "odd.gguf", tmp_path / "out", "float32")


def test_a_place_that_can_not_be_written_is_told_and_a_disk_that_is_full_leaves_nothing(tmp_path: Path) -> None:
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


def test_nothing_is_written_over(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "small.gguf")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="already there"):
        gguf.convert(tmp_path / "small.gguf", tmp_path / "out", "float32")
