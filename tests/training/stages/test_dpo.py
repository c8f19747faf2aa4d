"""The stage dpo: pairs from files, packs, the reference, runs and their resume."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from oncurve.errors import DataError
from oncurve.recipe.schema.stages import Dpo, RewardModel
from oncurve.records import Prompt
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.tasks.data.preference_pairs import Pair, read_pairs
from oncurve.tasks.data.reward_model_data import read_reward_model_data
from oncurve.training.stages.dpo import DpoLoop
from oncurve.training.start import begin, resume
from tests.training.builders import apart, gradient, policy, recipe, snapshot
from tests.training.test_trainer import StopAfter, fingerprint

STILL = {"learning_rate": 1e-9, "max_grad_norm": 0.0}
PAIRS = [Pair(Prompt(id=str(i), text=f"{i}+1="), f"{i + 1}", f"{i}{i}={i}") for i in range(6)]
ROWS = [{"prompt": p.prompt.text, "chosen": p.chosen, "rejected": p.rejected} for p in PAIRS]


def stage(**options: Any) -> Dpo:
    return Dpo.model_validate({"pairs": "pairs.jsonl", "steps": 3, "batch_size": 4, "optimiser": STILL, **options})


def test_pairs_are_read_from_any_kind_of_file(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "pairs.jsonl").write_text(lines)
    with gzip.open(tmp_path / "pairs.jsonl.gz", "wt") as file:
        file.write(lines)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "pairs.parquet")
    for name in ("pairs.jsonl", "pairs.jsonl.gz", "pairs.parquet"):
        result = read_pairs(stage(pairs=str(tmp_path / name))).rows
        assert [(p.prompt.text, p.chosen, p.rejected) for p in result] == [(p.prompt.text, p.chosen, p.rejected) for p in PAIRS]


def test_columns_have_names_and_completions_may_be_messages(tmp_path: Path) -> None:
    row = {"q": "1+1=", "good": [{"role": "assistant", "content": "2"}], "bad": "3"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    (result,) = read_pairs(stage(pairs=str(tmp_path / "p.jsonl"), prompt="q", chosen="good", rejected="bad", chat=True)).rows
    assert (result.chosen, result.rejected) == ("2", "3")
    assert result.prompt.messages == ({"role": "user", "content": "1+1="},)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps({"prompt": "1", "chosen": "2"}), "no column 'rejected'"),
        (json.dumps({"prompt": "1", "rejected": "2"}), "no column 'chosen'"),
        (json.dumps({"chosen": "1", "rejected": "2"}), "name the prompt column"),
        (json.dumps({"chosen": [1], "rejected": [2]}), "name the prompt column"),
        (json.dumps({"prompt": "1", "chosen": "2", "rejected": "2"}), "nothing to learn from\n.*1 row of equal texts left out"),
        ("", "nothing to learn from\n.*the file has no rows"),
        ("{", "not valid JSON"),
    ],
)
def test_rows_that_teach_nothing_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(DataError, match=words):
        read_pairs(stage(pairs=str(tmp_path / "p.jsonl")))


def test_what_teaches_nothing_is_left_out_and_counted_as_for_a_reward_model(tmp_path: Path) -> None:
    rows = [*ROWS[:2], ROWS[0] | {"rejected": ROWS[0]["chosen"]}, ROWS[0] | {"chosen": " "}, ROWS[0] | {"rejected": ""}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = read_pairs(stage(pairs=str(tmp_path / "p.jsonl")))
    judged = read_reward_model_data(RewardModel(data=str(tmp_path / "p.jsonl"), heldout_share=0.0))
    assert [(p.chosen, p.rejected) for p in result.rows] == [j.texts for j in judged.train]
    assert result.left_out == judged.left_out == {"of equal texts": 1, "with an empty answer": 2}


def test_a_missing_file_is_reported_before_a_run_is_made(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file\n.*dpo\.pairs names it"):
        begin(recipe("sft.type=dpo", f"dpo.pairs={tmp_path}/none.jsonl"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_pair_longer_than_the_model_is_refused() -> None:
    with pytest.raises(DataError, match="a pair of 137 tokens"):
        DpoLoop(stage(), 0, policy(), [Pair(Prompt(id="long", text="1+1="), "1" * 132, "2")])


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo"])
def test_the_split_into_packs_does_not_matter_and_never_splits_a_pair(loss: str) -> None:
    result = []
    for budget in (1, 14, 10_000):
        loop = DpoLoop(stage(loss=loss, tokens_per_pack=budget), 0, policy(), PAIRS)
        loop.step(1)
        result.append(gradient(loop.policy.model))
    assert float(result[0].norm()) > 0
    assert apart(result[0], result[2]) < 1e-5
    assert apart(result[1], result[2]) < 1e-5


def test_the_reference_is_the_policy_as_the_stage_found_it() -> None:
    """At the first step log-ratios are 0 (loss log 2); the reference stays while the policy changes; simpo has none."""
    loop = DpoLoop(stage(optimiser={"learning_rate": 1e-2}), 0, policy(), PAIRS)
    first = loop.step(1).metrics
    assert first["loss"] == pytest.approx(0.6931472, abs=1e-5)
    assert first["pair_margin"] == pytest.approx(0.0, abs=1e-5)
    assert loop.reference is not None
    before = loop.reference.clone()
    later = [loop.step(n).metrics for n in range(2, 25)]
    assert torch.equal(loop.reference, before)
    assert later[-1]["loss"] < 0.3
    assert later[-1]["pair_accuracy"] == 1.0
    free = DpoLoop(stage(loss="simpo", beta=2.0), 0, policy(), PAIRS)
    free.step(1)
    assert free.reference is None
    assert "reference_logps" not in free.state()


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_a_run_that_crashed_resumes_to_the_same_bits(tmp_path: Path, pairs_file: Path) -> None:
    config = recipe("sft.type=dpo", f"dpo.pairs={pairs_file}", "dpo.steps=4", "dpo.batch_size=4", "dpo.save_every=2")
    with pytest.raises(KeyboardInterrupt):
        begin(config, out=tmp_path / "crashed", listeners=[StopAfter("dpo", 3)])
    run = RunFolder(tmp_path / "crashed")
    resume(run)
    assert fingerprint(run) == fingerprint(begin(config, out=tmp_path / "whole"))
    with RunReader.open(run.path) as store:
        assert [s.type for s in store.stages()] == ["dpo", "grpo"]


def test_bfloat16_moves(tmp_path: Path, pairs_file: Path) -> None:
    config = recipe("sft.type=dpo", f"dpo.pairs={pairs_file}", "model.dtype=bfloat16", "dpo.optimiser.learning_rate=1e-3")
    loop = DpoLoop(next(s for s in config.stages if isinstance(s, Dpo)), 0, policy(dtype="bfloat16"))
    before = snapshot(loop.policy.model)
    loop.step(1)
    assert not torch.equal(snapshot(loop.policy.model), before)
