"""Runs the recurrent layers of hybrid models (gated delta-nets, Mamba 2, short convolutions) through our attention contexts.

A recurrent layer carries a state from token to token: the last inputs of a short convolution, and the matrix of a linear
attention. transformers keeps that state in its cache. Here the layer's own forward computes everything, and an attention
context decides from which state a sequence starts: the learner runs a group's prompt once and starts all of its completions
from the prompt's final state, with gradients through it; the sampler keeps one state per slot next to the KV cache.

`attach` finds these layers by what they do, not by name: a layer that writes a state to transformers' cache is recurrent.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

CACHE_ARGUMENTS = ("cache_params", "past_key_values")
"""The names under which recurrent layers of transformers receive their cache."""
DELTA_RULE = "torch_recurrent_gated_delta_rule"
"""The function of transformers' modeling modules that computes the gated delta rule token by token."""
MAMBA2_STEP = "mamba2_selective_state_update"
"""The one that computes one token of Mamba 2."""


NO_LIMIT = (0.0, float("inf"))
"""Limits that clamp nothing: a step size is positive anyway."""


class LayerState:
    """The state of one recurrent layer for a batch of sequences, with the interface of transformers' cache.

    Updates replace tensors instead of writing into them, so that gradients flow through a prompt's state. Example: after a
    layer has run a prompt, ``state.repeat(8)`` is where its 8 completions start.
    """

    record_past = False

    def __init__(self, conv_states: dict[int, Tensor] | None = None, recurrent_states: dict[int, Tensor] | None = None) -> None:
        self.conv_states, self.recurrent_states = conv_states or {}, recurrent_states or {}

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.conv_states.values(), *self.recurrent_states.values()]

    def map(self, function: Callable[[Tensor], Tensor]) -> LayerState:
        """A state with ``function`` applied to every tensor."""
        return LayerState(
            {index: function(x) for index, x in self.conv_states.items()},
            {index: function(x) for index, x in self.recurrent_states.items()},
        )

    def repeat(self, rows: int) -> LayerState:
        """The state of one sequence, as the start of several."""
        return self.map(lambda x: x.repeat_interleave(rows, 0))

    # What transformers' layers call. A LayerState belongs to one layer, so the layer's index is ignored.

    @property
    def layers(self) -> _SameLayer:
        return _SameLayer(self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return state_idx in self.conv_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv_states.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent_states.get(state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last inputs of the convolution; returns the new inputs with those before them."""
        previous = self.conv_states.get(state_idx)
        if previous is None:
            size = conv_kernel_size or conv_states.shape[-1]
            inputs = nn.functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            size, inputs = previous.shape[-1], torch.cat((previous, conv_states), -1)
        self.conv_states[state_idx] = inputs[..., -size:]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class _SameLayer:
    """The cache's list of layers, for versions of transformers whose layers index it themselves."""

    def __init__(self, state: LayerState) -> None:
        self.state = state

    def __getitem__(self, layer: int) -> LayerState:
        return self.state


RunLayer = Callable[[Tensor, LayerState | None], tuple[Tensor, LayerState]]
"""A recurrent layer: inputs [batch, tokens, D] and the state before them to outputs and the state after them."""


CONTEXT: ContextVar[Any] = ContextVar("oncurve_attention_context", default=None)
"""The attention context of the forward pass that runs. Not a forward argument: some layers don't pass those on (StableLM)."""


@contextmanager
def running_in(attention_context: Any) -> Iterator[None]:
    """Within this context, attention and recurrent layers run in this attention context."""
    token = CONTEXT.set(attention_context)
    try:
        yield
    finally:
        CONTEXT.reset(token)


class RecurrentLayer(nn.Module):
    """Mixed into the class of a recurrent layer by `attach`: with an attention context, the context runs the layer."""

    layer_idx: int
    copies_state = True
    """Whether a state is copied before a token that may overwrite it (Mamba 2). The gated delta rule makes a new state, and our
    kernel for it overwrites only those of active slots."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        attention_context = CONTEXT.get()
        if attention_context is None:
            return super().forward(hidden_states, *arguments, **options)
        return attention_context.recur(self.layer_idx, hidden_states, self.run)

    def run(self, hidden_BTD: Tensor, state: LayerState | None) -> tuple[Tensor, LayerState]:
        """The layer's own forward from a state; see `RunLayer`."""
        # A layer may write a state in place; the state that was passed in must not change.
        before = state or LayerState()
        recurrent = {i: x.clone() if self.copies_state else x for i, x in before.recurrent_states.items()}
        after = LayerState({i: x.clone() for i, x in before.conv_states.items()}, recurrent)
        token = _STEP_LIMIT.set(getattr(self, "time_step_limit", None))
        try:
            out: Tensor = super().forward(hidden_BTD, **{_cache_argument(type(self).__mro__[2]): after})
        finally:
            _STEP_LIMIT.reset(token)
        return out, after


def recur_in_pack(groups: Sequence[tuple[int, int, Sequence[int]]], hidden_1ND: Tensor, run: RunLayer) -> Tensor:
    """A recurrent layer over a pack: the completions of a group start from the state at the end of their prompt.

    ``groups`` holds each group's first token, prompt length and completion lengths. Completions are padded at the end, which
    changes nothing before it, and to two tokens at least: for a single one, layers have a form without a gradient.
    """
    parts: list[Tensor] = []
    for start, prompt, lengths in groups:
        out_1TD, state = run(hidden_1ND[:, start : start + prompt], None)
        parts.append(out_1TD[0])
        if any(lengths):
            first = start + prompt
            rows = hidden_1ND[0, first : first + sum(lengths)].split(list(lengths))  # type: ignore[no-untyped-call]
            rows_GTD = pad_sequence(list(rows), batch_first=True)
            rows_GTD = nn.functional.pad(rows_GTD, (0, 0, 0, max(0, 2 - rows_GTD.shape[1])))
            out_GTD, _ = run(rows_GTD, state.repeat(len(rows)))
            parts.extend(out_TD[:length] for out_TD, length in zip(out_GTD, lengths, strict=True))
    return torch.cat(parts)[None]


def is_attached(model: nn.Module) -> bool:
    """Whether any layer of the model is recurrent and runs through our contexts."""
    return any(isinstance(module, RecurrentLayer) for module in model.modules())


@torch.no_grad()
def attach(model: PreTrainedModel, backbone: nn.Module) -> None:
    """Let our contexts run the recurrent layers of a model. Must be called with the model's own attention."""
    if is_attached(model):
        return
    config = model.config.get_text_config()
    cache = _CacheSpy(config=config)
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        return
    candidates = [module for module in backbone.modules() if hasattr(module, "layer_idx")]
    hooks = [
        hook
        for module in candidates
        for hook in (module.register_forward_pre_hook(cache.enter), module.register_forward_hook(cache.leave))
    ]
    try:
        ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
        backbone(input_ids=ids, use_cache=True, **{_cache_argument(type(backbone)): cache})
    finally:
        for hook in hooks:
            hook.remove()
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for kind in {type(module) for module in cache.recurrent}:
        modeling = sys.modules[kind.__module__]
        _let_kernels_step(modeling)
        _limit_steps(modeling)
        kinds[kind] = type(kind.__name__, (RecurrentLayer, kind), {"copies_state": not hasattr(modeling, DELTA_RULE)})
    for module in cache.recurrent:
        module.__class__ = kinds[type(module)]


_ACTIVE_S: ContextVar[Tensor | None] = ContextVar("oncurve_active_slots", default=None)


@contextmanager
def stepping_in_place(active_S: Tensor) -> Iterator[None]:
    """Within this context our kernels may update the states of active slots in place, if they support the layer."""
    token = _ACTIVE_S.set(active_S)
    try:
        yield
    finally:
        _ACTIVE_S.reset(token)


def _let_kernels_step(modeling: ModuleType) -> None:
    """Let a modeling module of transformers take our kernel for one token of the gated delta rule, in `stepping_in_place`."""
    rule = getattr(modeling, DELTA_RULE, None)
    if rule is None or hasattr(rule, "plain_rule"):
        return

    @functools.wraps(rule)
    def step(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Any:
        active_S, state = _ACTIVE_S.get(), options.get("initial_state")
        if active_S is None or state is None or arguments or query.shape[1] != 1:
            return rule(query, key, value, *arguments, **options)
        from oncurve.kernels.delta_rule import can_step, delta_rule_step  # needs Triton

        if not can_step(state):
            return rule(query, key, value, **options)
        q, k, v, g, beta = (x[:, 0] for x in (query, key, value, options["g"], options["beta"]))
        normalises = bool(options.get("use_qk_l2norm_in_kernel"))
        return delta_rule_step(q, k, v, g, beta, state, active_S, normalises)[:, None], state

    step.plain_rule = rule  # type: ignore[attr-defined]
    setattr(modeling, DELTA_RULE, step)


_STEP_LIMIT: ContextVar[Sequence[float] | None] = ContextVar("oncurve_step_limit", default=None)


def _limit_steps(modeling: ModuleType) -> None:
    """Let one token of Mamba 2 keep the limits of its step size, as several tokens at once do: transformers passes them only
    to the latter (Nemotron-H)."""
    rule = getattr(modeling, MAMBA2_STEP, None)
    if rule is None or hasattr(rule, "plain_rule"):
        return

    @functools.wraps(rule)
    def step(
        state: Tensor, hidden_states: Tensor, dt: Tensor, *arguments: Any,
        dt_bias: Tensor | None = None, dt_softplus: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        limit = _STEP_LIMIT.get()
        if limit is not None and tuple(limit) != NO_LIMIT:
            dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
            dt = (nn.functional.softplus(dt) if dt_softplus else dt).clamp(*limit)
            dt_bias, dt_softplus = None, False
        return rule(state, hidden_states, dt, *arguments, dt_bias=dt_bias, dt_softplus=dt_softplus, **options)

    step.plain_rule = rule  # type: ignore[attr-defined]
    setattr(modeling, MAMBA2_STEP, step)


class _CacheSpy(DynamicCache):  # type: ignore[misc]
    """transformers' cache, which notes the modules that write a recurrent state to it."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.active: list[nn.Module] = []
        self.recurrent: dict[nn.Module, None] = {}

    def enter(self, module: nn.Module, arguments: Any) -> None:
        self.active.append(module)

    def leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.active.pop()

    def update_conv_state(self, *arguments: Any, **options: Any) -> Tensor:
        self.recurrent[self.active[-1]] = None
        state: Tensor = super().update_conv_state(*arguments, **options)
        return state

    def update_recurrent_state(self, *arguments: Any, **options: Any) -> Tensor:
        self.recurrent[self.active[-1]] = None
        state: Tensor = super().update_recurrent_state(*arguments, **options)
        return state


def _cache_argument(kind: type[nn.Module]) -> str:
    parameters = inspect.signature(kind.forward).parameters
    return next(name for name in CACHE_ARGUMENTS if name in parameters)
