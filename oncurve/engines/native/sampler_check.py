"""Compares the log-probs of a few completions, as the sampler gives them, with those of the model's own plain forward.

`oncurve.models.self_check` checks the learner's path when a model is opened. This module checks the runner that will sample. It
samples a group of completions for each of two prompts of different lengths, in the precision in use. The longer prompt crosses
the model's sliding window, unless that takes more than `MAX_PROMPT` tokens. `oncurve.models.check_memory` stores the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from oncurve.engines.base import SampleKey, SampleRequest
from oncurve.engines.native.scheduler import Scheduler
from oncurve.errors import ModelError
from oncurve.models import check_memory
from oncurve.models.attention_interface import NAME
from oncurve.models.parallel.dtensor import is_dtensor
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Floats, Ints, Prompt

if TYPE_CHECKING:
    from oncurve.engines.native.engine import NativeEngine
    from oncurve.engines.native.session import SampledToken, Session

Row = tuple[Ints, Ints, Floats]
"""A prompt, a completion and its sampled log-probs."""

SAMPLES, NEW_TOKENS = 3, 12
SHORT_PROMPT, LONG_PROMPT = 4, 21
MAX_PROMPT = {"cpu": 160, "cuda": 4224}
"""The longest prompt that is used to cross a sliding window. A CPU would need minutes for thousands of tokens."""


MAX_FP8_DIFFERENCE = 0.3
"""Mean difference in nats up to which a model may sample with an FP8 KV cache."""


def check_sampler(engine: NativeEngine) -> None:
    """Refuse a model whose sampled log-probs are not those of its own forward; otherwise note it in ``policy.check``.

    Sharded weights are left out: their forward passes are collectives, and the first step compares sampler and learner.

    With an FP8 KV cache the model is checked twice. The same runner without it must be within rounding, as always: a cache that
    is off by 1/16 would hide mistakes. Then the cache must not move log-probs by more than `MAX_FP8_DIFFERENCE`.
    """
    if engine.settings.kv_dtype == "fp8":
        plain = type(engine)(engine.policy, engine.settings.model_copy(update={"kv_dtype": "auto"}))
        plain.allows_c = False
        check_sampler(plain)
        _check_fp8(engine)
        return
    _check(engine.policy, f"engine, C: {engine.uses_c}", lambda: _sample(engine))


def _sample(engine: NativeEngine) -> list[Row]:
    policy, requests = engine.policy, _requests(engine.policy)
    with torch.inference_mode(not policy.layer_by_layer), torch.no_grad():
        groups = dict(Scheduler(policy, engine.build_runner(requests), requests).completions())
    return [(requests[g].prompt_ids, c.token_ids, c.logps) for g, completions in groups.items() for c in completions]


def _check_fp8(engine: NativeEngine) -> None:
    policy = engine.policy
    if is_dtensor(next(policy.model.parameters())):
        return
    key = check_memory.key_of(policy.model, "engine, FP8", policy.check.own_attention)
    difference = _remembered_difference(policy, key, lambda: _sample(engine))
    if not difference <= MAX_FP8_DIFFERENCE:  # also for NaN
        raise ModelError(
            type(policy.model).__name__,
            f"with an FP8 KV cache, sampled log-probs differ from the model's own forward by {difference:.2g} nats",
            because=f"its keys or values need more than 4 significant bits; up to {MAX_FP8_DIFFERENCE} nats are corrected for",
            fix='set engine.kv_dtype = "auto"',
        )
    check_memory.remember(key, {"difference": difference})
    engine.fp8_difference = difference


def check_session(session: Session) -> None:
    """Like `check_sampler`, for a session."""
    requests = _requests(session.policy, session.max_new_tokens)

    def sample() -> list[Row]:
        tokens: dict[tuple[int, int], list[SampledToken]] = {}
        prompts = {session.submit(request): request.prompt_ids for request in requests}
        while session.requests:
            for token in session.step():
                tokens.setdefault((token.request, token.sample), []).append(token)
        return [
            (prompts[request], np.array([t.token_id for t in row]), np.array([t.logp for t in row]))
            for (request, _), row in tokens.items()
        ]

    _check(session.policy, f"session, C: {session.policy.uses_c}", sample)


def _check(policy: Policy, name: str, sample: Callable[[], list[Row]]) -> None:
    if policy.check.sampler_difference is not None or is_dtensor(next(policy.model.parameters())):
        return
    started = time.perf_counter()
    key = check_memory.key_of(policy.model, name, policy.check.own_attention)
    difference = _remembered_difference(policy, key, sample)
    if not difference <= policy.check.tolerance:  # also for NaN
        raise ModelError(
            type(policy.model).__name__,
            f"the sampler's log-probs differ from the model's own forward by {difference:.2g} nats",
            because=f"rounding explains {policy.check.tolerance:.1g} nats at most in {policy.model.dtype}",
            fix='use scale.engine = "vllm", or another model family; docs/models.md says which kinds work',
        )
    check_memory.remember(key, {"difference": difference})
    seconds = policy.check.seconds + time.perf_counter() - started
    policy.check = replace(policy.check, sampler_difference=difference, seconds=seconds)


def _requests(policy: Policy, max_new_tokens: int = NEW_TOKENS) -> list[SampleRequest]:
    """Two prompts of different lengths, or what the model has room for."""
    window = getattr(policy.model.config.get_text_config(), "sliding_window", None)
    long = min(window + SHORT_PROMPT if isinstance(window, int) else 0, MAX_PROMPT.get(policy.device.type, 0))
    new = max(1, min(NEW_TOKENS, max_new_tokens, policy.max_positions - SHORT_PROMPT))
    long = max(1, min(max(long, LONG_PROMPT), policy.max_positions - new))
    rng, vocabulary = np.random.default_rng(0), policy.head.weight_VD.shape[0]
    sampling = Sampling(max_new_tokens=new, min_new_tokens=new)
    return [
        SampleRequest(
            Prompt(f"self-check {length}", text=""), rng.integers(0, vocabulary, length), SAMPLES, sampling, SampleKey(0, 0)
        )
        for length in (min(SHORT_PROMPT, long), long)
    ]


def _remembered_difference(policy: Policy, key: str, sample: Callable[[], list[Row]]) -> float:
    """The difference of an earlier check under this key, or that of new rows."""
    remembered = (check_memory.recall(key) or {}).get("difference")
    return remembered if isinstance(remembered, float) else _plain_difference(policy, sample())


@torch.no_grad()
def _plain_difference(policy: Policy, rows: Iterable[Row]) -> float:
    """Mean difference between sampled log-probs and those of a plain forward of each row by itself, in nats."""
    differences = []
    policy.model.set_attn_implementation(policy.check.own_attention)
    try:
        for prompt_ids, token_ids, logps in rows:
            ids = torch.from_numpy(np.concatenate((prompt_ids, token_ids))).to(policy.device)
            hidden_LD = policy.backbone(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            plain_T, _ = policy.target_logps(hidden_LD[len(prompt_ids) - 1 : -1], ids[len(prompt_ids) :])
            differences.append(np.abs(plain_T.float().cpu().numpy() - logps))
    finally:
        if policy.general_reason is None:
            policy.model.set_attn_implementation(NAME)
    return float(np.concatenate(differences).mean())
