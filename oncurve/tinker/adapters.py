"""LoRA adapters over one base model: the forward and backward passes, updates and samples of Tinker's requests.

A client's model is an adapter: a set of small float32 matrices with an optimiser. For each shape of adapters there is one
policy, a copy of the base model, into which the adapter of a request is loaded before the request is run. So any number of
adapters and of saved versions of them costs little memory, and learner and sampler read the same weights.

An adapter may include the LM head, which sampler and learner use as a plain matrix. Its policy has a head of its own, with the
weight W + s·B·A. If G is the gradient of that weight, the gradients of A and B are s·Bᵀ·G and s·G·Aᵀ.
"""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oncurve.engines.base import SampleKey, SampleRequest
from oncurve.engines.native.engine import NativeEngine
from oncurve.models import lora
from oncurve.models.heads.divergence_head import most_likely
from oncurve.models.packing import Pack, PrefixGroup, build_pack, split_by_budget
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import Lora
from oncurve.recipe.schema.sections import Engine as EngineSettings
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Floats, Ints, Prompt
from oncurve.tinker.losses import LOSSES, Loss
from oncurve.tinker.protobuf import Datum, SampledSequence, SampleOutput, TopLogps

ALPHA = 32.0
"""LoRA's α, whatever the rank, as in Tinker: the scale is α/rank."""
TOKENS_PER_PACK = 4096
"""Tokens that go through the model at once when it learns. A longer sequence goes alone."""


class RefusedRequest(Exception):
    """A request that can't be run, for a reason that its sender can fix."""


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Rank and targets of an adapter."""

    rank: int
    attention: bool = True
    mlp: bool = True
    head: bool = True

    @property
    def scale(self) -> float:
        return ALPHA / self.rank


@dataclass(eq=False)
class AdapterWeights:
    """The matrices of an adapter, by parameter name. ``version`` counts how often they have changed."""

    shape: AdapterShape
    tensors: Mapping[str, Tensor]
    version: int = 0

    def copy(self) -> AdapterWeights:
        return AdapterWeights(self.shape, {name: tensor.detach().clone() for name, tensor in self.tensors.items()})


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """The settings of one update, with the names of the SDK's `AdamParams`. ``grad_clip_norm`` 0: no clipping."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class TrainedAdapter:
    """An adapter in training: its weights, the gradient so far, and AdamW's moments."""

    def __init__(self, weights: AdapterWeights) -> None:
        self.parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in weights.tensors.items()}
        self.weights = AdapterWeights(weights.shape, self.parameters)
        self.has_gradient = False
        self.adam = self._new_adam()

    def _new_adam(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.parameters.values(), lr=0.0)

    @torch.no_grad()
    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            parameter = self.parameters[name]
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
        self.has_gradient = True

    def update(self, settings: AdamSettings) -> dict[str, float]:
        """One step of AdamW with the accumulated gradient, which is then cleared. Returns metrics."""
        if not self.has_gradient:
            raise RefusedRequest("optim_step without a gradient: forward_backward was not called before it, or failed")
        parameters, limit = list(self.parameters.values()), settings.grad_clip_norm or math.inf
        norm = float(nn.utils.clip_grad_norm_(parameters, limit))
        try:
            if not math.isfinite(norm):
                raise RefusedRequest(f"the gradient's norm is {norm}: the update is not made, and the gradient is dropped")
            for group in self.adam.param_groups:
                group |= {
                    "lr": settings.learning_rate, "betas": (settings.beta1, settings.beta2), "eps": settings.eps,
                    "weight_decay": settings.weight_decay,
                }  # fmt: skip
            self.adam.step()
        finally:
            self.adam.zero_grad()
            self.has_gradient = False
        self.weights.version += 1
        return {"grad_norm": norm, "learning_rate": settings.learning_rate}

    @torch.no_grad()
    def load(self, weights: AdapterWeights, moments: Mapping[str, Tensor] | None) -> None:
        """Loads saved weights and the optimiser's moments. Without moments, the optimiser starts from zero."""
        if weights.shape != self.weights.shape:
            raise RefusedRequest(f"the saved adapter has {weights.shape}, but this model has {self.weights.shape}")
        for name, parameter in self.parameters.items():
            parameter.copy_(weights.tensors[name])
        self.adam, self.has_gradient = self._new_adam(), False
        self.adam.zero_grad()
        for key, tensor in (moments or {}).items():
            name, _, moment = key.rpartition("/")
            parameter = self.parameters[name]
            self.adam.state[parameter][moment] = tensor.to(parameter.device if tensor.dim() else "cpu").clone()
        self.weights.version += 1

    def moments(self) -> dict[str, Tensor]:
        """AdamW's state, by parameter name and moment."""
        return {
            f"{name}/{moment}": tensor.detach()
            for name, parameter in self.parameters.items()
            for moment, tensor in self.adam.state[parameter].items()
        }


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The log-probs of each datum's targets, and the sum of the losses."""

    logps: tuple[Floats, ...]
    loss: float


