"""The inside of a worker process: JSON lines in, JSON lines out, and an end to every job that takes too long.

Standard output carries answers only: whatever a job prints goes to standard error instead. The clock of each job is a timer of
the kernel with its default action, death: it also ends code that never comes back to the interpreter, such as `9**9**9`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

GRACE = 0.5
"""Seconds that a job gets beyond its limit before the kernel ends it: the process that asked is to notice first."""


def serve(handle: Callable[[Any], Any], memory: int = 4 << 30) -> None:
    """Answers jobs until standard input ends. `memory` bounds the address space, in bytes."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_CORE, 0)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, asked["seconds"] + GRACE)
        answer = _answer(handle, asked["job"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(answer + "\n")
        answers.flush()


def _answer(handle: Callable[[Any], Any], job: Any) -> str:
    try:
        return json.dumps({"answer": handle(job)})
    except (Exception, SystemExit) as error:  # whatever a job raises is its answer
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:500]})


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (wanted, hard))
