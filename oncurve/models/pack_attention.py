"""Attention within a pack on a CPU, or on a GPU without Triton: completions share their prompt's keys and values.

Local shape letters of a padded pack: ``A`` longest prompt, ``S`` most completions of a prompt, ``C`` longest completion.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from oncurve.models.attention_interface import ScoreRule, apply_softcap, causal_mask, softmax_with_sinks
from oncurve.models.recurrent_layers import RunLayer, recur_in_pack


class PackAttention:
    """Prompts attend to themselves; completions attend to their prompt and to themselves.

    ``prompts`` holds (start, length), ``completions`` (start, length, prompt index). Linear layers see packed tokens; only
    attention gathers them into padded tensors. All completions of a group attend to their prompt in one call, which reads the
    prompt's keys once, and the two partial softmaxes are merged by their log-sum-exps.
    """

    def __init__(self, prompts: list[tuple[int, int]], completions: list[tuple[int, int, int]], position_N: Tensor) -> None:
        device = position_N.device
        self.position_N = position_N
        self.groups = pack_groups(prompts, completions)
        P, A = len(prompts), max(length for _, length in prompts)
        C = max((length for _, length, _ in completions), default=0)
        S = max(len(lengths) for _, _, lengths in self.groups)
        prompt_index = np.zeros((P, A), np.int64)
        prompt_real = np.zeros((P, A), bool)
        completion_index = np.zeros((P, S, max(C, 1)), np.int64)
        completion_real = np.zeros((P, S, max(C, 1)), bool)
        for p, (start, length) in enumerate(prompts):
            prompt_index[p, :length] = np.arange(start, start + length)
            prompt_real[p, :length] = True
        next_slot = np.zeros(P, np.int64)
        for start, length, p in completions:
            completion_index[p, next_slot[p], :length] = np.arange(start, start + length)
            completion_real[p, next_slot[p], :length] = True
            next_slot[p] += 1
        self.P, self.S, self.A, self.C = P, S, A, C
        self.prompt_index = torch.from_numpy(prompt_index).to(device)
        self.prompt_real = torch.from_numpy(prompt_real).to(device)
        self.completion_index = torch.from_numpy(completion_index).to(device)
        self.completion_real = torch.from_numpy(completion_real).to(device)
        # Index of each packed token in [padded prompts, padded completions], so that unpadding is a gather and not a scatter.
        unpad = np.zeros(len(position_N), np.int64)
        unpad[prompt_index[prompt_real]] = np.flatnonzero(prompt_real)
        if C:
            unpad[completion_index[completion_real]] = P * A + np.flatnonzero(completion_real)
        self.unpad_N = torch.from_numpy(unpad).to(device)
        is_ragged = not bool(prompt_real.all())
        self.prompt_bias = torch.where(self.prompt_real, 0.0, -torch.inf)[:, None, None, :] if is_ragged else None

    def prompt_bias_as(self, dtype: torch.dtype) -> Tensor | None:
        """The padding mask in the queries' dtype, which the flash kernel expects without checking."""
        return None if self.prompt_bias is None else self.prompt_bias.to(dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        is_plain = rule.softcap is None and (rule.window is None or rule.window >= int(self.position_N.max()) + 1)
        if is_plain and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
            out: Tensor = _SharedPromptFlash.apply(q, k, v, rule.sinks_H, self, rule.scale)  # type: ignore[no-untyped-call]
            return out
        return self.attend_by_scores(q, k, v, rule)

    def recur(self, layer: int, hidden: Tensor, run: RunLayer) -> Tensor:
        return recur_in_pack(self.groups, hidden, run)

    def attend_by_scores(self, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        """The generic path, with all padded scores in memory: for windows, soft caps, and devices without the flash kernel."""
        rep = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        # [P, H, A + S·C, d]: a prompt and all of its completions in one row.
        index = torch.cat((self.prompt_index, self.completion_index.flatten(1)), 1) if self.C else self.prompt_index
        real = torch.cat((self.prompt_real, self.completion_real.flatten(1)), 1) if self.C else self.prompt_real
        slots = torch.arange(self.S).repeat_interleave(self.completion_index.shape[2])
        slot = torch.cat((torch.full((self.A,), -1), slots)).to(index.device)[: index.shape[1]]  # -1: the prompt
        position = self.position_N[index]
        mask = causal_mask(position[:, :, None], position[:, None, :], rule.window) & real[:, None, :]
        mask = mask & ((slot[None, :] == slot[:, None]) | (slot[None, :] == -1))
        mask = mask | ~real[:, :, None]  # padded queries attend to everything, so that their softmax is finite; dropped below
        padded_q, padded_k, padded_v = (x[0][:, index].transpose(0, 1) for x in (q, k, v))
        scores = apply_softcap(padded_q @ padded_k.transpose(-1, -2) * rule.scale, rule.softcap)
        sinks = None if rule.sinks_H is None else rule.sinks_H[:, None, None]
        weights = softmax_with_sinks(scores.masked_fill(~mask[:, None], -torch.inf), sinks).to(padded_v.dtype)
        out = (weights @ padded_v).transpose(1, 2)  # [P, A + S·C, H, d]
        flat = torch.cat((out[:, : self.A].flatten(0, 1), out[:, self.A :].flatten(0, 1)))
        return flat[self.unpad_N][None]


def pack_groups(
    prompts: Sequence[tuple[int, int]], completions: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Per group: first token, prompt length, completion lengths."""
    lengths_of: list[list[int]] = [[] for _ in prompts]
    for _, length, p in completions:
        lengths_of[p].append(length)
    return [(start, length, tuple(lengths)) for (start, length), lengths in zip(prompts, lengths_of, strict=True)]


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _SharedPromptFlash(torch.autograd.Function):
    """Prompt-to-prompt, completion-to-prompt and completion-to-itself by torch's CPU flash kernel, merged exactly.

    Two partial softmaxes with log-sum-exps l₁, l₂ merge into l = log(e^l₁ + e^l₂), out = Σ e^(lᵢ − l) outᵢ. The backward of
    each part needs only the merged out and l: P = exp(s − l) and δ = Σ dout·out are those of the complete softmax. A sink is
    one more part: l₂ is its score, its output is 0, and the score's gradient is −Σ exp(l₂ − l) δ.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks_H, pack: PackAttention, scale: float):  # type: ignore[no-untyped-def]
        P, S, C = pack.P, pack.S, pack.C
        q_N, k_N, v_N = (x[0].transpose(0, 1) for x in (q, k, v))  # [N, heads, d]

        def prompts(x: Tensor) -> Tensor:
            return x[pack.prompt_index].transpose(1, 2)  # [P, heads, A, d]

        def completions(x: Tensor) -> Tensor:
            return x[pack.completion_index.flatten(0, 1)].transpose(1, 2)  # [P·S, heads, C, d]

        qp, kp, vp = prompts(q_N), prompts(k_N), prompts(v_N)
        out_p, lse_p = _flash(qp, kp, vp, 0.0, True, scale=scale)
        if sinks_H is not None:
            out_p, lse_p = _add_sinks(out_p, lse_p, sinks_H[:, None])
        flat = [out_p.transpose(1, 2).flatten(0, 1)]
        saved = [qp, kp, vp, out_p, lse_p]
        if C:
            H, d = q.shape[1], q.shape[3]
            qc, kc, vc = completions(q_N), completions(k_N), completions(v_N)
            out_self, lse_self = _flash(qc, kc, vc, 0.0, True, scale=scale)
            q_to_prompt = qc.transpose(1, 2).reshape(P, S * C, H, d).transpose(1, 2)  # [P, H, S·C, d]
            out_pre, lse_pre = _flash(q_to_prompt, kp, vp, 0.0, False, attn_mask=pack.prompt_bias_as(q.dtype), scale=scale)
            out_pre = out_pre.transpose(1, 2).reshape(P * S, C, H, d)
            lse_pre = lse_pre.transpose(1, 2).reshape(P * S, C, H)
            lse_self = lse_self.transpose(1, 2)
            lse = torch.logaddexp(lse_pre, lse_self)
            out_c = (
                out_pre * torch.exp(lse_pre - lse)[..., None] + out_self.transpose(1, 2) * torch.exp(lse_self - lse)[..., None]
            )
            if sinks_H is not None:
                out_c, lse = _add_sinks(out_c, lse, sinks_H)
            out_c = out_c.to(q.dtype)  # the log-sum-exps of bfloat16 are float32
            flat.append(out_c.flatten(0, 1))
            saved += [qc, kc, vc, out_c, lse]
        ctx.save_for_backward(*saved)
        ctx.pack, ctx.scale, ctx.sinks_H = pack, scale, sinks_H
        return torch.cat(flat)[pack.unpad_N][None]

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        pack, scale, sinks_H = ctx.pack, ctx.scale, ctx.sinks_H
        P, S, C = pack.P, pack.S, pack.C
        qp, kp, vp, out_p, lse_p, *of_completions = ctx.saved_tensors
        grad_N = grad_out[0]
        d_out_p = (grad_N[pack.prompt_index] * pack.prompt_real[..., None, None]).transpose(1, 2)
        dq, dk, dv = _flash_backward(d_out_p, qp, kp, vp, out_p, lse_p, 0.0, True, scale=scale)
        parts_q, parts_k, parts_v = [_by_token(dq)], [_by_token(dk)], [_by_token(dv)]
        d_sinks = [] if sinks_H is None else [_sink_grads(d_out_p, out_p, lse_p, sinks_H[:, None]).sum((0, 2))]
        if C:
            qc, kc, vc, out_c, lse = of_completions
            d_out_c = grad_N[pack.completion_index.flatten(0, 1)] * pack.completion_real.flatten(0, 1)[..., None, None]
            by_head = (d_out_c.transpose(1, 2), qc, kc, vc, out_c.transpose(1, 2), lse.transpose(1, 2))
            dq_c, dk_c, dv_c = _flash_backward(*by_head, 0.0, True, scale=scale)

            def by_group(x: Tensor) -> Tensor:
                return x.reshape(P, S * C, *x.shape[2:]).transpose(1, 2)

            dq_pre, dk_p, dv_p = _flash_backward(
                by_group(d_out_c), by_group(qc.transpose(1, 2)), kp, vp, by_group(out_c), by_group(lse), 0.0, False,
                attn_mask=pack.prompt_bias_as(qp.dtype), scale=scale,
            )  # fmt: skip
            parts_q.append(_by_token(dq_c) + _by_token(dq_pre))
            parts_k[0] = parts_k[0] + _by_token(dk_p)
            parts_v[0] = parts_v[0] + _by_token(dv_p)
            if sinks_H is not None:
                d_sinks.append(_sink_grads(d_out_c, out_c, lse, sinks_H).sum((0, 1)))
            parts_k.append(_by_token(dk_c))
            parts_v.append(_by_token(dv_c))
        grads = (torch.cat(parts)[pack.unpad_N].transpose(0, 1)[None] for parts in (parts_q, parts_k, parts_v))
        return (*grads, None if sinks_H is None else torch.stack(d_sinks).sum(0).to(sinks_H.dtype), None, None)


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp, with sinks as a further part of the softmax."""
    with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (out * torch.exp(lse - with_sinks)[..., None]).to(out.dtype), with_sinks


def _sink_grads(d_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of each query's sink."""
    return -torch.exp(sinks.to(lse.dtype) - lse) * (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)


def _by_token(x: Tensor) -> Tensor:
    """[batch, heads, tokens, d] as [batch · tokens, heads, d]."""
    return x.transpose(1, 2).flatten(0, 1)
