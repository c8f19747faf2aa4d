"""Adapters on disk, under the names by which Tinker's clients know them.

`tinker://MODEL/weights/NAME` has an adapter and its optimiser state, for further training.
`tinker://MODEL/sampler_weights/NAME` has only an adapter. Each is a folder in peft's format, which also has a description:

    FOLDER/MODEL/weights/NAME/adapter_config.json, adapter_model.safetensors   the adapter
    FOLDER/MODEL/weights/NAME/optimiser.safetensors                            AdamW's moments
    FOLDER/MODEL/weights/NAME/tinker.json                                      shape, base model, dates, the user's metadata
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oncurve.models import lora
from oncurve.runs.atomic_files import write_folder_atomically
from oncurve.tinker.adapters import ALPHA, AdapterShape, AdapterWeights, RefusedRequest

KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""The second part of a path, and what the SDK calls this type of checkpoint."""
OPTIMISER, DESCRIPTION = "optimiser.safetensors", "tinker.json"
PREFIX = "base_model.model."
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
MODEL_ID = re.compile(r"[0-9a-f]{32}:train:[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class SavedPath:
    """The `tinker://` path of a saved adapter, split into its three parts.

    Example: ``SavedPath.parse("tinker://0f…:train:0/weights/000020")``
    """

    model_id: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> SavedPath:
        parts = text.removeprefix("tinker://").split("/")
        if not text.startswith("tinker://") or len(parts) != 3:
            raise RefusedRequest(f"{text!r} is not a path such as tinker://MODEL/weights/NAME")
        return cls.of(*parts)

    @classmethod
    def of(cls, model_id: str, kind: str, name: str) -> SavedPath:
        if not MODEL_ID.fullmatch(model_id) or kind not in KINDS:
            raise RefusedRequest(f"tinker://{model_id}/{kind}/{name} names no saved weights of this server")
        if not NAME.fullmatch(name):
            raise RefusedRequest(f"{name!r} can't be the name of saved weights: use letters, digits, '.', '_' and '-'")
        return cls(model_id, kind, name)

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Description:
    """What is saved with an adapter. Times are seconds since 1970."""

    base_model: str
    shape: AdapterShape
    created: float
    expires: float | None
    user_metadata: Mapping[str, str] | None

    def to_checkpoint(self, path: SavedPath, size: int) -> dict[str, Any]:
        """As the SDK's `Checkpoint`."""

        def date(seconds: float | None) -> str | None:
            return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()

        return {
            "checkpoint_id": f"{path.kind}/{path.name}", "checkpoint_type": KINDS[path.kind], "time": date(self.created),
            "tinker_path": str(path), "size_bytes": size, "public": False, "user_metadata": self.user_metadata,
            "expires_at": date(self.expires),
        }  # fmt: skip


class SavedAdapters:
    """The saved adapters in a folder. Expired adapters are deleted when they are next looked up."""

    def __init__(self, folder: Path, source: str) -> None:
        self.folder, self.source = folder, source

    def place(self, path: SavedPath) -> Path:
        return self.folder / path.model_id.replace(":", "-") / path.kind / path.name

    def save(
        self,
        path: SavedPath,
        weights: AdapterWeights,
        moments: Mapping[str, Tensor] | None,
        description: Description,
        overwrite: bool,
    ) -> None:
        place = self.place(path)
        if place.exists() and not overwrite:
            raise RefusedRequest(f"{path} exists: choose another name, or save with overwrite=True")

        def write(folder: Path) -> None:
            folder.mkdir(parents=True)
            tensors = {_peft_name(name): t.detach().cpu().contiguous() for name, t in weights.tensors.items()}
            save_file(tensors, folder / lora.WEIGHTS, metadata={"format": "pt"})
            (folder / lora.CONFIG).write_text(json.dumps(self._peft_config(weights), indent=2) + "\n")
            if moments is not None:
                save_file({name: t.cpu().contiguous() for name, t in moments.items()}, folder / OPTIMISER)
            (folder / DESCRIPTION).write_text(json.dumps(asdict(description), indent=2) + "\n")

        write_folder_atomically(place, write)

    def _peft_config(self, weights: AdapterWeights) -> dict[str, Any]:
        targets = [name.partition(".lora_A.")[0] for name in weights.tensors if ".lora_A." in name]
        return {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": self.source, "r": weights.shape.rank,
            "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
            "target_modules": targets,
        }  # fmt: skip

    def describe(self, path: SavedPath) -> Description:
        place = self.place(path)
        if not (place / DESCRIPTION).is_file():
            raise RefusedRequest(f"there are no saved weights {path}")
        saved = json.loads((place / DESCRIPTION).read_bytes())
        description = Description(**{**saved, "shape": AdapterShape(**saved["shape"])})
        if description.expires is not None and description.expires < time.time():
            shutil.rmtree(place)
            raise RefusedRequest(f"{path} has expired and was deleted, as its ttl_seconds said")
        return description

    def load(self, path: SavedPath, device: torch.device) -> AdapterWeights:
        shape = self.describe(path).shape
        tensors = load_file(self.place(path) / lora.WEIGHTS, device=str(device))
        return AdapterWeights(shape, {_own_name(name): tensor for name, tensor in tensors.items()})

    def load_moments(self, path: SavedPath) -> dict[str, Tensor]:
        file = self.place(path) / OPTIMISER
        if not file.is_file():
            raise RefusedRequest(f"{path} has no optimiser state: it was saved for sampling")
        return load_file(file)

    def list_of(self, model_id: str) -> list[dict[str, Any]]:
        """The saved adapters of a model, newest first, as the SDK's `Checkpoint`."""
        if not MODEL_ID.fullmatch(model_id):
            return []
        found = []
        for kind in KINDS:
            folder = self.folder / model_id.replace(":", "-") / kind
            for place in sorted(folder.iterdir()) if folder.is_dir() else ():
                if not NAME.fullmatch(place.name):  # a partial write
                    continue
                path = SavedPath(model_id, kind, place.name)
                try:
                    description = self.describe(path)
                except RefusedRequest:  # expired
                    continue
                size = sum(file.stat().st_size for file in place.iterdir())
                found.append((description.created, description.to_checkpoint(path, size)))
        return [checkpoint for _, checkpoint in sorted(found, key=lambda pair: -pair[0])]

    def delete(self, path: SavedPath) -> None:
        self.describe(path)
        shutil.rmtree(self.place(path))


def _peft_name(name: str) -> str:
    return PREFIX + name.replace(".default.weight", ".weight")


def _own_name(name: str) -> str:
    return name.removeprefix(PREFIX).removesuffix(".weight") + ".default.weight"
