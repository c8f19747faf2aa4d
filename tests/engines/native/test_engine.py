"""The native engine end to end: a completion does not depend on the queue, how it stops, and which weights it reads."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.engines.base import SampleKey, default_slots
from oncurve.engines.native.c_decoder import CRunner
from oncurve.engines.native.kv_cache import slots_per_block
from oncurve.engines.native.torch_runner import TorchRunner
from oncurve.errors import ModelError
from oncurve.models.llama import c_build
from oncurve.models.loading.load import build_model as make_tiny
from oncurve.models.loading.load import build_tokenizer
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import TinyModel
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Completion, Group, Prompt
from oncurve.rng import sampling_uniforms
from tests.engines.native.plain import NEAR_TIE, engine_for, prompt_of, sample
from tests.models.architectures import make_model, make_policy, tokenizer

POOL = [prompt_of(n, name) for name, n in zip("abcdefgh", (1, 2, 9, 17, 18, 40, 66, 131), strict=True)]
SAMPLING = Sampling(max_new_tokens=24)


@cache
def policy_of(name: str) -> Policy:
    return make_policy(name)


@cache
def alone(name: str, prompt: int, group_size: int) -> Group:
    """A prompt's completions with nothing else queued."""
    return sample(policy_of(name), [POOL[prompt]], group_size, SAMPLING)[0]


def bits(completion: Completion) -> tuple[bytes, ...]:
    arrays = (completion.token_ids, completion.logps, completion.sampled_logps, completion.raw_logps)
    return (*(a.tobytes() for a in arrays), completion.text.encode(), completion.stop.encode())


@pytest.mark.parametrize(("name", "group_size"), [("qwen3", 4), ("gemma2", 2), ("smollm3", 1), ("mistral", 20)])
@settings(max_examples=8, deadline=None)
@given(order=st.permutations(range(len(POOL))), count=st.integers(2, len(POOL)))
def test_a_completion_is_the_same_bits_whatever_else_is_queued(
    name: str, group_size: int, order: list[int], count: int
) -> None:
    chosen = order[:count]
    groups = sample(policy_of(name), [POOL[i] for i in chosen], group_size, SAMPLING)
    for i, group in zip(chosen, groups, strict=True):
        assert [bits(c) for c in group.completions] == [bits(c) for c in alone(name, i, group_size).completions]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_built_in_model_on_several_threads_is_as_exact(threads: int) -> None:
    """At the shapes of the built-in recipe, where torch picks other kernels and splits them over threads."""
    words = tokenizer()
    policy = Policy(make_tiny(TinyModel(), words, 0), words)
    dice, sampling = random.Random(1), Sampling(max_new_tokens=5)
    torch.set_num_threads(threads)
    try:
        lone = [sample(policy, [p], 8, sampling, slots=64)[0] for p in POOL]
        for _ in range(3):
            chosen = dice.sample(range(len(POOL)), dice.randint(3, len(POOL)))
            groups = sample(policy, [POOL[i] for i in chosen], 8, sampling, slots=64)
            assert [bits(c) for g in groups for c in g.completions] == [bits(c) for i in chosen for c in lone[i].completions]
    finally:
        torch.set_num_threads(1)


def test_activation_functions_do_not_depend_on_the_slot() -> None:
    """torch divides 16 × 4864 numbers between three threads, and not between vectors."""
    policy = Policy(make_model("gemma2", intermediate_size=4864), tokenizer())
    torch.set_num_threads(3)
    try:
        group = sample(policy, POOL[:1], 16, Sampling(max_new_tokens=24, temperature=0.0), slots=16)[0]
    finally:
        torch.set_num_threads(1)
    assert len({bits(c) for c in group.completions}) == 1


def test_the_same_call_twice_gives_the_same_bits_and_another_step_others() -> None:
    one, two, later = (sample(policy_of("qwen3"), POOL[:3], 4, SAMPLING, step=step) for step in (1, 1, 2))
    rows = [[bits(c) for g in groups for c in g.completions] for groups in (one, two, later)]
    assert rows[0] == rows[1]
    assert not set(rows[0]) & set(rows[2])


@pytest.mark.parametrize("check_every", [1, 3, 16])
def test_the_round_size_changes_no_bit(check_every: int) -> None:
    groups = engine_for(policy_of("qwen3"), 8, check_every).sample(POOL[:5], 4, SAMPLING, SampleKey(0, 1))
    for i, group in enumerate(groups):
        assert [bits(c) for c in group.completions] == [bits(c) for c in alone("qwen3", i, 4).completions]


@pytest.mark.parametrize("slots", [1, 4, 20, 64])
def test_another_number_of_slots_differs_only_at_near_ties(slots: int) -> None:
    policy = policy_of("qwen3")
    for i, group in enumerate(sample(policy, POOL, 4, SAMPLING, slots=slots)):
        for s, (one, two) in enumerate(zip(alone("qwen3", i, 4).completions, group.completions, strict=True)):
            assert_parts_only_at_a_near_tie(one, two, POOL[i], s)


