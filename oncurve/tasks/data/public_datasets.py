"""Public data sets: GSM8K, MATH, MBPP, HumanEval, HH-RLHF, read from the files that their authors publish. None is included.

Each entry maps the columns of question, answer, tests and solution, and has an instruction and a reward. Everything else is as
in the task `file`.
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
from oncurve.tasks.data.file_task import check_has_file, read_rows, split_rows
from oncurve.tasks.data.preference_pairs import dialogue_messages
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.tasks.data.row_reader import RowReader
from oncurve.tasks.environments import load_environment

Row = Mapping[str, Any]
_CALCULATOR = re.compile(r"<<[^<>]*>>")
THINK = "Think step by step, then give the answer in \\boxed{}."
PROGRAM = "Write the program in a ```python block."


class PublicDatasetOptions(Section):
    """A public data set, read from the file that its authors publish."""

    path: str | None = None
    """The training file, as published (`.jsonl`, `.json`, gzipped or not, or `.parquet`). Unset: there are no training prompts,
    only those of `heldout_path` for evaluation."""
    heldout_path: str | None = None
    """The file for evaluation; `task.heldout` rows of it are used. Unset: rows of `path` are held out."""
    heldout_share: Share = 0.2
    """Without `heldout_path`: `task.heldout` rows are held out, but at most this fraction of the file."""
    chat: bool = True
    """Send the question as a user message through the chat template; if false, as plain text to continue."""
    system: str | None = None
    """A system message before each question; needs `chat`."""
    environment: str | None = None
    """Replies to the model during a completion: `calculator` (`<calc>12*3</calc>` gets its value), a plug-in, or
    `file.py:Class`, a class with `calls` and `reply`. Unset: no environment."""
    instruction: str | None = None
    """Appended to each question; unset: the data set's own instruction. May be empty."""


@dataclass(frozen=True)
class PublicDataset:
    """One data set: how its rows become our columns, the instruction after each question, and its default reward."""

    name: str
    columns: Callable[[Row], dict[str, Any]]
    needed: tuple[str, ...]
    instruction: str
    reward: Mapping[str, Any]


@dataclass(frozen=True)
class PublicDatasetTask(PromptList):
    """A list of prompts with the data set's default reward."""

    rewards: tuple[sections.Reward, ...] = ()

    @property
    def default_rewards(self) -> tuple[sections.Reward, ...]:
        return self.rewards


def gsm8k(row: Row) -> dict[str, Any]:
    """The answer is the text after `####`. Calculator annotations (`<<48/2=24>>`) are removed from the demonstration."""
    solution, _, answer = str(row["answer"]).rpartition("####")
    demonstration = _CALCULATOR.sub("", solution).strip()
    columns = {"prompt": row["question"], "question": row["question"], "answer": answer.strip()}
    return {**columns, "completion": f"{demonstration}\n\\boxed{{{answer.strip()}}}"}


def math(row: Row) -> dict[str, Any]:
    level = row.get("level", row.get("difficulty"))
    difficulty = {} if level is None else {"difficulty": f"level {str(level).removeprefix('Level ')}"}
    demonstration = {"completion": row["solution"]} if row.get("solution") else {}
    return {"prompt": row["problem"], "problem": row["problem"], "answer": row["answer"], **difficulty, **demonstration}


def hh(row: Row) -> dict[str, Any]:
    """The prompt is the dialogue up to its last answer; the answer that people preferred is the demonstration."""
    messages = dialogue_messages(str(row["chosen"]))
    return {"prompt": messages[:-1], "completion": (messages[-1]["content"] if messages else None) or None}


def mbpp(row: Row) -> dict[str, Any]:
    """Both published formats. The prompt includes the first test, because nothing else gives the function's name."""
    question, tests = row.get("text") or row.get("prompt"), list(row["test_list"])
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    prompt = f"{question}\nIt must pass: {tests[0]}"
    return {"prompt": prompt, "tests": tests, "setup": setup, "completion": f"```python\n{row['code'].strip()}\n```"}


def humaneval(row: Row) -> dict[str, Any]:
    tests = {"test_code": row["test"], "entry_point": row["entry_point"], "prompt_code": row["prompt"]}
    return {"prompt": row["prompt"], **tests, "completion": row["canonical_solution"]}


PUBLIC_DATASETS = {
    "gsm8k": PublicDataset("gsm8k", gsm8k, ("question", "answer"), THINK, {"type": "math", "name": "answer"}),
    "math": PublicDataset("math", math, ("problem", "answer"), THINK, {"type": "math", "name": "answer"}),
    "mbpp": PublicDataset("mbpp", mbpp, ("test_list", "code"), PROGRAM, {"type": "code", "name": "answer"}),
    "hh": PublicDataset("hh", hh, ("chosen", "rejected"), "", {"type": "repetition"}),
    "humaneval": PublicDataset(
        "humaneval", humaneval, ("prompt", "test", "entry_point", "canonical_solution"), "", {"type": "code", "name": "answer"}
    ),
}


def build_public_dataset(dataset: PublicDataset, config: sections.Task, options: PublicDatasetOptions) -> PublicDatasetTask:
    """Reads one or two files and holds out rows by `task.seed`."""
    check_has_file(options.path, options.heldout_path)
    prompts: list[Prompt] = []
    examples: list[Example] = []
    if options.path is not None:
        prompts, examples = read_public_dataset(dataset, options.path, options, "train", "task.path")
    candidates = prompts
    if options.heldout_path is not None:
        candidates, _ = read_public_dataset(dataset, options.heldout_path, options, "heldout", "task.heldout_path")
    split = split_rows(prompts, candidates, examples, config, options)
    reward = sections.Reward.model_validate(dict(dataset.reward))
    return PublicDatasetTask(split.train, split.heldout, split.examples, None, split.rows, split.log_lines, (reward,))


def read_public_dataset(
    dataset: PublicDataset, path: str, options: PublicDatasetOptions, split: str, key: str
) -> tuple[list[Prompt], list[Example]]:
    """Every prompt and demonstration of a file that the recipe names under ``key``."""
    environment = load_environment(options.environment, "task.environment")
    reader = RowReader(chat=options.chat, system=options.system if options.chat else None, environment=environment)
    prompts: list[Prompt] = []
    examples: list[Example] = []
    for line, row in read_rows(Path(path), key):
        where = f"{path}:{line}"
        columns = _columns(dataset, row, where, options)
        prompts.append(reader.read(columns, where, f"{dataset.name}/{split}/{line}"))
        example = reader.example(columns, prompts[-1], where)
        examples += [] if example is None else [example]
    if not prompts:
        raise DataError(path, "no rows", because="the file is empty", fix=f"give the file of {dataset.name}")
    return prompts, examples


def _columns(dataset: PublicDataset, row: Row, where: str, options: PublicDatasetOptions) -> dict[str, Any]:
    missing = next((name for name in dataset.needed if name not in row), None)
    if missing is not None:
        raise DataError(
            where,
            f"no column '{missing}'",
            because=f"rows of {dataset.name} have {', '.join(dataset.needed)}; this has {', '.join(map(str, row)) or 'none'}",
            fix="give the data set's own file, or use the task `file`",
        )
    columns = dataset.columns(row)
    instruction = dataset.instruction if options.instruction is None else options.instruction
    return {**columns, "prompt": f"{columns['prompt']}\n{instruction}"} if instruction else columns


def builders() -> dict[str, Callable[[sections.Task, Any], PublicDatasetTask]]:
    """The builder of each data set's task, by name."""
    return {name: partial(build_public_dataset, dataset) for name, dataset in PUBLIC_DATASETS.items()}
