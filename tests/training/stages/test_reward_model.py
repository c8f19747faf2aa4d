"""Reward models: the loss by hand, learning what is preferred, aspects, ratings, steps, the saved checkpoint, exact resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from oncurve.errors import DataError
from oncurve.models.heads.classifier import classify
from oncurve.recipe.schema.stages import RewardModel
from oncurve.records import Completion, Group, Prompt
from oncurve.rewards.models.reward_model import RewardModelOptions, RewardModelReward, load_step_model
from oncurve.tasks.data.reward_model_data import read_reward_model_data
from oncurve.training.stages.reward_model import RewardModelLoop
from tests.training.builders import policy


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pairs(count: int = 12) -> list[dict[str, Any]]:
    """Nines are preferred to zeros."""
    return [{"prompt": f"{i}+", "chosen": f"{i % 10}9", "rejected": f"{i % 10}0"} for i in range(count)]


def loop(data: str, folder: Path, **options: Any) -> RewardModelLoop:
    settings = {"data": data, "steps": 30, "batch_size": 4, "optimiser": {"learning_rate": 5e-3}, **options}
    return RewardModelLoop(RewardModel.model_validate(settings), 0, policy(), folder)


def test_the_loss_is_minus_log_sigma_of_the_gap(tmp_path: Path) -> None:
    stage_loop = loop(write(tmp_path / "p.jsonl", pairs()), tmp_path, batch_size=2)
    with torch.no_grad():
        gaps = [
            classify(stage_loop.model, [c.texts[0]])[0, 0] - classify(stage_loop.model, [c.texts[1]])[0, 0]
            for c in stage_loop.rows[:2]
        ]
    expected = float(-torch.stack(gaps).sigmoid().log().mean())
    metrics = stage_loop.trainer.update(stage_loop.rows[:2])
    assert metrics["loss"] == pytest.approx(expected, abs=1e-5)


def test_it_learns_what_is_preferred_on_prompts_it_has_not_seen_and_is_saved_as_others_load_it(tmp_path: Path) -> None:
    before = {name: p.clone() for name, p in policy().model.named_parameters()}
    stage_loop = loop(write(tmp_path / "p.jsonl", pairs(20)), tmp_path)
    assert {j.prompt.shown for j in read_reward_model_data(stage_loop.stage).heldout}.isdisjoint(
        j.prompt.shown for j in read_reward_model_data(stage_loop.stage).train
    )
    last = [stage_loop.step(n) for n in range(1, 31)][-1].metrics
    assert last["heldout_pair_accuracy"] == 1.0
    assert 0 <= last["calibration_error"] < 0.5
    assert all(torch.equal(p, before[name]) for name, p in stage_loop.policy.model.named_parameters())
    folder = tmp_path / "reward_models" / "reward_model"
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    words = AutoTokenizer.from_pretrained(folder)
    ids = stage_loop.heldout[0].texts
    with torch.no_grad():
        observed = theirs(input_ids=torch.tensor([ids[0]])).logits
        assert torch.allclose(observed, classify(stage_loop.model, [ids[0]]), atol=1e-5)
    assert theirs.config.num_labels == 1
    empty = np.zeros(1, np.float32)
    texts = ["39", "30"]
    rows = tuple(Completion(np.zeros(1, np.int64), t, "end", empty, empty, empty, np.ones(1, bool)) for t in texts)
    reward = RewardModelReward("rm", 1.0, RewardModelOptions(model="stage:reward_model"))
    reward.set_run_folder(tmp_path)
    good, bad = (s.value for s in reward.score(Group(Prompt(id="p", text="3+"), np.zeros(1, np.int64), rows)))  # type: ignore[union-attr]
    assert good > bad  # type: ignore[operator]
    assert words.eos_token == stage_loop.policy.tokenizer.eos_token


def test_each_aspect_has_its_own_head(tmp_path: Path) -> None:
    """Nines are better in one aspect and worse in the other; a pair without a label for an aspect does not count in it."""
    rows = [{**row, "kind": 1, "short": -2} for row in pairs(16)] + [
        {"prompt": "9+", "chosen": "11", "rejected": "12", "kind": 0, "short": 1}
    ]
    stage_loop = loop(write(tmp_path / "p.jsonl", rows), tmp_path, aspects=["kind", "short"], heldout_share=0.0)
    assert stage_loop.rows[-1].values == (0.0, 1.0)
    for n in range(1, 31):
        metrics = stage_loop.step(n).metrics
    assert metrics["pair_accuracy"] > 0.9
    with torch.no_grad():
        nine, zero = classify(stage_loop.model, stage_loop.rows[0].texts)
    assert nine[0] > zero[0]
    assert nine[1] < zero[1]
    assert stage_loop.model.config.id2label == {0: "kind", 1: "short"}


def test_ratings_by_regression(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+", "completion": str(i % 10), "reward": float(i % 2)} for i in range(20)]
    stage_loop = loop(write(tmp_path / "p.jsonl", rows), tmp_path, kind="ratings", steps=60, heldout_share=0.0, batch_size=20)
    losses = [stage_loop.step(n).metrics["loss"] for n in range(1, 61)]
    assert losses[-1] < 0.5 * losses[0]


def test_steps_are_judged_at_their_last_tokens_and_the_reward_reads_them_so(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}=", "completions": [f"{i % 10}+1=", "9"], "labels": [True, i % 2 == 0]} for i in range(8)]
    stage_loop = loop(write(tmp_path / "p.jsonl", rows), tmp_path, kind="steps", heldout_share=0.0)
    assert stage_loop.rows[3].ends == (5, 6)  # "3=" is 2 tokens, "3+1=" 4 more, "9" the last
    for n in range(1, 31):
        stage_loop.step(n)
    reward = load_step_model(str(tmp_path / "reward_models" / "reward_model"), 1, "cpu", "here")
    right = reward.score(Prompt(id="p", text="3="), "3+1=9", [(0, 4), (4, 5)])
    with torch.no_grad():
        expected = classify(stage_loop.model, [stage_loop.rows[3].texts[0]])[0].softmax(-1)[[5, 6], 1]
    assert right == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_resumed_stage_ends_in_the_same_bits(tmp_path: Path) -> None:
    data = write(tmp_path / "p.jsonl", pairs())
    full = loop(data, tmp_path, steps=4)
    for n in range(1, 3):
        full.step(n)
    kept = {name: {k: v.clone() for k, v in group.items()} for name, group in full.state().items()}
    again = loop(data, tmp_path, steps=4)
    again.load_state(kept)
    for n in range(3, 5):
        full.step(n)
        again.step(n)
    assert all(torch.equal(a, b) for a, b in zip(full.model.parameters(), again.model.parameters(), strict=True))


def test_dialogues_give_their_prompt_and_what_teaches_nothing_is_counted(tmp_path: Path) -> None:
    lines = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: why?\n\nAssistant: "
    rows = [
        {"chosen": lines + "because", "rejected": lines + "no idea"},
        {"chosen": lines + "because", "rejected": lines + "because "},
        {"chosen": lines + "because", "rejected": "\n\nHuman: hi\n\nAssistant: hello"},
    ]
    stage = RewardModel(data=write(tmp_path / "p.jsonl", rows), heldout_share=0.0)
    result = read_reward_model_data(stage)
    (pair,) = result.train
    assert pair.texts == ("because", "no idea")
    assert [m["role"] for m in pair.prompt.messages or ()] == ["user", "assistant", "user"]
    assert result.left_out == {"of equal texts": 1, "of dialogues that differ before the last answer": 1}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1", "chosen": "2"}, "no column 'rejected'"),
        ({"prompt": "1", "chosen": "2", "rejected": 3}, "holds no text"),
        ({"chosen": "2", "rejected": "3"}, "no dialogue that ends with an answer"),
        ({"prompt": "1", "chosen": "2", "rejected": "3", "m": -1}, "a margin of -1"),
        ({"prompt": "1", "chosen": "2", "rejected": "3", "m": "much"}, "holds 'much'"),
    ],
)
def test_a_bad_row_is_reported_with_its_line(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    data = write(tmp_path / "p.jsonl", [{"prompt": "1", "chosen": "2", "rejected": "3", "m": 0.5}, row])
    stage = RewardModel(data=data, margin="m" if "m" in row else None)
    with pytest.raises(DataError, match=words) as raised:
        read_reward_model_data(stage)
    assert raised.value.where == f"{data}:2"


def test_a_pair_that_compares_no_aspect_is_left_out(tmp_path: Path) -> None:
    pair = {"prompt": "1", "chosen": "2", "rejected": "3"}
    data = write(tmp_path / "p.jsonl", [pair | {"kind": 1}, pair | {"kind": 0}, pair])
    result = read_reward_model_data(RewardModel(data=data, aspects=("kind", "true"), heldout_share=0.0))
    assert [judged.values for judged in result.train] == [(1.0, 0.0)]
    assert result.left_out == {"without a label for kind, true": 2}


def test_a_share_that_holds_out_everything_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "p.jsonl", [{"prompt": "1", "chosen": "2", "rejected": "3"}])
    with pytest.raises(DataError, match=r"heldout_share: 0\.8"):
        read_reward_model_data(RewardModel(data=data, heldout_share=0.8))


def test_a_file_of_equal_pairs_teaches_nothing(tmp_path: Path) -> None:
    data = write(tmp_path / "p.jsonl", [{"prompt": "1", "chosen": "2", "rejected": "2"}])
    with pytest.raises(DataError, match="1 row of equal texts left out"):
        read_reward_model_data(RewardModel(data=data))
