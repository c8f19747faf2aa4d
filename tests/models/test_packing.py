"""Packs: every completion once, within the token budget, with correct positions, sources and targets."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.models.packing import PrefixGroup, build_pack, predicting_states, split_by_budget

CPU = torch.device("cpu")


def groups_of(shape: list[tuple[int, list[int]]]) -> list[PrefixGroup]:
    """Groups with these prompt and completion lengths and distinct tokens."""
    out, token, key = [], 0, 0
    for prompt, completions in shape:
        ids = [np.arange(token + sum(completions[:i]), token + sum(completions[: i + 1])) for i in range(len(completions))]
        token += sum(completions)
        out.append(PrefixGroup(np.arange(token, token + prompt), tuple(ids), tuple(range(key, key + len(completions)))))
        token, key = token + prompt, key + len(completions)
    return out


def unshared(groups: list[PrefixGroup]) -> list[PrefixGroup]:
    """Every completion with its own copy of the prompt."""
    return [PrefixGroup(b.prompt_ids, (c,), (k,)) for b in groups for c, k in zip(b.completion_ids, b.keys, strict=True)]


SHAPES = st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=6)), min_size=1, max_size=6)


@settings(deadline=None)
@given(shape=SHAPES, budget=st.integers(1, 60))
def test_every_completion_once_in_order_with_its_own_prompt_and_within_the_budget(
    shape: list[tuple[int, list[int]]], budget: int
) -> None:
    groups = groups_of(shape)
    packs = split_by_budget(groups, budget)
    expected = {
        key: (b.prompt_ids.tolist(), ids.tolist()) for b in groups for key, ids in zip(b.keys, b.completion_ids, strict=True)
    }
    packed = [
        (key, (b.prompt_ids.tolist(), ids.tolist()))
        for p in packs
        for b in p
        for key, ids in zip(b.keys, b.completion_ids, strict=True)
    ]
    assert packed == list(expected.items())
    for pack in packs:
        assert sum(b.tokens for b in pack) <= budget or (len(pack) == 1 and len(pack[0].keys) == 1)


@settings(deadline=None)
@given(shape=SHAPES)
def test_a_pack_predicts_each_token_from_the_one_before_it(shape: list[tuple[int, list[int]]]) -> None:
    groups = groups_of(shape)
    pack = build_pack(groups, CPU)
    assert pack.tokens == sum(b.tokens for b in groups)
    assert pack.keys == tuple(k for b in groups for k in b.keys)
    rows = [(b.prompt_ids, c) for b in groups for c in b.completion_ids]
    assert pack.lengths == tuple(len(c) for _, c in rows)
    before = np.concatenate([np.concatenate((prompt[-1:], c[:-1])) for prompt, c in rows])
    assert pack.input_ids[0, pack.predicted_from_M].tolist() == before.tolist()
    assert pack.target_M.tolist() == np.concatenate([c for _, c in rows]).tolist()
    assert pack.row_M.tolist() == [r for r, (_, c) in enumerate(rows) for _ in c]
    positions = np.concatenate([np.arange(len(prompt) - 1, len(prompt) + len(c) - 1) for prompt, c in rows])
    assert pack.position_ids[0, pack.predicted_from_M].tolist() == positions.tolist()


def test_by_hand() -> None:
    """A prompt of 2 with completions of 3 and 1, then a prompt of 1 with one of 2: 2 + 2 + 0 and 1 + 1 input tokens."""
    a = PrefixGroup(np.array([10, 11]), (np.array([1, 2, 3]), np.array([4])), (0, 1))
    b = PrefixGroup(np.array([20]), (np.array([5, 6]),), (2,))
    assert (a.tokens, b.tokens) == (4, 2)
    pack = build_pack([a, b], CPU)
    assert pack.input_ids.tolist() == [[10, 11, 1, 2, 20, 5]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert pack.predicted_from_M.tolist() == [1, 2, 3, 1, 4, 5]
    assert pack.target_M.tolist() == [1, 2, 3, 4, 5, 6]
    assert pack.row_M.tolist() == [0, 0, 0, 1, 2, 2]
    assert [[p.keys for p in part] for part in split_by_budget([a, b], 6)] == [[(0, 1), (2,)]]
    assert [[p.keys for p in part] for part in split_by_budget([a, b], 4)] == [[(0, 1)], [(2,)]]
    assert [[p.keys for p in part] for part in split_by_budget([a, b], 1)] == [[(0,)], [(1,)], [(2,)]]


def test_the_gradient_of_a_prompts_last_token_is_summed_in_the_order_of_completions() -> None:
    """If the order depended on threads, a busy machine would give other bits."""
    rows, threads = 20_000, torch.get_num_threads()
    grad_MD = torch.from_numpy(np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32))
    expected = torch.zeros(64)
    for row in grad_MD:
        expected = expected + row
    torch.set_num_threads(2)
    try:
        for _ in range(5):
            hidden_ND = torch.zeros(3, 64, requires_grad=True)
            predicting_states(hidden_ND, torch.ones(rows, dtype=torch.int64)).backward(grad_MD)  # type: ignore[no-untyped-call]
            assert hidden_ND.grad is not None
            assert torch.equal(hidden_ND.grad[1], expected)
    finally:
        torch.set_num_threads(threads)
