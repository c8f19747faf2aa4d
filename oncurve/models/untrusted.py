"""A model folder from elsewhere is data: what would make loading it read other files is refused before it is opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oncurve.errors import ModelError

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
