"""Chat templates that rewrite history: the tokens stay as sampled, or with `history = "template"` a new sequence begins."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oncurve.agents.tool_environment import ToolEnvironment
from oncurve.engines.base import SampleKey
from oncurve.errors import RecipeError
from oncurve.models.loading.load import load_policy
from oncurve.models.policy import Policy
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.model import Model
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Completion, Group, History, Message, Observation, Outcome, Prompt, Rollout, Turn
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.runs.database.reader import RunReader
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
from oncurve.runs.step_notes import collect_notes
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.start import begin, resume
from tests.agents.test_agent_runs import KilledError, config, letters
from tests.agents.test_tool_environment import multiply
from tests.engines.native.plain import engine_for, next_logits
from tests.engines.native.test_parked_slots import PreemptingRunner, later, mixed, sample_with
from tests.engines.native.test_turns import SHAPE, bits, completions
from tests.training.test_trainer import fingerprint

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}b{{ m.content if loop.last else m.content.split('?')[-1] }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}!{{ m.content }}!{% else %}a{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}b{% endif %}"
)
"""Drops what comes before a question mark from earlier turns, as others drop thinking."""
SAMPLING = Sampling(max_new_tokens=60)


@cache
def policy() -> Policy:
    opened = load_policy(Model(tiny=SHAPE), alphabet="ab?!", seed=0)
    opened.tokenizer.chat_template = TEMPLATE
    return opened


@dataclass
class Talk:
    """Answers three turns with a tool's result, after a delay."""

    history: History
    calls = tools = ()

    def begin(self, rollout: Rollout) -> TalkEpisode:
        return TalkEpisode(rollout)


@dataclass
class TalkEpisode:
    rollout: Rollout

    def start(self) -> None:
        pass

    def answer(self, turn: Turn) -> Future[Observation]:
        message = {"role": "assistant", "content": turn.text}
        result = {"role": "tool", "name": "look", "content": "ab" * (1 + 20 * (turn.index == 1))}
        reply = None if turn.is_last or turn.index > 2 else (result,)
        return later(lambda: Observation(reply, message), mixed(self.rollout, turn))

    def finish(self) -> Future[Outcome]:
        return later(lambda: Outcome(reward=float(self.rollout.sample)), 0.0)

    def close(self) -> None:
        pass


def prompts(history: History) -> list[Prompt]:
    chats = {name: ({"role": "user", "content": name},) for name in ("ab", "ba", "aab")}
    return [Prompt(name, messages=chat, environment=Talk(history)) for name, chat in chats.items()]


def sample(history: History, slots: int = 6, check_every: int = 4) -> list[Group]:
    return engine_for(policy(), slots, check_every).sample(prompts(history), 4, SAMPLING, SampleKey(seed=0, step=1))


def sequences(group: Group, completion: Completion) -> list[tuple[np.ndarray, int, int]]:
    """(context, first token, end) of each sequence of a completion."""
    starts = [(0, group.prompt_ids), *completion.contexts]
    ends = [first for first, _ in starts[1:]] + [len(completion.token_ids)]
    return [(context, first, end) for (first, context), end in zip(starts, ends, strict=True)]


def test_each_sequence_follows_what_the_template_writes_of_the_conversation_so_far() -> None:
    """Against transformers alone: its chat template over the messages, and its log-probs of what follows."""
    plain = policy().copy().model
    plain.set_attn_implementation("eager")
    begun = continued = 0
    for group in sample("template"):
        for completion in group.completions:
            assert completion.episode is not None
            messages: list[Message] = list(group.prompt.messages or ())
            contexts = {first: context.tolist() for context, first, _ in sequences(group, completion)}
            for index, (start, end, observation) in enumerate(completion.episode.turns):
                written = policy().tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
                _, first, _ = [s for s in sequences(group, completion) if s[1] <= start][-1]
                stream = [*contexts[first], *completion.token_ids[first:start].tolist()]
                if start == first:
                    assert stream == written["input_ids"]
                    begun += index > 0
                else:
                    texts = [policy().tokenizer.decode(ids) for ids in (stream, written["input_ids"])]
                    assert texts[0] == texts[1]
                    continued += 1
                assert completion.loss_mask[start:end].all()
                assert observation.message is not None
                messages += [observation.message, *(observation.reply or ())]
            for context, first, end in sequences(group, completion):
                logits_TV = next_logits(plain, context, completion.token_ids[first:end])
                expected = logits_TV.log_softmax(-1).numpy()[np.arange(end - first), completion.token_ids[first:end]]
                mask = completion.loss_mask[first:end]
                assert np.abs(expected - completion.logps[first:end])[mask].max() < 1e-4
            assert len(completion.token_ids) <= SAMPLING.max_new_tokens
    assert begun > 5
    assert continued > 3


