"""A reward model trained here, given to TRL's own trainer as its reward: the same scores for the same completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from oncurve.models.policy import Policy
from oncurve.recipe.schema.stages import RewardModel
from oncurve.records import Completion, Group, Prompt
from oncurve.rewards.models.reward_model import RewardModelOptions, RewardModelReward
from oncurve.training.stages.reward_model import RewardModelLoop
from tests.training.builders import policy

TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"


def writer(chat: bool) -> Policy:
    made = policy(alphabet="0123456789+=[]aus")
    made.tokenizer.chat_template = TEMPLATE if chat else None
    return made


def trained(folder: Path, chat: bool) -> Path:
    """A reward model that prefers nines to zeros, as its stage writes it."""
    rows = [{"prompt": f"{i}+", "chosen": f"{i % 10}9", "rejected": f"{i % 10}0"} for i in range(12)]
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = {"data": str(data), "steps": 12, "batch_size": 8, "heldout_share": 0.0, "optimiser": {"learning_rate": 5e-3}}
    loop = RewardModelLoop(RewardModel.model_validate(told), 0, writer(chat), folder)
    for n in range(1, 13):
        loop.step(n)
    return folder / "reward_models" / "reward_model"


class Watched(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, whose questions to the reward model are written down with its answers."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.seen: list[tuple[Any, str, float]] = []

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
        scores = super()._calculate_rewards(inputs, prompts, completions, ids)
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        self.seen += zip(prompts, texts, scores[:, 0].tolist(), strict=True)
        return scores


def ours(model: Path, prompt: Any, text: str) -> float:
    asked = Prompt("p", text=prompt) if isinstance(prompt, str) else Prompt("p", messages=tuple(prompt))
    zeros = np.zeros(1, np.float32)
    row = Completion(np.zeros(1, np.int64), text, "end", zeros, zeros, zeros, np.ones(1, bool))
    (found,) = RewardModelReward("rm", 1.0, RewardModelOptions(model=str(model))).score(
        Group(asked, np.zeros(1, np.int64), (row,))
    )
    return found.value  # type: ignore[union-attr, return-value]


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_trl_trains_against_it_and_hears_the_same_scores(chat: bool, tmp_path: Path) -> None:
    model = trained(tmp_path, chat)
    writer(chat).save(tmp_path / "policy")
    asked = [f"{i}+" for i in range(8)]
    rows = [{"prompt": [{"role": "user", "content": text}] if chat else text} for text in asked]
    config = GRPOConfig(
        output_dir=str(tmp_path / "trl"), max_steps=2, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=6, report_to=[], save_strategy="no", bf16=False, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Watched(str(tmp_path / "policy"), str(model), args=config, train_dataset=Dataset.from_list(rows))
    trainer.train()
    assert len(trainer.seen) == 16
    scores = [score for _, _, score in trainer.seen]
    assert max(scores) - min(scores) > 0.1, "a reward that says the same of everything would prove nothing"
    assert scores == pytest.approx([ours(model, prompt, text) for prompt, text, _ in trainer.seen], abs=1e-4)


def test_transformers_reads_it_without_a_word_about_missing_weights(tmp_path: Path) -> None:
    model = trained(tmp_path, chat=True)
    found, loading = AutoModelForSequenceClassification.from_pretrained(model, output_loading_info=True)
    assert not any(loading.values()), loading
    assert (found.config.num_labels, found.config.problem_type) == (1, None)
    assert found.config.pad_token_id is not None
    assert AutoTokenizer.from_pretrained(model).chat_template == TEMPLATE
