"""Compares a model as we run it with the model's own plain forward, on a few short sequences made for the purpose.

The check compares outputs and has no list of names, so it also covers families that did not exist when it was written. It runs
when a model is opened, in the precision that will be used, and costs about ten forwards of some 30 tokens. During the check
sliding windows are shortened, so that short sequences are longer than a window. Positions stay below the one at which the
rotary embedding changes its frequencies (`Policy.max_positions`).

The tolerance is derived from the precision. Rounding moves log-probs by an amount that depends on the model, so the check
measures it: how far log-probs move if every embedding is multiplied by 1 ± ε, with the precision's machine epsilon ε. In
bfloat16 that is about twice the distance between a model's forward in bfloat16 and in float32 (1.6 to 3.3 times in 19 families
of two layers). The tolerance is `ROUNDINGS` times as much, but at least `LEAST_TOLERANCE`. If log-probs move by no more than
`SENSITIVITY` times the tolerance when prompts are cut to their last token, the check would not notice a wrong context: its
result is then inconclusive, never passed.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from oncurve.errors import ModelError
from oncurve.models import attention_interface, check_memory, general_path
from oncurve.models.attention_interface import AttentionContext, ScoreRule
from oncurve.models.general_path import Decoding, GeneralCache
from oncurve.models.heads.lm_head import own_logits
from oncurve.models.packing import Pack, PrefixGroup, build_pack
from oncurve.models.recurrent_layers import RecurrentLayer, RunLayer

if TYPE_CHECKING:
    from oncurve.models.policy import Policy

WINDOW = 8
"""Sliding windows are shortened to this while a model is checked."""
ROUNDINGS = 4.0
"""Two computations count as equal if they differ by at most this many times what a rounding of the embeddings changes."""
LEAST_TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-8}
"""In nats. In float32, a recurrence run in chunks and the same one run token by token differ by about 1e-5."""
LEAST_TOLERANCE_16BIT = 1e-2
STATE_ROUNDINGS = 1.8
"""As `ROUNDINGS`, for hidden states. With the weights of two pretrained models in bfloat16, the fast paths are off by 0.7 to
1.2 times what a rounding of the embeddings changes; if the scale of attention is wrong by a tenth, by 2.2 to 2.9 times."""
LEAST_STATE_TOLERANCE = {torch.float32: 2e-5, torch.float64: 2e-5}
LEAST_STATE_TOLERANCE_16BIT = 1e-2
SENSITIVITY = 3.0
"""If the context moves log-probs by less than this many tolerances, the weights can't reveal a difference."""

RECURRENCE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""How far a recurrent layer run token by token may be from the same layer run at once, relative to its largest output."""
RECURRENCE_16BIT = 5e-2
RECURRENCE_COPY = 1e-3
"""The same for a copy in float32: kernels may multiply with less precision."""

FAR_LOGIT = 100.0
"""Heads are also compared on hidden states that are scaled until the largest logit is about this: soft caps are 15 to 50."""

STATELESS = ("mlp", "moe")
"""Types of layers, as transformers names them, whose output depends on nothing but the token's own hidden state."""

FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, IndexError, KeyError, NotImplementedError)
"""What a model's modules raise if they can't be called as we call them."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """How a model is run, and how far that is from its own plain forward: mean difference in log-prob, in nats.

    Example: ``SelfCheck(difference=1.2e-6, tolerance=2e-4, conclusive=True)`` is a model that runs through our attention.
    """

    general_reason: str | None = None
    """Why the model takes the general path (`oncurve.models.general_path`); None if it runs through our attention."""
    decoding: Decoding = Decoding.CACHE
    """How the general path decodes."""
    own_head: bool = False
    """Whether logits come from the model's own forward: its head is more than a linear layer with a scale and a soft cap."""
    difference: float = 0.0
    tolerance: float = 0.0
    conclusive: bool = False
    """False if the weights are too uniform to tell a wrong forward from a right one."""
    sampler_difference: float | None = None
    """As ``difference``, for the sampler's log-probs; None until an engine has been compared."""
    own_attention: str = ""
    """The name of the model's own attention in transformers."""
    seconds: float = 0.0
    is_remembered: bool = False

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "decoding": self.decoding.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> SelfCheck | None:
        """None if the data does not describe a check."""
        try:
            return None if data is None else cls(**{**data, "decoding": Decoding(data["decoding"])})
        except (KeyError, TypeError, ValueError):
            return None

    def log_line(self, *, is_fused: bool, module_reason: str = "") -> str:
        """``module_reason``: why a model that runs through our attention runs its own modules, if that is known."""
        if self.general_reason is None:
            reason = f" ({module_reason})" if module_reason else ""
            path = "fast path" if is_fused else f"the model's own modules{reason}; a group's completions share their prompt"
        else:
            path = f"general path, which is slower ({self.general_reason})"
            if self.decoding is Decoding.COMPLETE:
                path += "; its cache can't be used, so every token runs the complete sequence again, which is very slow"
        sampler = "" if self.sampler_difference is None else f", of the sampler by {self.sampler_difference:.1e}"
        found = f"log-probs of the learner differ from the model's own forward by {self.difference:.1e} nats{sampler}"
        result = "passed" if self.conclusive else "inconclusive, because these weights hardly depend on the context"
        cost = "cached result" if self.is_remembered else f"{self.seconds:.1f} s"
        return f"self-check {result} ({cost}): {found}, tolerance {self.tolerance:.1e}; it runs on: {path}"


@torch.no_grad()
def check_policy(policy: Policy, implementation: str) -> None:
    """Find out how the policy's model must be run, and set ``policy.check`` and the model's attention accordingly.

    ``implementation`` is the name of the model's own attention. A model that no path computes correctly is refused.
    """
    started = time.perf_counter()
    model = policy.model
    key = check_memory.key_of(model, implementation)
    remembered = SelfCheck.from_json(check_memory.recall(key))
    if remembered is not None:
        policy.check = replace(remembered, seconds=time.perf_counter() - started, is_remembered=True)
        model.set_attn_implementation(implementation if remembered.general_reason else attention_interface.NAME)
        return
    policy.check = replace(policy.check, own_attention=implementation)
    model.set_attn_implementation(implementation)
    with _short_windows(policy):
        _check_head(policy)
        tolerance = _measure_tolerance(policy)
        policy.check = replace(policy.check, tolerance=tolerance)
        model.set_attn_implementation(attention_interface.NAME)
        reason = attention_problem(policy, implementation)
        if reason is not None:
            model.set_attn_implementation(implementation)
            policy.check = replace(policy.check, general_reason=reason)
            _check_general_path(policy)
    if check_memory.key_of(model, implementation) != key:
        raise _no_forward(type(model).__name__, "its forward changes its own weights (RWKV: unless rescale_every is 0)")
    policy.check = replace(policy.check, seconds=time.perf_counter() - started)
    check_memory.remember(key, policy.check.to_json())


class _CountingAttention:
    """Forwards to a pack's attention and counts the calls of each layer."""

    def __init__(self, inner: AttentionContext) -> None:
        self.inner = inner
        self.calls: Counter[int] = Counter()
        self.recurrences: Counter[int] = Counter()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        self.calls[layer] += 1
        if q.shape[-1] != v.shape[-1]:  # the KV cache stores keys and values of one size
            raise attention_interface.unsupported("attention", "values that are wider than queries")
        return self.inner.attend(layer, q, k, v, rule)

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        self.recurrences[layer] += 1
        return self.inner.recur(layer, hidden, run)


def attention_problem(policy: Policy, implementation: str) -> str | None:
    """Why the model can't run through our attention, or None if it can. ``implementation`` is its own attention's name."""
    try:
        return _layers_problem(policy) or _forward_problem(policy, implementation)
    except torch.OutOfMemoryError:
        raise
    except ModelError as error:
        return str(error.what)
    except FAILURES as error:
        return f"a forward that our attention breaks ({_first_line(error)})"


