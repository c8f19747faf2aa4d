"""Messages on standard error: a user error as one block (where and what, because, fix), and advice.

Long words are never broken, so that a path or a command can be copied. The module also silences other libraries' progress bars,
which would garble the live display.
"""

from __future__ import annotations

import textwrap

from rich.text import Text

from oncurve.errors import OncurveError
from oncurve.terminal.console import SafeConsole


def print_error(error: OncurveError) -> None:
    console = SafeConsole(stderr=True)
    width, indent = console.width - 1, " " * 10
    head = Text(_wrapped("error ", f"{error.where}: {error.what}", width))
    head.stylize("bold red", 0, 5)
    head.stylize("bold", 6, 6 + len(error.where))
    because = Text(_wrapped("  because ", error.because, width, indent), "dim")
    fix = Text(_wrapped("  fix     ", error.fix, width, indent))
    fix.stylize("green", 0, 5)
    console.print(Text("\n").join([head, because, fix]), soft_wrap=True)


def print_advice(line: str) -> None:
    console = SafeConsole(stderr=True)
    console.print(Text(_wrapped("", line, console.width - 1), "yellow"), soft_wrap=True)


def _wrapped(label: str, text: str, width: int, indent: str = "") -> str:
    """Wraps a text to the width, as far as its words allow. The label stays on the line of the first word."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    first, *others = text.splitlines() or [""]
    labelled = label + wrapper.fill("x" * len(label) + first)[len(label) :]
    wrapper.initial_indent = indent
    return "\n".join([labelled, *map(wrapper.fill, others)])


def silence_libraries() -> None:
    """Silences progress bars and warnings of transformers, huggingface_hub and bitsandbytes. Their exceptions still arrive."""
    from logging import CRITICAL, ERROR, getLogger

    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub.set_verbosity(CRITICAL)
    getLogger("bitsandbytes").setLevel(ERROR)
