"""The text of each token of a completion, so that it can be coloured. Needs a tokenizer's file, never a model."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from oncurve.errors import OncurveError
from oncurve.records import Completion
from oncurve.runs.folder import RunFolder
from oncurve.studio.open_run import recipe_of
from oncurve.tasks.base import TAGS

FILE = "tokenizer.json"
CHARACTERS = re.compile("|".join(map(re.escape, TAGS)) + r"|[\s\S]")


def tokenizer_of(run: RunFolder) -> Tokenizer | None:
    """The run's tokenizer, if its file is on this machine: the run's own, the model's it trains from, or the hub's cache."""
    for path in _places(run):
        if path.is_file():
            return _load(path, path.stat().st_mtime_ns)
    return None


def _places(run: RunFolder) -> list[Path]:
    places = [run.tokenizer / FILE, run.model / FILE]
    try:
        source = recipe_of(run).model.source
    except OncurveError:
        return places
    if source != "tiny":
        places.append(Path(source) / FILE)
        cached = try_to_load_from_cache(source, FILE) if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) else None
        if isinstance(cached, str):
            places.append(Path(cached))
    return places


@lru_cache(maxsize=8)
def _load(path: Path, changed: int) -> Tokenizer | None:
    """``changed`` is part of the key: a file that was written again is read again."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # the library raises this very class for every fault of a file
        return None


def token_texts(completion: Completion, tokenizer: Tokenizer | None) -> list[str] | None:
    """One text per token, or None where the tokens can't be told apart.

    Without a tokenizer's file (a run of the built-in model that has not ended yet) the text itself is split into
    characters and tags, and taken if that gives one piece per token; the end token has no text.
    """
    ids = completion.token_ids.tolist()
    if tokenizer is not None:
        return _decoded(tokenizer, ids)
    found = CHARACTERS.findall(completion.text)
    missing = len(ids) - len(found)
    return found + [""] * missing if 0 <= missing <= 1 else None


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Decoded as one stream: a character spread over several tokens stands at the last of them."""
    stream: Any = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in ids]
