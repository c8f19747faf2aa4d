"""Makes `data` from version 1: `python -m tests.version1.make_data`. The kept files are its output, and are not made again.

For each recipe: the run as an archive, what is expected of it (`facts.json`), and what version 1 itself told of it as JSON
(`told.json`). Also the options of each command (`commands.json`).
"""

from __future__ import annotations

import json
import re
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tests.version1.versions import DATA, RUNS, SAMPLED, Version, copy_recipes, extract_version_1, facts_of, train_command

HOST = "version1"
"""In place of the name of the machine that the runs were made on."""
COMMANDS = [
    *("train", "fork", "eval", "chat", "runs", "show", "export", "probe", "replay", "verify", "status", "doctor", "plan"),
    *("serve", "compare", "studio", "report", "pairs", "version"),
    *("recipe explain", "recipe show", "recipe from-trl"),
    *("rewards try", "rewards replay", "rewards audit", "models", "models convert"),
]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        version, work = extract_version_1(Path(place, "version1")), Path(place, "work")
        work.mkdir()
        copy_recipes(work)
        train_all(version, work)
        facts = {name: facts_of(work / "runs" / name) for name in RUNS}
        write(DATA / "facts.json", facts)
        write(DATA / "told.json", outputs_of(version, work, facts))
        write(DATA / "commands.json", options_of(version, work))
        for name in RUNS:
            pack(work / "runs" / name)


def train_all(version: Version, work: Path) -> None:
    for name in RUNS:
        if name != "stopped":
            version.run(work, train_command(name))
    # Time is up after each first step: five of them are the two of sft and three of the six of grpo.
    short = ["--minutes", "0.00001"]
    again = ["train", "runs/stopped", "--resume", *short]
    version.run(work, [*train_command("stopped"), *short], *[again] * 4)
    for name in RUNS:
        run = work / "runs" / name
        for file in (run / "run.json", *run.glob("actors/*.json")):
            file.write_text(re.sub(r'("host": )"[^"]*"', rf'\1"{HOST}"', file.read_text()))


def outputs_of(version: Version, work: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """By command, as written; the pairs of each run that has some; and the measurement of a run whose reward is Python's."""
    commands = [["runs", "--json"]]
    for name in RUNS:
        commands += [["show", name, "--json"], ["show", name, "--timing", "--json"], ["show", name, "--bad", "--json"]]
        commands.append(["status", name, "--json"])
        for stage in facts[name]["stages"]:
            step = ["show", name, "--stage", stage["name"], "--step", str(stage["done"])]
            commands.append([*step, "--json"])
            if stage["type"] in ("grpo", "ppo", "rejection_sample"):
                commands.append([*step, "--group", "1", "--json"])
    found = {" ".join(command): told.json for command, told in zip(commands, version.run(work, *commands), strict=True)}
    version.run(work, *(["pairs", name, "-o", f"{name}.jsonl"] for name in SAMPLED))
    (found["eval dpo"],) = (told.json for told in version.run(work, ["eval", "dpo", "--json"]))
    return found | {f"pairs {name}": (work / f"{name}.jsonl").read_text().splitlines() for name in SAMPLED}


def options_of(version: Version, work: Path) -> dict[str, list[str]]:
    told = version.run(work, *([*command.split(), "--help"] for command in COMMANDS))
    return {command: sorted(options_in(one.out)) for command, one in zip(COMMANDS, told, strict=True)}


def options_in(help_text: str) -> set[str]:
    """The options that a command's help lists, each at the start of a line within its frame."""
    lines = re.findall(r"^│\s+(?:\*\s+)?(--[a-z-]+)(?:\s+(-\w))?\s", help_text, re.MULTILINE)
    return {option for pair in lines for option in pair if option}


def pack(run: Path) -> None:
    """Without what SQLite keeps beside a database that is open: the log must be empty."""
    log = run / "run.db-wal"
    assert not log.exists() or log.stat().st_size == 0, f"{run}: its database is not written out"
    archive = DATA / "runs" / f"{run.name}.tar.gz"
    archive.parent.mkdir(exist_ok=True)
    with tarfile.open(archive, "w:gz") as written:
        written.add(run, run.name, filter=_without_owner)


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return None if Path(entry.name).name in ("run.db-wal", "run.db-shm", "run.lock") else entry


def write(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
