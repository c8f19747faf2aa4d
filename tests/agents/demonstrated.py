"""Runs of the built-in tiny model, which first learns from demonstrations how to call an environment's tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oncurve.recipe.load import parse_recipe
from oncurve.records import ToolCall
from oncurve.runs.database.reader import RunReader
from oncurve.training.start import begin
from oncurve.trust import capabilities_of

STEPS = 2


def demonstration(prompt: str, call: Mapping[str, Any], result: str) -> dict[str, Any]:
    """A conversation with one call."""
    turns = [
        ("user", prompt),
        ("assistant", f"<tool_call>{json.dumps(call)}</tool_call>"),
        ("tool", result),
        ("assistant", "done"),
    ]
    return {"prompt": [{"role": role, "content": text} for role, text in turns]}


def train_tiny(
    folder: Path, environment: str, rows: Sequence[Mapping[str, Any]], demonstrations: Sequence[Mapping[str, Any]]
) -> list[ToolCall]:
    """The calls that succeeded in a short run with an environment that a recipe names."""
    for name, lines in {"rows": rows, "demonstrations": demonstrations}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sft = {"type": "sft", "data": str(folder / "demonstrations.jsonl"), "steps": 150, "batch_size": 4}
    schedule = {"learning_rate": 6e-3, "warmup_steps": 5, "schedule": "linear", "final_share": 0.1}
    grpo = {"type": "grpo", "steps": STEPS, "prompts_per_step": 2, "group_size": 4}
    task = {"type": "file", "path": str(folder / "rows.jsonl"), "chat": True, "heldout_share": 0}
    recipe = parse_recipe(
        {
            "name": "demonstrated",
            "threads": 1,
            "model": {"tiny": {"layers": 2, "width": 48, "mlp_width": 96, "context": 1536, "chat": True}},
            "task": {**task, "environment": environment, "tool_timeout_s": 600},
            "rewards": [{"type": "environment"}],
            "stages": [
                {**sft, "optimiser": schedule},
                {**grpo, "sampling": {"max_new_tokens": 300, "temperature": 0.7}},
            ],
        }
    )
    assert [capability.where for capability in capabilities_of(recipe)] == ["task.environment"]
    run = begin(recipe, out=folder / "run")
    with RunReader.open(run.path) as store:
        groups = [group for step in range(1, STEPS + 1) for group in store.step("grpo", step).groups]
    episodes = [completion.episode for group in groups for completion in group.group.completions]
    return [call for episode in episodes if episode is not None for call in episode.calls if call.failure is None]
