"""The loop of a worker process: JSON lines in, JSON lines out, and a time limit on every job.

Standard output carries answers only: what a job prints goes to standard error. The time limit is a kernel timer whose default
action kills the process, so it also ends code that never returns to the interpreter, such as `9**9**9`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

GRACE_S = 0.5
"""How long a job may exceed its limit before the kernel kills the process: the parent should notice first."""


def serve(handle: Callable[[Any], Any], memory: int = 4 << 30, place_of: Callable[[BaseException], str] = lambda _: "") -> None:
    """Answers jobs until standard input ends. ``memory`` limits the address space, in bytes. ``place_of`` gives the place of an
    error, which is sent beside its message."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_CORE, 0)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        request = json.loads(line)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + GRACE_S)
        answer = _answer(handle, request["job"], place_of)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(answer + "\n")
        answers.flush()


def _answer(handle: Callable[[Any], Any], job: Any, place_of: Callable[[BaseException], str]) -> str:
    try:
        return json.dumps({"answer": handle(job)})
    except (Exception, SystemExit) as error:  # whatever a job raises is its answer
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:500], "place": place_of(error)})


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (soft, hard))
