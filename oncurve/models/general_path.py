"""The general path: a model through transformers' own forward and cache, for families that our attention can't represent.

Recurrent layers that `recurrent_layers` can't run (Mamba 1, RWKV, xLSTM), attention outside of transformers' interface (Falcon,
BLOOM, GPT-J) and masks that only transformers builds all run here. It is slower than the paths through our attention but
equally exact: log-probs are those of the model's plain forward.

- **Learner.** Each completion is forwarded with its prompt as one right-padded row. In a causal model the padding changes
  nothing before it, so no mask is needed. The prompt is not shared between completions.
- **Sampler.** A prompt is prefilled once, its cache or state is repeated for the R slots of a block, and the block decodes as
  one batch of rows at the same position. No padding is involved, so a completion's bits do not depend on other prompts.

Some models of transformers decode with their cache only if they are told the positions, and some not correctly at all. The
self-check tries the members of `Decoding` in order and takes the first that gives the log-probs of the plain forward.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oncurve.models import experts
from oncurve.models.packing import Pack

CACHES = ("past_key_values", "cache_params", "state")
"""The names under which models of transformers return and accept their cache."""


class Decoding(Enum):
    """How the sampler gets the next token's hidden state."""

    CACHE = "cache"
    POSITIONS = "cache, with positions"
    """The model derives no positions from its cache (Bamba)."""
    COMPLETE = "no cache"
    """Every step runs the complete sequence again: slow, and right for every causal model."""


@dataclass
class GeneralCache:
    """Some rows at the same position: their tokens [R, L], and transformers' cache if there is one."""

    ids_RL: Tensor
    name: str | None = None
    value: Any = None

    @classmethod
    def empty(cls, device: torch.device) -> GeneralCache:
        """The cache of one row that has no tokens yet."""
        return cls(torch.zeros(1, 0, dtype=torch.long, device=device))

    def repeat(self, rows: int) -> GeneralCache:
        """A copy with its only row repeated."""
        return GeneralCache(self.ids_RL.repeat(rows, 1), self.name, _repeat_rows(self.value, rows, {}))


def pack_hidden(backbone: nn.Module, pack: Pack) -> Tensor:
    """The hidden state from which each token of a pack is predicted, [M, D], from one padded row per sequence."""
    rows, length = len(pack.spans), max(prompt + inputs for _, prompt, _, inputs, _ in pack.spans)
    source_RL, predicted = np.zeros((rows, length), np.int64), []
    for r, (prompt_start, prompt, start, inputs, count) in enumerate(pack.spans):
        source_RL[r, :prompt] = np.arange(prompt_start, prompt_start + prompt)
        source_RL[r, prompt : prompt + inputs] = np.arange(start, start + inputs)
        predicted.append(r * length + prompt - 1 + np.arange(count))
    device = pack.input_ids.device
    source, predicted_M = torch.from_numpy(source_RL).to(device), torch.from_numpy(np.concatenate(predicted)).to(device)
    with experts.rearranged(source.flatten(), predicted_M):
        hidden_RLD: Tensor = backbone(input_ids=pack.input_ids[0][source], use_cache=False).last_hidden_state
    return hidden_RLD.flatten(0, 1).index_select(0, predicted_M)


def extend(backbone: nn.Module, cache: GeneralCache, ids_RT: Tensor, decoding: Decoding) -> tuple[Tensor, GeneralCache]:
    """(the last token's hidden state [R, D], the cache with these tokens)."""
    ids_RL = torch.cat((cache.ids_RL, ids_RT), 1)
    if decoding is Decoding.COMPLETE:
        return backbone(input_ids=ids_RL, use_cache=False).last_hidden_state[:, -1], GeneralCache(ids_RL)
    options = {} if cache.name is None else {cache.name: cache.value}
    if decoding is Decoding.POSITIONS:
        options["position_ids"] = torch.arange(cache.ids_RL.shape[1], ids_RL.shape[1], device=ids_RT.device)[None]
    out = backbone(input_ids=ids_RT, use_cache=True, **options)
    name = next((name for name in CACHES if getattr(out, name, None) is not None), None)
    return out.last_hidden_state[:, -1], GeneralCache(ids_RL, name, None if name is None else getattr(out, name))


def _repeat_rows(value: Any, rows: int, done: dict[int, Any]) -> Any:
    """A copy of a cache with every tensor's first dimension, the batch, repeated. Configs and scalars are shared."""
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, Tensor):
        return value.repeat_interleave(rows, 0) if value.dim() > 1 else value
    if isinstance(value, list | tuple):
        return type(value)(_repeat_rows(item, rows, done) for item in value)
    if isinstance(value, dict):
        return {key: _repeat_rows(item, rows, done) for key, item in value.items()}
    module = type(value).__module__
    if hasattr(value, "__dict__") and module.startswith("transformers") and "configuration" not in module:
        repeated = copy.copy(value)
        done[id(value)] = repeated
        for key, item in vars(value).items():
            setattr(repeated, key, _repeat_rows(item, rows, done))
        return repeated
    return value
