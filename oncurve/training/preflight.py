"""Whether a run can read what its stages will give it, asked before anything is written: a row that is bad, too long, or of a
role that the chat template does not know must not end a run hours later, nor leave a folder behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from oncurve.errors import ModelError
from oncurve.models.chat_template import encode_example
from oncurve.models.heads.classifier import check_classifier
from oncurve.models.policy import Policy
from oncurve.recipe.schema.base import STAGE_PREFIX
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Dpo, Grpo, RewardModel, RolloutStage, Sft, Stage, TrainingFree, Trpo
from oncurve.records import Example, Prompt
from oncurve.rewards.registry import build_reward
from oncurve.tasks.base import Task
from oncurve.tasks.data.preference_pairs import Pair, read_pairs
from oncurve.tasks.data.reward_model_data import RewardModelData, read_reward_model_data
from oncurve.training.stages.dpo import pair_group
from oncurve.training.stages.reward_model import check_lengths
from oncurve.training.stages.sft import examples_of, split_heldout
from oncurve.training.stages.training_free import Library, client_of
from oncurve.training.stages.trpo import refuse_if_too_large

TEMPLATE_BYTES = 1024
"""More than any chat template adds to a prompt, the system prompt aside."""


def check_files(stage: Stage, task: Task) -> None:
    """Reads what a stage will read, and raises for the first row that can't be used. Needs no model."""
    if isinstance(stage, Sft):
        examples = list(_examples(stage, task))
        if examples:
            split_heldout(examples, stage)
    if isinstance(stage, Dpo):
        read_pairs(stage)
    if isinstance(stage, RewardModel):
        read_reward_model_data(stage)
    if isinstance(stage, Grpo) and stage.iterate is not None and stage.iterate.labeller is not None:
        build_reward(stage.iterate.labeller)
    if isinstance(stage, TrainingFree):
        Library.load(stage.library)
        client_of(stage)


def check_prompts(policy: Policy, recipe: Recipe, task_of: Callable[[Stage], Task]) -> None:
    """Raises for the first prompt, example or pair that the model can't read or has no room for, and for a model that a stage
    can't use.

    A token stands for at least one byte, so only texts with more bytes than the model has positions are tokenised, and of the
    chats one for each order of roles. An endless task's training prompts can't be listed; its held-out ones stand for them.
    """
    reader = _Reader(policy)
    for stage in recipe.stages:
        if isinstance(stage, TrainingFree):
            continue  # its prompts go to an endpoint
        task, wanted = task_of(stage), stage.sampling.max_new_tokens if isinstance(stage, RolloutStage) else 1
        for prompt in _prompts_of(task, stage):
            reader.check_prompt(prompt, wanted)
        if isinstance(stage, Trpo):
            refuse_if_too_large(policy, stage)
        if isinstance(stage, Sft):
            for example in _examples(stage, task):
                reader.check_example(example)
        if isinstance(stage, Dpo):
            for pair in read_pairs(stage).rows:
                reader.check_pair(pair)
        if isinstance(stage, RewardModel):
            reader.check_judgements(stage, read_reward_model_data(stage))


def _examples(stage: Sft, task: Task) -> Iterator[Example]:
    """Those that are there before the run; what an earlier stage will keep are answers to prompts of its own."""
    yield from () if (stage.data or "").startswith(STAGE_PREFIX) else examples_of(stage, task)


def _prompts_of(task: Task, stage: Stage) -> Iterator[Prompt]:
    if stage.updates_policy:
        yield from task.heldout
    if isinstance(stage, RolloutStage):
        yield from (task.train_prompt(i) for i in range(task.train_size or 0))


class _Reader:
    """A policy, and which orders of roles its template has written."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.seen: set[tuple[str, ...] | None] = set()

    def is_new(self, prompt: Prompt) -> bool:
        roles = None if prompt.messages is None else tuple(message["role"] for message in prompt.messages)
        new = roles not in self.seen
        self.seen.add(roles)
        return new

    def may_be_long(self, text: str, wanted: int) -> bool:
        added = TEMPLATE_BYTES + len((self.policy.system_prompt or "").encode())
        return len(text.encode(errors="replace")) + added + wanted > self.policy.max_positions

    def check_prompt(self, prompt: Prompt, wanted: int) -> None:
        if self.is_new(prompt) | self.may_be_long(prompt.shown, wanted):
            self._refuse_long(prompt, wanted, "max_new_tokens")

    def check_example(self, example: Example) -> None:
        if self.is_new(example.prompt) | self.may_be_long(example.prompt.shown + example.completion, 1):
            self._refuse_long(example.prompt, len(encode_example(self.policy, example)[0]), "a worked completion")

    def check_pair(self, pair: Pair) -> None:
        if self.is_new(pair.prompt) | self.may_be_long(pair.prompt.shown + max(pair.chosen, pair.rejected, key=len), 1):
            pair_group(self.policy, pair)

    def check_judgements(self, stage: RewardModel, told: RewardModelData) -> None:
        """Without a template a reward model reads a chat as a text. Rows that are too long are left out, unless all are."""
        check_classifier(self.policy, stage.source, by_token=stage.kind == "steps", where=f"{stage.label}.source")
        for judged in (*told.train, *told.heldout) if self.policy.tokenizer.chat_template else ():
            if judged.prompt.messages is not None and self.is_new(judged.prompt):
                self.policy.encode(judged.prompt)
        check_lengths(stage, self.policy, told.train)

    def _refuse_long(self, prompt: Prompt, wanted: int, what: str) -> None:
        length = len(self.policy.encode(prompt))
        if length + wanted > self.policy.max_positions:
            raise ModelError(
                prompt.id,
                f"a prompt of {length} tokens with {wanted} for {what}",
                because=f"the model addresses {self.policy.max_positions} positions",
                fix="shorten or drop the prompt, lower sampling.max_new_tokens, or use a model with a longer context",
            )
