"""Broken model folders, GGUF files and data files: each is one clear error, or works. Never a traceback, never a hang."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import DataError, ModelError, OncurveError
from oncurve.models import lora
from oncurve.models.loading.load import ModelSummary, load_policy
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.model import Model
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Prompt
from oncurve.tasks.registry import build_task
from tests.faults.error_sites import record_errors, unreached
from tests.faults.test_fuzz import PLAIN, exit_code_of, in_time
from tests.models.loading import gguf_files

DEEP = "[" * 100_000 + "]" * 100_000
Damage = Callable[[Path], None]


def config(**values: Any) -> Damage:
    return edited("config.json", **values)


def edited(name: str, **values: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def replaced(name: str, content: str | bytes) -> Damage:
    return lambda folder: void((folder / name).write_bytes(content.encode() if isinstance(content, str) else content))


def void(_: object) -> None:
    pass


def removed(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def adapter_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return damage


def value(number: float, name: str = "model.norm.weight") -> Damage:
    return weights(lambda tensors: void(tensors[name].view(-1)[0].fill_(number)))


def cut(name: str, keep: float) -> Damage:
    def damage(folder: Path) -> None:
        os.truncate(folder / name, int((folder / name).stat().st_size * keep))

    return damage


def fifo(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def header(text: bytes, length: int | None = None) -> Damage:
    return replaced("model.safetensors", struct.pack("<Q", len(text) if length is None else length) + text)


BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MODELS: dict[str, tuple[Damage, str]] = {
    "NaN in a weight": (value(float("nan")), "not finite"),
    "infinity in a weight": (value(float("inf")), "not finite"),
    "minus infinity in the embedding": (value(-float("inf"), "model.embed_tokens.weight"), "not finite"),
    "NaN for eps": (config(rms_norm_eps=float("nan")), "rms_norm_eps"),
    "infinite eps": (config(rms_norm_eps=float("inf")), "rms_norm_eps"),
    "negative eps": (config(rms_norm_eps=-1.0), "rms_norm_eps"),
    "NaN for a dropout": (config(attention_dropout=float("nan")), "attention_dropout"),
    "bitsandbytes in 4 bits": (config(quantization_config=BITS), "quantised already"),
    "bitsandbytes in 8 bits": (config(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}), "quantised"),
    "bitsandbytes without a method": (config(quantization_config={"load_in_4bit": True}), "quantised"),
    "another quantisation": (config(quantization_config={"quant_method": "unheard-of"}), ""),
    "quantisation is a list": (config(quantization_config=[1]), ""),
    "deep config": (replaced("config.json", DEEP), ""),
    "deep key in the config": (lambda folder: deep_key(folder / "config.json"), ""),
    "deep tokenizer config": (replaced("tokenizer_config.json", DEEP), ""),
    "deep tokenizer": (replaced("tokenizer.json", DEEP), ""),
    "deep generation config": (replaced("generation_config.json", DEEP), ""),
    "no config": (removed("config.json"), "without config.json"),
    "empty config": (replaced("config.json", ""), ""),
    "config is a list": (replaced("config.json", "[]"), ""),
    "config is text": (replaced("config.json", '"x"'), ""),
    "config is binary": (replaced("config.json", b"\xff\xfe\x00\x01"), ""),
    "config is a FIFO": (fifo("config.json"), ""),
    "tokenizer config is a FIFO": (fifo("tokenizer_config.json"), "neither a file"),
    "tokenizer is a FIFO": (fifo("tokenizer.json"), "neither a file"),
    "weights are a FIFO": (fifo("model.safetensors"), "neither a file"),
    "no model type": (config(model_type=None), ""),
    "model type is a number": (config(model_type=3), ""),
    "unknown model type": (config(model_type="unheard_of"), ""),
    "architectures are a number": (config(architectures=3), ""),
    "layers are negative": (config(num_hidden_layers=-1), ""),
    "layers are text": (config(num_hidden_layers="many"), ""),
    "more layers than weights": (config(num_hidden_layers=3), ""),
    "no heads": (config(num_attention_heads=0), ""),
    "odd heads": (config(num_attention_heads=3), ""),
    "width of another model": (config(hidden_size=48), ""),
    "vocabulary is negative": (config(vocab_size=-5), ""),
    "vocabulary is too small": (config(vocab_size=3), ""),
    "vocabulary is null": (config(vocab_size=None), ""),
    "no positions": (config(max_position_embeddings=0), ""),
    "positions are text": (config(max_position_embeddings="long"), ""),
    "activation is unknown": (config(hidden_act="unheard_of"), ""),
    "dtype is unknown": (config(dtype="float3"), ""),
    "rope is a number": (config(rope_parameters=3, rope_scaling=3), ""),
    "end token is text": (edited("generation_config.json", eos_token_id="x"), ""),
    "end token is beyond the vocabulary": (edited("generation_config.json", eos_token_id=10**9), ""),
    "no weights": (removed("model.safetensors"), ""),
    "empty weights": (replaced("model.safetensors", b""), ""),
    "half of the weights": (cut("model.safetensors", 0.5), ""),
    "weights without their end": (cut("model.safetensors", 0.99), ""),
    "a header of 2^60 bytes": (header(b"{}", 2**60), ""),
    "a header that is a list": (header(b"[]"), ""),
    "a header with a bad dtype": (header(b'{"x":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}' + b"\0" * 4), ""),
    "weights of another shape": (weights(lambda t: void(t.update({"model.norm.weight": torch.ones(7)}))), ""),
    "a weight is missing": (weights(lambda t: void(t.pop("model.norm.weight"))), "lack model.norm.weight"),
    "no tokenizer": (removed("tokenizer.json"), ""),
    "empty tokenizer": (replaced("tokenizer.json", "{}"), ""),
    "half a tokenizer": (cut("tokenizer.json", 0.5), ""),
    "tokenizer config is a list": (replaced("tokenizer_config.json", "[]"), ""),
    "template is a number": (edited("tokenizer_config.json", chat_template=5), ""),
    "template does not parse": (edited("tokenizer_config.json", chat_template="{% if %}"), ""),
}


def deep_key(path: Path) -> None:
    text = path.read_text().rstrip().removesuffix("}")
    path.write_text(text + ', "x": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    tiny = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "mlp_width": 48}
    load_policy(Model.model_validate({"tiny": tiny}), alphabet="0123456789+=", seed=0).save(folder)
    return folder


def use(source: Path) -> None:
    """Loads a model and samples two tokens with it, as every command that uses one does first."""
    policy = load_policy(Model.model_validate({"source": str(source)}), alphabet=None, seed=0)
    assert str(ModelSummary.of(policy))
    engine = NativeEngine(policy, Engine(slots=2))
    groups = engine.sample([Prompt("p", text="1+1=")], 2, Sampling(max_new_tokens=2), SampleKey(0, 1))
    assert len(groups[0].completions) == 2


def error_of(attempt: Callable[[], None], kind: type[OncurveError]) -> OncurveError | None:
    """The user's error of an attempt, with a reason and a fix; None if it succeeds. Any other error raises through it."""
    try:
        with in_time():
            attempt()
    except kind as caught:
        error = caught
    else:
        return None
    assert error.because
    assert error.fix
    return error


