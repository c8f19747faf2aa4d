"""Bad models and data of every stage on the command line: one message with a fix, or a skip that is counted and shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncurve.models import lora
from oncurve.models.loading.load import load_policy
from oncurve.recipe.schema.model import Lora, Model, TinyModel
from tests.cli.conftest import Oncurve
from tests.cli.test_bad_input import assert_refused
from tests.models.loading import gguf_files

SHAPE = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=64, context=128)
LETTERS = "0123456789+= abc"
GRPO = {"type": "grpo", "steps": 1, "prompts_per_step": 1, "group_size": 2, "sampling.max_new_tokens": 4}
REWARD_MODEL = {"type": "reward_model", "data": "DATA", "steps": 2, "batch_size": 2, "heldout_share": 0.0}
DPO = {"type": "dpo", "pairs": "DATA", "steps": 1, "batch_size": 2}
SFT = {"type": "sft", "data": "DATA", "steps": 3, "batch_size": 2}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
ROW = {"prompt": "1+1=", "answer": "2", "completion": "2"}
NO_SYSTEM = (
    "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system role') }}{% endfor %}{{ messages[0].content }}"
)
DROPPED = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"


def model(folder: Path, template: str | None = None, seed: int = 0, context: int = 128, alphabet: str = LETTERS) -> Path:
    policy = load_policy(Model(tiny=SHAPE.model_copy(update={"context": context})), alphabet=alphabet, seed=seed)
    policy.tokenizer.chat_template = template
    policy.save(folder)
    return folder


def recipe(folder: Path, stage: dict[str, Any], rows: list[dict[str, Any]], source: Path | str = "tiny", **more: Any) -> Path:
    """One stage; its data are the rows."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny = SHAPE.model_dump_json() if source == "tiny" else "{}"
    lines = ['name = "bad"', "threads = 1", f"model.source = {json.dumps(str(source))}"]
    lines += [f"model.tiny.{key} = {json.dumps(value)}" for key, value in json.loads(tiny).items() if value is not None]
    lines += [f"{key.replace('__', '.')} = {json.dumps(value)}" for key, value in more.items()]
    task = f'type = "file", path = "{data}"' if stage["type"] == "grpo" else 'type = "arithmetic", digits = 1'
    lines += [f"task = {{ {task}, heldout = 1 }}", 'rewards = [{ type = "answer" }]', "[[stages]]"]
    lines += [f"{key} = {json.dumps(value).replace('DATA', str(data))}" for key, value in stage.items()]
    (folder / "bad.toml").write_text("\n".join(lines) + "\n")
    return folder / "bad.toml"


@pytest.mark.parametrize("stage", [GRPO, SFT, DPO, REWARD_MODEL], ids=["grpo", "sft", "dpo", "reward_model"])
@pytest.mark.parametrize("template", [NO_SYSTEM, DROPPED], ids=["refuses it", "leaves it out"])
def test_a_template_without_a_role_that_the_data_needs(
    oncurve: Oncurve, tmp_path: Path, template: str, stage: dict[str, Any]
) -> None:
    """A bad row is found wherever it is, before a folder is created, even if every prompt fits the model."""
    system = [{"role": "system", "content": "a"}, {"role": "user", "content": "1"}]
    rows = [PAIR | ROW | {"prompt": prompt} for prompt in (system[1:], system[1:], system)]
    file = recipe(tmp_path, stage, rows, model(tmp_path / "m", template, context=8192))
    assert_refused(oncurve("train", file, "--runs", tmp_path / "runs"), "rows.jsonl", "3", "system")
    assert not list(tmp_path.glob("runs/*"))


def test_chats_for_a_model_without_a_template(oncurve: Oncurve, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    file = recipe(tmp_path, SFT, [{"messages": chat}], model(tmp_path / "m", context=8192))
    assert_refused(oncurve("train", file, "--runs", tmp_path / "runs"), "rows.jsonl/sft/1", "without a chat template")
    assert not list(tmp_path.glob("runs/*"))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("stage", [GRPO, SFT, DPO, REWARD_MODEL], ids=["grpo", "sft", "dpo", "reward_model"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.write_text(""), ["no rows"]),
        (lambda path: path.write_bytes('{"prompt": "Zürich"}'.encode("utf-16")), ["rows.jsonl:1", "UTF-8"]),
        (lambda path: path.write_bytes('{"prompt": "Zürich"}\n'.encode("latin-1")), ["rows.jsonl:1", "UTF-8"]),
        (lambda path: path.write_text("[1, 2]"), ["rows.jsonl:1", "object"]),
        (lambda path: path.write_text(r'{"prompt": "cut \ud83d"}'), ["rows.jsonl:1", "half of a character"]),
        (_folder, ["it is a folder"]),
        (Path.unlink, ["no such file"]),
    ],
    ids=["empty", "utf-16", "latin-1", "no objects", "half a character", "a folder", "missing"],
)
def test_a_file_that_is_none(
    oncurve: Oncurve, tmp_path: Path, stage: dict[str, Any], spoil: Callable[[Path], object], words: list[str]
) -> None:
    file = recipe(tmp_path, stage, [PAIR | ROW])
    spoil(tmp_path / "rows.jsonl")
    assert_refused(oncurve("train", file, "--runs", tmp_path / "runs"), *words)
    assert not list(tmp_path.glob("runs*"))


