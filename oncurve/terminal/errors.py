"""What is told on standard error: a user's mistake as one block (what and where, because, fix), and advice.

A word that is wider than the window stays whole, so that a path or a command can be copied as it stands.

Other libraries' progress bars would tear the display apart.
"""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

from oncurve.errors import OncurveError


def print_error(error: OncurveError) -> None:
    console = Console(stderr=True, highlight=False)
    width, beside = console.width - 1, " " * 10
    head = Text(_wrapped("error ", f"{error.where}: {error.what}", width))
    head.stylize("bold red", 0, 5)
    head.stylize("bold", 6, 6 + len(error.where))
    because = Text(_wrapped("  because ", error.because, width, beside), "dim")
    fix = Text(_wrapped("  fix     ", error.fix, width, beside))
    fix.stylize("green", 0, 5)
    console.print(Text("\n").join([head, because, fix]), soft_wrap=True)


def print_advice(line: str) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(Text(_wrapped("", line, console.width - 1), "yellow"), soft_wrap=True)


def _wrapped(label: str, text: str, width: int, indent: str = "") -> str:
    """Lines of at most the width where words allow it. The label is never parted from the first word."""
    usual = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    first, *others = text.splitlines() or [""]
    begun = label + usual.fill("x" * len(label) + first)[len(label) :]
    usual.initial_indent = indent
    return "\n".join([begun, *map(usual.fill, others)])


def hush() -> None:
    """Silences the bars and advice of transformers, its hub and bitsandbytes; their errors still come through as exceptions."""
    from logging import CRITICAL, ERROR, getLogger

    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub.set_verbosity(CRITICAL)
    getLogger("bitsandbytes").setLevel(ERROR)
