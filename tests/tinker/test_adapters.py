"""Losses, log-probs, gradients, updates and samples against plain torch and transformers' own forward."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
from oncurve.tinker.adapters import (
    AdamSettings,
    AdapterHost,
    AdapterShape,
    RefusedRequest,
    SamplePrompt,
    SampleSettings,
    TrainedAdapter,
)
from oncurve.tinker.losses import LOSSES
from oncurve.tinker.protobuf import Datum
from tests.models.architectures import make_model, tokenizer

SHAPES = {
    "everything": AdapterShape(3),
    "no head": AdapterShape(4, head=False),
    "head": AdapterShape(2, attention=False, mlp=False),
    "attention": AdapterShape(2, mlp=False, head=False),
}
CONFIG: Mapping[str, Mapping[str, float]] = {
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_high_threshold": 1.5},
}
ADAM = AdamSettings(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5)


def make_host(name: str = "qwen3") -> AdapterHost:
    return AdapterHost(Policy(make_model(name), tokenizer()), name)


def new_adapter(host: AdapterHost, shape: AdapterShape) -> TrainedAdapter:
    """An adapter whose B is not 0."""
    adapter, dice = host.create(shape, seed=0), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.parameters.values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=dice))
    return adapter


def make_data(loss: str, lengths: tuple[int, ...] = (7, 30, 1)) -> list[Datum]:
    dice, data = np.random.default_rng(0), []
    for length in lengths:
        inputs = {"target_tokens": dice.integers(3, 40, length)}
        for name in LOSSES[loss].inputs:
            inputs[name] = dice.normal(size=length).astype(np.float32)
        if "logprobs" in inputs:
            inputs["logprobs"] = (-3 + inputs["logprobs"]).astype(np.float32)
        if "sequence_ratio_mask" in inputs:
            inputs["sequence_ratio_mask"] = (np.arange(length) % 3 == 0).astype(np.float32)
        data.append(Datum(dice.integers(3, 40, length), inputs))
    return data


@lru_cache
def plain_model(name: str) -> PreTrainedModel:
    return make_model(name).double()


def plain_logps(name: str, shape: AdapterShape, lora: Mapping[str, Tensor], token_ids: np.ndarray) -> Tensor:
    """The log-probs of every token after each of these, [N, V], by transformers' own model in float64, with W + s·B·A in place
    of each adapted W."""
    model = plain_model(name)
    head, weights = model.get_output_embeddings().weight, dict(model.named_parameters())
    for key in [key for key in lora if ".lora_A." in key]:
        layer = key.partition(".lora_A.")[0]
        delta = 32 / shape.rank * lora[key.replace(".lora_A.", ".lora_B.")] @ lora[key]
        if layer == "lm_head":
            head = head + delta
        else:
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + delta
    backbone = {key.removeprefix("model."): value for key, value in weights.items() if key.startswith("model.")}
    hidden = functional_call(model.model, backbone, (torch.from_numpy(token_ids)[None],)).last_hidden_state[0]
    logps: Tensor = (hidden @ head.T).log_softmax(-1)
    return logps


def plain_loss(name: str, logps: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Each loss token by token, as its paper writes it."""
    if name == "cross_entropy":
        return -torch.stack([w * logp for w, logp in zip(inputs["weights"], logps, strict=True)]).sum()
    q, advantages, total = inputs["logprobs"], inputs["advantages"], torch.zeros((), dtype=logps.dtype)
    low, high = {"ppo": (0.8, 1.2), "cispo": (0.0, 1.5), "gspo": (0.9, 1.1)}.get(name, (0.0, 0.0))
    marked = [t for t in range(len(q)) if "sequence_ratio_mask" in inputs and inputs["sequence_ratio_mask"][t]]
    for t in range(len(q)):
        ratio, advantage = torch.exp(logps[t] - q[t]), advantages[t]
        if name == "gspo":
            mean = sum((logps[i] - q[i]).item() for i in marked) / len(marked)
            ratio = float(np.exp(mean)) * torch.exp(logps[t] - logps[t].item())
        clipped = torch.clamp(ratio, low, high)
        total = (
            total
            - {
                "importance_sampling": ratio * advantage,
                "ppo": torch.minimum(ratio * advantage, clipped * advantage),
                "gspo": torch.minimum(ratio * advantage, clipped * advantage),
                "cispo": clipped.item() * logps[t] * advantage,
                "dro": logps[t] * advantage - 0.5 * 0.3 * (logps[t] - q[t]) ** 2,
            }[name]
        )
    return total


