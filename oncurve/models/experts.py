"""Mixtures of experts: which experts each token takes, recorded while sampling and forced in the learner, and their products.

A router chooses k experts for each token of a layer. The choice is not continuous: if sampler and learner round differently, a
token near a tie takes other experts, and its log-probs move by far more than rounding. *Routing replay* removes that: the
sampler records every choice, and the learner forces it. The weights of the chosen experts are still the router's own, so it
keeps its gradient.

transformers runs experts through an interface with interchangeable implementations, which `attach` uses. Ours records what
the router chose and multiplies

- in the learner, and on a GPU, with transformers' grouped product: one launch for all experts in bfloat16 on a Hopper GPU or a
  B200, else torch's loop over the experts, which waits for their counts;
- in the sampler on a CPU, in tiles of `TILE` rows. A product's bits depend on its number of rows, and how many tokens take an
  expert depends on what else is queued; a tile's shape does not.

To force a choice, `torch.topk` over a layer's experts returns the recorded ones while the layer's block runs: every router of
transformers chooses by it, before or after its softmax, with or without groups and biases. `check_replay` shows that a model's
experts really receive what is forced. The balance loss reads router logits, as transformers records them.

Local shape letters: ``E`` experts that a token takes, over all layers (layers · k), ``X`` experts of a layer, ``k`` experts
that a token takes in a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from oncurve.errors import ModelError
from oncurve.models.parallel.dtensor import is_dtensor

NAME = "oncurve"
GROUPED = "grouped_mm"
"""transformers' grouped product, which it takes by default."""
TILE = 16
"""Rows of each product of the sampler on a CPU."""
ROUTERS = "router_logits"
"""The name under which transformers' models list the modules whose output holds router logits."""


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """The layers of a model that choose among ``experts`` each."""

    layers: int
    experts: int
    has_logits: bool
    """Whether transformers records the routers' logits, which the balance loss needs."""


@dataclass(slots=True)
class RoutingPass:
    """What the routers and experts of one forward pass do. The pass fills in ``chosen`` and ``logits``, by layer."""

    fixed_shapes: bool = False
    """Whether a token's bits must not depend on the other tokens of the pass."""
    forced_NLk: Tensor | None = None
    """The experts that each token takes in each layer."""
    records: bool = False
    keeps_logits: bool = False
    predicted_M: Tensor | None = None
    """The tokens of the pass from which a pack's targets are predicted."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)

    @property
    def chosen_NE(self) -> Tensor:
        """The experts that each token took, layer by layer, as 16-bit integers."""
        return torch.cat([self.chosen[layer] for layer in sorted(self.chosen)], 1).to(torch.int16)


_PASS: ContextVar[RoutingPass | None] = ContextVar("oncurve_routing", default=None)


@contextmanager
def routed(routing: RoutingPass | None) -> Iterator[None]:
    """Within this context, forward passes of models with experts do what ``routing`` says."""
    token = _PASS.set(routing)
    try:
        yield
    finally:
        _PASS.reset(token)


@contextmanager
def rearranged(source_N: Tensor, predicted_M: Tensor) -> Iterator[None]:
    """Within this context, token n of a pass is token ``source_N[n]`` of the pack, and ``predicted_M`` holds the
    tokens from which targets are predicted."""
    routing = _PASS.get()
    if routing is not None:
        routing.predicted_M = predicted_M
        if routing.forced_NLk is not None:
            routing = replace(routing, forced_NLk=routing.forced_NLk[source_N])
    with routed(routing):
        yield


class RoutedBlock(nn.Module):
    """Mixed into the class of the module that holds a layer's router and experts: lets a pass force what the router chooses."""

    oncurve_experts: int
    oncurve_layer: int

    def forward(self, *arguments: Any, **options: Any) -> Any:
        routing = _PASS.get()
        if routing is None or routing.forced_NLk is None:
            return super().forward(*arguments, **options)
        with _ForcedChoice(routing.forced_NLk[:, self.oncurve_layer], self.oncurve_experts):
            return super().forward(*arguments, **options)