class AdaptedPolicy:
    """A copy of the base model with an adapter of one shape, into which the weights of any such adapter can be loaded."""

    def __init__(self, base: Policy, shape: AdapterShape, source: str) -> None:
        self.shape, model = shape, copy.deepcopy(base.model)
        self._base_head: Tensor = base.model.get_output_embeddings().weight
        self._head = _untie_head(model) if shape.head else None
        head_name = next(name for name, module in base.model.named_modules() if module is base.model.get_output_embeddings())
        self._head_names = tuple(f"{head_name}.lora_{side}.default.weight" for side in "AB")
        targets = _target_layers(model, shape)
        if targets:
            lora.attach(model, Lora(rank=shape.rank, alpha=ALPHA, targets=targets), 0, source)
        else:
            model.requires_grad_(False)
        if self._head is not None:
            self._head.weight.requires_grad_(True)
        self.policy = Policy(model, base.tokenizer, compiled=base.uses_c)
        self.engine = NativeEngine(self.policy, EngineSettings(draft="off"))
        self._loaded: tuple[AdapterWeights, int] | None = None

    def new_weights(self, seed: int) -> AdapterWeights:
        """A new adapter, which changes nothing: every A as peft initialises it, every B 0."""
        dice = torch.Generator().manual_seed(seed)
        shapes = {name: tuple(p.shape) for name, p in lora.adapter_parameters(self.policy.model).items()}
        if self._head is not None:
            out_size, in_size = self._base_head.shape
            shapes |= dict(zip(self._head_names, ((self.shape.rank, in_size), (out_size, self.shape.rank)), strict=True))
        tensors = {name: torch.zeros(size, dtype=torch.float32) for name, size in shapes.items()}
        for name, tensor in tensors.items():
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=dice)
        return AdapterWeights(self.shape, {name: tensor.to(self.policy.device) for name, tensor in tensors.items()})

    @torch.no_grad()
    def load(self, weights: AdapterWeights) -> None:
        """The policy becomes the base model with this adapter."""
        if self._loaded is not None and self._loaded[0] is weights and self._loaded[1] == weights.version:
            return
        for name, parameter in lora.adapter_parameters(self.policy.model).items():
            parameter.copy_(weights.tensors[name])
        if self._head is not None:
            a, b = (weights.tensors[name] for name in self._head_names)
            self._head.weight.copy_(torch.addmm(self._base_head.float(), b, a, alpha=self.shape.scale))
        self._loaded = weights, weights.version

    def take_gradients(self, weights: AdapterWeights) -> dict[str, Tensor]:
        """The adapter's gradients of the passes since the last call, in float32."""
        gradients = {
            name: p.grad.float() for name, p in lora.adapter_parameters(self.policy.model).items() if p.grad is not None
        }
        if self._head is not None and self._head.weight.grad is not None:
            grad_VD = self._head.weight.grad.float()
            a, b = (weights.tensors[name].detach() for name in self._head_names)
            gradients |= dict(zip(self._head_names, (b.T @ grad_VD, grad_VD @ a.T), strict=True))
            for name in self._head_names:
                gradients[name] *= self.shape.scale
        self.policy.model.zero_grad(set_to_none=True)
        return gradients