def _layers_problem(policy: Policy) -> str | None:
    """Why the layers can't run through our attention, or None if they can: every layer must call our attention, or its
    recurrent counterpart, exactly once.

    A layer that never does has its own attention or its own recurrent state: in the learner its tokens would see the other
    completions of their pack, and in the sampler they would see nothing before them. A layer that calls our attention twice
    would overwrite its own KV cache.
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
    """Why a recurrent layer is wrong, or None if it isn't: it must give the same outputs for a sequence at once, as the learner
    runs it, and token by token.

    In 16 bits rounding hides errors of some percent, so a copy in float32 is compared as well.
    """
    dtype = policy.model.dtype
    width = int(policy.model.config.get_text_config().hidden_size)
    noise = torch.randn(16, 12, width, generator=torch.Generator().manual_seed(0)).to(policy.device)
    layers = (module for module in policy.backbone.modules() if isinstance(module, RecurrentLayer))
    for kind, layer in {type(layer): layer for layer in layers}.items():
        compared = [(_step_difference(layer, noise.to(dtype)), RECURRENCE.get(dtype, RECURRENCE_16BIT))]
        if dtype != torch.float32 and all(p.is_floating_point() for p in layer.parameters()):  # else quantised
            with suppress(*FAILURES):  # some kernels refuse float32
                compared.append((_step_difference(copy.deepcopy(layer).float(), noise), RECURRENCE_COPY))
        for difference, tolerance in compared:
            if not difference <= tolerance:  # also for NaN
                return f"a recurrent layer ({kind.__name__}) that differs by {100 * difference:.1f} % if it runs token by token"
    return None


def _step_difference(layer: RecurrentLayer, hidden_BTD: Tensor) -> float:
    """How far a layer's outputs token by token are from those at once, relative to the largest."""
    at_once, _ = layer.run(hidden_BTD, None)
    part, state = layer.run(hidden_BTD[:, :3], None)
    parts = [part]
    for position in range(3, hidden_BTD.shape[1]):
        part, state = layer.run(hidden_BTD[:, position : position + 1], state)
        parts.append(part)
    return float((torch.cat(parts, 1) - at_once).abs().max() / at_once.abs().max())


def _forward_problem(policy: Policy, implementation: str) -> str | None:
    pack = _probe_pack(policy)
    ours_M, _ = policy.pack_logps(pack)
    policy.model.set_attn_implementation(implementation)
    try:
        theirs_M = _plain_logps(policy, pack)
        conclusive = _is_conclusive(policy, pack, theirs_M)
    finally:
        policy.model.set_attn_implementation(attention_interface.NAME)
    difference = _mean_difference(ours_M, theirs_M)
    if not difference <= policy.check.tolerance:  # also for NaN
        return f"log-probs that differ from its own forward by {difference:.2g} nats"
    policy.check = replace(policy.check, difference=difference, conclusive=conclusive)
    return None


def _check_general_path(policy: Policy) -> None:
    """Refuse a model that the general path does not compute either."""
    name = type(policy.model).__name__
    try:
        problem = _general_problem(policy)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        problem = f"its forward or backward fails ({_first_line(error)})"
    if problem is not None:
        raise ModelError(
            name,
            f"a model with {policy.check.general_reason}",
            because=f"it can't run through our attention, and on the general path {problem}",
            fix="choose another model family; docs/models.md says which kinds work",
        )


def _general_problem(policy: Policy) -> str | None:
    pack = _probe_pack(policy)
    prompt_start, prompt, start, inputs, _ = pack.spans[-1]
    row = torch.cat((pack.input_ids[0, prompt_start : prompt_start + prompt], pack.input_ids[0, start : start + inputs]))

    def logps(ids: Tensor) -> Tensor:
        return _vocab_logps(policy, policy.backbone(input_ids=ids[None], use_cache=False).last_hidden_state[0])

    plain_LV, changed = logps(row), row.clone()
    changed[-3:] = (changed[-3:] + 1) % policy.head.weight_VD.shape[0]
    if not _mean_difference(plain_LV[: prompt - 1], logps(changed)[: prompt - 1]) <= policy.check.tolerance:
        return "a token sees the tokens after it: it is not a causal model"
    decoding = next((d for d in Decoding if _decodes(policy, d, row, prompt, plain_LV)), None)
    if decoding is None:
        return "decoding differs from its forward"
    theirs_M = _plain_logps(policy, pack)
    difference = _mean_difference(policy.pack_logps(pack)[0], theirs_M)
    if not difference <= policy.check.tolerance:
        return "a row's log-probs depend on the padding behind it"
    _run_backward(policy, pack)
    policy.check = replace(
        policy.check, decoding=decoding, difference=difference, conclusive=_is_conclusive(policy, pack, theirs_M)
    )
    return None


