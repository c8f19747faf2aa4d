"""The stage `rejection_sample`: samples groups, rewards them, and keeps the best completions that are good enough.

Nothing is trained. What is kept is a file of the run, one JSON object per line, with the step that wrote it. The file is
rewritten with each step and renamed into place. Lines of the same or later steps are from a process that was killed before
its checkpoint: they are dropped and written again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oncurve.algos.advantages import grade
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import Engine, SampleKey
from oncurve.errors import RecipeError
from oncurve.recipe.schema.stages import RejectionSample
from oncurve.records import ScoredCompletion, ScoredGroup, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.runs.atomic_files import write_file_atomically
from oncurve.tasks.base import Task
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.training.learner.oom_retry import sample_with_retry
from oncurve.training.stages.grpo import Budget, rollout_metrics, stop_if_rewards_fail
from oncurve.training.timing import PhaseClock

FOLDER = "samples"


def samples_file(run: Path, stage: str) -> Path:
    """The file to which a stage of a run writes what it keeps."""
    return run / FOLDER / f"{stage}.jsonl"


def read_lines(file: Path) -> list[dict[str, Any]]:
    """All lines of a file; none if it does not exist yet."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def replace_lines(file: Path, rows: Iterable[Mapping[str, Any]], step: int) -> None:
    """Writes a step's rows after those of earlier steps. Lines of this step and later ones are replaced."""
    lines = [line for line in read_lines(file) if line["step"] < step] + [{**row, "step": step} for row in rows]
    write_file_atomically(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())


class RejectionLoop:
    """The loop of the stage `rejection_sample`. ``folder`` is the run's."""

    def __init__(
        self, stage: RejectionSample, seed: int, task: Task, engine: Engine, rewards: RewardMix, folder: Path,
        world: World = SINGLE_PROCESS,
    ) -> None:  # fmt: skip
        self.stage, self.seed, self.task, self.engine, self.rewards, self.world = stage, seed, task, engine, rewards, world
        self.file, self.done, self.budget = samples_file(folder, stage.label), 0, Budget(stage)

    @property
    def is_over(self) -> bool:
        return self.budget.is_spent

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {"rejection": {"done": torch.tensor(self.done)}, **self.budget.state()}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.done = int(tensors["rejection"]["done"])
        self.budget.load_state(tensors)

    def step(self, n: int) -> StepReport:
        clock = PhaseClock(self.world.set_phase)
        with clock("sample"):
            prompts = self.world.local_prompts(prompts_for_step(self.task, self.seed, n - 1, self.stage.prompts_per_step))
            groups = sample_with_retry(
                self.engine, prompts, self.stage.group_size, self.stage.sampling, SampleKey(self.seed, n)
            )
        with clock("score"):
            scored = self.world.all_gather_results(lambda: self.rewards.score(groups))
        stop_if_rewards_fail(self.stage, scored)
        rows = [row for group in scored for row in self._best_rows(group)]
        self.world.on_rank_zero(lambda: replace_lines(self.file, rows, n))
        self.done = n
        graded = grade(scored, baseline="mean", scale="none", eps=1.0, mask_cut=False)
        metrics = rollout_metrics(graded, self.rewards) | {"samples_kept": float(len(rows))}
        seconds = sum(clock.seconds.values())
        self.budget.spend(metrics["tokens"], seconds)
        metrics["tokens_per_s"] = metrics["tokens"] / seconds
        return StepReport(self.stage.label, n, metrics, clock.seconds, graded)

    def _best_rows(self, group: ScoredGroup) -> Iterator[dict[str, Any]]:
        """The ``keep`` completions of a group with the highest rewards. Of equal rewards the shorter completion comes first; of
        equal texts only one is kept."""
        good = [s for s in group.scored if s.total is not None and not s.completion.is_truncated and self._is_good_enough(s)]
        ranked = sorted(good, key=lambda s: (-(s.total or 0.0), s.completion.length))
        best: dict[str, float | None] = {}
        for scored in ranked:
            if scored.completion.text.strip():
                best.setdefault(scored.completion.text, scored.total)
        for text, reward in islice(best.items(), self.stage.keep):
            yield {"prompt": group.group.prompt.written, "completion": text, "reward": reward}

    def _is_good_enough(self, scored: ScoredCompletion) -> bool:
        if self.stage.at_least is None:
            return self.rewards.is_correct(scored)
        return scored.total is not None and scored.total >= self.stage.at_least


def check_rewards(stage: RejectionSample, rewards: RewardMix) -> None:
    """Raises RecipeError if the stage would keep correct answers, and no reward defines them."""
    if stage.at_least is None and rewards.accuracy_reward is None:
        raise RecipeError(
            f"{stage.label}.at_least",
            "not set",
            because="none of its rewards defines correct answers, so nothing would be kept",
            fix="set the total reward from which a completion is kept, or give the reward that defines them the name `answer`",
        )