@pytest.mark.parametrize(
    ("stage", "rows", "words"),
    [
        (SFT | {"heldout_share": 0.9}, [ROW], ["sft.heldout_share", "no example is left to train on"]),
        (REWARD_MODEL | {"heldout_share": 0.9}, [PAIR], ["reward_model.heldout_share", "more prompts"]),
        (GRPO, [ROW, ROW], ["task.path", "no training prompts"]),
        (SFT, [ROW | {"completion": "1" * 200}], ["rows.jsonl/sft/1", "for a demonstration", "128 positions"]),
        (DPO, [PAIR, PAIR | {"chosen": "1" * 200}], ["rows.jsonl/2", "a pair of", "128 positions"]),
        (REWARD_MODEL, [PAIR | {"chosen": "1" * 200}], ["nothing to learn from", "reward_model.max_tokens"]),
        (REWARD_MODEL | {"max_tokens": 3}, [PAIR], ["nothing to learn from", "reward_model.max_tokens"]),
        (SFT | {"data": "stage:best"}, [ROW], ["sft.data", "rejection_sample"]),
        (REWARD_MODEL | {"source": "nowhere/at/all"}, [PAIR], ["nowhere/at/all"]),
    ],
    ids=[
        "sft keeps all aside", "reward_model keeps all aside", "grpo keeps all aside", "sft too long", "dpo too long",
        "reward_model longer than the model", "reward_model too long", "no such stage", "no such source",
    ],
)  # fmt: skip
def test_data_and_settings_that_leave_nothing_to_do(
    oncurve: Oncurve, tmp_path: Path, stage: dict[str, Any], rows: list[dict[str, Any]], words: list[str]
) -> None:
    file = recipe(tmp_path, stage, rows)
    file.write_text(
        file.read_text().replace("heldout = 1", "heldout = 1, heldout_share = 0.9" if stage is GRPO else "heldout = 1")
    )
    assert_refused(oncurve("train", file, "--runs", tmp_path / "runs"), *words)
    assert not list(tmp_path.glob("runs/*"))


def test_a_reward_model_that_begins_from_a_model_with_other_tokens(oncurve: Oncurve, tmp_path: Path) -> None:
    other = model(tmp_path / "other", alphabet="xyz")
    file = recipe(tmp_path, REWARD_MODEL | {"source": str(other)}, [PAIR], model(tmp_path / "m"))
    assert_refused(
        oncurve("train", file, "--runs", tmp_path / "runs"), "reward_model.source", "its vocabulary differs from the policy's"
    )
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("stage", "good", "bad", "words"),
    [
        (REWARD_MODEL, PAIR, {"prompt": "1+1=", "chosen": "2"}, ["rows.jsonl:2", "no column 'rejected'", "prompt, chosen"]),
        (SFT, ROW, {"prompt": "1+1=", "answer": "2"}, ["rows.jsonl:2", "completion"]),
        (GRPO, ROW, {"question": "1+1="}, ["rows.jsonl:2", "prompt", "question"]),
        (DPO, PAIR, {"prompt": "1+1=", "rejected": "2"}, ["rows.jsonl:2", "chosen"]),
    ],
    ids=["reward_model", "sft", "grpo", "dpo"],
)
def test_a_missing_column_is_reported_with_its_line(
    oncurve: Oncurve, tmp_path: Path, stage: dict[str, Any], good: dict[str, Any], bad: dict[str, Any], words: list[str]
) -> None:
    file = recipe(tmp_path, stage, [good, bad])
    assert_refused(oncurve("train", file, "--runs", tmp_path / "runs"), *words)
    assert not list(tmp_path.glob("runs/*"))


