"""Well-known data sets, read from the files their authors publish: GSM8K, MATH, MBPP, HumanEval, HH-RLHF. None of them is
shipped.

Each says where the question, the answer, the tests and a worked solution are, in what words the question is put, and which
reward grades it. Everything else is as in the task `file`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from oncurve.errors import DataError
from oncurve.recipe.schema import sections
from oncurve.recipe.schema.base import Section, Share
from oncurve.records import Example, Prompt
from oncurve.rng import philox_generator
from oncurve.tasks.data.file_task import read_rows
from oncurve.tasks.data.preference_pairs import dialogue_messages
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.tasks.data.row_reader import RowReader
from oncurve.tasks.environments import load_environment

Row = Mapping[str, Any]
_CALCULATOR = re.compile(r"<<[^<>]*>>")
THINK = "Think step by step, then give the answer in \\boxed{}."
PROGRAM = "Write the program in a ```python block."


class PublicDatasetOptions(Section):
    """Options of the tasks `gsm8k`, `math`, `mbpp`, `humaneval` and `hh`."""

    path: str
    """The file to train on, as its authors publish it (`.jsonl`, `.json`, gzipped or not, or `.parquet`)."""
    heldout_path: str | None = None
    """The file to measure on; `task.heldout` rows of it are used. Unset: rows of `path` are kept aside."""
    heldout_share: Share = 0.2
    """Without `heldout_path`: `task.heldout` rows are kept aside, but at most this share of the file."""
    chat: bool = True
    """Send the question as a user's message through the chat template; else as plain text, to be gone on with."""
    system: str | None = None
    """A system message before each question; needs `chat`."""
    environment: str | None = None
    """What answers back while the model writes: `calculator` (`<calc>12*3</calc>` gets its value), or `file.py:Class`, a class
    with `calls` and `reply`. Unset: nothing does."""
    instruction: str | None = None
    """Put after each question; unset: the data set's own. Empty: nothing."""


@dataclass(frozen=True)
class PublicDataset:
    """One data set: its rows in our words, the words after each question, and its usual reward."""

    name: str
    columns: Callable[[Row], dict[str, Any]]
    needed: tuple[str, ...]
    instruction: str
    reward: Mapping[str, Any]


@dataclass(frozen=True)
class PublicDatasetTask(PromptList):
    """A list of prompts that knows which reward grades it."""

    rewards: tuple[sections.Reward, ...] = ()

    @property
    def default_rewards(self) -> tuple[sections.Reward, ...]:
        return self.rewards


def gsm8k(row: Row) -> dict[str, Any]:
    """The answer is what follows `####`; the worked solution loses its calculator notes (`<<48/2=24>>`)."""
    solution, _, answer = str(row["answer"]).rpartition("####")
    worked = _CALCULATOR.sub("", solution).strip()
    return {"prompt": row["question"], "answer": answer.strip(), "completion": f"{worked}\n\\boxed{{{answer.strip()}}}"}


def math(row: Row) -> dict[str, Any]:
    level = row.get("level", row.get("difficulty"))
    named = {} if level is None else {"difficulty": f"level {str(level).removeprefix('Level ')}"}
    worked = {"completion": row["solution"]} if row.get("solution") else {}
    return {"prompt": row["problem"], "answer": row["answer"], **named, **worked}


def hh(row: Row) -> dict[str, Any]:
    """The dialogue up to its last answer is the prompt; the answer that people preferred is the worked one."""
    messages = dialogue_messages(str(row["chosen"]))
    return {"prompt": messages[:-1], "completion": (messages[-1]["content"] if messages else None) or None}


def mbpp(row: Row) -> dict[str, Any]:
    """Both published forms. The first test is shown: nothing else says what the function is to be called."""
    asked, tests = row.get("text") or row.get("prompt"), list(row["test_list"])
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    shown = f"{asked}\nIt must pass: {tests[0]}"
    return {"prompt": shown, "tests": tests, "setup": setup, "completion": f"```python\n{row['code'].strip()}\n```"}


def humaneval(row: Row) -> dict[str, Any]:
    tested = {"test_code": row["test"], "entry_point": row["entry_point"], "prompt_code": row["prompt"]}
    return {"prompt": row["prompt"], **tested, "completion": row["canonical_solution"]}


PUBLIC_DATASETS = {
    "gsm8k": PublicDataset("gsm8k", gsm8k, ("question", "answer"), THINK, {"type": "math", "name": "answer"}),
    "math": PublicDataset("math", math, ("problem", "answer"), THINK, {"type": "math", "name": "answer"}),
    "mbpp": PublicDataset("mbpp", mbpp, ("test_list", "code"), PROGRAM, {"type": "code", "name": "answer"}),
    "hh": PublicDataset("hh", hh, ("chosen", "rejected"), "", {"type": "repetition"}),
    "humaneval": PublicDataset(
        "humaneval", humaneval, ("prompt", "test", "entry_point", "canonical_solution"), "", {"type": "code", "name": "answer"}
    ),
}


def build_public_dataset(known: PublicDataset, config: sections.Task, options: PublicDatasetOptions) -> PublicDatasetTask:
    """Reads the file, or the two, and keeps held-out rows aside by `task.seed`."""
    prompts, examples = read_public_dataset(known, options.path, options, "train", "task.path")
    if options.heldout_path is not None:
        measured, _ = read_public_dataset(known, options.heldout_path, options, "heldout", "task.heldout_path")
        count = config.heldout
    else:
        measured, count = prompts, min(config.heldout, int(options.heldout_share * len(prompts)))
    order = philox_generator(config.seed, "file/heldout").permutation(len(measured))[:count]
    heldout = [measured[int(i)] for i in sorted(order)]
    parts = PromptList.split(prompts, heldout, examples, options.path)
    return PublicDatasetTask(
        parts.train, parts.heldout, parts.examples, None, (sections.Reward.model_validate(dict(known.reward)),)
    )


def read_public_dataset(
    known: PublicDataset, path: str, options: PublicDatasetOptions, split: str, key: str
) -> tuple[list[Prompt], list[Example]]:
    """Every prompt of a file, which the recipe names under ``key``, and its worked examples."""
    environment = load_environment(options.environment, "task.environment")
    reader = RowReader(chat=options.chat, system=options.system if options.chat else None, environment=environment)
    prompts: list[Prompt] = []
    examples: list[Example] = []
    for line, row in read_rows(Path(path), key):
        where = f"{path}:{line}"
        made = _row(known, row, where, options)
        prompts.append(reader.read(made, where, f"{known.name}/{split}/{line}"))
        example = reader.example(made, prompts[-1], where)
        examples += [] if example is None else [example]
    if not prompts:
        raise DataError(path, "no rows", because="the file is empty", fix=f"give the file of {known.name}")
    return prompts, examples


def _row(known: PublicDataset, row: Row, where: str, options: PublicDatasetOptions) -> dict[str, Any]:
    missing = next((name for name in known.needed if name not in row), None)
    if missing is not None:
        raise DataError(
            where,
            f"no column '{missing}'",
            because=f"rows of {known.name} have {', '.join(known.needed)}; here are {', '.join(map(str, row)) or 'none'}",
            fix="give the data set's own file, or use the task `file`",
        )
    made = known.columns(row)
    instruction = known.instruction if options.instruction is None else options.instruction
    return {**made, "prompt": f"{made['prompt']}\n{instruction}"} if instruction else made


def builders() -> dict[str, Callable[[sections.Task, Any], PublicDatasetTask]]:
    return {name: partial(build_public_dataset, known) for name, known in PUBLIC_DATASETS.items()}