def assert_parts_only_at_a_near_tie(one: Completion, two: Completion, prompt: Prompt, place: int) -> None:
    """At the first difference the uniform lies, by each side's own probabilities, next to the boundary of the sampled token."""
    same = min(len(one.token_ids), len(two.token_ids))
    parts = np.flatnonzero(one.token_ids[:same] != two.token_ids[:same])
    end = int(parts[0]) if len(parts) else same
    assert np.abs(one.logps[:end] - two.logps[:end]).max(initial=0.0) < 1e-4
    if not len(parts):
        assert len(one.token_ids) == len(two.token_ids)
        return
    policy = policy_of("qwen3")
    ids = np.concatenate((policy.encode(prompt), one.token_ids[:end]))
    uniform = sampling_uniforms(0, 1, prompt.id, place, end + 1)[-1]
    cumulative = share_bounds(policy, ids)
    low, high = sorted((int(one.token_ids[end]), int(two.token_ids[end])))
    assert max(abs(uniform - cumulative[low]), abs(uniform - cumulative[high - 1])) < NEAR_TIE


@torch.no_grad()
def share_bounds(policy: Policy, ids: np.ndarray) -> np.ndarray:
    """The cumulative distribution of the token after ``ids``."""
    pack = build_pack([PrefixGroup(ids, (np.zeros(1, np.int64),), (0,))], policy.device)
    logits_V = policy.head.logits(policy.hidden(pack.input_ids, pack.position_ids, pack.attention)[0, -1])
    return np.cumsum(logits_V.double().softmax(-1).numpy())


def test_groups_of_any_size_share_blocks_without_waste() -> None:
    assert [slots_per_block(g) for g in (1, 3, 8, 16, 17, 20, 32, 64)] == [1, 3, 8, 16, 1, 10, 16, 16]
    assert default_slots(torch.device("cpu"), 40) == 40
    assert default_slots(torch.device("cpu"), 4096) == 128


def test_a_weight_changed_in_place_takes_effect_in_the_next_sample() -> None:
    """One set of weights: no call, no copy, no sync between an optimiser's update and the next completion."""
    words = tokenizer()
    policy = Policy(make_tiny(TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=32), words, 0), words)
    engine, sampling = engine_for(policy, 2), Sampling(temperature=0.0, max_new_tokens=4)
    before = engine.sample([POOL[3]], 2, sampling, SampleKey(0, 1))[0].completions[0]
    z = words.convert_tokens_to_ids("z")
    weight = policy.model.get_output_embeddings().weight
    weight.grad = torch.zeros_like(weight)
    weight.grad[z] = -weight.detach()[z].sign()
    torch.optim.SGD([weight], lr=5.0).step()
    after = engine.sample([Prompt(id="z", text="z")], 2, sampling, SampleKey(0, 1))[0].completions[0]
    assert before.text != "zzzz"
    assert after.text == "zzzz"


@cache
def talker() -> Policy:
    """A model that writes any of its 16 tokens about equally often, whatever came before."""
    words = build_tokenizer("abcdefgh.")
    return Policy(make_tiny(TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=32), words, 0), words)


def completions(sampling: Sampling, count: int = 48) -> list[Completion]:
    return list(sample(talker(), [Prompt(id="p", text="ab")], count, sampling, slots=48)[0].completions)


def test_a_completion_ends_with_the_end_token_or_is_cut_at_the_limit() -> None:
    ended = {"end": 0, "length": 0}
    for c in completions(Sampling(max_new_tokens=12)):
        ended[c.stop] += 1
        end = talker().eos_ids[0]
        assert end not in c.token_ids[:-1]
        assert (c.token_ids[-1] == end) == (c.stop == "end")
        assert c.is_truncated == (c.stop == "length")
        assert not c.is_truncated or len(c.token_ids) == 12
        assert c.length == len(c.token_ids) == len(c.logps) == len(c.raw_logps) == len(c.sampled_logps)
        assert c.text == talker().decode(c.token_ids[: -1 if c.stop == "end" else None])
    assert min(ended.values()) > 5


def test_no_end_before_the_minimum() -> None:
    lengths = [len(c.token_ids) for c in completions(Sampling(max_new_tokens=12, min_new_tokens=5))]
    assert min(lengths) == 6, "five tokens, then the end token at the earliest"
    assert {c.stop for c in completions(Sampling(max_new_tokens=5, min_new_tokens=5))} == {"length"}


def test_every_end_token_of_the_model_ends_a_completion() -> None:
    words = build_tokenizer("abcdefgh.")
    model = make_tiny(TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=32), words, 0)
    dot = words.convert_tokens_to_ids(".")
    model.generation_config.eos_token_id = [words.eos_token_id, dot]
    policy = Policy(model, words)
    assert policy.eos_ids == (words.eos_token_id, dot)
    found = sample(policy, [Prompt(id="p", text="ab")], 48, Sampling(max_new_tokens=20), slots=48)[0].completions
    assert {int(c.token_ids[-1]) for c in found if c.stop == "end"} == {words.eos_token_id, dot}
    assert all(dot not in c.token_ids[:-1] and "." not in c.text for c in found)