def _untie_head(model: Any) -> nn.Linear:
    """Gives the model an LM head of its own, with the current weight."""
    tied = model.get_output_embeddings()
    head: nn.Linear = copy.deepcopy(tied)
    head.weight = nn.Parameter(tied.weight.detach().clone())
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = False
    return head


def _target_layers(model: Any, shape: AdapterShape) -> tuple[str, ...]:
    """The names of the linear layers that get an adapter: those in attention modules if ``shape.attention``, the others if
    ``shape.mlp``. Never the head."""
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    is_attention = {name: any("attn" in part or "attention" in part for part in name.split(".")) for name in names}
    return tuple(name for name in names if (shape.attention if is_attention[name] else shape.mlp))


def resolve_loss(name: str, config: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """A loss by name, and its settings. Refuses what is unknown."""
    if name not in LOSSES:
        raise RefusedRequest(f"there is no loss {name!r} here: choose from {', '.join(LOSSES)}")
    loss = LOSSES[name]
    settings = dict(loss.settings)
    for key, value in config.items():
        if key not in settings or not isinstance(value, float) or not math.isfinite(value):
            known = f"its settings are {', '.join(settings)}" if settings else "it has no settings"
            raise RefusedRequest(f"loss_fn_config[{key!r}] = {value!r} is no setting of {name}: {known}, which are numbers")
        settings[key] = value
    missing = [key for key, value in settings.items() if value is None]
    if missing:
        raise RefusedRequest(f"{name} needs loss_fn_config[{missing[0]!r}]: it has no default")
    return loss, {key: value for key, value in settings.items() if value is not None}


def check_datum(datum: Datum, index: int, name: str, loss: Loss, vocabulary: int, limit: int) -> None:
    """Refuses a datum for which the loss can't be computed."""
    length, wanted = len(datum.token_ids), {"target_tokens", *loss.inputs}
    where = f"datum {index}"
    if not length:
        raise RefusedRequest(f"{where} has no tokens")
    if length > limit:
        raise RefusedRequest(f"{where} has {length} tokens, but the model has only {limit} positions")
    if datum.inputs.keys() != wanted:
        have = ", ".join(sorted(datum.inputs)) or "nothing"
        raise RefusedRequest(f"{where} has the loss_fn_inputs {have}: {name} takes {', '.join(sorted(wanted))}")
    for key, array in datum.inputs.items():
        if array.shape != (length,):
            raise RefusedRequest(
                f"{where}: loss_fn_inputs[{key!r}] has shape {list(array.shape)}, but model_input has {length} tokens"
            )
        if not np.isfinite(array).all():
            raise RefusedRequest(f"{where}: loss_fn_inputs[{key!r}] has values that are not finite")
    targets = datum.inputs["target_tokens"]
    if targets.dtype.kind != "i":
        raise RefusedRequest(f"{where}: target_tokens must be int64")
    check_tokens(np.concatenate((datum.token_ids, targets)), vocabulary, where)
    if "sequence_ratio_mask" in wanted and not datum.inputs["sequence_ratio_mask"].any():
        raise RefusedRequest(f"{where}: sequence_ratio_mask marks no token, so there is no ratio")


def check_tokens(token_ids: Ints, vocabulary: int, where: str) -> None:
    wrong = token_ids[(token_ids < 0) | (token_ids >= vocabulary)]
    if len(wrong):
        raise RefusedRequest(f"{where} has token {wrong[0]}, but the model's vocabulary has {vocabulary} tokens")


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """Settings of requests that are sampled together. ``ends``: the tokens that end a completion; None: the model's own."""

    sampling: Sampling
    samples: int
    ends: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt to sample from. ``scored``: for how many of its last tokens log-probs are reported; None: for none.
    ``prompt_top`` and ``sample_top``: how many of the likeliest tokens to report."""

    token_ids: Ints
    seed: int | None = None
    scored: int | None = None
    prompt_top: int = 0
    sample_top: int = 0


class AdapterHost:
    """The base model, and the policies over it. Everything but `check_prompt` runs in one thread."""

    def __init__(self, base: Policy, source: str) -> None:
        if lora.is_attached(base.model):  # the model of a run that trained an adapter
            base = Policy(lora.merge_copy(base.model).to(base.device), base.tokenizer)
        self.base, self.source = base, source
        self._engine = NativeEngine(base, EngineSettings(draft="off"))
        self._adapted: dict[AdapterShape, AdaptedPolicy] = {}

    @property
    def vocabulary(self) -> int:
        return int(self.base.model.config.get_text_config().vocab_size)

    def create(self, shape: AdapterShape, seed: int) -> TrainedAdapter:
        return TrainedAdapter(self._policy_for(shape).new_weights(seed))

    def _policy_for(self, shape: AdapterShape) -> AdaptedPolicy:
        if shape not in self._adapted:
            self._adapted[shape] = AdaptedPolicy(self.base, shape, self.source)
        return self._adapted[shape]

    def forward_backward(
        self,
        adapter: TrainedAdapter,
        data: Sequence[Datum],
        loss_name: str,
        config: Mapping[str, float | str],
        forward_only: bool,
    ) -> ForwardOutput:
        """Log-probs and loss; the gradient is added to the adapter's, unless it is ``forward_only``."""
        loss, settings = resolve_loss(loss_name, config)
        for index, datum in enumerate(data):
            check_datum(datum, index, loss_name, loss, self.vocabulary, self.base.max_positions)
        if not data:
            raise RefusedRequest("there is no data")
        adapted = self._policy_for(adapter.weights.shape)
        adapted.load(adapter.weights)
        policy, total, logps = adapted.policy, 0.0, dict[int, Floats]()
        # Position i of a sequence predicts a target of its own, so the pack needs a prediction from the last token too.
        groups = [
            PrefixGroup(datum.token_ids[:1], (np.append(datum.token_ids[1:], 0),), (index,)) for index, datum in enumerate(data)
        ]
        try:
            with torch.set_grad_enabled(not forward_only):
                for part in split_by_budget(groups, TOKENS_PER_PACK):
                    pack = build_pack(part, policy.device)
                    pack_loss, of_datum = _pack_loss(policy, pack, data, loss, settings)
                    total += pack_loss.item()
                    logps |= of_datum
                    if not forward_only:
                        pack_loss.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            policy.model.zero_grad(set_to_none=True)
            raise
        if not forward_only:
            adapter.add_gradients(adapted.take_gradients(adapter.weights))
        return ForwardOutput(tuple(logps[index] for index in range(len(data))), total)

    def sample(
        self, weights: AdapterWeights | None, prompts: Sequence[SamplePrompt], settings: SampleSettings
    ) -> list[SampleOutput]:
        """Samples from each prompt, with an adapter or from the base model."""
        policy, engine = self.base, self._engine
        if weights is not None:
            adapted = self._policy_for(weights.shape)
            adapted.load(weights)
            policy, engine = adapted.policy, adapted.engine
        requests = [
            SampleRequest(
                Prompt("tinker", text=""), prompt.token_ids, settings.samples, settings.sampling,
                SampleKey(secrets.randbits(63) if prompt.seed is None else prompt.seed, 0),
            )
            for prompt in prompts
        ]  # fmt: skip
        with _ending_with(policy, settings.ends):
            groups, _ = engine.sample_until(requests, len(requests), version=0)
        outputs = []
        for index, prompt in enumerate(prompts):
            completions = groups[index].completions
            sequences = tuple(
                SampledSequence(
                    c.token_ids,
                    c.sampled_logps if settings.sampling.temperature else c.raw_logps,
                    c.is_truncated,
                    _top_of_completion(policy, prompt, c.token_ids) if prompt.sample_top else None,
                )
                for c in completions
            )
            outputs.append(SampleOutput(sequences, *_score_prompt(policy, prompt)))
        return outputs

    def check_prompt(self, prompt: SamplePrompt, new_tokens: int) -> None:
        """Refuses a prompt that can't be sampled from. Any thread may call it."""
        length, limit = len(prompt.token_ids), self.base.max_positions
        if not length:
            raise RefusedRequest("the prompt has no tokens")
        check_tokens(prompt.token_ids, self.vocabulary, "the prompt")
        if length + new_tokens > limit:
            raise RefusedRequest(
                f"a prompt of {length} tokens and max_tokens = {new_tokens} don't fit: the model has {limit} positions"
            )


def _pack_loss(
    policy: Policy, pack: Pack, data: Sequence[Datum], loss: Loss, settings: Mapping[str, float]
) -> tuple[Tensor, dict[int, Floats]]:
    """The sum of the losses of a pack's sequences, and the log-probs of their targets by index."""
    of_pack = [data[key] for key in pack.keys]

    def values(name: str) -> list[Tensor]:
        arrays = [datum.inputs[name] for datum in of_pack]
        dtype = torch.long if name == "target_tokens" else torch.float32
        return [torch.from_numpy(array).to(policy.device, dtype) for array in arrays]

    logps_M, _ = policy.target_logps(policy.pack_hidden(pack), torch.cat(values("target_tokens")))
    by_input = {name: values(name) for name in loss.inputs}
    logps = torch.split(logps_M, list(pack.lengths))
    losses = [
        loss.compute(logps_N, {name: tensors[row] for name, tensors in by_input.items()}, settings)
        for row, logps_N in enumerate(logps)
    ]
    found = {key: logps_N.detach().cpu().numpy().astype(np.float32) for key, logps_N in zip(pack.keys, logps, strict=True)}
    return torch.stack(losses).sum(), found


@contextmanager
def _ending_with(policy: Policy, ends: tuple[int, ...] | None) -> Iterator[None]:
    """Within this context completions end with these tokens, and not with the model's own end tokens."""
    own = policy.eos_ids
    policy.eos_ids = own if ends is None else ends
    try:
        yield
    finally:
        policy.eos_ids = own


@torch.inference_mode()
def score(policy: Policy, token_ids: Ints, top: int) -> tuple[Floats, TopLogps]:
    """The log-prob of each token after the first, at temperature 1, and the likeliest tokens in its place."""
    pack = build_pack([PrefixGroup(token_ids[:1], (token_ids[1:],), (0,))], policy.device)
    logps_M, top_MK, ids_MK = most_likely(policy.head, policy.pack_hidden(pack), pack.target_M, max(top, 1))
    return logps_M.cpu().numpy(), TopLogps(ids_MK.cpu().numpy()[:, :top], top_MK.cpu().numpy()[:, :top])


MASK_LOGP = -99999.0
"""The SDK's marker for a position without log-probs, together with token 0."""


def _score_prompt(policy: Policy, prompt: SamplePrompt) -> tuple[Floats | None, TopLogps | None]:
    if prompt.scored is None and not prompt.prompt_top:
        return None, None
    length, k = len(prompt.token_ids), prompt.prompt_top
    first = length - (length - 1 if prompt.scored is None else min(prompt.scored, length - 1))
    logps = np.full(length, np.nan, np.float32)
    ids, likely = np.zeros((length, k), np.int64), np.full((length, k), MASK_LOGP, np.float32)
    if length > 1:
        after, top = score(policy, prompt.token_ids, k)
        logps[first:] = after[first - 1 :]
        width = top.token_ids.shape[1]
        ids[first:, :width], likely[first:, :width] = top.token_ids[first - 1 :], top.logps[first - 1 :]
    return None if prompt.scored is None else logps, TopLogps(ids, likely) if k else None


def _top_of_completion(policy: Policy, prompt: SamplePrompt, token_ids: Ints) -> TopLogps:
    _, top = score(policy, np.concatenate((prompt.token_ids, token_ids)), prompt.sample_top)
    start = len(prompt.token_ids) - 1
    return TopLogps(top.token_ids[start:], top.logps[start:])
