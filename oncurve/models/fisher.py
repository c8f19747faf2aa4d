"""The Fisher matrix of a policy, by its products: F v = ∇(∇KL · v), by differentiating twice.

The KL between the policy and itself has value 0 and gradient 0; its second derivative is the Fisher matrix. The fast paths of
attention and LM head have hand-written first derivatives and no second ones, so this forwards the model's own modules, with
scores and logits in full: that is what limits it to models that fit.

Legend: ``M`` predicted tokens of a pack, ``V`` vocabulary, ``n`` trained parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from oncurve.models.packing import Pack, PackAttention, predicting_states
from oncurve.models.policy import Policy


class _Plain(PackAttention):
    """A pack's attention by plain operations, which can be differentiated twice, on any device."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        return self._by_scores(q, k, v, scale, window, softcap)

    @classmethod
    def of(cls, pack: Pack) -> _Plain:
        """Read back from where each predicted token follows: the first of a row from its prompt's last, the others in a run."""
        position_N, source_M = pack.position_ids[0], pack.predicted_from_M.tolist()
        at = position_N.tolist()
        prompts: dict[int, tuple[int, int]] = {}
        completions: list[tuple[int, int, int]] = []
        first = 0
        for length in filter(None, pack.lengths):
            last_of_prompt = source_M[first]
            size = at[last_of_prompt] + 1
            prompts.setdefault(last_of_prompt, (last_of_prompt - size + 1, size))
            start = source_M[first + 1] if length > 1 else 0
            completions.append((start, length - 1, list(prompts).index(last_of_prompt)))
            first += length
        return cls(list(prompts.values()), completions, position_N)


def all_logps(policy: Policy, pack: Pack, temperature: float) -> Tensor:
    """Log-probs of the whole vocabulary at each predicted token, [M, V], differentiable twice."""
    layout = _Plain.of(pack)
    out = policy.backbone(input_ids=pack.input_ids, position_ids=pack.position_ids, use_cache=False, layout=layout)
    logits_MV = policy.head.logits(predicting_states(out.last_hidden_state[0], pack.predicted_from_M))
    return (logits_MV / temperature).log_softmax(-1)


@torch.no_grad()
def distributions(policy: Policy, pack: Pack, temperature: float) -> Tensor:
    """The same log-probs without a derivative, by the policy's own fast path."""
    return (policy.head.logits(policy.pack_hidden(pack)) / temperature).log_softmax(-1)


class Fisher:
    """F = Σ_m w_m Σ_y π(y) ∇log π(y) ∇log π(y)ᵀ over the tokens of some packs; each pack comes with its w_M.

    The first derivative's graph is kept where there is one pack; with several, each is built again for each product.
    """

    def __init__(self, policy: Policy, batches: Sequence[tuple[Pack, Tensor]], temperature: float) -> None:
        self.policy, self.batches, self.temperature = policy, batches, temperature
        self.parameters = list(policy.trainable.values())
        self._kept = self._slope(*batches[0]) if len(batches) == 1 else None

    def product(self, v_n: Tensor) -> Tensor:
        """F v."""
        found_n = torch.zeros_like(v_n)
        for batch in self.batches:
            slope_n = self._slope(*batch) if self._kept is None else self._kept
            parts = torch.autograd.grad(
                slope_n @ v_n, self.parameters, retain_graph=self._kept is not None, materialize_grads=True
            )
            found_n += flat(parts)
        return found_n

    def _slope(self, pack: Pack, weight_M: Tensor) -> Tensor:
        """∇ of Σ w KL(sg[π] ‖ π): 0 in value, and what it would become is what is wanted."""
        logp_MV = all_logps(self.policy, pack, self.temperature)
        kl_M = (logp_MV.detach().exp() * (logp_MV.detach() - logp_MV)).sum(-1)
        return flat(torch.autograd.grad((weight_M * kl_M).sum(), self.parameters, create_graph=True, materialize_grads=True))


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


@torch.no_grad()
def move(parameters: Sequence[nn.Parameter], start_n: Tensor, step_n: Tensor, share: float) -> None:
    """Sets the parameters, in their own memory, to start + share · step; at a share of 0 to the start itself."""
    parts = torch.split(start_n + share * step_n if share else start_n, [p.numel() for p in parameters])
    for p, at in zip(parameters, parts, strict=True):
        p.copy_(at.view_as(p))
