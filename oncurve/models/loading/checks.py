"""Names on a hub: found out at once where they can't be had, for the hub's own library goes on trying for half a minute.

A model folder from elsewhere is data: what would make loading it read other files is refused before it is opened.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from oncurve.errors import ModelError


def check_reachable(source: str) -> None:
    """Refuses a name that is neither a folder nor cached, where the hub's address can't even be looked up.

    Behind a proxy it is the proxy that looks addresses up, so nothing is said there.
    """
    if Path(source).exists() or constants.HF_HUB_OFFLINE or getproxies() or _is_cached(source):
        return
    host = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ModelError(
            source,
            "no such folder, and no model of that name in the hub's cache",
            because=f"it could only be fetched, and {host} can't be reached from here ({error.strerror or error})",
            fix="check the path, or see `oncurve models` for what is on this machine",
        ) from None


def _is_cached(source: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(source, "config.json"), str)
    except HFValidationError:  # no name that a hub could have: loading tells of it
        return True


SETTINGS = ("tokenizer_config.json", "config.json", "generation_config.json")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def check_folder(source: str) -> None:
    """Refuses settings that name a file outside of the folder, whose content would end up in the vocabulary, and pickles."""
    folder = Path(source)
    _check_weights(folder)
    for name in SETTINGS if folder.is_dir() else ():
        for key, value in _read(folder / name).items():
            if key.endswith("_file") and isinstance(value, str) and _is_outside(value):
                raise ModelError(
                    f"{folder / name}: {key}",
                    value,
                    because="it names a file outside of the model's folder",
                    fix="remove the key, or give the file's name within the folder",
                )


def _check_weights(folder: Path) -> None:
    """Weights are read from safetensors alone: opening a pickle runs what it holds."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        raise ModelError(
            str(folder),
            f"weights in {pickles[0]}, and no .safetensors file",
            because="such a file is a pickle, and opening one runs whatever code it holds",
            fix="if you trust it, convert it once in Python: transformers.AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(NEW), and its AutoTokenizer likewise; NEW holds safetensors",
        )


def _read(path: Path) -> dict[str, Any]:
    """What a settings file says; nothing where it can't be read, which loading will tell of."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_outside(name: str) -> bool:
    return Path(name).is_absolute() or ".." in Path(name).parts or name.startswith("~")