class _ForcedChoice(TorchFunctionMode):
    """Lets `torch.topk` over the experts of a layer return what was recorded."""

    def __init__(self, forced_Nk: Tensor, experts: int) -> None:
        super().__init__()
        self.forced_Nk, self.experts = forced_Nk, experts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.topk, Tensor.topk):
            scores, count = args[0], args[1] if len(args) > 1 else kwargs["k"]
            N, k = self.forced_Nk.shape
            if scores.shape[-1] == self.experts and scores.numel() == N * self.experts and count == k:
                index = self.forced_Nk.long().view(*scores.shape[:-1], k)
                return torch.return_types.topk((scores.gather(-1, index), index))
        return function(*args, **kwargs)


def attach(model: PreTrainedModel, backbone: nn.Module) -> RoutedLayers | None:
    """Let passes record and force what the routers of a model choose; None if it has no experts that transformers' interface
    runs with a grouped product."""
    experts: list[Any] = [module for module in backbone.modules() if _is_experts(module)]
    config = model.config.get_text_config()
    if not experts or config._experts_implementation not in (GROUPED, NAME):
        return None
    model.set_experts_implementation(NAME)
    if config._experts_implementation != NAME:
        return None
    parents = {child: module for module in backbone.modules() for child in module.children()}
    blocks: list[Any] = [_block_of(module, parents) for module in experts]
    if len(set(blocks)) != len(blocks) or len({module.num_experts for module in experts}) != 1:
        return None
    routers = 0
    for layer, (module, block) in enumerate(zip(experts, blocks, strict=True)):
        module.oncurve_layer = block.oncurve_layer = layer
        block.oncurve_experts = module.num_experts
        routers += _watch_routers(backbone, block, layer)
        if not isinstance(block, RoutedBlock):
            block.__class__ = type(type(block).__name__, (RoutedBlock, type(block)), {})
    return RoutedLayers(len(experts), int(experts[0].num_experts), has_logits=routers == len(experts))


