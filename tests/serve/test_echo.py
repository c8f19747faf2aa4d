"""`echo`: the log-probs of a prompt's own tokens by the endpoint, and a teacher behind it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch

from oncurve.algos.divergences import support_divergence
from oncurve.errors import ModelError
from oncurve.models.loading.load import load_policy
from oncurve.recipe.schema.model import Model
from oncurve.serve.server import ServedModel
from oncurve.training.stages.distil import EndpointTeacher
from tests.serve.serving import MODEL, Endpoint, endpoint
from tests.serve.test_json_output import byte_tokenizer, random_policy
from tests.training.builders import PROMPTS, SMALL, apart, gradient, policy
from tests.training.stages.test_distil import distil_loop, mean_divergence
from tests.training.stages.test_ppo import doubled


@pytest.fixture(scope="module")
def served() -> Iterator[Endpoint]:
    teacher = policy(7)
    with torch.no_grad():
        teacher.model.get_output_embeddings().weight.mul_(8)
    with endpoint(teacher) as server:
        yield server


def own_logps(served: Endpoint, ids: list[int]) -> torch.Tensor:
    """The log-probs after each token but the last, by the model's plain forward in float64."""
    return doubled(served.policy.model)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].detach().log_softmax(-1)  # type: ignore[no-any-return]


def test_a_prompts_log_probs_are_the_models_own(served: Endpoint) -> None:
    prompts = ["12+34=46", "7"]
    reply = served.client().completions.create(model=MODEL, prompt=prompts, echo=True, logprobs=5, max_tokens=0)
    assert [choice.text for choice in reply.choices] == prompts
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (9, 0)
    logprobs: Any = reply.choices[0].logprobs
    assert "".join(logprobs.tokens) == prompts[0]
    assert logprobs.text_offset == list(range(8))
    expected = own_logps(served, logprobs.token_ids)
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    sampled = expected.gather(1, torch.tensor(logprobs.token_ids[1:])[:, None])[:, 0]
    assert logprobs.token_logprobs[1:] == pytest.approx(sampled.tolist(), abs=1e-4)
    for row, entries in zip(expected, logprobs.top_logprobs[1:], strict=True):
        assert sorted(entries.values(), reverse=True) == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)
    single: Any = reply.choices[1].logprobs
    assert single.token_logprobs == [None]


def test_offsets_are_those_in_the_text() -> None:
    """Of characters of several tokens too, and if tokens are returned as ids."""
    with endpoint(random_policy(byte_tokenizer())) as served, served.client() as client:
        for as_ids in (False, True):
            options: Any = {"echo": True, "logprobs": 0, "max_tokens": 0, "extra_body": {"return_tokens_as_token_ids": as_ids}}
            choice = client.completions.create(model=MODEL, prompt="o € k", **options).choices[0]
            assert choice.text == "o € k"
            assert choice.logprobs is not None
            assert choice.logprobs.text_offset == [0, 1, 2, 2, 2, 3, 4]


def test_a_client_that_leaves_ends_the_scoring(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    scored, score = list[int](), ServedModel.score

    def slow(self: ServedModel, prompt_ids: Any, top: int) -> Any:
        scored.append(len(prompt_ids))
        time.sleep(0.2)
        return score(self, prompt_ids, top)

    monkeypatch.setattr(ServedModel, "score", slow)
    with pytest.raises(openai.APITimeoutError):
        served.client().with_options(timeout=0.6).completions.create(
            model=MODEL, prompt=["1+1="] * 200, echo=True, logprobs=0, max_tokens=0
        )
    before = len(scored)
    time.sleep(1.2)
    assert len(scored) <= before + 2


def test_tokens_as_ids(served: Endpoint) -> None:
    body = {"return_tokens_as_token_ids": True}
    client = served.client()
    reply = client.completions.create(model=MODEL, prompt=[5, 6, 7], echo=True, logprobs=1, max_tokens=0, extra_body=body)
    logprobs: Any = reply.choices[0].logprobs
    assert logprobs.tokens == ["token_id:5", "token_id:6", "token_id:7"]
    best = own_logps(served, [5, 6, 7]).argmax(-1).tolist()
    assert [list(entries) for entries in logprobs.top_logprobs[1:]] == [[f"token_id:{i}"] for i in best]
    sampled = client.completions.create(model=MODEL, prompt="1", logprobs=0, max_tokens=3, extra_body=body).choices[0].logprobs
    assert sampled is not None
    assert all(token.startswith("token_id:") for token in sampled.tokens or [""])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_tokens": 0}, "generates nothing"),
        ({"echo": True, "max_tokens": 0}, "echo needs logprobs"),
        ({"echo": True, "logprobs": 1, "max_tokens": 4}, "max_tokens of 0"),
        ({"echo": True, "logprobs": 1, "max_tokens": 0, "n": 2}, "leave out stream and n"),
        ({"echo": True, "logprobs": 1, "max_tokens": 0, "prompt": "1" * 200}, "positions"),
    ],
)
def test_requests_that_are_refused(served: Endpoint, options: dict[str, Any], word: str) -> None:
    with pytest.raises(openai.BadRequestError, match=word):
        served.client().completions.create(**{"model": MODEL, "prompt": "1+1=", **options})


