"""The policy: a transformers model and its tokenizer, as sampler and learner use them. Both share one set of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oncurve import kernels
from oncurve.errors import ModelError
from oncurve.models import experts, general_path, lora, recurrent_layers
from oncurve.models.attention_interface import AttentionContext
from oncurve.models.chat_template import PROBE, TEMPLATE_FIX, apply_chat_template, with_system_prompt
from oncurve.models.experts import RoutingPass
from oncurve.models.gradient_buffers import GradAccumulator
from oncurve.models.heads.lm_head import (
    Head,
    Truncate,
    Truncation,
    find_kept_tokens,
    head_chunk_tokens,
    own_logits,
    token_logps,
    truncated_logps,
)
from oncurve.models.llama.block_description import DecoderDescription, describe
from oncurve.models.llama.c_backbone import can_run_c
from oncurve.models.llama.fused import FusedBackbone, FusedWeights
from oncurve.models.packing import Pack, dummy_pack, predicting_states
from oncurve.models.self_check import FAILURES, SelfCheck, check_policy, has_same_states
from oncurve.records import Ints, Prompt, is_text

CHECK = "oncurve_check"
"""The attribute of a model under which its self-check travels with its copies."""


class Policy:
    """A causal language model split into backbone (with our attention) and chunked LM head, with its tokenizer.

    The model is checked when it is wrapped (`oncurve.models.self_check`). If our attention does not give the log-probs of the
    model's own plain forward, the model takes the general path. If the LM head as read from the config does not give the
    model's own logits, the model's own head is called. A model that neither path computes is refused. ``compiled`` allows the C
    functions on a CPU. ``fused`` allows the fast paths, which move the weights; a model that shares them with another one runs
    its own modules.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system_prompt: str | None = None,
        template_options: dict[str, Any] | None = None,
        compiled: bool = True,
        fused: bool = True,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.system_prompt, self.template_options = system_prompt, template_options or {}
        own_attention = model.config._attn_implementation
        model.eval()  # with dropout, sampler and learner would disagree; GRPO trains without it
        self.backbone = _find_backbone(model)
        with suppress(*FAILURES):  # the self-check says what is wrong with such a model
            recurrent_layers.attach(model, self.backbone)
        self.routed_layers = experts.attach(model, self.backbone)
        """The layers with experts; None if there are none, or none whose choice can be recorded."""
        self.eos_ids = _find_eos_ids(model, tokenizer)
        self.fast_backbone: FusedBackbone | None = None
        self.fused_weights: FusedWeights | None = None
        """What the decode step on a GPU reads if the learner runs the model's own modules."""
        self.module_reason = ""
        """Why learner and sampler run the model's own modules, if that is known."""
        self._accumulator: GradAccumulator | None = None
        self._known_roles: set[str] = set()
        self.warnings: tuple[str, ...] = ()
        """What a run's log says of this policy and the prompts that it was last checked with."""
        self.check = getattr(model, CHECK, None) or SelfCheck()
        """What the self-check found: which path the model takes, and how far that is from its own forward."""
        if self.check.tolerance == 0.0:  # not checked yet; a copy of an opened model carries its check along
            check_policy(self, own_attention)
            setattr(model, CHECK, self.check)
        description = describe(model) if fused and self.general_reason is None and not self.check.own_head else None
        if isinstance(description, str):
            self.module_reason = description
        elif description is not None:
            self.fast_backbone = _build_fast_backbone(self, description, compiled)
            if self.fast_backbone is None and kernels.can_run_kernels(model.device) and FusedWeights.can_fuse(description):
                self.fused_weights = FusedWeights(description)

    def copy(self) -> Policy:
        """A policy with a copy of the weights."""
        return Policy(
            copy.deepcopy(self.model), self.tokenizer, system_prompt=self.system_prompt,
            template_options=self.template_options, compiled=self.uses_c,
        )  # fmt: skip

    def shared_model(self) -> PreTrainedModel:
        """A copy of the model that uses the same parameters: an adapter can be added to one without changing the other."""
        return copy.deepcopy(self.model, {id(parameter): parameter for parameter in self.model.parameters()})

    @property
    def general_reason(self) -> str | None:
        """Why the model takes the general path (`oncurve.models.general_path`); None if it runs through our attention."""
        return self.check.general_reason

    @property
    def uses_c(self) -> bool:
        """Whether sampler and learner run the C functions in oncurve/models/llama."""
        return self.fast_backbone is not None and self.fast_backbone.uses_c and self.model.dtype == torch.float32

    @property
    def head(self) -> Head:
        """The LM head. Read from the model on each access, so a replaced or re-tied weight is picked up."""
        layer = self.model.get_output_embeddings()
        if self.check.own_head:
            return Head(layer.weight, own=partial(own_logits, self.model, self.backbone))
        config = self.model.config.get_text_config()
        scale = 1.0
        if getattr(config, "logits_scaling", None):  # Granite divides
            scale /= float(config.logits_scaling)
        if getattr(config, "logit_scale", None):  # Cohere multiplies
            scale *= float(config.logit_scale)
        return Head(layer.weight, getattr(layer, "bias", None), scale, getattr(config, "final_logit_softcapping", None))

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name, each once. With LoRA: the adapter's."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def max_positions(self) -> int:
        """Positions that the model can address.

        Rope types that switch frequencies by a sequence's length (Phi-3's `longrope`, dynamic NTK) end at the switch: beyond it
        a token's log-prob would depend on how long the sequence becomes after it.
        """
        config = self.model.config.get_text_config()
        limit = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
        rope = getattr(config, "rope_parameters", None) or {}
        by_layer_type = rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]
        for settings in by_layer_type:
            if settings.get("rope_type") in ("longrope", "dynamic"):
                switch = settings.get("original_max_position_embeddings") or limit
                limit = min(limit, int(getattr(config, "original_max_position_embeddings", None) or switch))
        return limit

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        """(query heads, key heads, size of a head) of the widest layer; zeros if no layer has attention heads (Mamba)."""
        return max(map(_attention_sizes, _layer_configs(self.model)), key=lambda sizes: sizes[0] * sizes[2])

    @property
    def mlp_width(self) -> int:
        """The width of the widest MLP."""
        widths = [getattr(config, "intermediate_size", None) for config in _layer_configs(self.model)]
        listed = [width for value in widths for width in (value if isinstance(value, list | tuple) else [value])]  # Gemma 3n
        return max((int(width) for width in listed if width), default=4 * self.model.config.get_text_config().hidden_size)

    @cached_property
    def experts_per_token(self) -> int:
        """E: the experts that a token takes, over all layers. Refuses a model whose experts can't be recorded and forced."""
        pack, routing = dummy_pack(self.device), RoutingPass(records=True)
        experts.check_replay(self.routed_layers, type(self.model).__name__, lambda: self.pack_hidden(pack))
        with torch.no_grad(), experts.routed(routing):
            self.pack_hidden(pack)
        return routing.chosen_NE.shape[1]

    def hidden(self, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext) -> Tensor:
        """The backbone's last hidden state, [batch, tokens, D]."""
        if self.fast_backbone is not None:
            return self.fast_backbone.hidden(input_ids, position_ids, attention)
        return run_backbone(self, input_ids, position_ids, attention)

    def pack_logps(self, pack: Pack, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(log-prob, entropy) of each predicted token of a pack, [M]."""
        return self.target_logps(self.pack_hidden(pack), pack.target_M, temperature)

    @torch.no_grad()
    def truncated_pack_logps(
        self, pack: Pack, temperature: float, log_mass_M: Tensor, truncate: Truncate
    ) -> tuple[Tensor, Truncation]:
        """(log-prob of each predicted token of a pack under the truncated distribution [M], the tokens that it keeps)."""
        hidden_MD = self.pack_hidden(pack)
        truncation = find_kept_tokens(self.head, hidden_MD, pack.target_M, temperature, log_mass_M, truncate)
        return truncated_logps(self.head, hidden_MD, pack.target_M, temperature, truncation)[0], truncation

    def pack_hidden(self, pack: Pack) -> Tensor:
        """The hidden state from which each token of a pack is predicted, [M, D]."""
        if self.general_reason is not None:
            return general_path.pack_hidden(self.backbone, pack)
        return predicting_states(self.hidden(pack.input_ids, pack.position_ids, pack.attention)[0], pack.predicted_from_M)

    def target_logps(self, hidden_MD: Tensor, target_M: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(log-prob, entropy) of each target, [M]."""
        return token_logps(self.head, hidden_MD, target_M, temperature, self._accumulator)

    is_sharded = False
    """Whether each rank holds a shard of every weight, even while all are gathered (see `ShardedPolicy`)."""
    layer_by_layer = False
    """Whether the sampler's forward passes gather sharded weights one layer at a time (see `ShardedPolicy`)."""

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """Within this context every weight is complete on this rank. Does nothing unless weights are sharded."""
        yield

    @contextmanager
    def for_sampling(self) -> Iterator[None]:
        """Within this context an engine may sample. Does nothing unless weights are sharded."""
        yield

    def full_state_dict(self, keep: bool) -> dict[str, Tensor] | None:
        """All weights, gathered from their shards: a collective, whose result is kept on ranks with ``keep``.

        None if weights are not sharded: they are in the model.
        """
        return None

    @property
    def head_chunk_tokens(self) -> int:
        """Tokens whose logits the head holds at once. A pack with no more tokens can keep its logits for the backward pass."""
        return head_chunk_tokens(self.head.weight_VD)

    @contextmanager
    def accumulate_into(self, accumulator: GradAccumulator | None) -> Iterator[None]:
        """Within this context the fast paths add gradients to the accumulator; all other gradients go to autograd."""
        self._accumulator = accumulator
        if self.fast_backbone is not None:
            self.fast_backbone.accumulator = accumulator
        try:
            yield
        finally:
            self._accumulator = None
            if self.fast_backbone is not None:
                self.fast_backbone.accumulator = None

    def encode(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> Ints:
        """A prompt as token ids: text unchanged, messages through the chat template, which gets the schemas of ``tools``."""
        if not is_text(prompt.shown):
            raise ModelError(
                prompt.id, "half of a character", because="a lone surrogate such as \\ud83d encodes no character",
                fix="correct the text: it was split inside a character",
            )  # fmt: skip
        if prompt.messages is None:
            ids = self.tokenizer(prompt.text or "", add_special_tokens=True)["input_ids"]
            if ids and ids[-1] in self.eos_ids and not (prompt.text or "").endswith(str(self.tokenizer.eos_token)):
                ids = ids[:-1]  # some tokenizers append an end token to every text; a prompt must stay open
        else:
            ids = self._encode_messages(prompt, tools)
        if not len(ids):
            raise ModelError(
                prompt.id, "a prompt with no tokens", because="the model has nothing to continue", fix="remove empty prompts"
            )
        return np.asarray(ids, np.int64)

    def _encode_messages(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise ModelError(
                prompt.id,
                "messages for a model without a chat template",
                because="the tokenizer does not define how roles are written",
                fix="use a chat model (for the built-in one, --set model.tiny.chat=true), or plain-text prompts: "
                "--set task.chat=false, and in a file texts instead of lists of messages",
            )
        messages = with_system_prompt(self, prompt.messages or ())
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **self.template_options}
        shown = tools or prompt.tools
        given = {"tools": [dict(tool) for tool in shown]} if shown else {}
        out = apply_chat_template(self.tokenizer, messages, prompt.id, **options | given)
        self._check_roles(messages, prompt.id, self.template_options | given)
        ids: list[int] = out["input_ids"]
        return ids

    def _check_roles(self, messages: Sequence[dict[str, Any]], where: str, options: Mapping[str, Any]) -> None:
        """Some templates silently drop messages of a role they do not know, so each role is tried once with a probe text."""
        for index, role in enumerate(m["role"] for m in messages):
            if role in self._known_roles:
                continue
            probed = [{**m, "content": PROBE} if i == index else m for i, m in enumerate(messages)]
            if PROBE not in str(apply_chat_template(self.tokenizer, probed, where, tokenize=False, **options)):
                raise ModelError(
                    where,
                    f"a message of role '{role}'",
                    because="the model's chat template silently drops it",
                    fix=TEMPLATE_FIX,
                )
            self._known_roles.add(role)

    def encode_completion(self, text: str) -> Ints:
        """A demonstration's completion as token ids, with the end token."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray([*ids, self.eos_ids[0]], np.int64)

    @cached_property
    def special_ids(self) -> Ints:
        """The ids of special tokens, which `decode` leaves out."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {*getattr(self.tokenizer, "all_special_ids", ()), *(i for i, token in added.items() if token.special)}
        return np.array(sorted(special), np.int64)

    def decode(self, token_ids: Ints) -> str:
        """The text of a completion, without its special tokens."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def decode_all(self, completions: Sequence[Ints]) -> list[str]:
        """``decode`` for many completions; a fast (Rust) tokenizer decodes them on all cores."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            return [self.decode(ids) for ids in completions]
        texts: list[str] = backend.decode_batch([ids.tolist() for ids in completions], skip_special_tokens=True)
        return texts

    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write model and tokenizer in Hugging Face format, with any adapter merged, so transformers and vLLM can load it."""
        self.merged_model().save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)

    def merge_adapter(self) -> Policy:
        """The policy with its adapter merged into its weights, in place; this one can't be used any more."""
        lora.merge(self.model)
        return Policy(
            self.model, self.tokenizer, system_prompt=self.system_prompt, template_options=self.template_options,
            compiled=self.uses_c,
        )  # fmt: skip

    def merged_model(self) -> Any:
        """The model itself; if it has an adapter, a copy on the CPU with the adapter merged into its weights."""
        return lora.merge_copy(self.model) if lora.is_attached(self.model) else self.model


def run_backbone(policy: Policy, input_ids: Tensor, position_ids: Tensor, attention: AttentionContext) -> Tensor:
    """The last hidden state by transformers' own modules with our attention, [batch, tokens, D]."""
    if policy.general_reason is not None:  # its layers would ignore the context and mix the completions of a pack
        raise ModelError(
            type(policy.model).__name__,
            "a pass through our attention",
            because=f"the model takes the general path ({policy.general_reason})",
            fix="use another stage than trpo, or another model family",
        )
    with recurrent_layers.running_in(attention):
        out = policy.backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    hidden: Tensor = out.last_hidden_state
    return hidden


def _find_backbone(model: PreTrainedModel) -> nn.Module:
    """The module between token ids and the head. In a few models it has another name than the base class says (Llama 4)."""
    backbone: nn.Module = model.base_model
    if backbone is model:
        backbone = getattr(model, "model", model)
    if backbone is model or not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ModelError(
            type(model).__name__,
            "a model without a backbone and a linear LM head",
            because="sampler and learner run the two separately",
            fix="choose another model family; docs/models.md says which kinds work",
        )
    return backbone


def _find_eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a turn: the tokenizer's first, then those of the generation config."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    others = configured if isinstance(configured, list) else [configured]
    ids = dict.fromkeys(i for i in [tokenizer.eos_token_id, *others] if i is not None)
    if not ids:
        raise ModelError(
            type(model).__name__,
            "no end token",
            because="a completion could never end",
            fix="set eos_token in the tokenizer's config",
        )
    return tuple(ids)


@torch.no_grad()
def _build_fast_backbone(policy: Policy, description: DecoderDescription, compiled: bool) -> FusedBackbone | None:
    """The fast path for this model and device. None if there is none, or if its hidden states differ from the model's on a test
    input of a few tokens."""
    model = policy.model
    fast: FusedBackbone | None = None
    if kernels.can_run_kernels(model.device):
        from oncurve.models.llama.cuda_backbone import CudaBackbone  # needs Triton

        if CudaBackbone.supports(model, description):
            fast = CudaBackbone(model, description)
    elif model.device.type == "cpu" and FusedBackbone.supports(model, description):
        fast = FusedBackbone(model, description)
        fast.uses_c = compiled and can_run_c(model, fast)
    if fast is None:
        return None
    if has_same_states(policy, fast.hidden):
        return fast
    policy.module_reason = "the fast path differs from them on a few tokens"
    return None


def dummy_passes(policy: Policy, passes: int, forward: Callable[[Pack], object] | None = None) -> None:
    """Run ``passes`` dummy passes.

    Under FSDP every forward is a collective, so a rank with fewer packs runs empty ones to stay in step. ``forward`` is the
    pass that the other ranks run; None means forward and backward, here with a gradient of 0.
    """
    for _ in range(passes):
        pack = dummy_pack(policy.device)
        if forward is not None:
            forward(pack)
        else:
            (0.0 * policy.pack_logps(pack)[0].sum()).backward()  # type: ignore[no-untyped-call]


def _layer_configs(model: PreTrainedModel) -> Sequence[Any]:
    """A config for each layer if layers differ (Gemma 4), else the model's only config."""
    config = model.config.get_text_config()
    return config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]


def _attention_sizes(config: Any) -> tuple[int, int, int]:
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    if not heads:
        return 0, 0, 0
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return heads, key_heads, int(getattr(config, "head_dim", None) or config.hidden_size // heads)
