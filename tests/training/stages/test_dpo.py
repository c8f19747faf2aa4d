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

from oncurve.errors import DataError, RecipeError
from oncurve.recipe.schema.stages import Dpo, RewardModel
from oncurve.records import Prompt
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.tasks.data.preference_pairs import LabelledCompletion, Pair, read_preferences
from oncurve.tasks.data.reward_model_data import read_reward_model_data
from oncurve.training.stages.dpo import NOT_COMPUTED, DpoLoop
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
        result = read_preferences(stage(pairs=str(tmp_path / name))).rows
        pairs = [(p.prompt.text, p.chosen, p.rejected) for p in result if isinstance(p, Pair)]
        assert pairs == [(p.prompt.text, p.chosen, p.rejected) for p in PAIRS]


def test_columns_have_names_and_completions_may_be_messages(tmp_path: Path) -> None:
    row = {"q": "1+1=", "good": [{"role": "assistant", "content": "2"}], "bad": "3"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    (result,) = read_preferences(
        stage(pairs=str(tmp_path / "p.jsonl"), prompt="q", chosen="good", rejected="bad", chat=True)
    ).rows
    assert isinstance(result, Pair)
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
        read_preferences(stage(pairs=str(tmp_path / "p.jsonl")))


def test_what_teaches_nothing_is_left_out_and_counted_as_for_a_reward_model(tmp_path: Path) -> None:
    rows = [*ROWS[:2], ROWS[0] | {"rejected": ROWS[0]["chosen"]}, ROWS[0] | {"chosen": " "}, ROWS[0] | {"rejected": ""}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = read_preferences(stage(pairs=str(tmp_path / "p.jsonl")))
    judged = read_reward_model_data(RewardModel(data=str(tmp_path / "p.jsonl"), heldout_share=0.0))
    assert [(p.chosen, p.rejected) for p in result.rows if isinstance(p, Pair)] == [j.texts for j in judged.train]
    assert result.left_out == judged.left_out == {"of equal texts": 1, "with an empty answer": 2}


def test_a_missing_file_is_reported_before_a_run_is_made(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file\n.*dpo\.pairs names it"):
        begin(recipe("sft.type=dpo", f"dpo.pairs={tmp_path}/none.jsonl"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_pair_longer_than_the_model_is_refused() -> None:
    with pytest.raises(DataError, match="a pair of 137 tokens"):
        DpoLoop(stage(), 0, policy(), [Pair(Prompt(id="long", text="1+1="), "1" * 132, "2")])


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo", "kto"])
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


def test_kto_starts_at_one_half_and_measures_the_kl_on_other_prompts() -> None:
    """With policy = reference every log-ratio and the KL are 0, so each completion's loss is 1 − σ(0)."""
    loop = DpoLoop(stage(loss="kto", optimiser={"learning_rate": 1e-2}), 0, policy(), PAIRS)
    first = loop.step(1).metrics
    assert first["loss"] == pytest.approx(0.5, abs=1e-5)
    assert first["kl"] == pytest.approx(0.0, abs=1e-5)
    for pair, other in zip(loop.rows, loop.mismatched, strict=True):
        assert pair.prompt_ids.tolist() != other.prompt_ids.tolist()
        assert [ids.tolist() for ids in pair.completion_ids] == [ids.tolist() for ids in other.completion_ids]
    later = [loop.step(n).metrics for n in range(2, 25)]
    assert later[-1]["loss"] < 0.4
    assert later[-1]["pair_accuracy"] == 1.0


LABELLED = [
    LabelledCompletion(pair.prompt, text, is_desirable)
    for pair in PAIRS
    for text, is_desirable in ((pair.chosen, True), (pair.rejected, False))
]
UNPAIRED = [row for i, row in enumerate(LABELLED) if i % 3]
"""Rows of kto: some prompts with both kinds, some with one."""


def test_kto_on_single_completions_is_kto_on_their_pairs() -> None:
    """A batch of all completions of the pairs: the same loss and gradient. The KL is 0, as at every first step."""
    pairs = DpoLoop(stage(loss="kto", batch_size=6), 0, policy(), PAIRS)
    singles = DpoLoop(stage(loss="kto", label_column="label", batch_size=12), 0, policy(), LABELLED)
    expected, metrics = pairs.step(1).metrics, singles.step(1).metrics
    assert apart(gradient(singles.policy.model), gradient(pairs.policy.model)) < 1e-5
    assert metrics["loss"] == pytest.approx(expected["loss"])
    assert "pair_accuracy" not in metrics


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_kto_raises_desirable_completions_and_lowers_others(weight: float) -> None:
    options = {"loss": "kto", "label_column": "label", "desirable_weight": weight, "optimiser": {"learning_rate": 1e-2}}
    result = []
    for budget in (1, 10_000):
        loop = DpoLoop(stage(**options, tokens_per_pack=budget), 0, policy(), UNPAIRED)
        assert loop.step(1).metrics["kl"] == pytest.approx(0.0, abs=1e-5)
        result.append(gradient(loop.policy.model))
    assert apart(*result) < 1e-5
    last = [loop.step(n).metrics for n in range(2, 25)][-1]
    assert last["chosen_reward"] > 0.1
    assert last["rejected_reward"] < -0.1


def test_labelled_rows_are_read_with_prompts_or_as_dialogues(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    rows = [
        {"prompt": "1+1=", "completion": "3", "ok": False},
        {"completion": chat, "ok": 1},
        {"prompt": "1", "completion": " ", "ok": True},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = read_preferences(stage(pairs=str(tmp_path / "p.jsonl"), loss="kto", label_column="ok"))
    assert [(r.completion, r.is_desirable) for r in result.rows if isinstance(r, LabelledCompletion)] == [
        ("3", False),
        ("2", True),
    ]
    assert result.rows[1].prompt.messages == ({"role": "user", "content": "1+1="},)
    assert result.left_out == {"with an empty answer": 1}
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "1", "completion": "2", "ok": "yes"}))
    with pytest.raises(DataError, match=r"column 'ok' holds no label\n.*'yes'"):
        read_preferences(stage(pairs=str(tmp_path / "p.jsonl"), loss="kto", label_column="ok"))


def test_a_fork_uses_no_row_that_the_reference_has_not_scored() -> None:
    """More steps or other pairs would need log-probs of a policy that is gone."""
    rows = [Pair(Prompt(id=str(i), text=f"{i}+1="), f"{i + 1}", f"{i}{i}") for i in range(9)]
    short = DpoLoop(stage(steps=1), 0, policy(), rows)
    short.step(1)
    state = short.state()
    assert (state["reference_logps"]["chosen_rejected"] == NOT_COMPUTED).sum() == 2 * 5
    DpoLoop(stage(steps=1), 0, policy(), rows).load_state(state)
    with pytest.raises(RecipeError, match=r"dpo\.steps.*\n.*further rows"):
        DpoLoop(stage(steps=2), 0, policy(), rows).load_state(state)
    with pytest.raises(RecipeError, match=r"dpo\.pairs.*\n.*other rows"):
        DpoLoop(stage(steps=1), 0, policy(), [*rows[1:], rows[0]]).load_state(state)


def test_kto_needs_a_second_prompt() -> None:
    with pytest.raises(DataError, match="no second prompt"):
        DpoLoop(stage(loss="kto"), 0, policy(), [PAIRS[0], PAIRS[0]])


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_run_that_crashed_resumes_to_the_same_bits(loss: str, tmp_path: Path, pairs_file: Path) -> None:
    size = ("dpo.steps=4", "dpo.batch_size=4", "dpo.save_every=2")
    config = recipe("sft.type=dpo", f"dpo.pairs={pairs_file}", f"dpo.loss={loss}", *size)
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
