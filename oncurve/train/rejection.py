"""The stage `rejection_sample`: sample groups, reward them, keep the best that are good enough. Nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oncurve.algos.advantages import grade
from oncurve.engines.native import Draws, NativeEngine
from oncurve.recipe.rejection import RejectionSample
from oncurve.records import ScoredCompletion, ScoredGroup, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.scale.world import ALONE, World
from oncurve.tasks.base import Task
from oncurve.tasks.order import prompts_for_step
from oncurve.train.clock import Clock
from oncurve.train.lines import add_lines
from oncurve.train.loop import describe
from oncurve.train.memory import sample

FOLDER = "samples"


def samples_file(run: Path, stage: str) -> Path:
    """Where a stage of a run keeps what it took."""
    return run / FOLDER / f"{stage}.jsonl"


class RejectionLoop:
    """Each step adds its lines to the file, marked with the step: on resume, lines of steps to be done again go."""

    out_of_time = False
    """Its length is counted in steps alone."""

    def __init__(
        self, stage: RejectionSample, seed: int, task: Task, engine: NativeEngine, rewards: RewardMix, folder: Path,
        world: World = ALONE,
    ) -> None:  # fmt: skip
        self.stage, self.seed, self.task, self.engine, self.rewards, self.world = stage, seed, task, engine, rewards, world
        self.file, self.done = samples_file(folder, stage.label), 0

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {"rejection": {"done": torch.tensor(self.done)}}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.done = int(tensors["rejection"]["done"])

    def step(self, n: int) -> StepReport:
        clock = Clock(self.world.enter)
        with clock("sample"):
            prompts = self.world.share(prompts_for_step(self.task, self.seed, n - 1, self.stage.prompts_per_step))
            groups = sample(self.engine, prompts, self.stage.group_size, self.stage.sampling, Draws(self.seed, n))
        with clock("score"):
            scored = self.world.gathered(lambda: self.rewards.score(groups))
        kept = [row for group in scored for row in self._rows(group)]
        self.world.from_first(lambda: add_lines(self.file, kept, n))
        self.done = n
        graded = grade(scored, baseline="mean", scale="none", eps=1.0, mask_cut=False)
        metrics = describe(graded, self.rewards) | {"samples_kept": float(len(kept))}
        metrics["tokens_per_s"] = metrics["tokens"] / sum(clock.seconds.values())
        return StepReport(self.stage.label, n, metrics, clock.seconds, graded)

    def _rows(self, group: ScoredGroup) -> Iterator[dict[str, Any]]:
        good = [s for s in group.scored if s.total is not None and not s.completion.cut and self._is_good(s)]
        ranked = sorted(good, key=lambda s: (-(s.total or 0.0), s.completion.length))
        best: dict[str, float | None] = {}
        for scored in ranked:
            if scored.completion.text.strip():
                best.setdefault(scored.completion.text, scored.total)
        for text, reward in islice(best.items(), self.stage.keep):
            yield {"prompt": group.group.prompt.written, "completion": text, "reward": reward}

    def _is_good(self, scored: ScoredCompletion) -> bool:
        if self.stage.at_least is None:
            return self.rewards.solved(scored)
        return scored.total is not None and scored.total >= self.stage.at_least