@pytest.mark.parametrize(
    ("name", "shape", "loss"),
    [("qwen3", "everything", loss) for loss in LOSSES]
    + [("qwen3", shape, "importance_sampling") for shape in ("no head", "head", "attention")]
    + [("olmo2", "everything", "ppo")],
)
def test_losses_log_probs_and_gradients_are_those_of_plain_torch(name: str, shape: str, loss: str) -> None:
    host, data = make_host(name), make_data(loss)
    adapter = new_adapter(host, SHAPES[shape])
    out = host.forward_backward(adapter, data, loss, CONFIG.get(loss, {}), forward_only=False)
    lora = {key: p.detach().double().requires_grad_() for key, p in adapter.parameters.items()}
    total = torch.zeros((), dtype=torch.float64)
    for datum, logps in zip(data, out.logps, strict=True):
        every = plain_logps(name, SHAPES[shape], lora, datum.token_ids)
        plain = every.gather(1, torch.from_numpy(datum.inputs["target_tokens"])[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(logps).double(), plain.detach(), rtol=1e-5, atol=1e-5)
        total = total + plain_loss(loss, plain, {key: torch.from_numpy(value).double() for key, value in datum.inputs.items()})
    assert out.loss == pytest.approx(total.item(), rel=1e-5)
    gradients = torch.autograd.grad(total, list(lora.values()))
    assert len(gradients) == len(adapter.parameters) > 1
    for parameter, gradient in zip(adapter.parameters.values(), gradients, strict=True):
        assert parameter.grad is not None
        scale = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(parameter.grad.double() / scale, gradient / scale, rtol=1e-5, atol=1e-5)


def test_gradients_of_several_requests_are_summed_and_updates_are_torch_adamw() -> None:
    host, data = make_host(), make_data("cross_entropy")
    once, twice = (new_adapter(host, SHAPES["everything"]) for _ in range(2))
    plain = {name: torch.nn.Parameter(p.detach().clone()) for name, p in once.parameters.items()}
    adam = torch.optim.AdamW(plain.values(), lr=1e-2, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
    for _ in range(3):
        host.forward_backward(once, data, "cross_entropy", {}, forward_only=False)
        for part in (data[:1], data[1:]):
            host.forward_backward(twice, part, "cross_entropy", {}, forward_only=False)
        host.forward_backward(once, data, "cross_entropy", {}, forward_only=True)  # adds no gradient
        for name, p in once.parameters.items():
            torch.testing.assert_close(p.grad, twice.parameters[name].grad, rtol=1e-4, atol=1e-4)
            plain[name].grad = p.grad.clone()  # type: ignore[union-attr]
            twice.parameters[name].grad = p.grad.clone()  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(plain.values(), 0.5)
        adam.step()
        assert once.update(ADAM)["grad_norm"] == pytest.approx(norm.item())
        twice.update(ADAM)
    for name, p in once.parameters.items():
        torch.testing.assert_close(p.detach(), plain[name].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [None, "everything", "no head"])
@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=9), Sampling(max_new_tokens=9, temperature=0.7, top_k=5)])
def test_sampled_and_prompt_log_probs_are_those_of_a_plain_forward(shape: str | None, sampling: Sampling) -> None:
    host = make_host()
    weights = None if shape is None else new_adapter(host, SHAPES[shape]).weights
    lora = {} if weights is None else {key: t.detach().double() for key, t in weights.tensors.items()}
    prompts = [SamplePrompt(np.array([5, 9, 20, 7]), 3, 3, 4, 2), SamplePrompt(np.array([8, 8]), 4, 1)]
    outputs = host.sample(weights, prompts, SampleSettings(sampling, 3, ends=()))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logps is not None
        assert np.isnan(output.prompt_logps[0])
        for sequence in output.sequences:
            ids, at = np.concatenate((prompt.token_ids, sequence.token_ids)), len(prompt.token_ids) - 1
            assert len(sequence.token_ids) == 9
            assert sequence.is_truncated
            every = plain_logps("qwen3", SHAPES[shape or "head"], lora, ids[:-1]).detach()
            of_prompt = every[torch.arange(at), torch.from_numpy(ids[1 : at + 1])].numpy()
            np.testing.assert_allclose(output.prompt_logps[1:], of_prompt, rtol=1e-5, atol=1e-5)
            tempered = (every[at:] / sampling.temperature).log_softmax(-1)
            if sampling.top_k:
                kept = tempered.topk(sampling.top_k).values[:, -1:]
                tempered = tempered.masked_fill(tempered < kept, -torch.inf).log_softmax(-1)
            expected = tempered.gather(1, torch.from_numpy(sequence.token_ids)[:, None])[:, 0].numpy()
            np.testing.assert_allclose(sequence.logps, expected, rtol=1e-4, atol=1e-4)
            if prompt.sample_top:
                assert sequence.top is not None
                np.testing.assert_allclose(sequence.top.logps, every[at:].topk(2).values.numpy(), rtol=1e-4, atol=1e-4)
        if prompt.prompt_top:
            assert output.prompt_top is not None
            assert output.prompt_top.token_ids.shape == (4, 4)
            np.testing.assert_allclose(output.prompt_top.logps[1:], every[:at].topk(4).values.numpy(), rtol=1e-4, atol=1e-4)


