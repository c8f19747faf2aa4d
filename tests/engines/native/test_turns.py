"""Completions in several turns: the environment's replies are in the context, masked in the loss, and deterministic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from oncurve.engines.base import SampleKey
from oncurve.engines.native.torch_runner import TorchRunner
from oncurve.engines.native.turns import PureEpisode, build_requests
from oncurve.engines.token_sampling import SampledTokens
from oncurve.errors import DataError, ModelError
from oncurve.models.chat_template import encode_example, encode_reply
from oncurve.models.loading.load import build_tokenizer, load_policy
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import Model, TinyModel
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Completion, Episode, Example, Group, Prompt, Rollout
from tests.engines.native.plain import engine_for, next_logits

SHAPE = TinyModel(layers=2, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=48, context=256)
SAMPLING = Sampling(max_new_tokens=100)


@cache
def policy() -> Policy:
    """A random model with ten tokens, each of which comes soon."""
    return load_policy(Model(tiny=SHAPE), alphabet="ab?!", seed=0)


@dataclass
class Echo:
    """Replies with the number of the turn, up to four times, and a random letter."""

    calls: tuple[str, ...] = ("?",)
    received: list[tuple[str, ...]] = field(default_factory=list)

    def reply(self, prompt: Prompt, turns: Sequence[str], dice: np.random.Generator) -> str | None:
        self.received.append(tuple(turns))
        return "!" * (len(turns) + 1) + "ab"[dice.integers(2)] if len(turns) < 8 else None


def prompt_with(name: str, environment: Any) -> Prompt:
    return Prompt(id=name, text="ab" * 3 + name[:1], environment=environment)


def sample(
    prompts: list[Prompt], sampling: Sampling = SAMPLING, slots: int = 8, check_every: int = 4, group_size: int = 4
) -> list[Group]:
    return engine_for(policy(), slots, check_every).sample(prompts, group_size, sampling, SampleKey(seed=0, step=1))


def completions(groups: list[Group]) -> list[Completion]:
    return [c for group in groups for c in group.completions]


def bits(completion: Completion) -> tuple[bytes, ...]:
    arrays = (completion.token_ids, completion.logps, completion.sampled_logps, completion.raw_logps, completion.loss_mask)
    return tuple(a.tobytes() for a in arrays)


def runs(mask: Sequence[bool]) -> list[tuple[bool, int, int]]:
    """(value, first, last + 1) of the runs of a mask."""
    edges = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    return [(bool(mask[a]), a, b) for a, b in pairwise(edges)]


def test_turns_alternate_and_only_the_environment_s_are_masked() -> None:
    echo, replies = Echo(), 0
    for c in completions(sample([prompt_with(n, echo) for n in ("a1", "b1", "a2", "b2")], Sampling(max_new_tokens=60))):
        spans = runs(c.loss_mask.tolist())
        assert spans[0][0]
        for (mine, _, end), (_, after, last) in pairwise(spans):
            if mine:
                assert policy().decode(c.token_ids[:end]).endswith("?") or c.token_ids[end - 1] in policy().eos_ids
                assert policy().decode(c.token_ids[after:last]).startswith("!")
                replies += 1
        assert c.length == sum(end - begin for mine, begin, end in spans if mine)
        assert not np.any(c.logps[~c.loss_mask])
        assert np.all(c.logps[c.loss_mask] < 0)
    assert replies > 16
    assert max(len(turns) for turns in echo.received) > 3


def test_the_environment_gets_the_turns_and_nothing_decoded_beyond_them() -> None:
    echo = Echo()
    (c,) = completions(sample([prompt_with("a", echo)], group_size=1, check_every=16))
    for turns in echo.received:
        assert all(turn.count("?") == turn.endswith("?") for turn in turns[::2])
        assert c.text.startswith("".join(turns))


def test_every_token_is_sampled_from_the_true_context() -> None:
    """transformers, on prompt, turns and replies together, gives each of the policy's tokens the same log-prob."""
    plain = policy().copy().model
    plain.set_attn_implementation("eager")
    for group in sample([prompt_with(n, Echo()) for n in "ab"]):
        for c in group.completions:
            logits_TV = next_logits(plain, group.prompt_ids, c.token_ids)
            expected = logits_TV.log_softmax(-1).numpy()[np.arange(len(c.token_ids)), c.token_ids]
            assert np.abs(expected - c.logps)[c.loss_mask].max() < 1e-4


