"""A thread beside each rank: it says what the rank does, and hears where another is gone, late or in trouble.

Then no rank stays behind: the first one says what happened, and all end, whatever their main threads wait in. What is lost is
what a kill would lose: the steps since the last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from oncurve.distributed.rank_status import RankStatus, write_status
from oncurve.errors import OncurveError, ScaleError, error_from_json, error_to_json

BEAT_S = 0.5
GRACE_S = 3.0
"""How long others wait for the first rank to speak, or to be left in peace after the end."""
LAUNCHER = "ONCURVE_LAUNCHER"
"""The process that started the ranks of this machine, in their environment: without it they end."""

Speak = Callable[[OncurveError], None]


class Heartbeat(threading.Thread):
    """``store`` is a client of its own: the main thread may be waiting in another."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, speak: Speak) -> None:
        super().__init__(name="oncurve-heart", daemon=True)
        self.store, self.rank, self.size, self.timeout_s, self.speak = store, rank, size, timeout_s, speak
        self.pulse = RankStatus.of_this_process(f"rank-{rank}")
        self.run_folder: Path | None = None
        self.launcher = int(os.environ.get(LAUNCHER, "0"))
        self._waiting_since = 0.0
        self._over_since = 0.0
        self._stopped = threading.Event()

    @property
    def keep_alive(self) -> str:
        return f"mend what ended it, then go on from the last checkpoint: oncurve train --resume {self.run_folder or 'RUN'}"

    def set_phase(self, phase: str) -> None:
        self.pulse = replace(self.pulse, phase=phase, since=time.time())

    def set_step(self, stage: str, step: int) -> None:
        self.pulse = replace(self.pulse, stage=stage, step=step)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Any:
        """The main thread takes part in an exchange, and may not take longer than the limit."""
        self._waiting_since = time.monotonic()
        self.pulse = replace(self.pulse, waiting=what, exchanges=self.pulse.exchanges + 1)
        try:
            yield
        finally:
            self.pulse = replace(self.pulse, waiting=None)

    def start(self) -> None:
        """Others know of this rank from the first moment on, so that one that dies at once is missed too."""
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
                self._listen()
            except RuntimeError as error:  # the store is gone, and with it whoever held it
                if not self._stopped.wait(2 * BEAT_S):
                    self._end(
                        {
                            **error_to_json(error, "the ranks' store"),
                            "what": "does not answer any more",
                            "fix": self.keep_alive,
                        },
                        heard=False,
                    )

    def _beat(self) -> None:
        now = replace(self.pulse, beat=time.time())
        self.store.set(f"pulse/{self.rank}", now.to_json())
        if self.run_folder is not None:
            write_status(self.run_folder, now)

    def _listen(self) -> None:
        if self.store.check(["failed"]):
            self._end(json.loads(self.store.get("failed")), heard=True)
        if self.launcher and os.getppid() != self.launcher:
            os._exit(1)
        if self.rank and self.store.check(["over"]):
            self._over_since = self._over_since or time.monotonic()
            if time.monotonic() - self._over_since > GRACE_S:
                os._exit(0)
            return
        for rank in range(self.size) if self.rank == 0 else [0]:
            self._look_after(rank)
        if self.pulse.waiting is not None and time.monotonic() - self._waiting_since > self.timeout_s:
            self.report_failure(self._late(self.pulse.waiting))

    def others(self) -> dict[int, RankStatus]:
        """What the other ranks last said, as far as they have said anything."""
        ranks = [rank for rank in range(self.size) if rank != self.rank and self.store.check([f"pulse/{rank}"])]
        return {rank: RankStatus.from_json(self.store.get(f"pulse/{rank}")) for rank in ranks}

    def _look_after(self, rank: int) -> None:
        key = f"pulse/{rank}"
        if rank == self.rank or not self.store.check([key]) or self.store.check([f"left/{rank}"]):
            return
        last = RankStatus.from_json(self.store.get(key))
        if last.is_alive is False and not self._stopped.is_set() and not self.store.check([f"left/{rank}", "failed"]):
            self.report_failure(
                ScaleError(
                    f"rank {rank} of {self.size}",
                    f"its process {last.pid} on {last.host} is gone",
                    because=f"it was killed or crashed; it was last {last.as_text}",
                    fix=self.keep_alive,
                )
            )

    def _late(self, what: str) -> ScaleError:
        """Who has not come to an exchange that this rank waits in."""
        others = self.others()
        behind = {rank: p for rank, p in others.items() if p.exchanges < self.pulse.exchanges}
        who = "; ".join(f"rank {rank} on {p.host} is {p.as_text}" for rank, p in (behind or others).items())
        return ScaleError(
            f"rank {self.rank} of {self.size}",
            f"waited {self.timeout_s:g} s in '{what}' for {'rank ' + ', '.join(map(str, behind)) if behind else 'the others'}",
            because=who or "no other rank has said anything",
            fix="look at that process (a reward that hangs, a machine that swaps), or raise scale.timeout_s",
        )

    def report_failure(self, error: BaseException) -> None:
        """Tells all ranks that the run can't go on; the first complaint is the one that counts."""
        mine = json.dumps(error_to_json(error, f"rank {self.rank}"))
        self._end(json.loads(self.store.compare_set("failed", "", mine)), heard=True)

    def _end(self, data: dict[str, Any], heard: bool) -> None:
        """The first rank speaks; where it can't, the first of the others that sees its silence does."""
        if self.rank == 0:
            with contextlib.suppress(RuntimeError):
                self.store.set("spoken", "1")
            self._say(data)
        elif heard:
            deadline = time.monotonic() + GRACE_S
            with contextlib.suppress(RuntimeError):
                while not self.store.check(["spoken"]) and time.monotonic() < deadline:
                    time.sleep(0.1)
                if self.store.add("speakers", 0 if self.store.check(["spoken"]) else 1) == 1:
                    self._say(data)
        os._exit(int(data["exit_code"]))

    def _say(self, data: dict[str, Any]) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a display that was being drawn had hidden the cursor
        self.speak(error_from_json(data))
        sys.stdout.flush()
        sys.stderr.flush()
