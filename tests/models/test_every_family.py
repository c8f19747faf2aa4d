"""Every causal decoder of the installed transformers is computed correctly, or refused: none is wrong, none crashes.

`python -m tests.models.test_every_family` writes the table of paths that docs/models.md and `oncurve models` show.
"""

from __future__ import annotations

import copy
import warnings
import zlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import ModelError
from oncurve.model_families import FAMILY_TABLE, family_paths
from oncurve.models.general_path import Decoding
from oncurve.models.llama.block_description import DecoderDescription, describe
from oncurve.models.llama.fused import FusedBackbone
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Group, Ints, Prompt
from oncurve.training.learner.activation_checkpointing import layers_to_checkpoint, transient_bytes
from oncurve.training.timing import model_flops
from tests.models.tiny_families import NOT_BUILT, VOCABULARY, WINDOW, families, tiny_model

PROMPTS = ("a", "bcdefghijklmnopq", "cdefghijklmnopqrstuvwxyz0123456789+-= abcd")
"""Of one, sixteen and more than WINDOW tokens."""
NEW_TOKENS = 12
SATURATED = 1e-6
"""Squared norm below which a gradient is rounding noise: the model is certain of every token."""


class CharacterTokenizer:
    """One token per character, in the vocabulary of the tiny models."""

    eos_token_id, eos_token, chat_template, backend_tokenizer = 1, "</s>", None, None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(c) % (VOCABULARY - 4) for c in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(64 + i) for i in ids)


@dataclass(frozen=True)
class Verdict:
    """``path``: a key of PATHS."""

    path: str
    reason: str = ""
    sampler: float = 0.0
    learner: float = 0.0
    gradient: float = 0.0


def plain_logps(model: PreTrainedModel, prompt_ids: Ints, completion_ids: Ints) -> Tensor:
    ids = torch.from_numpy(np.concatenate((prompt_ids, completion_ids)))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float()
    logps: Tensor = logits.log_softmax(-1).gather(1, torch.from_numpy(completion_ids)[:, None])[:, 0]
    return logps


def difference(logps: Tensor, plain: Tensor) -> float:
    """The largest difference in nats; of log-probs below −1 relative to them, because rounding is."""
    return float(((logps - plain).abs() / plain.abs().clamp(min=1)).max())


def judge(model: PreTrainedModel) -> Verdict:
    own = copy.deepcopy(model)
    try:
        policy = Policy(model, CharacterTokenizer())
    except ModelError as error:
        return Verdict("refused", error.because.rpartition("on the general path ")[2])
    prompts = [Prompt(id=text[:1], text=text) for text in PROMPTS]
    sampling = Sampling(max_new_tokens=NEW_TOKENS, min_new_tokens=4)
    groups = NativeEngine(policy, Engine(slots=6)).sample(prompts, 3, sampling, SampleKey(0, 1))
    weight = {id(c): torch.linspace(-1, 1, len(c.token_ids)) for g in groups for c in g.completions}
    theirs, loss = [], torch.zeros(())
    for group in groups:
        for completion in group.completions:
            logps = plain_logps(own, group.prompt_ids, completion.token_ids)
            theirs.append(logps)
            loss = loss + (logps * weight[id(completion)]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    sampled = np.concatenate([c.logps for g in groups for c in g.completions])
    plain = torch.cat(theirs).detach()
    learner, gradient = _learner(policy, groups, plain, weight, own)
    return Verdict(
        path_of(policy),
        policy.general_reason or "",
        difference(torch.from_numpy(sampled), plain), learner, gradient,
    )  # fmt: skip


def path_of(policy: Policy) -> str:
    if policy.general_reason is not None:
        return "uncached" if policy.check.decoding is Decoding.COMPLETE else "general"
    description = None if policy.check.own_head else describe(policy.model)
    is_fast = isinstance(description, DecoderDescription) and FusedBackbone.supports(policy.model, description)
    return "fast" if is_fast else "attention"


def _learner(
    policy: Policy, groups: list[Group], plain: Tensor, weight: dict[int, Tensor], own: PreTrainedModel
) -> tuple[float, float]:
    """(`difference` of log-probs, relative error of the gradient)."""
    completions = [c for g in groups for c in g.completions]
    keys = iter(range(len(completions)))
    packed = [
        PrefixGroup(g.prompt_ids, tuple(c.token_ids for c in g.completions), tuple(next(keys) for _ in g.completions))
        for g in groups
    ]
    pack = build_pack(packed, policy.device)
    assert model_flops(policy, [pack], forward=1, backward=1) > 0, "a metric of every update"
    assert layers_to_checkpoint(policy, pack.tokens, free=0) > 0, "how much is saved for the backward pass"
    assert transient_bytes(policy, pack.tokens) > 0
    logps, _ = policy.pack_logps(pack)
    (logps * torch.cat([weight[id(c)] for c in completions])).sum().backward()  # type: ignore[no-untyped-call]
    theirs = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    ours = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    error = sum(float((ours.get(name, torch.zeros(())) - grad).square().sum()) for name, grad in theirs.items())
    size = sum(float(grad.square().sum()) for grad in theirs.values())
    return difference(logps.detach(), plain), (error / max(size, SATURATED)) ** 0.5


def build(family: str) -> PreTrainedModel | None:
    """None for families without a tiny text decoder: encoders of several inputs, and models whose sizes can't be reduced."""
    try:
        model = tiny_model(family)
        with torch.no_grad():
            model(input_ids=torch.arange(3, 3 + WINDOW)[None], use_cache=False)
    except Exception:  # a config may refuse our sizes in any way
        return None
    return model


def verdict_of(family: str) -> Verdict | None:
    """None for families that are not built."""
    model = build(family)
    assert (model is None) == (family in NOT_BUILT)
    if model is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judge(model)


def check(family: str) -> None:
    verdict = verdict_of(family)
    if verdict is None:
        assert family not in family_paths()
        return
    assert verdict.sampler < 1e-5, verdict
    assert verdict.learner < 1e-5, verdict
    assert verdict.gradient < 1e-4, verdict
    assert verdict.path == family_paths()[family].path, "run python -m tests.models.test_every_family"


@pytest.mark.parametrize("family", [f for f in families() if zlib.crc32(f.encode()) % 3 == 0])
def test_a_family_is_right_or_refused(family: str) -> None:
    check(family)


def test_the_table_lists_the_families_of_the_installed_transformers() -> None:
    assert set(family_paths()) == set(families()) - NOT_BUILT
    assert sum(family.path == "refused" for family in family_paths().values()) <= 10


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in families() if zlib.crc32(f.encode()) % 3 != 0])
def test_all_other_families_are_right_or_refused(family: str) -> None:
    check(family)


def write_table() -> None:
    rows = []
    for family in families():
        verdict = verdict_of(family)
        if verdict is not None:
            rows.append(f"{family}\t{verdict.path}\t{verdict.reason}\n")
    FAMILY_TABLE.write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    write_table()
