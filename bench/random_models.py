"""Random-weight Qwen3 models of known sizes, prompts of random words, and graded groups made without sampling."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from oncurve.models import lora
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import Lora
from oncurve.records import Aspect, Completion, GradedGroup, Group, Prompt, ScoredCompletion, ScoredGroup

VOCABULARY = 151_936
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8},
}  # fmt: skip
"""Qwen3's own shapes, and a tiny one on which the benchmark itself is tested."""


def shape_of(size: str) -> dict[str, int]:
    return {"vocab_size": VOCABULARY, "head_dim": 128} | SHAPES[size]


def make_tokenizer(words: int) -> PreTrainedTokenizerFast:
    """Words w3 … wN, split at spaces: a text of n words is n tokens. Special tokens match inside words, so no word starts with
    one."""
    names = ["<unknown>", "<end>", "<pad>", *(f"w{i}" for i in range(3, words))]
    known = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unknown>"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=known, eos_token="<end>", pad_token="<pad>", unk_token="<unknown>")


def make_model(size: str, device: torch.device, dtype: torch.dtype, max_positions: int = 8192) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape_of(size), max_position_embeddings=max_positions, tie_word_embeddings=True, eos_token_id=1, pad_token_id=2
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    return model.to(dtype)


def make_policy(size: str, device: torch.device, dtype: torch.dtype, lora_rank: int = 0, max_positions: int = 8192) -> Policy:
    """A policy with an adapter of rank ``lora_rank`` on every linear layer, or none if it is 0."""
    model = make_model(size, device, dtype, max_positions)
    if lora_rank:
        lora.attach(model, Lora(rank=lora_rank), 0, "random")
    return Policy(model, make_tokenizer(shape_of(size)["vocab_size"]))


def texts(count: int, tokens: int, words: int) -> list[str]:
    """Prompts of exactly ``length`` tokens."""
    draw = random.Random(0)
    return [" ".join(f"w{draw.randrange(10, words)}" for _ in range(tokens)) for _ in range(count)]


def graded_groups(prompts: int, group_size: int, prompt_tokens: int, new_tokens: int, words: int) -> list[GradedGroup]:
    """Random tokens with random advantages: the input of an update, without the time to sample it."""
    dice = np.random.default_rng(0)
    return [_group(dice, f"p{p}", group_size, prompt_tokens, new_tokens, words) for p in range(prompts)]


def _group(dice: np.random.Generator, name: str, size: int, prompt: int, new: int, words: int) -> GradedGroup:
    logps = np.full(new, -np.log(words), np.float32)
    rows = [
        Completion(dice.integers(10, words, new), "", "length", logps, logps, logps, np.ones(new, bool)) for _ in range(size)
    ]
    group = Group(Prompt(id=name, text="w3"), dice.integers(10, words, prompt), tuple(rows))
    scored = ScoredGroup(group, tuple(ScoredCompletion(c, (Aspect("random", float(dice.random())),)) for c in rows))
    return GradedGroup(scored, tuple(np.full(new, dice.standard_normal(), np.float32) for _ in rows), (True,) * size)


def each_alone(groups: list[GradedGroup]) -> list[GradedGroup]:
    """Every completion as a separate group with its own copy of the prompt: the same update without prompt sharing."""
    return [
        GradedGroup(
            ScoredGroup(Group(g.group.prompt, g.group.prompt_ids, (s.completion,)), (s,)), (advantages,), (True,)
        )
        for g in groups
        for s, advantages in zip(g.scored.scored, g.advantages, strict=True)
    ]  # fmt: skip


def random_reward(completions: list[str], **_: Any) -> list[float]:
    """A random reward, so that no group is without signal."""
    return [random.random() for _ in completions]
