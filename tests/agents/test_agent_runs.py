"""Runs with stateful environments: what is recorded, and how a killed run resumes."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from oncurve.agents.episode_record import END, UNFINISHED
from oncurve.engines.base import SampleKey
from oncurve.errors import ChangedTextError, DataError
from oncurve.recipe.schema.sections import Sampling
from oncurve.recipe.schema.stages import Curriculum
from oncurve.records import Outcome, Prompt, Rollout
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.rewards.reply_cache import ReplyCache
from oncurve.runs.database.reader import RunReader
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
from oncurve.runs.step_notes import collect_notes
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.start import begin, resume
from tests.engines.native.plain import engine_for
from tests.engines.native.test_parked_slots import SlowEcho, SlowEpisode, later, mixed
from tests.engines.native.test_turns import Echo, bits, completions, policy, prompt_with
from tests.training.builders import recipe
from tests.training.test_trainer import fingerprint


class Impure(Echo):
    """Counts all of its replies: no two episodes are alike."""

    numbers = itertools.count()

    def reply(self, prompt: Prompt, turns: object, dice: object) -> str | None:
        number = next(self.numbers)
        return "ab"[number % 2] * (1 + number % 5) if len(turns) < 8 else None  # type: ignore[arg-type]


def sample(environment: SlowEcho, cache: ReplyCache) -> list[tuple[bytes, ...]]:
    engine = engine_for(policy(), 8, 4)
    engine.replies = cache
    prompts = [prompt_with(n, environment) for n in ("a1", "b1")]
    return [bits(c) for c in completions(engine.sample(prompts, 4, Sampling(max_new_tokens=60), SampleKey(0, 1)))]


def test_a_repeated_step_replays_finished_episodes_and_begins_the_others_again() -> None:
    cache, stored = ReplyCache(), dict[str, str]()
    cache.load({}, stored.update)
    first = sample(SlowEcho(mixed, Impure()), cache)
    assert sum(key.endswith(END) for key in stored) == 8
    again = SlowEcho(mixed, Impure())
    cache.load(stored)
    assert sample(again, cache) == first, "an impure environment is replayed from its record"
    assert again.opened == 0
    partial = {key: reply for key, reply in stored.items() if key not in ("episode/a1/2/end", "episode/b1/0/end")}
    cache.load(partial)
    fresh = SlowEcho(mixed, Impure())
    with collect_notes() as notes:
        repeated = sample(fresh, cache)
    assert fresh.opened == 2
    assert "2 unfinished episodes start again" in notes[0].message
    assert [a == b for a, b in zip(repeated, first, strict=True)].count(True) >= 6


def test_an_episode_whose_record_is_of_another_text_begins_again() -> None:
    """Resumed on another machine, a sampler may choose otherwise at a near tie."""
    cache, stored = ReplyCache(), dict[str, str]()
    cache.load({}, stored.update)
    first = sample(SlowEcho(mixed), cache)
    wrong = {
        key: reply.replace('"turn":"', '"turn":"x') if key.startswith("episode/a1/") else reply for key, reply in stored.items()
    }
    cache.load(wrong)
    environment = SlowEcho(mixed)
    assert sample(environment, cache) == first
    assert environment.opened == 4


class Dated(SlowEcho):
    """Begins with a text that changes between two runs, but not within one."""

    def __init__(self, text: str) -> None:
        super().__init__(mixed)
        self.text = text

    def begin(self, rollout: Rollout) -> SlowEpisode:
        episode = super().begin(rollout)
        episode.start = lambda: later(lambda: self.text, 0.0)  # type: ignore[assignment,method-assign]
        return episode


def test_a_group_whose_environment_begins_with_another_text_starts_again() -> None:
    """Its finished completions follow another prompt than those that begin now."""
    cache, stored = ReplyCache(), dict[str, str]()
    cache.load({}, stored.update)
    first = sample(Dated("aa"), cache)
    del stored["episode/a1/2/end"]
    cache.load(stored, stored.update)
    changed = Dated("bb")
    with collect_notes() as notes:
        again = sample(changed, cache)
    assert changed.opened == 1 + 4, "one began with the new text, so the group began again"
    assert "3 finished episodes start again" in notes[-1].message
    assert [a == b for a, b in zip(again, first, strict=True)] == [False] * 4 + [True] * 4
    cache.load(stored)
    later_text = Dated("ab")
    assert sample(later_text, cache) == again
    assert later_text.opened == 0


def test_an_episode_that_can_only_begin_again_with_another_text_is_left_out() -> None:
    """Its group's prompt has the text of the record, and other completions of the group have been sampled after it."""
    cache, stored = ReplyCache(), dict[str, str]()
    cache.load({}, stored.update)
    sample(Dated("aa"), cache)
    key = "episode/a1/2/0"
    cache.load({**stored, key: stored[key].replace('"turn":"', '"turn":"x')}, stored.update)
    engine = engine_for(policy(), 8, 4)
    engine.replies = cache
    (group,) = engine.sample([prompt_with("a1", Dated("bb"))], 4, Sampling(max_new_tokens=60), SampleKey(0, 1))
    failures = [None if c.episode is None else c.episode.outcome.failure for c in group.completions]
    assert failures == [None, None, "its environment began again with 'bb', and the group's prompt has 'aa'", None]
    assert group.prompt.text == "abababaaa"


