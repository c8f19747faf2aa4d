"""Iterative GRPO: the loop of `grpo` with a reward model that learns beside the policy.

Every ``every`` steps: the reference becomes the policy; the reward model takes ``updates`` Bradley–Terry updates on
comparisons of the round, ``past_share`` of each from before. Which comparisons an update sees is a function of (seed, step,
update). All that a resumed run needs is in its checkpoint and in the file of comparisons, whose lines carry their step.
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
from oncurve.rewards.models.reward_model import RewardModelReward
from oncurve.rewards.registry import build_reward
from oncurve.rng import philox_generator
from oncurve.runs.database.reader import RunReader
from oncurve.runs.feedback import training_preferences
from oncurve.runs.preference_pairs import pair_of
from oncurve.runs.step_notes import note
from oncurve.tasks.base import Task
from oncurve.tasks.data.reward_model_data import RewardModelData, RewardModelExample, read_reward_model_data
from oncurve.training.stages.grpo import GrpoLoop
from oncurve.training.stages.rejection_sample import add_lines, lines_of
from oncurve.training.stages.reward_model import RewardModelLoop, TokenizedExample, tokenize_example

FOLDER = "comparisons"


class IterativeLoop(GrpoLoop):
    """`grpo` whose stage has `iterate`."""

    def __init__(
        self, stage: Grpo, recipe: Recipe, task: Task, engine: Engine, rewards: RewardMix, folder: Path, world: World,
    ) -> None:  # fmt: skip
        super().__init__(stage, recipe.seed, task, engine, rewards, world)
        assert stage.iterate is not None
        self.settings: Iteration = stage.iterate
        self.folder, self.file = folder, folder / FOLDER / f"{stage.label}.jsonl"
        reward = _trained_reward(stage, rewards)
        self.labeller = None if self.settings.labeller is None else RewardMix([build_reward(self.settings.labeller)])
        self.judge = self._judge(recipe, reward)
        reward.use(self.judge.model)

    def _judge(self, recipe: Recipe, reward: RewardModelReward) -> RewardModelLoop:
        """The reward model as a thing to be trained, and what it first learned from."""
        told = self.settings
        stage = RewardModel(
            name=self.stage.label, data="", source=reward.source, batch_size=told.batch_size, optimiser=told.optimiser,
            steps=self.stage.steps * told.updates, aspects=tuple(reward.heads) if len(reward.heads) > 1 else (),
            tokens_per_pack=self.stage.tokens_per_pack,
        )  # fmt: skip
        first = [
            s
            for s in recipe.stages
            if isinstance(s, RewardModel) and f"{STAGE_PREFIX}{s.label}" == reward.options.model and s.kind == "pairs"
        ]
        before = read_reward_model_data(first[0]).train if first else ()
        return RewardModelLoop(stage, self.seed, self.engine.policy, self.folder, RewardModelData(before, ()), self.world)

    def step(self, n: int) -> StepReport:
        report = super().step(n)
        if self.labeller is not None:
            pairs = self._judged(report.groups)
            self.world.on_rank_zero(lambda: add_lines(self.file, pairs, n))
        if n % self.settings.every:
            return report
        if self.learner.reference is not None:
            self.learner.reference.refresh(self.engine.policy)
        return replace(report, metrics={**report.metrics, **self._round(n)})

    def state(self) -> dict[str, dict[str, Tensor]]:
        judge = self.judge.state()
        return {**super().state(), "reward_model": judge["reward_model"], "reward_optimiser": judge["optimiser"]}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load_state(tensors)
        self.judge.load_state({"optimiser": tensors["reward_optimiser"], "reward_model": tensors["reward_model"]})

    def _judged(self, groups: Sequence[GradedGroup]) -> list[dict[str, Any]]:
        """The best of each group against the worst, in the labeller's eyes."""
        labeller = self.labeller
        assert labeller is not None
        scored = self.world.all_gather_results(
            lambda: labeller.score([graded.group for graded in self.world.local_prompts(groups)])
        )
        said = [s.failure for group in scored for s in group.scored]
        self._stop_if_silent([failure for failure in said if failure is not None], len(said))
        return [pair for pair in map(pair_of, scored) if pair is not None]

    def _stop_if_silent(self, failures: Sequence[str], asked: int) -> None:
        """A labeller that could not judge is told of; one that could judge too few ends the stage, as a reward would."""
        if not failures:
            return
        said = f"{len(failures)} of {asked} completions of a step could not be judged"
        if len(failures) > self.stage.max_failure_share * asked:
            raise RewardError(
                f"{self.stage.label}.iterate.labeller", said, because=f"the first said: {failures[0]}",
                fix="mend the labeller, or raise max_failure_share; oncurve train --resume goes on from the last checkpoint",
            )  # fmt: skip
        note("labeller", f"{said}: {failures[0][:120]}")

    def _round(self, n: int) -> dict[str, float]:
        """The updates of a round that ends with step n; its metrics are those of the last one."""
        lines = self.world.on_rank_zero(lambda: self._compared(n))
        fresh = [self._coded(line) for line in lines if line["step"] > n - self.settings.every]
        past = [*self.judge.train, *(self._coded(line) for line in lines if line["step"] <= n - self.settings.every)]
        if not fresh:
            return {"comparisons": 0.0}
        metrics: dict[str, float] = {}
        for turn in range(self.settings.updates):
            metrics = self.judge.update(comparison_batch(fresh, past, self.settings, self.seed, n, turn))
        self.judge.write()
        names = {"loss": "reward_model_loss", "pair_accuracy": "pair_accuracy", "pair_margin": "pair_margin"}
        return {"comparisons": float(len(fresh)), **{new: metrics[old] for old, new in names.items()}}

    def _compared(self, n: int) -> list[dict[str, Any]]:
        """All comparisons up to step n; where people are the labeller, with what they have said since."""
        if self.labeller is None:
            with RunReader.open(self.folder) as store:
                preferences = training_preferences(self.folder, store, self.stage.label, n)
            add_lines(self.file, self._unseen([preference.row for preference in preferences], n), n)
        return lines_of(self.file)

    def _coded(self, line: Mapping[str, Any]) -> TokenizedExample:
        asked = line["prompt"]
        prompt = Prompt("", text=asked) if isinstance(asked, str) else Prompt("", messages=tuple(asked))
        judged = RewardModelExample(prompt, (line["chosen"], line["rejected"]), (1.0,) * len(self.judge.stage.heads))
        return tokenize_example(self.engine.policy.tokenizer, judged, "pairs")

    def _unseen(self, rows: Iterable[Mapping[str, Any]], n: int) -> list[Mapping[str, Any]]:
        """Those that no earlier round has learned from: people may go back to old groups, and what they said stays."""
        before = {(str(line["prompt"]), line["chosen"], line["rejected"]) for line in lines_of(self.file) if line["step"] < n}
        return [row for row in rows if (str(row["prompt"]), row["chosen"], row["rejected"]) not in before]


def comparison_batch(
    fresh: Sequence[TokenizedExample], past: Sequence[TokenizedExample], told: Iteration, seed: int, n: int, turn: int
) -> list[TokenizedExample]:
    """An update's comparisons: ``past_share`` of the batch from before (as far as there is any), the rest of this round."""
    dice = philox_generator(seed, "iterate", n * told.updates + turn)
    old = min(round(told.past_share * told.batch_size), told.batch_size) if past else 0
    new = told.batch_size - old
    picked = [fresh[int(i)] for i in dice.integers(len(fresh), size=new)]
    return picked + [past[int(i)] for i in (dice.integers(len(past), size=old) if old else ())]


def _trained_reward(stage: Grpo, rewards: RewardMix) -> RewardModelReward:
    assert stage.iterate is not None
    found = next((r for r in rewards.rewards if r.name == stage.iterate.reward), None)
    if not isinstance(found, RewardModelReward):
        raise RecipeError(
            f"{stage.label}.iterate.reward",
            stage.iterate.reward,
            because=f"the stage's rewards are {', '.join(r.name for r in rewards.rewards)}, and one of type model is trained",
            fix="name the reward of type model",
        )
    return found
