"""GGUF files: dequantised by transformers and converted once to a cached folder in Hugging Face format.

The conversion fixes four things. A file stores embedding and head of a tied model separately, with different quantisation: the
head, which has more bits, is used for both. The quantiser is removed, because a model with one can't be saved. Every token that
ends a turn or a text becomes an end token: the file names only one, and a model that writes another would never stop. And
transformers leaves out rope scaling, biases and some head sizes without a word: they are read here, or the file is refused.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)

from oncurve.errors import DiskError, MissingPackage, ModelError, pip_install
from oncurve.models.loading.local_models import ORIGIN, cache_folder, read_gguf_metadata

SAME_MATRIX = 0.2
"""Relative norm of head − embedding below which they are one matrix. Tied models: 4 to 7 %; untied ones: about 100 %."""
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>", "</s>", "<eos>")
"""Tokens with which chat models end a turn or a text; a GGUF file names only one of them."""


ROPE_FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The scaling of Llama 3.1, 3.2 and 3.3. They differ in ``factor``."""


def is_gguf(source: str) -> bool:
    return source.endswith(".gguf")


def convert_to_cache(file: Path, dtype: str) -> Path:
    """The cached folder of a GGUF file, converted if it is missing. Its name has the file's digest and the dtype."""
    _check_file(file)
    folder = cache_folder() / "models" / f"{file.stem}-{_digest(file)[:12]}-{dtype}"
    if not (folder / "config.json").is_file():
        convert(file, folder, dtype)
    return folder