@pytest.mark.parametrize(("slots", "check_every"), [(8, 1), (8, 7), (4, 4), (32, 16)])
def test_neither_the_round_size_nor_the_queue_changes_a_token(slots: int, check_every: int) -> None:
    prompts = [prompt_with(f"{n}{i}", Echo()) for i in range(2) for n in "ab"]
    usual, other = sample(prompts), sample(list(reversed(prompts)), slots=slots, check_every=check_every)
    one, two = completions(usual), completions(list(reversed(other)))
    if slots == 8:
        assert [bits(c) for c in one] == [bits(c) for c in two]
    assert [c.token_ids.tolist() for c in one] == [c.token_ids.tolist() for c in two]


def test_prompts_without_an_environment_are_sampled_as_ever() -> None:
    alone = completions(sample([prompt_with("a", None)]))
    beside = completions(sample([prompt_with("b", Echo()), prompt_with("a", None)])[1:])
    assert [bits(c) for c in alone] == [bits(c) for c in beside]
    assert all(c.loss_mask.all() for c in beside)


def test_random_numbers_of_the_environment_differ_by_sample_and_repeat() -> None:
    texts = [c.text for c in completions(sample([prompt_with("a", Echo())], group_size=8))]
    assert texts == [c.text for c in completions(sample([prompt_with("a", Echo())], group_size=8))]
    assert any("!!b" in text for text in texts)
    assert any("!!a" in text for text in texts)


def test_stop_strings_of_the_recipe_end_it_and_limits_cut_it() -> None:
    stopped = completions(sample([prompt_with("a", Echo())], Sampling(max_new_tokens=60, stop=("b",)), group_size=8))
    assert any(c.stop == "stop_string" and c.text.endswith("b") for c in stopped)
    assert all(c.text.count("b") <= 1 + c.text.count("!b") for c in stopped)
    amid_a_reply = 0
    for limit in range(5, 14):
        cut = completions(sample([prompt_with("a", Echo())], Sampling(max_new_tokens=limit), group_size=8))
        assert all(len(c.token_ids) == len(c.loss_mask) <= limit for c in cut)
        assert all(len(c.token_ids) == limit for c in cut if c.is_truncated)
        amid_a_reply += sum(c.is_truncated and not c.loss_mask[-1] for c in cut)
    assert amid_a_reply


def test_an_environment_that_fails_raises_one_message() -> None:
    class Broken(Echo):
        def reply(self, prompt: Prompt, turns: Sequence[str], dice: np.random.Generator) -> str | None:
            raise KeyError("rules")

    with pytest.raises(DataError, match="its environment failed: KeyError: 'rules'"):
        sample([prompt_with("a", Broken())])


def chat_policy() -> Policy:
    words = build_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    words.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    copy = policy().copy()
    copy.tokenizer = words
    return copy


def test_in_a_chat_a_reply_after_the_end_token_is_the_user_s_next_message() -> None:
    chat, prompt = chat_policy(), Prompt(id="c", messages=({"role": "user", "content": "a"},))
    ids = encode_reply(chat, prompt, "higher", ended=True)
    assert chat.tokenizer.decode(ids) == "\n<user>higher<end>\n<assistant>"
    assert chat.tokenizer.decode(encode_reply(chat, prompt, "42", ended=False)) == "42"
    assert chat.tokenizer.decode(encode_reply(chat, replace(prompt, messages=None, text="a"), "42", ended=True)) == "42"


def test_a_single_turn_template_raises_one_message() -> None:
    chat, prompt = chat_policy(), Prompt(id="c", messages=({"role": "user", "content": "a"},))
    chat.tokenizer.chat_template = "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}?"
    with pytest.raises(ModelError, match=r"(?s)^c: the model's chat template can't write it.*one turn"):
        encode_reply(chat, prompt, "higher", ended=True)