def _run_backward(policy: Policy, pack: Pack) -> None:
    """Some models compute no gradient in evaluation mode (Reformer): differentiate with respect to the embeddings."""
    leaves: list[Tensor] = []

    def cut(module: Any, args: Any, out: Tensor) -> Tensor:
        leaves.append(out.detach().requires_grad_())
        return leaves[-1].clone()  # models may add positions to it in place

    hook = policy.model.get_input_embeddings().register_forward_hook(cut)
    try:
        with torch.enable_grad():
            torch.autograd.grad(policy.pack_logps(pack)[0].sum(), leaves)
    finally:
        hook.remove()


def _decodes(policy: Policy, decoding: Decoding, row: Tensor, prompt: int, plain_LV: Tensor) -> bool:
    """Whether two rows with the prompt's cache, decoded token by token, have the log-probs of the plain forward."""
    try:
        empty = GeneralCache.empty(policy.device)
        cache = general_path.extend(policy.backbone, empty, row[None, :prompt], decoding)[1].repeat(2)
        decoded = []
        for position in range(prompt, len(row)):
            hidden_RD, cache = general_path.extend(policy.backbone, cache, row[position].expand(2, 1), decoding)
            decoded.append(_vocab_logps(policy, hidden_RD))
    except torch.OutOfMemoryError:
        raise
    except FAILURES:
        return False
    return _mean_difference(torch.stack(decoded, 1), plain_LV[prompt:]) <= policy.check.tolerance


def _check_head(policy: Policy) -> None:
    """Compare the head that was read from the config with the model's own logits; if they differ, the model's own is used."""
    name, ids = type(policy.model).__name__, _probe_pack(policy).input_ids
    try:
        theirs = policy.model(input_ids=ids, use_cache=False).logits[0].float()
        hidden = policy.backbone(input_ids=ids, use_cache=False).last_hidden_state[0]
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise _no_forward(name, f"its forward fails ({_first_line(error)})") from error
    if not theirs.isfinite().all():
        raise _no_forward(name, "its logits are not finite")
    if _same_logits(policy, hidden, theirs) and not _differs_far_out(policy, hidden, theirs):
        return
    policy.check = replace(policy.check, own_head=True)
    if not _same_logits(policy, hidden, theirs):
        raise _no_forward(name, "its logits do not follow from its last hidden state")


def _differs_far_out(policy: Policy, hidden: Tensor, theirs: Tensor) -> bool:
    """Whether the model's own head differs from ours for larger hidden states. A soft cap under a name that we do not know
    hardly changes small logits, and in 16 bits it hardly changes even those of a trained model. False if the model's own head
    can't be called by itself: OPT's forward, for one, does not call the backbone."""
    far = hidden * max(1.0, FAR_LOGIT / max(float(theirs.abs().max()), 1e-6))
    try:
        near_theirs, far_theirs = (own_logits(policy.model, policy.backbone, states).float() for states in (hidden, far))
    except torch.OutOfMemoryError:
        raise
    except FAILURES:
        return False
    can_call = _same_logits(policy, hidden, near_theirs) and bool(far_theirs.isfinite().all())
    return can_call and not _same_logits(policy, far, far_theirs)


def _same_logits(policy: Policy, hidden: Tensor, theirs: Tensor) -> bool:
    tolerance = 1e-3 if policy.model.dtype == torch.float32 else 2e-2  # the model may scale and cap logits in 16 bits, we in 32
    try:
        ours = policy.head.logits(hidden)
    except torch.OutOfMemoryError:
        raise
    except FAILURES:
        return False
    atol = tolerance * float(theirs.abs().max()) + 1e-6
    return ours.shape == theirs.shape and torch.allclose(theirs, ours, rtol=tolerance, atol=atol)


def _no_forward(name: str, reason: str) -> ModelError:
    return ModelError(
        name,
        "can't be run as a causal language model",
        because=reason,
        fix="choose another model family; docs/models.md says which kinds work",
    )


