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


def test_a_completion_of_several_sequences_by_hand() -> None:
    """Completion 0 has tokens 1 2 after the prompt and 3 4 5 after its own context 30 31; completion 1 follows the prompt."""
    contexts = (((2, np.array([30, 31])),), ())
    group = PrefixGroup(np.array([10, 11]), (np.array([1, 2, 3, 4, 5]), np.array([6, 7])), (0, 1), contexts)
    pack = build_pack([group], CPU)
    assert pack.input_ids.tolist() == [[10, 11, 1, 6, 30, 31, 3, 4]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 2, 0, 1, 2, 3]]
    assert pack.predicted_from_M.tolist() == [1, 2, 5, 6, 7, 1, 3]
    assert pack.target_M.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert pack.row_M.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert pack.lengths == (5, 2)
    assert pack.spans == ((0, 2, 2, 1, 2), (4, 2, 6, 2, 3), (0, 2, 3, 1, 2))
    assert [[p.keys for p in part] for part in split_by_budget([group], 1)] == [[(0,)], [(1,)]]


def test_a_prompt_that_no_sequence_follows_is_left_out() -> None:
    group = PrefixGroup(np.array([10, 11]), (np.array([1, 2]),), (0,), (((0, np.array([30])),),))
    assert build_pack([group], CPU).input_ids.tolist() == [[30, 1]]


@settings(deadline=None)
@given(shape=SHAPES, data=st.data())
def test_sequences_of_one_completion_are_packed_as_if_each_were_its_own(
    shape: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    """Inputs, positions and sources of each predicted token are those of a pack in which every sequence is a group."""
    groups, alone = [], []
    for group in groups_of(shape):
        contexts = []
        for ids in group.completion_ids:
            firsts = sorted(data.draw(st.sets(st.integers(0, len(ids) - 1), max_size=3)))
            contexts.append(tuple((first, np.arange(500, 500 + data.draw(st.integers(1, 4)))) for first in firsts))
        groups.append(PrefixGroup(group.prompt_ids, group.completion_ids, group.keys, tuple(contexts)))
        alone += [
            PrefixGroup(context, (tokens,), (0,))
            for i in range(len(group.keys))
            for context, tokens in groups[-1].sequences(i)
            if len(tokens)
        ]
    pack, expected = build_pack(groups, CPU), build_pack(alone, CPU)
    for name in ("input_ids", "position_ids"):
        one, other = getattr(pack, name)[0], getattr(expected, name)[0]
        assert one[pack.predicted_from_M].tolist() == other[expected.predicted_from_M].tolist()
    assert pack.target_M.tolist() == expected.target_M.tolist()
    assert pack.lengths == tuple(len(ids) for group in groups for ids in group.completion_ids)
    assert pack.tokens <= sum(group.tokens for group in groups)
