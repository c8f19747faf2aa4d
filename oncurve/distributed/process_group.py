"""The world of several ranks over torch.distributed: gloo between CPUs, NCCL between GPUs.

Every collective has a name and a time limit, which `oncurve.distributed.heartbeat` enforces. Objects sent between ranks are our
own records, between processes that one user started; files are never pickled.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import functional

from oncurve.distributed.heartbeat import Heartbeat
from oncurve.distributed.rank_status import clear_statuses
from oncurve.distributed.world import Command, Shard, World
from oncurve.errors import OncurveError, ScaleError, error_from_json, error_to_json


def balanced_partition(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank the places of its items, ascending. The dearest item goes first, each to the rank that has least.

    No rank then has more than 4/3 − 1/(3·ranks) times what the best partition would give it (Graham 1969). Where there are
    fewer items than ranks, some have none.
    """
    loads, places = [0] * ranks, [[] for _ in range(ranks)]  # type: tuple[list[int], list[list[int]]]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        lightest = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[lightest] += costs[item]
        places[lightest].append(item)
    return [sorted(of) for of in places]


T = TypeVar("T")
BUCKET = 1 << 25
"""Numbers that are added up over ranks at once: few exchanges, and no second copy of all gradients."""
BLOCK = 128
KEPT_COMMANDS = 256
AGREE_S = 10.0
"""How long a rank that met a user's error waits for the others to have met it too."""


