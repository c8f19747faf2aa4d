"""Sampling with settings by slot: each slot gets what torch gives it, and no bit depends on the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oncurve.engines.token_sampling import sample_tokens, truncate
from oncurve.kernels import sampling as kernels
from oncurve.kernels.sampling import SamplingRule, Slots
from oncurve.recipe.schema.sections import Sampling
from oncurve.rng import sampling_uniforms
from tests.kernels.test_sampling import DEVICE, C, ends, logits, slots_of

MIXED = [
    Sampling(),
    Sampling(temperature=0.0),
    Sampling(temperature=0.6),
    Sampling(top_k=3),
    Sampling(temperature=1.4, top_k=40),
    Sampling(top_p=0.5),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(min_p=0.1),
    Sampling(temperature=1.3, min_p=0.02, top_p=0.8, top_k=5),
    Sampling(temperature=0.0, min_new_tokens=9),
    Sampling(min_new_tokens=9, top_p=0.6),
    Sampling(temperature=0.8, min_new_tokens=9, top_k=2),
    Sampling(top_k=5, top_p=0.7),
    Sampling(min_new_tokens=9, top_k=30, top_p=0.8, min_p=0.01),
]
LENGTHS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 2, 3, 40, 5, 4]
TOPS = [0, 5, 1, 0, 20, 3, 0, 7, 2, 20, 0, 1, 0, 2]


def params_of(hows: list[Sampling], tops: list[int]) -> kernels.SlotSamplingParams:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(sampling, name) for sampling in hows], dtype=dtype, device=DEVICE)

    S = len(hows)
    return kernels.SlotSamplingParams(
        column("temperature", torch.float32),
        column("top_p", torch.float32),
        column("min_p", torch.float32),
        column("top_k", torch.int32),
        column("min_new_tokens", torch.int32),
        torch.tensor(tops, dtype=torch.int32, device=DEVICE),
        torch.full((C, S, 20), -1, dtype=torch.int32, device=DEVICE),
        torch.full((C, S, 20), torch.nan, device=DEVICE),
    )


def banned_for(sampling: Sampling, length: int, V: int, *ids: int) -> Tensor | None:
    banned = torch.zeros(1, V, dtype=torch.bool)
    banned[:, list(ids)] = length < sampling.min_new_tokens
    return banned if sampling.min_new_tokens else None


def state(slots: Slots, params: kernels.SlotSamplingParams, slot: int) -> list[object]:
    values = (slots.sampled[:, slot], slots.logps[:, :, slot], params.top_ids[:, slot], params.top_logps[:, slot])
    return [*(x.nan_to_num(7).tolist() for x in values), int(slots.suffix_length[slot])]


@pytest.mark.parametrize("V", [7, 4096, 9001])
def test_each_slot_draws_what_the_plain_path_draws_for_it(V: int) -> None:
    """End tokens are made likely, so that the minimum length matters, and so does truncation next to them."""
    slots, params, z = slots_of(LENGTHS), params_of(MIXED, [min(top, V) for top in TOPS]), logits(len(MIXED), V)
    z[:, 5] = 6.0
    kernels.sample_tokens_per_slot(z, slots, params, ends(V, 5, 2), SamplingRule())
    same = 0
    for s, (sampling, at) in enumerate(zip(MIXED, LENGTHS, strict=True)):
        row = z[s : s + 1].double().cpu()
        uniform = torch.tensor([sampling_uniforms(0, 1, "p", s, at + 1)[at]])
        want = sample_tokens(row, uniform, sampling, banned_for(sampling, at, V, 5, 2))
        token = int(slots.sampled[at % C, s])
        if token == int(want.token_S[0]):
            same += 1
            for i, logp in enumerate((want.logp_S, want.sampled_logp_S, want.raw_logp_S)):
                assert float(slots.logps[at % C, i, s]) == pytest.approx(float(logp[0]), abs=1e-5)
        ended = token in (5, 2) and at >= sampling.min_new_tokens
        assert int(slots.suffix_length[s]) == (-1 if ended else at + 1)
        best = row[0].log_softmax(-1).topk(min(TOPS[s], V))
        found = min(TOPS[s], V)
        assert params.top_ids[at % C, s, :found].tolist() == best.indices.tolist()
        assert params.top_logps[at % C, s, :found].tolist() == pytest.approx(best.values.tolist(), abs=1e-5)
        assert bool((params.top_ids[at % C, s, found:] == -1).all())
    assert same >= len(MIXED) - 1, "float32 sums may part from float64 ones at a boundary, not more often"


def test_neighbours_and_their_settings_change_no_bit() -> None:
    V = 300
    z = logits(len(MIXED), V)
    slots, params = slots_of(LENGTHS), params_of(MIXED, TOPS)
    kernels.sample_tokens_per_slot(z, slots, params, ends(V, 5), SamplingRule())
    for s in range(len(MIXED)):
        alone = [-1] * len(MIXED)
        alone[s] = LENGTHS[s]
        others = [sampling if i == s else Sampling(top_k=1) for i, sampling in enumerate(MIXED)]
        slots_alone, wishes_alone = slots_of(alone), params_of(others, [t if i == s else 0 for i, t in enumerate(TOPS)])
        kernels.sample_tokens_per_slot(z, slots_alone, wishes_alone, ends(V, 5), SamplingRule())
        assert state(slots_alone, wishes_alone, s) == state(slots, params, s)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=5),
        Sampling(top_p=0.55),
        Sampling(top_k=6, min_p=0.3),
        Sampling(min_p=0.9),
        Sampling(top_k=5, top_p=0.7),
    ],
)
def test_of_equal_logits_the_first_are_kept(sampling: Sampling) -> None:
    """Few values, each many times: 40 draws find every token that a stable sort keeps, and none that it does not."""
    row = torch.tensor([2.0, 1.0, 2.0, 0.0, 1.0, 2.0, 1.0, 0.0, 2.0, 1.0]).repeat(2)
    slots = slots_of(list(range(40)), limit=1 << 30)
    kernels.sample_tokens_per_slot(
        row.expand(40, 20).contiguous().to(DEVICE), slots, params_of([sampling] * 40, [0] * 40), ends(20), SamplingRule()
    )
    kept = truncate(row[None].log_softmax(-1), sampling)[0] > -torch.inf
    assert set(slots.token.tolist()) == set(kept.nonzero()[:, 0].tolist())


def test_all_logits_equal() -> None:
    slots, z = slots_of([0, 1, 2, 3]), torch.zeros(4, 100, device=DEVICE)
    params = params_of([Sampling(top_k=7), Sampling(top_p=0.1), Sampling(), Sampling(top_k=500)], [3] * 4)
    kernels.sample_tokens_per_slot(z, slots, params, ends(100), SamplingRule())
    token = slots.token.tolist()
    assert token[0] < 7
    assert token[1] < 10
    assert [int(sampling_uniforms(0, 1, "p", s, s + 1)[s] * 100) for s in (2, 3)] == token[2:]


def test_the_models_scale_and_soft_cap() -> None:
    hows = [Sampling(temperature=0.7), Sampling(top_p=0.7), Sampling(temperature=0.0)]
    slots, params, z = slots_of([0, 1, 2]), params_of(hows, [2, 2, 2]), logits(3, 300, std=20.0)
    kernels.sample_tokens_per_slot(z, slots, params, ends(300), replace(SamplingRule(), scale=0.25, softcap=5.0))
    own = 5.0 * torch.tanh(z.double().cpu() * 0.25 / 5.0)
    for s, sampling in enumerate(hows):
        want = sample_tokens(own[s : s + 1], torch.tensor([sampling_uniforms(0, 1, "p", s, s + 1)[s]]), sampling)
        assert int(slots.token[s]) == int(want.token_S[0])
        assert float(slots.logps[s, 2, s]) == pytest.approx(float(want.raw_logp_S[0]), abs=1e-5)
        best = own[s].log_softmax(-1).topk(2)
        assert params.top_logps[s, s, :2].tolist() == pytest.approx(best.values.tolist(), abs=1e-5)
