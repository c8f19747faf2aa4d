"""The policy: a transformers model and its tokenizer, as sampler and learner use them. One set of weights for both.

Passes over nothing: where ranks share out weights, every pass is one of all, and one with fewer packs takes part so.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oncurve import kernels
from oncurve.errors import ModelError
from oncurve.models import attention_interface, lora
from oncurve.models.attention_interface import AttentionContext
from oncurve.models.chat_template import FIX, by_template
from oncurve.models.gradient_buffers import GradAccumulator
from oncurve.models.heads.lm_head import Head, head_chunk_tokens, token_logps
from oncurve.models.llama.c_backbone import can_run
from oncurve.models.llama.fused import FusedBackbone
from oncurve.models.packing import Pack, PrefixGroup, build_pack, dummy_pack, predicting_states
from oncurve.records import Ints, Prompt, is_text

MARK = "oncurve mark"
"""A text that no template writes by itself: where it is missing, a message was left out."""


class Policy:
    """A causal language model opened at its seams: backbone with our attention, LM head in chunks, prompts in, text out."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system_prompt: str | None = None,
        template_options: dict[str, Any] | None = None,
        compiled: bool = True,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.system_prompt, self.template_options = system_prompt, template_options or {}
        model.set_attn_implementation(attention_interface.NAME)
        model.eval()  # dropout would make sampler and learner disagree; GRPO trains without it
        self.backbone = _backbone(model)
        self.eos_ids = _end_ids(model, tokenizer)
        self.fast_backbone: FusedBackbone | None = None
        self._sums: GradAccumulator | None = None
        self._written_roles: set[str] = set()
        _check_attention(self)
        _check_head(self)
        self.fast_backbone = _faithful(_fast_path(model, compiled), self)

    def copy(self) -> Policy:
        """Another policy with the same weights in tensors of its own."""
        return Policy(
            copy.deepcopy(self.model), self.tokenizer, system_prompt=self.system_prompt,
            template_options=self.template_options, compiled=self.compiled,
        )  # fmt: skip

    @property
    def compiled(self) -> bool:
        """Whether it samples and learns by compiled functions."""
        return self.fast_backbone is not None and self.fast_backbone.compiled and self.model.dtype == torch.float32

    @property
    def head(self) -> Head:
        """The LM head as it is now: read anew each time, so that a changed or re-tied weight is seen."""
        layer = self.model.get_output_embeddings()
        config = self.model.config.get_text_config()
        scale = 1.0
        if getattr(config, "logits_scaling", None):  # Granite divides
            scale /= float(config.logits_scaling)
        if getattr(config, "logit_scale", None):  # Cohere multiplies
            scale *= float(config.logit_scale)
        return Head(layer.weight, getattr(layer, "bias", None), scale, getattr(config, "final_logit_softcapping", None))

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The weights that training moves, by name, each once; under LoRA the adapter's alone."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def max_positions(self) -> int:
        """Positions the model can address."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30)

    @property
    def key_heads(self) -> int:
        config = self.model.config.get_text_config()
        return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)

    @property
    def head_size(self) -> int:
        config = self.model.config.get_text_config()
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: AttentionContext) -> Tensor:
        """The backbone's last hidden state, [batch, tokens, D]."""
        if self.fast_backbone is not None:
            return self.fast_backbone.hidden(input_ids, position_ids, layout)
        out = self.backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False, layout=layout)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def pack_logps(self, pack: Pack, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(log-prob, entropy) of each predicted token of a pack, [M]."""
        return self.logps_of(self.pack_hidden(pack), pack.target_M, temperature)

    def pack_hidden(self, pack: Pack) -> Tensor:
        """The hidden state that each predicted token of a pack follows from, [M, D]."""
        return predicting_states(self.hidden(pack.input_ids, pack.position_ids, pack.attention)[0], pack.predicted_from_M)

    def logps_of(self, hidden_MD: Tensor, target_M: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(log-prob, entropy) of each target, [M]."""
        return token_logps(self.head, hidden_MD, target_M, temperature, self._sums)

    layer_by_layer = False
    """Whether a pass of the sampler gathers weights that ranks share out, each layer for its turn."""

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """Within, all weights are here. They always are, unless ranks share them out."""
        yield

    @contextmanager
    def for_sampling(self) -> Iterator[None]:
        """Within, an engine may sample. It always may, unless ranks share weights out."""
        yield

    def weights_to_save(self, keep: bool) -> dict[str, Tensor] | None:
        """All weights where ranks share them out: every rank takes part, some ``keep`` them. None: they are in the model."""
        return None

    @property
    def head_chunk_tokens(self) -> int:
        """Tokens whose logits the head holds at once, and keeps for its backward pass where there are no more."""
        return head_chunk_tokens(self.head.weight_VD)

    @contextmanager
    def accumulate_into(self, sums: GradAccumulator | None) -> Iterator[None]:
        """Within, what can add its gradient straight into the sums does so; the rest is left to autograd."""
        self._sums = sums
        if self.fast_backbone is not None:
            self.fast_backbone.accumulator = sums
        try:
            yield
        finally:
            self._sums = None
            if self.fast_backbone is not None:
                self.fast_backbone.accumulator = None

    def encode(self, prompt: Prompt) -> Ints:
        """A prompt as token ids: text as it is, messages through the chat template."""
        if not is_text(prompt.shown):
            raise ModelError(
                prompt.id, "half of a character", because="a lone surrogate such as \\ud83d stands for nothing",
                fix="mend the text: it was cut in the midst of a character",
            )  # fmt: skip
        if prompt.messages is None:
            ids = self.tokenizer(prompt.text or "", add_special_tokens=True)["input_ids"]
            if ids and ids[-1] in self.eos_ids and not (prompt.text or "").endswith(str(self.tokenizer.eos_token)):
                ids = ids[:-1]  # some tokenizers close every text; a prompt is open
        else:
            ids = self._templated(prompt)
        if not len(ids):
            raise ModelError(
                prompt.id, "a prompt with no tokens", because="there is nothing to go on from", fix="remove empty prompts"
            )
        return np.asarray(ids, np.int64)

    def _templated(self, prompt: Prompt) -> list[int]:
        if not self.tokenizer.chat_template:
            raise ModelError(
                prompt.id,
                "messages for a model without a chat template",
                because="the tokenizer does not say how to write roles",
                fix="take a chat model, or give plain text: a task's prompts by --set task.chat=false, a file's by its columns",
            )
        messages = [dict(m) for m in prompt.messages or ()]
        if self.system_prompt and not any(m["role"] == "system" for m in messages):
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        how = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **self.template_options}
        out = by_template(self.tokenizer, messages, prompt.id, **how)
        self._check_roles(messages, prompt.id)
        ids: list[int] = out["input_ids"]
        return ids

    def _check_roles(self, messages: Sequence[dict[str, Any]], where: str) -> None:
        """Some templates leave out a role that they do not know, without a word: each role is tried once, with a mark."""
        for place, role in enumerate(m["role"] for m in messages):
            if role in self._written_roles:
                continue
            marked = [{**m, "content": MARK} if i == place else m for i, m in enumerate(messages)]
            if MARK not in str(by_template(self.tokenizer, marked, where, tokenize=False, **self.template_options)):
                raise ModelError(
                    where,
                    f"a message of role '{role}'",
                    because="the model's chat template leaves it out without a word",
                    fix=FIX,
                )
            self._written_roles.add(role)

    def encode_completion(self, text: str) -> Ints:
        """A worked completion as token ids, closed by the end token."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray([*ids, self.eos_ids[0]], np.int64)

    def decode(self, token_ids: Ints) -> str:
        """The text of a completion, without its end token."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def decode_all(self, completions: Sequence[Ints]) -> list[str]:
        """As ``decode``, for many at once: where the tokenizer is a compiled one, on all cores."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            return [self.decode(ids) for ids in completions]
        texts: list[str] = backend.decode_batch([ids.tolist() for ids in completions], skip_special_tokens=True)
        return texts

    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """In Hugging Face format, an adapter merged into the weights: loads in transformers and vLLM as it is."""
        model = lora.merged_copy(self.model) if lora.is_on(self.model) else self.model
        model.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)


def _fast_path(model: PreTrainedModel, compiled: bool) -> FusedBackbone | None:
    if kernels.can_run_kernels(model.device):
        from oncurve.models.llama.cuda_backbone import CudaBackbone  # needs Triton

        return CudaBackbone.of(model)
    found = FusedBackbone.of(model)
    if found is not None:
        found.compiled = compiled and can_run(model)
    return found


def _backbone(model: PreTrainedModel) -> nn.Module:
    backbone: nn.Module = model.base_model
    if backbone is model or not isinstance(model.get_output_embeddings(), nn.Linear):
        raise attention_interface.unsupported(type(model).__name__, "no separate backbone and linear LM head")
    return backbone


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a turn: the tokenizer's first, then those of the generation config."""
    named = getattr(model.generation_config, "eos_token_id", None)
    more = named if isinstance(named, list) else [named]
    ids = dict.fromkeys(i for i in [tokenizer.eos_token_id, *more] if i is not None)
    if not ids:
        raise ModelError(
            type(model).__name__,
            "no end token",
            because="a completion could never end",
            fix="set eos_token in the tokenizer's config",
        )
    return tuple(ids)


