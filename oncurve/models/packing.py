"""Sequences into packs: [prompt | completion 1 | … | completion G], each completion seeing the prompt and itself.

A pack holds whole groups as far as the token budget allows; a group that is larger than the budget alone is split, its prompt
repeated. The gradient does not depend on the split. A completion's last token is never an input: nothing is predicted from
it.

Legend: ``N`` input tokens of a pack, ``M`` predicted tokens, ``R`` rows (completions), ``P`` prompts, ``A``/``C`` longest
prompt/completion in a pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oncurve import kernels
from oncurve.models.attention_interface import AttentionContext, causal_mask, soft_capped
from oncurve.records import Ints


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """A prompt and the completions that share it, as token ids; ``keys`` names each completion for the caller."""

    prompt_ids: Ints
    completion_ids: tuple[Ints, ...]
    keys: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + sum(max(len(c) - 1, 0) for c in self.completion_ids)


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch, ready to be forwarded.

    ``source_M`` is the input token from which predicted token m follows, ``row_M`` its completion within the pack,
    ``keys[row]`` the caller's name of that completion, whose predicted tokens lie together and in order.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention: AttentionContext
    predicted_from_M: Tensor
    target_M: Tensor
    row_M: Tensor
    keys: tuple[int, ...]
    lengths: tuple[int, ...]
    scores: int = 0
    """Pairs of query and key that attention looks at, in each head of each layer without a window."""

    @property
    def rows(self) -> int:
        return len(self.keys)

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]


def split_by_budget(bundles: Iterable[PrefixGroup], budget: int) -> list[list[PrefixGroup]]:
    """Bundles into packs of at most ``budget`` tokens, in order; a bundle above it is cut between completions."""
    packs: list[list[PrefixGroup]] = []
    room = 0
    for bundle in (part for whole in bundles for part in _cut(whole, budget)):
        if bundle.tokens > room or not packs:
            packs.append([])
            room = budget
        packs[-1].append(bundle)
        room -= bundle.tokens
    return packs


def _cut(bundle: PrefixGroup, budget: int) -> list[PrefixGroup]:
    parts: list[PrefixGroup] = []
    first, used = 0, len(bundle.prompt_ids)
    for i, ids in enumerate(bundle.completion_ids):
        cost = max(len(ids) - 1, 0)
        if i > first and used + cost > budget:
            parts.append(PrefixGroup(bundle.prompt_ids, bundle.completion_ids[first:i], bundle.keys[first:i]))
            first, used = i, len(bundle.prompt_ids)
        used += cost
    parts.append(PrefixGroup(bundle.prompt_ids, bundle.completion_ids[first:], bundle.keys[first:]))
    return parts


def dummy_pack(device: torch.device) -> Pack:
    """The smallest pack there is, for passes that a rank makes only because others do."""
    token = np.zeros(1, np.int64)
    return build_pack([PrefixGroup(token, (token,), (0,))], device)


def build_pack(bundles: Sequence[PrefixGroup], device: torch.device) -> Pack:
    """Lay the bundles end to end and note, for each predicted token, where it is predicted from."""
    ids: list[Ints] = []
    positions: list[Ints] = []
    sources: list[Ints] = []
    targets: list[Ints] = []
    prompts: list[tuple[int, int]] = []
    completions: list[tuple[int, int, int]] = []
    at = 0
    for p, bundle in enumerate(bundles):
        length = len(bundle.prompt_ids)
        ids.append(bundle.prompt_ids)
        positions.append(np.arange(length))
        prompts.append((at, length))
        last_of_prompt = at + length - 1
        at += length
        for c in bundle.completion_ids:
            fed = max(len(c) - 1, 0)
            ids.append(c[:fed])
            positions.append(np.arange(length, length + fed))
            sources.append(np.concatenate(([last_of_prompt], np.arange(at, at + fed)))[: len(c)])
            targets.append(c)
            completions.append((at, fed, p))
            at += fed
    lengths = tuple(len(t) for t in targets)

    def joined(parts: list[Ints]) -> Tensor:
        return to_device(np.concatenate(parts).astype(np.int64), device)

    position = joined(positions)
    return Pack(
        input_ids=joined(ids)[None],
        position_ids=position[None],
        attention=_layout(prompts, completions, position),
        predicted_from_M=joined(sources),
        target_M=joined(targets),
        row_M=to_device(np.repeat(np.arange(len(lengths)), lengths), device),
        keys=tuple(k for b in bundles for k in b.keys),
        lengths=lengths,
        scores=sum(n * (n + 1) // 2 for _, n in prompts) + sum(n * prompts[p][1] + n * (n + 1) // 2 for _, n, p in completions),
    )


def _layout(prompts: list[tuple[int, int]], completions: list[tuple[int, int, int]], position_N: Tensor) -> AttentionContext:
    if not kernels.can_run_kernels(position_N.device):
        return PackAttention(prompts, completions, position_N)
    from oncurve.models.pack_attention_cuda import CudaPackAttention  # needs Triton

    longest = max(prompts[p][1] + fed for _, fed, p in completions) if completions else max(n for _, n in prompts)
    return CudaPackAttention(prompts, completions, position_N, longest)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """To a GPU through pinned memory, so that the copy waits for nothing that the GPU is doing."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def predicting_states(hidden_ND: Tensor, source_M: Tensor) -> Tensor:
    """The hidden state that each predicted token of a pack follows from, [M, D].

    First tokens of a group's completions all follow from its prompt's last one, whose gradient is their sum. On a CPU the
    derivative of indexing adds in the order in which threads come by, that of `index_select` in the index's own: the same
    bits each time. On a GPU it is the other way round.
    """
    return hidden_ND.index_select(0, source_M) if hidden_ND.device.type == "cpu" else hidden_ND[source_M]


