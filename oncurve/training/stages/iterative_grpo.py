"""Iterative GRPO: the loop of `grpo`, with a reward model that is trained as the policy changes.

After every ``every`` steps the reference becomes the policy, and the reward model gets ``updates`` Bradley–Terry updates on
the round's comparisons; ``past_share`` of each batch is from earlier rounds. Which comparisons an update uses is a function
of (seed, step, update). What a resumed run needs is in its checkpoint and in the file of comparisons, whose lines carry their
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from oncurve.distributed.world import World
from oncurve.engines.base import Engine
from oncurve.errors import RecipeError, RewardError
from oncurve.recipe.schema.base import STAGE_PREFIX
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Grpo, Iteration, RewardModel
from oncurve.records import GradedGroup, Prompt, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.models.reward_model import TRAINED, RewardModelReward
from oncurve.rewards.registry import build_reward
from oncurve.rng import philox_generator
from oncurve.runs.database.reader import RunReader
from oncurve.runs.feedback import training_preferences
from oncurve.runs.preference_pairs import pair_of
from oncurve.runs.step_notes import note
from oncurve.tasks.base import Task
from oncurve.tasks.data.reward_model_data import RewardModelExample, read_reward_model_data
from oncurve.training.stages.grpo import GrpoLoop
from oncurve.training.stages.rejection_sample import read_lines, replace_lines
from oncurve.training.stages.reward_model import RewardModelTrainer, TokenizedExample, tokenize_example, tokenize_examples

FOLDER = "comparisons"
MAX_TOKENS: int = RewardModel.model_fields["max_tokens"].default
"""Tokens of the longest text of an earlier stage's data that is trained on again."""


