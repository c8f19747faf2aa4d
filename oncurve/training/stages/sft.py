"""The stage `sft`: supervised training on worked examples, loss on the completion's tokens only.

loss = −(1/tokens) Σ logπ(token), over all completion tokens of the update's examples that the policy is to write itself. Where
examples are kept aside, the same loss over them is the held-out one, and the stage may stop once it has ceased to fall.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.errors import DataError
from oncurve.models.chat_template import encode_example
from oncurve.models.packing import Pack, PrefixGroup, build_pack, split_by_budget
from oncurve.models.policy import Policy, dummy_passes
from oncurve.recipe.schema.base import STAGE_PREFIX
from oncurve.recipe.schema.stages import Sft
from oncurve.records import Bools, Example, Ints, StepReport
from oncurve.rng import philox_generator
from oncurve.tasks.base import Task
from oncurve.tasks.data.file_task import IMITATED, FileOptions, read_prompts, read_rows
from oncurve.tasks.prompt_order import examples_for_step
from oncurve.training.learner.oom_retry import PackedStage
from oncurve.training.learner.sharded_optimiser import build_optimiser
from oncurve.training.memory_stats import peak_memory_mib
from oncurve.training.stages.rejection_sample import samples_file
from oncurve.training.timing import PhaseClock, utilisation


def examples_of(stage: Sft, task: Task, folder: Path | None = None) -> Sequence[Example]:
    """The worked examples of a stage: its file's, those that an earlier stage of the run in ``folder`` kept, or the task's."""
    if stage.data is not None:
        key, name = f"{stage.label}.data", stage.data.removeprefix(STAGE_PREFIX)
        path = stage.data if name == stage.data else str(samples_file(folder or Path(), name))
        first = next((row for _, row in read_rows(Path(path), key)), {})
        if not first and name != stage.data:
            raise DataError(
                key,
                stage.data,
                because=f"{name} kept nothing: no answer was both good enough and whole, with its end token",
                fix=f"begin with a policy that is right now and then, or let {name} ask more (steps, group_size) or write more "
                "(sampling.max_new_tokens)",
            )
        column = "messages" if "messages" in first else "prompt"
        return read_prompts(path, FileOptions(path=path, prompt=column), IMITATED, key)[1][: stage.examples]
    if not task.examples:
        raise DataError(
            "task",
            "no worked examples",
            because="an sft stage imitates worked examples",
            fix="give the task examples, or drop the stage",
        )
    return task.examples[: stage.examples]


EncodedExample = tuple[Ints, Ints, Bools]
"""Prompt, completion, and which of the completion's tokens count."""


def split_heldout(examples: Sequence[Example], stage: Sft) -> tuple[Sequence[Example], Sequence[Example]]:
    """(to train on, kept aside): whole prompts are kept aside, drawn by what they ask, so that no prompt is on both sides."""
    share = stage.heldout_share
    if not share:
        return examples, ()
    prompts = sorted({e.prompt.shown for e in examples})
    order = philox_generator(0, "sft/heldout").permutation(len(prompts))[: max(1, round(share * len(prompts)))]
    aside = {prompts[int(i)] for i in order}
    left = [e for e in examples if e.prompt.shown not in aside]
    if not left:
        raise DataError(
            f"{stage.label}.heldout_share",
            share,
            because=f"it leaves no example to train on: whole prompts are kept aside, and there are {len(prompts)}",
            fix="keep fewer aside, or give more examples",
        )
    return left, [e for e in examples if e.prompt.shown in aside]