def test_only_the_policys_turns_of_a_demonstration_are_imitated() -> None:
    plain = Example(prompt_with("a", None), "ab?!!ab")
    ids, wrote = encode_example(policy(), replace(plain, turns=("ab?", "!!", "ab")))
    whole, every = encode_example(policy(), plain)
    assert ids.tolist() == whole.tolist()
    assert every.all()
    assert wrote.tolist() == [True] * 3 + [False] * 2 + [True] * 3


@dataclass
class LongEcho(Echo):
    """Replies with more tokens than are forced one by one, of a length that depends on the turn."""

    def reply(self, prompt: Prompt, turns: Sequence[str], dice: np.random.Generator) -> str | None:
        self.received.append(tuple(turns))
        return "!ab" * (12 + len(turns)) if len(turns) < 6 else None


LONG = Sampling(max_new_tokens=200)


def test_a_long_reply_is_prefilled_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probs after it are those of a plain forward, and it costs no decode steps."""
    steps = 0
    decode_step = TorchRunner._decode_step

    def counted(self: TorchRunner) -> SampledTokens:
        nonlocal steps
        steps += 1
        return decode_step(self)

    monkeypatch.setattr(TorchRunner, "_decode_step", counted)
    plain = policy().copy().model
    plain.set_attn_implementation("eager")
    groups = sample([prompt_with(n, LongEcho()) for n in "ab"], LONG, slots=8, check_every=1)
    replies = 0
    for group in groups:
        for c in group.completions:
            logits_TV = next_logits(plain, group.prompt_ids, c.token_ids)
            expected = logits_TV.log_softmax(-1).numpy()[np.arange(len(c.token_ids)), c.token_ids]
            assert np.abs(expected - c.logps)[c.loss_mask].max() < 1e-4
            assert not np.any(c.logps[~c.loss_mask])
            replies += sum(not mine for mine, _, _ in runs(c.loss_mask.tolist()))
            text = policy().decode(c.token_ids)
            assert "!ab" * 13 in text or len(c.token_ids) == 200 or c.loss_mask.all()
    assert replies > 4
    assert steps < max(c.length for c in completions(groups)) + 12


@pytest.mark.parametrize(("slots", "check_every"), [(8, 1), (8, 7), (4, 4)])
def test_neither_the_round_size_nor_the_queue_changes_what_follows_a_long_reply(slots: int, check_every: int) -> None:
    prompts = [prompt_with(f"{n}{i}", LongEcho()) for i in range(2) for n in "ab"]
    usual = sample(prompts, LONG)
    other = sample(list(reversed(prompts)), LONG, slots=slots, check_every=check_every)
    one, two = completions(usual), completions(list(reversed(other)))
    if slots == 8:
        assert [bits(c) for c in one] == [bits(c) for c in two]
    assert [c.token_ids.tolist() for c in one] == [c.token_ids.tolist() for c in two]


def test_a_long_reply_that_fills_the_sequence_ends_it() -> None:
    for limit in (40, 45, 46, 47, 48):
        for c in completions(sample([prompt_with("a", LongEcho())], Sampling(max_new_tokens=limit))):
            assert len(c.token_ids) == limit if c.stop == "length" else len(c.token_ids) <= limit


@dataclass
class Failing:
    """Its third episode can't begin."""

    open: int = 0
    begun: int = 0

    def begin(self, rollout: Rollout) -> Episode:
        self.begun += 1
        if self.begun == 3:
            raise RuntimeError("no sandbox is left")
        self.open += 1
        episode = PureEpisode(Echo(), rollout)

        def close() -> None:
            self.open -= 1

        episode.close = close  # type: ignore[method-assign]
        return episode


def test_episodes_that_have_begun_are_closed_if_another_cannot_begin() -> None:
    failing = Failing()
    with pytest.raises(RuntimeError, match="no sandbox"):
        build_requests(policy(), [prompt_with(n, failing) for n in "ab"], 2, SAMPLING, SampleKey(0, 1))
    assert (failing.begun, failing.open) == (3, 0)