def _measure_tolerance(policy: Policy) -> float:
    """The largest mean difference in log-prob that counts as rounding (see above)."""
    dtype = policy.model.dtype
    pack = _probe_pack(policy)
    plain_M = _plain_logps(policy, pack, only_last=True)
    with _rounded_embeddings(policy):
        noise = _mean_difference(plain_M, _plain_logps(policy, pack, only_last=True))
    return max(ROUNDINGS * noise, LEAST_TOLERANCE.get(dtype, LEAST_TOLERANCE_16BIT))


@contextmanager
def _rounded_embeddings(policy: Policy) -> Iterator[None]:
    """Within this context every embedding is multiplied by 1 ± ε."""
    generator = torch.Generator().manual_seed(0)

    def perturb(module: Any, args: Any, out: Tensor) -> Tensor:
        sign = torch.randint(0, 2, out.shape, generator=generator).to(out.device, out.dtype) * 2 - 1
        return out * (1 + sign * torch.finfo(out.dtype).eps)

    hook = policy.model.get_input_embeddings().register_forward_hook(perturb)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def has_same_states(policy: Policy, hidden: Callable[[Tensor, Tensor, AttentionContext], Tensor]) -> bool:
    """Whether ``hidden`` gives the last hidden states of the policy's modules, up to rounding.

    Up to a quarter of all elements may differ more. In 16 bits rounding alone can change single tokens of a pretrained model
    completely, and a few elements of a state are so large that a tolerance relative to them would hide the others.
    """
    pack = _probe_pack(policy)
    inputs = pack.input_ids, pack.position_ids, pack.attention
    theirs_NTD = policy.hidden(*inputs)
    difference = _state_difference(hidden(*inputs), theirs_NTD)
    least = LEAST_STATE_TOLERANCE.get(theirs_NTD.dtype, LEAST_STATE_TOLERANCE_16BIT)
    if difference <= least:
        return True
    with _rounded_embeddings(policy):
        noise = _state_difference(policy.hidden(*inputs), theirs_NTD)
    return difference <= STATE_ROUNDINGS * noise


def _state_difference(one: Tensor, other: Tensor) -> float:
    apart_N, size_N = (one.float() - other.float()).abs().flatten(), other.float().abs().flatten()
    return float(apart_N.quantile(0.75) / size_N.quantile(0.75))


def _is_conclusive(policy: Policy, pack: Pack, logps_M: Tensor) -> bool:
    """Whether log-probs move clearly if a completion follows its prompt's last token instead of its prompt."""
    without_M = _plain_logps(policy, pack, with_prompt=False, only_last=True)
    return _mean_difference(without_M, logps_M[-len(without_M) :]) > SENSITIVITY * policy.check.tolerance


def _plain_logps(policy: Policy, pack: Pack, *, with_prompt: bool = True, only_last: bool = False) -> Tensor:
    """Log-probs of a pack's targets, each completion forwarded alone: after its prompt, or after its last token only."""
    logps, targets = [], torch.split(pack.target_M, list(pack.lengths))
    spans = list(zip(pack.spans, targets, strict=True))
    for (prompt_start, prompt, start, inputs, _), target_T in spans[-1:] if only_last else spans:
        first = prompt_start if with_prompt else prompt_start + prompt - 1
        ids = torch.cat((pack.input_ids[0, first : prompt_start + prompt], pack.input_ids[0, start : start + inputs]))
        hidden_TD = policy.backbone(input_ids=ids[None], use_cache=False).last_hidden_state[0, -len(target_T) :]
        logps.append(policy.target_logps(hidden_TD, target_T)[0])
    return torch.cat(logps)


def _vocab_logps(policy: Policy, hidden: Tensor) -> Tensor:
    return policy.head.logits(hidden).log_softmax(-1)


def _mean_difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().mean())


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"


def _probe_pack(policy: Policy) -> Pack:
    """Two prompts of different lengths, with three and two completions, longer than the shortened windows."""
    rng = np.random.default_rng(0)
    vocabulary = int(policy.head.weight_VD.shape[0])
    pad = min(getattr(policy.model.config.get_text_config(), "pad_token_id", None) or 0, vocabulary - 1)

    def ids(count: int) -> np.ndarray:
        drawn = rng.integers(min(3, vocabulary - 1), vocabulary, count)
        drawn[count // 2] = pad  # some models (RoBERTa) derive positions from the number of other tokens
        return drawn

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
