"""Workers that hang, die, raise and print: every job gets an answer or an error, and no process is left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncurve.workers.pool import WorkerDiedError, WorkerFailedError, Workers

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
    (answer, pid) = workers.ask({"a": ["ü\n", 1.5, None]}, 5.0)
    assert answer == {"a": ["ü\n", 1.5, None]}
    assert workers.ask("again", 5.0) == ["again", pid]
    assert [answer[0] for answer in workers.ask_all(list(range(40)), 5.0)] == list(range(40))
    assert len(workers.ask("x" * 3_000_000, 5.0)[0]) == 3_000_000


@pytest.mark.parametrize("job", ["hang", "hang in C", "children"])
def test_a_job_that_hangs_is_stopped_and_the_next_gets_a_new_process(workers: Workers, job: str) -> None:
    for _ in range(2):
        workers.ask_all(["warm", "up"], 5.0)
    before, began = set(workers.pids), time.monotonic()
    with pytest.raises(TimeoutError, match=r"more than 0\.3 s"):
        workers.ask(job, 0.3)
    assert time.monotonic() - began < 20
    assert len(before & set(workers.pids)) == 1
    (gone,) = before - set(workers.pids)
    assert not _group_runs(gone)
    assert workers.ask("next", 5.0)[0] == "next"


def test_a_worker_that_dies(workers: Workers) -> None:
    with pytest.raises(WorkerDiedError, match="exit code 3"):
        workers.ask("die", 5.0)
    assert [type(answer).__name__ for answer in workers.ask_all(["die", "a", "die", "b"], 5.0)] == [
        "WorkerDiedError",
        "list",
        "WorkerDiedError",
        "list",
    ]


def test_a_worker_killed_between_jobs_is_replaced(workers: Workers) -> None:
    _, pid = workers.ask("first", 5.0)
    os.kill(pid, 9)
    time.sleep(0.05)
    assert workers.ask("second", 5.0)[1] != pid


def test_a_job_that_raises_keeps_its_worker(workers: Workers) -> None:
    _, pid = workers.ask("first", 5.0)
    for job, message in [("raise", "ValueError: no"), ("exit", "SystemExit: bye"), ("memory", "MemoryError")]:
        with pytest.raises(WorkerFailedError, match=message):
            workers.ask(job, 5.0)
    assert workers.ask("second", 5.0)[1] == pid


def test_no_process_outlives_a_killed_trainer(tmp_path: Path) -> None:
    """The parent is killed while its worker hangs in C code: the worker's own timer ends it."""
    home = str(Path(__file__).resolve().parents[2])
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT.format(home=home))
    parent = tmp_path / "parent.py"
    parent.write_text(
        f"import sys, threading, time\nsys.path.insert(0, {home!r})\nfrom oncurve.workers.pool import Workers\n"
        f"workers = Workers([sys.executable, {str(script)!r}], 1)\nprint(workers.ask('pid', 5.0)[1], flush=True)\n"
        "threading.Thread(target=workers.ask, args=('hang in C', 0.5)).start()\ntime.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _group_runs(group: int) -> bool:
    """Whether a process of the group is alive. Killed grandchildren stay zombies until init reaps them."""
    stats = [path.read_text().rsplit(")", 1)[1].split() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
    return any(int(stat[2]) == group and stat[0] not in "ZX" for stat in stats)
