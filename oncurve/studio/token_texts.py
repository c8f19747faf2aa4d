"""The text of each token of a completion, so that the page can colour tokens. Needs a tokenizer file, not a model."""

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
    """The run's tokenizer, if its file is on this machine: in the run's folder, its model's folder, or the hub's cache."""
    for path in _paths(run):
        if path.is_file():
            return _load(path, path.stat().st_mtime_ns)
    return None


def _paths(run: RunFolder) -> list[Path]:
    paths = [run.tokenizer / FILE, run.model / FILE]
    try:
        source = recipe_of(run).model.source
    except OncurveError:
        return paths
    if source != "tiny":
        paths.append(Path(source) / FILE)
        cached = try_to_load_from_cache(source, FILE) if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) else None
        if isinstance(cached, str):
            paths.append(Path(cached))
    return paths


@lru_cache(maxsize=8)
def _load(path: Path, changed: int) -> Tokenizer | None:
    """``changed`` is part of the cache key, so that a new version of the file is read again."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # tokenizers raises plain Exception for any invalid file
        return None


def token_texts(completion: Completion, tokenizer: Tokenizer | None) -> list[str] | None:
    """One text per token; None if the text can't be split into its tokens.

    Without a tokenizer file, the text is split into characters and tags, as the built-in model's tokenizer does. The result is
    used if its length matches the number of tokens; the end token has no text.
    """
    ids = completion.token_ids.tolist()
    if tokenizer is not None:
        return _decoded(tokenizer, ids)
    texts = CHARACTERS.findall(completion.text)
    missing = len(ids) - len(texts)
    return texts + [""] * missing if 0 <= missing <= 1 else None


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Decodes as a stream: a character that spans several tokens belongs to the last of them."""
    stream: Any = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in ids]
