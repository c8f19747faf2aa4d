"""`oncurve serve` as a process: what it prints, that it keeps its key secret, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import openai
import pytest

from oncurve.cli.app import main
from oncurve.models.loading.load import build_model, build_tokenizer
from oncurve.recipe.schema.model import TinyModel

KEY = "a-key-from-the-environment"
SHAPE = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=64, context=128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer("0123456789+= ")
    build_model(SHAPE, tokenizer, 0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_a_served_folder(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "oncurve",
        "serve",
        str(folder),
        "--port",
        "0",
        "--name",
        "mine",
        "--json",
        "--until-closed",
    ]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "ONCURVE_SERVE_KEY": KEY, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert ready.keys() == {"address", "model"}
    with openai.OpenAI(base_url=f"{ready['address']}/v1", api_key=KEY, max_retries=0) as client:
        assert client.completions.create(model="mine", prompt="1+2=", max_tokens=4, n=3).usage
    stranger = openai.OpenAI(base_url=f"{ready['address']}/v1", api_key="other", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.completions.create(model="mine", prompt="1+2=")
    out, err = process.communicate(timeout=300)  # closes standard input
    assert process.returncode == 0
    assert KEY not in out + err
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{ready['address']}/health", timeout=5)


@pytest.mark.parametrize(
    ("target", "message"),
    [("nowhere/at/all/here", "no such folder"), ("tiny", "neither a run nor a model folder")],
)
def test_a_model_that_does_not_exist(target: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", target, "--port", "0"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_several_folders(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    names = [str(folder), str(other)]
    process = subprocess.Popen(
        [sys.executable, "-m", "oncurve", "serve", *names, "--port", "0", "--json", "--until-closed"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert (ready["model"], ready["models"]) == (names[0], names)
    with openai.OpenAI(base_url=f"{ready['address']}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list().data] == names
        texts = {client.completions.create(model=name, prompt="1+2=", max_tokens=9, seed=1).choices[0].text for name in names}
        assert len(texts) == 1, "they are the same model"
    process.communicate(timeout=300)  # closes standard input
    assert process.returncode == 0


@pytest.mark.parametrize("more", [[], ["--name", "mine"]])
def test_models_need_names_of_their_own(folder: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), str(folder), *more]) == 2
    assert "models without a name of their own" in " ".join(capsys.readouterr().err.split())


def test_a_port_that_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from oncurve.local_http import listen

    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        assert main(["serve", str(folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "already in use" in " ".join(capsys.readouterr().err.split())
