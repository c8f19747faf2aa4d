"""Fisher-vector products of a policy: F v = ∇(∇KL · v), by differentiating twice.

The KL between the policy and itself has value 0 and gradient 0, and its Hessian is the Fisher matrix. The fast paths of
attention and LM head have hand-written first derivatives and no second ones, so this runs the model's own modules with all
scores and logits in memory, which limits it to models that fit. Local shape letter: ``n`` trained parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from oncurve.models.attention_interface import ScoreRule
from oncurve.models.pack_attention import PackAttention
from oncurve.models.packing import Pack, predicting_states
from oncurve.models.policy import Policy, run_backbone


class _TwiceDifferentiableAttention(PackAttention):
    """A pack's attention by plain operations, on any device."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        return self.attend_by_scores(q, k, v, rule)

    @classmethod
    def of(cls, pack: Pack) -> _TwiceDifferentiableAttention:
        """The attention of a pack's own prompts and completions."""
        prompts = list(dict.fromkeys((start, length) for start, length, _, _, _ in pack.spans))
        completions = [(start, inputs, prompts.index((first, length))) for first, length, start, inputs, _ in pack.spans]
        return cls(prompts, completions, pack.position_ids[0])


def vocab_logps(policy: Policy, pack: Pack, temperature: float) -> Tensor:
    """Log-probs of the complete vocabulary at each predicted token, [M, V], twice differentiable."""
    hidden = run_backbone(policy, pack.input_ids, pack.position_ids, _TwiceDifferentiableAttention.of(pack))
    logits_MV = policy.head.logits(predicting_states(hidden[0], pack.predicted_from_M))
    return (logits_MV / temperature).log_softmax(-1)


@torch.no_grad()
def policy_distributions(policy: Policy, pack: Pack, temperature: float) -> Tensor:
    """The same log-probs without gradient, by the policy's fast path."""
    return (policy.head.logits(policy.pack_hidden(pack)) / temperature).log_softmax(-1)


class Fisher:
    """F = Σ_m w_m Σ_y π(y) ∇log π(y) ∇log π(y)ᵀ over the tokens of some packs, each given with its w_M.

    With one pack, the graph of the first derivative is kept for all products; with several, it is rebuilt for each product.
    """

    def __init__(self, policy: Policy, batches: Sequence[tuple[Pack, Tensor]], temperature: float) -> None:
        self.policy, self.batches, self.temperature = policy, batches, temperature
        self.parameters = list(policy.trainable.values())
        self._kl_gradient_n = self._kl_gradient(*batches[0]) if len(batches) == 1 else None

    def product(self, v_n: Tensor) -> Tensor:
        """F v."""
        product_n = torch.zeros_like(v_n)
        keep_graph = self._kl_gradient_n is not None
        for batch in self.batches:
            gradient_n = self._kl_gradient(*batch) if self._kl_gradient_n is None else self._kl_gradient_n
            product_n += flatten(
                torch.autograd.grad(gradient_n @ v_n, self.parameters, retain_graph=keep_graph, materialize_grads=True)
            )
        return product_n

    def _kl_gradient(self, pack: Pack, weight_M: Tensor) -> Tensor:
        """∇ of Σ w KL(sg[π] ‖ π): 0 in value, needed only for its derivative."""
        logp_MV = vocab_logps(self.policy, pack, self.temperature)
        kl_M = (logp_MV.detach().exp() * (logp_MV.detach() - logp_MV)).sum(-1)
        return flatten(torch.autograd.grad((weight_M * kl_M).sum(), self.parameters, create_graph=True, materialize_grads=True))


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


@torch.no_grad()
def set_parameters(parameters: Sequence[nn.Parameter], start_n: Tensor, step_n: Tensor, fraction: float) -> None:
    """Set the parameters, in place, to start + fraction · step; with a fraction of 0 to exactly the start."""
    parts = torch.split(start_n + fraction * step_n if fraction else start_n, [p.numel() for p in parameters])
    for p, values in zip(parameters, parts, strict=True):
        p.copy_(values.view_as(p))
