"""A short run learns: held-out accuracy after grpo is clearly above that after sft, from rewards only."""

from __future__ import annotations

import random
from pathlib import Path

from oncurve.recipe.load import parse_recipe
from oncurve.records import Example, Prompt
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.runs.database.reader import RunReader
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.start import begin

NUMBERS = [f"{n:03d}" for n in random.Random(0).sample(range(1000), 1000)]
"""Every number of three digits once, in an order that tells nothing of its digits."""
RECIPE = {
    "name": "learning",
    "threads": 1,
    "model": {"tiny": {"layers": 2, "width": 64, "heads": 2, "kv_heads": 1, "head_size": 32, "mlp_width": 128, "context": 64}},
    "task": {"type": "arithmetic"},
    "rewards": [{"type": "answer"}],
    "stages": [
        {"type": "sft", "steps": 150, "optimiser": {"learning_rate": 3e-3, "warmup_steps": 5}},
        {
            "type": "grpo",
            "steps": 40,
            "prompts_per_step": 16,
            "group_size": 8,
            "sampling": {"max_new_tokens": 8},
            "optimiser": {"learning_rate": 3e-4, "warmup_steps": 3},
        },
    ],
}


def prompt_of(number: str) -> Prompt:
    return Prompt(id=f"turn/{number}", text=f"{number}=", columns={"answer": number[::-1]})


def turned_or_not() -> PromptList:
    """Write a number backwards, with demonstrations of which half just copy it. Held-out numbers are never shown."""
    shown = NUMBERS[100:500]
    examples = [Example(prompt_of(n), f"<answer>{n[::-1] if i % 2 else n}</answer>") for i, n in enumerate(shown)]
    train, heldout = (tuple(map(prompt_of, numbers)) for numbers in (NUMBERS[100:], NUMBERS[:100]))
    return PromptList(train, heldout, tuple(examples), alphabet="0123456789=")


def right(text: str, answer: str) -> float:
    return float(text == f"<answer>{answer}</answer>")


def test_rewards_teach_what_the_examples_left_open(tmp_path: Path) -> None:
    run = begin(
        parse_recipe(RECIPE),
        runs_dir=tmp_path,
        task=turned_or_not(),
        rewards=RewardMix([FunctionReward(right, "answer")]),
    )
    with RunReader.open(run.path) as store:
        after_sft, after_grpo = (report.accuracy or 0.0 for report in store.evals())
        sampled = [value for _, value in store.metric("accuracy", "grpo")]
    assert after_sft < 0.7
    assert after_grpo > 0.85
    assert sum(sampled[-5:]) / 5 > sum(sampled[:5]) / 5 + 0.2