class _CountingLayout:
    """Passes attention on to a pack's own layout and counts the calls of each layer."""

    def __init__(self, inner: AttentionContext) -> None:
        self.inner = inner
        self.calls: Counter[int] = Counter()

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        self.calls[layer] += 1
        return self.inner.attend(layer, q, k, v, scale, window, softcap)


@torch.no_grad()
def _check_attention(policy: Policy) -> None:
    """Every layer must call our attention exactly once, or the model is refused.

    A layer that never calls it has its own attention or a recurrent state: its tokens would see the other completions of their
    pack when learning, and nothing of their past when sampling. One that calls it twice overwrites its own KV cache.
    """
    config = policy.model.config.get_text_config()
    if config._attn_implementation != attention_interface.NAME:
        raise attention_interface.unsupported(
            type(policy.model).__name__, "an implementation of its own, outside transformers' attention interface"
        )
    pack = _probe_pack(policy)
    layout = _CountingLayout(pack.attention)
    policy.backbone(input_ids=pack.input_ids, position_ids=pack.position_ids, use_cache=False, layout=layout)
    layers = range(int(config.num_hidden_layers))
    outside = [layer for layer in layers if not layout.calls[layer]]
    if outside:
        names = (
            "every layer"
            if len(outside) == len(layers)
            else f"{len(outside)} of {len(layers)} layers, the first of them {outside[0]}"
        )
        raise attention_interface.unsupported(
            type(policy.model).__name__,
            f"layers outside transformers' attention interface, or a recurrent state ({names})",
        )
    if any(count > 1 for count in layout.calls.values()) or set(layout.calls) - set(layers):
        raise attention_interface.unsupported(type(policy.model).__name__, "layers that attend more than once per token")


