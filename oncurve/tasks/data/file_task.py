"""The task `file`: prompts from JSONL (one object per line), a JSON list of objects or CSV, each of them gzipped or not, or
from Parquet. The file is on this machine, or in a data set of the Hugging Face hub."""

from __future__ import annotations

import codecs
import csv
import gzip
import importlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field, PositiveFloat, PositiveInt

from oncurve.agents.tool_environment import TOOL_TIMEOUT_S, ToolEnvironment
from oncurve.errors import DataError, MissingPackage, RecipeError, pip_install
from oncurve.recipe.schema import sections
from oncurve.recipe.schema.base import Section, Share
from oncurve.records import Environment, Example, History, Prompt, StatefulEnvironment, is_text
from oncurve.rng import philox_generator
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.tasks.data.row_reader import RowReader
from oncurve.tasks.environments import McpTools, load_environment

JSON_LINES = (".jsonl", ".ndjson", ".json")
CSV = {".csv": ",", ".tsv": "\t"}
"""Endings of files with a table as text, and what separates their columns."""
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}

MAX_CSV_FIELD = 1 << 30
"""Characters of a value. Python's own limit, 131,072, refuses long documents."""


class FileOptions(Section):
    """Prompts from a JSONL, JSON, CSV or Parquet file."""

    path: str | None = None
    """The file: `.jsonl` (one JSON object per line), `.json` (the same, or one list of objects), `.csv` or `.tsv` (with a
    header line), each also with `.gz`, or `.parquet`. Or such a file of a data set on the Hugging Face hub, downloaded on
    first use: `hf://datasets/OWNER/NAME/FILE`, or with a version `NAME@REVISION`. Unset: there are no training prompts, only
    those of `heldout_path` for evaluation."""
    heldout_path: str | None = None
    """A file for evaluation, with the same columns; `task.heldout` rows of it are used. Unset: rows of `path` are held out."""
    heldout_share: Share = 0.2
    """Without `heldout_path`: `task.heldout` rows are held out, but at most this fraction of the file."""
    prompt: str = "prompt"
    """Column of the prompt: a text, or a list of messages with role and content, or tool_calls. A list that ends with an
    assistant message is a demonstration: an `sft` stage imitates its answers, and the prompt ends before the last of them."""
    prompt_template: str | None = None
    """The prompt's text with columns as `{column}`; used instead of `prompt`."""
    answer: str = "answer"
    """Column that rewards read as `answer`; optional in each row."""
    completion: str = "completion"
    """Column of demonstrations for an `sft` stage: a text, or a list of messages after a prompt of messages, of which the
    assistant's are imitated. Optional in each row."""
    difficulty: str | None = None
    """Column under which held-out accuracy is reported."""
    chat: bool = False
    """Send text prompts as a user message through the model's chat template, instead of as plain text."""
    system: str | None = None
    """A system message before each prompt; needs `chat`, or prompts that are messages."""
    environment: str | None = None
    """Replies to the model during a completion: `calculator` (`<calc>12*3</calc>` gets its value), a plug-in, `file.py:Class`,
    `gymnasium:ID`, `textarena:ID`, `openenv:URL` or `verifiers:ID`. A class with `calls` and `reply` is a pure function of
    the conversation. A class with `reset(**columns)` has a state: each completion gets an instance, whose public methods are
    tools. Unset: no environment."""
    environment_options: dict[str, Any] = Field(default={})
    """Arguments with which the environment is created, as a table: those of a class of yours, of `gymnasium.make` (such as
    `{ is_slippery = false }`), of `textarena.make`, or of a taskset's configuration in verifiers."""
    tools: tuple[str | McpTools, ...] = ()
    """Functions that the model can call, as `file.py:name`, with type hints and a docstring; the chat template shows them.
    `{ mcp = "python server.py" }` adds the tools of an MCP server."""
    max_turns: PositiveInt | None = None
    """With tools: the most turns that the model has in a completion; calls in the last one are not run. Unset: as many as
    `max_new_tokens` allows."""
    tool_timeout_s: PositiveFloat = TOOL_TIMEOUT_S
    """Seconds that a call of a tool or of the environment may take. A longer one ends its completion."""
    history: History = "tokens"
    """With tools: what the model reads in a later turn, if the chat template would write earlier turns differently from how
    they were sampled (it drops thinking, or reformats a call). `tokens`: the tokens as sampled. `template`: what the template
    writes; a new sequence of the completion begins there."""

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
            environment=self._environment(),
        )

    def _environment(self) -> Environment | StatefulEnvironment | None:
        """The environment. Raises RecipeError if the recipe sets a key that it does not use."""
        turns = (self.max_turns, self.tool_timeout_s, self.history)
        environment = load_environment(
            self.environment, "task.environment", self.tools, *turns, options=self.environment_options
        )
        unused = {"environment_options": "an environment"} if self.environment is None else {}
        if not isinstance(environment, ToolEnvironment):
            unused |= dict.fromkeys(("max_turns", "tool_timeout_s", "history"), "tools, or an environment with `reset`,")
        for key in unused.keys() & self.model_fields_set:
            because = f"only {unused[key]} can use it, and this task has none"
            raise RecipeError(f"task.{key}", getattr(self, key), because=because, fix=f"remove task.{key}")
        return environment