class ProcessGroupWorld(World):
    """One of several. Made by `oncurve.scale.join.join`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        local_size: int,
        heart: Heartbeat,
        shard: Shard,
        tensor: int,
        in_step: bool,
    ) -> None:
        self.store, self.rank, self.size, self.local_size, self.heart = store, rank, size, local_size, heart
        self.shard, self.tensor, self.in_step = shard, tensor, in_step
        self._told = 0

    def local_prompts(self, items: Sequence[T]) -> list[T]:
        beside = self.tensor if self.in_step else 1
        return list(items[self.rank // beside :: self.size // beside])

    def all_gather_results(self, own: Callable[[], Sequence[T]]) -> list[T]:
        mine: Sequence[T] = ()
        said = None
        try:
            mine = own() if self.scores else ()
        except OncurveError as error:
            said = error_to_json(error, f"rank {self.rank}")
        parts = self._from_all((list(mine), said), "gathering what the ranks made")
        parts = parts[:: self.tensor if self.in_step else 1]
        for _, error_of in parts:
            if error_of is not None:
                raise error_from_json(error_of)
        whole: list[Any] = [None] * sum(len(part) for part, _ in parts)
        for rank, (part, _) in enumerate(parts):
            whole[rank :: len(parts)] = part
        return whole

    def local_indices(self, costs: Sequence[int]) -> list[int]:
        return balanced_partition(costs, self.size // self.tensor)[self.rank // self.tensor]

    def all_gather_dict(self, own: Mapping[T, Any]) -> dict[T, Any]:
        found: dict[T, Any] = {}
        for part in self._from_all(dict(own), "putting entries together"):
            found |= part
        return found

    def all_reduce_sum(self, own: Mapping[str, float]) -> dict[str, float]:
        total: dict[str, float] = {}
        for part in self._from_all(dict(own), "adding up figures")[:: self.tensor]:
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def all_reduce_max(self, own: Mapping[str, float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for part in self._from_all(dict(own), "comparing figures"):
            found |= {name: max(value, found.get(name, value)) for name, value in part.items()}
        return found

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        self._in_buckets(tensors, dist.all_reduce, "adding up gradients")

    def all_reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.all_reduce_([p.grad for p in parameters if p.grad is not None])

    def local_slice(self, count: int) -> slice:
        each = self._each(count)
        return slice(min(self.rank * each, count), min((self.rank + 1) * each, count))

    def _each(self, count: int) -> int:
        """The size of a piece: whole blocks, so that moments in 8 bits are cut between blocks."""
        return -(-count // (self.size * BLOCK)) * BLOCK

    @torch.no_grad()
    def reduce_scatter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for bucket in buckets(tensors):
            rows, sizes = self._rows(bucket)
            own = rows.new_empty(rows.shape[1])
            with self.collective("adding up gradients"):
                dist.reduce_scatter_tensor(own, rows.view(-1))
            pieces = (self.local_slice(tensor.numel()) for tensor in bucket)
            found += [part[: at.stop - at.start] for part, at in zip(torch.split(own, sizes), pieces, strict=True)]
        return found

    @torch.no_grad()
    def all_gather_(self, tensors: Sequence[Tensor]) -> None:
        for bucket in buckets(tensors):
            rows, sizes = self._rows(bucket)
            own = rows[self.rank].clone()
            with self.collective("gathering weights"):
                dist.all_gather_into_tensor(rows.view(-1), own)
            for tensor, part in zip(bucket, torch.split(rows, sizes, 1), strict=True):
                tensor.copy_(part.reshape(-1)[: tensor.numel()].view_as(tensor))

    def _rows(self, bucket: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """[ranks, numbers]: a line for each rank with its pieces of the tensors, and the pieces' sizes."""
        sizes = [self._each(tensor.numel()) for tensor in bucket]
        lines = [
            functional.pad(tensor.flatten(), (0, self.size * each - tensor.numel())).view(self.size, each)
            for tensor, each in zip(bucket, sizes, strict=True)
        ]
        return torch.cat(lines, 1), sizes

    def padding_passes(self, own: int) -> int:
        return int(self.all_reduce_max({"passes": own})["passes"]) - own if self.shard == "full" else 0

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        self._in_buckets(tensors, lambda flat: dist.broadcast(flat, 0), "spreading weights")

    @torch.no_grad()
    def _in_buckets(self, tensors: Sequence[Tensor], exchange: Callable[[Tensor], Any], what: str) -> None:
        for bucket in buckets(tensors):
            flat = _flatten_dense_tensors(bucket)  # type: ignore[no-untyped-call]
            with self.collective(what):
                exchange(flat)
            torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))  # type: ignore[no-untyped-call]

    def _from_all(self, own: T, what: str) -> list[T]:
        parts: list[Any] = [None] * self.size
        with self.collective(what):
            dist.all_gather_object(parts, own)
        return parts

    @contextlib.contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Around every collective: others can see who waits in which, and one that fails is told as what it means."""
        with self.heart.waiting(what):
            try:
                yield
            except RuntimeError as error:
                time.sleep(AGREE_S / 2)  # the heart finds out who is gone, and ends this process with better words
                raise ScaleError(
                    f"rank {self.rank} of {self.size}",
                    f"'{what}' failed",
                    because=str(error).partition("\n")[0],
                    fix=self.heart.keep_alive,
                ) from error

    def send_command(self, do: str, **said: Any) -> None:
        self.store.set(f"order/{self._told}", json.dumps([do, said]))
        if self._told >= KEPT_COMMANDS:
            self.store.delete_key(f"order/{self._told - KEPT_COMMANDS}")
        self._told += 1

    def commands(self) -> Iterator[Command]:
        for number in count():
            self.set_phase("waiting for the first rank")
            while True:
                with contextlib.suppress(
                    dist.DistStoreError
                ):  # the first rank may take its time; whether it lives, the heart sees
                    self.store.wait([f"order/{number}"], timedelta(minutes=10))
                    break
            do, said = json.loads(self.store.get(f"order/{number}"))
            if do == "end":
                return
            yield do, said

    def all_failed(self, where: str) -> bool:
        here = int(self.store.add(f"erred/{where}", 1))
        deadline = time.monotonic() + AGREE_S
        while here < self.size and time.monotonic() < deadline:
            time.sleep(0.05)
            here = int(self.store.add(f"erred/{where}", 0))
        return here >= self.size

    def publish_status(self, run: Path) -> None:
        if self.is_rank_zero:
            clear_statuses(run)
        self.heart.run_folder = run

    def set_phase(self, phase: str) -> None:
        self.heart.set_phase(phase)

    def set_step(self, stage: str, step: int) -> None:
        self.heart.set_step(stage, step)

    def close(self, error: BaseException | None = None) -> None:
        """The first rank's error is its own to tell; another's is told by the first, which is still at work."""
        if error is not None and not isinstance(error, SystemExit) and not self.is_rank_zero:
            self.heart.report_failure(error)
        self.set_phase("done")
        if self.is_rank_zero:
            self.send_command("end")
            self.store.set("over", "1")
        self.store.set(f"left/{self.rank}", "1")
        if self.is_rank_zero:  # it may hold the store: the others must have read the end of the story
            with contextlib.suppress(dist.DistStoreError):
                self.store.wait([f"left/{rank}" for rank in range(self.size)], timedelta(seconds=5))
        self.heart.stop()
        if error is None:
            dist.destroy_process_group()


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in runs of one type and device, each of about `BUCKET` numbers."""
    run: list[Tensor] = []
    for tensor in tensors:
        alike = run and (run[0].dtype, run[0].device) == (tensor.dtype, tensor.device)
        if run and (not alike or sum(t.numel() for t in run) + tensor.numel() > BUCKET):
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run
