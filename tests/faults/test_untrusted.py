"""Data from elsewhere runs no code, reads no file, and gets no secret."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncurve.errors import ModelError, OncurveError, RecipeError
from oncurve.models.loading.load import load_policy
from oncurve.recipe.schema.model import Model
from oncurve.records import Prompt
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.runs.secrets import redact
from oncurve.training.start import begin
from tests.faults.cases import GRPO, SFT, recipe

SECRET = "s3cr3t-value-of-the-environment"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in Hugging Face format."""
    folder = tmp_path_factory.mktemp("model") / "model"
    load_policy(
        Model.model_validate({"tiny": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "mlp_width": 48}}),
        alphabet="01+=",
        seed=0,
    ).save(folder)
    return folder


def changed(model: Path, to: Path, file: str, **values: Any) -> Path:
    shutil.copytree(model, to)
    path = to / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return to


def open_model(folder: Path, **options: Any) -> Any:
    return load_policy(Model.model_validate({"source": str(folder), **options}), alphabet=None, seed=0)


CODE = """
from pathlib import Path
Path("{mark}").write_text("the folder's code has run")
from transformers import Qwen3Config, Qwen3ForCausalLM
class Config(Qwen3Config): pass
class Own(Qwen3ForCausalLM):
    config_class = Config
class Tokenizer: pass
"""


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("config.json", {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Own"}),
        ("config.json", {"AutoModelForCausalLM": "own.Own"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["own.Tokenizer", None]}),
    ],
)
def test_code_in_a_model_folder_is_not_run(file: str, names: dict[str, Any], model: Path, tmp_path: Path) -> None:
    folder = changed(model, tmp_path / "model", file, auto_map=names)
    (folder / "own.py").write_text(CODE.format(mark=tmp_path / "mark"))
    if file == "config.json":
        with pytest.raises(ModelError, match="trust_remote_code"):
            open_model(folder)
    else:  # a tokenizer of a known kind is opened without its maker's code; any other is refused
        with contextlib.suppress(ModelError):
            open_model(folder)
    assert not (tmp_path / "mark").exists()


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_in_place_of_weights_is_not_opened(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Bomb(tmp_path / "mark")}))
    with pytest.raises(ModelError, match="safetensors"):
        open_model(tmp_path / "model")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}{{ x }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ open('/etc/passwd').read() }}",
        "{{ messages.append(1) }}{{ lipsum.__globals__ }}",
        "{% for i in range(10**12) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('no') }}",
        "{% if %}",
    ],
)
def test_a_chat_template_can_do_nothing_but_write_text(template: str, model: Path, tmp_path: Path) -> None:
    folder = changed(model, tmp_path / "model", "tokenizer_config.json", chat_template=template)
    for extra in folder.glob("chat_template*"):
        extra.unlink()
    policy = open_model(folder)
    with pytest.raises(ModelError, match="template"):
        policy.encode(Prompt(id="p", messages=({"role": "user", "content": "0"},)))


@pytest.mark.parametrize("key", ["vocab_file", "tokenizer_file", "merges_file"])
def test_a_tokenizer_that_names_files_elsewhere_is_refused(key: str, model: Path, tmp_path: Path) -> None:
    folder = changed(model, tmp_path / "model", "tokenizer_config.json", **{key: "/etc/passwd"})
    with pytest.raises(ModelError, match="outside"):
        open_model(folder)


def everything_in(folder: Path) -> bytes:
    return b"".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file())


def test_a_key_that_a_reward_lets_slip_reaches_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error contains the key, as clients' errors do. The run stores the failure without the key."""
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)

    def slipping(completion: str) -> float:
        if len(completion) % 2:
            raise ConnectionError(f"401: wrong key {os.environ['JUDGE_API_KEY']}, Authorization: Bearer abcdefghijklmnop1234")
        return 1.0

    small = recipe({**GRPO, "steps": 2, "max_failure_share": 1.0})
    run = begin(small, out=tmp_path / "run", rewards=RewardMix([FunctionReward(slipping, "slip")]))
    with closing(sqlite3.connect(run.database)) as store:
        failures = [row[0] for row in store.execute("SELECT DISTINCT failure FROM completions WHERE failure IS NOT NULL")]
        store.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert len(failures) == 1
    assert failures[0].startswith("slip: ConnectionError: 401: wrong key ***, Authorization: Bearer *** (test_untrusted.py:")
    assert SECRET.encode() not in everything_in(run.path)
    assert b"abcdefghijklmnop1234" not in everything_in(run.path)


@pytest.mark.parametrize(
    "value", [SECRET, "sk-abcdefghijklmnopqrstuvwx", "http://me:hunter2@judge.example/v1", "hf_abcdefghijklmnopqrstuv"]
)
def test_a_recipe_that_holds_a_secret_is_refused_before_it_is_written(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", SECRET)
    reward = {"type": "python", "name": "short", "function": "tests.faults.grading:short", "arguments": {"key": value}}
    with pytest.raises(RecipeError, match=r"holds a key or password(.|\n)*environment variable") as caught:
        begin(recipe({**SFT, "steps": 1}, rewards=[reward]), out=tmp_path / "run")
    assert value not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_ordinary_words_are_left_alone() -> None:
    text = "Qwen/Qwen3-0.6B at http://localhost:8000/v1, sk-1, the key to 1,000 tokens: https://example.com/a@b"
    assert redact(text) == text


def test_a_checkpoint_from_elsewhere_is_data(tmp_path: Path) -> None:
    """A manifest can name no file outside of its folder, nor one that is not safetensors or JSON."""
    from oncurve.runs.checkpoints.files import _write_manifest, load

    (tmp_path / "secret.json").write_text('"private"')
    folder = tmp_path / "checkpoints" / "grpo-000001"
    folder.mkdir(parents=True)
    entry = {"name": "x", "size": 9, "sha256": "0"}
    for name in ("../../secret.json", str(tmp_path / "secret.json"), "x.pkl"):
        _write_manifest(folder, {"stage": "grpo", "step": 1, "number": 1, "files": {name: entry}})
        with pytest.raises(OncurveError, match="not a checkpoint file"):
            load(folder)