def build_file_task(config: sections.Task, options: FileOptions) -> PromptList:
    """Reads one or two files and holds out rows by `task.seed`."""
    check_has_file(options.path, options.heldout_path)
    prompts, examples = ([], []) if options.path is None else read_prompts(options.path, options, "train", "task.path")
    candidates = prompts
    if options.heldout_path is not None:
        candidates, _ = read_prompts(options.heldout_path, options, "heldout", "task.heldout_path")
    if options.system is not None and candidates[0].text is not None:
        raise RecipeError(
            "task.system",
            options.system,
            because="a prompt in plain text has no system message",
            fix="set task.chat = true",
        )
    _check_named_columns(prompts or candidates, examples, options)
    return split_rows(prompts, candidates, examples, config, options)


def _check_named_columns(prompts: Sequence[Prompt], examples: Sequence[Example], options: FileOptions) -> None:
    """Raises DataError if the recipe names a column for answers or completions that no row has."""
    missing = {"answer": all(options.answer not in prompt.columns for prompt in prompts), "completion": not examples}
    for key in ("answer", "completion"):
        if missing[key] and key in options.model_fields_set:
            names = sorted({name for prompt in prompts for name in prompt.columns} | {options.prompt})
            raise DataError(
                f"task.{key}",
                f"no row has a column '{getattr(options, key)}'",
                because=f"the columns of {options.path or options.heldout_path} are: {', '.join(names)}",
                fix=f"name one of these, or remove task.{key}",
            )


class FilePaths(Protocol):
    """The options of a task that reads files."""

    @property
    def path(self) -> str | None: ...
    @property
    def heldout_path(self) -> str | None: ...
    @property
    def heldout_share(self) -> float: ...


def split_rows(
    prompts: list[Prompt], candidates: list[Prompt], examples: list[Example], config: sections.Task, options: FilePaths
) -> PromptList:
    """Holds out `task.heldout` of the ``candidates``. These are another file's rows, or the prompts themselves, of which at
    most the fraction `heldout_share` is held out."""
    limit = len(candidates) if options.heldout_path is not None else int(options.heldout_share * len(candidates))
    heldout = choose_heldout(candidates, min(config.heldout, limit), config.seed)
    if options.path is None:
        return PromptList((), tuple(heldout), rows=len(candidates))
    split = PromptList.split(prompts, heldout, examples, options.path)
    lines = (*split.log_lines, *_heldout_lines(len(heldout), len(candidates), config, options))
    return replace(split, rows=len(candidates), log_lines=lines)


