"""The runs that are killed, one line each. A new stage type needs a line here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe

HERE = "tests.faults.grading"
PAIRS = Path(__file__).with_name("pairs.jsonl")

SFT = {"type": "sft", "steps": 24, "batch_size": 8, "save_every": 2, "eval_every": 3}
GRPO = {
    "type": "grpo", "steps": 24, "prompts_per_step": 3, "group_size": 4, "sampling": {"max_new_tokens": 8},
    "optimiser": {"learning_rate": 1e-3}, "save_every": 2, "eval_every": 3,
}  # fmt: skip
FORMAT = {"type": "format", "style": "soft"}
LENGTH = {"type": "length", "target": 5}
SHORT = {"type": "python", "name": "short", "function": f"{HERE}:short"}
PATIENT = {"type": "python", "name": "patient", "function": f"{HERE}:patient"}
HURRIED = {"type": "python", "name": "hurried", "function": f"{HERE}:hurried", "seconds": 20.0, "workers": 1}
RULE = {"type": "python", "function": f"{HERE}:short"}
TAKING = {key: value for key, value in GRPO.items() if key != "optimiser"}
LEARNED = {"type": "model", "model": "stage:reward_model"}
STEPS = {"type": "process", "source": "python", "function": f"{HERE}:by_step", "splitter": f"{HERE}:pairs"}


def recipe(*stages: dict[str, Any], rewards: list[dict[str, Any]] | None = None, **around: Any) -> Recipe:
    tiny = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "mlp_width": 48, "context": 64}
    data = {
        "name": "small", "threads": 1, "model": {"tiny": tiny}, "stages": list(stages),
        "task": {"type": "arithmetic", "digits": 1, "heldout": 6}, "rewards": rewards or [FORMAT, SHORT], **around,
    }  # fmt: skip
    return parse_recipe(data)


CASES: dict[str, Recipe] = {
    "sft": recipe(SFT),
    "sft then grpo": recipe({**SFT, "steps": 3}, GRPO),
    "updates in mini-batches": recipe({**GRPO, "updates_per_step": 3, "minibatches": 2}),
    "carried over": recipe({**GRPO, "carry_over": 1, "sampling": {"max_new_tokens": 24}}),
    "iterative": recipe({**GRPO, "kl": {"beta": 0.05, "refresh_every": 2}, "updates_per_step": 2}),
    "process rewards": recipe(GRPO, rewards=[STEPS, SHORT]),
    "asynchronous rewards": recipe(GRPO, rewards=[PATIENT, FORMAT]),
    "rewards in workers": recipe(GRPO, rewards=[HURRIED, FORMAT]),
    "dynamic sampling": recipe({**GRPO, "no_signal": "resample", "max_resample_rounds": 2}, rewards=[SHORT]),
    "curriculum": recipe(
        {**GRPO, "curriculum": {"unseen": 0.4, "first_samples": 2}},
        task={"type": "arithmetic", "digits": 2, "heldout": 6},
        rewards=[FORMAT, SHORT],
    ),
    "without a verifiable reward": recipe(
        GRPO, task={"type": "file", "path": str(PAIRS), "heldout": 6}, rewards=[FORMAT, LENGTH]
    ),
    "environments and drafts": recipe(
        GRPO, task={"type": "guess", "heldout": 6}, rewards=[{"type": "guess"}, SHORT], engine={"draft": "group"}
    ),
    "distil": recipe({**GRPO, "type": "distil", "reward_weight": 1.0, "teacher": {"model": "self", "context": "1+{prompt}"}}),
    "ppo": recipe({**GRPO, "type": "ppo", "updates_per_step": 2, "kl": {"beta": 0.05}, "critic": {"warmup_steps": 2}}),
    "trpo": recipe({**TAKING, "type": "trpo", "cg_iterations": 2}),
    "reward model": recipe(
        {**SFT, "type": "reward_model", "data": str(PAIRS), "steps": 8, "eval_every": 0},
        {**GRPO, "steps": 16},
        rewards=[LEARNED, SHORT],
    ),
    "iterative with its reward model": recipe(
        {**SFT, "type": "reward_model", "data": str(PAIRS), "steps": 4, "eval_every": 0},
        {**GRPO, "kl": {"beta": 0.05}, "iterate": {"every": 2, "updates": 2, "batch_size": 4, "labeller": RULE}},
        rewards=[LEARNED, SHORT],
    ),
    "rejection sampling": recipe(
        {**TAKING, "type": "rejection_sample", "at_least": 0.5, "steps": 14},
        {**SFT, "data": "stage:rejection_sample", "steps": 12},
    ),
    "dpo": recipe({**SFT, "type": "dpo", "pairs": str(PAIRS), "optimiser": {"learning_rate": 1e-3}}),
}
"""Long enough to be killed a dozen times, each time a little further on."""
