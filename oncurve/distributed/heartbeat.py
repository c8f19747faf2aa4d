"""A thread of each rank that publishes what the rank is doing, and notices ranks that died, are late or failed.

If it notices one, all ranks end, even if their main threads are blocked in a collective, and rank 0 prints one message. The
steps since the last checkpoint are lost, as after a kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from oncurve.distributed.rank_status import RankStatus, write_status
from oncurve.distributed.signed_store import SignedStore
from oncurve.errors import OncurveError, ScaleError, error_from_json, error_to_json

BEAT_S = 0.5
GRACE_S = 3.0
"""How long other ranks wait for rank 0 to print the error, and for their own main thread once the run has ended."""
LAUNCHER = "ONCURVE_LAUNCHER"
"""Environment variable with the pid of the process that started this machine's ranks. If that process ends, so do they."""

PrintError = Callable[[OncurveError], None]


class Heartbeat(threading.Thread):
    """``store`` must be a separate client of the store: the main thread may block in its own."""

    def __init__(self, store: SignedStore, rank: int, size: int, timeout_s: float, print_error: PrintError) -> None:
        super().__init__(name="oncurve-heartbeat", daemon=True)
        self.store, self.rank, self.size, self.timeout_s, self.print_error = store, rank, size, timeout_s, print_error
        self.status = RankStatus.of_this_process(f"rank-{rank}")
        self.run_folder: Path | None = None
        self.launcher = int(os.environ.get(LAUNCHER, "0"))
        self._waiting_since = 0.0
        self._run_ended_at = 0.0
        self._stopped = threading.Event()

    @property
    def resume_hint(self) -> str:
        """The fix of an error message."""
        run = self.run_folder or "RUN"
        return f"remove the cause, then resume from the last checkpoint: oncurve train --resume {run}"

    def set_phase(self, phase: str) -> None:
        self.status = replace(self.status, phase=phase, since=time.time())

    def set_step(self, stage: str, step: int) -> None:
        self.status = replace(self.status, stage=stage, step=step)

    @contextlib.contextmanager
    def waiting(self, collective: str) -> Iterator[None]:
        """The main thread is in a collective, which must end within the time limit."""
        self._waiting_since = time.monotonic()
        self.status = replace(self.status, waiting=collective, exchanges=self.status.exchanges + 1)
        try:
            yield
        finally:
            self.status = replace(self.status, waiting=None)

    def start(self) -> None:
        """Publishes the first status before the thread runs, so that a rank that dies at once is noticed too."""
        self._beat()
        super().start()

    def stop(self) -> None:
        self._stopped.set()
        self.join(5.0)
        with contextlib.suppress(RuntimeError):
            self._beat()

    def run(self) -> None:
        while not self._stopped.wait(BEAT_S):
            try:
                self._beat()
                self._check()
            except RuntimeError as error:  # the store is gone, and with it the process that hosted it
                if not self._stopped.wait(2 * BEAT_S):
                    message = {"what": "does not answer any more", "fix": self.resume_hint}
                    self._exit({**error_to_json(error, "the ranks' store"), **message}, is_shared=False)

    def _beat(self) -> None:
        status = replace(self.status, beat=time.time())
        self.store.set(f"status/{self.rank}", status.to_json())
        self.store.restore()
        if self.run_folder is not None:
            write_status(self.run_folder, status)

    def _check(self) -> None:
        """Ends this process if a rank has failed, hangs or is gone, or if the launcher is gone. Ranks above 0 also end a while
        after the run has ended. Rank 0 watches every rank; the others watch rank 0."""
        failed = self.store.find("failed")
        if failed is not None:
            self._exit(json.loads(failed), is_shared=True)
        if self.launcher and os.getppid() != self.launcher:
            os._exit(1)
        if self.rank and self.store.find("run-ended"):
            self._run_ended_at = self._run_ended_at or time.monotonic()
            if time.monotonic() - self._run_ended_at > GRACE_S:
                os._exit(0)
            return
        for rank in range(self.size) if self.rank == 0 else [0]:
            self._check_alive(rank)
        if self.status.waiting is not None and time.monotonic() - self._waiting_since > self.timeout_s:
            self.report_failure(self._timeout_error(self.status.waiting))

    def other_statuses(self) -> dict[int, RankStatus]:
        """The last status of each other rank that has published one."""
        found = {rank: self.store.find(f"status/{rank}") for rank in range(self.size) if rank != self.rank}
        return {rank: RankStatus.from_json(status) for rank, status in found.items() if status is not None}

    def _check_alive(self, rank: int) -> None:
        status = None if rank == self.rank else self.store.find(f"status/{rank}")
        if status is None or self.store.find(f"left/{rank}"):
            return
        last = RankStatus.from_json(status)
        if last.is_alive is False and not self._stopped.is_set() and not self.store.find(f"left/{rank}"):
            self.report_failure(
                ScaleError(
                    f"rank {rank} of {self.size}",
                    f"its process {last.pid} on {last.host} is gone",
                    because=f"it was killed or crashed; it was last {last.as_text}",
                    fix=self.resume_hint,
                )
            )

    def _timeout_error(self, collective: str) -> ScaleError:
        """Names the ranks that have not entered the collective that this rank waits in."""
        others = self.other_statuses()
        behind = {rank: status for rank, status in others.items() if status.exchanges < self.status.exchanges}
        statuses = "; ".join(f"rank {rank} on {s.host} is {s.as_text}" for rank, s in (behind or others).items())
        late = "rank " + ", ".join(map(str, behind)) if behind else "the other ranks"
        return ScaleError(
            f"rank {self.rank} of {self.size}",
            f"waited {self.timeout_s:g} s in '{collective}' for {late}",
            because=statuses or "no other rank has published a status",
            fix="check that process (does a reward hang? does the machine swap?), or raise scale.timeout_s",
        )

    def report_failure(self, error: BaseException) -> None:
        """Tells all ranks that the run failed, and exits. If several ranks report, the first report counts."""
        report = json.dumps(error_to_json(error, f"rank {self.rank}"))
        self._exit(json.loads(self.store.set_first("failed", report)), is_shared=True)

    def _exit(self, report: dict[str, Any], is_shared: bool) -> None:
        """Rank 0 prints the error; if it is dead, the first rank to notice does. ``is_shared``: all ranks have this report."""
        if self.rank == 0:
            with contextlib.suppress(RuntimeError):
                self.store.set("printed", "1")
            self._print(report)
        elif is_shared:
            deadline = time.monotonic() + GRACE_S
            with contextlib.suppress(RuntimeError):
                while not self.store.find("printed") and time.monotonic() < deadline:
                    time.sleep(0.1)
                if self.store.add("printers", 0 if self.store.find("printed") else 1) == 1:
                    self._print(report)
        os._exit(int(report["exit_code"]) or 1)  # a run that failed never ends like one that succeeded

    def _print(self, report: dict[str, Any]) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # the live display had hidden the cursor
        self.print_error(error_from_json(report))
        sys.stdout.flush()
        sys.stderr.flush()
