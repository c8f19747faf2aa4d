"""GGUF files: de-quantised by transformers, written once as a folder in Hugging Face format, and found there ever after.

Three things are mended on the way. Embedding and head of a tied model lie apart in such a file, quantised in two ways: the
head, kept in more bits, becomes both again. The quantiser is taken off, for a model that carries one can't be saved. And every
token that ends a turn or a text is named as an end token: the file names one, and a model that writes the other would never
stop.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase

from oncurve.errors import DiskError, MissingPackage, ModelError, pip_install
from oncurve.models.loading.local_models import ORIGIN, cache_folder, gguf_head

SAME_MATRIX = 0.2
"""Head and embedding of a tied model, quantised apart, differ by 4 to 7 % (relative norm); those of an untied one by 100 %."""
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>", "</s>", "<eos>")
"""What chat models close a turn or a text with; GGUF names only one of them."""


def is_gguf(source: str) -> bool:
    return source.endswith(".gguf")


def cached_conversion(file: Path, dtype: str) -> Path:
    """The folder of a GGUF file in the cache, converted first if need be. Named by content: a new file is a new folder."""
    _check(file)
    folder = cache_folder() / "models" / f"{file.stem}-{_digest(file)[:12]}-{dtype}"
    if not (folder / "config.json").is_file():
        convert(file, folder, dtype)
    return folder


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Writes the model as a folder that transformers, vLLM and recipes load; it is there whole or not at all."""
    _check(file)
    _check_place(folder)
    model, tokenizer = _read(file, getattr(torch, dtype))
    _tie(model)
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.generation_config.eos_token_id = end_tokens(tokenizer)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id[0])
    aside = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(aside)
        for weights in aside.glob("*.safetensors"):
            weights.chmod(aside.stat().st_mode & 0o666)  # safetensors makes its files for their owner alone
        tokenizer.save_pretrained(aside)
        origin = {"file": file.name, "sha256": _digest(file), "dtype": dtype}
        (aside / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
        if not folder.exists():  # two runs that begin together convert the same file
            aside.rename(folder)
    except (OSError, SafetensorError) as error:
        raise _unwritable(folder, str(error)) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_place(folder: Path) -> None:
    """Asked before the file is read, which takes its time."""
    if folder.exists():
        raise ModelError(str(folder), "already there", because="nothing is written over", fix="choose another name")
    above = next(path for path in folder.absolute().parents if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise _unwritable(folder, f"{above} is a file" if above.is_file() else f"this user may not write in {above}")


def _unwritable(folder: Path, because: str) -> DiskError:
    return DiskError(str(folder), "can't be written", because=because, fix="choose another place, or make room there")


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's own end token, then every other known one that is special there (`</s>` may be a word like any other).

    A token that begins texts is not taken for one that ends them, as some readers of GGUF files do, unless no other is known.
    """
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    known = [special[token] for token in END_TOKENS if token in special]
    own = tokenizer.eos_token_id
    begins = own is not None and own == tokenizer.bos_token_id and own not in known
    ids = known if known and begins else [own, *known]
    return list(dict.fromkeys(i for i in ids if i is not None))


def _check(file: Path) -> None:
    if file.is_dir():
        fix = "name a .gguf file; a folder in Hugging Face format is used as it is: model.source takes it"
        raise ModelError(str(file), "not a GGUF file", because="it is a folder", fix=fix)
    if not file.is_file():
        raise ModelError(str(file), "no such file", because="nothing is at this path", fix="check the path")
    gguf_head(file)
    if importlib.util.find_spec("gguf") is None:
        raise MissingPackage(str(file), "gguf is not installed", because="GGUF files are read with it", fix=pip_install("gguf"))


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _read(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    place = {"gguf_file": file.name}
    whole = GgufConfig(dequantize=True)  # some architectures could stay in their blocks, which nothing can train
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False, **place)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=dtype, quantization_config=whole, trust_remote_code=False, **place
        )
    except (ValueError, KeyError, OSError, IndexError, struct.error, NotImplementedError) as error:
        architecture, known = gguf_head(file).get("general.architecture"), architectures()
        raise ModelError(
            str(file),
            f"a GGUF file of architecture '{architecture}' that can't be read",
            because=str(error).strip().partition("\n")[0] or type(error).__name__,
            fix="fetch the file again: it may be cut off"
            if architecture in known
            else f"use a file of one of these architectures: {', '.join(known)}",
        ) from error
    return model, tokenizer


def architectures() -> list[str]:
    """The architectures that transformers de-quantises."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"})


@torch.no_grad()
def _tie(model: Any) -> None:
    """Where head and embedding are one matrix quantised twice, both become the head's."""
    head, words = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is words.weight or head.weight.shape != words.weight.shape:
        return
    apart = (head.weight.float() - words.weight.float()).norm() / words.weight.float().norm()
    if apart < SAME_MATRIX:
        words.weight = nn.Parameter(head.weight.detach())
        model.config.tie_word_embeddings = True
        model.tie_weights()
