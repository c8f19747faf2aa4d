"""Version 1 and the current code, each in a process of its own; and the runs of version 1 that are kept in `data`.

Nothing of the package is imported here. A run is read with `sqlite3` and `safetensors` alone, so that what is expected does not
depend on the code that is tested.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

COMMIT = "f0833fdd421e9b72c08677b3de81b5b55e07986f"
"""Version 1."""

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
RUNS = ("grpo", "ppo", "dpo", "reward_model", "lora", "two_ranks", "stopped", "rejection")
"""The kept runs. Each has a recipe of its name, and all but `stopped` are finished."""
SAMPLED = tuple(name for name in RUNS if name != "dpo")
"""Those with groups of completions."""

DRIVER = """
import contextlib, io, json, runpy, sys
from pathlib import Path
root, *commands = json.loads(sys.argv[1])
import oncurve
found = Path(oncurve.__file__).resolve().parents[1]
assert found == Path(root).resolve(), f"the package comes from {found}, not from {root}"
told = []
for command in commands:
    sys.argv = ["oncurve", *command]
    out = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out):
        try:
            if command[0] == "python":
                runpy.run_path(command[1])
            else:
                runpy.run_module("oncurve", run_name="__main__")
        except SystemExit as end:
            code = end.code
    told.append([code, out.getvalue()])
Path("told.json").write_text(json.dumps(told))
"""
"""Runs commands one after the other in one process, as `python -m oncurve` does, so that torch is imported once. The command
`python FILE` runs a script."""


@dataclass(frozen=True)
class CommandOutput:
    """What a command ended with and wrote to standard output."""

    code: int
    out: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Version:
    """One version of the code, by the folder that holds its package."""

    root: Path

    def run(self, work: Path, *commands: Sequence[str], codes: Sequence[int] = ()) -> list[CommandOutput]:
        """The commands in the folder ``work``. Raises if one ends with another exit code than its own of ``codes``, or 0."""
        # peft writes a set into adapter_config.json, in an order that depends on the seed of Python's hashes.
        environment = os.environ | {"PYTHONPATH": str(self.root), "COLUMNS": "200", "PYTHONHASHSEED": "0"}
        words = [sys.executable, "-c", DRIVER, json.dumps([str(self.root), *commands])]
        done = subprocess.run(words, cwd=work, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{self.root}: {commands}\n{done.stdout}\n{done.stderr}"
        answers = work / "told.json"
        outputs = [CommandOutput(code, out) for code, out in json.loads(answers.read_text())]
        answers.unlink()
        for command, one, code in zip(commands, outputs, codes or [0] * len(commands), strict=True):
            assert one.code == code, f"{self.root}: {command} ended with {one.code}\n{one.out}\n{done.stderr}"
        return outputs


CURRENT = Version(ROOT)


def extract_version_1(folder: Path) -> Version:
    """The package of version 1, from its commit. Raises if this clone does not have that commit."""
    words = ["git", "-C", str(ROOT), "archive", COMMIT, "oncurve", "recipes"]
    done = subprocess.run(words, capture_output=True, check=False)
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()
        raise AssertionError(
            f"version 1 (commit {COMMIT}) can't be read from {ROOT}: {message}. This test compares the current code with it. "
            "A shallow clone lacks the commit: get it with `git fetch --unshallow`."
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return Version(folder)


def copy_recipes(work: Path) -> None:
    """The recipes, with the files that they name by paths relative to the folder ``work``."""
    shutil.copytree(DATA / "recipes", work / "recipes", ignore=shutil.ignore_patterns("__pycache__"))


def unpack(work: Path, *names: str) -> None:
    """Kept runs as version 1 wrote them, in ``work``/runs."""
    for name in names or RUNS:
        with tarfile.open(DATA / "runs" / f"{name}.tar.gz") as archive:
            archive.extractall(work / "runs", filter="data")


def train_command(name: str) -> list[str]:
    return ["train", f"recipes/{name}.toml", "--out", f"runs/{name}"]


def facts_of(run: Path) -> dict[str, Any]:
    """What is expected of a run: its stages, held-out figures and last metrics, its weights, and one group token by token."""
    state = json.loads((run / "run.json").read_text())
    with closing(sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True)) as store:
        store.row_factory = sqlite3.Row
        stages = [dict(row) for row in store.execute(STAGES)]
        evals = [dict(row) | {"metrics": json.loads(row["metrics"])} for row in store.execute(EVALS)]
        last = {stage["name"]: _metrics(store, stage["name"], stage["done"]) for stage in stages if stage["done"]}
        return {
            "status": state["status"],
            "stages": stages,
            "evals": evals,
            "last_metrics": last,
            "weights": weights_digest(run),
            "group": _last_group(store),
        }


STAGES = """
SELECT name, type, stages.steps AS steps, COUNT(steps.step) AS done
FROM stages LEFT JOIN steps ON steps.stage = stages.name GROUP BY name ORDER BY position
"""
EVALS = """
SELECT stage, step, accuracy, asked, evals.metrics AS metrics
FROM evals JOIN stages ON stages.name = evals.stage ORDER BY position, step
"""
LAST_GROUP = """
SELECT groups.* FROM groups JOIN stages ON stages.name = groups.stage
WHERE kind = 'train' ORDER BY stages.position DESC, step DESC, groups.position DESC LIMIT 1
"""
GROUPS = "SELECT text, total, group_id FROM completions JOIN groups ON groups.id = group_id WHERE stage = ? AND kind = 'train'"
COMPLETIONS = "SELECT * FROM completions JOIN tokens ON completion_id = id WHERE group_id = ? ORDER BY position"


def _metrics(store: sqlite3.Connection, stage: str, step: int) -> dict[str, float | None]:
    rows = store.execute("SELECT name, value FROM metrics WHERE stage = ? AND step = ?", (stage, step))
    return {row["name"]: row["value"] for row in rows if not is_of_the_machine(row["name"])}


def _last_group(store: sqlite3.Connection) -> dict[str, Any] | None:
    group = store.execute(LAST_GROUP).fetchone()
    if group is None:
        return None
    completions = [
        {
            "text": row["text"],
            "stop": row["stop"],
            "reward": row["total"],
            "advantage": row["advantage"],
            "token_ids": np.frombuffer(row["token_ids"], "<i4").tolist(),
            "logps": np.frombuffer(row["logps"], "<f4").tolist(),
            "advantages": _by_token(row),
        }
        for row in store.execute(COMPLETIONS, (group["id"],))
    ]
    place = {key: group[key] for key in ("stage", "step", "position", "prompt_id", "prompt")}
    return {**place, "has_signal": bool(group["has_signal"]), "completions": completions}


def _by_token(row: sqlite3.Row) -> list[float]:
    """One number stands for the same at every token."""
    found = np.frombuffer(row["advantages"], "<f4")
    return [*map(float, np.broadcast_to(found, len(row["token_ids"]) // 4))]


def groups_by_reward(run: Path, stage: str) -> list[list[tuple[str, float]]]:
    """The texts and rewards of each group of a stage, the group of the highest mean reward first."""
    found: dict[int, list[tuple[str, float]]] = {}
    with closing(sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True)) as store:
        for text, total, group in store.execute(GROUPS, (stage,)):
            found.setdefault(group, []).append((text, total))
    return sorted(found.values(), key=lambda group: -sum(total for _, total in group) / len(group))


def weights_digest(run: Path) -> str:
    """SHA-256 of the final weights, or of the newest checkpoint's where there is no model yet."""
    files = sorted((run / "model").glob("*.safetensors")) or [_newest(run) / "model.safetensors"]
    found = hashlib.sha256()
    for name, tensor in sorted((name, tensor) for file in files for name, tensor in load_file(file).items()):
        found.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode() + np.ascontiguousarray(tensor).tobytes())
    return found.hexdigest()


