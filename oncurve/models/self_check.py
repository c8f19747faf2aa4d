"""Compares a model as we run it with the model's own plain forward, on a few short sequences made for the purpose.

The check looks at behaviour, not at a list of names, so it covers families that are published tomorrow. It runs whenever a
model is opened, in the precision that will be used, and costs a few forwards of some 30 tokens. Sliding windows are shortened
meanwhile, so that short sequences cross them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from oncurve.errors import ModelError
from oncurve.models import attention_interface, general_path
from oncurve.models.attention_interface import AttentionContext
from oncurve.models.packing import Pack, PrefixGroup, build_pack
from oncurve.models.recurrent_layers import RecurrentLayer, RunLayer

if TYPE_CHECKING:
    from oncurve.models.policy import Policy

WINDOW = 8
"""Sliding windows are shortened to this while a model is checked."""
TOLERANCE_32BIT, TOLERANCE_16BIT = 1e-3, 0.1
"""Mean difference in log-prob, in nats, up to which two computations of one model count as equal. Rounding gives about 1e-6 in
32 bits and 0.02 in 16; wrong families differ by 0.1 to 6."""
SENSITIVITY = 5.0
"""If the context moves log-probs by less than this many tolerances, the weights can't reveal a difference."""

STATELESS = ("mlp", "moe")
"""Types of layers, as transformers names them, whose output depends on nothing but the token's own hidden state."""

FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, IndexError, KeyError)
"""What a model's modules raise if they can't be called as we call them."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Mean difference in nats; ``conclusive`` is False if the weights are too uniform to reveal a wrong context."""

    difference: float
    tolerance: float
    conclusive: bool

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance  # False for NaN


class _CountingAttention:
    """Forwards to a pack's attention and counts the calls of each layer."""

    def __init__(self, inner: AttentionContext) -> None:
        self.inner = inner
        self.calls: Counter[int] = Counter()
        self.recurrences: Counter[int] = Counter()

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        self.calls[layer] += 1
        if q.shape[-1] != v.shape[-1]:  # the KV cache stores keys and values of one size
            raise attention_interface.unsupported("attention", "values of another size than queries (latent attention)")
        return self.inner.attend(layer, q, k, v, scale, window, softcap)

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        self.recurrences[layer] += 1
        return self.inner.recur(layer, hidden, run)


@torch.no_grad()
def attention_problem(policy: Policy, implementation: str) -> str | None:
    """Why the model can't run through our attention, or None if it can. ``implementation`` is its own attention's name."""
    try:
        with _short_windows(policy):
            return _layers_problem(policy) or _forward_problem(policy, implementation)
    except torch.OutOfMemoryError:
        raise
    except ModelError as error:
        return str(error.what)
    except FAILURES as error:
        return f"a forward that our attention breaks ({_first_line(error)})"


def _layers_problem(policy: Policy) -> str | None:
    """Every layer must call our attention exactly once.

    A layer that never calls it has its own attention or a recurrent state: in the learner its tokens would see the other
    completions of their pack, and in the sampler they would see nothing before them. A layer that calls it twice would
    overwrite its own KV cache.
    """
    config = policy.model.config.get_text_config()
    if config._attn_implementation != attention_interface.NAME:
        return "attention outside of transformers' attention interface"
    pack = _probe_pack(policy)
    attention = _CountingAttention(pack.attention)
    policy.hidden(pack.input_ids, pack.position_ids, attention)
    kinds = getattr(config, "layer_types", None) or ()
    layers = [layer for layer in range(int(config.num_hidden_layers)) if layer >= len(kinds) or kinds[layer] not in STATELESS]
    outside = [layer for layer in layers if not attention.calls[layer] and not attention.recurrences[layer]]
    if outside:
        return f"{len(outside)} of {len(layers)} layers outside of our attention, or with a recurrent state"
    counts = (attention.calls, attention.recurrences)
    if any(count > 1 for calls in counts for count in calls.values()) or set().union(*counts) - set(layers):
        return "layers that attend more than once per token"
    return _recurrence_problem(policy)