def convert(file: Path, folder: Path, dtype: str) -> None:
    """Write the model as a folder that transformers, vLLM and recipes can load, atomically."""
    _check_file(file)
    _check_target(folder)
    model, tokenizer = _load(file, getattr(torch, dtype))
    rope = _rope_scaling(file, model.config)
    if rope is not None:
        model.config.rope_parameters = {"rope_theta": model.config.rope_parameters["rope_theta"], **rope}
    _tie_embeddings(model)
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    # transformers may add an end token of its own to the tokenizer, which the model has no embedding for
    rows = model.get_input_embeddings().weight.shape[0]
    model.generation_config.eos_token_id = [i for i in find_end_tokens(tokenizer) if i < rows]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id[0])
    temporary = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(temporary)
        for weights in temporary.glob("*.safetensors"):
            weights.chmod(temporary.stat().st_mode & 0o666)  # safetensors makes its files readable by their owner only
        tokenizer.save_pretrained(temporary)
        origin = {"file": file.name, "sha256": _digest(file), "dtype": dtype}
        (temporary / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
        if not folder.exists():  # another run may have converted the same file meanwhile
            temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        raise _write_error(folder, str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_target(folder: Path) -> None:
    """Called before the file is read, which is slow."""
    if folder.exists():
        raise ModelError(
            str(folder), "already exists", because="existing folders are never overwritten", fix="choose another name"
        )
    parent = next(path for path in folder.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise _write_error(folder, f"{parent} is a file" if parent.is_file() else f"no permission to write in {parent}")


def _write_error(folder: Path, because: str) -> DiskError:
    return DiskError(str(folder), "can't be written", because=because, fix="choose another folder, or free disk space")


def find_end_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's end token, then every other known end token that it marks as special (`</s>` may be an ordinary word).

    Some GGUF readers report the begin-of-text token as the end token; it counts as one only if no other is known.
    """
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    known = [special[token] for token in END_TOKENS if token in special]
    eos = tokenizer.eos_token_id
    is_bos = eos is not None and eos == tokenizer.bos_token_id and eos not in known
    ids = known if known and is_bos else [eos, *known]
    return list(dict.fromkeys(i for i in ids if i is not None))


def _check_file(file: Path) -> None:
    if file.is_dir():
        fix = "give a .gguf file; a folder in Hugging Face format needs no conversion: set model.source to it"
        raise ModelError(str(file), "not a GGUF file", because="it is a folder", fix=fix)
    if not file.is_file():
        raise ModelError(str(file), "no such file", because="the path does not exist", fix="check the path")
    read_gguf_metadata(file)
    for package in ("gguf", "accelerate"):  # transformers' reader needs both
        if importlib.util.find_spec(package) is None:
            because = "reading GGUF files needs it"
            raise MissingPackage(str(file), f"{package} is not installed", because=because, fix=pip_install("gguf"))


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _load(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors  # its progress bar would fill a log
    name = {"gguf_file": file.name}
    dequantise = GgufConfig(dequantize=True)  # some architectures could stay quantised, which can't be trained
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False, **name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=dtype, quantization_config=dequantise, trust_remote_code=False, **name, **_left_out(file)
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a damaged file can raise any kind of error
        architecture, supported = read_gguf_metadata(file).get("general.architecture"), supported_architectures()
        raise ModelError(
            str(file),
            f"can't read this GGUF file of architecture '{architecture}'",
            because=str(error).strip().partition("\n")[0] or type(error).__name__,
            fix="use the run or folder that it was made from, or download the file again: it may be truncated"
            if architecture in supported
            else f"use a file of one of these architectures: {', '.join(supported)}",
        ) from error
    return model, tokenizer


def _left_out(file: Path) -> dict[str, Any]:
    """Settings of the model that transformers does not read from the file."""
    reader = _reader(file)
    architecture, tensors = reader.fields["general.architecture"].contents(), {tensor.name for tensor in reader.tensors}
    size, settings = reader.fields.get(f"{architecture}.attention.key_length"), {}
    if architecture == "qwen3" and size is not None:
        settings["head_dim"] = int(size.contents())
    for key, tensor in (("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_down.bias")):
        if architecture == "llama" and tensor in tensors:
            settings[key] = True
    return settings


def _rope_scaling(file: Path, config: Any) -> dict[str, Any] | None:
    """The file's rope scaling as transformers writes it; None if there is none, or if transformers has read it. Raises
    ModelError if it is of an unknown kind."""
    reader = _reader(file)
    architecture = reader.fields["general.architecture"].contents()
    fields = {key.removeprefix(f"{architecture}.rope.scaling."): field for key, field in reader.fields.items()}
    kind = fields["type"].contents() if "type" in fields else "none"
    tensors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    if architecture == "gpt-oss" or (kind == "none" and not tensors):
        return None
    if kind == "linear" and not tensors:
        return {"rope_type": "linear", "factor": float(fields["factor"].contents())}
    if kind == "none" and tensors.keys() == {ROPE_FACTORS}:
        llama3 = {"rope_type": "llama3", "factor": float(tensors[ROPE_FACTORS].max()), **LLAMA3}
        expected = llama3_factors(llama3, config.rope_parameters["rope_theta"], 2 * len(tensors[ROPE_FACTORS]))
        if np.allclose(tensors[ROPE_FACTORS], expected, rtol=1e-4):
            return llama3
    raise ModelError(
        str(file),
        f"rope scaling '{kind}'" if kind != "none" else "rope factors of an unknown kind",
        because="transformers can't read it from a GGUF file, and without it the model would compute something else",
        fix="use the model's folder in Hugging Face format",
    )


def llama3_factors(rope: Mapping[str, Any], theta: float, head_size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """By how much the scaling of Llama 3 divides each of rope's frequencies, as llama.cpp stores it."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    smooth = (rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0, 1)
    factors: np.ndarray[Any, np.dtype[np.float32]] = (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
    return factors


def _reader(file: Path) -> Any:
    return importlib.import_module("gguf").GGUFReader(file)


def supported_architectures() -> list[str]:
    """The architectures that transformers can dequantise."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"})


@torch.no_grad()
def _tie_embeddings(model: Any) -> None:
    """If head and embedding are one matrix quantised twice, use the head's values for both."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
        return
    distance = (head.weight.float() - embedding.weight.float()).norm() / embedding.weight.float().norm()
    if distance < SAME_MATRIX:
        embedding.weight = nn.Parameter(head.weight.detach())
        model.config.tie_word_embeddings = True
        model.tie_weights()