def _block_of(experts: nn.Module, parents: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """The module that holds a layer's router and experts; adapters on the experts lie between."""
    block = parents[experts]
    while type(block).__module__.startswith("peft."):
        block = parents[block]
    return block


def _is_experts(module: nn.Module) -> bool:
    """Whether transformers' interface runs the module's experts."""
    return all(hasattr(module, name) for name in ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate"))


def _watch_routers(backbone: nn.Module, block: nn.Module, layer: int) -> int:
    """Let passes keep the logits of a block's router; returns the number of routers."""
    recorded = (getattr(backbone, "_can_record_outputs", None) or {}).get(ROUTERS)
    kind = getattr(recorded, "target_class", recorded)
    if not isinstance(kind, type):
        return 0
    routers = [module for module in block.modules() if isinstance(module, kind)]
    for router in routers:
        if not any(getattr(hook, "func", None) is _keep_logits for hook in router._forward_hooks.values()):
            router.register_forward_hook(partial(_keep_logits, layer, getattr(recorded, "index", 0)))
    return len(routers)


def _keep_logits(layer: int, index: int, module: nn.Module, arguments: Any, output: Any) -> None:
    routing = _PASS.get()
    if routing is not None and routing.keeps_logits:
        routing.logits[layer] = output[index] if isinstance(output, tuple) else output


def run_experts(module: Any, hidden_ND: Tensor, chosen_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
    """The implementation that transformers calls: the weighted sum of the outputs of each token's experts, [N, D]."""
    routing = _PASS.get()
    if routing is not None and routing.records:
        routing.chosen[module.oncurve_layer] = chosen_Nk
    by_tiles = routing is not None and routing.fixed_shapes and _can_tile(module)
    run: Callable[..., Tensor] = _run_tiles if by_tiles else ALL_EXPERTS_FUNCTIONS[GROUPED]
    return run(module, hidden_ND, chosen_Nk, weight_Nk)


def _can_tile(module: Any) -> bool:
    """On a CPU, with complete weights. On a GPU the shape of a product in one launch does not depend on the choice."""
    return not is_dtensor(next(module.parameters())) and next(module.parameters()).device.type == "cpu"


def _run_tiles(module: Any, hidden_ND: Tensor, chosen_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
    k, chosen_n = chosen_Nk.shape[1], chosen_Nk.flatten()
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    matrices = [_Matrices.of(module, name) for name in names]  # read once: an adapter recomputes them on every access
    counts = torch.bincount(chosen_n, minlength=module.num_experts).tolist()
    out_nD = hidden_ND.new_empty(len(chosen_n), hidden_ND.shape[1])
    for expert, rows in enumerate(torch.split(chosen_n.argsort(stable=True), counts)):
        if len(rows):
            out_nD[rows] = _run_expert(module, matrices, expert, hidden_ND[rows // k])
    weighted_nD = out_nD * weight_Nk.reshape(-1, 1)
    return weighted_nD.view(len(hidden_ND), k, -1).sum(1).to(hidden_ND.dtype)


@dataclass(frozen=True, slots=True)
class _Matrices:
    """A matrix [in, out] of each expert, and perhaps its bias."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: Any, name: str) -> _Matrices:
        weight = getattr(module, name)
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return cls(weight if module.is_transposed else weight.transpose(1, 2), bias)

    def product(self, expert: int, tiles: Tensor) -> Tensor:
        weight = self.weight[expert]
        out = torch.bmm(tiles, weight.expand(len(tiles), *weight.shape))
        return out if self.bias is None else out + self.bias[expert]


def _run_expert(module: Any, matrices: Sequence[_Matrices], expert: int, hidden_nD: Tensor) -> Tensor:
    """One expert's output for n tokens, as products of TILE rows."""
    up, down = matrices
    tiles = nn.functional.pad(hidden_nD, (0, 0, 0, -len(hidden_nD) % TILE)).view(-1, TILE, hidden_nD.shape[1])
    inner = up.product(expert, tiles).flatten(0, 1)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = down.product(expert, inner.view(len(tiles), TILE, -1)).flatten(0, 1)[: len(hidden_nD)]
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


@torch.no_grad()
def check_replay(layers: RoutedLayers | None, name: str, forward: Callable[[], object]) -> None:
    """Refuse a model whose experts do not receive what a pass forces; ``forward`` runs a few tokens through it."""
    free = RoutingPass(records=True)
    with routed(free):
        forward()
    if layers is None or len(free.chosen) != layers.layers:
        raise _no_replay(name, "its experts do not run through transformers' interface for them")
    other_NLk = (free.chosen_NE.view(-1, layers.layers, free.chosen[0].shape[1]) + 1) % layers.experts
    forced = RoutingPass(records=True, forced_NLk=other_NLk)
    with routed(forced):
        forward()
    if not torch.equal(forced.chosen_NE, other_NLk.flatten(1)):
        raise _no_replay(name, "its routers do not choose by torch.topk over all experts of a layer")


def _no_replay(name: str, reason: str) -> ModelError:
    return ModelError(name, "routing replay", because=reason, fix="set routing_replay = false and balance_loss = 0")


def expert_load(counts_X: Tensor, tokens: int, layers: int) -> Tensor:
    """The fraction of a layer's tokens that take each expert, on average over layers: sums to k."""
    return counts_X.float() / max(tokens * layers, 1)


def balance_loss(routing: RoutingPass, load_X: Tensor, mask_M: Tensor, tokens: int) -> Tensor:
    """A pack's part of the balance loss of Switch Transformer (Fedus et al. 2021), as transformers computes it:

        X · Σ_x f_x · P_x,   f_x: the load of expert x (`expert_load`), P_x: its mean router probability,

    both over all layers and over the ``tokens`` of the complete update. f has no gradient, so the parts of packs sum to the
    loss of the update, whatever the split. A token is the one from which a target of ``mask_M`` is predicted.
    """
    assert routing.predicted_M is not None
    mass_X = sum(
        (logits.index_select(0, routing.predicted_M).softmax(-1, dtype=torch.float32) * mask_M[:, None]).sum(0)
        for logits in routing.logits.values()
    )
    return len(load_X) * (load_X * mass_X).sum() / max(tokens * len(routing.logits), 1)


ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
