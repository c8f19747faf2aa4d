"""The judge reward with a served model: its own client, real HTTP, the native engine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from oncurve.models.loading.load import build_model, build_tokenizer
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import TinyModel
from oncurve.records import Prompt
from oncurve.rewards.mix import aspects_of
from oncurve.rewards.models.judge import JudgeOptions, JudgeReward
from tests.rewards.builders import group
from tests.serve.serving import MODEL, TEMPLATE, Endpoint, endpoint

PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
REPLY = '{"score":7}'


def judging_policy() -> Policy:
    """A small model trained to give one judge's reply to whatever answer it is shown."""
    tokenizer = build_tokenizer(PRINTABLE)
    shape = TinyModel(layers=2, width=48, heads=2, kv_heads=1, head_size=24, mlp_width=96, context=2048)
    policy = Policy(build_model(shape, tokenizer, 0), tokenizer)
    tokenizer.chat_template = TEMPLATE
    reply, rng = policy.encode_completion(REPLY), np.random.default_rng(0)
    judge = JudgeReward("judge", 1.0, JudgeOptions(model=MODEL, base_url="http://127.0.0.1:1/v1", cache=None))
    optimiser = torch.optim.AdamW(policy.model.parameters(), lr=1e-2)
    for _ in range(200):
        text = tokenizer.decode(rng.integers(7, len(tokenizer), rng.integers(1, 30)).tolist())
        messages = judge._request(Prompt("p", text="2+2?"), [text])["messages"]
        ids = policy.encode(Prompt("p", messages=tuple(messages)))
        pack = build_pack([PrefixGroup(ids, (reply,), (0,))], policy.device)
        loss = -policy.pack_logps(pack)[0].mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if loss < 0.02:
            break
    return policy


@pytest.fixture(scope="module")
def judge() -> Iterator[Endpoint]:
    with endpoint(judging_policy(), slots=4, limit=64) as server:
        yield server


def reward(served: Endpoint, **options: object) -> JudgeReward:
    values = {"model": MODEL, "base_url": f"{served.address}/v1", "cache": None, "retries": 0, "max_tokens": 48, **options}
    return JudgeReward("judge", 1.0, JudgeOptions.model_validate(values))


def test_a_served_model_judges(judge: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    aspects = aspects_of(reward(judge), group("4", "5", "I think it is 6", "seven", "8", "9", prompt="2+2?"))
    assert [(a.value, a.reason, a.failure) for a in aspects] == [(0.7, None, None)] * 6


def test_a_reply_in_the_wrong_format_is_a_failure_and_not_a_score(judge: Endpoint) -> None:
    """A rubric, which the model never learned; and a reply truncated before its JSON closes."""
    (rubric,) = aspects_of(reward(judge, mode="rubric", rubric={"clear": 1.0}), group("4", prompt="2+2?"))
    (truncated,) = aspects_of(reward(judge, max_tokens=5), group("4", prompt="2+2?"))
    assert rubric.value is None
    assert truncated.value is None
    assert "not the required JSON" in (truncated.failure or "")


def test_a_missing_judge_is_a_failure_too(judge: Endpoint) -> None:
    (aspect,) = aspects_of(reward(judge, model="other"), group("4", prompt="2+2?"))
    assert aspect.value is None
    assert "there is no model 'other' here" in (aspect.failure or "")