def test_nothing_at_all_is_left_of_a_run_whose_model_does_not_do(oncurve: Oncurve, tmp_path: Path) -> None:
    """Not even the folder of runs: the model is loaded and checked before one is created."""
    file = recipe(tmp_path, GRPO, [ROW], model(tmp_path / "m"), model__lora__targets=["nothing"])
    assert_refused(oncurve("train", file, "--runs", tmp_path / "runs"), "model.lora.targets", "q_proj")
    assert_refused(oncurve("train", file, "--out", tmp_path / "deep" / "run"), "model.lora.targets", "q_proj")
    assert_refused(oncurve("train", file, "--out", tmp_path / "m"), "already exists")
    assert_refused(oncurve("train", file, "--out", file / "run"), "is a file")
    assert_refused(oncurve("train", file, "--runs", file), "runs are stored in a folder")
    assert {path.name for path in tmp_path.iterdir()} == {"m", "rows.jsonl", "bad.toml"}


def test_an_adapter_for_another_base(oncurve: Oncurve, tmp_path: Path) -> None:
    adapted = load_policy(Model(source=str(model(tmp_path / "m")), lora=Lora(rank=2)), alphabet=None, seed=0)
    lora.save(adapted.model, tmp_path / "adapter")
    file = recipe(tmp_path, GRPO, [ROW], model(tmp_path / "other", seed=1), model__adapter=str(tmp_path / "adapter"))
    assert_refused(oncurve("train", file, "--runs", tmp_path / "runs"), "an adapter for another base", "model.source")
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("command", "target", "words"),
    [
        (["eval"], "rows.jsonl", ["a file that is not GGUF", "oncurve models"]),
        (["serve", "--port", "0"], "bad.toml", ["a recipe, not a model", "train it first", "oncurve train"]),
        (["serve", "--port", "0"], "m@grpo-3", ["not a run", "grpo-3", "oncurve runs"]),
        (["chat"], "m@grpo-3", ["not a run", "grpo-3", "oncurve runs"]),
    ],
    ids=["eval of a file", "serve of a recipe", "serve of no checkpoint", "chat with no checkpoint"],
)
def test_what_is_neither_a_run_nor_a_model(
    oncurve: Oncurve, tmp_path: Path, command: list[str], target: str, words: list[str]
) -> None:
    file = recipe(tmp_path, GRPO, [ROW], model(tmp_path / "m"))
    more = ["--task", file] if command == ["eval"] else []
    assert_refused(oncurve(command[0], f"{tmp_path}/{target}", *command[1:], *more), *words)


def test_a_gguf_file_of_an_architecture_that_is_not_supported(oncurve: Oncurve, tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "odd.gguf", architecture="plamo")
    file = recipe(tmp_path, GRPO, [ROW], tmp_path / "odd.gguf")
    assert_refused(oncurve("train", file, "--runs", tmp_path / "runs"), "plamo", "llama")
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("stage", [REWARD_MODEL, DPO], ids=["reward_model", "dpo"])
def test_pairs_that_are_equal_are_counted_and_seen_and_nothing_else_is_refused(
    oncurve: Oncurve, tmp_path: Path, stage: dict[str, Any]
) -> None:
    equal = {"prompt": "1+1=", "chosen": "2", "rejected": "2 "}
    file = recipe(tmp_path, stage, [PAIR, equal, PAIR | {"chosen": "1"}])
    done = oncurve("train", file, "--runs", tmp_path / "runs")
    assert done.code == 0, done
    assert "1 row of equal texts left out" in " ".join(done.out.split())
    only = recipe(tmp_path, stage, [equal])
    assert_refused(oncurve("train", only, "--runs", tmp_path / "others"), "nothing to learn from", "equal texts")
    assert not list(tmp_path.glob("others/*"))


@pytest.mark.parametrize("stage", [REWARD_MODEL, SFT], ids=["reward_model", "sft"])
def test_a_loss_that_is_no_number_moves_nothing_and_is_seen(oncurve: Oncurve, tmp_path: Path, stage: dict[str, Any]) -> None:
    """A learning rate so high that the first update breaks the weights: every later loss is NaN."""
    rows = [PAIR | ROW, PAIR | ROW | {"prompt": "2+2="}]
    file = recipe(tmp_path, {**stage, "steps": 12}, rows)
    file.write_text(file.read_text() + "optimiser.learning_rate = 1e30\noptimiser.schedule = 'constant'\n")
    done = oncurve("train", file, "--runs", tmp_path / "runs")
    assert "Traceback" not in done.err + done.out
    assert "skipped" in done.out + done.err
