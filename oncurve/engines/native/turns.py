"""Completions in several turns: when the policy's turn ends, the environment replies and sampling continues in the same slot.

The slot goes back to the turn's last token: what was decoded beyond it is discarded. A short reply is then forced: each of its
tokens is fed in a decode step like all others, in place of the sampled token. A long reply, such as the text that a tool has
found, is prefilled in one pass. Its tokens are in the context, their log-probs count as 0, and ``loss_mask`` is False on them.
Random numbers belong to positions, so it does not matter how often turns are checked, or how long a reply takes.

Every environment is asked in the same way, through an `Episode`. One that is a pure function replies at once.
"""

from __future__ import annotations

from collections import abc
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar, cast
from weakref import WeakSet

import numpy as np

from oncurve.agents.episode_record import (
    END,
    START,
    UNFINISHED,
    decode_observation,
    decode_outcome,
    decode_start,
    encode_observation,
    encode_outcome,
    encode_start,
    episode_key,
    turn_hash,
)
from oncurve.engines.base import ReplyStore, SampleKey, SampleRequest, encode_prompts
from oncurve.engines.native.sequence import Sequence
from oncurve.errors import ChangedTextError, DataError, ModelError
from oncurve.models.chat_template import encode_reply, find_rewriting
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import (
    Environment,
    Episode,
    Ints,
    Observation,
    Outcome,
    Prompt,
    Reply,
    Rollout,
    StatefulEnvironment,
    StopReason,
    Turn,
)
from oncurve.rng import philox_generator
from oncurve.runs.step_notes import note

T = TypeVar("T")
DIFFERENT = "its environment began with different texts"
SAME_PROMPT = "a group compares completions of the same prompt"
SAME_TEXT = "let `reset` return a text that depends on the row alone, such as on its `seed`; give each problem its own row"


class PureEpisode:
    """A conversation with an `Environment`, whose replies are a pure function of the turns."""

    def __init__(self, environment: Environment, rollout: Rollout) -> None:
        self.environment, self.rollout = environment, rollout
        self.turns: tuple[str, ...] = ()

    def start(self) -> None:
        """The policy has the first turn."""

    def answer(self, turn: Turn) -> Future[Observation]:
        if turn.is_last:
            return _done(Observation(None))
        rollout, turns = self.rollout, (*self.turns, turn.text)
        purpose = f"environment/{rollout.step}/{rollout.prompt.id}/{rollout.sample}"
        try:
            reply = self.environment.reply(rollout.prompt, turns, philox_generator(rollout.seed, purpose, len(turns)))
        except Exception as error:  # an environment may be user code
            raise DataError(
                rollout.prompt.id,
                f"its environment failed: {type(error).__name__}: {error}",
                because="the completion can't continue without a reply",
                fix="correct the environment; to end the completion it returns None",
            ) from error
        self.turns = (*turns, reply or "")
        return _done(Observation(reply))

    def finish(self) -> None:
        """The completion's text says everything."""

    def close(self) -> None:
        """It holds nothing."""


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def begin_episode(policy: Policy, prompt: Prompt, key: SampleKey, sample: int) -> Episode:
    """The conversation of one completion with its prompt's environment."""
    environment, rollout = prompt.environment, Rollout(prompt, key.seed, key.step, sample, policy.tokenizer)
    if hasattr(environment, "reply"):
        return PureEpisode(cast(Environment, environment), rollout)
    return cast(StatefulEnvironment, environment).begin(rollout)


class FailedEpisode:
    """A conversation that could not begin again. Its completion ends after its turn and is left out of its group."""

    def __init__(self, failure: str) -> None:
        self.failure = failure

    def start(self) -> None:
        """There is nothing to wait for."""

    def answer(self, turn: Turn) -> Future[Observation]:
        return _done(Observation(None, failure=self.failure))

    def finish(self) -> Future[Outcome]:
        return _done(Outcome(failure=self.failure))

    def close(self) -> None:
        """It holds nothing."""


class RecordedEpisode:
    """A finished episode of an earlier try of the step, which gives the same answers to the same turns."""

    def __init__(self, replies: ReplyStore, prompt: Prompt, sample: int) -> None:
        self.replies, self.prompt, self.sample = replies, prompt, sample

    def start(self) -> Future[str | None] | None:
        stored = self.replies.get(episode_key(self.prompt, self.sample, START))
        return None if stored is None else _done(decode_start(stored))

    def answer(self, turn: Turn) -> Future[Observation] | None:
        stored = self.replies.get(episode_key(self.prompt, self.sample, turn.index))
        if stored is None:
            return None
        _, _, recorded, observation = decode_observation(stored)
        return _done(observation) if recorded == turn_hash(turn.token_ids) else None

    def finish(self) -> Future[Outcome]:
        stored = self.replies.get(episode_key(self.prompt, self.sample, END))
        assert stored is not None
        return _done(decode_outcome(stored))

    def close(self) -> None:
        """It holds nothing."""


