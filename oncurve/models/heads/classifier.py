"""Reward-model classifiers: transformers' sequence or token classifier with the backbone of a policy.

The new head is initialised from the seed with variance 1/(D + 1) (Stiennon et al. 2020). Padding is on the right, and the score
of a text is read at its last token that is not padding, as transformers does, so other programs load what was trained.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from oncurve.errors import ModelError
from oncurve.models import lora
from oncurve.models.loading.load import cast_parameters, check_source
from oncurve.models.policy import Policy


def build_classifier(policy: Policy, heads: Sequence[str], seed: int, *, by_token: bool) -> Any:
    """A classifier with a copy of the policy's backbone and a new head."""
    model = _build_empty(policy, heads, by_token=by_token)
    source = lora.merge_copy(policy.model) if lora.is_attached(policy.model) else policy.model
    model.to(device=policy.device)
    cast_parameters(model, policy.model.dtype)
    model.base_model.load_state_dict(source.base_model.state_dict())
    _init_head(model, seed)
    return model.eval()


def _build_empty(policy: Policy, heads: Sequence[str], *, by_token: bool) -> Any:
    """A classifier of the policy's architecture, with uninitialised weights."""
    config = copy.deepcopy(policy.model.config)
    config.num_labels = len(heads)
    config.id2label = dict(enumerate(heads))
    config.label2id = {name: i for i, name in enumerate(heads)}
    config.pad_token_id = pad_id(policy.tokenizer)
    kind = AutoModelForTokenClassification if by_token else AutoModelForSequenceClassification
    own = kind._model_mapping.get(type(config), None)
    attention = "eager" if own is not None and not own._supports_sdpa else "sdpa"  # not the policy's: rows are padded here
    try:
        return kind.from_config(config, attn_implementation=attention)
    except (ValueError, KeyError) as error:
        raise ModelError(
            type(policy.model).__name__,
            f"no {'token' if by_token else 'sequence'} classifier",
            because=str(error).strip().partition("\n")[0],
            fix="choose an architecture that has one (Llama, Qwen, Mistral, Gemma …), or name another model in `source`",
        ) from error


def check_classifier(policy: Policy, source: str | None, *, by_token: bool, where: str) -> None:
    """Raise if the policy's architecture has no classifier, or if ``source`` can't be read or has another vocabulary.

    Reads no weights.
    """
    if source is None:
        with torch.device("meta"):
            _build_empty(policy, ("reward",), by_token=by_token)
        return
    check_source(source)
    try:
        vocabulary = AutoTokenizer.from_pretrained(source, trust_remote_code=False).get_vocab()
        AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # a damaged folder can raise any kind of error
        raise _load_error(source, error) from error
    if vocabulary != policy.tokenizer.get_vocab():
        raise ModelError(
            where, source, because="its vocabulary differs from the policy's, which encodes its training texts",
            fix="name a model of the policy's family, leave `source` out, or set model.source to this one",
        )  # fmt: skip


def _load_error(source: str, error: Exception) -> ModelError:
    because = f"{str(error).strip().partition(chr(10))[0]} ({type(error).__name__})"
    return ModelError(source, "can't be loaded as a classifier", because=because, fix="name a model's folder or hub id")


def load_classifier(source: str, heads: Sequence[str], like: Policy, *, by_token: bool) -> Any:
    """Loads a saved classifier. If its head has another number of outputs, or there is none, the backbone gets a new head."""
    kind = AutoModelForTokenClassification if by_token else AutoModelForSequenceClassification
    names = {"num_labels": len(heads), "id2label": dict(enumerate(heads)), "label2id": {n: i for i, n in enumerate(heads)}}
    try:
        model = kind.from_pretrained(
            source,
            dtype=like.model.dtype,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
            trust_remote_code=False,
            **names,
        )
    except (OSError, ValueError, KeyError) as error:
        raise _load_error(source, error) from error
    model.config.pad_token_id = pad_id(like.tokenizer)
    return model.to(like.device).eval()


def pad_id(tokenizer: Any) -> int:
    """The padding token, or the end token if there is none."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def classify(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """Logits in float32: [rows, heads], or [rows, tokens, labels] for a token classifier."""
    max_length, padding = max(map(len, rows)), model.config.pad_token_id
    ids = torch.tensor([[*row, *[padding] * (max_length - len(row))] for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (max_length - len(row)) for row in rows], device=model.device)
    out: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return out.float()


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def _init_head(model: Any, seed: int) -> None:
    backbone = {id(p) for p in model.base_model.parameters()}
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if id(p) not in backbone:
            p.copy_(
                torch.randn(p.shape, generator=generator) / (p.shape[-1] + 1) ** 0.5 if p.dim() > 1 else torch.zeros(p.shape)
            )