ADAPTERS: dict[str, tuple[Damage, str]] = {
    "no weights": (removed("adapter_model.safetensors"), "not a LoRA adapter"),
    "half of the weights": (cut("adapter_model.safetensors", 0.5), "can't be read"),
    "NaN in a weight": (adapter_weights(lambda t: next(iter(t.values())).view(-1)[0].fill_(math.nan)), "not finite"),
    "a weight is missing": (adapter_weights(lambda t: t.pop(next(iter(t)))), "another base"),
    "weights of another shape": (adapter_weights(lambda t: t.update({next(iter(t)): torch.ones(3, 3)})), "another base"),
    "a weight of no layer": (adapter_weights(lambda t: t.update(x=torch.ones(3))), "another base"),
    "deep config": (replaced("adapter_config.json", DEEP), "can't be read"),
    "empty config": (replaced("adapter_config.json", ""), "can't be read"),
    "config is a list": (replaced("adapter_config.json", "[]"), "without a base"),
    "config is a FIFO": (fifo("adapter_config.json"), ""),
    "weights are a FIFO": (fifo("adapter_model.safetensors"), "not a LoRA adapter"),
    "no base": (edited("adapter_config.json", base_model_name_or_path=None), "without a base"),
    "base is not there": (edited("adapter_config.json", base_model_name_or_path="./gone"), "no such folder"),
    "base is a number": (edited("adapter_config.json", base_model_name_or_path=3), ""),
    "of another kind": (edited("adapter_config.json", peft_type="IA3"), "only LoRA"),
    "of no kind": (edited("adapter_config.json", peft_type="UNHEARD"), "can't be read"),
    "rank is text": (edited("adapter_config.json", r="many"), "can't be read"),
    "rank is 0": (edited("adapter_config.json", r=0), ""),
    "rank is negative": (edited("adapter_config.json", r=-2), ""),
    "targets are a number": (edited("adapter_config.json", target_modules=3), "can't be read"),
    "targets are not there": (edited("adapter_config.json", target_modules=["gone"]), ""),
    "targets are the head": (edited("adapter_config.json", target_modules=["lm_head"]), ""),
    "fingerprint is a list": (replaced("oncurve-base.json", "[]"), "another base"),
    "deep fingerprint": (replaced("oncurve-base.json", DEEP), "can't be read"),
}


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    settings = Model.model_validate({"source": str(model), "lora": {"rank": 2}})
    lora.save(load_policy(settings, alphabet=None, seed=0).model, folder)
    return folder