def _newest(run: Path) -> Path:
    manifests = (run / "checkpoints").glob("*/manifest.json")
    return max(manifests, key=lambda file: int(json.loads(file.read_text())["number"])).parent


OF_THE_MACHINE = {
    "tokens_per_s", "sample_tokens_per_s", "update_tflops", "mfu", "cpu_seconds", "memory_mib",
}  # fmt: skip
"""Metrics that measure a machine and its moment; two identical runs differ in them, and in all that begin with `seconds/`."""
TIMES = {"created", "started", "finished", "seconds"}


def is_of_the_machine(metric: str) -> bool:
    return metric in OF_THE_MACHINE or metric.startswith("seconds/")


def contents(run: Path) -> dict[str, Any]:
    """All that two identical runs have in common: rows of every table but for times, the recipe's keys as one row more, and
    every other file's digest."""
    with closing(sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True)) as store:
        names = [row[0] for row in store.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        tables = {f"table {name}": _rows(store, name) for name in names if name not in {"events", "meta"}}
    tables["table recipe"] = [dict(_keys(tomllib.loads((run / "recipe.toml").read_text())))]
    files = [file for file in run.rglob("*") if file.is_file() and not _is_apart(file.relative_to(run))]
    return tables | {str(file.relative_to(run)): hashlib.sha256(_bytes_of(file)).hexdigest() for file in files}


def _bytes_of(file: Path) -> bytes:
    """A file's bytes; of dpo's log-probs without the digest of their rows, which version 1 did not store."""
    if file.name != "reference_logps.safetensors":
        return file.read_bytes()
    return save({name: array for name, array in load_file(file).items() if name != "rows"})


def _rows(store: sqlite3.Connection, table: str) -> list[Mapping[str, Any]]:
    columns = [row[1] for row in store.execute(f"PRAGMA table_info({table})") if row[1] not in TIMES]
    rows = store.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY {', '.join(columns)}").fetchall()
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    return [row for row in found if table != "metrics" or not is_of_the_machine(row["name"])]


def _keys(table: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key of nested tables with its value, as in ``rewards.0.type``."""
    for key, value in table.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_apart(file: Path) -> bool:
    """Of one process or moment alone; or, as a manifest, a list of what is compared itself, with the version's number."""
    return (
        file.parts[0] in ("recipe.toml", "run.json", "run.lock", "actors", "inputs.json", "sources")
        or file.parts[0].startswith("run.db")
        or file.name == "manifest.json"
    )
