"""The world of several ranks over torch.distributed: gloo between CPUs, NCCL between GPUs.

Every collective has a name and a time limit, which `oncurve.distributed.heartbeat` enforces. Python objects that ranks exchange
are Oncurve's own records, pickled between processes that one user started; files are never pickled.
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
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import functional

from oncurve.distributed.heartbeat import Heartbeat
from oncurve.distributed.rank_status import clear_statuses
from oncurve.distributed.signed_store import SignedStore
from oncurve.distributed.world import Command, Shard, World
from oncurve.errors import OncurveError, ScaleError, error_from_json, error_to_json

T = TypeVar("T")
BUCKET_ELEMENTS = 1 << 25
"""Elements per collective: enough to need few collectives, too few to copy all gradients at once."""
SHARD_BLOCK = 128
"""Shards are multiples of this many elements, so that a block of 8-bit moments is never split."""
KEPT_COMMANDS = 256
"""Commands that stay in the store; older ones have been read by every rank."""
AGREE_S = 10.0
"""How long a rank that met an OncurveError waits for the others to meet it too."""


def balanced_partition(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """The item indices of each rank, ascending. Greedy: the most expensive item goes first, to the rank with the lowest load.

    No rank then has more than 4/3 − 1/(3·ranks) times what the best partition would give it (Graham 1969). With fewer items
    than ranks, some ranks have none.
    """
    loads = [0] * ranks
    indices: list[list[int]] = [[] for _ in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        lightest = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[lightest] += costs[item]
        indices[lightest].append(item)
    return [sorted(of_rank) for of_rank in indices]


class ProcessGroupWorld(World):
    """One of several ranks. Built by `oncurve.distributed.rendezvous.join`."""

    def __init__(
        self,
        store: SignedStore,
        rank: int,
        size: int,
        local_size: int,
        heartbeat: Heartbeat,
        shard: Shard,
        tp_size: int,
        samples_in_lockstep: bool,
    ) -> None:
        self.store, self.rank, self.size, self.local_size, self.heartbeat = store, rank, size, local_size, heartbeat
        self.shard, self.tp_size, self.samples_in_lockstep = shard, tp_size, samples_in_lockstep
        self._commands_sent = 0

    def local_prompts(self, items: Sequence[T]) -> list[T]:
        group = self.tp_size if self.samples_in_lockstep else 1
        return list(items[self.rank // group :: self.size // group])

    def all_gather_results(self, work: Callable[[], Sequence[T]]) -> list[T]:
        local: Sequence[T] = ()
        failure = None
        try:
            local = work() if self.computes_rewards else ()
        except OncurveError as error:
            failure = error_to_json(error, f"rank {self.rank}")
        by_rank = self._all_gather_object((list(local), failure), "gathering results")
        by_rank = by_rank[:: self.tp_size if self.samples_in_lockstep else 1]
        for _, failure in by_rank:
            if failure is not None:
                raise error_from_json(failure)
        results: list[Any] = [None] * sum(len(of_rank) for of_rank, _ in by_rank)
        for rank, (of_rank, _) in enumerate(by_rank):
            results[rank :: len(by_rank)] = of_rank
        return results

    def local_indices(self, costs: Sequence[int]) -> list[int]:
        return balanced_partition(costs, self.size // self.tp_size)[self.rank // self.tp_size]

    def all_gather_dict(self, entries: Mapping[T, Any]) -> dict[T, Any]:
        union: dict[T, Any] = {}
        for of_rank in self._all_gather_object(dict(entries), "gathering entries"):
            union |= of_rank
        return union

    def all_reduce_sum(self, values: Mapping[str, float]) -> dict[str, float]:
        total: dict[str, float] = {}
        for of_group in self._all_gather_object(dict(values), "summing metrics")[:: self.tp_size]:
            for name, value in of_group.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def all_reduce_max(self, values: Mapping[str, float]) -> dict[str, float]:
        largest: dict[str, float] = {}
        for of_rank in self._all_gather_object(dict(values), "comparing metrics"):
            largest |= {name: max(value, largest.get(name, value)) for name, value in of_rank.items()}
        return largest

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        self._in_buckets(tensors, dist.all_reduce, "all-reduce of gradients")

    def all_reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.all_reduce_([p.grad for p in parameters if p.grad is not None])

    def local_slice(self, count: int) -> slice:
        size = self._shard_size(count)
        return slice(min(self.rank * size, count), min((self.rank + 1) * size, count))

    def _shard_size(self, count: int) -> int:
        return -(-count // (self.size * SHARD_BLOCK)) * SHARD_BLOCK

    @torch.no_grad()
    def reduce_scatter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        shards = []
        for bucket in buckets(tensors):
            by_rank, sizes = self._by_rank(bucket)
            local = by_rank.new_empty(by_rank.shape[1])
            with self.collective("reduce-scatter of gradients"):
                dist.reduce_scatter_tensor(local, by_rank.view(-1))
            ranges = (self.local_slice(tensor.numel()) for tensor in bucket)
            shards += [part[: r.stop - r.start] for part, r in zip(torch.split(local, sizes), ranges, strict=True)]
        return shards

    @torch.no_grad()
    def all_gather_(self, tensors: Sequence[Tensor]) -> None:
        for bucket in buckets(tensors):
            by_rank, sizes = self._by_rank(bucket)
            local = by_rank[self.rank].clone()
            with self.collective("all-gather of weights"):
                dist.all_gather_into_tensor(by_rank.view(-1), local)
            for tensor, part in zip(bucket, torch.split(by_rank, sizes, 1), strict=True):
                tensor.copy_(part.reshape(-1)[: tensor.numel()].view_as(tensor))

    def _by_rank(self, bucket: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """([ranks, elements] with each rank's shards of the bucket's tensors side by side, padded; the shards' sizes)."""
        sizes = [self._shard_size(tensor.numel()) for tensor in bucket]
        padded = [
            functional.pad(tensor.flatten(), (0, self.size * size - tensor.numel())).view(self.size, size)
            for tensor, size in zip(bucket, sizes, strict=True)
        ]
        return torch.cat(padded, 1), sizes

    def padding_passes(self, passes: int) -> int:
        if not self.forward_is_collective:
            return 0
        return int(self.all_reduce_max({"passes": passes})["passes"]) - passes

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        self._in_buckets(tensors, lambda flat: dist.broadcast(flat, 0), "broadcast of weights")

    @torch.no_grad()
    def _in_buckets(self, tensors: Sequence[Tensor], collective: Callable[[Tensor], Any], name: str) -> None:
        for bucket in buckets(tensors):
            flat = _flatten_dense_tensors(bucket)  # type: ignore[no-untyped-call]
            with self.collective(name):
                collective(flat)
            torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))  # type: ignore[no-untyped-call]

    def _all_gather_object(self, local: T, name: str) -> list[T]:
        by_rank: list[Any] = [None] * self.size
        with self.collective(name):
            dist.all_gather_object(by_rank, local)
        return by_rank

    @contextlib.contextmanager
    def collective(self, name: str) -> Iterator[None]:
        with self.heartbeat.waiting(name):
            try:
                yield
            except RuntimeError as error:
                time.sleep(AGREE_S / 2)  # the heartbeat usually finds out which rank died, and exits with a better message
                raise ScaleError(
                    f"rank {self.rank} of {self.size}",
                    f"'{name}' failed",
                    because=str(error).partition("\n")[0],
                    fix=self.heartbeat.resume_hint,
                ) from error

    def send_command(self, name: str, **arguments: Any) -> None:
        self.store.set(f"command/{self._commands_sent}", json.dumps([name, arguments]))
        if self._commands_sent >= KEPT_COMMANDS:
            self.store.delete(f"command/{self._commands_sent - KEPT_COMMANDS}")
        self._commands_sent += 1

    def commands(self) -> Iterator[Command]:
        for number in count():
            self.set_phase("waiting for rank 0")
            while True:
                # Rank 0 may take long to send the next one. The heartbeat notices if it dies.
                with contextlib.suppress(dist.DistStoreError):
                    self.store.wait([f"command/{number}"], timedelta(minutes=10))
                    break
            name, arguments = json.loads(self.store.get(f"command/{number}"))
            if name == "end":
                return
            yield name, arguments

    def all_failed(self, step: str) -> bool:
        failed = self.store.add(f"failed-in/{step}", 1)
        deadline = time.monotonic() + AGREE_S
        while failed < self.size and time.monotonic() < deadline:
            time.sleep(0.05)
            failed = self.store.add(f"failed-in/{step}", 0)
        return failed >= self.size

    def publish_status(self, run: Path) -> None:
        if self.is_rank_zero:
            clear_statuses(run)
        self.heartbeat.run_folder = run

    def set_phase(self, phase: str) -> None:
        self.heartbeat.set_phase(phase)

    def set_step(self, stage: str, step: int) -> None:
        self.heartbeat.set_step(stage, step)

    def close(self, error: BaseException | None = None) -> None:
        """Rank 0's caller prints its error; an error of another rank is sent to rank 0, which is still running."""
        if error is not None and not isinstance(error, SystemExit) and not self.is_rank_zero:
            self.heartbeat.report_failure(error)
        self.set_phase("done")
        if self.is_rank_zero:
            self.send_command("end")
            self.store.set("run-ended", "1")
        self.store.set(f"left/{self.rank}", "1")
        if self.is_rank_zero:  # this process may host the store: the others must read the last command before it exits
            with contextlib.suppress(dist.DistStoreError):
                self.store.wait([f"left/{rank}" for rank in range(self.size)], timedelta(seconds=5))
        self.heartbeat.stop()
        if error is None:
            dist.destroy_process_group()


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype and device, with about `BUCKET_ELEMENTS` elements in each bucket."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        is_same_kind = bucket and (bucket[0].dtype, bucket[0].device) == (tensor.dtype, tensor.device)
        if bucket and (not is_same_kind or sum(t.numel() for t in bucket) + tensor.numel() > BUCKET_ELEMENTS):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
