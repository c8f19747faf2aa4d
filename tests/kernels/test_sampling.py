"""Drawing on the GPU: the same numbers, the same tokens and the same log-probs as the plain path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from oncurve.engines.token_sampling import sample_tokens
from oncurve.kernels import sampling as kernels
from oncurve.recipe.schema.sections import Sampling
from oncurve.rng import sampling_key, sampling_uniforms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C = 4


def slots_of(lengths: list[int], limit: int = 100) -> kernels.Slots:
    S = len(lengths)
    keys = np.array([sampling_key(0, 1, "p", s) for s in range(S)], np.uint64).view(np.int64)
    return kernels.Slots(
        torch.zeros(S, dtype=torch.int64, device=DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        torch.full((S,), limit, dtype=torch.int32, device=DEVICE),
        torch.from_numpy(keys).to(DEVICE),
        torch.full((C, S), -7, dtype=torch.int32, device=DEVICE),
        torch.full((C, 3, S), torch.nan, device=DEVICE),
        torch.zeros((S, 0), dtype=torch.int32, device=DEVICE),
    )


def ends(V: int, *ids: int) -> Tensor:
    table = torch.zeros(V, dtype=torch.int8)
    table[list(ids)] = 1
    return table.to(DEVICE)


def logits(S: int, V: int, seed: int = 0, std: float = 2.0) -> Tensor:
    return (torch.randn(S, V, generator=torch.Generator().manual_seed(seed)) * std).to(DEVICE)


def test_uniforms_are_those_of_the_plain_path() -> None:
    lengths = [0, 1, 5, -1, 77, 2047]
    found = kernels.uniforms(slots_of(lengths))
    for s, at in enumerate(lengths):
        if at >= 0:
            assert float(found[s]) == sampling_uniforms(0, 1, "p", s, at + 1)[at]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.6), Sampling(temperature=0.0),
                                 Sampling(min_new_tokens=3), Sampling(temperature=1.7, min_new_tokens=3),
                                 Sampling(temperature=0.0, min_new_tokens=3)])  # fmt: skip
@pytest.mark.parametrize("V", [7, 4096, 9001])
def test_tokens_and_logps_are_those_of_the_plain_path(V: int, sampling: Sampling) -> None:
    """End tokens are made likely: a minimum length then matters."""
    lengths = [0, 1, 2, 3, 40, 41, 42, 43]
    slots, z = slots_of(lengths), logits(len(lengths), V)
    z[:, 5] = 9.0
    kernels.sample_tokens(z, slots, ends(V, 5, 2), kernels.SamplingRule(sampling.temperature, sampling.min_new_tokens))
    at = torch.tensor(lengths)
    banned = torch.zeros(len(lengths), V, dtype=torch.bool)
    banned[:, [5, 2]] = (at < sampling.min_new_tokens)[:, None]
    uniform = torch.tensor([sampling_uniforms(0, 1, "p", s, n + 1)[n] for s, n in enumerate(lengths)])
    want = sample_tokens(z.double().cpu(), uniform, sampling, banned if sampling.min_new_tokens else None)
    ring = torch.arange(len(lengths))
    found = slots.sampled.cpu()[at % C, ring]
    same = found == want.token_S
    assert int(same.sum()) >= len(lengths) - 1, "float32 sums may part from float64 ones at a boundary, not more often"
    assert bool(((found - want.token_S).abs() <= 1).all())
    for i, logp in enumerate((want.logp_S, want.sampled_logp_S, want.raw_logp_S)):
        assert float((slots.logps.cpu()[at % C, i, ring] - logp)[same].abs().max()) < 1e-5
    done = [(t in (5, 2) and n >= sampling.min_new_tokens) for t, n in zip(found.tolist(), lengths, strict=True)]
    assert slots.suffix_length.tolist() == [-1 if d else n + 1 for d, n in zip(done, lengths, strict=True)]
    assert slots.token.tolist() == found.tolist()


def test_the_models_scale_and_soft_cap() -> None:
    slots, z = slots_of([0, 1, 2]), logits(3, 300, std=20.0)
    kernels.sample_tokens(z, slots, ends(300), kernels.SamplingRule(0.7, 0, 0.25, 5.0))
    own = 5.0 * torch.tanh(z.double().cpu() * 0.25 / 5.0)
    uniform = torch.tensor([sampling_uniforms(0, 1, "p", s, s + 1)[s] for s in range(3)])
    want = sample_tokens(own, uniform, Sampling(temperature=0.7))
    assert slots.token.tolist() == want.token_S.tolist()
    assert float((slots.logps[[0, 1, 2], 2, [0, 1, 2]].cpu() - want.raw_logp_S).abs().max()) < 1e-5


def test_shares_are_those_of_the_distribution() -> None:
    """150 draws from 4 tokens: within five standard errors."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    slots = slots_of(list(range(150)), limit=1 << 30)
    kernels.sample_tokens(p.log().expand(150, 4).contiguous().to(DEVICE), slots, ends(4), kernels.SamplingRule())
    counts = torch.bincount(slots.token.cpu(), minlength=4) / 150
    assert bool(((counts - p).abs() < 5 * (p * (1 - p) / 150).sqrt()).all())


def test_idle_slots_draw_nothing_and_limits_end() -> None:
    slots = slots_of([-1, 8, 9], limit=10)
    kernels.sample_tokens(logits(3, 50), slots, ends(50), kernels.SamplingRule())
    assert slots.suffix_length.tolist() == [-1, 9, -1]
    assert bool((slots.sampled[:, 0] == -7).all())
    token, logp = torch.tensor([1, 2, 3], device=DEVICE), torch.arange(9.0, device=DEVICE).view(3, 3)
    again = slots_of([-1, 8, 9], limit=10)
    kernels.write_tokens(token, logp, again, ends(50, 2), 0)
    assert again.suffix_length.tolist() == [-1, -1, -1]
    assert again.sampled[0, 1] == 2
    assert again.logps[0, :, 1].tolist() == [1.0, 4.0, 7.0]


@pytest.mark.parametrize("uniform_at_the_end", [True, False])
def test_a_tile_without_mass_is_never_drawn_from(uniform_at_the_end: bool) -> None:
    z = torch.full((16, 8192), -1e4)
    z[:, 17 if uniform_at_the_end else 1500] = 0.0
    slots = slots_of(list(range(16)))
    kernels.sample_tokens(z.to(DEVICE), slots, ends(8192), kernels.SamplingRule())
    assert set(slots.token.tolist()) == {17 if uniform_at_the_end else 1500}
