"""The stage sft: the loss by hand, its invariance to packing, and that it can memorise."""

from __future__ import annotations

import math

import pytest
import torch

from oncurve.errors import DataError
from oncurve.recipe.schema.stages import Sft
from oncurve.records import Example, Prompt
from oncurve.runs.step_notes import watch_progress
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.stages.sft import SftLoop
from tests.training.builders import apart, gradient, policy

PAIRS = (("1+2=", "3"), ("4+5=", "9"), ("10+2=", "12"))
TASK = PromptList(
    tuple(Prompt(id=f"p{i}", text=p) for i, (p, _) in enumerate(PAIRS)),
    examples=tuple(Example(Prompt(id=f"p{i}", text=p), c) for i, (p, c) in enumerate(PAIRS)),
)


def loop(**options: object) -> SftLoop:
    return SftLoop(Sft.model_validate({"steps": 60, "batch_size": 3, **options}), 0, TASK, policy())


@torch.no_grad()
def test_the_loss_is_the_mean_over_completion_tokens_only() -> None:
    """Against plain transformers, sequence by sequence: prompt tokens and the prediction after the last token do not count."""
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
    full, split = loop(), loop(tokens_per_pack=1)
    full.step(1)
    split.step(1)
    assert apart(gradient(split.policy.model), gradient(full.policy.model)) < 1e-5


def test_a_few_examples_are_learnt_by_heart() -> None:
    trained = loop(optimiser={"learning_rate": 1e-2})
    losses = [trained.step(n).metrics["loss"] for n in range(1, 61)]
    assert losses[0] == pytest.approx(math.log(len(trained.policy.tokenizer)), rel=0.2)
    assert losses[-1] < 0.05


def test_a_task_without_examples_is_refused() -> None:
    with pytest.raises(DataError, match="no demonstrations"):
        SftLoop(Sft(), 0, PromptList(TASK.train), policy())


MANY = PromptList(
    TASK.train,
    examples=tuple(Example(Prompt(id=f"p{i}", text=f"{i}+1="), str(i + 1)) for i in range(10)),
)


def test_the_held_out_loss_is_that_of_examples_which_are_never_trained_on() -> None:
    trained = SftLoop(
        Sft.model_validate({"steps": 4, "batch_size": 4, "heldout_share": 0.3, "eval_every": 2}), 0, MANY, policy()
    )
    assert (len(trained.rows), len(trained.heldout)) == (7, 3)
    observed = [trained.step(n).metrics for n in range(1, 5)]
    assert ["heldout_loss" in metrics for metrics in observed] == [False, True, False, True]
    tokens = [(prompt.tolist(), own.tolist()) for prompt, own, _ in trained.heldout]
    model = trained.policy.model
    model.set_attn_implementation("eager")
    total, count = 0.0, 0
    with torch.no_grad():
        for prompt, own in tokens:
            logps = model(torch.tensor([[*prompt, *own]])).logits[0].log_softmax(-1)
            total -= sum(float(logps[len(prompt) - 1 + t, token]) for t, token in enumerate(own))
            count += len(own)
    assert observed[-1]["heldout_loss"] == pytest.approx(total / count, abs=1e-4)


def test_the_measurement_of_the_held_out_loss_shows_its_progress() -> None:
    stage = Sft.model_validate({"steps": 1, "batch_size": 4, "heldout_share": 0.3, "eval_every": 1, "tokens_per_pack": 1})
    shares: list[float] = []
    with watch_progress(shares.append):
        SftLoop(stage, 0, MANY, policy()).step(1)
    assert shares == pytest.approx([0, 1 / 3, 2 / 3])


def test_it_stops_early_and_a_resumed_loop_knows_how_long_it_has_waited() -> None:
    settings = {"steps": 50, "batch_size": 4, "heldout_share": 0.3, "eval_every": 1, "patience": 2}
    trained = SftLoop(Sft.model_validate({**settings, "optimiser": {"learning_rate": 0.3}}), 0, MANY, policy())
    steps = 0
    while not trained.is_over and steps < 50:
        steps += 1
        trained.step(steps)
    assert steps < 50
    again = SftLoop(Sft.model_validate(settings), 0, MANY, policy())
    again.load_state(trained.state())
    assert again.is_over
    assert again.best_loss == trained.best_loss