class PackAttention:
    """Attention inside a pack. Linear layers see packed tokens; only here are they padded, by gathering.

    Prompts attend to themselves; completions attend to their prompt (one call for all completions of a group, the prompt's
    keys read once) and to themselves, and the two are merged by their log-sum-exp.
    """

    def __init__(self, prompts: list[tuple[int, int]], completions: list[tuple[int, int, int]], position_N: Tensor) -> None:
        device = position_N.device
        self.position_N = position_N
        fed_of: list[list[int]] = [[] for _ in prompts]
        for _, fed, p in completions:
            fed_of[p].append(fed)
        self.members = [(start, length, tuple(fed)) for (start, length), fed in zip(prompts, fed_of, strict=True)]
        P, A = len(prompts), max(length for _, length in prompts)
        C = max((fed for _, fed, _ in completions), default=0)
        members = np.bincount([p for _, _, p in completions], minlength=P)
        S = int(members.max())
        prompt_index = np.zeros((P, A), np.int64)
        prompt_real = np.zeros((P, A), bool)
        own_index = np.zeros((P, S, max(C, 1)), np.int64)
        own_real = np.zeros((P, S, max(C, 1)), bool)
        for p, (start, length) in enumerate(prompts):
            prompt_index[p, :length] = np.arange(start, start + length)
            prompt_real[p, :length] = True
        seat = np.zeros(P, np.int64)
        for start, fed, p in completions:
            own_index[p, seat[p], :fed] = np.arange(start, start + fed)
            own_real[p, seat[p], :fed] = True
            seat[p] += 1
        self.P, self.S, self.A, self.C = P, S, A, C
        self.prompt_index = torch.from_numpy(prompt_index).to(device)
        self.prompt_real = torch.from_numpy(prompt_real).to(device)
        self.own_index = torch.from_numpy(own_index).to(device)
        self.own_real = torch.from_numpy(own_real).to(device)
        # Where each packed token lies in [prompts padded, completions padded]: the way back needs no scatter.
        back = np.zeros(len(position_N), np.int64)
        back[prompt_index[prompt_real]] = np.flatnonzero(prompt_real)
        if C:
            back[own_index[own_real]] = P * A + np.flatnonzero(own_real)
        self.back_N = torch.from_numpy(back).to(device)
        ragged = not bool(prompt_real.all())
        self.prompt_bias = torch.where(self.prompt_real, 0.0, -torch.inf)[:, None, None, :] if ragged else None

    def prompt_bias_as(self, dtype: torch.dtype) -> Tensor | None:
        """The flash kernel reads its mask's memory as numbers of the queries' own type."""
        return None if self.prompt_bias is None else self.prompt_bias.to(dtype)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        plain = softcap is None and (window is None or window >= int(self.position_N.max()) + 1)
        if plain and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
            out: Tensor = _SharedPromptFlash.apply(q, k, v, self, scale)  # type: ignore[no-untyped-call]
            return out
        return self._by_scores(q, k, v, scale, window, softcap)

    def _by_scores(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """The generic path: padded scores in full, for windows, soft caps, and devices without such a flash kernel."""
        rep = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        position, prompt, own = self.position_N, self.prompt_index, self.own_index.flatten(1)
        # [P, H, A + S·C, d]: the prompt and all of its completions side by side.
        index = torch.cat((prompt, own), 1) if self.C else prompt
        real = torch.cat((self.prompt_real, self.own_real.flatten(1)), 1) if self.C else self.prompt_real
        seat = torch.cat((torch.full((self.A,), -1), torch.arange(self.S).repeat_interleave(self.own_index.shape[2]))).to(
            index.device
        )
        seat = seat[: index.shape[1]]
        at = position[index]
        mask = causal_mask(at[:, :, None], at[:, None, :], window) & real[:, None, :]
        mask = mask & ((seat[None, :] == seat[:, None]) | (seat[None, :] == -1))
        mask = mask | (
            ~real[:, :, None]
        )  # a padded query attends to anything, so that its softmax is finite; it is dropped below
        padded_q, padded_k, padded_v = (x[0][:, index].transpose(0, 1) for x in (q, k, v))
        scores = soft_capped(padded_q @ padded_k.transpose(-1, -2) * scale, softcap)
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1, dtype=torch.float32).to(padded_v.dtype)
        out = (weights @ padded_v).transpose(1, 2)  # [P, A + S·C, H, d]
        flat = torch.cat((out[:, : self.A].flatten(0, 1), out[:, self.A :].flatten(0, 1)))
        return flat[self.back_N][None]


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _SharedPromptFlash(torch.autograd.Function):
    """Prompt-to-prompt, completion-to-prompt and completion-to-itself by torch's CPU flash kernel, merged exactly.

    Two partial softmaxes with log-sum-exps l₁, l₂ merge into l = log(e^l₁ + e^l₂), out = Σ e^(lᵢ − l) outᵢ. The backward of
    each part needs only the merged out and l: P = exp(s − l) and δ = Σ dout·out are those of the whole softmax.
    """

    @staticmethod
    def forward(ctx, q, k, v, layout: PackAttention, scale: float):  # type: ignore[no-untyped-def]
        P, S, C = layout.P, layout.S, layout.C
        q_N, k_N, v_N = (x[0].transpose(0, 1) for x in (q, k, v))  # [N, heads, d]

        def prompts(x: Tensor) -> Tensor:
            return x[layout.prompt_index].transpose(1, 2)  # [P, heads, A, d]

        def completions(x: Tensor) -> Tensor:
            return x[layout.own_index.flatten(0, 1)].transpose(1, 2)  # [P·S, heads, C, d]

        qp, kp, vp = prompts(q_N), prompts(k_N), prompts(v_N)
        out_p, lse_p = _flash(qp, kp, vp, 0.0, True, scale=scale)
        flat = [out_p.transpose(1, 2).flatten(0, 1)]
        saved = [qp, kp, vp, out_p, lse_p]
        if C:
            H, d = q.shape[1], q.shape[3]
            qc, kc, vc = completions(q_N), completions(k_N), completions(v_N)
            out_own, lse_own = _flash(qc, kc, vc, 0.0, True, scale=scale)
            q_to_prompt = qc.transpose(1, 2).reshape(P, S * C, H, d).transpose(1, 2)  # [P, H, S·C, d]
            out_pre, lse_pre = _flash(q_to_prompt, kp, vp, 0.0, False, attn_mask=layout.prompt_bias_as(q.dtype), scale=scale)
            out_pre = out_pre.transpose(1, 2).reshape(P * S, C, H, d)
            lse_pre = lse_pre.transpose(1, 2).reshape(P * S, C, H)
            lse_own = lse_own.transpose(1, 2)
            lse = torch.logaddexp(lse_pre, lse_own)
            out_c = (
                out_pre * torch.exp(lse_pre - lse)[..., None] + out_own.transpose(1, 2) * torch.exp(lse_own - lse)[..., None]
            )
            out_c = out_c.to(q.dtype)  # the log-sum-exps of bfloat16 are float32
            flat.append(out_c.flatten(0, 1))
            saved += [qc, kc, vc, out_c, lse]
        ctx.save_for_backward(*saved)
        ctx.layout, ctx.scale = layout, scale
        return torch.cat(flat)[layout.back_N][None]

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        layout, scale = ctx.layout, ctx.scale
        P, S, C = layout.P, layout.S, layout.C
        qp, kp, vp, out_p, lse_p, *rest = ctx.saved_tensors
        grad_N = grad_out[0]
        d_out_p = (grad_N[layout.prompt_index] * layout.prompt_real[..., None, None]).transpose(1, 2)
        dq, dk, dv = _flash_backward(d_out_p, qp, kp, vp, out_p, lse_p, 0.0, True, scale=scale)
        parts_q, parts_k, parts_v = [_rows(dq)], [_rows(dk)], [_rows(dv)]
        if C:
            qc, kc, vc, out_c, lse = rest
            d_out_c = grad_N[layout.own_index.flatten(0, 1)] * layout.own_real.flatten(0, 1)[..., None, None]
            own_out, own_lse, own_grad = out_c.transpose(1, 2), lse.transpose(1, 2), d_out_c.transpose(1, 2)
            dq_c, dk_c, dv_c = _flash_backward(own_grad, qc, kc, vc, own_out, own_lse, 0.0, True, scale=scale)

            def by_group(x: Tensor) -> Tensor:
                return x.reshape(P, S * C, *x.shape[2:]).transpose(1, 2)

            dq_pre, dk_p, dv_p = _flash_backward(
                by_group(d_out_c), by_group(qc.transpose(1, 2)), kp, vp, by_group(out_c), by_group(lse), 0.0, False,
                attn_mask=layout.prompt_bias_as(qp.dtype), scale=scale,
            )  # fmt: skip
            parts_q.append(_rows(dq_c) + _rows(dq_pre))
            parts_k[0] = parts_k[0] + _rows(dk_p)
            parts_v[0] = parts_v[0] + _rows(dv_p)
            parts_k.append(_rows(dk_c))
            parts_v.append(_rows(dv_c))
        back = (torch.cat(parts)[layout.back_N].transpose(0, 1)[None] for parts in (parts_q, parts_k, parts_v))
        return (*back, None, None)


def _rows(x: Tensor) -> Tensor:
    """[batch, heads, tokens, d] as one row per token: [batch · tokens, heads, d]."""
    return x.transpose(1, 2).flatten(0, 1)