def teacher_settings(served: Endpoint, **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "base_url": f"{served.address}/v1", "retries": 0, **options}


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_an_endpoint_teaches(served: Endpoint, divergence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many likely tokens as there are tokens the divergence is the complete one; with fewer a lower bound of it."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    losses = {}
    for top in (19, 4):
        loop = distil_loop("-", task=PROMPTS, teacher=teacher_settings(served, top=top), divergence=divergence)
        report = loop.step(1)
        losses[top] = report.metrics["teacher_divergence"]
        gradients = gradient(loop.engine.policy.model)
        if top == 19:
            student, teacher = doubled(loop.engine.policy.model), doubled(served.policy.model)
            loss = mean_divergence(student, teacher, list(report.groups), divergence)
            loss.backward()  # type: ignore[no-untyped-call]
            assert losses[19] == pytest.approx(float(loss.detach()), rel=1e-4)
            assert apart(gradients.double(), gradient(student)) < 1e-3
    assert 0 < losses[4] < losses[19]


def test_an_endpoint_teaches_by_advantages(served: Endpoint) -> None:
    loop = distil_loop("-", teacher=teacher_settings(served, top=1), teach_by="advantage", objective="reinforce")
    (group, *_) = loop.step(1).groups
    completion = group.group.completions[0]
    prompt = group.group.prompt_ids.tolist()
    logps = own_logps(served, [*prompt, *completion.token_ids.tolist()])[len(prompt) - 1 :]
    theirs = logps.gather(1, torch.from_numpy(completion.token_ids)[:, None])[:, 0].numpy()
    np.testing.assert_allclose(group.advantages[0], theirs - completion.logps, atol=1e-4)


def test_a_teacher_with_another_vocabulary_is_found_out(served: Endpoint) -> None:
    other = load_policy(Model(tiny=SMALL), alphabet="9876543210+= ", seed=0)
    settings = distil_loop("-", teacher=teacher_settings(served)).distil.teacher
    EndpointTeacher(settings, served.policy, "distil.teacher").check(served.policy)
    with pytest.raises(ModelError, match="vocabulary"):
        EndpointTeacher(settings, other, "distil.teacher").check(other)


def test_an_endpoint_without_prompt_log_probs_is_found_out(served: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = distil_loop("-", teacher=teacher_settings(served)).distil.teacher
    teacher = EndpointTeacher(settings, served.policy, "distil.teacher")
    complete = teacher._request
    monkeypatch.setattr(teacher, "_request", lambda prompt: {**complete(prompt), "echo": False, "max_tokens": 1})
    with pytest.raises(ModelError, match="without log-probs of the prompt"):
        teacher.check(served.policy)


def test_a_bucket_for_all_other_tokens_is_a_lower_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(6, 12, generator=generator).log_softmax(-1) for _ in range(2))
    complete = support_divergence(student, teacher, torch.ones(6, 12, dtype=torch.bool), "reverse_kl", 0.5)
    for k in range(1, 12):
        valid = torch.arange(12) < k
        partial = support_divergence(student, teacher, valid.expand(6, 12), "reverse_kl", 0.5)
        assert (partial <= complete + 1e-5).all()
        assert (partial >= -1e-6).all()
