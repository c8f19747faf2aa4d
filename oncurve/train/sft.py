"""The stage `sft`: supervised training on worked examples, loss on the completion's tokens only.

loss = −(1/tokens) Σ logπ(token), over all completion tokens of the update's examples that the policy is to write itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from oncurve.errors import DataError
from oncurve.models.packing import Bundle, build_pack, split_by_budget
from oncurve.models.policy import Policy
from oncurve.models.turns import example_ids
from oncurve.recipe.schema import Sft
from oncurve.records import Bools, Example, StepReport
from oncurve.tasks.base import Task
from oncurve.tasks.order import examples_for_step
from oncurve.train.clock import Clock
from oncurve.train.memory import with_less
from oncurve.train.optimiser import Optimiser


def examples_of(stage: Sft, task: Task) -> Sequence[Example]:
    """The worked examples of a stage; a task without any can't be imitated."""
    if not task.examples:
        raise DataError(
            "task",
            "no worked examples",
            because="an sft stage imitates worked examples",
            fix="give the task examples, or drop the stage",
        )
    return task.examples[: stage.examples]


class SftLoop:
    """One optimiser update per step."""

    def __init__(self, stage: Sft, seed: int, task: Task, policy: Policy) -> None:
        self.stage, self.seed, self.policy, self.tokens_per_pack = stage, seed, policy, stage.tokens_per_pack
        self.examples = examples = examples_of(stage, task)
        self.encoded = {id(e): (policy.encode(e.prompt), *example_ids(policy, e)) for e in examples}
        self.optimiser = Optimiser(policy.model, stage.optimiser, stage.steps)
        self.started = time.monotonic()

    @property
    def out_of_time(self) -> bool:
        return self.stage.seconds is not None and time.monotonic() - self.started > self.stage.seconds

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {"optimiser": self.optimiser.state()}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.optimiser.load_state(tensors["optimiser"])

    def _gradient(self, bundles: Sequence[Bundle], masks: Sequence[Bools], budget: int) -> tuple[float, float]:
        """(loss, entropy), with the gradient summed over packs of at most ``budget`` tokens."""
        loss = entropy = 0.0
        tokens = sum(int(wrote.sum()) for wrote in masks)
        self.optimiser.zero_grad()
        for part in split_by_budget(bundles, budget):
            pack = build_pack(part, self.policy.device)
            logp_M, entropy_M = self.policy.pack_logps(pack)
            wrote_M = torch.from_numpy(np.concatenate([masks[k] for k in pack.keys])).to(logp_M)
            share = -(logp_M * wrote_M).sum() / tokens
            share.backward()  # type: ignore[no-untyped-call]
            loss += float(share.detach())
            entropy += float((entropy_M.detach() * wrote_M).sum()) / tokens
        return loss, entropy

    def step(self, n: int) -> StepReport:
        """Update number n, from 1."""
        clock = Clock()
        chosen = [self.encoded[id(e)] for e in examples_for_step(self.examples, self.seed, n - 1, self.stage.batch_size)]
        bundles = [Bundle(prompt, (completion,), (i,)) for i, (prompt, completion, _) in enumerate(chosen)]
        tokens = sum(int(wrote.sum()) for _, _, wrote in chosen)
        masks = [wrote for _, _, wrote in chosen]
        least = max(bundle.tokens for bundle in bundles)
        with clock("update"):
            (loss, entropy), self.tokens_per_pack = with_less(
                lambda budget: self._gradient(bundles, masks, budget), self.tokens_per_pack, least=least, what="tokens_per_pack"
            )
            update = self.optimiser.step(loss=loss)
        metrics = {
            "loss": loss,
            "entropy": entropy,
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "skipped_updates": float(update.skipped),
            "tokens": float(tokens),
            "tokens_per_s": tokens / clock.seconds["update"],
            "examples_seen": float(n * self.stage.batch_size),
            "epoch": n * self.stage.batch_size / len(self.examples),
        }
        return StepReport(self.stage.label, n, metrics, clock.seconds)
