"""Prompts from a file: JSONL (one object per line), one JSON list of objects, either of them gzipped, or Parquet."""

from __future__ import annotations

import gzip
import importlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from oncurve.errors import DataError, MissingPackage, RecipeError, pip_install
from oncurve.recipe.schema import sections
from oncurve.recipe.schema.base import Section, Share
from oncurve.records import Example, Prompt, is_text
from oncurve.rng import philox_generator
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.tasks.data.row_reader import RowReader
from oncurve.tasks.environments import load_environment

JSON_LINES = (".jsonl", ".ndjson", ".json")


class FileOptions(Section):
    """Options of the task `file`."""

    path: str
    """The file: `.jsonl` (one JSON object per line), `.json` (the same, or one list of objects), either with `.gz`, or
    `.parquet`."""
    heldout_path: str | None = None
    """A file to measure on, of the same columns; `task.heldout` rows of it are used. Unset: rows of `path` are kept aside."""
    heldout_share: Share = 0.2
    """Without `heldout_path`: `task.heldout` rows are kept aside, but at most this share of the file."""
    prompt: str = "prompt"
    """Column of the prompt: a text, or a list of messages with role and content. A list that ends with an assistant's message
    is a worked chat: its answers are imitated by an `sft` stage, and the last of them is what is asked for."""
    prompt_template: str | None = None
    """The prompt's wording, with columns as `{column}`; takes the place of `prompt`."""
    answer: str = "answer"
    """Column that rewards know as `answer`; a row may lack it."""
    completion: str = "completion"
    """Column of worked examples for an `sft` stage; a row may lack it."""
    difficulty: str | None = None
    """Column under which held-out accuracy is reported."""
    chat: bool = False
    """Send text prompts as a user's message through the model's chat template, not as they are."""
    system: str | None = None
    """A system message before each prompt; needs `chat`, or prompts that are messages."""
    environment: str | None = None
    """What answers back while the model writes: `calculator` (`<calc>12*3</calc>` gets its value), or `file.py:Class`, a class
    with `calls` and `reply`. Unset: nothing does."""

    @property
    def reader(self) -> RowReader:
        return RowReader(
            prompt=self.prompt,
            answer=self.answer,
            completion=self.completion,
            difficulty=self.difficulty,
            template=self.prompt_template,
            chat=self.chat,
            system=self.system,
            environment=load_environment(self.environment, "task.environment"),
        )


def build_file_task(config: sections.Task, options: FileOptions) -> PromptList:
    """Reads the file, or the two, and keeps held-out rows aside by `task.seed`."""
    prompts, examples = read_prompts(options.path, options, "train", "task.path")
    if options.system is not None and prompts[0].text is not None:
        raise RecipeError(
            "task.system",
            options.system,
            because="a prompt that is sent as plain text has no system message",
            fix="set task.chat = true",
        )
    if options.heldout_path is not None:
        measured, _ = read_prompts(options.heldout_path, options, "heldout", "task.heldout_path")
        return PromptList.split(prompts, _some(measured, config.heldout, config.seed), examples, options.path)
    count = min(config.heldout, int(options.heldout_share * len(prompts)))
    return PromptList.split(prompts, _some(prompts, count, config.seed), examples, options.path)


def _some(prompts: list[Prompt], count: int, seed: int) -> list[Prompt]:
    order = philox_generator(seed, "file/heldout").permutation(len(prompts))[:count]
    return [prompts[int(i)] for i in sorted(order)]


IMITATED = "sft"
"""The split of a file that is there to be imitated. In a task's own file a row may have a completion or not."""


def read_prompts(path: str, options: FileOptions, split: str, key: str) -> tuple[list[Prompt], list[Example]]:
    """Every prompt of a file, which the recipe names under ``key``, and its worked examples. A prompt's id is its file and
    line, so that people can find it."""
    reader, file = options.reader, Path(path)
    prompts: list[Prompt] = []
    examples: list[Example] = []
    for line, row in read_rows(file, key):
        where = f"{path}:{line}"
        prompts.append(reader.read(row, where, f"{file.name}/{split}/{line}"))
        found = reader.examples(row, prompts[-1], where)
        if split == IMITATED and not found:
            raise DataError(
                where,
                f"no column '{reader.completion}', and no chat that ends with an answer",
                because=f"every row is to be imitated; the columns found there are: {', '.join(map(str, row))}",
                fix="give the row its completion, or leave it out",
            )
        examples += found
    if not prompts:
        raise DataError(path, "no rows", because="the file is empty", fix="give a file with one prompt per row")
    return prompts, examples


def read_rows(path: Path, key: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line, row) of a file that the recipe names under ``key``; rows of Parquet are counted from 1 as lines are."""
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else "there is no such file"
        because = f"{key} names it" + ("" if path.is_absolute() else f", as seen from {Path.cwd()}")
        raise DataError(str(path), what, because=because, fix=f"give the file's path: --set {key}=FILE")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.with_suffix("").suffix in JSON_LINES if path.suffix == ".gz" else path.suffix in JSON_LINES:
        yield from _json_rows(path)
    else:
        raise DataError(
            str(path),
            f"a file of kind '{path.suffix}'",
            because="only .jsonl, .json and .parquet are read",
            fix="convert or rename it",
        )


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1 and line.lstrip().startswith(b"["):
                    yield from _listed_rows(line + lines.read(), path)
                    return
                if line.strip():
                    yield number, _json_row(line, f"{path}:{number}")
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(str(path), "not a whole gzip file", because=str(error), fix="copy or write the file again") from None
    except OSError as error:
        raise DataError(str(path), "it can't be read", because=str(error), fix="check its permissions") from None


def _listed_rows(data: bytes, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows of a file that is one list; they are counted from 1 as lines are."""
    try:
        rows = json.loads(data)
    except ValueError as error:
        raise DataError(
            str(path), "not valid JSON", because=str(error), fix="write the list anew, or one object per line"
        ) from None
    for number, row in enumerate(rows, start=1):
        yield number, _checked_row(row, f"{path}:{number}")


def _json_row(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(where, "not UTF-8", because=str(error), fix="save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise DataError(where, "not valid JSON", because=str(error), fix="write one JSON object on each line") from None
    return _checked_row(row, where)


def _checked_row(row: object, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise DataError(
            where,
            f"a JSON {type(row).__name__}",
            because="a row is an object with named columns",
            fix="write one JSON object on each line",
        )
    if not is_text(json.dumps(row, ensure_ascii=False)):
        raise DataError(
            where,
            "half of a character",
            because="a lone surrogate such as \\ud83d stands for nothing",
            fix="mend or drop the row: a text in it was cut in the midst of a character",
        )
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingPackage(
            str(path), "pyarrow is not installed", because="Parquet files are read with it", fix=pip_install("parquet")
        ) from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (arrow.ArrowException, OSError) as error:
        raise DataError(
            str(path), "not a Parquet file that can be read", because=str(error), fix="write the file again"
        ) from None
    yield from enumerate(rows, start=1)