def build_requests(
    policy: Policy,
    prompts: abc.Sequence[Prompt],
    group_size: int,
    sampling: Sampling,
    key: SampleKey,
    replies: ReplyStore | None = None,
) -> list[SampleRequest]:
    """Starts the episodes of all prompts, and returns a request for each prompt, with the text that its environment adds.

    All episodes start at the same time, and this waits for the slowest. Episodes that finished in an earlier attempt at this
    step are replayed; unfinished ones start again. If a group's environment now begins with a different text, the finished
    episodes belong to another prompt: their records are dropped, and all episodes of the group start again. If this call adds
    samples to a group that already has some, a different text raises ChangedTextError instead.
    """
    episodes: list[list[Episode]] = [[] for _ in prompts]
    given, prompts = prompts, [without_observation(prompt) for prompt in prompts]
    restarted = dropped = 0
    try:
        for prompt, group in zip(prompts, episodes, strict=True):
            for sample in range(key.first, key.first + (group_size if prompt.environment is not None else 0)):
                if replies is not None and replies.get(episode_key(prompt, sample, END)) not in (None, UNFINISHED):
                    group.append(RecordedEpisode(replies, prompt, sample))
                else:
                    restarted += replies is not None and replies.get(episode_key(prompt, sample, 0)) is not None
                    group.append(begin_episode(policy, prompt, key, sample))
        if restarted:
            note("episodes", f"{restarted} unfinished episodes start again, with new instances of their environment")
        started = [[episode.start() for episode in group] for group in episodes]
        texts = [_texts(group) for group in started]
        for index, prompt in enumerate(prompts):
            if key.first:
                _check_text(prompt, given[index].added, texts[index])
            if replies is None or not _has_other_record(episodes[index], texts[index]):
                continue
            dropped += sum(isinstance(episode, RecordedEpisode) for episode in episodes[index])
            for sample, episode in enumerate(episodes[index], start=key.first):
                episode.close()
                drop_record(replies, prompt, sample)
                episodes[index][sample - key.first] = begin_episode(policy, prompt, key, sample)
            started[index] = [episode.start() for episode in episodes[index]]
            texts[index] = _texts(started[index])
        if dropped:
            note("episodes", f"{dropped} finished episodes start again: their environment now begins with another text")
        if replies is not None:
            for prompt, group_started, group_texts in zip(prompts, started, texts, strict=True):
                for sample, (start, text) in enumerate(zip(group_started, group_texts, strict=True), start=key.first):
                    if start is not None:
                        replies.add(episode_key(prompt, sample, START), encode_start(text))
        prompts = [
            with_observation(prompt, [before.added, *begins])
            for prompt, before, begins in zip(prompts, given, texts, strict=True)
        ]
        prompt_ids = encode_prompts(policy, prompts, sampling)
    except BaseException:
        for begun in episodes:
            for episode in begun:
                episode.close()
        raise
    return [
        SampleRequest(prompt, ids, group_size, sampling, key, episodes=tuple(begun))
        for prompt, ids, begun in zip(prompts, prompt_ids, episodes, strict=True)
    ]


def _texts(started: abc.Sequence[Future[str | None] | None]) -> list[str | None]:
    return [None if start is None else start.result() for start in started]


def _has_other_record(group: abc.Sequence[Episode], texts: abc.Sequence[str | None]) -> bool:
    """Whether finished episodes of a group began with another text than those that begin now."""
    recorded = {text for episode, text in zip(group, texts, strict=True) if isinstance(episode, RecordedEpisode)} - {None}
    now = {text for episode, text in zip(group, texts, strict=True) if not isinstance(episode, RecordedEpisode)} - {None}
    return bool(recorded) and not now <= recorded


def _check_text(prompt: Prompt, added: str | None, texts: abc.Sequence[str | None]) -> None:
    """Raises ChangedTextError if a group's earlier samples follow another text than ``texts``."""
    other = next((text for text in texts if text is not None and text != added), None)
    if other is not None:
        raise ChangedTextError(prompt.id, f"{DIFFERENT}: {added!r:.60} and {other!r:.60}", because=SAME_PROMPT, fix=SAME_TEXT)


def drop_record(replies: ReplyStore, prompt: Prompt, sample: int) -> None:
    """An episode that had finished is not finished any more, so that its record is not replayed."""
    if replies.get(episode_key(prompt, sample, END)) is not None:
        replies.add(episode_key(prompt, sample, END), UNFINISHED)


def record_answer(replies: ReplyStore | None, sequence: Sequence, observation: Observation) -> None:
    """Store what a stateful environment has answered to the sequence's last turn."""
    if replies is None or isinstance(sequence.episode, PureEpisode | RecordedEpisode):
        return
    index = sequence.turns - 1
    stored = encode_observation(observation, sequence.answers[index][0], sequence.tokens_before + sequence.spans[-1][0])
    replies.add(episode_key(sequence.first.request.prompt, sequence.sample, index), stored)


def end_episode(replies: ReplyStore | None, sequence: Sequence, outcome: Outcome) -> None:
    """Store how a sequence's episode has ended."""
    sequence.outcome = outcome
    if replies is not None and not isinstance(sequence.episode, RecordedEpisode):
        replies.add(episode_key(sequence.first.request.prompt, sequence.sample, END), encode_outcome(outcome))


