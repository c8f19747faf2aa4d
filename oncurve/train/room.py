"""Whether every prompt fits the model, asked before the first step: a long one in row 90,000 must not end a run hours later."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from oncurve.errors import ModelError
from oncurve.models.policy import Policy
from oncurve.recipe.sampled import Sampled
from oncurve.recipe.schema import Recipe, Stage
from oncurve.recipe.training_free import TrainingFree
from oncurve.recipe.trpo import Trpo
from oncurve.records import Prompt
from oncurve.tasks.base import Task
from oncurve.train.trpo import refuse_if_too_large

TEMPLATE_BYTES = 1024
"""More than any chat template adds to a prompt, the system prompt aside."""


def check_room(policy: Policy, recipe: Recipe, task_of: Callable[[Stage], Task]) -> None:
    """Raises for the first prompt or worked example that leaves no room for its completion, and for a model too large for trpo.

    A token stands for at least one byte, so only texts with more bytes than the model has positions are tokenised. An endless
    task's training prompts can't be listed; its held-out ones stand for them.
    """
    for stage in recipe.stages:
        if isinstance(stage, TrainingFree):
            continue  # its prompts go to an endpoint
        if isinstance(stage, Trpo):
            refuse_if_too_large(policy, stage)
        task, wanted = task_of(stage), stage.sampling.max_new_tokens if isinstance(stage, Sampled) else 1
        for prompt in _asked(task, stage):
            if may_be_long(policy, prompt.shown, wanted):
                _refuse_long(policy, prompt.id, len(policy.encode(prompt)), wanted, "max_new_tokens")
        for example in task.examples if not isinstance(stage, Sampled) else ():
            if may_be_long(policy, example.prompt.shown + example.completion, 1):
                completion = len(policy.encode_completion(example.completion))
                _refuse_long(policy, example.prompt.id, len(policy.encode(example.prompt)), completion, "a worked completion")


def _asked(task: Task, stage: Stage) -> Iterator[Prompt]:
    yield from task.heldout
    if isinstance(stage, Sampled):
        yield from (task.train_prompt(i) for i in range(task.train_size or 0))


def may_be_long(policy: Policy, text: str, wanted: int) -> bool:
    added = TEMPLATE_BYTES + len((policy.system_prompt or "").encode())
    return len(text.encode()) + added + wanted > policy.context


def _refuse_long(policy: Policy, prompt_id: str, length: int, wanted: int, what: str) -> None:
    if length + wanted > policy.context:
        raise ModelError(
            prompt_id,
            f"a prompt of {length} tokens with {wanted} for {what}",
            because=f"the model addresses {policy.context} positions",
            fix="shorten or drop the prompt, lower sampling.max_new_tokens, or use a model with a longer context",
        )