def test_a_group_that_is_extended_follows_the_same_prompt() -> None:
    engine = engine_for(policy(), 8, 4)
    (four,) = engine.sample([prompt_with("a1", Dated("bb"))], 4, Sampling(max_new_tokens=60), SampleKey(0, 1))
    (first,) = engine.sample([prompt_with("a1", Dated("bb"))], 2, Sampling(max_new_tokens=60), SampleKey(0, 1))
    (more,) = engine.sample([first.prompt], 2, Sampling(max_new_tokens=60), SampleKey(0, 1, first=2))
    assert more.prompt.text == first.prompt.text == "abababa" + "bb"
    assert [bits(c) for c in (*first.completions, *more.completions)] == [bits(c) for c in four.completions]
    changed = replace(first.prompt, environment=Dated("ab"))
    with pytest.raises(DataError, match="different texts"):
        engine.sample([changed], 2, Sampling(max_new_tokens=60), SampleKey(0, 1, first=2))


class KilledError(BaseException):
    """The process is gone."""


def task(environment: SlowEcho) -> PromptList:
    prompts = PromptList.of(["aba", "bab", "abb", "baa"])
    with_environment = tuple(replace(prompt, environment=environment) for prompt in prompts.train)
    return replace(prompts, train=with_environment, alphabet="ab?!")


def letters(text: str) -> float:
    return text.count("a") / 10


def run_of(tmp_path: Path, name: str, environment: SlowEcho) -> RunFolder:
    rewards = RewardMix([FunctionReward(letters, "f")])
    return begin(config(), out=tmp_path / name, task=task(environment), rewards=rewards)


def config() -> Any:
    built = recipe("grpo.steps=2", "grpo.prompts_per_step=2", "grpo.sampling.max_new_tokens=30")
    return built.model_copy(update={"stages": built.stages[1:]})