def _recurrence_problem(policy: Policy) -> str | None:
    """A recurrent layer must give the same outputs for a sequence at once, as the learner runs it, and token by token."""
    tolerance = 1e-4 if policy.model.dtype == torch.float32 else 5e-2
    layers = (module for module in policy.backbone.modules() if isinstance(module, RecurrentLayer))
    for module in {type(layer): layer for layer in layers}.values():
        width = int(policy.model.config.get_text_config().hidden_size)
        noise = torch.randn(2, 7, width, generator=torch.Generator().manual_seed(0))
        hidden = noise.to(policy.device, policy.model.dtype)
        at_once, _ = module.run(hidden, None)
        part, state = module.run(hidden[:, :3], None)
        parts = [part]
        for position in range(3, hidden.shape[1]):
            part, state = module.run(hidden[:, position : position + 1], state)
            parts.append(part)
        difference = float((torch.cat(parts, 1) - at_once).abs().max() / at_once.abs().max())
        if not difference <= tolerance:  # also for NaN
            return f"a recurrent layer ({type(module).__name__}) that differs by {difference:.1%} if it runs token by token"
    return None


def _forward_problem(policy: Policy, implementation: str) -> str | None:
    result = compare_forward(policy, implementation)
    if result.agrees:
        policy.check_is_conclusive = result.conclusive
        return None
    return f"log-probs that differ from its own forward by {result.difference:.2g} nats"


def compare_forward(policy: Policy, implementation: str) -> Comparison:
    """The learner's log-probs of a pack with two prompts and five completions, against plain forwards of each sequence."""
    pack = _probe_pack(policy)
    ours_M, _ = policy.pack_logps(pack)
    present = policy.model.config._attn_implementation
    policy.model.set_attn_implementation(implementation)
    try:
        theirs_M = _plain_logps(policy, pack, with_prompt=True)
        without_prompt_M = _plain_logps(policy, pack, with_prompt=False)
    finally:
        policy.model.set_attn_implementation(present)
    tolerance = _tolerance(policy)
    moved = float((theirs_M - without_prompt_M).abs().mean())
    return Comparison(float((ours_M - theirs_M).abs().mean()), tolerance, moved > SENSITIVITY * tolerance)


def _plain_logps(policy: Policy, pack: Pack, *, with_prompt: bool) -> Tensor:
    """Log-probs of a pack's targets, each completion forwarded by itself; without its prompt, after its last token only."""
    logps, targets = [], torch.split(pack.target_M, list(pack.lengths))
    for (prompt_start, prompt, start, inputs), target_T in zip(pack.spans, targets, strict=True):
        first = prompt_start if with_prompt else prompt_start + prompt - 1
        ids = torch.cat((pack.input_ids[0, first : prompt_start + prompt], pack.input_ids[0, start : start + inputs]))
        hidden_TD = policy.backbone(input_ids=ids[None], use_cache=False).last_hidden_state[0, -len(target_T) :]
        logps.append(policy.target_logps(hidden_TD, target_T)[0])
    return torch.cat(logps)


@torch.no_grad()
def check_general_path(policy: Policy, reason: str) -> None:
    """Refuse a model that the general path does not compute either; ``reason`` is why our attention does not."""
    name = type(policy.model).__name__
    try:
        problem = _general_problem(policy)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        problem = f"its forward fails ({_first_line(error)})"
    if problem is not None:
        raise ModelError(
            name,
            f"a model with {reason}",
            because=f"it can't run through our attention, and on the general path {problem}",
            fix="choose another model family; docs/models.md says which kinds work",
        )


