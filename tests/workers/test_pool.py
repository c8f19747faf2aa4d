"""Workers that hang, die, raise and print: every job gets an answer or an error, and no process is left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncurve.workers.pool import WorkerDiedError, WorkerFailedError, Workers

PATIENCE_S = 120.0
"""For jobs that end by themselves: a busy machine may need seconds to start Python."""
SCRIPT = """
import os, sys, time
sys.path.insert(0, {home!r})
from oncurve.workers.child import serve

def handle(job):
    if job == "hang":
        time.sleep(60)
    if job == "hang in C":
        9**9**9
    if job == "die":
        os._exit(3)
    if job == "raise":
        raise ValueError("no")
    if job == "exit":
        sys.exit("bye")
    if job == "memory":
        return len(bytearray(1 << 33))
    if job == "children":
        os.spawnl(os.P_NOWAIT, "/bin/sleep", "sleep", "60")
        time.sleep(60)
    print("this is not an answer")
    return [job, os.getpid()]

serve(handle)
"""


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    script = tmp_path_factory.mktemp("workers") / "worker.py"
    script.write_text(SCRIPT.format(home=str(Path(__file__).resolve().parents[2])))
    pool = Workers([sys.executable, str(script)], 2)
    yield pool
    pool.close()
    assert pool.pids == []


def test_answers(workers: Workers) -> None:
    (answer, pid) = workers.ask({"a": ["ü\n", 1.5, None]}, PATIENCE_S)
    assert answer == {"a": ["ü\n", 1.5, None]}
    assert workers.ask("again", PATIENCE_S) == ["again", pid]
    assert [answer[0] for answer in workers.ask_all(list(range(40)), PATIENCE_S)] == list(range(40))
    assert len(workers.ask("x" * 3_000_000, PATIENCE_S)[0]) == 3_000_000


@pytest.mark.parametrize("job", ["hang", "hang in C", "children"])
def test_a_job_that_hangs_is_stopped_and_the_next_gets_a_new_process(workers: Workers, job: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while len(workers.pids) < 2 and time.monotonic() < end:  # on a busy machine one process may take both jobs
        workers.ask_all(["warm", "up"], PATIENCE_S)
    before = set(workers.pids)
    with pytest.raises(TimeoutError, match=r"more than 0\.3 s"):
        workers.ask(job, 0.3)
    assert len(before & set(workers.pids)) == 1
    (gone,) = before - set(workers.pids)
    assert not _group_runs(gone)
    assert workers.ask("next", PATIENCE_S)[0] == "next"


def test_a_worker_that_dies(workers: Workers) -> None:
    with pytest.raises(WorkerDiedError, match="exit code 3"):
        workers.ask("die", PATIENCE_S)
    assert [type(answer).__name__ for answer in workers.ask_all(["die", "a", "die", "b"], PATIENCE_S)] == [
        "WorkerDiedError",
        "list",
        "WorkerDiedError",
        "list",
    ]


def test_a_worker_killed_between_jobs_is_replaced(workers: Workers) -> None:
    _, pid = workers.ask("first", PATIENCE_S)
    os.kill(pid, 9)
    wait_for_end(pid)
    assert workers.ask("second", PATIENCE_S)[1] != pid


def test_a_job_that_raises_keeps_its_worker(workers: Workers) -> None:
    _, pid = workers.ask("first", PATIENCE_S)
    for job, message in [("raise", "ValueError: no"), ("exit", "SystemExit: bye"), ("memory", "MemoryError")]:
        with pytest.raises(WorkerFailedError, match=message):
            workers.ask(job, PATIENCE_S)
    assert workers.ask("second", PATIENCE_S)[1] == pid


def test_no_process_outlives_a_killed_trainer(tmp_path: Path) -> None:
    """The parent is killed while its worker hangs in C code: the worker's own timer ends it."""
    home = str(Path(__file__).resolve().parents[2])
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT.format(home=home))
    parent = tmp_path / "parent.py"
    parent.write_text(
        f"import sys, threading, time\nsys.path.insert(0, {home!r})\nfrom oncurve.workers.pool import Workers\n"
        f"workers = Workers([sys.executable, {str(script)!r}], 1)\nprint(workers.ask('pid', {PATIENCE_S})[1], flush=True)\n"
        "threading.Thread(target=workers.ask, args=('hang in C', 0.5)).start()\ntime.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate()
    wait_for_end(pid)


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while _runs(pid):
        assert time.monotonic() < deadline, "it does not end"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _group_runs(group: int) -> bool:
    """Whether a process of the group is alive. Killed grandchildren stay zombies until init reaps them."""
    stats = [path.read_text().rsplit(")", 1)[1].split() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    return any(int(stat[2]) == group and stat[0] not in "ZX" for stat in stats)
