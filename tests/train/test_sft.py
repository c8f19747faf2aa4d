"""The stage sft: the loss by hand, its invariance, and that it learns by heart."""

from __future__ import annotations

import math

import pytest
import torch

from oncurve.errors import DataError
from oncurve.recipe.schema import Sft
from oncurve.records import Example, Prompt
from oncurve.tasks.in_memory import PromptList
from oncurve.train.sft import SftLoop
from tests.train.builders import apart, gradient, policy

PAIRS = (("1+2=", "3"), ("4+5=", "9"), ("10+2=", "12"))
TASK = PromptList(
    tuple(Prompt(id=f"p{i}", text=p) for i, (p, _) in enumerate(PAIRS)),
    examples=tuple(Example(Prompt(id=f"p{i}", text=p), c) for i, (p, c) in enumerate(PAIRS)),
)


def loop(**options: object) -> SftLoop:
    return SftLoop(Sft.model_validate({"steps": 60, "batch_size": 3, **options}), 0, TASK, policy())


@torch.no_grad()
def test_the_loss_is_the_mean_over_completion_tokens_alone() -> None:
    """Of plain transformers, sequence by sequence: the prompt's tokens and the last token's own prediction do not count."""
    trained = loop()
    model, words = policy().model, trained.policy.tokenizer
    model.set_attn_implementation("eager")
    total, count = 0.0, 0
    for prompt, answer in PAIRS:
        ids = words(prompt)["input_ids"]
        own = [*words(answer)["input_ids"], words.eos_token_id]
        logps = model(torch.tensor([[*ids, *own]])).logits[0].log_softmax(-1)
        total -= sum(float(logps[len(ids) - 1 + t, token]) for t, token in enumerate(own))
        count += len(own)
    with torch.enable_grad():
        metrics = trained.step(1).metrics
    assert metrics["loss"] == pytest.approx(total / count, abs=1e-5)
    assert metrics["tokens"] == count == 7
    assert metrics["epoch"] == 1.0


def test_the_split_into_packs_does_not_matter() -> None:
    whole, split = loop(), loop(tokens_per_pack=1)
    whole.step(1)
    split.step(1)
    assert apart(gradient(split.policy.model), gradient(whole.policy.model)) < 1e-5


def test_a_few_examples_are_learnt_by_heart() -> None:
    trained = loop(optimiser={"learning_rate": 1e-2})
    losses = [trained.step(n).metrics["loss"] for n in range(1, 61)]
    assert losses[0] == pytest.approx(math.log(len(trained.policy.tokenizer)), rel=0.2)
    assert losses[-1] < 0.05


def test_a_task_without_examples_is_refused() -> None:
    with pytest.raises(DataError, match="no worked examples"):
        SftLoop(Sft(), 0, PromptList(TASK.train), policy())