def _general_problem(policy: Policy) -> str | None:
    pack, tolerance = _probe_pack(policy), _tolerance(policy)
    prompt_start, prompt, start, inputs = pack.spans[-1]
    row = torch.cat((pack.input_ids[0, prompt_start : prompt_start + prompt], pack.input_ids[0, start : start + inputs]))

    def logps(ids: Tensor) -> Tensor:
        hidden_LD = policy.backbone(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        return policy.head.logits(hidden_LD).log_softmax(-1)

    def agree(one: Tensor, other: Tensor) -> bool:
        return float((one - other).abs().mean()) <= tolerance  # False for NaN

    plain_LV, changed = logps(row), row.clone()
    changed[-3:] = (changed[-3:] + 1) % policy.head.weight_VD.shape[0]
    if not agree(plain_LV[: prompt - 1], logps(changed)[: prompt - 1]):
        return "a token sees the tokens after it: it is not a causal model"
    cache = general_path.forward_cached(policy.backbone, row[None, :prompt], general_path.GeneralCache())[1].repeat(2)
    for position in range(prompt, len(row)):
        hidden_RD, cache = general_path.forward_cached(policy.backbone, row[position].expand(2, 1), cache)
        if not agree(policy.head.logits(hidden_RD).log_softmax(-1), plain_LV[position]):
            return "decoding with its cache differs from its forward"
    if not agree(policy.pack_logps(pack)[0], _plain_logps(policy, pack, with_prompt=True)):
        return "a row's log-probs depend on the padding behind it"
    return None


@torch.no_grad()
def check_head(policy: Policy) -> None:
    """Refuse a model unless the head read from its config gives its own logits: a hidden scale would train on wrong numbers."""
    pack = _probe_pack(policy)
    inputs: dict[str, Any] = {}
    if policy.general_reason is None:
        inputs = {"position_ids": pack.position_ids, "attention_context": pack.attention}
    hidden = policy.backbone(input_ids=pack.input_ids, use_cache=False, **inputs).last_hidden_state
    # Some models do not pass such arguments on to their backbone.
    hook = policy.backbone.register_forward_pre_hook(lambda _, args, given: (args, given | inputs), with_kwargs=True)
    try:
        theirs = policy.model(input_ids=pack.input_ids, use_cache=False).logits.float()
    finally:
        hook.remove()
    ours = policy.head.logits(hidden)
    tolerance = 1e-3 if hidden.dtype == torch.float32 else 2e-2  # the model scales and caps its logits in 16 bits, we in 32
    if not torch.allclose(theirs, ours, rtol=tolerance, atol=tolerance * float(theirs.abs().max()) + 1e-6):
        raise attention_interface.unsupported(type(policy.model).__name__, "an LM head with more than a scale and a soft cap")


def _tolerance(policy: Policy) -> float:
    return TOLERANCE_32BIT if policy.model.dtype == torch.float32 else TOLERANCE_16BIT


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"


def _probe_pack(policy: Policy) -> Pack:
    """Two prompts of different lengths, with three and two completions, longer than the shortened windows."""
    rng = np.random.default_rng(0)
    vocabulary = int(policy.head.weight_VD.shape[0])

    def ids(count: int) -> np.ndarray:
        return rng.integers(min(3, vocabulary - 1), vocabulary, count)

    first = PrefixGroup(ids(5), (ids(9), ids(4), ids(12)), (0, 1, 2))
    second = PrefixGroup(ids(13), (ids(6), ids(11)), (3, 4))
    return build_pack([first, second], policy.device)


@contextmanager
def _short_windows(policy: Policy) -> Iterator[None]:
    """Within this context, sliding windows of the model are WINDOW tokens, so that a short sequence crosses them."""
    changed: list[tuple[Any, str, Any]] = []
    config = policy.model.config.get_text_config()
    for owner in (config, *policy.backbone.modules()):
        for name in ("sliding_window", "attention_chunk_size"):
            value = vars(owner).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > WINDOW:
                changed.append((owner, name, value))
                setattr(owner, name, WINDOW)
    try:
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)