class IterativeLoop(GrpoLoop):
    """The loop of a stage `grpo` with `iterate`."""

    def __init__(
        self, stage: Grpo, recipe: Recipe, task: Task, engine: Engine, rewards: RewardMix, folder: Path, world: World,
    ) -> None:  # fmt: skip
        super().__init__(stage, recipe.seed, task, engine, rewards, world)
        assert stage.iterate is not None
        self.settings: Iteration = stage.iterate
        self.folder, self.file = folder, folder / FOLDER / f"{stage.label}.jsonl"
        self.labeller = None if self.settings.labeller is None else RewardMix([build_reward(self.settings.labeller)])
        reward = _find_trained_reward(stage, rewards)
        self.reward_model = RewardModelTrainer(
            engine.policy, folder / TRAINED / stage.label, kind="pairs",
            heads=tuple(reward.heads) if len(reward.heads) > 1 else ("reward",), source=reward.source,
            optimiser=self.settings.optimiser, updates=stage.steps * self.settings.updates,
            tokens_per_pack=stage.tokens_per_pack, checkpointing=stage.checkpointing, seed=recipe.seed, world=world,
        )  # fmt: skip
        self.first_examples = self._read_first_examples(recipe, reward)
        reward.use(self.reward_model.model)

    def _read_first_examples(self, recipe: Recipe, reward: RewardModelReward) -> list[TokenizedExample]:
        """The comparisons that the reward model was first trained on, if a stage of this recipe did that."""
        policy = self.engine.policy
        for stage in recipe.stages:
            is_source = f"{STAGE_PREFIX}{stage.label}" == reward.options.model
            if isinstance(stage, RewardModel) and is_source and stage.kind == "pairs":
                limit = min(MAX_TOKENS, policy.max_positions)
                return tokenize_examples(policy.tokenizer, read_reward_model_data(stage).train, "pairs", limit)
        return []

    def step(self, n: int) -> StepReport:
        report = super().step(n)
        if self.labeller is not None:
            pairs = self._compare_best_and_worst(report.groups)
            self.world.on_rank_zero(lambda: replace_lines(self.file, pairs, n))
        if n % self.settings.every:
            return report
        if self.learner.reference is not None:
            self.learner.reference.refresh(self.engine.policy)
        return replace(report, metrics={**report.metrics, **self._train_reward_model(n)})

    def state(self) -> dict[str, dict[str, Tensor]]:
        trainer = self.reward_model.state()
        return {**super().state(), "reward_model": trainer["reward_model"], "reward_optimiser": trainer["optimiser"]}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load_state(tensors)
        if "reward_model" in tensors:  # missing if a fork turns `iterate` on: the reward model then starts from its source
            self.reward_model.load_state({"optimiser": tensors["reward_optimiser"], "reward_model": tensors["reward_model"]})

    def _compare_best_and_worst(self, groups: Sequence[GradedGroup]) -> list[dict[str, Any]]:
        """The completion of each group that the labeller scores best, against the one it scores worst."""
        labeller = self.labeller
        assert labeller is not None
        scored = self.world.all_gather_results(
            lambda: labeller.score([graded.group for graded in self.world.local_prompts(groups)])
        )
        results = [s.failure for group in scored for s in group.scored]
        self._stop_if_labeller_fails([failure for failure in results if failure is not None], len(results))
        return [pair for pair in map(pair_of, scored) if pair is not None]

    def _stop_if_labeller_fails(self, failures: Sequence[str], completions: int) -> None:
        """Failures of the labeller are noted. Too many of them end the stage, as those of a reward do."""
        if not failures:
            return
        message = f"{len(failures)} of {completions} completions of a step could not be judged"
        if len(failures) > self.stage.max_failure_share * completions:
            raise RewardError(
                f"{self.stage.label}.iterate.labeller", message, because=f"the first failure is: {failures[0]}",
                fix="correct the labeller, then continue with oncurve train --resume (with --accept-changes if its code "
                "changed); to raise max_failure_share, use oncurve fork",
            )  # fmt: skip
        note("labeller", f"{message}: {failures[0][:120]}")

    def _train_reward_model(self, n: int) -> dict[str, float]:
        """The updates of the round that ends with step n. Returns the metrics of the last one."""
        lines = self.world.on_rank_zero(lambda: self._read_comparisons(n))
        fresh = [self._tokenize(line) for line in lines if line["step"] > n - self.settings.every]
        past = [*self.first_examples, *(self._tokenize(line) for line in lines if line["step"] <= n - self.settings.every)]
        if not fresh:
            return {"comparisons": 0.0}
        metrics: dict[str, float] = {}
        for update in range(self.settings.updates):
            metrics = self.reward_model.update(comparison_batch(fresh, past, self.settings, self.seed, n, update))
        self.reward_model.write()
        names = {"loss": "reward_model_loss", "pair_accuracy": "pair_accuracy", "pair_margin": "pair_margin"}
        return {"comparisons": float(len(fresh)), **{new: metrics[old] for old, new in names.items()}}

    def _read_comparisons(self, n: int) -> list[dict[str, Any]]:
        """All comparisons up to step n; if people are the labeller, with those that they have made since the last round."""
        if self.labeller is None:
            with RunReader.open(self.folder) as store:
                preferences = training_preferences(self.folder, store, self.stage.label, n)
            replace_lines(self.file, self._without_past([preference.row for preference in preferences], n), n)
        return read_lines(self.file)

    def _tokenize(self, line: Mapping[str, Any]) -> TokenizedExample:
        text_or_messages = line["prompt"]
        is_text = isinstance(text_or_messages, str)
        prompt = Prompt("", text=text_or_messages) if is_text else Prompt("", messages=tuple(text_or_messages))
        labels = (1.0,) * len(self.reward_model.heads)
        example = RewardModelExample(prompt, (line["chosen"], line["rejected"]), labels)
        return tokenize_example(self.engine.policy.tokenizer, example, "pairs")

    def _without_past(self, rows: Iterable[Mapping[str, Any]], n: int) -> list[Mapping[str, Any]]:
        """The comparisons that no earlier round has used. People may return to old groups, and their labels stay."""
        past = {(str(line["prompt"]), line["chosen"], line["rejected"]) for line in read_lines(self.file) if line["step"] < n}
        return [row for row in rows if (str(row["prompt"]), row["chosen"], row["rejected"]) not in past]


def comparison_batch(
    fresh: Sequence[TokenizedExample], past: Sequence[TokenizedExample], settings: Iteration, seed: int, n: int, update: int
) -> list[TokenizedExample]:
    """An update's comparisons: ``past_share`` of the batch from before, if there is any, the rest from this round."""
    rng = philox_generator(seed, "iterate", n * settings.updates + update)
    past_count = min(round(settings.past_share * settings.batch_size), settings.batch_size) if past else 0
    fresh_count = settings.batch_size - past_count
    batch = [fresh[int(i)] for i in rng.integers(len(fresh), size=fresh_count)]
    return batch + [past[int(i)] for i in (rng.integers(len(past), size=past_count) if past_count else ())]


def _find_trained_reward(stage: Grpo, rewards: RewardMix) -> RewardModelReward:
    assert stage.iterate is not None
    reward = next((r for r in rewards.rewards if r.name == stage.iterate.reward), None)
    if not isinstance(reward, RewardModelReward):
        raise RecipeError(
            f"{stage.label}.iterate.reward",
            stage.iterate.reward,
            because=f"the stage's rewards are {', '.join(r.name for r in rewards.rewards)}, and one of type model is trained",
            fix="name the reward of type model",
        )
    return reward


def check_data(stage: Grpo) -> None:
    """Builds the labeller, if there is one: its options are checked before the run starts."""
    if stage.iterate is not None and stage.iterate.labeller is not None:
        build_reward(stage.iterate.labeller)