def test_a_stop_string_ends_a_completion_once_it_is_there() -> None:
    plain, stopped = (completions(Sampling(max_new_tokens=30, stop=stop), 144) for stop in ((), ("ab", "h.", "cde")))
    seen = 0
    for free, c in zip(plain, stopped, strict=True):
        assert free.token_ids[: len(c.token_ids)].tolist() == c.token_ids.tolist(), "the random numbers are the same"
        found = [s for s in ("ab", "h.", "cde") if s in c.text]
        assert (c.stop == "stop_string") == bool(found)
        assert all(c.text.endswith(s) for s in found)
        seen += bool(found)
    assert seen > 10


def test_an_end_token_at_the_limit_is_an_end() -> None:
    assert {c.stop for c in completions(Sampling(max_new_tokens=1), 200) if c.token_ids[-1] == talker().eos_ids[0]} == {"end"}


def test_sampled_log_probs_are_of_the_truncated_distribution() -> None:
    for c in completions(Sampling(max_new_tokens=6, top_k=2)):
        assert np.all(c.sampled_logps > c.logps)
        assert np.all(c.sampled_logps <= 0)
        assert c.raw_logps is c.logps
    for c in completions(Sampling(max_new_tokens=6, temperature=1.5)):
        assert c.sampled_logps is c.logps
        assert not np.array_equal(c.raw_logps, c.logps)


def test_a_prompt_longer_than_the_model_allows_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"p/500: a prompt of 500 tokens[\s\S]*512 positions") as caught:
        sample(policy_of("qwen3"), [POOL[0], prompt_of(500)], 1, SAMPLING)
    assert "max_new_tokens" in caught.value.fix


def test_no_prompts_give_no_groups() -> None:
    assert sample(policy_of("qwen3"), [], 4, SAMPLING) == []


def test_many_mixes_with_few_slots_and_refills() -> None:
    """Two dozen random queues: blocks are reused in every order, and leave nothing behind."""
    dice = random.Random(0)
    for _ in range(24):
        chosen = dice.sample(range(len(POOL)), dice.randint(3, 6))
        groups = sample(policy_of("qwen3"), [POOL[i] for i in chosen], 4, SAMPLING)
        assert [bits(c) for g in groups for c in g.completions] == [
            bits(c) for i in chosen for c in alone("qwen3", i, 4).completions
        ]


@pytest.mark.parametrize("features", [b"flags : avx512f avx512_bf16", b"flags : avx2"])
def test_bfloat16_on_a_cpu_is_warned_of_once_with_its_cost(features: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_build, "_processor_features", lambda: features)
    slow = [line for line in _lines("qwen3", torch.bfloat16) if line.startswith("bfloat16 on a CPU is slow: the C functions")]
    assert len(slow) == 1
    assert ("emulates bfloat16" in slow[0]) == (b"bf16" not in features)
    other = [line for line in _lines("gemma3", torch.bfloat16) if line.startswith("bfloat16")]
    assert len(other) == (b"bf16" not in features)  # no C functions for this family, in float32 neither
    assert not any("bfloat16" in line for line in _lines("qwen3", torch.float32))


def _lines(name: str, dtype: torch.dtype) -> tuple[str, ...]:
    return engine_for(Policy(make_model(name).to(dtype), tokenizer()), 2).log_lines


@pytest.mark.parametrize(
    ("own", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"KMP_BLOCKTIME": "1"}, "")]
)
def test_openmp_threads_do_not_spin_unless_the_user_says_so(own: dict[str, str], expected: str) -> None:
    """Set before torch is imported, which reads it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    code = "import oncurve, os, sys; assert 'torch' not in sys.modules; print(os.environ.get('OMP_WAIT_POLICY', ''))"
    done = subprocess.run([sys.executable, "-c", code], env=environment | own, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_a_round_is_never_longer_than_a_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `engine.check_every` beyond max_new_tokens, nothing is decoded that no completion can have."""
    short = Sampling(max_new_tokens=6)
    expected = engine_for(policy_of("qwen3"), 4).sample(POOL[:2], 2, short, SampleKey(3, 1))
    rounds: list[int] = []
    real = TorchRunner.round_tokens

    def recorded(runner: TorchRunner, live: int) -> int:
        rounds.append(real(runner, live))
        return rounds[-1]

    for kind in (TorchRunner, CRunner):
        if "round_tokens" in vars(kind):
            monkeypatch.setattr(kind, "round_tokens", recorded)
    groups = engine_for(policy_of("qwen3"), 4, check_every=100_000).sample(POOL[:2], 2, short, SampleKey(3, 1))
    assert rounds
    assert max(rounds) <= 6
    assert [c.token_ids.tolist() for g in groups for c in g.completions] == [
        c.token_ids.tolist() for g in expected for c in g.completions
    ]