def with_observation(prompt: Prompt, texts: abc.Sequence[str | None]) -> Prompt:
    """A prompt with the text that its environment begins with, at the end of its last message."""
    different = list(dict.fromkeys(text for text in texts if text is not None))
    if not different:
        return prompt
    if len(different) > 1:
        raise DataError(
            prompt.id,
            f"{DIFFERENT}: {different[0]!r:.60} and {different[1]!r:.60}",
            because=SAME_PROMPT,
            fix=SAME_TEXT,
        )
    added = different[0]
    if prompt.messages is None:
        return replace(prompt, text=f"{prompt.text}{added}", added=added)
    *before, last = prompt.messages
    return replace(prompt, messages=(*before, {**last, "content": f"{last['content']}{added}"}), added=added)


def without_observation(prompt: Prompt) -> Prompt:
    """The prompt as it was before its environment began, to extend a group or to begin an episode again."""
    if prompt.added is None:
        return prompt
    if prompt.messages is None:
        return replace(prompt, text=str(prompt.text).removesuffix(prompt.added), added=None)
    *before, last = prompt.messages
    return replace(prompt, messages=(*before, {**last, "content": last["content"].removesuffix(prompt.added)}), added=None)


def ask(policy: Policy, sequence: Sequence, token_ids: Ints, stop: StopReason, *, is_last: bool) -> Future[Observation] | None:
    """The answer to the turn that has just ended after ``token_ids`` of the sequence.

    A preempted sequence gets the answer that it got before. None if it now wrote something different, with other weights or on
    another machine: the conversation must start again.
    """
    assert sequence.episode is not None
    index, turn_ids = sequence.turns, token_ids[sequence.turn_start :].copy()
    if index == len(sequence.answers):
        text = policy.decode(turn_ids[: len(turn_ids) - (stop == "end")])
        context_ids = np.concatenate((sequence.request.prompt_ids, token_ids[: sequence.turn_start]))
        new = sequence.episode.answer(Turn(index, turn_ids, text, is_last, context_ids))
        if new is None:
            return None
        sequence.answers.append((turn_ids, new))
    asked_ids, answer = sequence.answers[index]
    if asked_ids.tolist() != turn_ids.tolist():
        return None
    sequence.spans.append((sequence.turn_start, len(token_ids)))
    return answer


_SAID: WeakSet[Policy] = WeakSet()
"""Policies for which a note already says that the chat template rewrites history."""


def following_tokens(
    policy: Policy, sequence: Sequence, token_ids: Ints, reply: Reply, *, ended: bool
) -> tuple[list[int], Ints | None]:
    """The tokens of the reply to a turn of the policy, which ended after ``token_ids`` of its sequence. With them, the context
    of a new sequence, if the chat template writes the conversation in another way and the prompt's history is the template's.
    """
    prompt = sequence.first.request.prompt
    by_template = prompt.history == "template"
    try:
        reply_ids = encode_reply(policy, prompt, reply, ended=ended)
    except ModelError:  # the template rewrites the turn before a reply
        context_ids = _encode_conversation(policy, sequence) if by_template else None
        if context_ids is None:
            raise
        return [], context_ids
    if not by_template and policy in _SAID:
        return reply_ids, None
    try:
        context_ids = _encode_conversation(policy, sequence)
    except ModelError:
        if by_template:
            raise
        return reply_ids, None
    if context_ids is None:
        return reply_ids, None
    sampled_ids = np.concatenate((sequence.request.prompt_ids, token_ids, np.asarray(reply_ids, np.int64)))
    rewriting = find_rewriting(policy, sampled_ids, context_ids)
    if rewriting is None or by_template:
        return reply_ids, None if rewriting is None else context_ids
    _SAID.add(policy)
    note("history", rewriting)
    return reply_ids, None


def _encode_conversation(policy: Policy, sequence: Sequence) -> Ints | None:
    """The conversation up to the last reply as the chat template writes it; None if it is no chat."""
    prompt = sequence.first.request.prompt
    messages = list(prompt.messages or ())
    for _, answer in sequence.answers[: sequence.turns]:
        message, reply = answer.result().message, answer.result().reply
        if not messages or message is None or not isinstance(reply, tuple):
            return None
        messages += [message, *reply]
    return policy.encode(replace(prompt, messages=tuple(messages)))


def restart_episode(policy: Policy, sequence: Sequence, replies: ReplyStore | None) -> None:
    """Begin a completion's conversation again from its first sequence, with a new instance of the environment."""
    request, sample = sequence.request, sequence.sample
    assert sequence.episode is not None
    sequence.episode.close()
    sequence.restart()
    prompt = without_observation(request.prompt)
    if replies is not None:
        drop_record(replies, prompt, sample)
    sequence.answers, sequence.episode = [], begin_episode(policy, prompt, request.key, sample)
    start = sequence.episode.start()
    text = None if start is None else start.result()
    if text is not None and text != request.prompt.added:
        sequence.episode.close()
        sequence.episode = FailedEpisode(
            f"its environment began again with {text!r:.60}, and the group's prompt has {request.prompt.added!r:.60}"
        )
