"""The code blocks of the documentation: which ones tests run, and why others are not run.

A block's language says what it is:

    sh                       commands, run by bash
    python                   run in one process per page, in order
    toml                     a part of a recipe, parsed
    any, with title="FILE"   the contents of a file, written to the page's folder
    text                     output, not run

tests/examples/test_site_pages.py runs the pages: each of the folders `start` and `how-to` in an empty folder, as a reader
would, and the others in a folder with a short run. An HTML comment before a block gives the reason why it is not run:
`<!-- needs a GPU -->`, `<!-- not run: it installs packages -->`. Indented commands are those of measurements, which people run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"(?:^<!-- (?P<reason>needs a GPU|not run: [^\n]*?) -->\n)?"
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"^    (?:oncurve|python|pip|make|torchrun|ray) .*", re.MULTILINE)
RUN_FOLDERS = ("start", "how-to")
RUN_BY_OTHER_TESTS = {"python.md": "tests/examples/test_python_page.py", "extending.md": "tests/examples/test_extending.py"}
MEASUREMENTS = "measurements, run by people: files, commands and options exist"


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """One fenced block. ``title`` is the file that it is the contents of; ``reason`` says why it is not run."""

    language: str
    title: str | None
    body: str
    reason: str | None


def read_blocks(text: str) -> list[CodeBlock]:
    return [CodeBlock(m["language"], m["title"], m["body"], m["reason"]) for m in FENCE.finditer(text)]


def count_blocks(pages: Iterable[Path]) -> Counter[str]:
    """How many blocks of the pages there are of each kind."""
    return Counter(kind for page in pages for kind in _kinds(page))


def _kinds(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for block in read_blocks(text):
        if block.language == "text":
            yield "output"
        elif block.reason is not None:
            yield block.reason
        elif block.language == "toml" and block.title is None and page.name not in RUN_BY_OTHER_TESTS:
            yield "parsed as a part of a recipe by tests"
        else:
            yield "run by tests"
    for _ in COMMAND.findall(FENCE.sub("", text)):
        yield MEASUREMENTS