@pytest.mark.parametrize("damage", [damage for damage, (_, message) in MODELS.items() if message])
def test_a_broken_model_folder_is_one_error(damage: str, model: Path, tmp_path: Path) -> None:
    use_damaged(model, tmp_path / "model", *MODELS[damage])


@pytest.mark.slow
def test_every_error_of_the_loaders_of_models_is_caused_by_a_broken_file(
    model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONCURVE_CACHE", str(tmp_path / "cache"))
    tables = (("model", model, MODELS), ("adapter", adapter, ADAPTERS))
    damages = {f"{kind}: {name}": (folder, *table[name]) for kind, folder, table in tables for name in table}
    bugs: dict[str, str] = {}
    with record_errors() as reached:
        for number, (name, (folder, change, message)) in enumerate(damages.items()):
            try:
                use_damaged(folder, tmp_path / str(number) / "model", change, message)
            except Exception as error:
                bugs[name] = f"{type(error).__name__}: {error}"
        for name, content in GGUFS.items():
            (tmp_path / f"{name[:9]}.gguf").write_bytes(content)
            assert error_of(partial(use, tmp_path / f"{name[:9]}.gguf"), ModelError) is not None, name
    assert bugs == {}
    assert unreached(LOADERS, reached, NOT_BY_A_BROKEN_FILE) == []


LOADERS = ("models/loading/load.py", "models/loading/gguf.py", "models/loading/local_models.py", "models/lora.py")
NOT_BY_A_BROKEN_FILE = {
    "is not installed": "the tests' environment has every optional package: tests/models/loading/test_load.py",
    "'model.device'": "tests/cli/test_mutations.py",
    "'model.quantise'": "the same",
    "'model.lora.dora'": "the same",
    "model.template_options": "the same",
    "model.system_prompt": "the same",
    "'a file that is not GGUF'": "the same",
    "'a model with its own code'": "tests/faults/test_untrusted.py",
    "points outside": "the same",
    "opening a pickle runs": "the same",
    "ModelError(source, what, because=because, fix=fix)": "no decoder of text: tests/models/loading/test_load.py",
    "can't be reached to download it": "the same",
    "its tokenizer can't be loaded": "tests/training/stages/test_distil.py",
    "'it is a folder'": "tests/models/loading/test_gguf.py",
    "rope scaling": "the same",
    "an adapter with": "tests/models/test_lora.py",
    "'the path does not exist'": "the same",
    "never overwritten": "the same",
    '"can\'t be written"': "the same",
    "config.json says which family": "tests/cli/test_models.py",
}
"""Errors that no broken file causes, by a part of their source, and what tests them."""


def use_damaged(origin: Path, folder: Path, change: Damage, message: str) -> None:
    """A damaged copy of a model's folder is one error, which has the message if there is one, or works."""
    shutil.copytree(origin, folder)
    change(folder)
    error = error_of(lambda: use(folder), OncurveError)
    if message:
        assert error is not None, "it was loaded"
        assert message in str(error)
    assert exit_code_of("models", str(folder), "--json") in (0, 2)


def gguf_value(key: str, kind: int, packed: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + packed


def gguf_file(*pairs: bytes, count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs) if count is None else count) + b"".join(pairs)


TEXT = struct.pack("<Q", 5) + b"llama"
GGUFS = {
    "architecture is an integer": gguf_file(gguf_value("general.architecture", 4, struct.pack("<I", 5))),
    "architecture is a float": gguf_file(gguf_value("general.architecture", 6, struct.pack("<f", 5.0))),
    "architecture is a bool": gguf_file(gguf_value("general.architecture", 7, b"\1")),
    "architecture is a list": gguf_file(gguf_value("general.architecture", 9, struct.pack("<IQ", 4, 0))),
    "architecture is empty": gguf_file(gguf_value("general.architecture", 8, struct.pack("<Q", 0))),
    "architecture is not UTF-8": gguf_file(gguf_value("general.architecture", 8, struct.pack("<Q", 2) + b"\xff\xfe")),
    "architecture is unknown": gguf_file(gguf_value("general.architecture", 8, struct.pack("<Q", 3) + b"abc")),
    "nothing but the architecture": gguf_file(gguf_value("general.architecture", 8, TEXT)),
    "a text of 2^60 bytes": gguf_file(gguf_value("general.architecture", 8, struct.pack("<Q", 2**60))),
    "2^60 keys": gguf_file(gguf_value("general.architecture", 8, TEXT), count=2**60),
    "a kind that does not exist": gguf_file(gguf_value("general.architecture", 99, b"\0" * 8)),
    "only the magic": b"GGUF",
    "empty": b"",
    "no GGUF": b"PK\3\4" * 10,
}


@pytest.mark.parametrize("content", GGUFS)
def test_a_broken_gguf_file_is_one_error(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(GGUFS[content])
    with in_time(), pytest.raises(ModelError) as caught:
        use(file)
    assert caught.value.fix
    assert exit_code_of("models", "--json", str(tmp_path)) in (0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_a_truncated_gguf_file_is_one_error(keep: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    gguf_files.write(file)
    os.truncate(file, int(file.stat().st_size * keep))
    with in_time(), pytest.raises(ModelError):
        use(file)


ROW = '{"prompt": "1+1=", "answer": "2"}\n'
DATA: dict[str, tuple[str, bytes]] = {
    "deep JSON": (".jsonl", DEEP.encode()),
    "deep row": (".jsonl", (ROW * 3 + '{"prompt": ' + DEEP + "}").encode()),
    "deep list": (".json", DEEP.encode()),
    "huge number": (".jsonl", (ROW + '{"prompt": "a", "answer": ' + "9" * 9999 + "}").encode()),
    "not UTF-8": (".jsonl", ROW.encode() + b"\xff\xfe\n"),
    "UTF-16": (".jsonl", ROW.encode("utf-16")),
    "a number": (".jsonl", b"5\n"),
    "half a line": (".jsonl", ROW.encode()[:-9]),
    "empty": (".jsonl", b""),
    "blank lines": (".jsonl", b"\n\n\n"),
    "NUL bytes": (".jsonl", b"\0" * 4096),
    "half a gzip": (".jsonl.gz", gzip.compress(ROW.encode() * 500)[:40]),
    "no gzip": (".jsonl.gz", ROW.encode()),
    "gzip that grows": (".jsonl.gz", gzip.compress(b" " * 20_000_000)),
    "no parquet": (".parquet", b"PAR1" + b"\0" * 100 + b"PAR1"),
    "empty parquet": (".parquet", b""),
    "CSV without a header": (".csv", b"\n\n"),
    "CSV with an open quote": (".csv", b'prompt,answer\n"a,b\n' + b"x," * 9999),
    "CSV with NUL": (".csv", b"prompt,answer\na\0,b\n"),
    "lone surrogate": (".jsonl", b'{"prompt": "\\ud800", "answer": "1"}\n'),
}


@pytest.mark.parametrize("content", DATA)
def test_a_broken_data_file_is_one_error(content: str, tmp_path: Path) -> None:
    ending, data = DATA[content]
    path = tmp_path / f"data{ending}"
    path.write_bytes(data)
    settings = parse_recipe({**PLAIN, "task": {"type": "file", "path": str(path), "heldout": 1}})

    def read() -> None:
        task = build_task(settings.task, "task")
        for i in range(min(task.train_size or 0, 3)):
            task.train_prompt(i)

    error_of(read, DataError)


def test_there_are_enough_of_them() -> None:
    assert len(MODELS) + len(ADAPTERS) + len(GGUFS) + len(DATA) >= 60