class SftLoop(PackedStage):
    """One optimiser update per step."""

    def __init__(
        self, stage: Sft, seed: int, task: Task, policy: Policy, folder: Path | None = None, world: World = SINGLE_PROCESS
    ) -> None:
        self.stage, self.seed, self.policy, self.tokens_per_pack = stage, seed, policy, stage.tokens_per_pack
        self.world = world
        self.examples, aside = split_heldout(examples_of(stage, task, folder), stage)
        self.encoded: dict[int, EncodedExample] = {id(e): self._encode(e) for e in self.examples}
        self.aside = [self._encode(e) for e in aside]
        self.optimiser = build_optimiser(policy.model, stage.optimiser, stage.steps, world)
        self.best, self.stale = math.inf, 0
        self.started = time.monotonic()

    def _encode(self, example: Example) -> EncodedExample:
        return (self.policy.encode(example.prompt), *encode_example(self.policy, example))

    @property
    def out_of_time(self) -> bool:
        tired = self.stage.patience is not None and self.stale >= self.stage.patience
        return tired or (self.stage.seconds is not None and time.monotonic() - self.started > self.stage.seconds)

    def state(self) -> dict[str, dict[str, Tensor]]:
        heldout = torch.tensor([self.best, self.stale], dtype=torch.float64)
        return {"optimiser": self.optimiser.state(), "heldout": {"best_and_stale": heldout}}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.optimiser.load_state(tensors["optimiser"])
        self.best, stale = tensors["heldout"]["best_and_stale"].tolist()
        self.stale = int(stale)

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """The loss over the examples kept aside, of which each rank measures its part."""
        bundles = [PrefixGroup(prompt, (completion,), (i,)) for i, (prompt, completion, _) in enumerate(self.aside)]
        own = [bundles[i] for i in self.world.local_indices([bundle.tokens for bundle in bundles])]

        def attempt(budget: int) -> float:
            total, parts = 0.0, list(split_by_budget(own, budget))
            more = self.world.padding_passes(len(parts))
            for part in parts:
                pack = build_pack(part, self.policy.device)
                wrote_M = torch.from_numpy(np.concatenate([self.aside[k][2] for k in pack.keys])).to(self.policy.device)
                total -= float(self.policy.pack_logps(pack)[0][wrote_M].double().sum())
            dummy_passes(self.policy, more, self.policy.pack_logps)
            return total

        total = self.with_oom_retry(attempt, self.tokens_per_pack, max(bundle.tokens for bundle in bundles))
        return self.world.all_reduce_sum({"loss": total})["loss"] / sum(int(wrote.sum()) for _, _, wrote in self.aside)

    def _measure(self, n: int) -> dict[str, float]:
        """The held-out loss where it is due, and whether it still falls."""
        due = n == self.stage.steps or (self.stage.eval_every and n % self.stage.eval_every == 0)
        if not self.aside or not due:
            return {}
        loss = self.heldout_loss()
        self.stale = 0 if loss < self.best else self.stale + 1
        self.best = min(self.best, loss)
        return {"heldout_loss": loss}

    def _gradient(self, bundles: Sequence[PrefixGroup], masks: Sequence[Bools], budget: int) -> tuple[float, float, list[Pack]]:
        """(loss, entropy, packs) of this rank's part, with the gradient summed over packs of at most ``budget`` tokens."""
        loss, entropy, packs = 0.0, 0.0, []
        tokens = sum(int(wrote.sum()) for wrote in masks)
        self.optimiser.zero_grad()
        own = [bundles[i] for i in self.world.local_indices([bundle.tokens for bundle in bundles])]
        parts = list(split_by_budget(own, budget))
        more = self.world.padding_passes(len(parts))
        for part in parts:
            pack = build_pack(part, self.policy.device)
            with self.policy.accumulate_into(self.optimiser.accumulator):
                logp_M, entropy_M = self.policy.pack_logps(pack)
            wrote_M = torch.from_numpy(np.concatenate([masks[k] for k in pack.keys])).to(logp_M)
            share = -(logp_M * wrote_M).sum() / tokens
            share.backward()  # type: ignore[no-untyped-call]
            self.optimiser.add_autograd_grads()
            packs.append(pack)
            loss += float(share.detach())
            entropy += float((entropy_M.detach() * wrote_M).sum()) / tokens
        dummy_passes(self.policy, more)
        return loss, entropy, packs

    def step(self, n: int) -> StepReport:
        """Update number n, from 1."""
        clock = PhaseClock(self.world.set_phase)
        chosen = [self.encoded[id(e)] for e in examples_for_step(self.examples, self.seed, n - 1, self.stage.batch_size)]
        bundles = [PrefixGroup(prompt, (completion,), (i,)) for i, (prompt, completion, _) in enumerate(chosen)]
        tokens = sum(int(wrote.sum()) for _, _, wrote in chosen)
        masks = [wrote for _, _, wrote in chosen]
        longest = max(bundle.tokens for bundle in bundles)
        with clock("update"):
            loss, entropy, packs = self.with_oom_retry(
                lambda budget: self._gradient(bundles, masks, budget), self.tokens_per_pack, longest
            )
            seen = self.world.all_reduce_sum({"loss": loss, "entropy": entropy})
            update = self.optimiser.step(lambda: {"loss": seen["loss"]})
        metrics = {
            **seen,
            **update.metrics,
            "tokens": float(tokens),
            "tokens_per_s": tokens / clock.seconds["update"],
            "examples_seen": float(n * self.stage.batch_size),
            "epoch": n * self.stage.batch_size / len(self.examples),
            "memory_mib": peak_memory_mib(self.policy.device),
            **utilisation(self.policy, packs, clock.seconds["update"]),
            **self._measure(n),
        }
        return StepReport(self.stage.label, n, metrics, clock.seconds)
