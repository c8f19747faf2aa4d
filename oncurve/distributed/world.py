"""The ranks as a training loop sees them: which part of a step belongs to this process, and the collectives between ranks.

`World` is the single-process case: every collective is the identity, nothing is imported and nothing waits. With several ranks
it is `oncurve.distributed.process_group.ProcessGroupWorld`, with the same methods. So a loop calls
`world.local_prompts(prompts)` and does not depend on the number of ranks.
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
"""What the first rank tells the others to do, with what they need for it: JSON, never code."""


class World:
    """One process."""

    rank, size = 0, 1
    shard: Shard = "none"
    """What the ranks share out: see `scale.shard` of a recipe."""
    local_size = 1
    """Ranks on this machine: they share its threads."""
    tensor = 1
    """Ranks side by side that split a model's layers: a tensor group. They learn from the same groups."""
    in_step = False
    """Whether a tensor group also samples the same prompts, in step; else each of its ranks samples its own."""

    @property
    def is_rank_zero(self) -> bool:
        """The first rank alone decides, writes and speaks."""
        return self.rank == 0

    @property
    def scores(self) -> bool:
        """Whether this rank rewards what it samples: of ranks that sample the same, the first of them does."""
        return not self.in_step or self.rank % self.tensor == 0

    def local_prompts(self, items: Sequence[T]) -> list[T]:
        """This rank's part of the prompts to sample from: every ``size``-th of them."""
        return list(items)

    def all_gather_results(self, own: Callable[[], Sequence[T]]) -> list[T]:
        """What ``own`` made of each rank's share, in the order of the whole. A user's error on one rank is raised on all."""
        return list(own())

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """What the first rank's ``work`` gives, which it alone does. Its error is raised on all."""
        return self.all_gather_results(lambda: [work()] if self.is_rank_zero else [])[0]

    def local_indices(self, costs: Sequence[int]) -> list[int]:
        """The places of the items that this rank takes, where those cost so much: see `oncurve.distributed.process_group`."""
        return list(range(len(costs)))

    def all_gather_dict(self, own: Mapping[T, Any]) -> dict[T, Any]:
        """One mapping of all ranks' entries."""
        return dict(own)

    def all_reduce_sum(self, own: Mapping[str, float]) -> dict[str, float]:
        """Sums over what ranks learned from, by name; a rank may lack some. What a tensor group did counts once."""
        return dict(own)

    def all_reduce_max(self, own: Mapping[str, float]) -> dict[str, float]:
        return dict(own)

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its sum over ranks, in place, with the same bits on each."""

    def all_reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """The same with parameters' gradients; a parameter without any has one of 0."""

    def local_slice(self, count: int) -> slice:
        """Which of ``count`` numbers are this rank's, where each rank keeps a piece of everything."""
        return slice(0, count)

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Of each tensor's sum over ranks this rank's piece, flat."""
        return [tensor.flatten() for tensor in tensors]

    def all_gather_(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor, of which every rank has its own piece right, becomes whole, in place."""

    def padding_passes(self, own: int) -> int:
        """How many passes through the model this rank must make beyond its ``own``, where every pass is an exchange."""
        return 0

    def all_reduce_min(self, wanted: int, whole: int) -> int:
        """The smallest packs to be tried where memory runs out: none smaller than now, where every pass is one of all ranks."""
        return whole if self.shard == "full" else wanted

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes the first rank's, in place."""

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Around what ranks do together: it has a name and a time limit."""
        yield

    def send_command(self, do: str, **told: Any) -> None:
        """The first rank's next order to the others."""

    def commands(self) -> Iterator[Command]:
        """What a rank that is not the first is told, until the end."""
        yield from ()

    def all_failed(self, where: str) -> bool:
        """Whether every rank has met a user's error at this place: then they agree, and the run may be saved as it stands."""
        return True

    def publish_status(self, run: Path) -> None:
        """From now on each rank's phase can be read in the run's folder."""

    def set_phase(self, phase: str) -> None:
        """What this rank does from now on, for `oncurve status` and for whoever waits for it."""

    def set_step(self, stage: str, step: int) -> None:
        """Where in the run it is."""

    def close(self, error: BaseException | None = None) -> None:
        """The end of it: the others are told so, and why, where it was an error."""


SINGLE_PROCESS = World()
