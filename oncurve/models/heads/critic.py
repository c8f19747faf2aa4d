"""The critic of PPO: a backbone of the policy's size with a scalar head, which estimates the return.

V(s_t) is read from the hidden state from which token t is predicted, so one pass over a pack gives the values of all its
tokens, with shared prompts as for the policy. The value of the state *after* a completion needs one more token:
``append_placeholder``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from oncurve.models.packing import Pack
from oncurve.models.policy import Policy
from oncurve.records import Ints


class ValueModel:
    """``trunk`` is a copy of the policy's backbone that is trained separately. With ``shared`` it is the policy itself, trained
    by both losses.

    The head starts at 0, so the first values are 0 and the first advantages are the rewards. It is at least float32, whatever
    the backbone's precision.
    """

    def __init__(self, policy: Policy, *, shared: bool = False) -> None:
        self.shared = shared
        self.trunk = policy if shared else _drop_lm_head(policy.copy())
        width = policy.head.weight_VD.shape[1]
        self.head = nn.Linear(width, 1, device=policy.device, dtype=torch.promote_types(policy.model.dtype, torch.float32))
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        parts: dict[str, nn.Module] = {"head": self.head}
        if not shared:
            parts["trunk"] = self.trunk.backbone
        self.module = nn.ModuleDict(parts)

    def values(self, pack: Pack) -> Tensor:
        """V before each predicted token of a pack, [M]."""
        value_M1: Tensor = self.head(self.trunk.pack_hidden(pack).to(self.head.weight.dtype))
        return value_M1[:, 0]

    def state(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.module.named_parameters()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for name, p in self.module.named_parameters():
            p.copy_(state[name])


def _drop_lm_head(policy: Policy) -> Policy:
    """Free the LM head, which is never used, unless it is tied to the embedding."""
    layer = policy.model.get_output_embeddings()
    if layer.weight is not policy.model.get_input_embeddings().weight:
        layer.weight = nn.Parameter(layer.weight.new_zeros(0, layer.weight.shape[1]), requires_grad=False)
    return policy


def append_placeholder(token_ids: Ints) -> Ints:
    """The completion with one arbitrary token appended, so that its pack also has the state after the last token."""
    return np.append(token_ids, token_ids[-1:] if len(token_ids) else [0])
