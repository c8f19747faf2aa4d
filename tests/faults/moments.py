"""Where in a run it is killed: at a call of one of Oncurve's functions."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


def die() -> None:
    """As by `kill -9`: nothing is cleaned up, nothing is flushed."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@dataclass(frozen=True)
class Moment:
    """Dies at a call of ``target`` (module:attribute.path): before it, after it, or half-way, as ``deed`` decides."""

    target: str
    deed: Callable[..., Any]

    def arm(self, call: int) -> None:
        """From now on, this process dies at call number ``call``."""
        module, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        owner: Any = import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
        real, count = getattr(owner, name), [0]

        def counted(*arguments: Any, **named: Any) -> Any:
            count[0] += 1
            return self.deed(real, *arguments, **named) if count[0] == call else real(*arguments, **named)

        setattr(owner, name, counted)


def before(real: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    die()


def after(real: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    real(*arguments, **named)
    die()


def soon(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """From another thread, at a random time in the first milliseconds of the call."""
    threading.Timer(random.random() * 2e-3, die).start()
    real(*arguments, **named)
    time.sleep(60)


def sometime(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The same within a tenth of a second, in that call or after it."""
    threading.Timer(random.random() * 0.1, die).start()
    return real(*arguments, **named)


def half_a_file(real: Callable[..., Any], tensors: Any, path: Path) -> None:
    """Writes the file and truncates it, as a kill during the write would."""
    real(tensors, path)
    os.truncate(path, path.stat().st_size // 2)
    die()


def written_aside(real: Callable[..., Any], path: Path, content: bytes) -> None:
    """Leaves the file as a kill between writing and renaming would."""
    path.with_name(f".writing-{path.name}-{os.getpid()}").write_bytes(content)
    die()


FILE_OPERATIONS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "sqlite3.connect"})


def at_file_operation(folder: Path, call: int, number: int) -> None:
    """Sends this process a signal just before its ``call``-th operation on a file or folder below ``folder``."""
    count = 0

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in FILE_OPERATIONS and str(folder) in str(arguments[0]):
            count += 1
            if count == call:
                os.kill(os.getpid(), number)

    sys.addaudithook(audit)


MOMENTS = {
    "sampling": Moment("oncurve.engines.native.engine:NativeEngine.sample", soon),
    "scoring": Moment("oncurve.rewards.mix:RewardMix.score", before),
    "grading": Moment("oncurve.training.stages.grpo:grade", after),
    "backward": Moment("torch:Tensor.backward", after),
    "in an update": Moment("oncurve.training.learner.optimiser:Optimiser.step", after),
    "before a commit": Moment("oncurve.runs.database.writer:RunWriter._write_groups", after),
    "in a commit": Moment("oncurve.runs.database.writer:RunWriter.record_step", soon),
    "after a commit": Moment("oncurve.runs.database.writer:RunWriter.record_step", after),
    "amid a checkpoint's file": Moment("oncurve.runs.checkpoints.files:save_file", half_a_file),
    "between writing and renaming": Moment("oncurve.runs.checkpoints.files:_rename_over", before),
    "between renaming and pruning": Moment("oncurve.runs.checkpoints.files:prune", before),
    "measuring": Moment("oncurve.training.trainer:evaluate", before),
    "writing the model": Moment("oncurve.models.policy:Policy.save", after),
    "storing an answer": Moment("oncurve.runs.database.writer:RunWriter.record_replies", before),
    "after storing an answer": Moment("oncurve.runs.database.writer:RunWriter.record_replies", after),
    "in a tool": Moment("oncurve.agents.tool_environment:ToolEpisode._run_call", before),
    "ending an episode": Moment("oncurve.engines.native.scheduler:end_episode", before),
    "starting an agent": Moment("oncurve.agent_programs.agent_processes:AgentProcesses.start", after),
    "recording a turn": Moment("oncurve.agent_programs.endpoint:AgentRollout.commit", before),
    "after recording a turn": Moment("oncurve.agent_programs.endpoint:AgentRollout.commit", after),
    "ending a rollout": Moment("oncurve.agent_programs.agent_engine:RolloutBatch._end", before),
    "asking": Moment("oncurve.rewards.models.judge_client:JudgeClient._reply", before),
    "keeping a reply": Moment("oncurve.rewards.models.judge_client:ReplyStore.put", after),
    "writing the library": Moment("oncurve.training.stages.training_free:Library.write", after),
    "putting the library in place": Moment("oncurve.training.stages.training_free:write_file_atomically", written_aside),
    "at any moment": Moment("oncurve.training.stages.training_free:TrainingFreeLoop.step", sometime),
}
"""Random moments are those of `tests/e2e/test_killed.py`; these are the ones that a clock seldom meets."""