def _heldout_lines(count: int, rows: int, config: sections.Task, options: FilePaths) -> tuple[str, ...]:
    """Says why fewer prompts than `task.heldout` are held out; nothing if the recipe holds out none."""
    if count >= config.heldout or (options.heldout_path is None and options.heldout_share == 0):
        return ()
    reason = (
        f"task.heldout_path has {rows} rows"
        if options.heldout_path is not None
        else f"it is at most task.heldout_share = {options.heldout_share:g} of the file's {rows} rows"
    )
    outcome = f"{count} prompts are held out" if count else "no prompt is held out, so nothing is evaluated"
    return (f"{outcome}: task.heldout is {config.heldout}, but {reason}",)


def check_has_file(path: str | None, heldout_path: str | None) -> None:
    if path is None and heldout_path is None:
        because = "the task reads its prompts from this file"
        raise RecipeError("task.path", "missing", because=because, fix='add path = "FILE" to [task]')


def choose_heldout(prompts: list[Prompt], count: int, seed: int) -> list[Prompt]:
    """``count`` prompts at random, in the order of the file."""
    order = philox_generator(seed, "file/heldout").permutation(len(prompts))[:count]
    return [prompts[int(i)] for i in sorted(order)]


DEMONSTRATIONS = "sft"
"""The split of a file of demonstrations, in which every row needs a completion. In a task's own file completions are
optional."""


def read_prompts(path: str, options: FileOptions, split: str, key: str) -> tuple[list[Prompt], list[Example]]:
    """Every prompt and demonstration of a file that the recipe names under ``key``. A prompt's id is its file and line, so that
    people can find it."""
    reader, file = options.reader, Path(path)
    prompts: list[Prompt] = []
    examples: list[Example] = []
    for line, row in read_rows(file, key):
        where = f"{path}:{line}"
        prompts.append(reader.read(row, where, f"{file.name}/{split}/{line}"))
        row_examples = reader.examples(row, prompts[-1], where)
        if split == DEMONSTRATIONS and not row_examples:
            raise DataError(
                where,
                f"no column '{reader.completion}', and no chat that ends with an answer",
                because=f"every row must be a demonstration; its columns are: {', '.join(map(str, row))}",
                fix="add a completion to the row, or remove it",
            )
        examples += row_examples
    if not prompts:
        raise DataError(path, "no rows", because="the file is empty", fix="give a file with one prompt per row")
    return prompts, examples


