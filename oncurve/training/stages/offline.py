"""What the offline stages share: sft, dpo and reward_model make one optimiser update per step on a batch of a fixed data set.

Batches are drawn in epochs, each shuffled by (seed, epoch). Each rank takes its share of a batch; losses are divided by the
batch's totals, so neither the split into packs nor the split over ranks changes the gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Generic, TypeVar

from torch import Tensor

from oncurve.distributed.world import World
from oncurve.models.device_memory import peak_memory_mib
from oncurve.models.packing import Pack, PrefixGroup, build_pack, split_by_budget
from oncurve.models.policy import Policy, dummy_passes
from oncurve.recipe.schema.stages import Dpo, RewardModel, Sft
from oncurve.records import StepReport
from oncurve.runs.step_notes import note
from oncurve.tasks.data.preference_pairs import left_out_text
from oncurve.tasks.prompt_order import batch_indices
from oncurve.training.learner.activation_checkpointing import CheckpointedLayers
from oncurve.training.learner.oom_retry import PackedStage
from oncurve.training.learner.optimiser import Optimiser
from oncurve.training.timing import PhaseClock, utilisation

StageT = TypeVar("StageT", Sft, Dpo, RewardModel)
RowT = TypeVar("RowT")


class OfflineStage(ABC, Generic[StageT, RowT]):
    """The step of an offline stage. Subclasses set ``rows``, and ``left_out`` if rows of the data were not usable."""

    rows: Sequence[RowT]
    left_out: Mapping[str, int]

    def __init__(self, stage: StageT, seed: int, policy: Policy, world: World) -> None:
        self.stage: StageT = stage
        self.seed, self.policy, self.world = seed, policy, world
        self.left_out = {}

    @property
    def is_over(self) -> bool:
        """Whether the stage ends before its last step."""
        return False

    def step(self, n: int) -> StepReport:
        """Update number n, from 1."""
        clock = PhaseClock(self.world.set_phase)
        if n == 1 and self.left_out:
            note("data", f"{left_out_text(self.left_out)} left out")
        self.before_update(clock)
        batch = [self.rows[i] for i in batch_indices(len(self.rows), self.seed, n - 1, self.stage.batch_size)]
        with clock("update"):
            metrics, packs = self.update(batch)
        seconds = clock.seconds["update"]
        metrics |= {
            "tokens_per_s": metrics["tokens"] / seconds,
            "examples_seen": float(n * self.stage.batch_size),
            "epoch": n * self.stage.batch_size / len(self.rows),
            "memory_mib": peak_memory_mib(self.policy.device),
        }
        if packs is not None:
            metrics |= utilisation(self.policy, packs, seconds)
        return StepReport(self.stage.label, n, metrics | self.after_update(n, clock), clock.seconds)

    def before_update(self, clock: PhaseClock) -> None:
        """Runs before each update."""

    @abstractmethod
    def update(self, batch: Sequence[RowT]) -> tuple[dict[str, float], list[Pack] | None]:
        """One optimiser update. Returns its metrics, and this rank's packs if it forwarded the policy in packs."""

    def after_update(self, n: int, clock: PhaseClock) -> dict[str, float]:
        """Runs after update n. Returns further metrics of the step."""
        return {}

    def is_measured(self, n: int) -> bool:
        """Whether held-out rows are measured after update n."""
        return n == self.stage.steps or bool(self.stage.eval_every and n % self.stage.eval_every == 0)


PackLoss = Callable[[Pack, Tensor, Tensor], tuple[Tensor, dict[str, float]]]
"""(pack, logp_M, entropy_M) -> (the pack's part of the loss, terms that are summed over packs and ranks)."""


class PackedOfflineStage(OfflineStage[StageT, RowT], PackedStage):
    """An offline stage that trains the policy on packs: sft and dpo."""

    optimiser: Optimiser

    @cached_property
    def checkpointed(self) -> CheckpointedLayers:
        return CheckpointedLayers(self.policy, self.stage.checkpointing)

    def each_pack(
        self, groups: Sequence[PrefixGroup], budget: int, dummy_forward: Callable[[Pack], object] | None = None
    ) -> Iterator[Pack]:
        """This rank's groups in packs of at most ``budget`` tokens. After the last one come the dummy passes that keep the
        ranks in step (see `dummy_passes`)."""
        parts = list(split_by_budget(groups, budget))
        padding = self.world.padding_passes(len(parts))
        for part in parts:
            yield build_pack(part, self.policy.device)
        dummy_passes(self.policy, padding, dummy_forward)

    def compute_gradient(
        self, groups: Sequence[PrefixGroup], budget: int, pack_loss: PackLoss
    ) -> tuple[dict[str, float], list[Pack]]:
        """The gradient of an update. Returns the terms of ``pack_loss``, summed over all ranks, and this rank's packs."""

        def attempt(local: list[int], fitting: int) -> tuple[dict[str, float], list[Pack]]:
            self.optimiser.zero_grad()
            costs = [groups[i].tokens for i in local]
            self.checkpointed.choose(max(min(fitting, sum(costs)), *costs, 0), self.optimiser)
            sums: dict[str, float] = {}
            packs = []
            for pack in self.each_pack([groups[i] for i in local], fitting):
                with self.policy.accumulate_into(self.optimiser.accumulator):
                    logp_M, entropy_M = self.policy.pack_logps(pack)
                loss, terms = pack_loss(pack, logp_M, entropy_M)
                self.optimiser.scaled(loss).backward()  # type: ignore[no-untyped-call]
                self.optimiser.add_autograd_grads()
                packs.append(pack)
                for name, value in terms.items():
                    sums[name] = sums.get(name, 0.0) + value
            return sums, packs

        sums, packs = self.on_local_rows([group.tokens for group in groups], budget, attempt)
        return self.world.all_reduce_sum(sums), packs
