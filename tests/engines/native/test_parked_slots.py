"""Stateful environments: a slot is parked until its environment has answered, while others are decoded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.native.scheduler import Scheduler
from oncurve.engines.native.torch_runner import TorchRunner
from oncurve.engines.native.turns import PureEpisode, build_requests
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine as EngineSettings
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Completion, Group, Observation, Outcome, Prompt, Rollout, Turn
from tests.engines.native.plain import engine_for
from tests.engines.native.test_turns import Echo, LongEcho, bits, completions, policy, prompt_with, sample

Delay = Callable[[Rollout, Turn], float]


@dataclass
class SlowEcho:
    """The replies of an `Echo`, each after a delay, in a thread of its own."""

    delay: Delay
    echo: Echo = field(default_factory=Echo)
    calls: tuple[str, ...] = ("?",)
    tools: tuple[()] = ()
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    finished: list[tuple[str, int]] = field(default_factory=list)
    opened: int = 0
    closed: int = 0

    def begin(self, rollout: Rollout) -> SlowEpisode:
        self.opened += 1
        return SlowEpisode(self, PureEpisode(self.echo, rollout))


class SlowEpisode:
    def __init__(self, source: SlowEcho, pure: PureEpisode) -> None:
        self.source, self.pure, self.is_closed = source, pure, False

    def start(self) -> None:
        pass

    def answer(self, turn: Turn) -> Future[Observation]:
        rollout = self.pure.rollout
        self.source.asked.append((rollout.prompt.id, rollout.sample, turn.index))
        return later(lambda: self.pure.answer(turn).result(), self.source.delay(rollout, turn))

    def finish(self) -> Future[Outcome]:
        rollout = self.pure.rollout
        self.source.finished.append((rollout.prompt.id, rollout.sample))
        return later(lambda: Outcome(reward=float(rollout.sample)), 0.002)

    def close(self) -> None:
        self.source.closed += not self.is_closed
        self.is_closed = True


def later(compute: Callable[[], object], seconds: float) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        time.sleep(seconds)
        future.set_result(compute())

    threading.Thread(target=run, daemon=True).start()
    return future


def mixed(rollout: Rollout, turn: Turn) -> float:
    """Some answer at once, some after a few rounds."""
    return (0.0, 0.004, 0.02)[(turn.index + rollout.sample + len(rollout.prompt.id)) % 3]


@pytest.mark.parametrize("echo", [Echo, LongEcho])
def test_a_completion_has_the_same_bits_however_long_its_environment_takes(echo: type[Echo]) -> None:
    sampling = Sampling(max_new_tokens=120)
    names = ("a1", "b1", "a22", "b22")
    expected = completions(sample([prompt_with(n, echo()) for n in names], sampling))
    slow = SlowEcho(mixed, echo())
    given = completions(sample([prompt_with(n, slow) for n in names], sampling))
    assert [bits(c) for c in given] == [bits(c) for c in expected]
    assert [(c.text, c.stop) for c in given] == [(c.text, c.stop) for c in expected]
    assert len(slow.asked) == len(set(slow.asked)) > 16
    assert sorted(slow.finished) == [(n, s) for n in sorted(names) for s in range(4)]
    assert slow.opened == slow.closed == 16


def test_an_error_closes_every_episode_at_once() -> None:
    """Also of prompts whose turn did not come: those without an environment are sampled first."""
    slow = SlowEcho(mixed)

    def fail(index: int, group: Group) -> None:
        raise RuntimeError("a reward failed")

    for prompts in ([prompt_with("a", None), prompt_with("b", slow)], [prompt_with("a", slow)]):
        with pytest.raises(RuntimeError) as error:
            engine_for(policy(), 8).sample(prompts, 4, Sampling(max_new_tokens=20), SampleKey(seed=0, step=1), fail)
        assert slow.opened == slow.closed > 0, "while the error is still known"
        del error


class Replies(dict[str, str]):
    def add(self, key: str, reply: str) -> None:
        self[key] = reply


def test_a_conversation_that_begins_again_is_closed_too() -> None:
    """Recorded episodes of another step: their turns are not those that are sampled now."""
    slow, engine = SlowEcho(mixed), engine_for(policy(), 8)
    engine.replies = Replies()
    for step in (1, 2):
        engine.sample([prompt_with("a", slow)], 4, Sampling(max_new_tokens=60), SampleKey(seed=0, step=step))
    assert slow.opened > 4, "no conversation began again"
    assert slow.closed == slow.opened


def test_a_completion_records_its_turns_and_how_the_episode_ended() -> None:
    for sample_number, c in enumerate(completions(sample([prompt_with("a", SlowEcho(mixed))], Sampling(max_new_tokens=60)))):
        assert c.episode is not None
        assert c.episode.outcome.reward == sample_number
        spans = [(start, end) for start, end, _ in c.episode.turns]
        policy_tokens = [i for start, end in spans for i in range(start, end)]
        assert policy_tokens == np.flatnonzero(c.loss_mask).tolist()
        assert [o.reply is None for _, _, o in c.episode.turns[:-1]] == [False] * (len(spans) - 1)
    assert sample([prompt_with("a", Echo())])[0].completions[0].episode is None


def test_others_decode_while_one_environment_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample 0 waits for an event that is set only once all others are complete."""
    others = threading.Event()

    class Gated(SlowEcho):
        def begin(self, rollout: Rollout) -> SlowEpisode:
            episode = super().begin(rollout)
            if rollout.sample == 0:
                answer = episode.pure.answer

                def wait(turn: Turn) -> Future[Observation]:
                    assert others.wait(300), "the others did not finish"
                    return answer(turn)

                episode.pure.answer = wait  # type: ignore[method-assign]
            return episode

    slow = Gated(lambda rollout, turn: 0.0)
    finish = SlowEpisode.finish

    def counted(self: SlowEpisode) -> Future[Outcome]:
        if len(slow.finished) == 6:
            others.set()
        return finish(self)

    monkeypatch.setattr(SlowEpisode, "finish", counted)
    found = completions(sample([prompt_with("a", slow)], Sampling(max_new_tokens=60), slots=8, group_size=8))
    assert [bits(c) for c in found] == [
        bits(c) for c in completions(sample([prompt_with("a", Echo())], Sampling(max_new_tokens=60), slots=8, group_size=8))
    ]