def local_file(path: Path, key: str) -> Path:
    """The file on this machine: the path itself, or the hub's file, downloaded if the cache does not have this version."""
    if path.parts[:1] != ("hf:",):
        return path
    where = "hf://" + "/".join(path.parts[1:])
    if len(path.parts) < 5 or path.parts[1] != "datasets":
        fix = "write hf://datasets/OWNER/NAME/FILE, with the file's path in the data set"
        raise DataError(where, "not a file of a data set", because=f"{key} names a file with rows", fix=fix)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name, _, revision = path.parts[3].partition("@")
    try:
        found = hf_hub_download(
            f"{path.parts[2]}/{name}",
            "/".join(path.parts[4:]),
            repo_type="dataset",
            revision=revision or None,
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        because = str(error).partition("\n")[0].strip() or type(error).__name__
        fix = "check the name and the file; without a network, give the path of a copy of your own"
        raise DataError(where, "it can't be downloaded", because=because, fix=fix) from None
    return Path(found)


def check_file(path: Path, key: str) -> None:
    """Refuses a path that is not a file. ``key`` names it: a key of the recipe, or an option of a command."""
    path = local_file(path, key)
    if not path.is_file():
        what = "it is a folder" if path.is_dir() else "there is no such file"
        because = f"{key} names it" + ("" if path.is_absolute() else f", relative to {Path.cwd()}")
        option = f"{key} FILE" if key.startswith("--") else f"--set {key}=FILE"
        raise DataError(str(path), what, because=because, fix=f"give the file's path: {option}")


def read_rows(path: Path, key: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line, row) of a file that the recipe names under ``key``; rows of Parquet are numbered from 1 like lines."""
    path = local_file(path, key)
    check_file(path, key)
    ending = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif ending in JSON_LINES:
        yield from _json_rows(path)
    elif ending in CSV:
        yield from _csv_rows(path, CSV[ending])
    else:
        raise DataError(
            str(path),
            f"a file of type '{path.suffix}'" if path.suffix else "a file without an ending",
            because="the ending says how a file is read: .jsonl, .json, .csv, .tsv (each also with .gz) or .parquet",
            fix="rename it if it is one of these; else write it as .jsonl, one JSON object per line, or as .csv",
        )


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            is_first = True
            for number, line in enumerate(lines, start=1):
                if is_first and line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                    yield from _listed_rows(line.removeprefix(codecs.BOM_UTF8) + lines.read(), path)
                    return
                is_first = is_first and not line.strip()
                if line.strip():
                    yield number, _json_row(line, f"{path}:{number}")
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(str(path), "not a complete gzip file", because=str(error), fix="copy or write the file again") from None
    except OSError as error:
        raise DataError(str(path), "it can't be read", because=str(error), fix="check its permissions") from None


def _csv_rows(path: Path, separator: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows of a table with a header line. Every value is a text; an empty value counts as a missing column."""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig", newline="")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig", newline="") as lines
        ):
            csv.field_size_limit(MAX_CSV_FIELD)
            reader = csv.reader(lines, delimiter=separator, strict=True)
            names = next(reader, [])
            _check_header(names, separator, path)
            for values in reader:
                if not values:
                    continue
                where = f"{path}:{reader.line_num}"
                if len(values) != len(names):
                    because = f"columns in the header: {len(names)}, values in this row: {len(values)}"
                    fix = "put quotes around a value that contains the separator or a line break"
                    raise DataError(where, "a row of another length", because=because, fix=fix)
                yield reader.line_num, {name: value for name, value in zip(names, values, strict=True) if value != ""}
    except csv.Error as error:
        fix = f"write the file again, with {SEPARATORS[separator]} between columns and with quotes around values"
        raise DataError(str(path), "not valid CSV", because=str(error), fix=fix) from None
    except UnicodeDecodeError as error:
        raise DataError(str(path), "not UTF-8", because=str(error), fix="save the file as UTF-8") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise DataError(str(path), "not a complete gzip file", because=str(error), fix="copy or write the file again") from None
    except OSError as error:
        raise DataError(str(path), "it can't be read", because=str(error), fix="check its permissions") from None


def _check_header(names: list[str], separator: str, path: Path) -> None:
    found = next((mark for mark in ";\t" if mark != separator and len(names) == 1 and mark in names[0]), None)
    if found is not None:
        expected = SEPARATORS[separator]
        because = f"its first line separates the columns by {SEPARATORS[found]} instead of {expected}"
        fix = f"write the file with {expected}" + (", or rename it to .tsv" if found == "\t" else "")
        raise DataError(f"{path}:1", "the columns can't be told apart", because=because, fix=fix)
    fault = "a column without a name" if "" in names else "two columns of one name" if len(set(names)) < len(names) else None
    if names and fault is not None:
        because = f"its first line must name the columns; it is: {', '.join(names)[:200]}"
        raise DataError(f"{path}:1", fault, because=because, fix="write a header line with one name for each column")


def _listed_rows(data: bytes, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows of a file that is one list, numbered from 1 like lines."""
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(
            str(path), "not valid JSON", because=str(error), fix="correct the list, or write one object per line"
        ) from None
    for number, row in enumerate(rows, start=1):
        yield number, _validate_row(row, f"{path}:{number}")


def _json_row(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig").rstrip())
    except UnicodeDecodeError as error:
        raise DataError(where, "not UTF-8", because=str(error), fix="save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        # `where` has the line number in the file, which json's own "line 1" would contradict
        because = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(where, "not valid JSON", because=because, fix="write one JSON object on each line") from None
    return _validate_row(row, where)


def _validate_row(row: object, where: str) -> Mapping[str, Any]:
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
            because="a lone surrogate such as \\ud83d is not a character",
            fix="correct or remove the row: a text in it was truncated in the middle of a character",
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
