"""The ranks as a training loop sees them: which part of a step belongs to this process, and the collectives between ranks.

`World` is the single-process case: every collective is the identity, nothing is imported and nothing waits. With several ranks
it is `oncurve.distributed.process_group.ProcessGroupWorld`, with the same methods. So a loop calls
`world.local_prompts(prompts)` and does not depend on the number of ranks.

A collective must be called by every rank, in the same order. The others (`local_…`, `set_…`) involve this rank only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Shard = Literal["none", "optimiser", "full"]
Command = tuple[str, dict[str, Any]]
"""The name of a command that rank 0 sends to the others, and its arguments: JSON, never code."""


class World:
    """A single process."""

    rank, size = 0, 1
    shard: Shard = "none"
    """What is sharded over the ranks: `scale.shard` of the recipe."""
    local_size = 1
    """Ranks on this machine, which share its CPU threads."""
    tp_size = 1
    """Ranks of a tensor-parallel group: neighbouring ranks that split the model's layers and learn from the same groups."""
    samples_in_lockstep = False
    """Whether a tensor-parallel group samples the same prompts together. If not, each of its ranks samples its own."""

    @property
    def is_rank_zero(self) -> bool:
        """Rank 0 alone makes decisions, writes the run's files and prints."""
        return self.rank == 0

    @property
    def computes_rewards(self) -> bool:
        """Whether this rank scores completions. Of ranks that sample the same completions in lockstep, only the first does."""
        return not self.samples_in_lockstep or self.rank % self.tp_size == 0

    @property
    def forward_is_collective(self) -> bool:
        """Whether every forward pass involves all ranks, as under FSDP. Then all ranks must run the same number of passes."""
        return self.shard == "full"

    def local_prompts(self, items: Sequence[T]) -> list[T]:
        """The items that this rank samples: every ``size``-th, starting at its rank. Not a collective."""
        return list(items)

    def all_gather_results(self, work: Callable[[], Sequence[T]]) -> list[T]:
        """Collective: runs ``work`` on each rank's `local_prompts`, and returns the results of all in the original order.

        An OncurveError of one rank is raised on all.
        """
        return list(work())

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Collective: runs ``work`` on rank 0 only and returns its result, or raises its error, on all."""
        return self.all_gather_results(lambda: [work()] if self.is_rank_zero else [])[0]

    def local_indices(self, costs: Sequence[int]) -> list[int]:
        """The indices of the items that this rank processes, ascending; ``costs`` are balanced over ranks. Not a collective."""
        return list(range(len(costs)))

    def all_gather_dict(self, entries: Mapping[T, Any]) -> dict[T, Any]:
        """Collective: the union of all ranks' entries."""
        return dict(entries)

    def all_reduce_sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Collective: sums by name. A rank may lack some names. A tensor-parallel group, whose ranks have equal values, counts
        once."""
        return dict(values)

    def all_reduce_max(self, values: Mapping[str, float]) -> dict[str, float]:
        """Collective: maxima by name. A rank may lack some names."""
        return dict(values)

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        """Collective: each tensor becomes its sum over ranks, in place, with the same bits on each. Shapes are equal on all."""

    def all_reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Collective: `all_reduce_` of the parameters' gradients; a missing gradient counts as 0 and is created."""

    def local_slice(self, count: int) -> slice:
        """The elements of a flat tensor of ``count`` that belong to this rank's shard. Not a collective."""
        return slice(0, count)

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Collective: sums each tensor over ranks and returns this rank's shard of it: the elements of `local_slice`, flat."""
        return [tensor.flatten() for tensor in tensors]

    def all_gather_(self, tensors: Sequence[Tensor]) -> None:
        """Collective: fills each tensor, in place, from the shards (`local_slice`) of all ranks."""

    def padding_passes(self, passes: int) -> int:
        """Collective: the dummy passes that this rank must add to its ``passes`` to stay in step with the rank that runs most.

        0 unless every forward pass is a collective (FSDP).
        """
        return 0

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Collective: overwrites each tensor with that of rank 0. All ranks must pass tensors of the same shapes."""

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Around any collective: gives it a name, which `oncurve status` shows, and the time limit ``scale.timeout_s``."""
        yield

    def send_command(self, name: str, **arguments: Any) -> None:
        """Rank 0 only: sends the next command to all other ranks."""

    def commands(self) -> Iterator[Command]:
        """Other ranks only: the commands of rank 0, until it ends."""
        yield from ()

    def all_failed(self, step: str) -> bool:
        """Collective: whether every rank met an OncurveError in this step, so that all agree and the run can be saved."""
        return True

    def publish_status(self, run: Path) -> None:
        """Writes this rank's status to the run's folder from now on, for `oncurve status`."""

    def set_phase(self, phase: str) -> None:
        """Names what this rank is doing, for `oncurve status` and for error messages of ranks that wait for it."""

    def set_step(self, stage: str, step: int) -> None:
        """Names the step that this rank is in."""

    def close(self, error: BaseException | None = None) -> None:
        """Leaves the group. With ``error``, the other ranks get the reason."""


SINGLE_PROCESS = World()
