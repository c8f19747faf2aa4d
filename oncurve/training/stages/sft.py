"""The stage `sft`: supervised training on demonstrations, with loss on the completion's tokens only.

loss = −(1/tokens) Σ logπ(token), over all completion tokens of the batch that the policy is to write itself (not those of an
environment). With `heldout_share` the same loss is measured on a held-out split, and the stage may stop when it no longer
falls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.errors import DataError
from oncurve.models.chat_template import encode_example
from oncurve.models.packing import Pack, PrefixGroup
from oncurve.models.policy import Policy
from oncurve.recipe.schema.base import STAGE_PREFIX
from oncurve.recipe.schema.stages import Sft
from oncurve.records import Bools, Example, Ints
from oncurve.rng import philox_generator
from oncurve.runs.step_notes import report_progress
from oncurve.tasks.base import Task
from oncurve.tasks.data.file_task import DEMONSTRATIONS, FileOptions, read_prompts, read_rows
from oncurve.training.learner.sharded_optimiser import build_optimiser
from oncurve.training.prompt_checker import PromptChecker
from oncurve.training.stages.offline import PackedOfflineStage
from oncurve.training.stages.rejection_sample import samples_file
from oncurve.training.timing import PhaseClock

EncodedExample = tuple[Ints, Ints, Bools]
"""Prompt ids, completion ids, and which of the completion's tokens count in the loss."""


class SftLoop(PackedOfflineStage[Sft, EncodedExample]):
    """The loop of the stage `sft`."""

    def __init__(
        self, stage: Sft, seed: int, task: Task, policy: Policy, folder: Path | None = None, world: World = SINGLE_PROCESS
    ) -> None:
        super().__init__(stage, seed, policy, world)
        self.tokens_per_pack = stage.tokens_per_pack
        examples, heldout = split_heldout(read_examples(stage, task, folder), stage)
        self.rows, self.heldout = [self._encode(e) for e in examples], [self._encode(e) for e in heldout]
        self.optimiser = build_optimiser(policy.model, stage.optimiser, stage.steps, world)
        self.best_loss, self.stale_measurements = math.inf, 0
        self.started = time.monotonic()

    def _encode(self, example: Example) -> EncodedExample:
        return (self.policy.encode(example.prompt, example.tools), *encode_example(self.policy, example))

    @property
    def is_over(self) -> bool:
        out_of_patience = self.stage.patience is not None and self.stale_measurements >= self.stage.patience
        out_of_time = self.stage.seconds is not None and time.monotonic() - self.started > self.stage.seconds
        return out_of_patience or out_of_time

    def state(self) -> dict[str, dict[str, Tensor]]:
        heldout = torch.tensor([self.best_loss, self.stale_measurements], dtype=torch.float64)
        return {"optimiser": self.optimiser.state(), "heldout": {"best_and_stale": heldout}}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.optimiser.load_state(tensors["optimiser"])
        self.best_loss, stale = tensors["heldout"]["best_and_stale"].tolist()
        self.stale_measurements = int(stale)

    def update(self, batch: Sequence[EncodedExample]) -> tuple[dict[str, float], list[Pack]]:
        tokens = count_loss_tokens(batch)

        def pack_loss(pack: Pack, logp_M: Tensor, entropy_M: Tensor) -> tuple[Tensor, dict[str, float]]:
            mask_M = self._loss_mask(batch, pack).to(logp_M)
            loss = -(logp_M * mask_M).sum() / tokens
            entropy = float((entropy_M.detach() * mask_M).sum()) / tokens
            return loss, {"loss": float(loss.detach()), "entropy": entropy}

        terms, packs = self.compute_gradient(prefix_groups(batch), self.tokens_per_pack, pack_loss)
        done = self.optimiser.step(lambda: {"loss": terms["loss"]})
        return {**terms, **done.metrics, "tokens": float(tokens)}, packs

    def after_update(self, n: int, clock: PhaseClock) -> dict[str, float]:
        """The held-out loss, if it is due, and whether it still falls."""
        if not self.heldout or not self.is_measured(n):
            return {}
        loss = self.heldout_loss()
        self.stale_measurements = 0 if loss < self.best_loss else self.stale_measurements + 1
        self.best_loss = min(self.best_loss, loss)
        return {"heldout_loss": loss}

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """The loss on the held-out examples, of which each rank measures its share."""
        groups = prefix_groups(self.heldout)

        def attempt(local: list[int], budget: int) -> float:
            total, done = 0.0, 0
            for pack in self.each_pack([groups[i] for i in local], budget, self.policy.pack_logps):
                report_progress(done / len(local))
                done += len(pack.keys)
                mask_M = self._loss_mask(self.heldout, pack)
                total -= float(self.policy.pack_logps(pack)[0][mask_M].double().sum())
            return total

        total = self.on_local_rows([group.tokens for group in groups], self.tokens_per_pack, attempt)
        return self.world.all_reduce_sum({"loss": total})["loss"] / count_loss_tokens(self.heldout)

    def _loss_mask(self, rows: Sequence[EncodedExample], pack: Pack) -> Tensor:
        return torch.from_numpy(np.concatenate([rows[k][2] for k in pack.keys])).to(self.policy.device)


