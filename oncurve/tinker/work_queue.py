"""The thread that runs the models, and its queue.

Requests run in the order in which they arrive, with one exception: sample requests with equal settings and weights that wait
at the same time are sampled together. Weights to sample from never change, so the order does not matter.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

MAX_BATCH = 256
"""The most sample requests that are sampled together."""


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    done: Future[Any]


@dataclass(frozen=True, slots=True)
class _BatchedJob:
    """Work that one call does for several jobs with an equal ``key``."""

    key: Hashable
    item: Any
    work: Callable[[Sequence[Any]], Sequence[Any]]
    done: Future[Any]


class WorkQueue:
    """Runs what is submitted in one thread, until it is closed."""

    def __init__(self) -> None:
        self._jobs: deque[_Job | _BatchedJob | None] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="tinker", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        done = Future[Any]()
        self._put(_Job(work, done))
        return done

    def submit_batched(self, key: Hashable, item: Any, work: Callable[[Sequence[Any]], Sequence[Any]]) -> Future[Any]:
        """``work`` gets the items of waiting jobs with this key, and returns their results in order."""
        done = Future[Any]()
        self._put(_BatchedJob(key, item, work, done))
        return done

    def close(self) -> None:
        """Ends after the current job. Waiting jobs are not run."""
        with self._changed:
            self._jobs.appendleft(None)
            self._changed.notify()
        self._thread.join()

    def _put(self, job: _Job | _BatchedJob) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def _take(self) -> list[_Job | _BatchedJob]:
        """The next job, and others that run in the same call; none once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs)
            first = self._jobs.popleft()
            if first is None:
                return []
            batch: list[_Job | _BatchedJob] = [first]
            if isinstance(first, _BatchedJob):
                same = [job for job in self._jobs if isinstance(job, _BatchedJob) and job.key == first.key][: MAX_BATCH - 1]
                batch += same
                taken = set(map(id, same))
                self._jobs = deque(job for job in self._jobs if id(job) not in taken)
            return batch

    def _run(self) -> None:
        while batch := self._take():
            first = batch[0]
            try:
                if isinstance(first, _BatchedJob):
                    results = first.work([job.item for job in batch if isinstance(job, _BatchedJob)])
                else:
                    results = [first.work()]
            except Exception as error:  # an error of one request must not end the server
                for job in batch:
                    job.done.set_exception(error)
                continue
            for job, result in zip(batch, results, strict=True):
                job.done.set_result(result)
