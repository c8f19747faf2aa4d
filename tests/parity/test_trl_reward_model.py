"""A reward model trained by Oncurve scores the same completions equally in TRL's own trainer."""

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


def build_policy(chat: bool) -> Policy:
    model = policy(alphabet="0123456789+=[]aus")
    model.tokenizer.chat_template = TEMPLATE if chat else None
    return model


def train_reward_model(folder: Path, chat: bool) -> Path:
    """A reward model that prefers nines to zeros, as its stage writes it."""
    rows = [{"prompt": f"{i}+", "chosen": f"{i % 10}9", "rejected": f"{i % 10}0"} for i in range(12)]
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"data": str(data), "steps": 12, "batch_size": 8, "heldout_share": 0.0, "optimiser": {"learning_rate": 5e-3}}
    loop = RewardModelLoop(RewardModel.model_validate(options), 0, build_policy(chat), folder)
    for n in range(1, 13):
        loop.step(n)
    return folder / "reward_models" / "reward_model"


class RecordingTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, which records what the reward model is asked and what it answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[Any, str, float]] = []

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
        scores = super()._calculate_rewards(inputs, prompts, completions, ids)
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        self.calls += zip(prompts, texts, scores[:, 0].tolist(), strict=True)
        return scores


def ours(model: Path, prompt: Any, text: str) -> float:
    question = Prompt("p", text=prompt) if isinstance(prompt, str) else Prompt("p", messages=tuple(prompt))
    zeros = np.zeros(1, np.float32)
    row = Completion(np.zeros(1, np.int64), text, "end", zeros, zeros, zeros, np.ones(1, bool))
    (score,) = RewardModelReward("rm", 1.0, RewardModelOptions(model=str(model))).score(
        Group(question, np.zeros(1, np.int64), (row,))
    )
    return score.value  # type: ignore[union-attr, return-value]


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_trl_trains_against_it_and_gets_the_same_scores(chat: bool, tmp_path: Path) -> None:
    model = train_reward_model(tmp_path, chat)
    build_policy(chat).save(tmp_path / "policy")
    questions = [f"{i}+" for i in range(8)]
    rows = [{"prompt": [{"role": "user", "content": text}] if chat else text} for text in questions]
    config = GRPOConfig(
        output_dir=str(tmp_path / "trl"), max_steps=2, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=6, report_to=[], save_strategy="no", bf16=False, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = RecordingTrainer(str(tmp_path / "policy"), str(model), args=config, train_dataset=Dataset.from_list(rows))
    trainer.train()
    assert len(trainer.calls) == 16
    scores = [score for _, _, score in trainer.calls]
    assert max(scores) - min(scores) > 0.1, "a constant reward would prove nothing"
    assert scores == pytest.approx([ours(model, prompt, text) for prompt, text, _ in trainer.calls], abs=1e-4)


def test_transformers_reads_it_without_missing_weights(tmp_path: Path) -> None:
    model = train_reward_model(tmp_path, chat=True)
    classifier, loading = AutoModelForSequenceClassification.from_pretrained(model, output_loading_info=True)
    assert not any(loading.values()), loading
    assert (classifier.config.num_labels, classifier.config.problem_type) == (1, None)
    assert classifier.config.pad_token_id is not None
    assert AutoTokenizer.from_pretrained(model).chat_template == TEMPLATE