def test_a_scheduler_with_nothing_to_decode_waits_without_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks a few times whether the environment has answered; a loop would ask thousands of times in 0.2 s."""
    asked, done = [0], Future.done

    def counted(self: Future[Any]) -> bool:
        asked[0] += 1
        return done(self)

    monkeypatch.setattr(Future, "done", counted)
    slow = SlowEcho(lambda rollout, turn: 0.2 if turn.index < 2 else 0.0)
    sample([prompt_with("a", slow)], Sampling(max_new_tokens=30), slots=1, group_size=1)
    answers = len(slow.asked) + len(slow.finished)
    assert answers > 1
    assert answers <= asked[0] <= 8 * answers


class PreemptingRunner(TorchRunner):
    """Refuses memory now and then, so that the youngest sequence, parked or not, is preempted."""

    refusals = 12
    calls = 0

    def reserve(self, slot: int, tokens: int) -> bool:
        self.calls += 1
        if self.refusals and self.calls % 5 == 0:
            self.refusals -= 1
            return False
        return True


def test_a_preempted_sequence_gets_the_answers_that_it_got_before() -> None:
    sampling, names = Sampling(max_new_tokens=100), ("a1", "b1")
    expected = completions(sample([prompt_with(n, Echo()) for n in names], sampling))
    slow = SlowEcho(mixed)
    found, runner = sample_with(PreemptingRunner, policy(), [prompt_with(n, slow) for n in names], sampling)
    assert runner.refusals == 0
    assert [bits(c) for c in found] == [bits(c) for c in expected]
    assert len(slow.asked) == len(set(slow.asked)), "an environment was asked twice"


@torch.inference_mode()
def sample_with(
    kind: type[PreemptingRunner], model: Policy, prompts: list[Prompt], sampling: Sampling, slots: int = 8
) -> tuple[list[Completion], PreemptingRunner]:
    requests = build_requests(model, prompts, 4, sampling, SampleKey(seed=0, step=1))
    plain = NativeEngine(model, EngineSettings(slots=slots, check_every=4)).build_runner(requests)
    assert isinstance(plain, TorchRunner)
    runner = kind(model, plain.cache, sampling, 4, forces=True)
    groups = dict(Scheduler(model, runner, requests).completions())
    return [c for g in range(len(prompts)) for c in groups[g]], runner
