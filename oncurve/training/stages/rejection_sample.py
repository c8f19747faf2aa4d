"""What steps of a stage leave behind in a file of the run: one JSON object a line, with the step that wrote it.

A file is written anew with each step, aside and renamed. Lines of that step and later ones are of a process that was killed
before its checkpoint: they go, and are written again.

The stage `rejection_sample`: sample groups, reward them, keep the best that are good enough. Nothing is trained.
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
from oncurve.recipe.schema.stages import RejectionSample
from oncurve.records import ScoredCompletion, ScoredGroup, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.runs.atomic_files import write_file_atomically
from oncurve.tasks.base import Task
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.training.learner.oom_retry import sample_with_retry
from oncurve.training.stages.grpo import rollout_metrics
from oncurve.training.timing import PhaseClock


def lines_of(file: Path) -> list[dict[str, Any]]:
    """All that are there; none before the first step."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def add_lines(file: Path, rows: Iterable[Mapping[str, Any]], step: int) -> None:
    """Puts a step's rows behind those of the steps before it."""
    kept = [line for line in lines_of(file) if line["step"] < step] + [{**row, "step": step} for row in rows]
    write_file_atomically(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept).encode())


FOLDER = "samples"


def samples_file(run: Path, stage: str) -> Path:
    """Where a stage of a run keeps what it took."""
    return run / FOLDER / f"{stage}.jsonl"


class RejectionLoop:
    """Each step adds its lines to the file, marked with the step: on resume, lines of steps to be done again go."""

    out_of_time = False
    """Its length is counted in steps alone."""

    def __init__(
        self, stage: RejectionSample, seed: int, task: Task, engine: Engine, rewards: RewardMix, folder: Path,
        world: World = SINGLE_PROCESS,
    ) -> None:  # fmt: skip
        self.stage, self.seed, self.task, self.engine, self.rewards, self.world = stage, seed, task, engine, rewards, world
        self.file, self.done = samples_file(folder, stage.label), 0

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {"rejection": {"done": torch.tensor(self.done)}}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.done = int(tensors["rejection"]["done"])

    def step(self, n: int) -> StepReport:
        clock = PhaseClock(self.world.set_phase)
        with clock("sample"):
            prompts = self.world.local_prompts(prompts_for_step(self.task, self.seed, n - 1, self.stage.prompts_per_step))
            groups = sample_with_retry(
                self.engine, prompts, self.stage.group_size, self.stage.sampling, SampleKey(self.seed, n)
            )
        with clock("score"):
            scored = self.world.all_gather_results(lambda: self.rewards.score(groups))
        kept = [row for group in scored for row in self._rows(group)]
        self.world.on_rank_zero(lambda: add_lines(self.file, kept, n))
        self.done = n
        graded = grade(scored, baseline="mean", scale="none", eps=1.0, mask_cut=False)
        metrics = rollout_metrics(graded, self.rewards) | {"samples_kept": float(len(kept))}
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
            return self.rewards.is_correct(scored)
        return scored.total is not None and scored.total >= self.stage.at_least