def prefix_groups(rows: Sequence[EncodedExample]) -> list[PrefixGroup]:
    """One group for each example, with the example's index as its key."""
    return [PrefixGroup(prompt, (completion,), (i,)) for i, (prompt, completion, _) in enumerate(rows)]


def count_loss_tokens(rows: Sequence[EncodedExample]) -> int:
    return sum(int(mask.sum()) for _, _, mask in rows)


def read_examples(stage: Sft, task: Task, folder: Path | None = None) -> Sequence[Example]:
    """A stage's demonstrations: those of its file, those that an earlier stage of the run in ``folder`` kept, or the task's."""
    if stage.data is not None:
        key, name = f"{stage.label}.data", stage.data.removeprefix(STAGE_PREFIX)
        path = stage.data if name == stage.data else str(samples_file(folder or Path(), name))
        first = next((row for _, row in read_rows(Path(path), key)), {})
        if not first and name != stage.data:
            raise DataError(
                key,
                stage.data,
                because=f"{name} kept nothing: no completion was both good enough and complete, with its end token",
                fix=f"start from a policy that is right now and then, or let {name} sample more (steps, group_size) or longer "
                "(sampling.max_new_tokens)",
            )
        column = "messages" if "messages" in first else "prompt"
        examples = read_prompts(path, FileOptions(path=path, prompt=column), DEMONSTRATIONS, key)[1][: stage.examples]
        tools = _tools_of(task)
        return [replace(example, tools=example.tools or tools) for example in examples]
    if not task.examples:
        raise DataError(
            "task",
            "no demonstrations",
            because="an sft stage imitates demonstrations",
            fix="set task.examples, give the file a column of completions, or remove the stage",
        )
    return task.examples[: stage.examples]


def _tools_of(task: Task) -> tuple[Mapping[str, Any], ...]:
    """The tools of a task whose prompts share one environment: the chat template shows them in demonstrations that have
    none."""
    environments = {id(prompt.environment): prompt for prompt in getattr(task, "train", ())}
    return next(iter(environments.values())).tools if len(environments) == 1 else ()


def split_heldout(examples: Sequence[Example], stage: Sft) -> tuple[Sequence[Example], Sequence[Example]]:
    """(training split, held-out split). Prompts are held out with all their examples, so that no prompt is in both splits."""
    share = stage.heldout_share
    if not share:
        return examples, ()
    prompts = sorted({e.prompt.shown for e in examples})
    order = philox_generator(0, "sft/heldout").permutation(len(prompts))[: max(1, round(share * len(prompts)))]
    heldout = {prompts[int(i)] for i in order}
    training = [e for e in examples if e.prompt.shown not in heldout]
    if not training:
        raise DataError(
            f"{stage.label}.heldout_share",
            share,
            because=f"no example is left to train on: there are {len(prompts)} prompts, held out with all their examples",
            fix="hold out fewer, or give more examples",
        )
    return training, [e for e in examples if e.prompt.shown in heldout]


def known_examples(stage: Sft, task: Task) -> Iterator[Example]:
    """The demonstrations that exist before the run. What an earlier stage will keep does not: its prompts are checked with that
    stage."""
    yield from () if (stage.data or "").startswith(STAGE_PREFIX) else read_examples(stage, task)


def check_data(stage: Sft, task: Task) -> None:
    examples = list(known_examples(stage, task))
    if examples:
        split_heldout(examples, stage)


def check_policy(stage: Sft, task: Task, checker: PromptChecker) -> None:
    for example in known_examples(stage, task):
        checker.check_example(example)