def test_by_default_the_tokens_stay_as_sampled_and_the_log_says_so_once() -> None:
    with collect_notes() as notes:
        groups = [group for _ in range(2) for group in sample("tokens")]
    assert all(not completion.contexts for completion in completions(groups))
    assert [note.kind for note in notes] == ["history"]
    assert 'task.history = "template"' in notes[0].message


@pytest.mark.parametrize("threads", [1, 2])
def test_neither_slots_nor_delays_nor_preemption_change_a_bit(threads: int) -> None:
    """Delays decide which slot a sequence gets. On two threads a product of 6 rows would round its last two differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same_bits()
    finally:
        torch.set_num_threads(before)


def assert_same_bits() -> None:
    expected = [bits(c) for c in completions(sample("template"))]
    assert [bits(c) for c in completions(sample("template", check_every=9))] == expected
    preempted, runner = sample_with(PreemptingRunner, policy(), prompts("template"), SAMPLING, slots=6)
    assert runner.refusals == 0
    assert [bits(c) for c in preempted] == expected


def test_one_that_writes_no_more_than_fits_ends_as_truncated() -> None:
    """A completion has as many tokens as `max_new_tokens` in all of its sequences."""
    for limit in (6, 11, 17):
        sampling = Sampling(max_new_tokens=limit)
        groups = engine_for(policy(), 6).sample(prompts("template"), 4, sampling, SampleKey(seed=0, step=1))
        for group in groups:
            for completion in group.completions:
                assert 0 < len(completion.token_ids) <= limit
                assert all(len(context) < len(group.prompt_ids) + limit for _, context in completion.contexts)
        assert any(completion.is_truncated for completion in completions(groups))


def task() -> PromptList:
    listed = PromptList.of([[{"role": "user", "content": text}] for text in ("ab", "ba", "aab", "bba")])
    return replace(listed, train=tuple(replace(prompt, environment=Talk("template")) for prompt in listed.train))


def rewards() -> RewardMix:
    return RewardMix([FunctionReward(letters, "f")])


def test_both_sequences_are_trained_as_what_they_were_and_a_killed_run_ends_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = begin(config(), out=tmp_path / "whole", task=task(), rewards=rewards(), policy=policy().copy())
    with RunReader.open(whole.path) as store:
        report = store.step("grpo", 1)
    recorded = [completion for group in report.groups for completion in group.group.completions]
    assert any(completion.contexts for completion in recorded)
    assert report.metrics["mismatch_max"] < 1e-4, "the learner computes what was sampled, in each sequence's own context"
    for graded in report.groups:
        assert all(len(set(advantages.tolist())) == 1 for advantages in graded.advantages), "sequences share their advantage"
    record, left = RunWriter.record_replies, 19

    def killed(self: RunWriter, stage: str, step: int, kind: str, replies: Mapping[str, str]) -> None:
        nonlocal left
        if left == 0:
            raise KilledError
        left -= 1
        record(self, stage, step, kind, replies)  # type: ignore[arg-type]

    monkeypatch.setattr(RunWriter, "record_replies", killed)
    with pytest.raises(KilledError):
        begin(config(), out=tmp_path / "killed", task=task(), rewards=rewards(), policy=policy().copy())
    monkeypatch.setattr(RunWriter, "record_replies", record)
    resume(RunFolder(tmp_path / "killed"), task=task(), rewards=rewards(), policy=policy().copy())
    assert fingerprint(RunFolder(tmp_path / "killed")) == fingerprint(whole)


def test_the_key_and_the_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="history"):
        ToolEnvironment([multiply], history="all")  # type: ignore[arg-type]
    assert Prompt("p", environment=ToolEnvironment([multiply], history="template")).history == "template"
    recipe: dict[str, Any] = {
        "name": "shop",
        "task": {"type": "file", "path": "rows.jsonl", "chat": True, "tools": ["tools.py:f"], "history": "template"},
        "rewards": [{"type": "answer"}],
    }
    assert parse_recipe({**recipe, "stages": [{"type": "grpo", "steps": 1}]})
    with pytest.raises(RecipeError, match="several sequences"):
        parse_recipe({**recipe, "stages": [{"type": "rejection_sample"}]})