def _probe_pack(policy: Policy) -> Pack:
    ids = np.arange(3, dtype=np.int64) % policy.model.config.get_text_config().vocab_size
    return build_pack([PrefixGroup(ids, (np.zeros(1, np.int64),), (0,))], policy.device)


@torch.no_grad()
def _check_head(policy: Policy) -> None:
    """The head read from the config gives the model's own logits, or the model is refused: a hidden scale would mislead."""
    pack = _probe_pack(policy)
    hidden = policy.hidden(pack.input_ids, pack.position_ids, pack.attention)
    own = policy.model(
        input_ids=pack.input_ids, position_ids=pack.position_ids, use_cache=False, layout=pack.attention
    ).logits.float()
    ours = policy.head.logits(hidden)
    within = 1e-3 if hidden.dtype == torch.float32 else 2e-2  # the model scales and caps its logits in 16 bits, we in 32
    if not torch.allclose(own, ours, rtol=within, atol=within * float(own.abs().max()) + 1e-6):
        raise attention_interface.unsupported(type(policy.model).__name__, "an LM head with more than a scale and a soft cap")


@torch.no_grad()
def _faithful(fused: FusedBackbone | None, policy: Policy) -> FusedBackbone | None:
    """The fast path, if it agrees with the model's own modules on a few tokens."""
    if fused is None:
        return None
    ids = np.arange(7, dtype=np.int64) % policy.model.config.vocab_size
    pack = build_pack([PrefixGroup(ids, (ids[:3],), (0,))], policy.device)
    own = policy.hidden(pack.input_ids, pack.position_ids, pack.attention)
    ours = fused.hidden(pack.input_ids, pack.position_ids, pack.attention)
    agree = torch.allclose(
        own.float(), ours.float(), rtol=1e-3, atol=(1e-4 if own.dtype == torch.float32 else 5e-2) * float(own.abs().max())
    )
    return fused if agree else None


def dummy_passes(policy: Policy, passes: int, measure: Callable[[Pack], object] | None = None) -> None:
    """So many passes beside those of other ranks. ``measure`` is what these do; unset: there and back, with a gradient of 0."""
    for _ in range(passes):
        pack = dummy_pack(policy.device)
        if measure is not None:
            measure(pack)
        else:
            (0.0 * policy.pack_logps(pack)[0].sum()).backward()  # type: ignore[no-untyped-call]