def test_stop_tokens_replace_the_end_token() -> None:
    host, prompt = make_host(), SamplePrompt(np.array([5, 9, 20]), seed=1)
    sampling = Sampling(max_new_tokens=40)
    (free,) = host.sample(None, [prompt], SampleSettings(sampling, 1, ends=()))
    stop = int(free.sequences[0].token_ids[6])
    (stopped,) = host.sample(None, [prompt], SampleSettings(sampling, 1, ends=(stop,)))
    first = free.sequences[0].token_ids.tolist().index(stop)
    assert stopped.sequences[0].token_ids.tolist() == free.sequences[0].token_ids[: first + 1].tolist()
    assert not stopped.sequences[0].is_truncated
    assert host.base.eos_ids == (tokenizer().eos_token_id,)


def test_what_a_loss_cannot_be_computed_of_is_refused_and_leaves_no_gradient() -> None:
    host = make_host()
    adapter, data = new_adapter(host, SHAPES["no head"]), make_data("ppo")

    def refuse(message: str, datum: Datum, loss: str = "ppo", config: Mapping[str, float | str] | None = None) -> None:
        with pytest.raises(RefusedRequest, match=message):
            host.forward_backward(adapter, [datum], loss, config or {}, forward_only=False)

    ids, inputs = data[0].token_ids, dict(data[0].inputs)
    for name in ("custom", "stable_reinforce", "nonsense"):
        refuse(f"no loss '{name}'", data[0], name)
    refuse("no setting of ppo", data[0], "ppo", {"beta": 0.1})
    refuse("no setting of ppo", data[0], "ppo", {"clip_low_threshold": "0.8"})
    refuse("needs loss_fn_config", data[0], "dro")
    refuse("takes target_tokens, weights", data[0], "cross_entropy")
    refuse("shape", Datum(ids, {**inputs, "advantages": np.zeros(3, np.float32)}))
    refuse("shape", Datum(ids, {**inputs, "target_tokens": np.zeros((7, 2), np.int64)}))
    refuse("not finite", Datum(ids, {**inputs, "advantages": np.full(7, np.nan, np.float32)}))
    vocabulary = len(tokenizer())
    refuse(f"token {vocabulary}", Datum(ids, {**inputs, "target_tokens": np.full(7, vocabulary)}))
    refuse("token -1", Datum(np.full(7, -1), inputs))
    refuse("no tokens", Datum(ids[:0], {}))
    with pytest.raises(RefusedRequest, match="without a gradient"):
        adapter.update(ADAM)
    before = {name: p.detach().clone() for name, p in adapter.parameters.items()}
    bad = Datum(ids, {**inputs, "logprobs": np.full(7, -200, np.float32), "advantages": np.full(7, -1, np.float32)})
    host.forward_backward(adapter, [bad], "importance_sampling", {}, forward_only=False)  # exp(200) overflows
    with pytest.raises(RefusedRequest, match="not made"):
        adapter.update(ADAM)
    assert all(torch.equal(p, before[name]) for name, p in adapter.parameters.items())
