"""The store in which ranks meet: only this machine reaches it, and only a rank's entries count."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError

from oncurve.distributed.heartbeat import Heartbeat
from oncurve.distributed.rendezvous import loopback_store
from oncurve.distributed.signed_store import SignedStore
from oncurve.errors import OncurveError, ScaleError
from oncurve.runs.folder import RunFolder
from tests.distributed.test_bad_input import write_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def host() -> TCPStore:
    return loopback_store("0")


def clone(host: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", host.port, None, False, wait_for_workers=False)


def test_it_listens_on_the_loopback_address_only(host: TCPStore) -> None:
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == host.port]
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_a_taken_port_is_reported() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken, pytest.raises(ScaleError, match="already taken"):
        loopback_store(str(taken.getsockname()[1]))


def test_ranks_read_each_other(host: TCPStore) -> None:
    one, other = SignedStore(host, "secret"), SignedStore(clone(host), "secret")
    one.set("a", "größe")
    assert other.get("a") == "größe".encode()
    assert other.find("b") is None
    assert other.set_first("c", "first") == b"first"
    assert one.set_first("c", "second") == b"first"
    assert [one.add("n", 2), other.clone().add("n", 1)] == [2, 3]
    one.delete("a")
    assert other.find("a") is None


@pytest.mark.parametrize("value", [b"", b"x", b"\xff" * 40, json.dumps({"exit_code": 0}).encode()])
def test_what_a_stranger_writes_is_ignored(host: TCPStore, value: bytes) -> None:
    store = SignedStore(host, "secret")
    for name in ("failed", *(f"{prefix}failed" for prefix in prefixes(host, store))):
        host.set(name, value)  # type: ignore[arg-type]
    assert store.find("failed") is None
    with pytest.raises(DistStoreError):
        store.wait(["failed"], timedelta(seconds=0.2))
    assert store.set_first("failed", "ours") == b"ours"
    assert store.get("failed") == b"ours"


def test_an_entry_can_not_be_replayed_under_another_name(host: TCPStore) -> None:
    store = SignedStore(host, "secret")
    store.set("left/1", "1")
    [prefix] = prefixes(host, store)
    host.set(f"{prefix}run-ended", host.get(f"{prefix}left/1"))  # type: ignore[arg-type]
    assert store.find("run-ended") is None


def test_a_rank_waits_past_a_strangers_entry(host: TCPStore) -> None:
    store, late = SignedStore(host, "secret"), SignedStore(clone(host), "secret")
    [prefix] = prefixes(host, store)
    host.set(f"{prefix}command/0", "end")
    timer = threading.Timer(0.3, late.set, ("command/0", "step"))
    timer.start()
    assert store.get("command/0") == b"step"
    timer.join()


def test_what_a_stranger_deletes_or_overwrites_is_restored(host: TCPStore) -> None:
    store, reader = SignedStore(host, "secret"), SignedStore(clone(host), "secret")
    for number in range(3):
        store.set(f"command/{number}", str(number))
    store.delete("command/0")
    [prefix] = prefixes(host, store)
    host.delete_key(f"{prefix}command/1")
    host.set(f"{prefix}command/2", "end")
    assert [reader.find(f"command/{number}") for number in range(3)] == [None, None, None]
    timer = threading.Timer(0.3, store.clone().restore)
    timer.start()
    assert [reader.get(f"command/{number}") for number in (1, 2)] == [b"1", b"2"]
    timer.join()
    assert reader.find("command/0") is None


def test_ranks_that_wait_for_each_other_restore_what_a_stranger_deletes(host: TCPStore) -> None:
    """As ranks check in, before they have a heartbeat: each waits for the other, and rank 0's entry is gone meanwhile."""
    first, second = SignedStore(host, "secret"), SignedStore(clone(host), "secret")
    first.set("check-in/0", "0")
    for key in host.list_keys():
        host.delete_key(key)
    timer = threading.Timer(0.3, second.set, ("check-in/1", "1"))
    timer.start()
    first.wait(["check-in/0", "check-in/1"], timedelta(seconds=30))
    timer.join()
    assert second.get("check-in/0") == b"0"


def prefixes(host: TCPStore, store: SignedStore) -> set[str]:
    """The prefix of a store's keys, which torch tells everyone who can connect."""
    store.set("known", "1")
    return {key.removesuffix("known") for key in host.list_keys() if key.endswith("known")}


def test_a_strangers_failure_does_not_end_a_rank(host: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("oncurve.distributed.heartbeat.os._exit", ended.append)
    shown: list[OncurveError] = []
    heartbeat = Heartbeat(SignedStore(host, "secret"), 0, 2, 60, shown.append)
    for prefix in ("", *prefixes(host, heartbeat.store)):
        host.set(f"{prefix}failed", json.dumps({"kind": "TimeUp", "exit_code": 0, "where": "you", "what": "PWNED"}))
    heartbeat._check()
    assert (ended, shown) == ([], [])
    other = SignedStore(clone(host), "secret")
    other.set(
        "failed", json.dumps({"kind": "ScaleError", "exit_code": 0, "where": "a", "what": "b", "because": "c", "fix": "d"})
    )
    heartbeat._check()
    assert ended[:1] == [1]
    assert [str(error.what) for error in shown[:1]] == ["b"]


@pytest.mark.slow
def test_a_launched_run_is_not_reachable_from_outside_and_survives_a_stranger(tmp_path: Path) -> None:
    addresses: set[tuple[str, int]] = set()
    words = ["train", str(write_recipe(tmp_path / "r.toml", 2)), "--out", str(tmp_path / "run")]
    launched = subprocess.Popen(
        [sys.executable, "-m", "oncurve", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    tree, stranger = psutil.Process(launched.pid), None
    while launched.poll() is None:
        for process in [tree, *tree.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                found = {(c.laddr.ip, c.laddr.port) for c in process.net_connections("tcp") if c.status == "LISTEN"}
                addresses |= found
                if stranger is None and process is tree and found:
                    stranger = TCPStore("127.0.0.1", min(found)[1], None, False, wait_for_workers=False)
        if stranger is not None:
            with contextlib.suppress(RuntimeError):  # the run may have ended
                for prefix in {key.partition("/")[0] + "/" for key in stranger.list_keys()} | {""}:
                    stranger.set(f"{prefix}failed", '{"exit_code": 0}')
                for key in stranger.list_keys():
                    if "/ranks/" not in key:  # those of torch's own process group: without them ranks can't connect
                        stranger.delete_key(key)
        time.sleep(0.1)
    assert stranger is not None
    assert {ip for ip, _ in addresses} == {"127.0.0.1"}
    assert launched.returncode == 0, launched.communicate()[1]
    assert RunFolder(tmp_path / "run").state().status == "finished"