@pytest.mark.parametrize("writes", [0, 1, 5, 13, 29])
def test_a_run_killed_while_environments_answer_resumes_to_the_same_bits(
    writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_of(tmp_path, "whole", SlowEcho(mixed))
    with RunReader.open(whole.path) as store:
        recorded = store.step("grpo", 1).groups
        observations = store.replies("grpo", 1)
    assert all(c.episode is not None for group in recorded for c in group.group.completions)
    assert len([key for key in observations if key.startswith("episode/")]) > 16
    record, left = RunWriter.record_replies, writes

    def killed(self: RunWriter, stage: str, step: int, kind: str, replies: Mapping[str, str]) -> None:
        nonlocal left
        if left == 0:
            raise KilledError
        left -= 1
        record(self, stage, step, kind, replies)  # type: ignore[arg-type]

    monkeypatch.setattr(RunWriter, "record_replies", killed)
    with pytest.raises(KilledError):
        run_of(tmp_path, "killed", SlowEcho(mixed))
    monkeypatch.setattr(RunWriter, "record_replies", record)
    run, environment = RunFolder(tmp_path / "killed"), SlowEcho(mixed)
    resume(run, task=task(environment), rewards=RewardMix([FunctionReward(letters, "f")]))
    assert fingerprint(run) == fingerprint(whole)
    assert environment.opened <= 16


def test_a_run_whose_environment_begins_with_another_text_each_time_resumes_after_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It equals a replay of its own record."""
    record, left = RunWriter.record_replies, 0

    def killed(self: RunWriter, stage: str, step: int, kind: str, replies: Mapping[str, str]) -> None:
        nonlocal left
        record(self, stage, step, kind, replies)  # type: ignore[arg-type]
        left -= sum(key.endswith(END) and reply != UNFINISHED for key, reply in replies.items())
        if left == 0:
            raise KilledError

    monkeypatch.setattr(RunWriter, "record_replies", killed)
    rewards = RewardMix([FunctionReward(letters, "f")])
    for ended, text in ((2, "a"), (3, "bb")):
        left, run = ended, RunFolder(tmp_path / "killed")
        train = (
            partial(resume, run, rewards=rewards)
            if run.path.exists()
            else partial(begin, config(), out=run.path, rewards=rewards)
        )
        with pytest.raises(KilledError):
            train(task=task(Dated(text)))
    monkeypatch.setattr(RunWriter, "record_replies", record)
    resume(run, task=task(Dated("ab")), rewards=rewards)
    expected = fingerprint(run)
    with RunReader.open(run.path) as store:
        found = [re.search(r"(\d+) finished episodes start again", event.message) for event in store.events("episodes")]
    assert [match[1] for match in found if match is not None] == ["3"], "the killed steps' notes are lost"
    for checkpoint in run.checkpoints.iterdir():
        shutil.rmtree(checkpoint)
    run.set_status("interrupted")
    replayed = Dated("ba")
    resume(run, task=task(replayed), rewards=rewards)
    assert fingerprint(run) == expected
    assert replayed.opened == 0


@pytest.mark.parametrize("ended", [4, 5, 7])
def test_a_step_whose_groups_are_extended_on_another_day_starts_again(
    ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the first two samples of both groups, and after some of the others. It equals a replay of its record, and a
    run that began on that day."""
    stage = config().stages[0].model_copy(update={"curriculum": Curriculum(first_samples=2)})
    extended = config().model_copy(update={"stages": (stage,)})
    rewards = RewardMix([FunctionReward(letters, "f")])
    today = begin(extended, out=tmp_path / "today", task=task(Dated("bb")), rewards=rewards)
    record, left = RunWriter.record_replies, ended

    def killed(self: RunWriter, stage: str, step: int, kind: str, replies: Mapping[str, str]) -> None:
        nonlocal left
        record(self, stage, step, kind, replies)  # type: ignore[arg-type]
        left -= sum(key.endswith(END) and reply != UNFINISHED for key, reply in replies.items())
        if left == 0:
            raise KilledError

    monkeypatch.setattr(RunWriter, "record_replies", killed)
    run = RunFolder(tmp_path / "killed")
    with pytest.raises(KilledError):
        begin(extended, out=run.path, task=task(Dated("a")), rewards=rewards)
    monkeypatch.setattr(RunWriter, "record_replies", record)
    resume(run, task=task(Dated("bb")), rewards=rewards)
    assert fingerprint(run) == fingerprint(today)
    with RunReader.open(run.path) as store:
        found = [event.message for event in store.events("episodes") if " finished episodes start again" in event.message]
        shown = [graded.group.prompt.shown for graded in store.step("grpo", 1).groups]
    assert found == [f"grpo 1: {ended} finished episodes start again: their environment now begins with another text"]
    assert all(text.endswith("bb") for text in shown)
    for checkpoint in run.checkpoints.iterdir():
        shutil.rmtree(checkpoint)
    run.set_status("interrupted")
    replayed = Dated("ba")
    resume(run, task=task(replayed), rewards=rewards)
    assert fingerprint(run) == fingerprint(today)
    assert replayed.opened == 0


def test_an_environment_that_begins_with_another_text_each_time_ends_the_step(tmp_path: Path) -> None:
    """It starts again once."""

    class Counting(Dated):
        def begin(self, rollout: Rollout) -> SlowEpisode:
            self.text = "ab" * self.opened
            return super().begin(rollout)

    stage = config().stages[0].model_copy(update={"curriculum": Curriculum(first_samples=1)})
    environment = Counting("")
    with pytest.raises(ChangedTextError, match="different texts"):
        begin(
            config().model_copy(update={"stages": (stage,)}),
            out=tmp_path / "run",
            task=task(environment),
            rewards=RewardMix([FunctionReward(letters, "f")]),
        )
    assert environment.opened == 2 * (2 + 6)


def test_a_hung_or_failed_episode_is_left_out_of_its_group(tmp_path: Path) -> None:
    class Failing(SlowEcho):
        def begin(self, rollout: Rollout) -> SlowEpisode:
            episode = super().begin(rollout)
            if rollout.sample == 1:
                episode.finish = lambda: later(lambda: Outcome(failure="it hangs"), 0.0)  # type: ignore[method-assign]
            return episode

    built = config()
    stages = (built.stages[0].model_copy(update={"max_failure_share": 0.5, "steps": 1}),)
    run = begin(
        built.model_copy(update={"stages": stages}),
        out=tmp_path / "run",
        task=task(Failing(mixed)),
        rewards=RewardMix([FunctionReward(letters, "f")]),
    )
    with RunReader.open(run.path) as store:
        report = store.step("grpo", 1)
    assert report.metrics["failure_share"] == 0.25
    for group in report.groups:
        assert [s.failure for s in group.scored.scored] == [None, "it hangs", None, None]
        assert group.graded == (True, False, True, True)
